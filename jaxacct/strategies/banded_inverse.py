"""Toeplitz strategy matrices with a banded inverse (arXiv 2602.09338, appendix B.3); losses are bounds as in
`strategies.toeplitz`.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy

from jaxacct import _validate
from jaxacct.strategies.base import NoiseRecursion, check_is_bounded, read_only
from jaxacct.strategies.stationary import Stationary


@dataclass(frozen=True)
class BandedInverse(Stationary):
    """A lower-triangular Toeplitz strategy matrix whose inverse is banded.

    The noise `C^{-1} z` of a step mixes the last few `z`, as many as the inverse has bands.

    Attributes:
      inverse: (inverse bands,) first column of `C^{-1}`, scaled so that C has column norm 1.
      iterations: n, the size of C.

    Raises:
      ValueError: when C has a negative entry, or for bad numbers.
    """

    inverse: tuple[float, ...]
    iterations: int
    kind: ClassVar[str] = "banded-inverse"

    def __post_init__(self):
        n = _validate.positive_integer("iterations", self.iterations)
        given = np.asarray(self.inverse, np.float64)
        if given.ndim != 1 or not given.size or not np.isfinite(given).all() or given[0] <= 0:
            raise ValueError("inverse must be finite numbers that begin above 0")
        if given.size > n:
            raise ValueError(f"inverse must have at most iterations {n} numbers, had {given.size}")
        first = _inverse_series(given, n)
        if not (np.isfinite(first).all() and (first >= 0).all()):
            raise ValueError("inverse must give a C without negative entries")
        norm = float(np.linalg.norm(first))
        if abs(norm - 1) > 1e-12:  # dividing again would change what was read back from a plan
            given = given * norm
        object.__setattr__(self, "iterations", n)
        object.__setattr__(self, "inverse", tuple(np.trim_zeros(given, "b").tolist()))

    @property
    def bands(self) -> int:
        """Of C itself."""
        return len(self.array)

    @property
    def array(self) -> np.ndarray:
        """(bands,) float64, read-only: the first column of C, without trailing zeros."""
        return _first_column(self)

    @classmethod
    def bisr(cls, *, iterations: int, bands: int) -> "BandedInverse":
        """The inverse square root of the prefix-sum matrix cut to `bands` (BISR; arXiv 2602.09338, app.
        B.3).
        """
        bands = _validate.positive_integer("bands", bands)
        return cls(tuple(_inverse_square_root(bands)), iterations)

    @classmethod
    def optimal(cls, *, iterations: int, bands: int) -> "BandedInverse":
        """The banded inverse with the least prefix-sum error at column norm 1; L-BFGS from BISR.

        The tail is kept at most 0, which makes every entry of C non-negative.
        """
        n = _validate.positive_integer("iterations", iterations)
        bands = min(_validate.positive_integer("bands", bands), n)
        start = _inverse_square_root(bands)
        if bands == 1:
            return cls((1.0,), n)
        result = scipy.optimize.minimize(
            lambda tail: _log_error(np.append(1.0, tail), n),
            start[1:],
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, 0.0)] * (bands - 1),
            options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9},
        )
        best = np.append(1.0, result.x)
        return cls(tuple(best if _log_error(best, n)[0] <= _log_error(start, n)[0] else start), n)

    def check(self, scheme) -> None:
        if self.iterations != scheme.iterations:
            raise ValueError(
                f"strategy must have the scheme's {scheme.iterations} iterations, had {self.iterations}"
            )
        check_is_bounded(scheme)

    def noise_recursion(self) -> NoiseRecursion:
        return NoiseRecursion(np.array(self.inverse), of_inverse=True)

    def describe(self) -> str:
        return f"Toeplitz, its inverse of {len(self.inverse)} bands"

    def to_json(self) -> dict:
        return {"kind": self.kind, "inverse": list(self.inverse), "iterations": self.iterations}

    @classmethod
    def from_json(cls, data: dict) -> "BandedInverse":
        return cls(tuple(data["inverse"]), data["iterations"])


@functools.lru_cache(maxsize=64)
def _first_column(strategy: BandedInverse) -> np.ndarray:
    first = _inverse_series(np.array(strategy.inverse), strategy.iterations)
    return read_only(np.trim_zeros(first, "b"))


def _inverse_series(coefficients: np.ndarray, n: int) -> np.ndarray:
    impulse = np.zeros(n)
    impulse[0] = 1.0
    return np.asarray(scipy.signal.lfilter([1.0], coefficients, impulse))


def _inverse_square_root(bands: int) -> np.ndarray:
    """Coefficients of (1 - x)^(1/2)."""
    k = np.arange(1, bands)
    return np.append(1.0, np.cumprod((2 * k - 3) / (2 * k)))


def _log_error(inverse: np.ndarray, n: int):
    """Log of prefix-sum error x squared column norm of C, and its gradient in all but the first number.

    `c = 1 / h` as power series, so `dc / dh_k = -c * c` delayed by k.
    """
    bands, weights = inverse.size, (n - np.arange(n)).astype(float)
    sums = np.cumsum(np.append(inverse, np.zeros(n - bands)))
    error = np.dot(weights, sums**2)
    error_gradient = 2 * np.cumsum((weights * sums)[::-1])[::-1][:bands]
    c = _inverse_series(inverse, n)
    squared = scipy.signal.fftconvolve(c, c)[:n]
    norm = np.dot(c, c)
    norm_gradient = np.array([-2 * np.dot(c[k:], squared[: n - k]) for k in range(bands)])
    value = np.log(error) - np.log(n) + np.log(norm)
    return value, (error_gradient / error + norm_gradient / norm)[1:]
