"""Banded Toeplitz matrices optimised for the noise that they need with sampling.

With every participation revealed the noise depends on the norm of a column alone. With sampling it also
depends on the overlap of columns: the steps of a participation are uncertain. For f the likelihood ratio,
`E_Q f^2 = E exp(<C x, C x'> / sigma^2)` over two independent participation vectors. Where they seldom
coincide, and then `repeats` times with the same lag,

    ln E_Q f^2  ~  K sum_{|d| < bands} (exp(repeats a_d / sigma^2) - 1),     a_d = sum_t c_t c_{t+d},

with K a function of the scheme alone. So the sum is kept at its value for the square-root matrix at its noise
multiplier, and error x sigma^2 is minimised. This is a heuristic for good matrices; the certificate does not
depend on it.
"""

import math

import numpy as np
import scipy

from jaxacct.common import validate as _validate
from jaxacct.strategies.banded_toeplitz import BandedToeplitz, log_error_of
from jaxacct.strategies.series import local_minimum, product, sums_at_lags
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, checked


def amplified(
    *,
    iterations: int,
    bands: int,
    noise_multiplier: float,
    repeats: float,
    workload: Workload = PREFIX_SUMS,
) -> BandedToeplitz:
    """Return the banded Toeplitz matrix of approximately the smallest error x noise^2 under sampling.

    Args:
      iterations: n, at least `bands`.
      bands: maximum; trailing zeros are dropped.
      noise_multiplier: of the square-root matrix with as many bands.
      repeats: how often two participation vectors coincide at the same lag, given once: 1 where participation
        is rare, up to the number of participations where it is regular.
      workload: A; effect of the noise on the optimizer's iterates, prefix sums by default.
    """
    n = _validate.positive_integer("iterations", iterations)
    bands = _validate.positive_integer("bands", bands)
    sigma = _validate.noise_multiplier("noise_multiplier", noise_multiplier)
    repeats = _validate.positive_number("repeats", repeats)
    if bands > n:
        raise ValueError(f"bands must be at most iterations {n}, got {bands}")
    log_error = log_error_of(checked(workload), n)
    start = BandedToeplitz.square_root(bands).array
    if bands == 1:
        return BandedToeplitz.identity()
    log_sum = _log_sum(_lags(start), repeats / sigma**2)[0]

    def objective(c):
        error, error_slope = log_error(c)
        noise, noise_slope = _log_square_noise(c, repeats, log_sum)
        return error + noise, error_slope + noise_slope[1:]

    how = dict(maxiter=200, maxcor=10, ftol=1e-10, gtol=1e-7)
    return BandedToeplitz.scaled(local_minimum(objective, start / start[0], (0.0, None), **how))


def _lags(c: np.ndarray) -> np.ndarray:
    """Return `a_d` for d = 0 .. bands - 1."""
    return sums_at_lags(c, c, c.size)


def _log_sum(lags: np.ndarray, rate: float) -> tuple[float, np.ndarray]:
    """Return the log of the sum over lags d of `exp(rate a_d) - 1`, and its gradient in `rate a_d`, d > 0."""
    top = rate * lags.max()
    both = np.where(np.arange(lags.size) > 0, 2.0, 1.0) * np.exp(rate * lags - top)
    total = -np.dot(both, np.expm1(-rate * lags))
    return top + math.log(total), both / total


def _log_square_noise(c: np.ndarray, repeats: float, log_sum: float) -> tuple[float, np.ndarray]:
    """Return the log of sigma^2 at which c, scaled to norm 1, has that sum; and its gradient in c."""
    square = float(np.dot(c, c))
    lags = _lags(c) / square
    # With a_0 = 1 the largest, the sum is from e^rate - 1 to that times the number of lags.
    low, high = (math.log(np.logaddexp(0.0, log_sum - math.log(k))) for k in (2 * lags.size - 1, 1))
    log_rate = scipy.optimize.brentq(
        lambda x: _log_sum(lags, math.exp(x))[0] - log_sum, low - 1e-9, high + 1e-9, xtol=1e-13, rtol=1e-14
    )
    rate = math.exp(log_rate)
    slope = rate * _log_sum(lags, rate)[1]
    slope /= np.dot(slope, lags)  # of log sigma^2 in a_d: the rate decreases as a_d increases
    both_ways = np.concatenate([slope[:0:-1] / 2, [slope[0]], slope[1:] / 2])
    of_lags = product(c, both_ways)[c.size - 1 : 2 * c.size - 1]
    return math.log(repeats) - log_rate, 2 * of_lags / square - 2 * c / square
