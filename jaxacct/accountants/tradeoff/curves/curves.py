"""Trade-off functions as one small type.

A `TradeOff` is `f = T(P, Q)`, the least type II error at each type I error. It is held by its privacy profile
`delta(eps) = sup_a {1 - f(a) - e^eps a} = H_{e^eps}(Q, P)`, for epsilon of either sign, which is f's convex
conjugate and so the same information (arXiv 1905.02383, proposition 2.12). On profiles every operation is
plain: mixing with the index revealed averages them; the double conjugate of a minimum of trade-off functions
is a maximum of profiles; the inverse swaps P and Q.

Closed forms are jittable and vmappable over their parameters (every curve is a pytree); composition other
than of Gaussians is numerical and runs on the host (`composition`).
"""

import abc
import dataclasses
from typing import Any, dataclass_transform

import jax
import numpy as np
from scipy import special as scipy_special

from jaxacct.accountants.tradeoff.curves import arrays, composition, gaussian
from jaxacct.accountants.tradeoff.curves.arrays import bisect, library, plain
from jaxacct.accountants.tradeoff.curves.groups import checked_group, iterated
from jaxacct.common import validate as _validate

_MOST = 700.0  # natural log: e^700 is still a float64


@dataclass_transform(frozen_default=True, eq_default=True)
def curve(*leaves: str, static: tuple[str, ...] = ()):
    """Class decorator: a frozen dataclass that is a pytree with these leaves."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=True)(cls)
        return jax.tree_util.register_dataclass(cls, data_fields=list(leaves), meta_fields=list(static))

    return register


class TradeOff(abc.ABC):
    """What every curve can do. A larger f is more private; a guarantee is a lower bound on T."""

    symmetric = False
    """Whether f is its own inverse."""

    @abc.abstractmethod
    def log_delta(self, epsilon) -> Any:
        """Natural log of the profile at epsilon of either sign."""

    def survival(self, epsilon) -> tuple[Any, Any]:
        """`(Q(L > eps), P(L > eps))` of the loss `L = log dQ/dP`; infinite losses count.

        Raises:
          ValueError: for curves whose losses have no known law.
        """
        raise ValueError(
            f"parts must have a law of losses to be composed, {type(self).__name__} has none: compose the "
            "parts first"
        )

    @abc.abstractmethod
    def rdp(self, order: float) -> float:
        """Renyi divergence of an order above 1, natural log; infinity where there is none."""

    @abc.abstractmethod
    def zcdp(self) -> float:
        """The least known rho with rho-zCDP; infinity where there is none."""

    def delta(self, epsilon):
        """`delta(epsilon)`, epsilon >= 0."""
        arrays.check_epsilon(epsilon)
        xp, _, (log_delta,) = library(self.log_delta(epsilon))
        return plain(xp.exp(log_delta))

    def epsilon(self, delta):
        """The least epsilon >= 0 with `delta(epsilon) <= delta`, from above; inf where there is none."""
        arrays.check_delta(delta)
        # The parameters may be traced where delta is not.
        xp, _, (delta, seen) = library(delta, self.log_delta(0.0))
        target = xp.log(delta)
        one = xp.ones_like(delta + seen)

        def above(eps):
            return library(self.log_delta(eps))[2][0] > target

        # Two scales, so that an epsilon of 1e-9 and one of 10,000 are both found to full precision.
        largest = 14.0 * one
        _, high = bisect(lambda log_eps: above(xp.exp(log_eps)), -45.0 * one, largest)
        # Asked of the largest, as what was found is on the edge: compiled elsewhere, rounding may say above.
        found = xp.where(above(xp.exp(largest)), xp.inf, xp.exp(high))
        return plain(xp.where(above(0.0 * one), found, 0.0))

    def __call__(self, alpha):
        """`f(alpha)`: the largest of the lines `1 - delta(eps) - e^eps alpha`, so never above the truth."""
        arrays.check_level(alpha)
        best = _largest_line(self.log_delta, alpha)
        return plain(library(best)[0].maximum(0.0, best))

    def inverse(self) -> "TradeOff":
        """`f^-1 = T(Q, P)`."""
        return self if self.symmetric else Inverse(self)

    def symmetrized(self) -> "TradeOff":
        """`(min{f, f^-1})**`, by double conjugate: what holds whichever data set comes first."""
        return self if self.symmetric else Symmetrized(self)

    def group(self, size: int) -> "TradeOff":
        """What f-DP for one record gives for groups of `size`: `1 - (1 - f)^(o size)`."""
        size = checked_group(size)
        return self if size == 1 else Group(self, size)

    def compose(self, *others: "TradeOff") -> "TradeOff":
        """The tensor product with other curves (adaptive composition)."""
        return compose([(self, 1), *((other, 1) for other in others)])

    def power(self, count: int) -> "TradeOff":
        """The tensor power: composition with itself."""
        return compose([(self, count)])

    def __matmul__(self, other: "TradeOff") -> "TradeOff":
        return self.compose(other)


def _largest_line(log_delta, alpha):
    """`max over eps of 1 - delta(eps) - e^eps alpha`, concave in e^eps, by golden section."""
    xp, _, (alpha, seen) = library(alpha, log_delta(0.0))
    alpha = alpha + 0 * xp.exp(seen)
    ratio = (5**0.5 - 1) / 2

    def value(eps):
        delta = xp.exp(library(log_delta(eps))[2][0])
        return 1 - delta - xp.where(alpha > 0, xp.exp(eps) * alpha, 0.0)

    low, high = -40.0 + 0 * alpha, _MOST + 0 * alpha
    best = value(0 * alpha)
    for _ in range(90):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        first, second = value(one), value(two)
        best = xp.maximum(best, xp.maximum(first, second))
        left = first > second
        low, high = xp.where(left, low, one), xp.where(left, two, high)
    return best


@curve("mu")
class Gaussian(TradeOff):
    """G_mu."""

    mu: Any

    symmetric = True

    def __post_init__(self):
        arrays.check_mu(self.mu)

    def log_delta(self, epsilon):
        return gaussian.gdp_log_delta(epsilon, self.mu)

    def survival(self, epsilon):
        xp, special, (epsilon, mu) = library(epsilon, self.mu)
        m = xp.where(mu > 0, mu, 1.0)
        above = special.ndtr(m / 2 - epsilon / m), special.ndtr(-m / 2 - epsilon / m)
        return tuple(plain(xp.where(mu > 0, side, 1.0 * (epsilon < 0))) for side in above)

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
    """Perfect privacy: `Id(alpha) = 1 - alpha`, the neutral element of composition."""
    return Gaussian(0.0)


@curve("part")
class Inverse(TradeOff):
    """`f^-1`."""

    part: TradeOff

    def log_delta(self, epsilon):
        xp, _, (epsilon,) = library(epsilon)
        other = xp.exp(library(self.part.log_delta(-epsilon))[2][0])
        return plain(log_or_minus_infinity(xp, 1 - xp.exp(epsilon) * (1 - other)))

    def survival(self, epsilon):
        q, p = self.part.survival(-np.asarray(epsilon))
        return 1 - p, 1 - q  # losses at exactly -eps count as above: no difference off the atoms

    def inverse(self):
        return self.part

    def rdp(self, order):
        return rdp_of_profile(self, order)

    def zcdp(self):
        return self.part.zcdp()


@curve("part")
class Symmetrized(TradeOff):
    """`(min{f, f^-1})**`: the larger of the two profiles."""

    part: TradeOff

    symmetric = True

    def log_delta(self, epsilon):
        xp, _, _ = library(epsilon)
        sides = self.part.log_delta(epsilon), self.part.inverse().log_delta(epsilon)
        return plain(xp.maximum(*sides))

    def rdp(self, order):
        return rdp_of_profile(self, order)

    def zcdp(self):
        return max(self.part.zcdp(), self.part.inverse().zcdp())


@curve("part", static=("size",))
class Group(TradeOff):
    """`1 - (1 - f)^(o size)`: the generic bound for groups (arXiv 1905.02383, theorem 2.14).

    Its profile is bounded through a chain of neighbours, `delta(eps/g) (e^eps - 1) / (e^(eps/g) - 1)`: from
    above, so what it gives is a guarantee.
    """

    part: TradeOff
    size: int

    @property
    def symmetric(self) -> bool:
        return self.part.symmetric

    def __call__(self, alpha):
        return iterated(self.part, self.size, alpha)

    def log_delta(self, epsilon):
        xp, _, (epsilon,) = library(epsilon)
        size = xp.abs(epsilon)
        one = library(self.part.log_delta(size / self.size))[2][0]
        # ln (1 + e^(eps/g) + .. + e^((g-1) eps/g)) = ln (e^eps - 1) / (e^(eps/g) - 1), without overflow.
        tiny = size < 1e-280
        x = xp.where(tiny, 1.0, size)
        ratio = xp.log(-xp.expm1(-x)) - xp.log(-xp.expm1(-x / self.size))
        chain = xp.where(tiny, np.log(self.size), x * ((self.size - 1) / self.size) + ratio)
        value = xp.minimum(0.0, one + chain)
        if not self.symmetric:
            raise ValueError("a group of an asymmetric curve has no profile here; use symmetrized() first")
        negative = log_or_minus_infinity(xp, -xp.expm1(-size) + xp.exp(-size + value))
        return plain(xp.where(epsilon < 0, negative, value))

    def rdp(self, order):
        return rdp_of_profile(self, order)

    def zcdp(self):
        return self.size**2 * self.part.zcdp()


@dataclasses.dataclass(frozen=True)
class Composed(TradeOff):
    """A tensor product that has no closed form; `log_delta` is its pessimistic bound.

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
            delta = composition.delta_bracket(self.parts, self.grid, epsilon, both=False)[1]
            return plain(np.log(delta))

    def delta_bracket(self, epsilon):
        """`(optimistic, pessimistic)` delta at epsilon of either sign."""
        return composition.delta_bracket(self.parts, self.grid, epsilon)

    def epsilon_bracket(self, delta: float) -> tuple[float, float]:
        """`(optimistic, pessimistic)` epsilon at delta."""
        return composition.epsilon_bracket(self.parts, self.grid, delta)

    def epsilon(self, delta):
        arrays.check_delta(delta)
        if np.ndim(delta):
            return np.array([self.epsilon(float(one)) for one in np.ravel(delta)]).reshape(np.shape(delta))
        if composition.counts_as_infinite(self.parts, float(delta)):
            return np.inf
        return self.epsilon_bracket(float(delta))[1]

    def __call__(self, alpha):
        arrays.check_level(alpha)
        return composition.tradeoff_from_below(self.parts, self.grid, alpha)

    def rdp(self, order):
        return float(sum(count * part.rdp(order) for part, count in self.parts))

    def zcdp(self):
        return float(sum(count * part.zcdp() for part, count in self.parts))


