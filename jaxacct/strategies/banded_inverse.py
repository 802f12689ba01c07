"""Toeplitz strategy matrices with a banded inverse (arXiv 2602.09338, appendix B.3).

Losses are bounds as for `Toeplitz`.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.strategies import series
from jaxacct.strategies.base import NoiseRecursion, schedule_of
from jaxacct.strategies.series import quotient, sums_at_lags
from jaxacct.strategies.stationary import ComputedColumn, norms_of
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, checked

_PENALTY = 1e4  # of squared negative entries of C, against logs


@dataclass(frozen=True)
class BandedInverse(ComputedColumn):
    """Lower-triangular Toeplitz strategy matrix whose inverse is banded.

    The noise `C^{-1} z` of a step combines the last few `z`, as many as the inverse has bands.

    Attributes:
      inverse: (inverse bands,) first column of `C^{-1}`, scaled so that C has column norm 1.
      iterations: n, the size of C.
      given_norm: column norm that C had before it was scaled; 0, the default, to compute it.

    Raises:
      ValueError: C has a negative entry, or invalid numbers.
    """

    inverse: tuple[float, ...]
    iterations: int
    given_norm: float = dataclasses.field(default=0.0, compare=False, repr=False)
    kind: ClassVar[str] = "banded-inverse"

    def __post_init__(self):
        n = _validate.positive_integer("iterations", self.iterations)
        given = np.asarray(self.inverse, np.float64)
        if given.ndim != 1 or not given.size or not np.isfinite(given).all() or given[0] <= 0:
            raise ValueError("inverse must be finite numbers that begin above 0")
        if given.size > n:
            raise ValueError(f"inverse must have at most iterations {n} numbers, got {given.size}")
        first = series.inverse(given, n)
        if not (np.isfinite(first).all() and (first >= 0).all()):
            raise ValueError("inverse must give a C without negative entries")
        norm, given_norm = norms_of(first, self.given_norm, 1e-12)
        inverse = tuple(np.trim_zeros(given * norm, "b").tolist())
        _validate.set_fields(self, given_norm=given_norm, iterations=n, inverse=inverse)

    @property
    def named_bands(self) -> int:
        """Bands of the inverse."""
        return len(self.inverse)

    def first_column(self) -> np.ndarray:
        return series.inverse(np.array(self.inverse), self.iterations)

    @classmethod
    def bisr(cls, *, iterations: int, bands: int) -> "BandedInverse":
        """Return the inverse square root of the prefix-sum matrix with `bands` bands (BISR).

        Source: arXiv 2602.09338, appendix B.3.
        """
        bands = _validate.positive_integer("bands", bands)
        return cls(tuple(series.binomial(0.5, bands)), iterations)

    @classmethod
    def optimal(
        cls,
        *,
        iterations: int,
        bands: int,
        min_separation: int | None = None,
        participations: int = 1,
        workload: Workload = PREFIX_SUMS,
    ) -> "BandedInverse":
        """Return the banded inverse of locally minimal error at a given unamplified sensitivity.

        Minimises `(1/n) ||A C^-1||_F^2` times `squared_sensitivity`: a local minimum, at least as good as
        BISR.

        Args:
          iterations: n.
          bands: of the inverse; n is equivalent to more.
          min_separation: minimum number of steps between two participations; required for more than one.
          participations: at most `ceil(iterations / min_separation)`. With many a matrix near the identity is
            best, with one a matrix near the square root of prefix sums.
          workload: A; effect of the noise on the optimizer's iterates, prefix sums by default.

        Raises:
          ValueError: an impossible schedule, or more steps than a varying learning rate allows.
        """
        n = _validate.positive_integer("iterations", iterations)
        bands = min(_validate.positive_integer("bands", bands), n)
        separation, k = schedule_of(n, min_separation, participations)
        checked(workload)
        if bands == 1:
            return cls((1.0,), n)

        error_of = workload.error_of(n, bands)

        about = dict(error_of=error_of, n=n, min_separation=separation, participations=k)
        how = dict(maxiter=500, ftol=1e-13, gtol=1e-9)
        search = functools.partial(series.local_minimum, functools.partial(_log_error, **about), **how)

        def loss(strategy: BandedInverse) -> float:
            return strategy.unit_workload_error(n, workload) * strategy.squared_sensitivity(n, separation, k)

        # C has no negative entry where the tail has no positive one; a zero costs no copy of the noise.
        falling = search(series.binomial(0.5, bands), (-1.0, 0.0))
        falling = np.where(np.abs(falling) > 1e-12, falling, 0.0)
        free, best = search(falling), cls(tuple(falling), n)
        low, high = -1.0, 1.0  # shares of `falling`, which alone is allowed: 0 is tried first, then bisection
        while high > 0 and high - max(low, 0.0) > 1e-6:
            share = max(0.0, (low + high) / 2)
            inverse = (1 - share) * free + share * falling
            allowed = (series.inverse(inverse, n) >= 0).all()
            low, high = (low, share) if allowed else (share, high)
            best = min(best, cls(tuple(inverse), n), key=loss) if allowed else best
        return dataclasses.replace(best, given_norm=1.0)  # the scale of a search has no meaning

    def noise_recursion(self) -> NoiseRecursion:
        return NoiseRecursion(np.array(self.inverse), of_inverse=True)

    def describe(self) -> str:
        return f"Toeplitz, its inverse of {len(self.inverse)} bands"


def _log_error(inverse: np.ndarray, error_of: Callable, n: int, min_separation: int, participations: int):
    """Return the log of error x squared norm of C x, and its gradient in all but the first number.

    x has `participations` ones, `min_separation` steps apart. `C x` solves `h * y = x` as power series, so
    `dy / dh_k = -c * y` delayed by k. Negative entries of C are penalized; where C diverges the log is large.
    """
    bands = inverse.size
    error, error_gradient = error_of(inverse)
    x = np.zeros(n)
    x[: participations * min_separation : min_separation] = 1.0
    with np.errstate(all="ignore"):
        y, c = quotient(x, inverse), series.inverse(inverse, n)
        square, below = np.dot(y, y), np.minimum(c, 0.0)
        value = np.log(error) + np.log(square) + _PENALTY * np.dot(below, below)
        gradient = error_gradient / error - 2 * sums_at_lags(y, quotient(y, inverse), bands) / square
        gradient -= 2 * _PENALTY * sums_at_lags(below, quotient(c, inverse), bands)
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        return 1e3, np.zeros(bands - 1)
    return value, gradient[1:]
