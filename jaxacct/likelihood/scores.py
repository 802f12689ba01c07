"""Scores `s = C^T y`: all that the privacy loss of a banded Toeplitz mechanism sees of the outputs.

Sampling never forms `y`. On a circulant of length N >= n + bands - 1 white noise has a white spectrum, so
the noise part of the scores is drawn in the frequency domain (a stationary Gaussian process whose
spectrum is |c_hat|^2) and costs one inverse FFT; the signal part is the autocorrelation of `c` around
each participation. These are the scores of the mechanism that also releases the bands - 1 rows after
step n. The real mechanism is a post-processing of that one, so an upper bound on the privacy loss of one
holds for the other, and the column norm is 1 for every step (proofs/derivations.md section 2). A dense C has
no such
horizon: its scores are matrix products on its own rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import fft as scipy_fft

from jaxacct.kernels import randomness
from jaxacct.strategies.non_banded import Dense, Strategy

# Each score mixes all N frequencies. A float32 normal ends at 6.7 standard deviations (`normal_pairs`); the
# mixture of 128 of them has the Gaussian tail far beyond.
_MINIMUM_LENGTH = 128


@functools.lru_cache(maxsize=64)
def circulant_length(iterations: int, bands: int) -> int:
    """The smallest even FFT-friendly length on which no score wraps around."""
    need = max(iterations + bands - 1, _MINIMUM_LENGTH)
    return 2 * int(scipy_fft.next_fast_len((need + 1) // 2, real=False) or 0)


@functools.lru_cache(maxsize=64)
def _amplitude(strategy: Strategy, length: int) -> np.ndarray:
    """|c_hat| on the half spectrum, (length / 2 + 1,) float64."""
    assert not isinstance(strategy, Dense)  # has no spectrum
    return np.abs(np.fft.rfft(strategy.array, length))


def draw_normals(key, strategy: Strategy, iterations: int, num_samples: int, dtype):
    """Standard normals behind one sample's noise spectrum: two (num_samples, N / 2 + 1) arrays.

    For a dense C one (num_samples, iterations) array: its noise itself.
    """
    if isinstance(strategy, Dense):
        return (jax.random.normal(key, (num_samples, iterations), dtype),)
    shape = (num_samples, circulant_length(iterations, strategy.bands) // 2 + 1)
    return randomness.normal_pairs(key, shape, dtype)


def scores_from_normals(normals, strategy: Strategy, iterations: int, sigma, participation=None):
    """Scores of `C x + sigma z`: `C^T C x + sigma C^T z` on the extended horizon, one inverse FFT.

    Args:
      normals: what `draw_normals` returned.
      sigma: noise multiplier, scalar.
      participation: (num_samples, iterations) counts or weights x of the normals' dtype; None is x = 0.

    Returns:
      (num_samples, iterations). At sigma = 1 and x = 0 each has unit variance, and the covariance of
      scores d steps apart is the autocorrelation of the coefficients at d.
    """
    if isinstance(strategy, Dense):
        return _dense_scores(normals[0], strategy, sigma, participation)
    real, imaginary = normals
    length = circulant_length(iterations, strategy.bands)
    scale = _amplitude(strategy, length) * np.sqrt(length / 2)
    # The zero and the Nyquist frequency are real: all their variance is in the real part.
    real_scale, imaginary_scale = scale.copy(), scale.copy()
    real_scale[[0, -1]] *= np.sqrt(2)
    imaginary_scale[[0, -1]] = 0
    sigma = jnp.asarray(sigma, real.dtype)
    spectrum = jax.lax.complex(
        real * (sigma * jnp.asarray(real_scale, real.dtype)),
        imaginary * (sigma * jnp.asarray(imaginary_scale, real.dtype)),
    )
    if participation is not None:
        power = jnp.asarray(_amplitude(strategy, length) ** 2, real.dtype)
        spectrum = spectrum + jnp.fft.rfft(participation, length) * power
    return jnp.fft.irfft(spectrum, length)[:, :iterations]


def _dense_scores(normals, strategy: Dense, sigma, participation):
    """`C^T (C x + sigma z)` on the n rows that there are, at the full accuracy of the dtype."""
    matrix = jnp.asarray(strategy.matrix, normals.dtype)
    outputs = jnp.asarray(sigma, normals.dtype) * normals
    if participation is not None:
        outputs = outputs + jnp.dot(participation, matrix.T, precision="highest")
    return jnp.dot(outputs, matrix, precision="highest")


def noise_scores(key, strategy: Strategy, iterations: int, num_samples: int, dtype):
    """Draw `C^T z`, (num_samples, iterations) of `dtype`, for white z of unit variance."""
    normals = draw_normals(key, strategy, iterations, num_samples, dtype)
    return scores_from_normals(normals, strategy, iterations, 1.0)


def signal_scores(participation, strategy: Strategy):
    """`C^T C x` on the extended horizon, for (..., iterations) participation counts or weights.

    Returns the same shape and dtype: the autocorrelation of the coefficients around each participation.
    """
    if strategy.bands == 1 and not isinstance(strategy, Dense):
        return participation
    if isinstance(strategy, Dense):
        return _dense_scores(jnp.zeros_like(participation), strategy, 1.0, participation)
    iterations = participation.shape[-1]
    length = circulant_length(iterations, strategy.bands)
    power = jnp.asarray(_amplitude(strategy, length) ** 2, participation.dtype)
    return jnp.fft.irfft(jnp.fft.rfft(participation, length) * power, length)[..., :iterations]


def add_signal_windows(scores, positions, strategy: Strategy, scale):
    """`scores + scale C^T C x` for few participations at known steps, each a window of 2 bands - 1 numbers.

    What `signal_scores` does by two FFTs; without passes over whole rows, and so better on a GPU.

    Args:
      scores: (num_samples, iterations) float.
      positions: (num_samples, slots) int32, ascending and at least `bands` apart; iterations and above is no
        participation.
      strategy: not a dense C, whose columns differ.
      scale: scalar.

    Returns:
      The shape and dtype of `scores`. The autocorrelation is that of `signal_scores`, on the same horizon.
    """
    assert not isinstance(strategy, Dense)
    n, reach = scores.shape[1], strategy.bands - 1
    window = scale * jnp.asarray(np.correlate(strategy.array, strategy.array, "full"), scores.dtype)
    rows = jnp.arange(scores.shape[0])[:, None, None]
    # Windows of every other participation are disjoint: no two are added to one place at once.
    for some in (positions[:, 0::2, None], positions[:, 1::2, None]):
        steps = some + jnp.arange(-reach, reach + 1)
        steps = jnp.where((some < n) & (steps >= 0), steps, n)  # n and above is dropped
        scores = scores.at[rows, steps].add(window, mode="drop")
    return scores


def output_scores(outputs, strategy: Strategy):
    """Sliding dot products `s_i = <c, y_i .. y_{i+bands-1}>` of given outputs, y being zero past n.

    Args:
      outputs: (..., iterations) float, the released `C x + sigma z`.

    Returns the same shape and dtype.
    """
    if isinstance(strategy, Dense):
        return jnp.dot(outputs, jnp.asarray(strategy.matrix, outputs.dtype), precision="highest")
    iterations = outputs.shape[-1]
    length = circulant_length(iterations, strategy.bands)
    spectrum = jnp.asarray(np.conj(np.fft.rfft(strategy.array, length)))
    return jnp.fft.irfft(jnp.fft.rfft(outputs, length) * spectrum, length)[..., :iterations].astype(
        outputs.dtype
    )


def truncated_square_norms(strategy: Strategy, iterations: int) -> np.ndarray:
    """`||c_i||^2` of each column of the n x n strategy matrix, (iterations,) float64."""
    if isinstance(strategy, Dense):
        return np.square(strategy.matrix).sum(axis=0)
    cumulative = np.cumsum(strategy.array**2)
    remaining = np.minimum(iterations - np.arange(iterations), strategy.bands)
    return cumulative[remaining - 1]


def half_square_norms(strategy: Strategy) -> np.ndarray:
    """`||c_i||^2 / 2` on the horizon of `scores_from_normals`: () 1/2, or (iterations,) for a dense C."""
    if isinstance(strategy, Dense):
        return truncated_square_norms(strategy, len(strategy.matrix)) / 2
    return np.asarray(0.5)
