"""The key stream as one Pallas (Triton) kernel: a thread a block of 16 words, which stay in its registers.

XLA's program passes all words through a GPU's memory once every two rounds. The words are the same.
JAX 0.11 deprecates Pallas for Triton; without it noise takes three times as long, by the program.
Pallas is imported where the kernel is built, so machines without a GPU do not import it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import outside_of_traces

from .chacha import ROUNDS, after_rounds, blocks, start_of

_BLOCKS = 128  # of a program: one a thread of four warps


def serves() -> bool:
    """Return whether the kernel can replace XLA's program on this machine."""
    return jax.default_backend() == "gpu" and _works()


@functools.cache
def _works() -> bool:
    """Compare some words with those of XLA's program: Triton may be missing, or fail on this GPU."""
    key, step = np.arange(8, dtype=np.uint32), np.int32(3)
    numbers = np.arange(3 * _BLOCKS // 2, dtype=np.uint32) * 0x9E3779B9  # of blocks far apart

    def check() -> bool:
        try:
            ours = np.asarray(jax.jit(words)(key, step, numbers))
        except Exception:  # any error of the compiler: XLA's program is used instead
            return False
        return np.array_equal(ours, blocks(key, (numbers, np.uint32(step), np.uint32(0), np.uint32(0))))

    return outside_of_traces(check)


def words(key, step, numbers, interpret: bool = False) -> jax.Array:
    """Return (16, n) uint32: blocks of the step's key stream.

    Args:
      key: (8,) uint32.
      step: () integer.
      numbers: (n,) uint32, of the blocks.
      interpret: runs the kernel without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    programs = -(-numbers.size // _BLOCKS)
    padded = jnp.pad(numbers, (0, programs * _BLOCKS - numbers.size))
    given = jnp.append(jnp.asarray(key, jnp.uint32), jnp.asarray(step).astype(jnp.uint32))
    found = pl.pallas_call(
        _kernel,
        grid=(programs,),
        in_specs=[pl.BlockSpec((9,), lambda i: (0,)), pl.BlockSpec((_BLOCKS,), lambda i: (i,))],
        out_specs=pl.BlockSpec((16, _BLOCKS), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((16, programs * _BLOCKS), jnp.uint32),
        compiler_params=triton.CompilerParams(num_warps=_BLOCKS // 32, num_stages=1),
        interpret=interpret,
        name="chacha20",
    )(given, padded)
    return found[:, : numbers.size]


def _kernel(given, numbers, out):
    from jax.experimental.pallas import triton

    *key, step = (triton.load(given.at[np.int32(k)]) for k in range(9))
    start = start_of(key, (triton.load(numbers.at[:]), step, np.uint32(0), np.uint32(0)))
    for k, words_of in enumerate(after_rounds(start, ROUNDS)):
        triton.store(out.at[np.int32(k), :], words_of)
