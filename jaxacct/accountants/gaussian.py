"""The Gaussian mechanism."""

import numpy as np
from scipy import special

_UNIT = 2.0**-52


def gaussian_delta(epsilon: float, noise_multiplier: float, sensitivity: float) -> float:
    """Return delta(epsilon) of one Gaussian mechanism, rounded up.

    The sensitivity is the distance of the two means per unit of clip norm (Balle and Wang 2018, theorem 8).
    """
    return float(gaussian_deltas(epsilon, noise_multiplier, np.array([sensitivity]))[0])


def gaussian_deltas(epsilon: float, noise_multiplier: float, sensitivities: np.ndarray) -> np.ndarray:
    """Return `gaussian_delta` of each sensitivity above 0, float64 of the same shape."""
    mu = sensitivities / noise_multiplier
    with np.errstate(over="ignore"):
        near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        # In logarithms: far out both terms underflow long before their difference matters.
        log_first, log_second = special.log_ndtr(-near), epsilon + special.log_ndtr(-far)
        # Where the first is 0 in float64, so is delta.
        ratio = np.subtract(log_second, log_first, out=np.zeros_like(near), where=log_first > -np.inf)
        delta = -np.exp(log_first) * np.expm1(np.minimum(ratio, 0.0))
        # Arguments have an error of u of `far`, which slopes magnify; logarithms a relative one of a few u.
        sizes = 8 + 2 * abs(epsilon) + 4 * np.abs(log_first) + 4 * np.abs(log_second) + 4 * far * (far + 1)
    error = np.exp(log_first) * np.minimum(sizes * _UNIT, 1.0)
    return np.clip(delta + error, 0.0, 1.0)
