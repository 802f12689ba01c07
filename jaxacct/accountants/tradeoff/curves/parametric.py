"""Curves besides Gaussian ones: (epsilon, delta), mixtures, sampled mechanisms, several guarantees."""

import functools
from typing import Any

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays, gaussian
from jaxacct.accountants.tradeoff.curves.arrays import library, plain
from jaxacct.accountants.tradeoff.curves.curves import (
    Gaussian,
    TradeOff,
    curve,
    log_or_minus_infinity,
    rdp_of_profile,
)
from jaxacct.accountants.tradeoff.curves.subsampling import (
    amplified_epsilon,
    check_share,
    subsampled_gdp_tradeoff,
)

_MOST = 700.0  # natural log: e^700 is still a float64


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
        up, down = _responses(xp, eps)
        e = xp.minimum(e, _MOST)
        held = -up * xp.expm1(xp.minimum(0.0, e - eps)) - down * xp.expm1(xp.minimum(0.0, e + eps))
        return plain(log_or_minus_infinity(xp, mass + (1 - mass) * held))

    def survival(self, epsilon):
        xp, _, (e, eps, mass) = library(epsilon, self.eps, self.mass)
        up, down = _responses(xp, eps)
        q = mass + (1 - mass) * (up * (eps > e) + down * (-eps > e))
        p = (1 - mass) * (down * (eps > e) + up * (-eps > e))
        return plain(q), plain(p)

    def __call__(self, alpha):
        return gaussian.dp_tradeoff(alpha, self.eps, self.mass)

    def rdp(self, order):
        arrays.check("order", order, "above 1", lambda a: a > 1)
        _, _, (a, eps) = library(order, self.eps)
        # Divergences grow with the order: near 1 one a little larger is taken, which costs no digits.
        a = np.maximum(a, 1 + 2.0**-20)
        value = eps + (np.log1p(np.exp((1 - 2 * a) * eps)) - np.log1p(np.exp(-eps))) / (a - 1)
        return np.inf if self.mass > 0 else plain(value)

    def zcdp(self):
        return np.inf if self.mass > 0 else plain(np.asarray(self.eps, np.float64) ** 2 / 2)


def _responses(xp, eps):
    """Probabilities of the likelier and the other answer of randomised response."""
    other = xp.exp(-eps)
    return 1 / (1 + other), other / (1 + other)


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
        return plain(log_or_minus_infinity(xp, sum(terms)))

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
        negative = log_or_minus_infinity(xp, -xp.expm1(-size) + xp.exp(-size + value))
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
        return rdp_of_profile(self, order)

    def zcdp(self):
        return self.part.zcdp()  # a sample of a mechanism is no less private than the mechanism


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
