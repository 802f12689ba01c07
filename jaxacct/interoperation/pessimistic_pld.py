"""Mechanisms as dominating privacy loss distributions of dp-accounting, for composition with others.

Samples give upper bounds on the hockey-stick divergences H_r (P against Q) and H_a (Q against P) at points
epsilon_i >= 0. Each is a convex, non-increasing function of e^epsilon, which is 1 at 0, and

    H_r(-epsilon) = 1 - e^-epsilon + e^-epsilon H_a(epsilon),

so both are bounded on the whole line. The largest convex function below the bounds lies above the divergence,
which is one such function; a distribution with it as its divergence dominates
(Doroshenko et al., arXiv 2207.04380, algorithm 1, "Connect the Dots"). Losses beyond the last point count as
infinite.

dp-accounting does not add the rounding error of its Fourier transforms to delta (proofs/errata.md), so
`statistics.composed_losses` computes the deltas and epsilons of compositions.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants.composition import Steps, composed_delta, composed_epsilon, curve_of_pld
from jaxacct.common import validate as _validate
from jaxacct.common.progress import Progress
from jaxacct.estimates.profile import Profile, privacy_profile
from jaxacct.mechanisms.mechanism import ADJACENCIES, Mechanism, checked
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.statistics.loss_curves import ChordCurve, dominating_curves

INTERVAL = 1e-3  # of epsilons; composed distributions must have the same
_THEIR_INTERVAL = 1e-4  # dp-accounting's default
LARGEST = 500.0  # epsilon; e^LARGEST is finite


@dataclass(frozen=True, eq=False)
class PessimisticPLD:
    """Distribution that dominates with probability at least 1 - `failure_probability` over the samples.

    Attributes:
      steps: ((remove, add) curves, count) of the composed mechanisms.
      distributions: of dp-accounting, the same steps for export.
      failure_probability: included in every `delta` and `epsilon`; add it to results derived from `pld`.
      interval: `value_discretization_interval` of the distributions.
      adjacency: that of the composed mechanisms, one of `ADJACENCIES`.
    """

    steps: Steps
    distributions: tuple[Any, ...]
    failure_probability: float
    interval: float
    adjacency: str = ADJACENCIES[0]

    def __post_init__(self):
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)

    @functools.cached_property
    def pld(self) -> Any:
        """`PrivacyLossDistribution` of `dp_accounting.pld.privacy_loss_distribution`, by `adjacency`.

        (Zero-out is `REPLACE_SPECIAL`.) dp-accounting does not bound the rounding of compositions: for
        guarantees use `delta` and `epsilon`.
        """
        return functools.reduce(lambda one, other: one.compose(other), self.distributions)

    def delta(self, epsilon: float) -> float:
        """Return delta at `epsilon` (nats), including the failure probability."""
        _validate.nonnegative_number("epsilon", epsilon)
        return min(1.0, composed_delta(self.steps, epsilon) + self.failure_probability)

    def epsilon(self, delta: float) -> float:
        """Return epsilon at `delta`, which includes the failure probability; infinite where none is found."""
        left = _validate.open_probability("delta", delta) - self.failure_probability
        return composed_epsilon(self.steps, left) if left > 0 else math.inf

    def compose(self, other, adjacency: str = ADJACENCIES[0]) -> "PessimisticPLD":
        """Compose with another of these, or with a PLD of dp-accounting.

        Args:
          other: of the same adjacency and interval. A PLD of dp-accounting may have the interval 1e-4, its
            default, too, and must not be composed already.
          adjacency: of a PLD of dp-accounting, which does not hold it.

        Raises:
          ValueError: another adjacency or discretization.
        """
        if not isinstance(other, PessimisticPLD):
            intervals = [i for i in (self.interval, _THEIR_INTERVAL) if _has_interval(other, i)]
            if not intervals:
                allowed = f"{self.interval:g} or {_THEIR_INTERVAL:g}"
                raise ValueError(f"value_discretization_interval must be {allowed} to be composed")
            both = (curve_of_pld(other, intervals[0], self.interval),) * 2
            exported = other if intervals[0] == self.interval else _exported(both, self.interval)
            other = PessimisticPLD(((both, 1),), (exported,), 0.0, self.interval, adjacency)
        if other.adjacency != self.adjacency:
            raise ValueError(f"adjacency must be {self.adjacency} to be composed, got {other.adjacency}")
        if other.interval != self.interval:
            raise ValueError(f"interval must be {self.interval!r} to be composed, got {other.interval!r}")
        failure = min(1.0, self.failure_probability + other.failure_probability)
        parts = self.steps + other.steps, self.distributions + other.distributions
        return PessimisticPLD(*parts, failure, self.interval, self.adjacency)


def dominating_pld(
    mechanism: Mechanism,
    *,
    max_epsilon: float,
    failure_probability: float = 1e-9,
    points: int = 101,
    num_samples: int = 100_000,
    interval: float = INTERVAL,
    key=None,
    progress: Progress | None = None,
) -> PessimisticPLD:
    """Return a dominating distribution of a mechanism from fresh samples.

    Small deltas are resolved (`Profile`): the add direction has the bounds of the remove direction, but for
    truncated batches, where the mass of an infinite loss is about 20 / num_samples, or 0 where `max_epsilon`
    exceeds the last possible loss.

    Args:
      mechanism: of any scheme and strategy.
      max_epsilon: nats, the last point; larger losses count as infinite.
      failure_probability: that any of the bounds is wrong.
      points: their number, at least 2; rounded to multiples of `interval`.
      num_samples: per direction.
      interval: `value_discretization_interval` of dp-accounting.
      key: JAX key; from the operating system by default.
      progress: called with (what, samples done, samples expected).

    Raises:
      ValueError: bad arguments.
    """
    checked(mechanism)
    _validate.positive_number("max_epsilon", max_epsilon)
    _validate.open_probability("failure_probability", failure_probability)
    _validate.positive_number("interval", interval)
    if _validate.positive_integer("points", points) < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    if not interval <= max_epsilon <= min(LARGEST, 1e7 * interval):
        limit = f"{LARGEST:g} and 1e7 times interval"
        raise ValueError(f"max_epsilon must be at least interval and at most {limit}, got {max_epsilon!r}")
    whole = np.unique(np.round(np.linspace(0, max_epsilon / interval, points)))
    profile = privacy_profile(
        mechanism,
        whole * interval,
        num_samples=num_samples,
        confidence=1 - failure_probability,
        key=key,
        progress=progress,
    )
    return pld_of_profile(profile, interval, mechanism.adjacency)


def pld_of_profile(
    profile: Profile, interval: float = INTERVAL, adjacency: str = ADJACENCIES[0]
) -> PessimisticPLD:
    """Return the distribution of given bands: of the upper ends of both directions.

    Args:
      profile: of both directions.
      interval: `value_discretization_interval` of dp-accounting.
      adjacency: of the profile's mechanism.

    Raises:
      ValueError: the first epsilon is not 0, or one is no multiple of `interval`.
    """
    _validate.positive_number("interval", interval)
    _validate.open_probability("confidence", profile.confidence)
    whole = np.round(profile.epsilons / interval).astype(np.int64)
    if whole[0] != 0 or whole.size < 2 or (np.diff(whole) <= 0).any():
        raise ValueError("profile must have at least two epsilons, the first of them 0")
    if whole[-1] * interval > LARGEST:
        raise ValueError(f"profile must have epsilons up to {LARGEST:g}, got {profile.epsilons[-1]!r}")
    if not np.allclose(whole * interval, profile.epsilons, rtol=1e-12, atol=1e-12):
        raise ValueError(f"profile must have epsilons that are multiples of {interval}")
    remove, add = (profile.directions[direction][2] for direction in DIRECTIONS)
    if not all(np.any(bounds < 1) for bounds in (remove, add)):
        raise ValueError("profile must have a bound below 1 in both directions, got none")
    points = whole * interval
    curves = dominating_curves((points, remove), (points, add))
    distribution = _exported(curves, interval)
    return PessimisticPLD(((curves, 1),), (distribution,), 1 - profile.confidence, interval, adjacency)


def _has_interval(distribution, interval: float) -> bool:
    """Return whether a distribution of dp-accounting composes with those of this interval."""
    from dp_accounting.pld import privacy_loss_distribution

    try:
        privacy_loss_distribution.identity(value_discretization_interval=interval).compose(distribution)
    except ValueError:
        return False
    return True


def _exported(curves: tuple[ChordCurve, ChordCurve], interval: float):
    """Return the distribution of dp-accounting whose divergences are the (remove, add) curves."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    parts = (
        pld_pmf.create_pmf_pessimistic_connect_dots(
            interval, np.round(curve.losses / interval).astype(np.int64), curve.heights
        )
        for curve in curves
    )
    return privacy_loss_distribution.PrivacyLossDistribution(*parts)
