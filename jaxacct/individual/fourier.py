"""Composition of Poisson-subsampled Gaussian steps for many count vectors, by tilted Fourier transforms.

`counts[b]` steps at the noise of bucket b have the spectrum `prod_b F_b^counts[b]`: the transform of each
bucket is computed once a tilt, a query costs one product and one inverse transform. Losses are those of
`statistics.gaussian_mixtures`, by chords on a lattice, which dominate; tilting by `e^(tilt loss)` makes every
error relative to delta. The resulting delta is an upper bound: wrapped mass is bounded by Chernoff's
inequality, rounding in the 2-norm (proofs/individual.md). The add direction is at most the remove direction
(proofs/add_direction.md, theorem 1).

Source: arXiv 2209.15596, section 4 and appendix D; Koskela, Jalkoe and Honkela 2020.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft, special

from jaxacct.common import validate as _validate
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.loss_curves import TINY, chord_masses
from jaxacct.statistics.tilted_sums import log_sum

_UNIT = 2.0**-52
# Orders of the Chernoff bounds on wrapped mass; every third is a tilt.
_ORDERS = np.geomspace(0.25, 512.0, 34)
_GROUPS_AT_ONCE = 16
_MAX_HALF_WIDTH = 700.0  # nats: exponentials of losses are finite
_UNDERFLOW = 1e-290  # of a mean of tilted weights


def subsampled_gaussian_delta(
    sampling_probability: float, sigma: float, epsilon, direction: str
) -> np.ndarray:
    """Return delta of one step at any real epsilon, float64; `sigma` is relative to the example's share."""
    q = _validate.probability("sampling_probability", sampling_probability)
    sigma = _validate.noise_multiplier("sigma", sigma)
    epsilon = np.asarray(epsilon, float)
    if np.isnan(epsilon).any():
        raise ValueError("epsilon must not be NaN")
    sign = Direction.of(direction).sign
    x = sign * epsilon
    # The loss of the pair itself: where e^x may be close to 1 - q, that is exact for q of at least 1/2.
    with np.errstate(divide="ignore", over="ignore"):
        small = np.log(np.maximum(np.exp(np.minimum(x, 0.0)) - (1 - q), 0.0) / q)
        usual = np.log1p(np.maximum(np.expm1(np.minimum(x, 500.0)) / q, -1.0)) + np.maximum(x - 500.0, 0.0)
    place = sigma * np.where((x < -0.5) & (q > 0.5), small, usual) + 0.5 / sigma
    own = special.ndtr(-sign * place)
    mixed = (1 - q) * own + q * special.ndtr(-sign * (place - 1 / sigma))
    first, second = (mixed, own) if sign > 0 else (own, mixed)
    with np.errstate(divide="ignore"):
        return np.maximum(first - np.exp(np.minimum(epsilon + np.log(second), 0.0)), 0.0)


