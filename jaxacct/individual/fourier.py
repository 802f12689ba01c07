"""Composition of privacy-loss distributions by discrete Fourier transforms, for many count vectors at once.

`counts[b]` steps at the noise of bucket b have the spectrum `prod_b F_b^counts[b]`: the transform of each
bucket is computed once, a query costs one product and one inverse transform. The resulting delta is an upper
bound with every error reserved: cells are split so that they dominate, wrapped mass is bounded by Chernoff's
inequality, and rounding is bounded in the 2-norm (proofs/individual.md).

Source: arXiv 2209.15596, section 4 and appendix D; Koskela, Jalkoe and Honkela 2020.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

from jaxacct.common import validate as _validate
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.statistics.subsampled_gaussian import grid_distribution

_UNIT = 2.0**-52
# Orders of the Chernoff bounds on wrapped mass.
_TILTS = np.geomspace(0.25, 512.0, 34)
_GROUPS_AT_ONCE = 16
_MAX_HALF_WIDTH = 700.0  # nats: exponentials of losses are finite


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

    @functools.cached_property
    def _distributions(self):
        return {
            direction: [
                grid_distribution(self.sampling_probability, sigma, self.grid, direction)
                for sigma in self.sigmas
            ]
            for direction in DIRECTIONS
        }

    @functools.cached_property
    def _spectra(self) -> dict[Direction, tuple[np.ndarray, np.ndarray]]:
        """(buckets, n/2 + 1) logarithms of size, and phases, of the transforms; the origin is at index 0."""
        found = {}
        for direction, distributions in self._distributions.items():
            spectra = [fft.rfft(fft.ifftshift(distribution.masses)) for distribution in distributions]
            with np.errstate(divide="ignore"):
                logs = np.log(np.array(spectra))
            # A transform that is exactly 0 has the logarithm -inf; 0 times that must not become NaN.
            found[direction] = np.maximum(np.real(logs), -1e5), np.ascontiguousarray(np.imag(logs))
        return found

    @functools.cached_property
    def _norms(self) -> dict[str, np.ndarray]:
        """(buckets,): 2-norms of the distributions on the grid."""
        return {
            direction: np.array([np.linalg.norm(distribution.masses) for distribution in distributions])
            for direction, distributions in self._distributions.items()
        }

    @functools.cached_property
    def _tilted(self) -> dict[Direction, np.ndarray]:
        """(buckets, tilts): ln of the moment generating function of each distribution on the grid."""
        found = {}
        for direction, distributions in self._distributions.items():
            rows = []
            for distribution in distributions:
                inside = distribution.masses > 0
                exponents = np.multiply.outer(_TILTS, self.grid[inside]) + np.log(distribution.masses[inside])
                top = exponents.max(axis=1)
                rows.append(top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))
            found[direction] = np.stack(rows)
        return found

    def compose(self, counts) -> np.ndarray:
        """Return (2, groups, n/2 + 1) complex spectra of remove and add, for (groups, buckets) counts."""
        counts = self._checked(counts)
        return np.stack([self._composed(counts, direction) for direction in DIRECTIONS])

    def _checked(self, counts) -> np.ndarray:
        counts = np.atleast_2d(np.asarray(counts))
        if counts.ndim != 2 or counts.shape[1] != len(self.sigmas):
            raise ValueError(f"counts must have {len(self.sigmas)} columns, got the shape {counts.shape}")
        if not np.all(counts >= 0) or np.any(counts != np.round(counts)):
            raise ValueError("counts must be whole numbers of at least 0")
        return counts.astype(float)

    def _composed(self, counts: np.ndarray, direction: Direction) -> np.ndarray:
        used = counts.any(axis=0)
        size, phase = self._spectra[direction]
        if not used.all():
            size, phase, counts = size[used], phase[used], counts[:, used]
        size, phase = np.exp(counts @ size), counts @ phase
        found = np.empty((*size.shape, 2))
        np.multiply(size, np.cos(phase), out=found[..., 0])
        np.multiply(size, np.sin(phase), out=found[..., 1])
        return found.view(complex)[..., 0]

    def reserved_error(self, counts) -> np.ndarray:
        """Return (2, groups): the reserve in delta: infinite losses, wrapped mass, rounding."""
        counts = self._checked(counts)
        n, rows = self.num_points, []
        for direction in DIRECTIONS:
            distributions = self._distributions[direction]
            with np.errstate(divide="ignore"):
                infinite = -np.expm1(
                    counts @ np.log1p([-distribution.infinite for distribution in distributions])
                )
            exponents = counts @ self._tilted[direction] - _TILTS * (self.half_width - self.step)
            wrapped = np.exp(np.minimum(0.0, exponents.min(axis=1)))
            cells = counts @ np.array([distribution.error for distribution in distributions])
            # |F_b| <= 1, each with an error of at most 7 u log2(n) sqrt(n) |a_b|_2 in the 2-norm; logarithms,
            # product and exponential add 8 u counts (|ln F| + pi) at most, on a spectrum of 2-norm sqrt(n)
            # |a_b|_2; one more transform or inner product of the result, and running sums over the grid.
            norms = np.sqrt(n) * self._norms[direction]
            each = (7 * math.log2(n) + 64 + 8 * len(distributions)) * _UNIT
            spectral = each * (counts @ norms + norms.max())
            rows.append(infinite + wrapped + cells + spectral + 4 * n * _UNIT)
        return np.stack(rows)

    def delta(self, epsilon: float, counts) -> np.ndarray:
        """Return (groups,) float64: an upper bound on delta at epsilon, the larger of both directions.

        By Plancherel's identity: an inner product with the transform of the hockey-stick weights.
        """
        epsilon = _validate.epsilon(epsilon)
        spectra, reserved = self.compose(counts), self.reserved_error(counts)
        weights = np.maximum(0.0, -np.expm1(epsilon - self.grid))
        against = np.conj(np.asarray(fft.rfft(fft.ifftshift(weights))))
        multiplicity = np.full(against.size, 2.0)
        multiplicity[[0, -1]] = 1.0
        # A pairwise sum: its rounding grows with the logarithm of n only.
        deltas = np.sum(np.real(spectra * (against * multiplicity)), axis=-1) / self.num_points
        return np.clip((np.maximum(deltas, 0.0) + reserved).max(axis=0), 0.0, 1.0)

    def epsilon(self, delta: float, counts) -> np.ndarray:
        """Return (groups,) float64: the smallest grid epsilon whose delta, with errors, is at most `delta`.

        Infinity where the grid has none: widen it, or use a larger delta.
        """
        delta = _validate.delta(delta)
        counts = self._checked(counts)
        found = np.empty(len(counts))
        for first in range(0, len(counts), _GROUPS_AT_ONCE):
            chunk = slice(first, first + _GROUPS_AT_ONCE)
            spectra, reserved = self.compose(counts[chunk]), self.reserved_error(counts[chunk])
            sums = np.asarray(fft.irfft(spectra, self.num_points, axis=-1, workers=-1))
            positive = sums[..., : self.num_points // 2]  # losses 0 .. L - step
            found[chunk] = self._smallest(np.maximum(positive, 0.0), delta - reserved).max(axis=0)
        return found

    def _smallest(self, masses: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Return (2, groups): the first grid loss e with `sum_{x > e} (1 - e^{e - x}) mass(x) <= allowed`."""
        losses = self.step * np.arange(masses.shape[-1])
        tail = np.cumsum(masses[..., ::-1], axis=-1)[..., ::-1]
        discounted = np.cumsum((masses * np.exp(-losses))[..., ::-1], axis=-1)[..., ::-1]
        deltas = tail - np.exp(losses) * discounted
        enough = deltas <= allowed[..., None]
        first = np.argmax(enough, axis=-1)
        return np.where(enough.any(axis=-1) & (allowed > 0), losses[first], np.inf)
