"""Privacy targets in words of risk, and the (epsilon, delta) that implies each of them.

proofs/risk.md derives which (epsilon, delta) imply a target and which one of them needs least noise.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np
from scipy import special

from jaxacct.accountants import unamplified
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.sampling import sample_privacy_loss
from jaxacct.schemes import Scheme
from jaxacct.statistics.hockey_stick import DIRECTIONS, hockey_stick
from jaxacct.strategies import Strategy

_SLACK = 1e-12  # of delta: the implied target holds with room for rounding
_SAMPLES, _NOISES, _CANDIDATES = 4096, 12, 13
_MIN_BEYOND = 20  # samples of a delta that is compared


def implied(
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
    mu: float | None = None,
) -> tuple[float, float]:
    """Return an (epsilon, delta) that implies a target, whatever the mechanism.

    Args:
      epsilon: natural log, in (0, 10,000].
      delta: in (0, 1).
      advantage: in (0, 1), the most that TPR - FPR of a membership test may be: delta at epsilon 0.
      tpr: 0 < fpr < tpr < 1: no membership test with false positive rate `fpr` has a larger true positive
        rate. The point is where the Gaussian mechanism of that risk has its tangent (`min_noise` finds
        better ones for a mechanism).
      fpr: false positive rate; see `tpr`.
      mu: with delta: the epsilon that the Gaussian mechanism of this mu has at this delta. One point of its
        curve, not mu-GDP, which no single point implies.

    Raises:
      ValueError: for numbers out of range, for several targets or for none.
    """
    given = {
        "epsilon": epsilon,
        "delta": delta,
        "advantage": advantage,
        "tpr": tpr,
        "fpr": fpr,
        "mu": mu,
    }
    names = frozenset(name for name, value in given.items() if value is not None)
    if names == {"epsilon", "delta"}:
        return _validate.target(epsilon, delta, above_0=True)
    if names == {"advantage"}:
        return 0.0, _validate.open_probability("advantage", advantage)
    if names == {"tpr", "fpr"}:
        power, level = _rates(tpr, fpr)
        # Slope of the tangent of the Gaussian curve through (fpr, tpr): the ratio of normal densities.
        at, to = float(special.ndtri(level)), float(special.ndtri(power))
        return _line(float(np.clip((at - to) * (at + to) / 2, -100, 100)), power, level)
    if names == {"mu", "delta"}:
        from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon

        mu, delta = _validate.positive_number("mu", mu), _validate.delta(delta)
        found = float(gdp_epsilon(delta, mu))
        if not 0 <= found <= _validate.MAX_EPSILON:
            allowed = f"an epsilon of at most {_validate.MAX_EPSILON:g} at delta {delta:g}"
            raise ValueError(f"mu must give {allowed}, got {mu!r}")
        return found, delta
    if not names:
        raise ValueError(f"target must be given: {FORMS}")
    if "advantage" in names:
        other = sorted(names - {"advantage"})[0]
        raise ValueError(f"advantage must not be given together with {other}: it is a target by itself")
    raise ValueError(f"target must be one of {FORMS}; given were {', '.join(n for n in given if n in names)}")


FORMS = "epsilon and delta, advantage alone, tpr and fpr, or mu and delta"


def min_noise(scheme: Scheme, strategy: Strategy, tpr: float, fpr: float) -> tuple[float, float]:
    """Return the (epsilon, delta) that implies the rates and, by an estimate, needs least noise.

    Each point on the target's lines is valid, so that the estimate bears on the noise and not on the
    guarantee. It compares points by plain samples of the privacy loss at several noise multipliers, from a
    fixed key, so that the same call has the same target. The point is that of `implied`, for rates as there,
    where samples do not resolve a better one.
    """
    usual = implied(tpr=tpr, fpr=fpr)
    power, level = _rates(tpr, fpr)
    steepest = min(math.log(power / level), 100.0)
    flattest = -min(math.log((1 - level) / (1 - power)), 100.0)
    slopes = np.linspace(flattest, steepest, _CANDIDATES + 2)[1:-1].tolist()
    points = [usual, *(_line(slope, power, level) for slope in slopes)]
    top = unamplified.noise_multiplier_for(Mechanism(scheme, strategy, 1.0), *usual)
    sigmas = np.geomspace(top / 30, top, _NOISES)
    key = randomness.stream_key(jax.random.key(0), Stream.SEARCH - 1)
    try:
        losses = {
            direction: direction.sign
            * np.array(
                [
                    sample_privacy_loss(key, Mechanism(scheme, strategy, sigma), _SAMPLES, direction)
                    for sigma in sigmas.tolist()
                ],
                np.float64,
            )
            for direction in DIRECTIONS
        }
    except ValueError:  # no plain samples of this scheme
        return usual

    def noise_needed(epsilon: float, delta: float) -> float:
        if delta * _SAMPLES < _MIN_BEYOND:
            return math.inf
        found = np.max([hockey_stick(epsilon - losses[d]).mean(axis=1) for d in DIRECTIONS], axis=0)
        found = np.minimum.accumulate(np.maximum(found, 1e-9))
        if not found[-1] < delta < found[0]:
            return math.inf
        return float(np.exp(np.interp(-math.log(delta), -np.log(found), np.log(sigmas))))

    needed = [noise_needed(*point) for point in points]
    return points[int(np.argmin(needed))]


def in_words(epsilon: float, delta: float, given: Mapping[str, float | None]) -> str | None:
    """Return that a target in words of risk follows from (epsilon, delta); None for other targets."""
    point = f"({exact(epsilon)}, {exact(delta)})"
    tpr, fpr, mu = (given.get(name) for name in ("tpr", "fpr", "mu"))
    if tpr is not None and fpr is not None:
        return (
            f"target: at false positive rate {exact(fpr)} no membership test has a true positive rate above "
            f"{exact(tpr)}; {point} implies it"
        )
    if mu is not None:
        return (
            f"target: {point}, where the Gaussian mechanism of mu {exact(mu)} has this delta; no other point "
            "of its curve is certified"
        )
    return None


def _rates(tpr, fpr) -> tuple[float, float]:
    power, level = _validate.open_probability("tpr", tpr), _validate.open_probability("fpr", fpr)
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


__all__ = ["implied", "in_words", "min_noise"]
