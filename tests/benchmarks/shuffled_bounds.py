"""Reshuffled epochs of fixed-size batches with independent noise (C = I): what shuffling is worth at most.

Every example is in one batch of each epoch. Where all other gradients are opposite to the example's, the sum
of its batch moves by 2 with the example and by 1 without it, so that no accountant can be below the
divergence of the mixture of `N(2 e_t, sigma^2 I)` against that of `N(e_t, sigma^2 I)`, t uniform over the
steps of an epoch (Chua et al., arXiv 2403.17673). Any event bounds it from below; here `max_t y_t > c`.

`python -m tests.benchmarks.shuffled_bounds` writes epsilon at delta 1e-5 of four samplers, and a picture.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from scipy.special import log_ndtr

from jaxacct import BallsInBins, BandedToeplitz, EpochwiseAllocation
from jaxacct.accountants import ACCOUNTANTS
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.report.figure import blank_axes, finished
from jaxacct.statistics import roots
from tests.benchmarks.results import record

_EVENTS = 4001
_PRECISION = 1e-4
_LOWERED = 1e-9
"""Relative lowering of lower bounds and raising of upper ones, far above the rounding of float64."""
_TINY = 1e-305  # bound on what underflow may remove from the tail of one step
_MAX_LOSS = 600.0  # with larger losses a shuffle is not better than a fixed order
_QUANTILES = tuple(np.arange(3.5, 7.1, 0.7))
"""Quantiles of the normal distribution that `shuffled_delta_upper` tries; the bound holds for each."""

DELTA = 1e-5
# Steps of an epoch, epochs, noise multiplier.
CASES = [(1000, 1, sigma) for sigma in (0.5, 0.7, 1.0, 1.5)]
CASES += [(10_000, 1, sigma) for sigma in (0.5, 0.7, 1.0)] + [(1000, 10, sigma) for sigma in (1.0, 1.5, 2.0)]
PICTURE = Path(__file__).parent / "figures" / "shuffling.png"


@dataclass(frozen=True)
class SamplerComparison:
    """One number for three samplers of the same batches, independent noise and zero-out adjacency.

    Attributes:
      unamplified: batches in a fixed order that anyone may know: exact.
      shuffled_at_least: every epoch reshuffled: no accountant can be below this.
      redrawn_at_most: one participation an epoch at a step drawn for each example (epochwise allocation;
        for one epoch this is balls-in-bins): certified.
    """

    unamplified: float
    shuffled_at_least: float
    redrawn_at_most: float


def shuffled_delta_lower(steps: int, noise_multiplier: float, epsilon: float) -> float:
    """Return a lower bound on delta(epsilon) of one or more reshuffled epochs of `steps` steps, in [0, 1]."""
    _validate.positive_integer("steps", steps)
    sigma = _validate.noise_multiplier("noise_multiplier", noise_multiplier)
    epsilon = _validate.nonnegative_number("epsilon", epsilon)
    edges = np.linspace(0.0, 2 + sigma * (4 + math.sqrt(2 * math.log(steps) + 2 * epsilon)), _EVENTS)
    rest = (steps - 1) * log_ndtr(edges / sigma)

    def above(mean):  # P(max_t y_t > edge), one step of which has this mean
        return -np.expm1(rest + log_ndtr((edges - mean) / sigma))

    log_least = np.log(above(1.0) + steps * _TINY)
    found = above(2.0) * (1 - _LOWERED) - np.exp(np.minimum(epsilon + log_least, 0.0)) * (1 + _LOWERED)
    return float(max(0.0, found.max()))


def shuffled_delta_upper(steps: int, noise_multiplier: float, epsilon: float) -> float:
    """Return an upper bound on delta(epsilon) of one reshuffled epoch, in [0, 1].

    Gradients may be chosen adaptively, in any dimension; batches have any size, all the same. It is that of a
    fixed order where noise is low: other examples hide one only where they could have had its outputs.

    Args:
      steps: n, of the epoch.
      noise_multiplier: sigma.
      epsilon: natural log, at least 0.

    Source: tests/benchmarks/shuffling.md, section 2.
    """
    n = _validate.positive_integer("steps", steps)
    sigma = _validate.noise_multiplier("noise_multiplier", noise_multiplier)
    epsilon = _validate.nonnegative_number("epsilon", epsilon)
    best = gdp_delta(epsilon, 1.0 / sigma)
    for near, far in itertools.product(_QUANTILES, _QUANTILES):
        own = 0.5 / sigma**2 + near / sigma  # epsilon_1: a loss that is rarely larger, means 1 apart
        others = 2 / sigma**2 + far * 2 / sigma  # epsilon_0: means 2 apart
        if max(own, others, epsilon) > _MAX_LOSS:
            continue
        moved = gdp_delta(own, 1.0 / sigma) / (1 + math.exp(own))
        rest = sum(gdp_delta(others, distance / sigma) for distance in (1.0, 2.0)) + 2 * moved
        found = (1 + math.exp(epsilon)) * (moved + (n - 1) * math.exp(-others) / 2 * rest)
        if found < best and epsilon < own:
            found += _clones_delta(n, math.exp(-others), own, epsilon)
        best = min(best, found * (1 + _LOWERED))
    return best


def _clones_delta(n: int, probability: float, own: float, epsilon: float) -> float:
    """Return the divergence of A + D from A + 1 - D, rounded up.

    C ~ Bin(n - 1, probability) is shown, A ~ Bin(C, 1/2), D ~ Bernoulli(e^own / (1 + e^own)); epsilon < own.
    """
    mean, width = (n - 1) * probability, 12 * math.sqrt(n * probability) + 40
    low, high = max(0, math.floor(mean - width)), min(n - 1, math.ceil(mean + width))
    counts = np.arange(low, high + 1)
    clones = stats.binom(n - 1, probability)
    w = 1 / (1 + math.exp(-own))
    # w - e^epsilon (1 - w) and e^epsilon w - (1 - w), where 1 - w = w e^-own: of positive terms only.
    gain, loss = -w * math.expm1(epsilon - own), w * (math.expm1(epsilon) - math.expm1(-own))
    turn = np.floor(loss / (gain + loss) * (counts + 1))
    # The event A + D >= a is the best one for some a next to `turn`.
    terms = [
        gain * (1 + _LOWERED) * stats.binom.sf(a - 2, counts, 0.5)
        - loss * (1 - _LOWERED) * stats.binom.sf(a - 1, counts, 0.5)
        for a in (turn - 1, turn, turn + 1, turn + 2)
    ]
    beyond = clones.cdf(low - 1) + clones.sf(high)
    return float(clones.pmf(counts) @ np.maximum(np.max(terms, axis=0), 0.0) + beyond) * (1 + _LOWERED)


def compare_noise_multipliers(steps: int, epochs: int, epsilon: float, delta: float) -> SamplerComparison:
    """Return the noise multipliers that (epsilon, delta) requires with each sampler.

    The difference of `unamplified` and `redrawn_at_most` is the gain of another sampler. No accountant for
    shuffled batches can certify less than `shuffled_at_least`. An epoch has `steps` steps.
    """
    _validate.positive_integer("epochs", epochs)
    delta = _validate.open_probability("delta", delta)
    length = math.sqrt(epochs)
    return SamplerComparison(
        _noise_at(lambda sigma: gdp_delta(epsilon, length / sigma), delta, 1),
        _noise_at(lambda sigma: shuffled_delta_lower(steps, sigma, epsilon), delta, -1),
        _noise_at(lambda sigma: redrawn_bins_delta(steps, epochs, sigma, epsilon), delta, 1),
    )


def redrawn_bins_delta(steps: int, epochs: int, sigma: float, epsilon: float) -> float:
    """Return the accountant's bound for `epochs` epochs of `steps` steps; one epoch is balls-in-bins."""
    scheme = BallsInBins(steps, steps) if epochs == 1 else EpochwiseAllocation(steps * epochs, steps)
    accountant = ACCOUNTANTS["random-allocation" if epochs == 1 else "redrawn-bins"]
    return accountant.delta(Mechanism(scheme, BandedToeplitz.identity(), sigma), epsilon)


