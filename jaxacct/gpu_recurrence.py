"""The recurrence of `jaxacct.recurrence` as one Pallas (Triton) kernel: a thread a sample, down the steps.

The scan over blocks moves every block through memory about thirteen times on a GPU (`gpu_traffic.py` in the
benchmarks counts them). Here a thread keeps `ln f_{i+1}` in a register and the last `b` values in a ring of
its own, which stays in cache, so a log-ratio is read once.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxacct.recurrence import blocked_log_recurrence, log_add_exp

# Samples a program: one a thread of four warps, so that every load of the kernel has the same layout.
_SAMPLES = 128
# Steps whose loads are under way at once.
_UNROLL = 8


def serves(log_ratios) -> bool:
    """Whether `first_block` can take the place of the scan for these log-ratios on this machine."""
    return jax.default_backend() == "gpu" and log_ratios.dtype == jnp.float32 and _works()


@functools.cache
def _works() -> bool:
    """One small kernel against the scan: Triton may be missing, or fail on this GPU."""
    options: dict[str, Any] = dict(log_p=float(np.log(0.1)), log_q=float(np.log(0.9)), block=7)

    def difference(ratios):
        return jnp.abs(first_block(ratios, **options) - blocked_log_recurrence(ratios, **options)).max()

    def check():
        ratios = np.random.default_rng(0).normal(size=(40, 130)).astype(np.float32)
        try:
            return bool(jax.jit(difference)(ratios) < 1e-4)
        except Exception:  # whatever the compiler raises: the scan needs none of it
            return False

    # Called while another program is traced; a thread of its own is outside of that.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(check).result()


def first_block(log_ratios, *, log_p: float, log_q: float, block: int, interpret: bool = False):
    """`blocked_log_recurrence` of many samples.

    Args:
      log_ratios: (n, num_samples) float32.
      log_p, log_q, block: as there.
      interpret: run the kernel's program without a GPU, for tests.

    Returns:
      (block, num_samples) float32.

    Source: seed 003, eq. (1) and theorem 5.1. Raises what Pallas raises where there is no GPU.
    """
    if log_q == -np.inf:  # then nothing is added up inside a block
        return blocked_log_recurrence(log_ratios, log_p=log_p, log_q=log_q, block=block)
    n, num_samples = log_ratios.shape
    unroll = min(_UNROLL, 1 << (block.bit_length() - 1))  # a ring of `block` must hold them all
    steps = -(-n // unroll) * unroll
    # A padded step has r = 0 and looks at f = 1, so it gives (1-p) + p = 1.
    ratios = jnp.pad(log_ratios, ((0, steps - n), (0, -num_samples % _SAMPLES)))
    body = functools.partial(
        _kernel, log_p=log_p, log_q=log_q, block=block, unroll=unroll, interpret=interpret
    )
    first = pl.pallas_call(
        body,
        grid=(ratios.shape[1] // _SAMPLES,),
        in_specs=[pl.BlockSpec((steps, _SAMPLES), lambda i: (0, i))],
        out_specs=pl.BlockSpec((block, _SAMPLES), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((block, ratios.shape[1]), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=_SAMPLES // 32, num_stages=1),
        interpret=interpret,
        name="blocked_log_recurrence",
    )(ratios)
    return first[:, :num_samples]


def _kernel(ratios, ring, *, log_p, log_q, block, unroll, interpret):
    """`ring[i mod b]` holds `ln f_i` of the last b steps, so it ends as the first block."""
    # The interpreter has no barrier, and no threads to need one.
    barrier = (lambda: None) if interpret else triton.debug_barrier
    steps = ratios.shape[0]

    def clear(slot, _):
        triton.store(ring.at[slot, :], jnp.zeros((_SAMPLES,), jnp.float32))

    lax.fori_loop(0, block, clear, None)
    barrier()

    def several(k, log_f):
        last = steps - 1 - k * unroll
        rows = [last - j for j in range(unroll)]
        slots = [lax.rem(row, block) for row in rows]
        inputs = [
            triton.load(ratios.at[row, :]) + triton.load(ring.at[slot, :]) + log_p
            for row, slot in zip(rows, slots, strict=True)
        ]
        for slot, log_input in zip(slots, inputs, strict=True):
            log_f = log_add_exp(log_f + log_q, log_input)
            triton.store(ring.at[slot, :], log_f)
        barrier()
        return log_f

    lax.fori_loop(0, steps // unroll, several, jnp.zeros((_SAMPLES,), jnp.float32))
