"""The blocked dynamic program over a min-separated participation process, in logarithms.

`f_i = (1-p) f_{i+1} + p e^{r_i} f_{i+b}` with `f_i = 1` past the end (arXiv 2602.09338, eq. 1). The second
term looks a whole block of `b` steps ahead, so a `lax.scan` over blocks knows it for every step of a block at
once, and what is left inside the block is a first-order linear recurrence.

All values are natural logarithms: `f` spans hundreds of orders of magnitude at small noise, inside one
block too, so no common scale per block would do.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.polynomial import Polynomial, chebyshev


def _log1p_coefficients() -> np.ndarray:
    """`log(1 + t) / t` on [0, 1] by Chebyshev interpolation of degree 9: a relative error of 5e-9."""
    series = chebyshev.Chebyshev.interpolate(lambda t: np.log1p(t) / t, 9, domain=[0, 1])
    return series.convert(kind=Polynomial).coef.astype(np.float32)


_LOG1P = _log1p_coefficients()


def log_add_exp(a, b):
    """`log(e^a + e^b)`, elementwise; both arguments may not be -inf at once.

    In float32 `log(1 + t)`, t in [0, 1], is a polynomial: cheaper than a logarithm by a third of the whole
    recurrence. Else it is one `log` with its first-order correction, which is as exact as `log1p` here,
    because `1 + t` loses at most half an ulp and the loss is recovered.
    """
    high = jnp.maximum(a, b)
    t = jnp.exp(jnp.minimum(a, b) - high)
    if t.dtype == jnp.float32:
        ratio = jnp.full_like(t, _LOG1P[-1])
        for coefficient in _LOG1P[-2::-1]:
            ratio = ratio * t + coefficient
        return high + t * ratio
    u = 1 + t
    return high + (jnp.log(u) + (t - (u - 1)) / u)


def blocked_log_recurrence(log_ratios, *, log_p: float, log_q: float, block: int):
    """Run the recurrence to the first step and return the first block of `ln f`.

    Time comes first and samples last, so that a step of many samples is one stretch of memory: mapped over
    samples with `jax.vmap` instead, a CPU spends a third of the time on transposing blocks.

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
    # A padded step has r = 0 and looks at f = 1, so it gives (1-p) + p = 1: the boundary condition.
    padding = [(0, num_blocks * block - n)] + [(0, 0)] * len(samples)
    padded = jnp.pad(log_ratios, padding).reshape(num_blocks, block, *samples)

    def one_block(following, ratios):
        return _solve_block(following[0], log_p + ratios + following, log_q), None

    first, _ = lax.scan(one_block, jnp.zeros((block, *samples), log_ratios.dtype), padded, reverse=True)
    return first


def _solve_block(log_next, log_inputs, log_q: float):
    """Solve `f_k = q f_{k+1} + e^{u_k}` inside one block, `f` after the block being `e^log_next`."""
    if log_q == -jnp.inf:
        return log_inputs
    return lax.platform_dependent(log_next, log_inputs, cpu=_sequential(log_q), default=_associative(log_q))


def _sequential(log_q: float):
    def solve(log_next, log_inputs):
        def step(log_f, log_input):
            log_f = log_add_exp(log_f + log_q, log_input)
            return log_f, log_f

        return lax.scan(step, log_next, log_inputs, reverse=True)[1]

    return solve


def _associative(log_q: float):
    def solve(log_next, log_inputs):
        def combine(later, earlier):
            decay_l, value_l = later
            decay_e, value_e = earlier
            return decay_l + decay_e, log_add_exp(value_l + decay_e, value_e)

        decay, value = lax.associative_scan(
            combine, (jnp.full_like(log_inputs, log_q), log_inputs), reverse=True
        )
        return log_add_exp(decay + log_next, value)

    return solve


def phase_log_mean(log_terms, *, cycle_length: int):
    """`ln (1/b) sum_phase exp( sum_k t_{phase + k b} )` for one sample's (n,) log-factors `t`.

    The likelihood ratio of a scheme whose example picks one of `cycle_length` phases uniformly and then
    takes part only at steps of that phase. Unbatched; a padded step is a factor of one.
    """
    n = log_terms.shape[0]
    num_rounds = -(-n // cycle_length)
    padded = jnp.pad(log_terms, (0, num_rounds * cycle_length - n))
    per_phase = padded.reshape(num_rounds, cycle_length).sum(axis=0)
    return jax.nn.logsumexp(per_phase) - jnp.log(cycle_length)
