"""The worst participation pattern revealed: a Gaussian mechanism, which bounds every scheme and strategy.

At most k disjoint columns of norm 1 are hit, each by at most k_u examples: sensitivity k_u sqrt(k). Where
columns overlap (C not banded) each participation adds at most 2 `cross` to the square of that, k_u = 1; for
a Toeplitz C what they share is counted (proofs/non_banded.md).
"""

import math

import scipy

from jaxacct.accountants.base import Accountant, cross_term
from jaxacct.accountants.composition import composed_delta
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.loss_curves import GaussianPair, both_directions


class Unamplified(Accountant):
    """The Gaussian mechanism with all participations of the worst pattern revealed."""

    name = "unamplified"
    adjacency = "zero-out"
    reveals_all_coins = True

    def why_not_covered(self, mechanism: Mechanism, compose_with=None) -> None:
        """Every scheme states the sensitivity that this rests on."""

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        length = sensitivity(mechanism)
        if compose_with is None:
            return gaussian_delta(epsilon, mechanism.noise_multiplier, length)
        curves = both_directions(GaussianPair(mechanism.noise_multiplier / length), 1.0)
        return composed_delta(((curves, 1),), epsilon, compose_with)


def sensitivity(mechanism: Mechanism) -> float:
    """The largest norm of `C x` with the participation pattern revealed, per unit of clip norm."""
    scheme, cross = mechanism.scheme, cross_term(mechanism)
    square = scheme.squared_sensitivity(cross)
    if cross > 0 and not scheme.examples_overlap:
        # Such schemes have counts of up to `examples_per_unit`, `min_separation` steps apart or more.
        counted = mechanism.strategy.squared_sensitivity(
            scheme.iterations, scheme.min_separation, scheme.max_participations
        )
        square = min(square, scheme.examples_per_unit**2 * counted)
    return math.sqrt(square)


def noise_multiplier_for(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """The noise multiplier, in place of the mechanism's, at which the pattern may be revealed.

    An upper end for any search.
    """
    length = sensitivity(mechanism)

    def excess(log_sigma):
        return gaussian_delta(epsilon, math.exp(log_sigma), length) - delta

    low, high = math.log(1e-3), math.log(1e-3)
    while excess(high) > 0:
        high += 1.0
    return math.exp(scipy.optimize.brentq(excess, low, high)) if high > low else math.exp(low)


def epsilon_at(mechanism: Mechanism, delta: float) -> float:
    """The epsilon at `delta` with the participation pattern revealed, rounded up; inf beyond float64."""
    length = sensitivity(mechanism)

    def excess(epsilon):
        return gaussian_delta(epsilon, mechanism.noise_multiplier, length) - delta

    high = 1.0
    while not excess(high) <= 0:  # not a number counts as too much
        high *= 2
        if high > 1e300:
            return math.inf
    if excess(0.0) <= 0:
        return 0.0
    return float(scipy.optimize.brentq(excess, 0.0, high, rtol=1e-12)) * (1 + 1e-9)
