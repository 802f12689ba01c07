"""All participations revealed: a deterministic bound for every scheme, and for algorithm 3 on every graph.

Given the participations the outputs are those of a Gaussian mechanism with sensitivity `|C x|`, x the unit's
counts. Participations have the same distribution with and without the unit, so by
joint convexity, in both directions,

    H <= E_x delta_Gauss(epsilon; |C x| / sigma)                    (proofs/shared_examples.md, theorem 6),

and for replace-one, where the means are `C x` and `-C x`, with twice the length.

It is far below the bound with the maximum number of participations where these are rare, and has no
amplification by sampling within a step.
"""

import numpy as np
import scipy

from jaxacct.accountants.base import Accountant, cross_term
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import BMinSep

_MAX_CELLS = 50_000_000  # of the convolutions; beyond, counts are replaced by their maximum


def participation_tail(timing: BMinSep) -> np.ndarray:
    """Return (max_participations,) float64, the probability of at least j = 1, 2, .. participations.

    The j-th is at step `W + (j - 1) b + 1`, W the sum of j geometric waits, so it is a negative
    binomial; under a warm start averaged over the first eligible step.
    """
    n, b, p = timing.iterations, timing.min_separation, timing.sampling_probability
    j = np.arange(1, timing.max_participations + 1)
    starts = np.exp(timing.start_log_weights()) if timing.warm_start else np.ones(1)
    left = n - 1 - (j[:, None] - 1) * b - np.arange(starts.size)
    # Of the negative binomial distribution, as in `scipy.stats`, which takes a third of a second to import.
    by_then = scipy.special.betainc(j[:, None], np.maximum(left, 0) + 1, p)
    return (by_then * (left >= 0)) @ starts


class RevealedPattern(Accountant):
    """Mixture over the patterns of a scheme with known `revealed_counts`; columns do not overlap."""

    name = "revealed-pattern"
    adjacencies = ("zero-out", "replace-one")
    reveals_all_coins = True

    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        if mechanism.scheme.revealed_counts is None:
            return "the distribution of its participations is not known"
        return "columns of the strategy matrix overlap" if cross_term(mechanism) else None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        """Return the bound, summed by parts over the number of participations, so that terms are positive.

        Raised by 1e-9 for float64. For algorithm 3 it holds on any graph, `MultiAttribution`.
        """
        counts = mechanism.scheme.revealed_counts
        assert counts is not None
        timing, weights = counts
        tail = participation_tail(timing)
        sigma = mechanism.noise_multiplier / mechanism.gradient_distance
        means = _mean_deltas(weights, sigma, epsilon, tail.size)
        return float(min(1.0, np.sum(np.diff(means, prepend=0.0) * tail) * (1 + 1e-9)))


def _mean_deltas(weights: np.ndarray, sigma: float, epsilon: float, max_count: int) -> np.ndarray:
    """Return (most,) means of the Gaussian delta given j = 1 .. most participations of 1 .. k examples."""
    k = len(weights)
    if max_count * max_count * k**4 > _MAX_CELLS:
        return gdp_delta(epsilon, k * np.sqrt(np.arange(1, max_count + 1)) / sigma)
    squares = np.zeros(k * k + 1)  # the distribution of one squared count
    squares[np.arange(1, k + 1) ** 2] = weights
    lengths = np.sqrt(np.arange(max_count * k * k + 1))
    deltas = gdp_delta(epsilon, lengths / sigma)
    distribution, means = np.ones(1), []
    for _ in range(max_count):
        distribution = np.convolve(distribution, squares)
        means.append(distribution @ deltas[: distribution.size])
    return np.maximum.accumulate(np.array(means))
