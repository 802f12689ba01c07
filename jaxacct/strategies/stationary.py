"""Toeplitz strategies: common methods.

The privacy loss depends on outputs y through scores `s = C^T y` alone.
Sampling never forms `y`. On a circulant of length N >= n + bands - 1 white noise has a white spectrum, so
the noise part of the scores is drawn in the frequency domain (a stationary Gaussian process whose
spectrum is |c_hat|^2) and costs one inverse FFT; the signal part is the autocorrelation of `c` around
each participation. These are the scores of the mechanism that also releases the bands - 1 rows after
step n. The real mechanism is a post-processing of that one, so an upper bound on the privacy loss of one
holds for the other, and the column norm is 1 for every step (proofs/derivations.md section 2).
"""

import abc
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from jaxacct.common import validate as _validate
from jaxacct.common.validate import read_only
from jaxacct.kernels import randomness
from jaxacct.kernels.programs import any_left
from jaxacct.strategies import worst_pattern
from jaxacct.strategies.base import NoiseRecursion, Strategy, check_is_bounded, check_iterations
from jaxacct.strategies.series import inverse
from jaxacct.strategies.workload import Workload

_MIN_NORM, _MAX_NORM = 1e-290, 1e290  # times a noise multiplier, all normal numbers
_UNIT_TOLERANCE = 1e-12  # of the norm of numbers that were rescaled already


