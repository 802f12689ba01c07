"""Composition of Poisson-subsampled Gaussian steps for many count vectors, by tilted Fourier transforms.

`counts[b]` steps at the noise of bucket b have the spectrum `prod_b F_b^counts[b]`: the transform of each
bucket is computed once a tilt, a query costs one product and one inverse transform. Losses are those of
`statistics.loss_curves`, by chords on a lattice, which dominate; tilting by `e^(tilt loss)` makes every error
relative to delta. The resulting delta is an upper bound: wrapped mass is bounded by Chernoff's inequality,
rounding in the 2-norm (proofs/individual.md).

Source: arXiv 2209.15596, section 4 and appendix D; Koskela, Jalkoe and Honkela 2020.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

from jaxacct.common import validate as _validate
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.statistics.loss_curves import TINY, GaussianPair, Sampled, chord_masses

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
    return Sampled(GaussianPair(sigma), q, Direction.of(direction) == Direction.REMOVE).at(epsilon).deltas


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
        """Return (groups,) float64: an upper bound on delta at epsilon, the larger of both directions.

        By Plancherel's identity: an inner product with the transform of the hockey-stick weights.
        """
        epsilon = _validate.epsilon(epsilon)
        counts = self._checked(counts)
        found = np.zeros(len(counts))
        for direction in DIRECTIONS:
            exponents = counts @ self._log_moments[direction] - _ORDERS * epsilon
            for tilt, rows in _by_tilt(exponents - np.log(_ORDERS) - np.log1p(_ORDERS)):
                weights = _weights(tilt, self.grid - epsilon * (1 - 8 * _UNIT))
                against = np.conj(np.asarray(fft.rfft(fft.ifftshift(weights))))
                multiplicity = np.full(against.size, 2.0)
                multiplicity[[0, -1]] = 1.0
                spectra = self._composed(counts[rows], direction, tilt)
                # A pairwise sum: its rounding grows with the logarithm of n only.
                means = np.sum(np.real(spectra * (against * multiplicity)), axis=-1) / self.num_points
                bounds = self._bounds(counts[rows], direction, tilt, weights, means[:, None], epsilon)
                found[rows] = np.maximum(found[rows], bounds[:, 0])
        return found

    def epsilon(self, delta: float, counts) -> np.ndarray:
        """Return (groups,) float64: the smallest grid epsilon whose delta, with errors, is at most `delta`.

        Infinity where the grid has none: widen it, or use a larger delta.
        """
        delta = _validate.delta(delta)
        counts = self._checked(counts)
        found = np.zeros(len(counts))
        losses = self.step * np.arange(self.num_points // 2)  # 0 .. L - step
        for direction in DIRECTIONS:
            for tilt, rows in _by_tilt((counts @ self._log_moments[direction] - math.log(delta)) / _ORDERS):
                weights = _weights(tilt, self.step * np.arange(self.num_points))
                against = np.conj(np.asarray(fft.rfft(weights)))
                for first in range(0, len(rows), _GROUPS_AT_ONCE):
                    chunk = rows[first : first + _GROUPS_AT_ONCE]
                    spectra = self._composed(counts[chunk], direction, tilt) * against
                    means = np.asarray(fft.irfft(spectra, self.num_points, axis=-1, workers=-1))
                    means = means[:, : losses.size]
                    bounds = self._bounds(counts[chunk], direction, tilt, weights, means, losses)
                    enough = bounds <= delta
                    smallest = np.where(enough.any(axis=-1), losses[np.argmax(enough, axis=-1)], np.inf)
                    found[chunk] = np.maximum(found[chunk], smallest)
        return found

    def _checked(self, counts) -> np.ndarray:
        counts = np.atleast_2d(np.asarray(counts))
        if counts.ndim != 2 or counts.shape[1] != len(self.sigmas):
            raise ValueError(f"counts must have {len(self.sigmas)} columns, got the shape {counts.shape}")
        if not np.all(counts >= 0) or np.any(counts != np.round(counts)):
            raise ValueError("counts must be whole numbers of at least 0")
        return counts.astype(float)

    @functools.cached_property
    def _losses(self) -> dict[Direction, tuple[np.ndarray, np.ndarray]]:
        """(buckets, n) masses on the grid that dominate one step, and (buckets,) infinite masses."""
        found = {}
        for direction in DIRECTIONS:
            beyond = np.stack([self._beyond(sigma, direction) for sigma in self.sigmas])
            before = np.concatenate([np.ones((len(beyond), 1)), beyond[:, :-1]], axis=1)
            found[direction] = before - beyond, beyond[:, -1]
        return found

    def _beyond(self, sigma: float, direction: Direction) -> np.ndarray:
        if sigma == math.inf:
            return (self.grid < 0) * 1.0
        pair = Sampled(GaussianPair(sigma), self.sampling_probability, direction == Direction.REMOVE)
        values = pair.at(self.grid)
        return chord_masses(values.deltas, values.error * np.append(1.0, values.tails[:-1]) + TINY, self.step)

    @functools.cached_property
    def _log_moments(self) -> dict[Direction, np.ndarray]:
        """(buckets, orders): ln of the moment generating function of each distribution on the grid."""
        found = {}
        for direction, (masses, _) in self._losses.items():
            rows = []
            for one in masses:
                inside = one > 0
                exponents = np.multiply.outer(_ORDERS, self.grid[inside]) + np.log(one[inside])
                top = exponents.max(axis=1)
                rows.append(top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))
            found[direction] = np.stack(rows)
        return found

    def _tilted(self, direction: Direction, tilt: float) -> np.ndarray:
        """(buckets, n) masses of total 1, tilted."""
        moments = self._log_moments[direction][:, np.searchsorted(_ORDERS, tilt)]
        with np.errstate(divide="ignore"):
            logs = np.log(self._losses[direction][0])
        return np.exp(logs + tilt * self.grid - moments[:, None])

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _spectra(self, direction: Direction, tilt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(buckets, n/2 + 1) logarithms of size, and phases, of the transforms, and (buckets,) 2-norms."""
        masses = self._tilted(direction, tilt)
        with np.errstate(divide="ignore"):
            logs = np.log(np.asarray(fft.rfft(fft.ifftshift(masses, axes=-1), axis=-1)))
        # A transform that is exactly 0 has the logarithm -inf; 0 times that must not become NaN.
        size, phase = np.maximum(np.real(logs), -1e5), np.ascontiguousarray(np.imag(logs))
        return size, phase, np.linalg.norm(masses, axis=-1)

    def _composed(self, counts: np.ndarray, direction: Direction, tilt: float) -> np.ndarray:
        """Return (groups, n/2 + 1) complex spectra of the tilted sums; the origin is at index 0."""
        used = counts.any(axis=0)
        size, phase, _ = self._spectra(direction, tilt)
        if not used.all():
            size, phase, counts = size[used], phase[used], counts[:, used]
        size, phase = np.exp(counts @ size), counts @ phase
        found = np.empty((*size.shape, 2))
        np.multiply(size, np.cos(phase), out=found[..., 0])
        np.multiply(size, np.sin(phase), out=found[..., 1])
        return found.view(complex)[..., 0]

    def _bounds(self, counts, direction: Direction, tilt: float, weights, means, epsilons) -> np.ndarray:
        """Return (groups, epsilons) upper bounds on delta from means of the tilted weights."""
        n, moments = self.num_points, self._log_moments[direction]
        _, infinite = self._losses[direction]
        place = int(np.searchsorted(_ORDERS, tilt))
        scale = moments[:, place]
        _, _, norms = self._spectra(direction, tilt)
        # Transforms have an error of at most 7 u log2(n) sqrt(n) |a_b|_2 in the 2-norm; logarithms, product
        # and exponential add 8 u counts (|ln F| + pi) at most, on a spectrum of 2-norm sqrt(n) |a_b|_2; two
        # more transforms, of the weights and of the result.
        each = (7 * math.log2(n) + 64 + 8 * len(self.sigmas)) * _UNIT
        rounding = each * (counts @ norms + 2) * float(np.linalg.norm(weights)) + _UNDERFLOW
        # (groups, orders) errors of exponents of masses tilted by each order, in all steps together.
        sizes = counts @ (750 + 64 + 4 * _ORDERS * self.half_width + np.abs(moments))
        relatives = 4 * _UNIT * (sizes + _ORDERS * self.half_width + np.abs(counts @ moments))
        relative = relatives[:, place, None]
        exponents = (counts @ scale)[:, None] - tilt * np.atleast_1d(epsilons)
        counted = (np.maximum(means, 0.0) + rounding[:, None]) * np.exp(np.minimum(exponents, 700.0))
        with np.errstate(divide="ignore"):
            infinite = -np.expm1(counts @ np.log1p(-infinite))
        wrapped = (counts @ moments - _ORDERS * (self.half_width - self.step) + 2 * relatives).min(axis=1)
        reserved = (infinite + np.exp(np.minimum(0.0, wrapped))) * (1 + 1e-9)
        found = counted * (1 + 2 * relative) + reserved[:, None]
        return np.where((relative < 0.1) & (found < 1), found, 1.0)


def _weights(tilt: float, past: np.ndarray) -> np.ndarray:
    """Return the hockey-stick weights of losses that exceed epsilon by `past`, untilted."""
    past = np.maximum(past, 0.0)
    return -np.exp(-tilt * past) * np.expm1(-past)


def _by_tilt(exponents: np.ndarray):
    """Yield (tilt, rows): the tilt is below the order of the smallest of a row's (orders,) exponents.

    A larger tilt would magnify rounding where losses have heavy tails.
    """
    tilts = np.maximum(np.argmin(exponents, axis=1) - 1, 0) // 3 * 3
    for place in np.unique(tilts):
        yield float(_ORDERS[place]), np.flatnonzero(tilts == place)
