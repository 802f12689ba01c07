"""Strategy matrices that need not be banded: Toeplitz, with a banded inverse, dense (arXiv 2602.09338,
appendix B).

Participations of one example then overlap, and the likelihood ratio no longer factorises. It is bounded from
both sides instead (proofs/non_banded.md): dropping the cross terms `x_i x_j <c_i, c_j> >= 0` raises it,
taking `cross_terms` off every participation lowers it. So what is certified is an upper bound, and plans say
so.
"""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from scipy import fft, optimize, signal

from jaxacct import _validate
from jaxacct.strategies.toeplitz import BandedToeplitz


@dataclass(frozen=True)
class Toeplitz:
    """A lower-triangular Toeplitz strategy matrix with any number of coefficients.

    Attributes:
      coefficients: as for `BandedToeplitz`: the first column, stored scaled to norm 1. May be longer than the
        minimum separation of a scheme.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "coefficients", BandedToeplitz(self.coefficients).coefficients)

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    @property
    def array(self) -> np.ndarray:
        """(bands,) float64, read-only; a copy each time."""
        return _read_only(np.array(self.coefficients))


@dataclass(frozen=True)
class BandedInverse:
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
        found = optimize.minimize(
            lambda tail: _log_error(np.append(1.0, tail), n),
            start[1:],
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, 0.0)] * (bands - 1),
            options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9},
        )
        best = np.append(1.0, found.x)
        return cls(tuple(best if _log_error(best, n)[0] <= _log_error(start, n)[0] else start), n)


@dataclass(frozen=True, eq=False)
class Dense:
    """Any lower-triangular strategy matrix without negative entries.

    Attributes:
      matrix: (n, n) float64, scaled so that the largest column norm is 1. O(n^2) memory, and as much work for
        a sample.

    Raises:
      ValueError: for another shape, entries above the diagonal, negative or non-finite ones.
    """

    matrix: np.ndarray

    def __post_init__(self):
        matrix = np.array(self.matrix, np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(f"matrix must be square, had shape {matrix.shape}")
        if not np.isfinite(matrix).all() or (matrix < 0).any():
            raise ValueError("matrix must have finite entries of at least 0")
        if np.triu(matrix, 1).any() or not (np.diag(matrix) > 0).all():
            raise ValueError("matrix must be lower triangular with a diagonal above 0")
        norm = np.linalg.norm(matrix, axis=0).max()
        if abs(norm - 1) > 1e-12:
            matrix = matrix / norm
        object.__setattr__(self, "matrix", _read_only(matrix))
        digest = hashlib.sha256(self.matrix.tobytes()).hexdigest()
        object.__setattr__(self, "_digest", digest)

    @property
    def bands(self) -> int:
        """Diagonals up to the last one that is not zero."""
        rows, columns = np.nonzero(self.matrix)
        return int((rows - columns).max()) + 1

    def __eq__(self, other):
        return isinstance(other, Dense) and self._digest == other._digest  # pyright: ignore

    def __hash__(self):
        return hash(self._digest)  # pyright: ignore


Strategy = BandedToeplitz | Toeplitz | BandedInverse | Dense


def noise_copies(strategy: Strategy) -> int:
    """How many earlier noise vectors a training step needs: bands - 1, of the inverse where that is banded.

    Raises:
      ValueError: for a dense C, whose noise needs all of them.
    """
    if isinstance(strategy, Dense):
        raise ValueError("strategy must be Toeplitz to train with: a dense one needs the noise of every step")
    return len(strategy.inverse if isinstance(strategy, BandedInverse) else strategy.coefficients) - 1


def strategy_to_json(strategy: Strategy) -> dict:
    """Plain JSON values; banded Toeplitz has no "kind", as in plans before there were others."""
    if isinstance(strategy, BandedToeplitz):
        return {"coefficients": list(strategy.coefficients)}
    if isinstance(strategy, Toeplitz):
        return {"kind": "toeplitz", "coefficients": list(strategy.coefficients)}
    if isinstance(strategy, BandedInverse):
        fields = {"inverse": list(strategy.inverse), "iterations": strategy.iterations}
        return {"kind": "banded-inverse", **fields}
    return {"kind": "dense", "matrix": strategy.matrix.tolist()}


def strategy_from_json(data: dict) -> Strategy:
    """The inverse of `strategy_to_json`; ValueError for another kind."""
    kind = data.get("kind", "banded-toeplitz")
    if kind == "banded-toeplitz":
        return BandedToeplitz(tuple(data["coefficients"]))
    if kind == "toeplitz":
        return Toeplitz(tuple(data["coefficients"]))
    if kind == "banded-inverse":
        return BandedInverse(tuple(data["inverse"]), data["iterations"])
    if kind == "dense":
        return Dense(np.array(data["matrix"], np.float64))
    raise ValueError(f"strategy kind must be toeplitz, banded-inverse or dense, was {kind!r}")


@functools.lru_cache(maxsize=64)
def cross_terms(strategy: Strategy, iterations: int, min_separation: int) -> np.ndarray:
    """Upper bounds on what a participation shares with all later ones, at least `min_separation` steps apart.

    Returns:
      () or (iterations,) float64: `kappa_i >= sum_{j > i} x_j <c_i, c_j>` for every x that may be; on the
      extended horizon for Toeplitz matrices. Exactly 0 where C has no more bands than the separation.
    """
    if strategy.bands <= min_separation or iterations <= min_separation:
        return _read_only(np.zeros(()))
    lags = np.arange(min_separation, iterations, min_separation)
    if isinstance(strategy, Dense):
        gram = strategy.matrix.T @ strategy.matrix
        bound = np.zeros(iterations)
        for i in range(iterations):
            # Rows from the diagonal on: the k-th later participation is k separations away or more.
            farther = np.maximum.accumulate(gram[i, i:][::-1])[::-1]
            bound[i] = farther[lags[lags < farther.size]].sum()
        return _read_only(bound * (1 + 1e-9))
    c = strategy.array
    length = fft.next_fast_len(2 * c.size, real=True)
    shared = np.maximum(np.fft.irfft(np.abs(np.fft.rfft(c, length)) ** 2, length)[: c.size], 0.0)
    shared = np.append(shared, np.zeros(max(0, iterations - shared.size)))[:iterations]
    farther = np.maximum.accumulate(shared[::-1])[::-1]
    # An FFT's error is of the size of its largest number, 1; every lag is raised by more.
    return _read_only(np.array((farther[lags] + 1e-13).sum() * (1 + 1e-9)))


def _read_only(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


@functools.lru_cache(maxsize=64)
def _first_column(strategy: BandedInverse) -> np.ndarray:
    first = _inverse_series(np.array(strategy.inverse), strategy.iterations)
    return _read_only(np.trim_zeros(first, "b"))


def _inverse_series(coefficients: np.ndarray, n: int) -> np.ndarray:
    impulse = np.zeros(n)
    impulse[0] = 1.0
    return np.asarray(signal.lfilter([1.0], coefficients, impulse))


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
    squared = signal.fftconvolve(c, c)[:n]
    norm = np.dot(c, c)
    norm_gradient = np.array([-2 * np.dot(c[k:], squared[: n - k]) for k in range(bands)])
    value = np.log(error) - np.log(n) + np.log(norm)
    return value, (error_gradient / error + norm_gradient / norm)[1:]
