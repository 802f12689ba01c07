"""Privacy targets: (epsilon, delta), or words of risk and the (epsilon, delta) that implies them.

proofs/risk.md derives which (epsilon, delta) imply a target and which one of them needs least noise.
"""

import bisect
import dataclasses
import functools
import math

import jax
import numpy as np
from scipy import special

from jaxacct.accountants import unamplified
from jaxacct.common import validate
from jaxacct.common.records import exact
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.sampling import sample_privacy_loss
from jaxacct.schemes import Scheme
from jaxacct.statistics.hockey_stick import DIRECTIONS, hockey_stick
from jaxacct.strategies import Strategy

FORMS = "epsilon and delta, advantage alone, tpr and fpr, or mu and delta"
_SLACK = 1e-12  # of delta: the implied target holds with room for rounding
_SAMPLES, _RATIO, _CANDIDATES = 4096, 1.05, 13
_MIN_BEYOND = 20  # samples of a delta that is compared


@dataclasses.dataclass(frozen=True)
class Target:
    """What a run is to guarantee: an (epsilon, delta), of which one may be missing and is what is found.

    Attributes:
      epsilon: natural log, in [0, 10,000]; at 0 delta bounds the advantage of every test.
      delta: in (0, 1).
      rates: (true, false) positive rates of `tpr` that the point implies, or None.
      gaussian: mu of `mu`, whose Gaussian mechanism has this delta at this epsilon, or None.

    Raises:
      ValueError: numbers out of range, both missing, or a point that does not imply its rates.

    Example:
      >>> Target(epsilon=8, delta=1e-5).missing, Target(delta=1e-5).missing
      (None, 'epsilon')
      >>> Target.advantage(0.1)
      Target(epsilon=0.0, delta=0.1, rates=None, gaussian=None)
    """

    epsilon: float | None = None
    delta: float | None = None
    rates: tuple[float, float] | None = None
    gaussian: float | None = None

    def __post_init__(self):
        if self.epsilon is None and self.delta is None:
            raise ValueError(f"target must be given: {FORMS}")
        epsilon, delta = validate.target(
            1.0 if self.epsilon is None else self.epsilon, 0.1 if self.delta is None else self.delta
        )
        object.__setattr__(self, "epsilon", None if self.epsilon is None else epsilon)
        object.__setattr__(self, "delta", None if self.delta is None else delta)
        if self.rates is not None and not self._implies(*_rates(*self.rates)):
            raise ValueError(f"target must imply its rates {self.rates}, got ({self.epsilon}, {self.delta})")

    def _implies(self, power: float, level: float) -> bool:
        if self.epsilon is None or self.delta is None:
            return False
        e, delta = math.exp(self.epsilon) if self.epsilon < 700 else math.inf, self.delta
        return e * level + delta <= power or e * (1 - power) + delta <= 1 - level

    @classmethod
    def advantage(cls, advantage: float) -> "Target":
        """Return the target (0, advantage): the largest TPR - FPR of a membership test."""
        return cls(0.0, validate.open_probability("advantage", advantage))

    @classmethod
    def tpr(cls, tpr: float, *, fpr: float) -> "Target":
        """Return the target that no membership test with false positive rate `fpr` has a larger TPR.

        `0 < fpr < tpr < 1`. The point is where the Gaussian mechanism of that risk has its tangent;
        `calibrate` takes the point that needs least noise of the mechanism (`with_least_noise`).
        """
        power, level = _rates(tpr, fpr)
        # Slope of the tangent of the Gaussian curve through (fpr, tpr): the ratio of normal densities.
        at, to = float(special.ndtri(level)), float(special.ndtri(power))
        point = _line(float(np.clip((at - to) * (at + to) / 2, -100, 100)), power, level)
        return cls(*point, rates=(power, level))

    @classmethod
    def mu(cls, mu: float, *, delta: float) -> "Target":
        """Return the target of the epsilon that the Gaussian mechanism of this mu has at `delta`.

        One point of its curve, not mu-GDP, which no single point implies.
        """
        from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon

        mu, delta = validate.positive_number("mu", mu), validate.open_probability("delta", delta)
        epsilon = float(gdp_epsilon(delta, mu))
        if not 0 <= epsilon <= validate.MAX_EPSILON:
            allowed = f"an epsilon of at most {validate.MAX_EPSILON:g} at delta {delta:g}"
            raise ValueError(f"mu must give {allowed}, got {mu!r}")
        return cls(epsilon, delta, gaussian=mu)

    @property
    def missing(self) -> str | None:
        """Name of the number that is to be found, if there is one."""
        return "epsilon" if self.epsilon is None else "delta" if self.delta is None else None

    @property
    def point(self) -> tuple[float, float]:
        """The (epsilon, delta); ValueError where one is missing."""
        if self.epsilon is None or self.delta is None:
            given = "delta" if self.epsilon is None else "epsilon"
            raise ValueError(f"target must be one of {FORMS}; given was {given} alone")
        return self.epsilon, self.delta

    def with_least_noise(self, scheme: Scheme, strategy: Strategy) -> "Target":
        """Return the target whose point implies the same and, by an estimate, needs least noise.

        Each point on the lines through the rates is valid, so that the estimate bears on the noise and not on
        the guarantee. Plain samples from a fixed key compare 13 points, so that the same call has the same
        target. Where samples do not resolve a better point, and without rates, it is this one.
        """
        if self.rates is None or scheme.patterns is not None:  # a fixed order has no samples
            return self
        power, level = self.rates
        steepest = min(math.log(power / level), 100.0)
        flattest = -min(math.log((1 - level) / (1 - power)), 100.0)
        slopes = np.linspace(flattest, steepest, _CANDIDATES + 2)[1:-1].tolist()
        points = [self.point, *(_line(slope, power, level) for slope in slopes)]
        points = [point for point in points if point[1] * _SAMPLES >= _MIN_BEYOND]
        key = randomness.stream_key(jax.random.key(0), Stream.SEARCH - 1)

        @functools.cache
        def excesses(exponent: int) -> list[float]:
            """Ln of delta at each point, over that of the point."""
            mechanism = Mechanism(scheme, strategy, _RATIO**exponent)
            losses = [
                d.sign * np.asarray(sample_privacy_loss(key, mechanism, _SAMPLES, d), np.float64)
                for d in DIRECTIONS
            ]
            deltas = [max(hockey_stick(epsilon - loss).mean() for loss in losses) for epsilon, _ in points]
            return [math.log(max(at, 1e-9) / delta) for at, (_, delta) in zip(deltas, points, strict=True)]

        noise = unamplified.noise_multiplier_for(Mechanism(scheme, strategy, 1.0), *self.point)
        top = math.ceil(math.log(noise, _RATIO))
        between = range(top - 70, top + 1)  # from a thirtieth of the noise
        place = bisect.bisect_left(between, True, key=lambda at: min(excesses(at), default=1.0) <= 0)
        if not 0 < place < len(between):
            return self
        epsilon, delta = points[int(np.argmin(excesses(between[place])))]
        return dataclasses.replace(self, epsilon=epsilon, delta=delta)

    def in_words(self, epsilon: float, delta: float) -> str | None:
        """Return that the target follows from a certified point; None for a target without words."""
        point = f"({exact(epsilon)}, {exact(delta)})"
        if self.rates is not None:
            return (
                f"target: at false positive rate {exact(self.rates[1])} no membership test has a true "
                f"positive rate above {exact(self.rates[0])}; {point} implies it"
            )
        if self.gaussian is not None:
            return (
                f"target: {point}, where the Gaussian mechanism of mu {exact(self.gaussian)} has this delta; "
                "no other point of its curve is certified"
            )
        return None


