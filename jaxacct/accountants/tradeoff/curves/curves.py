"""Trade-off functions as one type.

A `TradeOff` is `f = T(P, Q)`, the smallest type II error at each type I error. It is represented by its
privacy profile `delta(eps) = sup_a {1 - f(a) - e^eps a} = H_{e^eps}(Q, P)`, for epsilon of either sign, which
is f's convex conjugate and so the same information (arXiv 1905.02383, proposition 2.12). On profiles every
operation is
simple: mixing with the index revealed averages them; the double conjugate of a minimum of trade-off
functions is a maximum of profiles; the inverse swaps P and Q. Everything is NumPy in float64.
"""

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays, composition, gaussian
from jaxacct.accountants.tradeoff.curves.arrays import bisect, log_of_positive, plain
from jaxacct.common import validate as _validate

_MOST = 700.0  # natural log: e^700 is still a float64
_MAX_GROUP = 1000


class TradeOff(abc.ABC):
    """Trade-off function of a mechanism. A larger f is more private; a guarantee is a lower bound on T."""

    symmetric = False
    """Whether f is its own inverse."""

    @abc.abstractmethod
    def log_delta(self, epsilon) -> Any:
        """Return the natural log of the profile at epsilon of either sign."""

    def survival(self, epsilon) -> tuple[Any, Any]:
        """Return `(Q(L > eps), P(L > eps))` of the loss `L = log dQ/dP`; infinite losses count.

        Raises:
          ValueError: curves without a distribution of losses.
        """
        raise ValueError(
            f"{type(self).__name__} has no distribution of losses and cannot be composed: compose the "
            "parts first"
        )

    def rdp(self, order: float) -> float:
        """Return the Renyi divergence of an order above 1, nats; infinity where there is none."""
        return rdp_of_profile(self, order)

    @abc.abstractmethod
    def zcdp(self) -> float:
        """Return the smallest known rho with rho-zCDP; infinity where there is none."""

    def delta(self, epsilon):
        """Return `delta(epsilon)`, epsilon >= 0."""
        return plain(np.exp(self.log_delta(arrays.nonnegative("epsilon", epsilon))))

    def epsilon(self, delta):
        """Return the smallest epsilon >= 0 with `delta(epsilon) <= delta`, rounded up; inf if none."""
        target = np.log(arrays.open_share("delta", delta))
        largest = np.full_like(target, 14.0)

        def is_above(log_eps):
            return self.log_delta(np.exp(log_eps)) > target

        # In logs, so that an epsilon of 1e-9 and one of 10,000 both have full precision.
        _, high = bisect(is_above, -45.0, largest)
        found = np.where(is_above(largest), np.inf, np.exp(high))
        return plain(np.where(self.log_delta(0.0) > target, found, 0.0))

    def __call__(self, alpha):
        """Return `f(alpha)`, rounded down: the largest of the lines `1 - delta(eps) - e^eps alpha`."""
        alpha = arrays.share("alpha", alpha)

        def value(eps):
            steep = np.where(alpha > 0, np.exp(eps) * alpha, 0.0)
            return 1 - np.exp(self.log_delta(eps)) - steep

        # Concave in e^eps: golden section.
        ratio = (5**0.5 - 1) / 2
        low, high = -40.0 + 0 * alpha, _MOST + 0 * alpha
        best = np.maximum(0.0, value(0 * alpha))
        for _ in range(90):
            one, two = high - ratio * (high - low), low + ratio * (high - low)
            first, second = value(one), value(two)
            best = np.maximum(best, np.maximum(first, second))
            low, high = np.where(first > second, low, one), np.where(first > second, two, high)
        return plain(best)

    def inverse(self) -> "TradeOff":
        """Return `f^-1 = T(Q, P)`."""
        return self if self.symmetric else Inverse(self)

    def symmetrized(self) -> "TradeOff":
        """Return `(min{f, f^-1})**`, by double conjugate: valid for either order of the data sets."""
        return self if self.symmetric else Symmetrized(self)

    def group(self, size: int) -> "TradeOff":
        """Return the curve of groups of `size` from f-DP for one record: `1 - (1 - f)^(o size)`."""
        size = checked_group(size)
        return self if size == 1 else Group(self, size)

    def compose(self, *others: "TradeOff") -> "TradeOff":
        """Return the tensor product with other curves (adaptive composition)."""
        return compose([(self, 1), *((other, 1) for other in others)])

    def power(self, count: int) -> "TradeOff":
        """Return the tensor power: composition with itself."""
        return compose([(self, count)])

    def __matmul__(self, other: "TradeOff") -> "TradeOff":
        return self.compose(other)


