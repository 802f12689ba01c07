"""Trade-off functions as one type.

A `TradeOff` is `f = T(P, Q)`, the smallest type II error at each type I error. It is represented by its
privacy profile `delta(eps) = sup_a {1 - f(a) - e^eps a} = H_{e^eps}(Q, P)`, for epsilon of either sign, which
is f's convex conjugate and so the same information (arXiv 1905.02383, proposition 2.12). On profiles every
operation is simple: mixing with the index revealed averages them; the double conjugate of a minimum of
trade-off functions is a maximum of profiles. Everything is NumPy in float64.
"""

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays, composition, gaussian
from jaxacct.accountants.tradeoff.curves.arrays import bisect, plain
from jaxacct.common import validate as _validate
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.statistics.loss_curves import LossCurve

_MOST = 700.0  # natural log: e^700 is still a float64
_MAX_GROUP = 1000


class TradeOff(abc.ABC):
    """Trade-off function of a mechanism. A larger f is more private; a guarantee is a lower bound on T.

    It must be symmetric, `f = f^-1`: valid for either order of the two data sets.
    """

    @abc.abstractmethod
    def log_delta(self, epsilon) -> Any:
        """Return the natural log of the profile at epsilon of either sign."""

    def loss_curve(self) -> LossCurve:
        """Return losses that dominate those of this curve, for compositions."""
        return composition.chords(self.log_delta)

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
            steep, delta = np.where(alpha > 0, np.exp(eps) * alpha, 0.0), np.exp(self.log_delta(eps))
            # Less the roundings of these operations, which the largest of many values would collect.
            rounding = np.minimum(delta, 2.0**-50) + np.where(steep > 0, 2.0**-50 * (1 + steep), 0.0)
            return 1 - delta - steep - rounding

        # Concave in e^eps: golden section.
        ratio = (5**0.5 - 1) / 2
        low, high = -40.0 + 0 * alpha, _MOST + 0 * alpha
        best = np.maximum(0.0, value(0 * alpha))
        for _ in range(90):
            one, two = high - ratio * (high - low), low + ratio * (high - low)
            first, second = value(one), value(two)
            best = np.maximum(best, np.maximum(first, second))
            low, high = np.where(first > second, low, one), np.where(first > second, two, high)
        return plain(np.where(alpha < 1, best, 0.0))

    def group(self, size: int) -> "TradeOff":
        """Return the curve of groups of `size` from f-DP for one record: `1 - (1 - f)^(o size)`."""
        size = checked_group(size)
        return self if size == 1 else Group(self, size)

    def power(self, count: int) -> "TradeOff":
        """Return the tensor power: composition with itself."""
        return compose([(self, count)])


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """Gaussian trade-off function G_mu."""

    mu: Any

    def __post_init__(self):
        arrays.nonnegative("mu", self.mu)

    def log_delta(self, epsilon):
        return gaussian.gdp_log_delta(epsilon, self.mu)

    def loss_curve(self) -> LossCurve:
        return sampled_gaussian(1 / self.mu)[0] if self.mu else super().loss_curve()

    def epsilon(self, delta):
        return gaussian.gdp_epsilon(delta, self.mu)

    def __call__(self, alpha):
        return gaussian.gdp_tradeoff(alpha, self.mu)

    def group(self, size: int) -> TradeOff:
        return Gaussian(gaussian.group_gdp(self.mu, size))


@dataclass(frozen=True)
class Group(TradeOff):
    """Group bound `1 - (1 - f)^(o size)`: generic, for any f (arXiv 1905.02383, theorem 2.14).

    Its profile is bounded through a chain of neighbours, `delta(eps/g) (e^eps - 1) / (e^(eps/g) - 1)`, from
    above, so the result is a guarantee.
    """

    part: TradeOff
    size: int

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
        return plain(np.where(epsilon < 0, gaussian.mirrored_log_delta(size, value), value))


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
    """Tensor product of `(curve, count)` pairs, all distinct, without a closed form: a pessimistic bound."""

    parts: tuple[tuple[TradeOff, int], ...]

    def log_delta(self, epsilon):
        with np.errstate(divide="ignore"):
            return plain(np.log(composition.delta_bound(self.parts, epsilon)))

    def epsilon(self, delta):
        deltas = arrays.open_share("delta", delta)
        found = [composition.epsilon_bound(self.parts, float(one)) for one in deltas.flat]
        return plain(np.array(found).reshape(deltas.shape))

    def __call__(self, alpha):
        return composition.tradeoff_from_below(self.parts, arrays.share("alpha", alpha))


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
