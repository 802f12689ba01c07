"""The worst participation pattern revealed: a Gaussian mechanism, which bounds every scheme and strategy.

At most k disjoint columns of norm 1 are used, each by at most k_u examples: sensitivity k_u sqrt(k). Where
columns overlap (C not banded) each participation adds at most 2 `cross` to the square of that, k_u = 1; for a
Toeplitz C the actual overlap is counted (proofs/non_banded.md).
"""

import math

from jaxacct.accountants.base import Accountant, cross_term
from jaxacct.accountants.composition import composed_delta
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import roots
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.strategies import worst_pattern


class Unamplified(Accountant):
    """Gaussian mechanism with all participations of the worst pattern revealed."""

    name = "unamplified"
    adjacencies = ("zero-out", "replace-one")
    reveals_all_coins = True
    composes = True

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        """Return whether the noise is the only randomness of the mechanism."""
        del delta
        return mechanism.scheme.patterns is not None and compose_with is None

    def why_not_covered(self, mechanism: Mechanism) -> None:
        """Return None: every scheme states the sensitivity that this bound depends on."""

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        length = sensitivity(mechanism)
        if compose_with is None:
            return gaussian_delta(epsilon, mechanism.noise_multiplier, length)
        step = sampled_gaussian(mechanism.noise_multiplier / length), 1
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


def noise_multiplier_for(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier, in place of the mechanism's, with a revealed pattern.

    Rounded up, and at least 1e-3: an upper end for any search. ValueError where no noise shows such a delta.
    """
    length = sensitivity(mechanism)

    def is_enough(log_sigma):
        return gaussian_delta(epsilon, math.exp(log_sigma), length) <= delta

    min_log_noise = math.log(1e-3)
    log_noise = roots.turn(is_enough, min_log_noise, 1.0, min_log_noise, 700.0, absolute=1e-12)[1]
    if log_noise == math.inf:
        raise ValueError(f"delta must be one that float64 shows at epsilon {epsilon:g}, got {delta!r}")
    return math.exp(log_noise)


def epsilon_at(mechanism: Mechanism, delta: float) -> float:
    """Return epsilon at `delta` with the participation pattern revealed, rounded up; inf beyond float64."""
    length = sensitivity(mechanism)

    def is_enough(epsilon):  # False for NaN
        return gaussian_delta(epsilon, mechanism.noise_multiplier, length) <= delta

    _, high = roots.turn(is_enough, 0.0, 1.0, 0.0, 1e300, relative=1e-12)
    return high * (1 + 1e-9)