def rdp_of_profile(part: TradeOff, order: float) -> float:
    """Return `log(a (a-1) integral e^((a-1) eps) delta(eps) d eps) / (a-1)` by the trapezoidal rule."""
    order = float(arrays.order(order))
    grid = np.concatenate([np.arange(-60, -2, 0.01), np.arange(-2, 2, 1e-4), np.geomspace(2, 600, 40001)])
    logs = (order - 1) * grid + np.asarray(part.log_delta(grid))
    if logs[-1] > logs.max() - 40:
        return float("inf")
    # Left of the grid delta is 1 - e^eps (1 - ..), at most 1.
    left = (order - 1) * grid[0] - np.log(order - 1)
    pieces = np.log(np.diff(grid)) + np.logaddexp(logs[:-1], logs[1:]) - np.log(2)
    total = np.logaddexp(special.logsumexp(pieces), left)
    return float((np.log(order * (order - 1)) + total) / (order - 1))


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """Gaussian trade-off function G_mu."""

    mu: Any

    symmetric = True

    def __post_init__(self):
        arrays.nonnegative("mu", self.mu)

    def log_delta(self, epsilon):
        return gaussian.gdp_log_delta(epsilon, self.mu)

    def survival(self, epsilon):
        epsilon, mu = np.asarray(epsilon, np.float64), np.asarray(self.mu, np.float64)
        m = np.where(mu > 0, mu, 1.0)
        above = special.ndtr(m / 2 - epsilon / m), special.ndtr(-m / 2 - epsilon / m)
        return tuple(plain(np.where(mu > 0, side, 1.0 * (epsilon < 0))) for side in above)

    def epsilon(self, delta):
        return gaussian.gdp_epsilon(delta, self.mu)

    def __call__(self, alpha):
        return gaussian.gdp_tradeoff(alpha, self.mu)

    def group(self, size: int) -> TradeOff:
        return Gaussian(gaussian.group_gdp(self.mu, size))

    def rdp(self, order):
        return gaussian.gdp_to_rdp(self.mu, order)

    def zcdp(self):
        return gaussian.gdp_to_zcdp(self.mu)


def Identity() -> Gaussian:
    """Return perfect privacy: `Id(alpha) = 1 - alpha`, the neutral element of composition."""
    return Gaussian(0.0)


@dataclass(frozen=True)
class Inverse(TradeOff):
    """Inverse `f^-1`."""

    part: TradeOff

    def log_delta(self, epsilon):
        other = np.exp(self.part.log_delta(-np.asarray(epsilon)))
        return plain(log_of_positive(1 - np.exp(epsilon) * (1 - other)))

    def survival(self, epsilon):
        q, p = self.part.survival(-np.asarray(epsilon))
        return 1 - p, 1 - q  # losses at exactly -eps count as above: no difference off the atoms

    def inverse(self):
        return self.part

    def zcdp(self):
        return self.part.zcdp()


@dataclass(frozen=True)
class Symmetrized(TradeOff):
    """Symmetrized `(min{f, f^-1})**`: the larger of the two profiles."""

    part: TradeOff

    symmetric = True

    def log_delta(self, epsilon):
        return plain(np.maximum(self.part.log_delta(epsilon), self.part.inverse().log_delta(epsilon)))

    def zcdp(self):
        return max(self.part.zcdp(), self.part.inverse().zcdp())


@dataclass(frozen=True)
class Group(TradeOff):
    """Group bound `1 - (1 - f)^(o size)`: generic, for any f (arXiv 1905.02383, theorem 2.14).

    Its profile is bounded through a chain of neighbours, `delta(eps/g) (e^eps - 1) / (e^(eps/g) - 1)`, from
    above, so the result is a guarantee.
    """

    part: TradeOff
    size: int

    @property
    def symmetric(self) -> bool:
        return self.part.symmetric

    def __call__(self, alpha):
        return group_tradeoff(self.part, self.size)(alpha)

    def log_delta(self, epsilon):
        epsilon = np.asarray(epsilon, np.float64)
        size = np.abs(epsilon)
        one = np.asarray(self.part.log_delta(size / self.size))
        # ln (1 + e^(eps/g) + .. + e^((g-1) eps/g)) = ln (e^eps - 1) / (e^(eps/g) - 1), without overflow.
        tiny = size < 1e-280
        x = np.where(tiny, 1.0, size)
        ratio = np.log(-np.expm1(-x)) - np.log(-np.expm1(-x / self.size))
        chain = np.where(tiny, np.log(self.size), x * ((self.size - 1) / self.size) + ratio)
        value = np.minimum(0.0, one + chain)
        if not self.symmetric:
            raise ValueError("a group of an asymmetric curve has no profile here; use symmetrized() first")
        return plain(np.where(epsilon < 0, gaussian.mirrored_log_delta(size, value), value))

    def zcdp(self):
        return self.size**2 * self.part.zcdp()