def asked(target: Target | None, epsilon: float | None, delta: float | None) -> Target:
    """Return the target of a call that takes it whole, or as epsilon and delta; ValueError for both."""
    if target is None:
        if epsilon is not None:  # 0 is the target `Target.advantage`
            validate.positive_number("epsilon", epsilon)
        return Target(epsilon, delta)
    if (epsilon, delta) != (None, None):
        raise ValueError("epsilon and delta must not be given together with target")
    return validate.instance("target", target, Target, "a jaxacct.Target")


def _rates(tpr, fpr) -> tuple[float, float]:
    power, level = validate.open_probability("tpr", tpr), validate.open_probability("fpr", fpr)
    if not power > level:
        raise ValueError(f"tpr must be above fpr, got {tpr!r} and {fpr!r}")
    return power, level


def _line(slope: float, power: float, level: float) -> tuple[float, float]:
    """Return (epsilon, delta) of the line of log slope `slope` through the rates.

    `TPR <= e^eps FPR + delta` for a positive slope; for a negative one its mirror image
    `1 - FPR <= e^eps (1 - TPR) + delta`.
    """
    high, low = (power, level) if slope > 0 else (1 - level, 1 - power)
    epsilon = abs(slope)
    delta = (high - math.exp(epsilon) * low) * (1 - _SLACK) - 1e-15 * high
    if not 0 < delta < 1:
        raise ValueError(f"tpr must be farther above fpr, got {power!r} and {level!r}: no delta is left")
    return epsilon, delta


__all__ = ["Target"]