def compose(parts) -> TradeOff:
    """The tensor product of `(curve, count)` pairs; counts of at least 0."""
    flat: list[tuple[TradeOff, int]] = []
    for part, count in parts:
        _validate.positive_integer("count", count, minimum=0)
        if not isinstance(part, TradeOff):
            raise ValueError(f"parts must be trade-off functions, was {type(part).__name__}")
        inner = part.parts if isinstance(part, Composed) else ((part, 1),)
        flat += [(one, times * count) for one, times in inner if times * count]
    gaussians = [(part.mu, count) for part, count in flat if isinstance(part, Gaussian)]
    mu = sum(one * one * count for one, count in gaussians) ** 0.5
    others: dict[TradeOff, int] = {}
    for part, count in flat:
        if isinstance(part, Gaussian):
            continue
        try:
            others[part] = others.get(part, 0) + count
        except TypeError:
            raise ValueError(
                f"parts must have plain numbers as parameters to be composed, was {type(part).__name__}"
            ) from None
    if not others:
        return Gaussian(mu)
    if mu == 0 and list(others.values()) == [1]:
        return next(iter(others))
    joined = tuple(others.items())
    if mu != 0:
        joined += ((Gaussian(float(mu)), 1),)
    return Composed(joined)


def log_or_minus_infinity(xp, value):
    positive = value > 0
    return xp.where(positive, xp.log(xp.where(positive, value, 1.0)), -xp.inf)


def rdp_of_profile(part: TradeOff, order: float) -> float:
    """`log(a (a-1) integral e^((a-1) eps) delta(eps) d eps) / (a-1)` by the trapezoidal rule on a wide
    grid."""
    arrays.check("order", order, "above 1", lambda a: a > 1)
    grid = np.concatenate([np.arange(-60, -2, 0.01), np.arange(-2, 2, 1e-4), np.geomspace(2, 600, 40001)])
    logs = (order - 1) * grid + np.asarray(part.log_delta(grid))
    if logs[-1] > logs.max() - 40:
        return float("inf")
    # Left of the grid delta is 1 - e^eps (1 - ..), at most 1.
    left = (order - 1) * grid[0] - np.log(order - 1)
    widths = np.diff(grid)
    pieces = np.log(widths) + np.logaddexp(logs[:-1], logs[1:]) - np.log(2)
    total = np.logaddexp(scipy_special.logsumexp(pieces), left)
    return float((np.log(order * (order - 1)) + total) / (order - 1))
