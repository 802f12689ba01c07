"""Non-Gaussian curves: (epsilon, delta), mixtures of Gaussians, sampled mechanisms, several guarantees."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays, composition, gaussian
from jaxacct.accountants.tradeoff.curves.arrays import log_of_positive, plain
from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff
from jaxacct.accountants.tradeoff.curves.subsampling import amplified_epsilon

_MOST = 700.0  # natural log: e^700 is still a float64
_ROUNDED = 2.0**-45  # what weights may fall short of 1 by the rounding of each


@dataclass(frozen=True)
class EpsilonDelta(TradeOff):
    """Curve f_{eps, delta} that an (eps, delta)-DP mechanism guarantees; `mass` is its delta."""

    eps: Any
    mass: Any = 0.0

    def __post_init__(self):
        arrays.nonnegative("epsilon", self.eps)
        arrays.share("delta", self.mass)

    def log_delta(self, epsilon):
        # Randomised response beside a mass of infinite loss; H of either sign.
        other = np.exp(-np.asarray(self.eps, np.float64))
        up, down = 1 / (1 + other), other / (1 + other)
        e = np.minimum(epsilon, _MOST)
        held = -up * np.expm1(np.minimum(0.0, e - self.eps)) - down * np.expm1(np.minimum(0.0, e + self.eps))
        return plain(log_of_positive(self.mass + (1 - self.mass) * held))

    def loss_curve(self):
        return composition.chords(self.log_delta, [self.eps])

    def __call__(self, alpha):
        return gaussian.dp_tradeoff(alpha, self.eps, self.mass)


@dataclass(frozen=True)
class Subsampled(TradeOff):
    """Curve `C_p(f)`: the symmetric f on a fixed-size sample of a share p, without replacement."""

    part: TradeOff
    sampling_prob: Any

    def __post_init__(self):
        arrays.share("sampling_prob", self.sampling_prob)

    def log_delta(self, epsilon):
        epsilon, p = np.asarray(epsilon, np.float64), np.asarray(self.sampling_prob, np.float64)
        share, size = np.where(p > 0, p, 1.0), np.abs(epsilon)
        inner = self.part.log_delta(amplified_epsilon(size, share))
        value = np.where(p > 0, np.log(share) + inner, -np.inf)
        return plain(np.where(epsilon < 0, gaussian.mirrored_log_delta(size, value), value))


def subsampled_gdp_tradeoff(alpha, mu, sampling_prob):
    """Return `C_p(G_mu)(alpha)`, rounded down; `mu`, finite, is of the mechanism on the sample."""
    mu = arrays.checked("mu", mu, "finite and at least 0", lambda m: np.isfinite(m) & (m >= 0))
    alpha, mu, p = np.broadcast_arrays(alpha, mu, arrays.share("sampling_prob", sampling_prob))
    return Subsampled(Gaussian(mu), p)(alpha)


@dataclass(frozen=True)
class Best(TradeOff):
    """Several guarantees of one mechanism at once: the smallest of their profiles."""

    parts: tuple[TradeOff, ...]

    def log_delta(self, epsilon):
        return functools.reduce(np.minimum, [part.log_delta(epsilon) for part in self.parts])

    def epsilon(self, delta):
        return functools.reduce(np.minimum, [part.epsilon(delta) for part in self.parts])


@dataclass(frozen=True, eq=False)
class GaussianMixture(TradeOff):
    """Gaussian curves mixed with the index revealed (arXiv 2212.05796, lemma B.5).

    Attributes:
      mus, weights: G_{mus[i]} has the probability weights[i].
      lost: probability of no privacy at all. What the weights fall short of 1, up to 1e-9, is added.
    """

    mus: np.ndarray
    weights: np.ndarray
    lost: float = 0.0

    def __post_init__(self):
        arrays.nonnegative("mus", self.mus)
        arrays.checked("weights", self.weights, "at least 0", lambda w: w >= 0)
        arrays.share("lost", self.lost)
        if np.shape(self.mus) != np.shape(self.weights) or np.ndim(self.mus) != 1:
            raise ValueError(
                f"weights must be as many as mus, got shape {np.shape(self.weights)} for {np.shape(self.mus)}"
            )
        total = math.fsum(np.asarray(self.weights, float)) + float(self.lost)
        if abs(total - 1) > 1e-9:
            raise ValueError(f"weights must sum to 1 with lost, summed to {total!r}")
        if 1 - total > _ROUNDED:
            object.__setattr__(self, "lost", float(self.lost) + (1 - total))

    def log_delta(self, epsilon):
        parts = gaussian.gdp_log_delta(np.asarray(epsilon, np.float64)[..., None], self.mus)
        total = np.sum(self.weights * np.exp(parts), axis=-1) + self.lost
        return plain(np.log(np.where(total > 0, total, 1e-323)))
