"""Trade-off functions as one small type.

A `TradeOff` is `f = T(P, Q)`, the least type II error at each type I error. It is held by its privacy profile
`delta(eps) = sup_a {1 - f(a) - e^eps a} = H_{e^eps}(Q, P)`, for epsilon of either sign, which is f's convex
conjugate and so the same information (arXiv 1905.02383, proposition 2.12). On profiles every operation is
plain: mixing with the index revealed averages them; the double conjugate of a minimum of trade-off functions
is a maximum of profiles; the inverse swaps P and Q.

Closed forms are jittable and vmappable over their parameters (every curve is a pytree); composition other
than of Gaussians is numerical and runs on the host (`composition`).
"""

import dataclasses
import functools
from typing import Any, dataclass_transform

import jax
import numpy as np
from scipy import special as scipy_special

from jaxacct.tradeoff import _arrays as arrays
from jaxacct.tradeoff import gaussian
from jaxacct.tradeoff._arrays import bisect, library, plain
from jaxacct.tradeoff.subsampling import amplified_epsilon, check_share, subsampled_gdp_tradeoff

_MOST = 700.0  # natural log: e^700 is still a float64


@dataclass_transform(frozen_default=True, eq_default=True)
def curve(*leaves: str, static: tuple[str, ...] = ()):
    """Class decorator: a frozen dataclass that is a pytree with these leaves."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=True)(cls)
        return jax.tree_util.register_dataclass(cls, data_fields=list(leaves), meta_fields=list(static))

    return register


class TradeOff:
    """What every curve can do. A larger f is more private; a guarantee is a lower bound on T."""

    symmetric = False
    """Whether f is its own inverse."""

    def log_delta(self, epsilon) -> Any:
        """Natural log of the profile at epsilon of either sign."""
        raise NotImplementedError

    def survival(self, epsilon) -> tuple[Any, Any]:
        """`(Q(L > eps), P(L > eps))` of the loss `L = log dQ/dP`; infinite losses count."""
        raise NotImplementedError

    def rdp(self, order: float) -> float:
        """Renyi divergence of an order above 1, natural log; infinity where there is none."""
        raise NotImplementedError

    def zcdp(self) -> float:
        """The least known rho with rho-zCDP; infinity where there is none."""
        raise NotImplementedError

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
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"size must be an integer of at least 1, was {size!r}")
        return self if size == 1 else Group(self, int(size))

    def compose(self, *others: "TradeOff") -> "TradeOff":
        """The tensor product with other curves (adaptive composition)."""
        from jaxacct.tradeoff.composition import compose

        return compose([(self, 1), *((other, 1) for other in others)])

    def power(self, count: int) -> "TradeOff":
        """The tensor power: composition with itself."""
        from jaxacct.tradeoff.composition import compose

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


@curve("eps", "mass")
class EpsilonDelta(TradeOff):
    """f_{eps, delta}: what an (eps, delta)-DP mechanism guarantees; `mass` is its delta."""

    eps: Any
    mass: Any = 0.0

    symmetric = True

    def __post_init__(self):
        arrays.check_epsilon(self.eps)
        arrays.check("delta", self.mass, "in [0, 1]", lambda d: (d >= 0) & (d <= 1))

    def log_delta(self, epsilon):
        xp, _, (e, eps, mass) = library(epsilon, self.eps, self.mass)
        # Randomised response beside a mass of infinite loss; H of either sign.
        up = 1 / (1 + xp.exp(-eps))
        e = xp.minimum(e, _MOST)
        held = xp.maximum(0.0, up - xp.exp(e) * (1 - up)) + xp.maximum(0.0, (1 - up) - xp.exp(e) * up)
        return plain(_log(xp, mass + (1 - mass) * held))

    def survival(self, epsilon):
        xp, _, (e, eps, mass) = library(epsilon, self.eps, self.mass)
        up = 1 / (1 + xp.exp(-eps))
        q = mass + (1 - mass) * (up * (eps > e) + (1 - up) * (-eps > e))
        p = (1 - mass) * ((1 - up) * (eps > e) + up * (-eps > e))
        return plain(q), plain(p)

    def __call__(self, alpha):
        return gaussian.dp_tradeoff(alpha, self.eps, self.mass)

    def rdp(self, order):
        arrays.check("order", order, "above 1", lambda a: a > 1)
        _, _, (a, eps) = library(order, self.eps)
        value = (np.logaddexp(a * eps, (1 - a) * eps) - np.logaddexp(0.0, eps)) / (a - 1)
        return np.inf if self.mass > 0 else plain(value)

    def zcdp(self):
        return np.inf if self.mass > 0 else plain(np.asarray(self.eps, np.float64) ** 2 / 2)


@curve("weights", "parts")
class Mixture(TradeOff):
    """A mechanism that runs part i with probability `weights[i]` and shows which (arXiv 2212.05796, lemma
    B.1).

    `f(alpha) = inf {sum w_i f_i(alpha_i) : sum w_i alpha_i = alpha}`, whose profile is the weighted mean of
    the parts'. For an adversary who does not see i it is a lower bound.
    """

    weights: tuple
    parts: tuple[TradeOff, ...]

    def __post_init__(self):
        if any(arrays.is_placeholder(weight) for weight in self.weights):
            return
        arrays.check("weights", list(self.weights), "at least 0", lambda w: w >= 0)
        if len(self.weights) != len(self.parts) or abs(sum(self.weights) - 1) > 1e-9:
            raise ValueError(f"weights must be one a part and sum to 1, were {self.weights!r}")

    @property
    def symmetric(self) -> bool:
        return all(part.symmetric for part in self.parts)

    def log_delta(self, epsilon):
        xp, _, _ = library(*self.weights, epsilon)
        terms = [w * xp.exp(p.log_delta(epsilon)) for w, p in zip(self.weights, self.parts, strict=True)]
        return plain(_log(xp, sum(terms)))

    def survival(self, epsilon):
        pairs = [part.survival(epsilon) for part in self.parts]
        return tuple(
            sum(w * pair[side] for w, pair in zip(self.weights, pairs, strict=True)) for side in (0, 1)
        )

    def rdp(self, order):
        exponents = [(order - 1) * np.asarray(part.rdp(order)) for part in self.parts]
        logs = [np.log(w) + e if w > 0 else -np.inf for w, e in zip(self.weights, exponents, strict=True)]
        return plain(np.logaddexp.reduce(logs) / (order - 1))

    def zcdp(self):
        return max(part.zcdp() for w, part in zip(self.weights, self.parts, strict=True) if w > 0)


@curve("part", "sampling_prob")
class Subsampled(TradeOff):
    """`C_p(f)`: the symmetric f on a fixed-size sample of a share p, without replacement."""

    part: TradeOff
    sampling_prob: Any

    symmetric = True

    def __post_init__(self):
        if not isinstance(self.part, TradeOff):
            return  # JAX rebuilds pytrees around placeholders
        check_share(self.sampling_prob)
        if not self.part.symmetric:
            raise ValueError("part must be symmetric to be subsampled; use symmetrized() first")

    def log_delta(self, epsilon):
        xp, _, (epsilon, p) = library(epsilon, self.sampling_prob)
        share = xp.where(p > 0, p, 1.0)
        size = xp.abs(epsilon)
        inner = library(self.part.log_delta(amplified_epsilon(size, share)))[2][0]
        value = xp.where(p > 0, xp.log(share) + inner, -xp.inf)
        negative = _log(xp, -xp.expm1(-size) + xp.exp(-size + value))
        return plain(xp.where(epsilon < 0, negative, value))

    def survival(self, epsilon):
        xp, _, (epsilon, p) = library(epsilon, self.sampling_prob)
        share = xp.where(p > 0, p, 1.0)
        size = xp.abs(epsilon)
        up, down = map(lambda side: library(side)[2][0], self.part.survival(amplified_epsilon(size, share)))
        # Beyond epsilon >= 0: Q = p Q' + (1-p) P', P = P'. Below it the two change places.
        q, p_ = share * up + (1 - share) * down, down
        q = xp.where(p > 0, q, 0.0)
        p_ = xp.where(p > 0, p_, 0.0)
        at_or_above = 1 - p_, 1 - q
        return tuple(
            plain(xp.where(epsilon < 0, swapped, own))
            for own, swapped in zip((q, p_), at_or_above, strict=True)
        )

    def __call__(self, alpha):
        if isinstance(self.part, Gaussian):
            return subsampled_gdp_tradeoff(alpha, self.part.mu, self.sampling_prob)
        return super().__call__(alpha)

    def rdp(self, order):
        return _rdp_of_profile(self, order)

    def zcdp(self):
        return self.part.zcdp()  # a sample of a mechanism is no less private than the mechanism


@curve("part")
class Inverse(TradeOff):
    """`f^-1`."""

    part: TradeOff

    def log_delta(self, epsilon):
        xp, _, (epsilon,) = library(epsilon)
        other = xp.exp(library(self.part.log_delta(-epsilon))[2][0])
        return plain(_log(xp, 1 - xp.exp(epsilon) * (1 - other)))

    def survival(self, epsilon):
        q, p = self.part.survival(-np.asarray(epsilon))
        return 1 - p, 1 - q  # losses at exactly -eps count as above: no difference off the atoms

    def inverse(self):
        return self.part

    def rdp(self, order):
        return _rdp_of_profile(self, order)

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
        return _rdp_of_profile(self, order)

    def zcdp(self):
        return max(self.part.zcdp(), self.part.inverse().zcdp())


@curve("parts")
class Best(TradeOff):
    """Several guarantees of one mechanism at once: the smallest of their profiles."""

    parts: tuple[TradeOff, ...]

    @property
    def symmetric(self) -> bool:
        return all(part.symmetric for part in self.parts)

    def log_delta(self, epsilon):
        xp, _, _ = library(epsilon)
        return functools.reduce(xp.minimum, [part.log_delta(epsilon) for part in self.parts])

    def epsilon(self, delta):
        return functools.reduce(np.minimum, [part.epsilon(delta) for part in self.parts])

    def rdp(self, order):
        return min(part.rdp(order) for part in self.parts)

    def zcdp(self):
        return min(part.zcdp() for part in self.parts)


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
        value = alpha
        for _ in range(self.size):
            value = 1 - self.part(value)
        return 1 - value

    def log_delta(self, epsilon):
        xp, _, (epsilon,) = library(epsilon)
        size = xp.abs(epsilon)
        one = library(self.part.log_delta(size / self.size))[2][0]
        chain = xp.zeros_like(size)
        for step in range(1, self.size):
            chain = xp.logaddexp(chain, step * size / self.size)
        value = xp.minimum(0.0, one + chain)
        if not self.symmetric:
            raise ValueError("a group of an asymmetric curve has no profile here; use symmetrized() first")
        negative = _log(xp, -xp.expm1(-size) + xp.exp(-size + value))
        return plain(xp.where(epsilon < 0, negative, value))

    def rdp(self, order):
        return _rdp_of_profile(self, order)

    def zcdp(self):
        return self.size**2 * self.part.zcdp()


def _log(xp, value):
    positive = value > 0
    return xp.where(positive, xp.log(xp.where(positive, value, 1.0)), -xp.inf)


def _rdp_of_profile(part: TradeOff, order: float) -> float:
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
