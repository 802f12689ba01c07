"""What recurrences in logarithms are made of: sums of exponentials, compensated sums, sums over phases.

All values are natural logarithms: likelihood ratios span hundreds of orders of magnitude at small noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.polynomial import Polynomial, chebyshev

from jaxacct.kernels.programs import number


def log1p_coefficients(degree: int, low: float, high: float) -> np.ndarray:
    """Return float32 coefficients of `log(1 + t) / t` on an interval, by Chebyshev interpolation."""
    series = chebyshev.Chebyshev.interpolate(lambda t: np.log1p(t) / t, degree, domain=[low, high])
    return series.convert(kind=Polynomial).coef.astype(np.float32)


def polynomial(coefficients: np.ndarray, t):
    """Return the polynomial with these coefficients, the constant one first, at t."""
    value = jnp.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * t + coefficient
    return value


_LOG1P = log1p_coefficients(9, 0.0, 1.0)  # relative error 5e-9
# Relative error of `softplus` in units of 2^-24 (proofs/rounding.md, section 2).
SOFTPLUS_ROUNDINGS = 8


def log_add_exp(a, b):
    """Return `log(e^a + e^b)`, elementwise; at most one argument may be -inf.

    In float32 `log(1 + t)`, t in [0, 1], is a polynomial: cheaper than a logarithm by a third of the whole
    recurrence.
    """
    high = jnp.maximum(a, b)
    return high + _log1p(jnp.exp(jnp.minimum(a, b) - high))


def _log1p(t):
    """Return `log(1 + t)` for t in [0, 1]."""
    return t * polynomial(_LOG1P, t) if t.dtype == jnp.float32 else jnp.log1p(t)


def softplus(d):
    """Return `log(1 + e^d)` elementwise, relative error `SOFTPLUS_ROUNDINGS` units; d may be -inf."""
    # One branch for both parts, so that the derivative at 0 is that of the branch, 1/2, and not 0.
    positive = d >= 0
    return jnp.where(positive, d, 0) + _log1p(jnp.exp(jnp.where(positive, -d, d)))


def two_sum(a, b):
    """Return `(s, e)` with s the rounded sum of a and b and `s + e = a + b` exactly (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def tree_sum(values, axis: int):
    """Sum over an axis by halving: one rounding per halving, where a plain sum has one per term."""
    values = jnp.moveaxis(values, axis, 0)
    size = 1 << max(values.shape[0] - 1, 0).bit_length()
    values = jnp.pad(values, [(0, size - values.shape[0])] + [(0, 0)] * (values.ndim - 1))
    while size > 1:
        size //= 2
        values = values[:size] + values[size:]
    return values[0]


def compensated_step(g, lost, log_input, ahead):
    """Return `(g, lost)` of the previous step: one compensated step of the recurrence for `g + lost`.

    `log_input` is the weight of a participation plus its log-ratio, `ahead` is g after it. Increments are
    positive, so the rounding error does not grow with thousands of steps (proofs/rounding.md, section 3).
    """
    return two_sum(g, softplus(log_input + (ahead - g) - lost) + lost)


def log_mean_over_phases(log_ratios, probability: float, cycle_length: int, is_random: bool = True):
    """Return `ln (1/b) sum_phase prod_k (1 - p + p e^r)` over the steps of phases, of (n, ...) log-ratios.

    Of the first phase alone, unless it `is_random`. Summands `ln(1 + p/(1-p) e^r)` of one sign do not cancel
    (proofs/rounding.md, section 3); `ln(1 - p)` is added for every step.
    """
    n, samples = log_ratios.shape[0], log_ratios.shape[1:]
    (log_p, log_q), rounds = log_probabilities(probability), -(-n // cycle_length)
    if probability < 1:
        log_ratios = softplus(log_ratios + number(log_p - log_q, log_ratios.dtype))
    padding = [(0, rounds * cycle_length - n)] + [(0, 0)] * len(samples)
    totals = tree_sum(jnp.pad(log_ratios, padding).reshape(rounds, cycle_length, *samples), axis=0)
    totals = totals if is_random else totals[:1]
    if probability < 1:
        steps = np.ceil((n - np.arange(len(totals))).clip(0) / cycle_length)
        steps = steps.reshape(-1, *[1] * len(samples))
        totals = totals + jnp.asarray(steps * log_q, totals.dtype)
    return jax.nn.logsumexp(totals, axis=0) - float(np.log(len(totals)))


def log_probabilities(probability: float) -> tuple[float, float]:
    """Return (ln p, ln(1 - p)) in float64, the second -inf at p = 1."""
    with np.errstate(divide="ignore"):
        return float(np.log(probability)), float(np.log1p(-probability))
