"""Privacy cost of the best of K runs with random K: private selection, for tuning hyperparameters.

The statement and its proof are in proofs/selection.md. Sources: Liu and Talwar (STOC 2019); Papernot and
Steinke (arXiv 2110.03620); Koskela, Redberg and Wang (arXiv 2402.06701), theorem on privacy profiles.
"""

import abc
import decimal
import functools
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.statistics import roots

MAX_MEAN_RUNS = 1e4
MAX_EPSILON = 100.0
_UNIT = 2.0**-52
# K is drawn by inversion with so many digits and bits that the total variation error of its distribution is
# below 1e-100, which adds at most (1 + e^MAX_EPSILON) times that to delta.
_DIGITS, _BITS, _DRAW_ERROR = 130, 400, 1e-56
_SMALLEST_MASS = Decimal(10) ** -120


@dataclass(frozen=True)
class RunCount(abc.ABC):
    """Distribution of the number of runs K, with probability generating function f and mean f'(1)."""

    mean: float

    @abc.abstractmethod
    def log_slope_ratio(self, at: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return `ln f'(to) - ln f'(at)` for 0 <= at <= to <= 1, float64, with its rounding error added."""

    @abc.abstractmethod
    def masses(self) -> Iterator[tuple[int, Decimal]]:
        """Yield (k, P(K = k)) for ascending k as `Decimal`, in the current decimal context."""

    def draw(self) -> int:
        """Return one K from the operating system's randomness; it must be drawn once and kept secret."""
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            left = Decimal(secrets.randbits(_BITS)) / (1 << _BITS)
            for count, mass in self.masses():
                left -= mass
                if left < 0 or (count > self.mean and mass < _SMALLEST_MASS):
                    return count
        raise ArithmeticError("the masses of K ended before their sum was 1")

    def quantile(self, share: float) -> int:
        """Return the smallest k with P(K <= k) >= share."""
        total = 0.0
        for count, mass in self.masses():
            total += float(mass)
            if total >= share:
                return count
        raise ArithmeticError("the masses of K ended before their sum was 1")


@dataclass(frozen=True)
class NegativeBinomial(RunCount):
    """Truncated negative binomial number of runs, at least 1 (Papernot and Steinke, definition 1).

    `f'(z)` is proportional to `(1 - (1 - stop) z)^(-shape - 1)`. Shape 1 is the geometric distribution, shape
    0 the logarithmic one; a smaller shape has a smaller privacy cost and more often few runs.

    Attributes:
      shape: in [-1/2, 10].
      mean: above 1.
    """

    shape: float

    def __post_init__(self):
        _within("shape", self.shape, -0.5, 10, closed=True)
        _within("mean_runs", self.mean, 1, MAX_MEAN_RUNS)

    @functools.cached_property
    def stop(self) -> float:
        """Parameter in (0, 1) that gives the mean: gamma of the paper."""
        _, high = roots.bisect(lambda log: self._mean_at(math.exp(log)) <= self.mean, -60.0, -1e-12)
        return math.exp(high)

    def _mean_at(self, stop: float) -> float:
        log = math.log(stop)
        spread = -log if self.shape == 0 else math.expm1(-self.shape * log) / self.shape
        return (1 - stop) * math.exp(-(1 + self.shape) * log) / spread

    def __str__(self) -> str:
        names = {-0.5: "", 0.0: ", the logarithmic distribution", 1.0: ", the geometric distribution"}
        kind = f"truncated negative binomial distribution of shape {self.shape:g}{names.get(self.shape, '')}"
        return f"{kind}, mean {self.mean:g}"

    def log_slope_ratio(self, at: np.ndarray, to: np.ndarray) -> np.ndarray:
        going = 1 - self.stop
        found = (self.shape + 1) * (np.log1p(-going * at) - np.log1p(-going * to))
        return found * (1 + 16 * _UNIT) + 64 * (self.shape + 1) * _UNIT / self.stop

    def masses(self) -> Iterator[tuple[int, Decimal]]:
        stop, shape = Decimal(self.stop), Decimal(self.shape)
        going = 1 - stop
        power = -stop.ln() if shape == 0 else ((-shape * stop.ln()).exp() - 1) / shape
        mass, count = going / power, 1
        while mass:
            yield count, mass
            mass *= going * (count + shape) / (count + 1)
            count += 1


@dataclass(frozen=True)
class PoissonRuns(RunCount):
    """Poisson number of runs; K = 0 releases nothing (Papernot and Steinke, theorem 6)."""

    def __post_init__(self):
        _within("mean_runs", self.mean, 0, 600)

    def __str__(self) -> str:
        return f"Poisson distribution of mean {self.mean:g}"

    def log_slope_ratio(self, at: np.ndarray, to: np.ndarray) -> np.ndarray:
        return self.mean * (to - at) * (1 + 4 * _UNIT) + 4 * self.mean * _UNIT

    def masses(self) -> Iterator[tuple[int, Decimal]]:
        mean = Decimal(self.mean)
        mass, count = (-mean).exp(), 0
        while mass:
            yield count, mass
            count += 1
            mass *= mean / count


DISTRIBUTIONS = {
    "half": lambda mean: NegativeBinomial(mean, -0.5),
    "logarithmic": lambda mean: NegativeBinomial(mean, 0.0),
    "geometric": lambda mean: NegativeBinomial(mean, 1.0),
    "poisson": PoissonRuns,
}
"""Distributions of K by name, functions of its mean: negative binomial of shapes -1/2, 0 and 1, Poisson."""


@dataclass(frozen=True, eq=False)
class CertifiedProfile:
    """Upper bounds on delta at several epsilons, of both directions.

    Attributes:
      epsilons: (points,) float64, each in [0, 100].
      deltas: (points,) float64, in [0, 1].
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    def __post_init__(self):
        for name in ("epsilons", "deltas"):
            object.__setattr__(self, name, np.atleast_1d(np.asarray(getattr(self, name), np.float64)))
        if self.epsilons.shape != self.deltas.shape or self.epsilons.ndim != 1 or not self.epsilons.size:
            raise ValueError("epsilons and deltas must be equally many numbers, at least one")
        for epsilon, delta in zip(self.epsilons, self.deltas, strict=True):
            _within("epsilon", float(epsilon), 0, MAX_EPSILON, closed=True)
            _within("delta", float(delta), 0, 1, closed=True)

    def most(self, share):
        """Return T(share): the maximum of P(S) where Q(S) is `share`, for tests S and both orders."""
        at = np.asarray(share, np.float64)[..., None]
        slopes = np.exp(self.epsilons)
        lines = np.minimum(slopes * at + self.deltas, 1 - (1 - self.deltas - at) / slopes)
        return np.maximum(at[..., 0], np.minimum(1.0, lines.min(axis=-1)))

    @functools.cached_property
    def corners(self) -> np.ndarray:
        """Shares at which `most`, a concave minimum of lines, may change its slope, including 0 and 1."""
        slopes = np.concatenate([np.exp(self.epsilons), np.exp(-self.epsilons), [0.0, 1.0]])
        starts = np.concatenate([self.deltas, 1 - (1 - self.deltas) * np.exp(-self.epsilons), [1.0, 0.0]])
        first, second = np.triu_indices(len(slopes), 1)
        apart = slopes[first] - slopes[second]
        met = (starts[second] - starts[first])[apart != 0] / apart[apart != 0]
        return np.unique(np.concatenate([[0.0, 1.0], met[(met > 0) & (met < 1)]]))

    def delta(self, epsilon: float) -> float:
        """Return the bound on delta at epsilon from all points together: max of T(x) - e^epsilon x."""
        found = self.most(self.corners) - math.exp(epsilon) * self.corners
        stated = self.deltas[self.epsilons <= epsilon].min(initial=1.0)  # without the rounding of the lines
        return float(min(stated, max(0.0, found.max()) + 16 * _UNIT))

    @classmethod
    def worst(cls, profiles: "list[CertifiedProfile]") -> "CertifiedProfile":
        """Return the profile of a random choice among mechanisms: at each epsilon the largest delta."""
        if len(profiles) == 1:
            return profiles[0]
        epsilons = np.unique(np.concatenate([each.epsilons for each in profiles]))
        deltas = [max(each.delta(float(epsilon)) for each in profiles) for epsilon in epsilons]
        return cls(epsilons, np.array(deltas))


@dataclass(frozen=True)
class Selected:
    """Guarantee of releasing the best of K runs.

    The failure probability of the certificates of a run is part of delta once and not for each run.
    """

    epsilon: float
    delta: float
    runs: RunCount
    failure_probability: float


def ranking_cost(profile: CertifiedProfile, runs: RunCount) -> float:
    """Return ln c, where `c = max of f'(T(x)) / f'(x)`: the increase of epsilon by choosing the best.

    On a piece of T the ratio is monotone (a Moebius function of x, or the exponential of a linear one), so
    the largest value is at a corner.
    """
    corners = profile.corners
    return float(np.max(runs.log_slope_ratio(corners, profile.most(corners))))


def select_best(
    profile: CertifiedProfile, runs: RunCount, delta: float | None = None, failure_probability: float = 0.0
) -> Selected:
    """Return the (epsilon, delta) of releasing the best of K runs.

    The output y of a run and its rank have profile delta(.); then for all e >= 0 the selection is
    `(e + ln c, E[K] delta(e))`-DP, c of `ranking_cost` (proofs/selection.md, theorem 1).

    Args:
      profile: of one run, both directions.
      runs: distribution of K.
      delta: of the result; by default that of the profile's largest epsilon. ValueError for one that the
        profile reaches at no epsilon.
      failure_probability: of the profile's certificates, in [0, 1).
    """
    failure = _within("failure_probability", failure_probability, 0, 1, closed=True)

    def total(epsilon: float) -> float:
        return (runs.mean * profile.delta(epsilon) + failure) * (1 + 8 * _UNIT) + _DRAW_ERROR

    top = float(profile.epsilons.max())
    delta = total(top) if delta is None else _validate.delta(delta)
    if not total(top) <= delta < 1:
        least = f"{total(top):.3g}"
        raise ValueError(
            f"delta must be at least {least}, the mean number of runs {runs.mean:g} times that of a run, and "
            f"below 1, got {delta!r}"
        )
    least = 0.0 if total(0.0) <= delta else roots.bisect(lambda e: total(e) <= delta, 0.0, top)[1]
    epsilon = (least + ranking_cost(profile, runs)) * (1 + 8 * _UNIT)
    if not epsilon <= MAX_EPSILON:
        raise ValueError(f"epsilon of the best run must be at most {MAX_EPSILON:g}, got {epsilon:.6g}")
    return Selected(epsilon, delta, runs, failure)


def target_of_a_run(epsilon: float, delta: float, runs: RunCount) -> tuple[float, float]:
    """Return the (epsilon, delta) that each run must have for the best of K to have the given one."""
    epsilon, delta = _validate.target(epsilon, delta, above_0=True)
    share = delta / max(1.0, runs.mean) * (1 - 1e-9)

    def too_much(each: float) -> bool:
        cost = ranking_cost(CertifiedProfile(np.array([each]), np.array([share])), runs)
        return not (each + cost) * (1 + 1e-12) <= epsilon

    if too_much(1e-9):
        raise ValueError(
            f"epsilon must be larger for a mean of {runs.mean:g} runs at delta {delta:g}, got {epsilon!r}"
        )
    return roots.bisect(too_much, 1e-9, epsilon, relative=1e-9)[0] if too_much(epsilon) else epsilon, share


def _within(name: str, value, low: float, high: float, closed: bool = False) -> float:
    """Return `value` if it is in the interval, or raise ValueError; NaN is refused."""
    value = _validate.instance(name, value, (int, float), "a number")
    if isinstance(value, bool) or not (low <= value <= high if closed else low < value <= high):
        raise ValueError(f"{name} must be in {'[' if closed else '('}{low:g}, {high:g}], got {value!r}")
    return float(value)


def with_mean(name: str, mean: float) -> RunCount:
    """Return the distribution of K of that name in `DISTRIBUTIONS` with that mean."""
    return DISTRIBUTIONS[_validate.one_of("distribution", name, tuple(DISTRIBUTIONS))](mean)