@functools.lru_cache(maxsize=64)
def circulant_length(iterations: int, bands: int) -> int:
    """Return the smallest even FFT-friendly length on which no score wraps around."""
    need = iterations + bands - 1
    return 2 * int(scipy.fft.next_fast_len((need + 1) // 2, real=False) or 0)


@functools.lru_cache(maxsize=64)
def _amplitude(strategy: "Stationary", length: int) -> np.ndarray:
    """Return |c_hat| on the half spectrum, (length / 2 + 1,) float64."""
    return np.abs(np.fft.rfft(strategy.array, length))


def filtered(values, spectrum: np.ndarray, length: int):
    """Return (..., n) values times a half spectrum on the circulant of a length, of their shape and dtype."""
    transformed = jnp.fft.rfft(values, length)
    factor = lax.broadcast_to_rank(jnp.asarray(spectrum, transformed.dtype), transformed.ndim)
    return jnp.fft.irfft(transformed * factor, length)[..., : values.shape[-1]]


def adds_windows(scheme, strategy: Strategy, replicas: int) -> bool:
    """Return whether the participations of a draw are added as windows: few and far apart, on any machine.

    A window is then faster than its share of a Fourier transform of the whole row, and rounds less. For
    schemes whose draws come as positions.
    """
    rate = scheme.sparse_rate
    if rate is None or not has_windows(scheme, strategy) or strategy.bands == 1:
        return False
    return 1000 * (replicas * scheme.iterations * rate + 4) <= scheme.iterations


def has_windows(scheme, strategy: Strategy) -> bool:
    """Return whether every participation adds the same window to the scores, without overlap."""
    if not strategy.is_toeplitz or strategy.bands > scheme.min_separation:
        return False
    return strategy.rows(scheme.iterations) == scheme.iterations + strategy.bands - 1


def _with_windows(scores, positions, counts, window, used):
    """Add one window of every row at once, so that no two overlap; scores get margins of whole windows."""
    reach = window.shape[0] // 2
    rows, padded = jnp.arange(scores.shape[0])[:, None], jnp.pad(scores, ((0, 0), (reach, 2 * reach + 1)))
    along = jnp.arange(window.shape[0], dtype=jnp.int32)[None]

    def unfinished(state):
        return any_left(state[0] < used)

    def add(state):
        slot, padded = state
        now = jnp.minimum(slot, positions.shape[1] - 1)
        some = jnp.where(slot < used, counts[:, now], 0)
        return slot + 1, padded.at[rows, positions[:, now, None] + along].add(some[:, None] * window[None])

    return lax.while_loop(unfinished, add, (jnp.int32(0), padded))[1]


@functools.lru_cache(maxsize=64)
def cross_terms(strategy: Strategy, iterations: int, min_separation: int) -> np.ndarray:
    """Return `Strategy.cross_terms` from bounds on the products of columns."""
    if strategy.bands <= min_separation or iterations <= min_separation:
        return read_only(np.zeros(()))
    # The k-th later participation is k separations away or more. Sums round by less than products are raised.
    farther = strategy.farther_products(iterations)[..., min_separation::min_separation]
    return read_only(np.asarray(farther.sum(axis=-1)))


@functools.lru_cache(maxsize=64)
def _farther_products(strategy: "Stationary", iterations: int) -> np.ndarray:
    c = strategy.array
    length = scipy.fft.next_fast_len(2 * c.size, real=True)
    shared = np.maximum(np.fft.irfft(np.abs(np.fft.rfft(c, length)) ** 2, length)[: c.size], 0.0)
    shared = np.append(shared, np.zeros(max(0, iterations - shared.size)))[:iterations]
    # An FFT's error is of the size of its largest number, 1; every lag is raised by more.
    return read_only((np.maximum.accumulate(shared[::-1])[::-1] + 1e-13) * (1 + 1e-9))


@functools.lru_cache(maxsize=64)
def noise_norm(strategy: "Stationary", iterations: int, probability: float) -> float:
    """Return a number that |C^T z| on the circulant exceeds with at most this probability (Chernoff)."""
    length = circulant_length(iterations, strategy.bands)
    power = np.abs(np.fft.fft(strategy.array, length)) ** 2
    top = float(power.max())

    def square(log_rate):
        rate = math.exp(log_rate)
        return (-0.5 * np.log1p(-2 * rate * power).sum() - math.log(probability)) / rate

    ends = math.log(1e-9 / top), math.log(0.4999 / top)
    smallest = scipy.optimize.minimize_scalar(square, bounds=ends, method="bounded").fun
    return math.sqrt(float(smallest) * (1 + 1e-9))


@functools.lru_cache(maxsize=64)
def window_norm(strategy: "Stationary", iterations: int, separation: int) -> float:
    """Return a bound on `|C^T C x| / |x|` over 0/1 vectors x of the separation."""
    c = strategy.array
    if strategy.bands > separation:
        return float(np.square(np.abs(np.fft.fft(c, circulant_length(iterations, strategy.bands))).max()))
    window = np.correlate(c, c, "full")
    lags = np.correlate(window, window, "full")[window.size - 1 :]
    # A window of 2 bands - 1 overlaps that of one neighbour on either side.
    return math.sqrt(lags[0] + 2 * float(np.max(lags[separation:], initial=0.0)))


@functools.lru_cache(maxsize=64)
def max_amplitude(strategy: "Stationary", iterations: int) -> float:
    """Return the largest |c_hat| on the circulant, a bound on |C x| / |x|."""
    return float(_amplitude(strategy, circulant_length(iterations, strategy.bands)).max())


class Stationary(Strategy):
    """Toeplitz C, given by its first column."""

    is_toeplitz = True

    @property
    @abc.abstractmethod
    def array(self) -> np.ndarray:
        """(bands,) float64, read-only: the first column of C, without trailing zeros."""

    def cross_terms(self, iterations: int, min_separation: int) -> np.ndarray:
        return cross_terms(self, iterations, min_separation)

    def squared_sensitivity(self, iterations: int, min_separation: int, participations: int) -> float:
        at_most = super().squared_sensitivity(iterations, min_separation, participations)
        counted = worst_pattern.overlapping_sensitivity(self, iterations, min_separation, participations)
        return at_most if counted is None else counted

    def square_norms(self, iterations: int) -> np.ndarray:
        return self.truncated_products(iterations, 1)[:, 0]

    def columns(self, iterations: int, steps: np.ndarray) -> np.ndarray:
        c = np.append(self.array, np.zeros(max(0, iterations - self.bands)))[:iterations]
        rows = np.arange(iterations)[:, None] - steps[None]
        return np.where(rows >= 0, c[np.maximum(rows, 0)], 0.0)

    def farther_products(self, iterations: int) -> np.ndarray:
        return _farther_products(self, iterations)

    def rows(self, iterations: int) -> int:
        return iterations + self.bands - 1

    def half_square_norms(self) -> np.ndarray:
        """Return () 1/2: the rows continue past the last step."""
        return np.asarray(0.5)

    def column_products(self, block: int) -> np.ndarray:
        products, c = np.zeros(block), self.array
        shared = np.correlate(c, c, "full")[c.size - 1 :][:block]
        products[: shared.size] = shared
        return products

    def products_from_end(self, block: int) -> np.ndarray:
        """Return one row: no column is truncated."""
        return self.column_products(block)[None]

    def truncated_products(self, iterations: int, block: int) -> np.ndarray:
        c = self.array
        products = np.zeros((iterations, block))
        rows = np.minimum(iterations - np.arange(iterations), c.size)  # number of rows of column i
        for d in range(min(block, c.size)):
            sums = np.concatenate([[0.0], np.cumsum(c[: c.size - d] * c[d:])])
            products[d:, d] = sums[np.minimum(rows[d:], c.size - d)]
        return products

    def numbers_per_sample(self, iterations: int) -> int:
        return circulant_length(iterations, self.bands)

    def draw_normals(self, key, iterations: int, num_samples: int, dtype) -> tuple:
        """Draw the standard normals of the noise spectrum: two (num_samples, N / 2 + 1) arrays.

        For one band one (num_samples, iterations) array: the noise itself.
        """
        if self.bands == 1:
            return super().draw_normals(key, iterations, num_samples, dtype)
        shape = (num_samples, circulant_length(iterations, self.bands) // 2 + 1)
        return randomness.normal_pairs(key, shape, dtype)

    def scores_from_normals(self, normals, iterations: int, sigma, participation=None):
        """Return scores of `C x + sigma z` on the extended horizon, by one inverse FFT.

        At sigma = 1 and x = 0 each has unit variance, and the covariance of scores d steps apart is the
        autocorrelation of the coefficients at d.
        """
        if self.bands == 1:
            noise = jnp.asarray(sigma, normals[0].dtype) * normals[0]
            return noise if participation is None else noise + participation
        real, imaginary = normals
        length = circulant_length(iterations, self.bands)
        scale = _amplitude(self, length) * np.sqrt(length / 2)
        # The zero and the Nyquist frequency are real: all their variance is in the real part.
        real_scale, imaginary_scale = scale.copy(), scale.copy()
        real_scale[[0, -1]] *= np.sqrt(2)
        imaginary_scale[[0, -1]] = 0
        sigma = jnp.asarray(sigma, real.dtype)
        spectrum = jax.lax.complex(
            real * (sigma * jnp.asarray(real_scale, real.dtype))[None],
            imaginary * (sigma * jnp.asarray(imaginary_scale, real.dtype))[None],
        )
        if participation is not None:
            power = jnp.asarray(_amplitude(self, length) ** 2, real.dtype)
            spectrum = spectrum + jnp.fft.rfft(participation, length) * power.astype(spectrum.dtype)[None]
        return jnp.fft.irfft(spectrum, length)[:, :iterations]

    def output_scores(self, outputs):
        """Return `s_i = <c, y_i .. y_{i+bands-1}>`, y being zero past n."""
        length = circulant_length(outputs.shape[-1], self.bands)
        return filtered(outputs, np.conj(np.fft.rfft(self.array, length)), length)

    def add_signal_windows(self, scores, positions, scale, counts=None):
        """Return `scores + scale C^T C x` for few participations, each a window of 2 bands - 1 numbers.

        `scores_from_normals` does this by two FFTs; windows avoid passes over whole rows. `positions` are
        (num_samples, slots) int32, first slots first; iterations and above is no participation; `counts` are
        of their shape, 1 by default.
        """
        n, reach = scores.shape[1], self.bands - 1
        window = jnp.asarray(np.correlate(self.array, self.array, "full"), scores.dtype) * scale
        counts = jnp.ones(positions.shape, scores.dtype) if counts is None else counts.astype(scores.dtype)
        counts = jnp.where(positions < n, counts, 0)
        # The last slot that any sample uses.
        used = jnp.where(counts != 0, jnp.arange(1, positions.shape[1] + 1, dtype=jnp.int32), 0).max()
        positions = jnp.where(positions < n, positions, n + reach).astype(jnp.int32)
        return _with_windows(scores, positions, counts, window, used)[:, reach : reach + n]

    def gram(self, weights: np.ndarray) -> np.ndarray:
        length = circulant_length(weights.size, self.bands)
        power = np.abs(np.fft.rfft(self.array, length)) ** 2
        return np.fft.irfft(np.fft.rfft(weights, length) * power, length)[: weights.size]

    def noise_recursion(self) -> NoiseRecursion:
        return NoiseRecursion(self.array, of_inverse=False)

    def unit_workload_error(self, iterations: int, workload: Workload) -> float:
        return workload.error(inverse(self.array, iterations))

    def describe(self) -> str:
        kind = self.kind.replace("-", " ").replace("toeplitz", "Toeplitz")
        return f"{kind}, {self.bands} band{'s' * (self.bands > 1)}"


class ComputedColumn(Stationary):
    """Toeplitz C of `iterations` steps whose first column is computed from other numbers."""

    iterations: int

    @abc.abstractmethod
    def first_column(self) -> np.ndarray:
        """Return (iterations,) float64 of norm 1."""

    @property
    def bands(self) -> int:
        return len(self.array)

    @functools.cached_property
    def array(self) -> np.ndarray:
        return read_only(np.trim_zeros(self.first_column(), "b"))

    def check(self, scheme) -> None:
        check_iterations(self, scheme)
        check_is_bounded(scheme)


def checked_numbers(name: str, given, holds: Callable, allowed: str) -> np.ndarray:
    """Return a non-empty list of numbers as float64, each of which `holds`, as `allowed` says.

    ValueError for others, for text, truth values and complex numbers.
    """
    try:
        values = np.asarray(given)
        if values.dtype.kind not in "iufO":
            raise TypeError
        values = values.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a list of numbers") from None
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{name} must be a non-empty list, got shape {values.shape}")
    bad = ~holds(values)
    if bad.any():
        raise ValueError(f"{name} must be {allowed}, one was {float(values[bad][0])!r}")
    return values


def norms_of(columns: np.ndarray, stated: float, tolerance: float) -> tuple[float, float]:
    """Return (largest column norm, that of C as it was given); both are 1 where C needs no rescaling.

    Args:
      columns: (rows,) or (rows, columns) numbers given here, at least 0 and not all 0.
      stated: what they were divided by already; 0 if they were not.
      tolerance: numbers whose norm differs from 1 by at most this are not rescaled: dividing again by a norm
        that is a rounding off 1 would change numbers read from a plan.

    Raises:
      ValueError: a norm from which no noise multiplier follows, or one stated for numbers of norm other than
        1.
    """
    peak = float(columns.max())
    norm = peak * float(np.linalg.norm(columns / peak, axis=0).max())  # squares may over- or underflow
    is_unit = abs(norm - 1) <= tolerance
    if stated and not abs(norm - 1) <= _UNIT_TOLERANCE:
        raise ValueError(f"given_norm must be given with a column norm of 1 only, the norm was {norm!r}")
    given = _validate.positive_number("given_norm", stated) if stated else 1.0 if is_unit else norm
    if not _MIN_NORM <= given <= _MAX_NORM:
        raise ValueError(f"strategy must have a column norm from {_MIN_NORM} to {_MAX_NORM}, got {given!r}")
    return 1.0 if is_unit else norm, given
