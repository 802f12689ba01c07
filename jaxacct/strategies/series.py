"""Power series in float64: products, quotients and sums at a lag; and a search for their coefficients.

These replace functions of `scipy.signal`, whose import takes half a second of a command's five.
"""

from collections.abc import Callable

import numpy as np
import scipy
from scipy import fft
from scipy.linalg import blas

# Maximum number of products that are added up directly; beyond, by FFT.
_FEW = 2**16
# Maximum numbers of a banded matrix that is stored.
_MOST = 2**24


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the coefficients of the product of two series, (len(a) + len(b) - 1,)."""
    if min(a.size, b.size) * max(a.size, b.size) <= _FEW:
        return np.convolve(a, b)
    size = a.size + b.size - 1
    length = fft.next_fast_len(size, real=True)
    one = fft.rfft(a, length)
    return fft.irfft(one * (one if b is a else fft.rfft(b, length)), length)[:size]


def sums_at_lags(a: np.ndarray, b: np.ndarray, lags: int) -> np.ndarray:
    """Return `sum_t a_{t+k} b_t` for k = 0 .. lags - 1; lags at most len(a), b no longer than a."""
    return product(a, b[::-1])[b.size - 1 : b.size - 1 + lags]


def inverse(series: np.ndarray, size: int) -> np.ndarray:
    """Return the first coefficients of 1 / series, (size,); infinite or NaN on overflow."""
    return quotient(np.bincount([0], minlength=size).astype(float), series)


def binomial(exponent: float, size: int) -> np.ndarray:
    """Return the first coefficients of (1 - x)^exponent, (size,)."""
    k = np.arange(1, size)
    return np.append(1.0, np.cumprod((k - 1 - exponent) / k))


def local_minimum(objective: Callable, start: np.ndarray, bounds=None, **options) -> np.ndarray:
    """Return the series that begins with 1 of a local minimum, by L-BFGS from `start`, which does, too.

    `objective` is: series -> (value, gradient in all numbers but the first). `bounds` are the ends of each of
    these, and `options` those of `scipy.optimize.minimize`.
    """
    ends = None if bounds is None else [bounds] * (start.size - 1)
    search = dict(jac=True, method="L-BFGS-B", bounds=ends, options=options)
    found = scipy.optimize.minimize(lambda tail: objective(np.append(1.0, tail)), start[1:], **search)
    return np.append(1.0, found.x)


def quotient(series: np.ndarray, divisor: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return `C^-1 series`, C lower triangular Toeplitz with first column `divisor`, or for its transpose.

    `divisor` may be shorter than `series`. The result is infinite or NaN on overflow.
    """
    bands = min(divisor.size, series.size)
    if bands * series.size > _MOST:
        turn = slice(None, None, -1 if transposed else 1)
        return scipy.signal.lfilter([1.0], divisor, series[turn])[turn]
    matrix = np.broadcast_to(divisor[:bands, None], (bands, series.size))
    return blas.dtbsv(bands - 1, np.asfortranarray(matrix), series, lower=1, trans=int(transposed))
