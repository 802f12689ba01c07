"""The worst participation pattern revealed: a Gaussian mechanism, which bounds every scheme and strategy.

At most k disjoint columns of norm 1 are used, each by at most k_u examples: sensitivity k_u sqrt(k). Where
columns overlap (C not banded) each participation adds at most 2 `cross` to the square of that, k_u = 1; for a
Toeplitz C the actual overlap is counted (proofs/non_banded.md).
"""

import math

from jaxacct.accountants.base import Accountant, cross_term
from jaxacct.accountants.composition import composed_delta
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.strategies import worst_pattern

_RAISED = 1 + 2.0**-50  # above the rounding of a quotient of floats


class Unamplified(Accountant):
    """Gaussian mechanism with all participations of the worst pattern revealed."""

    name = "unamplified"
    adjacencies = ("zero-out", "replace-one")
    reveals_all_coins = True
    composes = True

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        """Return whether the noise is the only randomness of the mechanism."""
        return mechanism.scheme.patterns is not None and compose_with is None

    def why_not_covered(self, mechanism: Mechanism) -> None:
        """Return None: every scheme states the sensitivity that this bound depends on."""

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        if compose_with is None:
            return gdp_delta(epsilon, _mu(mechanism))
        step = sampled_gaussian(mechanism.noise_multiplier / sensitivity(mechanism)), 1
        return composed_delta((step,), epsilon, compose_with)


def sensitivity(mechanism: Mechanism) -> float:
    """Return the largest distance of the means with the pattern revealed, per unit of clip norm.

    That of `C x` and 0, or for replace-one of `C x` and `-C x`; the noise multiplier does not matter.
    """
    scheme = mechanism.scheme
    if scheme.patterns is not None:
        square = worst_pattern.squared_sensitivity(mechanism.strategy, scheme.patterns)
    else:
        cross = cross_term(mechanism)
        square = scheme.squared_sensitivity(cross)
        if cross > 0 and not scheme.examples_overlap:
            # Such schemes have counts of up to `examples_per_unit`, `min_separation` steps apart or more.
            counted = mechanism.strategy.squared_sensitivity(
                scheme.iterations, scheme.min_separation, scheme.max_participations
            )
            square = min(square, scheme.examples_per_unit**2 * counted)
    return mechanism.gradient_distance * math.sqrt(square)


def _mu(mechanism: Mechanism) -> float:
    """Return the distance of the means per standard deviation of the noise, rounded up."""
    return sensitivity(mechanism) / mechanism.noise_multiplier * _RAISED


def noise_multiplier_for(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier, in place of the mechanism's, with a revealed pattern.

    Rounded up: an upper end for any search.
    """
    return sensitivity(mechanism) / gdp_mu(epsilon, delta) * _RAISED**2


def epsilon_at(mechanism: Mechanism, delta: float) -> float:
    """Return epsilon at `delta` with the participation pattern revealed, rounded up; inf beyond float64."""
    return gdp_epsilon(delta, _mu(mechanism)) * (1 + 1e-9)