def group_tradeoff(f: Callable, g: int) -> Callable:
    """Return `1 - (1 - f)^(o g)`, the trade-off function for groups of g of any f-DP mechanism."""
    g = checked_group(g, "g")
    return lambda alpha: 1 - functools.reduce(lambda value, _: 1 - f(value), range(g), alpha)


def checked_group(size, name: str = "size") -> int:
    """Return `size` as an int in [1, 1000], or raise ValueError: the rule takes one step per record."""
    count = _validate.positive_integer(name, size)
    if count > _MAX_GROUP:
        raise ValueError(f"{name} must be at most {_MAX_GROUP}, got {count}")
    return count


@dataclass(frozen=True)
class Composed(TradeOff):
    """Tensor product without a closed form; `log_delta` is its pessimistic bound.

    Attributes:
      parts: distinct curves with their counts.
      grid: natural log; spacing of the losses, chosen from the curves by default.
    """

    parts: tuple[tuple[TradeOff, int], ...]
    grid: float | None = None

    @property
    def symmetric(self) -> bool:
        return all(part.symmetric for part, _ in self.parts)

    def inverse(self) -> TradeOff:
        return self if self.symmetric else Composed(tuple((p.inverse(), k) for p, k in self.parts), self.grid)

    def log_delta(self, epsilon):
        with np.errstate(divide="ignore"):
            return plain(np.log(composition.delta_bracket(self.parts, self.grid, epsilon, both=False)[1]))

    def delta_bracket(self, epsilon):
        """Return `(optimistic, pessimistic)` delta at epsilon of either sign."""
        return composition.delta_bracket(self.parts, self.grid, epsilon)

    def epsilon_bracket(self, delta: float) -> tuple[float, float]:
        """Return `(optimistic, pessimistic)` epsilon at delta."""
        return composition.epsilon_bracket(self.parts, self.grid, delta)

    def epsilon(self, delta):
        deltas = arrays.open_share("delta", delta)
        return plain(np.array([self._epsilon(float(one)) for one in deltas.flat]).reshape(deltas.shape))

    def _epsilon(self, delta: float) -> float:
        if composition.counts_as_infinite(self.parts, delta):
            return np.inf
        return self.epsilon_bracket(delta)[1]

    def __call__(self, alpha):
        return composition.tradeoff_from_below(self.parts, self.grid, arrays.share("alpha", alpha))

    def rdp(self, order):
        return float(sum(count * part.rdp(order) for part, count in self.parts))

    def zcdp(self):
        return float(sum(count * part.zcdp() for part, count in self.parts))


def compose(parts) -> TradeOff:
    """Return the tensor product of `(curve, count)` pairs; counts of at least 0."""
    flat: list[tuple[TradeOff, int]] = []
    for part, count in parts:
        _validate.positive_integer("count", count, minimum=0)
        if not isinstance(part, TradeOff):
            raise ValueError(f"parts must be trade-off functions, got {type(part).__name__}")
        inner = part.parts if isinstance(part, Composed) else ((part, 1),)
        flat += [(one, times * count) for one, times in inner if times * count]
    mu = sum(part.mu * part.mu * count for part, count in flat if isinstance(part, Gaussian)) ** 0.5
    others: dict[TradeOff, int] = {}
    for part, count in flat:
        if isinstance(part, Gaussian):
            continue
        try:
            others[part] = others.get(part, 0) + count
        except TypeError:
            raise ValueError(
                f"parts must have plain numbers as parameters to be composed, got {type(part).__name__}"
            ) from None
    if not others:
        return Gaussian(mu)
    if mu == 0 and list(others.values()) == [1]:
        return next(iter(others))
    return Composed((*others.items(), *([(Gaussian(float(mu)), 1)] if mu != 0 else [])))