@dataclass(frozen=True, eq=False)
class FourierAccountant:
    """Accountant of Poisson-subsampled Gaussian steps with varying noise, by discrete Fourier transforms.

    Attributes:
      sampling_probability: q in (0, 1].
      sigmas: (buckets,) effective noise ratios, above 0; infinity for a step of cost 0.
      half_width: L: losses of the composition are resolved in [-L, L).
      num_points: n, even.
    """

    sampling_probability: float
    sigmas: tuple[float, ...]
    half_width: float = 10.0
    num_points: int = 2**18

    def __post_init__(self):
        q = _validate.probability("sampling_probability", self.sampling_probability)
        object.__setattr__(self, "sampling_probability", q)
        object.__setattr__(self, "half_width", _validate.positive_number("half_width", self.half_width))
        if self.half_width > _MAX_HALF_WIDTH:
            raise ValueError(f"half_width must be at most {_MAX_HALF_WIDTH:g}, got {self.half_width!r}")
        sigmas = tuple(float(sigma) for sigma in self.sigmas)
        if not sigmas or not all(sigma > 0 for sigma in sigmas):
            raise ValueError("sigmas must be numbers above 0, at least one of them")
        object.__setattr__(self, "sigmas", sigmas)
        n = _validate.positive_integer("num_points", self.num_points, minimum=4)
        if n % 2:
            raise ValueError(f"num_points must be even, got {n}")
        finite = [sigma for sigma in sigmas if math.isfinite(sigma)]
        if finite and self.step > q / max(finite):
            needed = 2 ** math.ceil(math.log2(2 * self.half_width * max(finite) / q))
            raise ValueError(
                f"num_points must be at least {needed}, so that losses of size "
                f"q / sigma = {q / max(finite):.3g} are resolved, got {n}"
            )

    @property
    def step(self) -> float:
        """Distance of the grid's losses, nats."""
        return 2 * self.half_width / self.num_points

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """(num_points,) float64: losses -L .. L - step; 0 is in the middle."""
        return self.step * (np.arange(self.num_points) - self.num_points // 2)

    def delta(self, epsilon: float, counts) -> np.ndarray:
        """Return (groups,) float64: an upper bound on delta at epsilon, 1 beyond the grid.

        By the chord in e^epsilon between two points of the grid.
        """
        epsilon = _validate.epsilon(epsilon)
        if epsilon >= self.half_width - 2 * self.step:
            return np.ones(len(self._checked(counts)))
        place = math.floor(epsilon / self.step)
        share = math.expm1(epsilon - place * self.step) / math.expm1(self.step)
        share = min(1.0, max(0.0, share - 16 * _UNIT * (1 + epsilon) / self.step))
        exponents = -_ORDERS * epsilon - np.log(_ORDERS) - np.log1p(_ORDERS)
        ends = np.array([1 - share, share])
        return self._asked(
            counts, lambda moments: moments + exponents, lambda bounds: bounds[:, place : place + 2] @ ends
        )

    def epsilon(self, delta: float, counts) -> np.ndarray:
        """Return (groups,) float64: the smallest grid epsilon whose delta, with errors, is at most `delta`.

        Infinity where the grid has none: widen it, or use a larger delta.
        """
        delta = _validate.delta(delta)

        def smallest(bounds: np.ndarray) -> np.ndarray:
            enough = bounds <= delta
            return np.where(enough.any(axis=-1), self.step * np.argmax(enough, axis=-1), np.inf)

        return self._asked(counts, lambda moments: (moments - math.log(delta)) / _ORDERS, smallest)

    def _asked(self, counts, exponents: Callable, ask: Callable) -> np.ndarray:
        """Return `ask` of the bounds of each count vector, each at the tilt of its smallest exponent."""
        counts = self._checked(counts)
        found = np.zeros(len(counts))
        for tilt, rows in _by_tilt(exponents(counts @ self._log_moments)):
            for first in range(0, len(rows), _GROUPS_AT_ONCE):
                chunk = rows[first : first + _GROUPS_AT_ONCE]
                found[chunk] = ask(self._bounds(counts[chunk], tilt))
        return found

    def _checked(self, counts) -> np.ndarray:
        counts = np.atleast_2d(np.asarray(counts))
        if counts.ndim != 2 or counts.shape[1] != len(self.sigmas):
            raise ValueError(f"counts must have {len(self.sigmas)} columns, got the shape {counts.shape}")
        if not np.all(counts >= 0) or np.any(counts != np.round(counts)):
            raise ValueError("counts must be whole numbers of at least 0")
        return counts.astype(float)

    @functools.cached_property
    def _losses(self) -> tuple[np.ndarray, np.ndarray]:
        """(buckets, n) masses on the grid that dominate one step, and (buckets,) infinite masses."""
        beyond = np.stack([self._beyond(sigma) for sigma in self.sigmas])
        return np.concatenate([np.ones((len(beyond), 1)), beyond[:, :-1]], axis=1) - beyond, beyond[:, -1]

    def _beyond(self, sigma: float) -> np.ndarray:
        if sigma == math.inf:
            return (self.grid < 0) * 1.0
        values = sampled_gaussian(sigma, self.sampling_probability)[0].at(self.grid)
        return chord_masses(values.deltas, values.error * np.append(1.0, values.tails[:-1]) + TINY, self.step)

    @functools.cached_property
    def _log_moments(self) -> np.ndarray:
        """(buckets, orders): ln of the moment generating function of each distribution on the grid."""
        masses, _ = self._losses
        return np.array([[log_sum(order * self.grid, one) for order in _ORDERS] for one in masses])

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _spectra(self, tilt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(buckets, n/2 + 1) logarithms of size, and phases, of the transforms, and (buckets,) 2-norms."""
        moments = self._log_moments[:, np.searchsorted(_ORDERS, tilt)]
        with np.errstate(divide="ignore"):
            masses = np.exp(np.log(self._losses[0]) + tilt * self.grid - moments[:, None])
            logs = np.log(np.asarray(fft.rfft(fft.ifftshift(masses, axes=-1), axis=-1)))
        # A transform that is exactly 0 has the logarithm -inf; 0 times that must not become NaN.
        size, phase = np.maximum(np.real(logs), -1e5), np.ascontiguousarray(np.imag(logs))
        return size, phase, np.linalg.norm(masses, axis=-1)

    def _bounds(self, counts: np.ndarray, tilt: float) -> np.ndarray:
        """Return (groups, n/2) upper bounds on delta at the epsilons 0 .. L - step of the grid."""
        n, moments, place = self.num_points, self._log_moments, int(np.searchsorted(_ORDERS, tilt))
        size, phase, norms = self._spectra(tilt)
        past = self.step * np.arange(n)
        weights = -np.exp(-tilt * past) * np.expm1(-past)  # hockey-stick weights, untilted
        used = counts.any(axis=0)
        spectra = np.exp(counts[:, used] @ size[used] + 1j * (counts[:, used] @ phase[used]))
        against = np.conj(np.asarray(fft.rfft(weights)))
        means = np.asarray(fft.irfft(spectra * against, n, axis=-1, workers=-1))[:, : n // 2]
        # Transforms have an error of at most 7 u log2(n) sqrt(n) |a_b|_2 in the 2-norm; logarithms, product
        # and exponential add 8 u counts (|ln F| + pi) at most, on a spectrum of 2-norm sqrt(n) |a_b|_2; two
        # more transforms, of the weights and of the result.
        each = (7 * math.log2(n) + 64 + 8 * len(self.sigmas)) * _UNIT
        rounding = each * (counts @ norms + 2) * float(np.linalg.norm(weights)) + _UNDERFLOW
        # (groups, orders) errors of exponents of masses tilted by each order, in all steps together.
        sizes = counts @ (750 + 64 + 4 * _ORDERS * self.half_width + np.abs(moments))
        relatives = 4 * _UNIT * (sizes + _ORDERS * self.half_width + np.abs(counts @ moments))
        relative = relatives[:, place, None]
        exponents = (counts @ moments[:, place])[:, None] - tilt * past[: n // 2]
        counted = (np.maximum(means, 0.0) + rounding[:, None]) * np.exp(np.minimum(exponents, 700.0))
        with np.errstate(divide="ignore"):
            infinite = -np.expm1(counts @ np.log1p(-self._losses[1]))
        wrapped = (counts @ moments - _ORDERS * (self.half_width - self.step) + 2 * relatives).min(axis=1)
        reserved = (infinite + np.exp(np.minimum(0.0, wrapped))) * (1 + 1e-9)
        found = counted * (1 + 2 * relative) + reserved[:, None]
        return np.where((relative < 0.1) & (found < 1), found, 1.0)


def _by_tilt(exponents: np.ndarray):
    """Yield (tilt, rows): the tilt is below the order of the smallest of a row's (orders,) exponents.

    A larger tilt would magnify rounding where losses have heavy tails.
    """
    tilts = np.maximum(np.argmin(exponents, axis=1) - 1, 0) // 3 * 3
    for place in np.unique(tilts):
        yield float(_ORDERS[place]), np.flatnonzero(tilts == place)
