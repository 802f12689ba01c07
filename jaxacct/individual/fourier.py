"""Composition of Poisson-subsampled Gaussian steps for many count vectors, by the composer of losses.

`counts[b]` steps at the noise of bucket b have the spectrum `prod_b F_b^counts[b]`: the transforms of the
buckets are those of one lattice (`statistics.composed_losses`) for all count vectors of about one tilt, and a
query costs their product and one inverse transform. Any lattice gives an upper bound for any counts. The add
direction is at most the remove direction (proofs/add_direction.md, theorem 1).

Source: arXiv 2209.15596, section 4 and appendix D; Koskela, Jalkoe and Honkela 2020.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from jaxacct.common import validate as _validate
from jaxacct.statistics.composed_losses import Sums, bounded, min_epsilon
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.loss_curves import TINY, LossCurve
from jaxacct.statistics.rough_losses import SMALLEST, Part, Rough

_TILTS = np.geomspace(1e-6, 1e8, 181)  # count vectors with the same best one may share a lattice
_RESERVED = 1e-4  # share of delta beyond a lattice up to which it serves


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
    """

    sampling_probability: float
    sigmas: tuple[float, ...]

    def __post_init__(self):
        _validate.check_fields(self, sampling_probability=_validate.probability)
        sigmas = tuple(float(sigma) for sigma in self.sigmas)
        if not sigmas or not all(sigma > 0 for sigma in sigmas):
            raise ValueError("sigmas must be numbers above 0, at least one of them")
        object.__setattr__(self, "sigmas", sigmas)

    def delta(self, epsilon: float, counts) -> np.ndarray:
        """Return (groups,) float64: an upper bound on delta at epsilon."""
        epsilon, counts = _validate.nonnegative_number("epsilon", epsilon), self._checked(counts)
        logs = counts @ self._log_moments - _TILTS * epsilon
        epsilons, found = np.full(len(counts), epsilon), np.full(len(counts), SMALLEST)
        for row, sums in self._sums(
            counts, logs.argmin(axis=1), epsilons, np.exp(np.minimum(0.0, logs.min(axis=1)))
        ):
            found[row] = bounded(sums.bound(epsilon))
        return found

    def epsilon(self, delta: float, counts) -> np.ndarray:
        """Return (groups,) float64: about the smallest epsilon with a bound of at most `delta`."""
        delta, counts = _validate.open_probability("delta", delta), self._checked(counts)
        # By basic composition, epsilon is 0 for rare participations.
        counts = np.where((counts @ self._deltas_at_0 <= delta)[:, None], 0, counts)
        logs = (counts @ self._log_moments - math.log(delta)) / _TILTS
        epsilons, found = np.maximum(0.0, logs.min(axis=1)), np.zeros(len(counts))
        for row, sums in self._sums(counts, logs.argmin(axis=1), epsilons, np.full(len(counts), delta)):
            found[row] = min_epsilon(sums.bound, delta, _validate.MAX_EPSILON)
        return found

    def _sums(self, counts: np.ndarray, tilts, epsilons, deltas) -> Iterator[tuple[int, Sums]]:
        """Yield the sums of each row of `counts` with losses; similar ones, in order, share a lattice.

        They have one of the `tilts`, about one epsilon, and for their deltas little beyond the lattice.
        """
        first, sums = -1, None
        for row in np.lexsort((deltas, epsilons, tilts)):
            if not counts[row].any():
                continue
            numbers = counts[row].tolist()
            is_similar = tilts[row] == tilts[first] and epsilons[row] <= 1.05 * epsilons[first]
            sums = replace(sums, counts=numbers) if sums is not None and is_similar else None
            if sums is None or not sums.reserved <= _RESERVED * deltas[row]:
                parts = [Part(*each) for each in zip(self._curves, numbers, strict=True)]
                first, sums = row, Sums.of(Rough.of(parts), float(epsilons[row]))
            yield row, sums

    def _checked(self, counts) -> np.ndarray:
        """Return the counts of the buckets with losses, (groups, buckets) int64."""
        counts = np.atleast_2d(np.asarray(counts))
        if counts.ndim != 2 or counts.shape[1] != len(self.sigmas):
            raise ValueError(f"counts must have {len(self.sigmas)} columns, got the shape {counts.shape}")
        if not np.all(counts >= 0) or np.any(counts != np.round(counts)):
            raise ValueError("counts must be whole numbers of at least 0")
        return counts.astype(np.int64)[:, np.isfinite(self.sigmas)]

    @functools.cached_property
    def _curves(self) -> list[LossCurve]:
        """Losses of each bucket that has any."""
        return [sampled_gaussian(s, self.sampling_probability)[0] for s in self.sigmas if math.isfinite(s)]

    @functools.cached_property
    def _deltas_at_0(self) -> np.ndarray:
        """(buckets with losses,): upper bounds on delta of one step at epsilon 0."""
        values = [curve.at(np.zeros(1)) for curve in self._curves]
        return np.array([(one.deltas + one.error)[0] * (1 + 1e-9) + TINY for one in values])

    @functools.cached_property
    def _log_moments(self) -> np.ndarray:
        """(buckets with losses, tilts): approximately ln of the moments of each."""
        moments = [Rough.of([Part(curve, 1)]).log_moments(_TILTS) for curve in self._curves]
        return np.reshape(moments, (-1, _TILTS.size))
