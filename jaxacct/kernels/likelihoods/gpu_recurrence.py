"""The recurrence of `kernels.table` as one Pallas (Triton) kernel: a thread a sample, down the steps.

The scan moves every step through memory several times on a GPU (`gpu_traffic.py` in the benchmarks counts
them). Here a thread keeps g and its rounding compensation in registers and the last steps in a ring of its
own, so a log-ratio is read once. Rings stay in the L2 cache while they fit: 50 MB on an H200, which is forty
thousand samples in flight at b = 256. Where they do not fit, they cost two more passes over memory.

JAX 0.11 deprecates Pallas for Triton; a JAX without it uses the scan. Pallas is imported where the kernel is
built, so machines without a GPU do not import it.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.programs import outside_of_traces
from jaxacct.kernels.recurrence import compensated_step
from jaxacct.kernels.table import first_values, ring_length

# Samples per program: one per thread of four warps, so that every load of the kernel has the same layout.
_SAMPLES = 128
# Loads of a ring in flight at once.
_LOADS = 8


def serves(weights, certain, lockout, dtype) -> bool:
    """Return whether the kernel can replace the scan for a table's path and this dtype on this GPU.

    It has units of one phase whose participations are not counted, none of them certain, in float32.
    """
    fits = weights.shape[1:] == (1, 1) and not certain.any() and lockout.min() > 1
    return fits and dtype == jnp.float32 and _works()


@functools.cache
def _works() -> bool:
    """Compare a small kernel with the scan: Triton may be missing, or fail on this GPU."""
    weights, lockout = np.linspace(-3, -1, 40).reshape(40, 1, 1), np.arange(40) % 5 + 3
    table = weights, np.zeros(weights.shape, bool), lockout, 4

    def difference(log_ratios):
        return jnp.abs(kernel_values(log_ratios, *table) - first_values(log_ratios, *table)).max()

    def check():
        ratios = np.random.default_rng(0).normal(size=(40, 130)).astype(np.float32)
        try:
            return bool(jax.jit(difference)(ratios) < 1e-4)
        except Exception:  # any error of the compiler: the scan is used instead
            return False

    return outside_of_traces(check)


def kernel_values(log_ratios, weights, certain, lockout, starts: int, interpret: bool = False):
    """Return `kernels.table.first_values` of (n, num_samples) float32.

    `interpret` runs the kernel without a GPU; else it raises what Pallas raises where there is none.

    Source: arXiv 2602.09338, eq. (1) and theorem 5.1.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    del certain  # none is, see `serves`
    chex.assert_type(log_ratios, jnp.float32)
    n, num_samples = log_ratios.shape
    length = ring_length(lockout, starts)
    ratios = jnp.pad(log_ratios, ((0, 0), (0, -num_samples % _SAMPLES)))
    # Arrays and no literals, so that another table makes the same program (`kernels.programs`).
    slots = jnp.asarray((np.arange(n) + lockout) % length, jnp.int32)
    # All rows in flight are loaded before any is stored, so none may lead to another.
    unroll = min(_LOADS, 1 << (int(lockout.min()).bit_length() - 1), n)
    found = pl.pallas_call(
        functools.partial(_kernel, unroll=unroll, interpret=interpret),
        grid=(ratios.shape[1] // _SAMPLES,),
        in_specs=[pl.BlockSpec((n,), lambda i: (0,))] * 2 + [pl.BlockSpec((n, _SAMPLES), lambda i: (0, i))],
        out_specs=pl.BlockSpec((length, _SAMPLES), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((length, ratios.shape[1]), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=_SAMPLES // 32, num_stages=1),
        interpret=interpret,
        name="table_recurrence",
    )(jnp.asarray(weights.reshape(n), jnp.float32), slots, ratios)
    return found[:starts, :num_samples]


def _kernel(weights, slots, ratios, ring, *, unroll: int, interpret: bool):
    """Fill `ring[i mod length]` with g of the first rows; the ring holds one row more than any lockout."""
    from jax.experimental.pallas import triton

    steps, length = ratios.shape[0], ring.shape[0]
    # The interpreter has no barrier, and no threads to need one.
    barrier = (lambda: None) if interpret else triton.debug_barrier

    def clear(slot, _):  # past the end f is 1
        triton.store(ring.at[slot, :], jnp.zeros((_SAMPLES,), jnp.float32))

    lax.fori_loop(0, length, clear, None)
    barrier()

    def several(last, number, state):
        """Return `(g, lost)` after the rows last, last - 1, .."""
        rows = [last - j for j in range(number)]
        given = [
            (
                triton.load(weights.at[row]) + triton.load(ratios.at[row, :]),
                triton.load(ring.at[triton.load(slots.at[row]), :]),
            )
            for row in rows
        ]
        for row, (log_input, ahead) in zip(rows, given, strict=True):
            g, lost = state
            state = compensated_step(g, lost, log_input, ahead)
            triton.store(ring.at[lax.rem(row, length), :], state[0])
        barrier()
        return state

    nothing = jnp.zeros((_SAMPLES,), jnp.float32)
    odd = steps % unroll
    state = several(jnp.int32(steps - 1), odd, (nothing, nothing)) if odd else (nothing, nothing)

    def group(k, state):
        return several(steps - odd - 1 - k * unroll, unroll, state)

    lax.fori_loop(0, steps // unroll, group, state)