def _noise_at(delta_at, delta: float, side: int) -> float:
    def is_enough(log_sigma):
        return delta_at(math.exp(log_sigma)) <= delta

    ends = roots.turn(is_enough, 0.0, 0.25, -3.0, 20.0, absolute=_PRECISION, relative=0.0)
    return math.exp(ends[side > 0])


def compare_epsilons(steps: int, epochs: int, sigma: float, delta: float) -> SamplerComparison:
    """Return the epsilons at `delta` for a noise multiplier, natural logs, each rounded to its side.

    An epoch has `steps` steps. The lower bound for shuffling is that of one epoch. The certified bound on
    delta does not fall below about 1e-8 times `epochs`.
    """
    length = math.sqrt(epochs)
    return SamplerComparison(
        _epsilon_at(lambda epsilon: gdp_delta(epsilon, length / sigma), delta, 1),
        _epsilon_at(lambda epsilon: shuffled_delta_lower(steps, sigma, epsilon), delta, -1),
        _epsilon_at(lambda epsilon: redrawn_bins_delta(steps, epochs, sigma, epsilon), delta, 1),
    )


def _epsilon_at(delta_at, delta: float, side: int) -> float:
    """Return the epsilon at which a falling bound is `delta`, rounded up (`side` 1) or down (-1)."""
    ends = roots.turn(lambda epsilon: delta_at(epsilon) <= delta, 0.0, 1.0, 0.0, 1e3, absolute=1e-4)
    return 0.0 if ends[0] == -math.inf else ends[side > 0]


def main():
    rows = []
    for steps, epochs, sigma in CASES:
        found = compare_epsilons(steps, epochs, sigma, DELTA)
        # The same bin in every epoch: all its participations add up to one.
        same = compare_epsilons(steps, 1, sigma / math.sqrt(epochs), DELTA).redrawn_at_most
        values = found.unamplified, found.shuffled_at_least, same, found.redrawn_at_most
        rows.append([f"{steps:,}", str(epochs), f"{sigma:g}", *(f"{value:.2f}" for value in values)])
        print(*rows[-1], flush=True)
    record(
        "shuffling",
        question="What shuffling is worth: epsilon at delta 1e-5, independent noise",
        order=57,
        columns=["steps an epoch", "epochs", "sigma", "no amplification", "shuffled, at least",
                 "balls-in-bins, at most", "epochwise allocation, at most"],
        rows=rows,
        note="C = I, zero-out adjacency. The bound for shuffling is below every accountant, for one epoch; "
        "in one epoch the last two columns are the same sampler.",
    )  # fmt: skip
    sigmas = np.geomspace(0.4, 2.0, 17)
    found = [compare_epsilons(1000, 1, float(sigma), DELTA) for sigma in sigmas]
    figure, axes = blank_axes(5.6, 3.6)
    for name, label, style in (
        ("unamplified", "order known: exact", "-"),
        ("shuffled_at_least", "shuffled: no accountant can be below", "--"),
        ("redrawn_at_most", "balls-in-bins: certified", "-."),
    ):
        axes.plot(sigmas, [getattr(one, name) for one in found], style, color="0.15", label=label)
    title = "one epoch of 1,000 steps, independent noise"
    axes.set(xlabel="noise multiplier", ylabel="epsilon at delta 1e-5", yscale="log", title=title)
    finished(figure).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
