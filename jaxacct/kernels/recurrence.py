"""Blocked dynamic program over a min-separated participation process, in logarithms.

`f_i = (1-p) f_{i+1} + p e^{r_i} f_{i+b}` with `f_i = 1` past the end (arXiv 2602.09338, eq. 1). The second
term refers to the next block of `b` steps, so a `lax.scan` over blocks has it for every step of a block at
once, and the recurrence inside the block is linear of first order.

All values are natural logarithms: `f` spans hundreds of orders of magnitude at small noise, even inside one
block, so one common scale per block would not suffice.
"""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.polynomial import Polynomial, chebyshev

from jaxacct.kernels.programs import number


def _log1p_coefficients() -> np.ndarray:
    """Return coefficients of `log(1 + t) / t` on [0, 1], Chebyshev degree 9: relative error 5e-9."""
    series = chebyshev.Chebyshev.interpolate(lambda t: np.log1p(t) / t, 9, domain=[0, 1])
    return series.convert(kind=Polynomial).coef.astype(np.float32)


_LOG1P = _log1p_coefficients()
# Relative error of `softplus` in units of 2^-24 (proofs/rounding.md, section 2).
SOFTPLUS_ROUNDINGS = 8


def log_add_exp(a, b):
    """Return `log(e^a + e^b)`, elementwise; at most one argument may be -inf.

    In float32 `log(1 + t)`, t in [0, 1], is a polynomial: cheaper than a logarithm by a third of the whole
    recurrence. Otherwise it is one `log` with its first-order correction, which is as exact as `log1p` here,
    because `1 + t` loses at most half an ulp and the loss is recovered.
    """
    high = jnp.maximum(a, b)
    return high + _log1p(jnp.exp(jnp.minimum(a, b) - high))


def _log1p(t):
    """Return `log(1 + t)` for t in [0, 1]."""
    if t.dtype == jnp.float32:
        ratio = jnp.full_like(t, _LOG1P[-1])
        for coefficient in _LOG1P[-2::-1]:
            ratio = ratio * t + coefficient
        return t * ratio
    return corrected_log1p(t)


def corrected_log1p(t):
    """Return `log(1 + t)` for t >= 0, by `log` and its first-order correction for the rounding of `1 + t`."""
    u = 1 + t
    return jnp.log(u) + (t - (u - 1)) / u


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


def blocked_log_recurrence(log_ratios, *, log_p: float, log_q: float, block: int):
    """Run the recurrence to the first step and return the first block of `ln f`.

    Time is the first axis and samples the last, so that a step of many samples is contiguous in memory; with
    `jax.vmap` over samples a CPU spends a third of the time on transposing blocks.

    The recurrence runs on `g_i = ln f_i - (n + 1 - i) ln q`, which a step without participation leaves
    unchanged: `g_i = g_{i+1} + softplus(c + r_i + g_{i+b} - g_{i+1})`, `c = ln p - b ln q`. The increments
      are positive and summed with compensation, so the rounding error does not grow with thousands of steps
      (proofs/rounding.md, section 3).

    Args:
      log_ratios: (n, ...) float; `r_i`, the log-likelihood ratio of one participation at step i.
      log_p: ln p, natural log of the sampling probability; static.
      log_q: ln(1 - p), -inf at p = 1; static.
      block: minimum separation b >= 1; static.

    Returns:
      (block, ...) float, `ln f_1 .. ln f_b`, with `ln f_i = 0` for i > n. Same dtype as `log_ratios`.

    Source: arXiv 2602.09338, eq. (1) and theorem 5.1. Exact up to rounding.
    """
    n, samples = log_ratios.shape[0], log_ratios.shape[1:]
    num_blocks = -(-n // block)
    # A padded step has r = 0 and reads f = 1, so it gives (1-p) + p = 1: the boundary condition.
    padding = [(0, num_blocks * block - n)] + [(0, 0)] * len(samples)
    padded = jnp.pad(log_ratios, padding).reshape(num_blocks, block, *samples)
    ahead = jnp.zeros((block, *samples), log_ratios.dtype)
    if log_q == -jnp.inf:  # a product of e^r, block by block

        def one_round(carry, ratios):
            sums, lost = carry
            sums, rounded = two_sum(sums, ratios + lost)
            return (sums, rounded), None

        (sums, _), _ = lax.scan(one_round, (ahead, ahead), padded + number(log_p, padded.dtype), reverse=True)
        return sums

    def column(numbers):
        return jnp.asarray(numbers, log_ratios.dtype).reshape(-1, *[1] * len(samples))

    shift = number(log_p - block * log_q, log_ratios.dtype)

    def step(carry, given):
        g, lost = carry
        ratio, ahead = given
        g, lost = compensated_step(g, lost, ratio + shift, ahead)
        return (g, lost), g

    def one_block(carry, ratios):
        following, lost = carry
        (_, lost), values = lax.scan(step, (following[0], lost), (ratios, following), reverse=True)
        return (values, lost), None

    # Past the end f is 1.
    start = ahead + column(np.arange(block) * log_q), jnp.zeros(samples, log_ratios.dtype)
    (first, _), _ = lax.scan(one_block, start, padded, reverse=True)
    return first + column(first_offsets(log_q, block, num_blocks * block))


def compensated_step(g, lost, log_input, ahead):
    """Return `(g, lost)` of the previous step: one compensated step of the recurrence for `g + lost`.

    `log_input` is `c + r_i`, `ahead` is g of the step b ahead.
    """
    added = softplus(log_input + (ahead - g) - lost)
    return two_sum(g, added + lost)


def first_offsets(log_q: float, block: int, steps: int) -> np.ndarray:
    """Return (b,) float64: `ln f - g` at the first b of `steps` steps."""
    return (steps - np.arange(block)) * log_q


def phase_totals(values, cycle_length: int):
    """Return sums over the steps of each phase, (cycle_length, ...), of (n, ...) values of the steps."""
    n, samples = values.shape[0], values.shape[1:]
    num_rounds = -(-n // cycle_length)
    padding = [(0, num_rounds * cycle_length - n)] + [(0, 0)] * len(samples)
    return tree_sum(jnp.pad(values, padding).reshape(num_rounds, cycle_length, *samples), axis=0)


def log_mean_of_phases(per_phase, each: float = 0.0, *, iterations: int):
    """Return `ln (1/b) sum_phase e^{per_phase}` over the first axis; `each` is added for every step."""
    cycle_length = per_phase.shape[0]
    rounds = np.ceil((iterations - np.arange(cycle_length)).clip(0) / cycle_length)
    rounds = rounds.reshape(-1, *[1] * (per_phase.ndim - 1))
    per_phase = per_phase + jnp.asarray(rounds * each, per_phase.dtype)
    return jax.nn.logsumexp(per_phase, axis=0) - float(np.log(cycle_length))


def weighted_sums(arrays, factors):
    """Return (n, count, num_samples): `sum_k factors[v, k] arrays[k]` for arrays of (n, num_samples)."""
    chex.assert_shape(factors, (None, len(arrays)))
    chex.assert_equal_shape(arrays)
    return functools.reduce(
        operator.add, (factors[None, :, k, None] * array[:, None, :] for k, array in enumerate(arrays))
    )


def log_probabilities(probability: float) -> tuple[float, float]:
    """Return (ln p, ln(1 - p)) in float64, the second -inf at p = 1."""
    with np.errstate(divide="ignore"):
        return float(np.log(probability)), float(np.log1p(-probability))
