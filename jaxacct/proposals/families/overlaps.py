"""Weights of replicas where participations of one example overlap (remove direction).

With C of more bands than the minimum separation b, `f <= f+ = sum_x p(x) e^{<x, r>}`, and f+ is computed. Two
participations b steps apart or more share rows, which the tables of replicas do not include:
they give every participation a factor `e^lift` instead, at least its overlap with all later ones
(`schemes.replicas.base.log_lift`). The actual overlap of a drawn tuple is computed, so the weight
`Z / f+` is multiplied by

    exp( far(x_1 + x_2) - far(x_1) - lift (number of participations) ) <= 1,

far being the overlap of all pairs b steps apart or more, over sigma^2. The mean of that factor given the
output makes the weight that of f itself (proofs/non_banded.md, "Replicas").
"""

import math

import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.recurrence import tree_sum
from jaxacct.likelihood.rounding import fourier_roundings
from jaxacct.schemes.replicas.base import log_lift
from jaxacct.strategies.stationary import circulant_length

_UNIT = 2.0**-24


def overlap_arrays(mechanism) -> dict:
    """Return the arrays of `log_factor_of_overlaps` for a noise multiplier."""
    return {
        "lift": jnp.float32(log_lift(mechanism)),
        "precision": jnp.float32(mechanism.noise_multiplier**-2),
    }


def log_factor_of_overlaps(scheme, strategy, arrays: dict, together, alone, lifts):
    """Return ln of the factor, (num_samples,) float32, rounded up and at most 0.

    `together` are the sums of the replicas' counts, `alone` the counts of one of them, and `lifts` those of
    the tables, rounded down.
    """
    far, off = _far(scheme, strategy, together)
    own, own_off = _far(scheme, strategy, alone)
    lifted = arrays["lift"] * lifts
    known = (far + off - jnp.maximum(own - own_off, 0.0)) * arrays["precision"]
    # Neither of the two exceeds the lifts, so their roundings are small relative to these.
    return jnp.minimum(known - lifted * (1 - 16 * _UNIT), 0.0)


def _far(scheme, strategy, counts):
    """Return (overlap of pairs of participations b steps apart or more, a bound on its error), at sigma = 1.

    By Parseval's identity half the quadratic form of the autocorrelation from lag b on, (num_samples,).
    """
    n = scheme.iterations
    length = circulant_length(n, n)
    power = _far_spectrum(strategy, n, scheme.min_separation, length)
    spectrum = jnp.fft.rfft(counts, length)
    squares = spectrum.real**2 + spectrum.imag**2
    far = tree_sum(squares * jnp.asarray(power, jnp.float32)[None], axis=1)
    roundings = 2 * fourier_roundings(length) + math.log2(length) + 10
    norm = jnp.square(counts).sum(axis=1)
    # Squares of the whole spectrum add up to `length` times the norm; all but two frequencies count twice.
    largest = float(np.abs(power).max()) * length
    return far, jnp.float32(1.01 * largest * roundings * _UNIT) * norm


def _far_spectrum(strategy, iterations: int, b: int, length: int) -> np.ndarray:
    """Return (length / 2 + 1,) float64: the weight of a square of the half spectrum."""
    shared = strategy.column_products(iterations)
    shared[:b] = 0.0
    around = np.zeros(length)
    around[:iterations] = shared
    around[length - np.arange(1, iterations)] = shared[1:]
    power = np.fft.rfft(around).real / length
    power[[0, -1]] /= 2
    return power
