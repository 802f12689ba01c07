"""Mixtures of Gaussians over a participation law: exact trade-off, delta and epsilon.

With the participations revealed, `delta(eps) = E_c delta_{G_{c/sigma}}(eps)` (hockey-stick divergences
average) and `f` solves one equation for a common multiplier (arXiv 2212.05796, lemma B.5), with a case for
c = 0 that the paper leaves out: there the terms divide by zero. Truncated mass of the law is delta.
"""

import math

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, library, plain
from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff, curve
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import ParticipationPMF

_LARGEST_MU = 1e8


@curve("mus", "weights", "lost")
class GaussianMixture(TradeOff):
    """G_{mus[i]} with probability weights[i], the index revealed; with probability `lost` no privacy at
    all."""

    mus: np.ndarray
    weights: np.ndarray
    lost: float = 0.0

    symmetric = True

    def __post_init__(self):
        if any(arrays.is_placeholder(value) for value in (self.mus, self.weights, self.lost)):
            return  # JAX rebuilds pytrees around placeholders
        arrays.check_mu(self.mus, "mus")
        arrays.check("weights", self.weights, "at least 0", lambda w: w >= 0)
        arrays.check("lost", self.lost, "in [0, 1]", lambda w: (w >= 0) & (w <= 1))
        if np.shape(self.mus) != np.shape(self.weights) or np.ndim(self.mus) != 1:
            raise ValueError(
                f"weights must be as many as mus, had shape {np.shape(self.weights)} for {np.shape(self.mus)}"
            )
        total = math.fsum(np.asarray(self.weights, float)) + float(self.lost)
        if abs(total - 1) > 1e-9:
            raise ValueError(f"weights must sum to 1 with lost, summed to {total!r}")

    def __eq__(self, other):
        return type(other) is GaussianMixture and self._bytes == other._bytes

    def __hash__(self):
        return hash(self._bytes)

    @property
    def _bytes(self) -> bytes:
        """Of all numbers: equality of arrays as one truth value."""
        return np.concatenate(
            [np.ravel(np.asarray(x, float)) for x in (self.mus, self.weights, self.lost)]
        ).tobytes()

    def log_delta(self, epsilon):
        xp, _, (epsilon, mus, weights) = library(epsilon, self.mus, self.weights)
        parts = library(gdp_log_delta(epsilon[..., None], mus))[2][0]
        total = xp.sum(weights * xp.exp(parts), axis=-1) + self.lost
        return plain(xp.log(xp.where(total > 0, total, 1e-323)))

    def survival(self, epsilon):
        _, _, (epsilon,) = library(epsilon)
        pairs = Gaussian(self.mus).survival(epsilon[..., None])
        q, p = ((self.weights * side).sum(axis=-1) for side in pairs)
        return plain(q + self.lost), plain(p)

    def __call__(self, alpha):
        """The infimum over splits of alpha: one multiplier Lambda for all parts.

        For a part with mu > 0, `alpha_i = Phi(-(Lambda/mu + mu/2))`, `f_i = Phi(Lambda/mu - mu/2)`; a part
        with mu = 0 pays alpha for f at slope -1, all at once at Lambda = 0.
        """
        arrays.check_level(alpha)
        xp, special, (alpha, mus, weights) = library(alpha, self.mus, self.weights)
        # Type II errors of a mu this large are 0 in float64: no privacy.
        lost = self.lost + xp.sum(xp.where(mus > _LARGEST_MU, weights, 0.0))
        weights = xp.where(mus > _LARGEST_MU, 0.0, weights)
        real = (mus > 0) & (mus <= _LARGEST_MU)
        m, w = xp.where(real, mus, 1.0), xp.where(real, weights, 0.0)
        none = xp.sum(xp.where(mus > 0, 0.0, weights))

        def level(lagrange):
            return xp.sum(w * special.ndtr(-(lagrange[..., None] / m + m / 2)), axis=-1)

        def power(lagrange):
            return xp.sum(w * special.ndtr(lagrange[..., None] / m - m / 2), axis=-1)

        zero = xp.zeros_like(alpha)
        kink = level(zero)
        # Above the kink the parts with mu = 0 have paid all they can: solve for the rest of alpha.
        wanted = xp.where(alpha < kink, alpha, xp.maximum(alpha - none, 0.0))
        flat = (alpha >= kink) & (alpha <= kink + none)
        most = xp.max(m) ** 2 / 2 + 40 * xp.max(m) + 1
        low, high = bisect(lambda lagrange: level(lagrange) > wanted, zero - most, zero + most)
        solved = power((low + high) / 2) + xp.where(alpha < kink, none, 0.0)
        value = xp.where(flat, power(zero) + none - (alpha - kink), solved)
        value = xp.where(alpha <= 0, 1.0 - lost, xp.where(alpha >= 1 - lost, 0.0, value))
        return plain(xp.clip(value, 0.0, 1.0))

    def rdp(self, order):
        arrays.check("order", order, "above 1", lambda a: a > 1)
        if self.lost > 0:
            return float("inf")
        logs = (
            np.log(np.where(self.weights > 0, self.weights, 1e-323)) + order * (order - 1) * self.mus**2 / 2
        )
        return float(np.logaddexp.reduce(logs) / (order - 1))

    def zcdp(self):
        return float("inf") if self.lost > 0 else float(np.max(self.mus[self.weights > 0]) ** 2 / 2)


def mixture_curve(pmf: ParticipationPMF, sigma: float) -> GaussianMixture:
    """The exact trade-off function with the participations revealed; `sigma` relative to 2 C."""
    arrays.check_scale("sigma", sigma)
    if not isinstance(pmf, ParticipationPMF):
        raise ValueError(f"pmf must be a ParticipationPMF, was {type(pmf).__name__}")
    return GaussianMixture(np.sqrt(pmf.squared_sensitivity) / sigma, pmf.prob, pmf.truncated_mass)


def mixture_tradeoff(alpha, pmf: ParticipationPMF, sigma: float):
    """`f(alpha)` of `mixture_curve`; NOT the average of the parts' trade-offs, which is larger."""
    return mixture_curve(pmf, sigma)(alpha)


def mixture_delta(epsilon, pmf: ParticipationPMF, sigma: float):
    """`delta(epsilon)` of `mixture_curve`, epsilon >= 0."""
    return mixture_curve(pmf, sigma).delta(epsilon)


def mixture_epsilon(delta, pmf: ParticipationPMF, sigma: float):
    """The least epsilon >= 0 with `mixture_delta <= delta`.

    Raises:
      ValueError: where no epsilon will do, because the truncated mass alone exceeds delta.
    """
    arrays.check_delta(delta)
    if not np.all(np.asarray(delta) > pmf.truncated_mass):
        raise ValueError(
            f"delta must be above the truncated mass {pmf.truncated_mass:.3g} of the pmf, was {delta!r}"
        )
    return mixture_curve(pmf, sigma).epsilon(delta)
