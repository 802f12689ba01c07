"""The add direction of a user with several examples: a half-space that knows what they share on average.

Where the likelihood of k independent examples is too large to be computed, f is bounded from below by taking
off the most that a participation could share with all others, `Mechanism.cross_terms`, which is much. In the
mean they share little: with f_1 the likelihood ratio of one example and m its mean participation under the
law tilted by log-ratios r_0,

    ln f(r)  >=  k (ln f_1(r_0) + <m, r - r_0>)  -  (k (k - 1) / 2) |C m|^2 / sigma^2

for all r, by the Gibbs variational principle (proofs/shared_examples.md, theorem 8). So `(1 - e^epsilon f)_+`
is at most that of a half-space, whose mean is known. Draws are worth little here, as their losses are the
lower bound of before; where the mean of the half-space is below delta none are needed.
"""

import math

import jax
import numpy as np

from jaxacct.likelihood.loss import column_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal
from jaxacct.proposals.half_space import (
    Minorant,
    add_is_zero,
    coordinate_table,
    log_half_space_mean,
    loss_and_gradient,
    proposal_along,
    search_minorant,
)

_NAME = "half-space of mean overlaps"
_LOWERED = 1e-8  # relative lowering of a tangent, far above float64 rounding


def mean_overlap_tangent(mechanism: Mechanism, noise: np.ndarray) -> Minorant | None:
    """The bound of theorem 8 at normalised noise scores `noise`, (iterations,) float64, one that is on ln f.

    The constant is lowered by 1e-8 of the size of its parts, which covers float64 rounding; None where it
    cannot be computed.
    """
    assert mechanism.scheme.parts is not None  # of several examples
    one, number = mechanism.scheme.parts
    sigma, strategy = mechanism.noise_multiplier, mechanism.strategy
    halves = strategy.half_square_norms()
    excess = noise / sigma - halves / sigma**2
    with jax.enable_x64(True):
        norms = column_norms(one, strategy) / sigma**2
        loss, gradient = loss_and_gradient(one, excess, norms)
        loss, gradient = float(loss), np.asarray(gradient, np.float64)
    if not (math.isfinite(loss) and np.all(np.isfinite(gradient))):
        return None
    mean = np.maximum(gradient, 0.0)
    square = max(float(mean @ strategy.gram(mean)), 0.0)
    if square == 0:
        return None
    shared = number * (number - 1) / 2 * square / sigma**2
    parts = (number * loss, -number * (mean @ excess), -number * (mean * halves).sum() / sigma**2, -shared)
    constant = float(sum(parts) - _LOWERED * (1 + sum(map(abs, parts))))
    return Minorant(constant, number * mean, number * math.sqrt(square))


def mean_overlap_proposal(mechanism: Mechanism, epsilon: float) -> Proposal | None:
    """The half-space with the smallest mean that was found; None where all hold the output of no noise."""
    sigma, n = mechanism.noise_multiplier, mechanism.scheme.iterations

    def edge_and_slope(minorant):
        slope = minorant.norm / sigma
        return -(epsilon + minorant.constant) / slope, slope

    def log_mean(minorant):
        return math.inf if minorant is None else log_half_space_mean(*edge_and_slope(minorant))

    def tangent_at(noise):
        return mean_overlap_tangent(mechanism, noise)

    jensen = tangent_at(np.broadcast_to(mechanism.strategy.half_square_norms() / sigma, n))
    best = search_minorant(jensen, tangent_at, log_mean, mechanism.strategy.gram)
    if best is None or epsilon + best.constant <= 0:
        return None  # no noise at all would be in the half-space
    return proposal_along(mechanism, best, *coordinate_table(*edge_and_slope(best)), _NAME)


def mean_overlap_candidates(mechanism: Mechanism, epsilon: float, samples_needed=None) -> list[Proposal]:
    """The one there is where the likelihood of several examples is bounded; none elsewhere."""
    del samples_needed
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if scheme.parts is None or not strategy.is_toeplitz or not scheme.overlap_bound(strategy) > 0:
        return []
    if scheme.log_probability_of_none() > -math.inf and add_is_zero(mechanism, epsilon):
        return []
    found = mean_overlap_proposal(mechanism, epsilon)
    return [] if found is None else [found]


def mean_overlap_called(mechanism: Mechanism, epsilon: float, name: str) -> Proposal | None:
    """The one of that name, None for a name of another kind or where there is none."""
    return next(iter(mean_overlap_candidates(mechanism, epsilon)), None) if name == _NAME else None
