"""The recurrence of `kernels.recurrence` as one Pallas (Triton) kernel: a thread a sample, down the steps.

The scan moves every step through memory several times on a GPU (`gpu_traffic.py` in the benchmarks counts
them). Here a thread keeps `g_{i+1}` and its rounding compensation in registers and the last `b` values in a
ring of its own, so a log-ratio is read once. Rings stay in the L2 cache while they fit: 50 MB on an H200,
which is forty thousand samples in flight at b = 256. Where they do not fit, they cost two more passes over
memory.

At many noise multipliers the log-ratios are sums of the same two arrays; a thread computes them itself.

JAX 0.11 deprecates Pallas for Triton; a JAX without it uses the scan. Pallas is imported where the kernel is
built, so machines without a GPU do not import it.
"""

import functools
import operator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.programs import outside_of_traces
from jaxacct.kernels.recurrence import blocked_log_recurrence, compensated_step, first_offsets, weighted_sums

# Samples per program: one per thread of four warps, so that every load of the kernel has the same layout.
_SAMPLES = 128
# Loads of a ring in flight at once.
_LOADS = 8
# Noise multipliers per thread, each with a ring of its own.
_TOGETHER = 6


def serves(dtype) -> bool:
    """Return whether the kernel can replace the scan for log-ratios of this dtype on this machine."""
    return jax.default_backend() == "gpu" and dtype == jnp.float32 and _works()


@functools.cache
def _works() -> bool:
    """Compare small kernels with the scan: Triton may be missing, or fail on this GPU."""
    options: dict[str, Any] = dict(log_p=float(np.log(0.1)), log_q=float(np.log(0.9)), block=7)

    def difference(array, other, factors):
        arrays = array, other
        many = first_block_of_sums(arrays, factors, **options)
        many -= blocked_log_recurrence(weighted_sums(arrays, factors), **options)
        one = first_block(array, **options) - blocked_log_recurrence(array, **options)
        return jnp.maximum(jnp.abs(many).max(), jnp.abs(one).max())

    def check():
        rng = np.random.default_rng(0)
        given = (
            rng.normal(size=size).astype(np.float32) for size in ((40, 130), (40, 130), (_TOGETHER + 1, 2))
        )
        try:
            return bool(jax.jit(difference)(*given) < 1e-4)
        except Exception:  # any error of the compiler: the scan is used instead
            return False

    return outside_of_traces(check)


def first_block(log_ratios, *, log_p: float, log_q: float, block: int, interpret: bool = False):
    """Return `blocked_log_recurrence` of (n, num_samples) float32; `interpret` runs the kernel without a GPU.

    Source: arXiv 2602.09338, eq. (1) and theorem 5.1. Raises what Pallas raises where there is no GPU.
    """
    itself = jnp.ones((1, 1), jnp.float32)
    return first_block_of_sums(
        (log_ratios,), itself, log_p=log_p, log_q=log_q, block=block, interpret=interpret
    )[:, 0]


def first_block_of_sums(arrays, factors, *, log_p: float, log_q: float, block: int, interpret: bool = False):
    """Return (block, count, num_samples): `first_block` of `weighted_sums(arrays, factors)`, never stored."""
    chex.assert_type([*arrays, factors], jnp.float32)
    if log_q == -np.inf:  # nothing is added up inside a block
        sums = weighted_sums(arrays, factors)
        return blocked_log_recurrence(sums, log_p=log_p, log_q=log_q, block=block)
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    n, num_samples = arrays[0].shape
    count = len(factors)
    together = min(_TOGETHER, count)
    table = jnp.pad(factors, ((0, -count % together), (0, 0)))
    arrays = [jnp.pad(array, ((0, 0), (0, -num_samples % _SAMPLES))) for array in arrays]
    width = arrays[0].shape[1]
    # Arrays and no literals, so that another probability makes the same program (`kernels.programs`).
    numbers = jnp.asarray(np.array([log_p - block * log_q, log_q]), jnp.float32)
    first = pl.pallas_call(
        functools.partial(_kernel, interpret=interpret),
        # Programs of the same samples follow each other and find the arrays in cache.
        grid=(len(table) // together, width // _SAMPLES),
        in_specs=[pl.BlockSpec((2,), lambda v, i: (0,))]
        + [pl.BlockSpec((together, len(arrays)), lambda v, i: (v, 0))]
        + [pl.BlockSpec((n, _SAMPLES), lambda v, i: (0, i)) for _ in arrays],
        out_specs=pl.BlockSpec((block, together, _SAMPLES), lambda v, i: (0, v, i)),
        out_shape=jax.ShapeDtypeStruct((block, len(table), width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=_SAMPLES // 32, num_stages=1),
        interpret=interpret,
        name="blocked_log_recurrence",
    )(numbers, table, *arrays)
    # The ring ends with `g_i` at i mod b, so the steps 1 .. b are in order.
    offsets = jnp.asarray(first_offsets(log_q, block, n), jnp.float32)
    return first[:, :count, :num_samples] + offsets[:, None, None]


def _kernel(numbers, table, *refs, interpret):
    """Fill `ring[i mod b]` with `g_i` of the last b steps, so that it ends as the first block."""
    from jax.experimental.pallas import triton

    *arrays, ring = refs
    steps, (block, together, _) = arrays[0].shape[0], ring.shape
    each = [np.int32(v) for v in range(together)]  # the interpreter needs indices with a shape
    # A ring must hold all the steps that are in flight.
    unroll = min(max(1, _LOADS // together), 1 << (block.bit_length() - 1))
    factors = [[triton.load(table.at[v, np.int32(k)]) for k in range(len(arrays))] for v in each]
    # The interpreter has no barrier, and no threads to need one.
    barrier = (lambda: None) if interpret else triton.debug_barrier

    shift, log_q = (triton.load(numbers.at[np.int32(k)]) for k in range(2))

    def clear(slot, _):
        # Step n + k, k = 0 .. b - 1 (counted from 0), has g = k ln q; it is at (n + k) mod b.
        k = lax.rem(slot + (block - steps % block), block)
        for v in each:
            triton.store(ring.at[slot, v, :], jnp.full((_SAMPLES,), log_q * k.astype(jnp.float32)))

    lax.fori_loop(0, block, clear, None)
    barrier()

    def several(last, number, states):
        """Return the steps last, last - 1, .. and `(g, lost)` after them."""
        rows = [last - j for j in range(number)]
        slots = [lax.rem(row, block) for row in rows]
        inputs = []
        for row, slot in zip(rows, slots, strict=True):
            values = [triton.load(array.at[row, :]) for array in arrays]
            sums = [functools.reduce(operator.add, map(operator.mul, some, values)) for some in factors]
            ahead = [triton.load(ring.at[slot, v, :]) for v in each]
            inputs.append([(s + shift, g) for s, g in zip(sums, ahead, strict=True)])
        for slot, given in zip(slots, inputs, strict=True):
            steps = zip(states, given, strict=True)
            states = [compensated_step(g, lost, of_row, ahead) for (g, lost), (of_row, ahead) in steps]
            for v, (g, _) in zip(each, states, strict=True):
                triton.store(ring.at[slot, v, :], g)
        barrier()
        return states

    nothing = jnp.zeros((_SAMPLES,), jnp.float32)
    states = [(nothing, nothing)] * together
    odd = steps % unroll
    if odd:
        states = several(jnp.int32(steps - 1), odd, states)

    def group(k, states):
        return several(steps - odd - 1 - k * unroll, unroll, states)

    lax.fori_loop(0, steps // unroll, group, states)
