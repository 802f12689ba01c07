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
    key, step, number = np.arange(8, dtype=np.uint32), np.int32(3), 3 * _BLOCKS // 2

    def check() -> bool:
        try:
            ours = np.asarray(jax.jit(words, static_argnums=2)(key, step, number))
        except Exception:  # any error of the compiler: XLA's program is used instead
            return False
        counter = np.arange(number, dtype=np.uint32)
        return np.array_equal(ours, blocks(key, (counter, np.uint32(step), np.uint32(0), np.uint32(0))))

    return outside_of_traces(check)


def words(key, step, number: int, interpret: bool = False) -> jax.Array:
    """Return (16, number) uint32: the step's blocks 0, 1, ..

    Args:
      key: (8,) uint32.
      step: () integer.
      number: static.
      interpret: runs the kernel without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    programs = -(-number // _BLOCKS)
    given = jnp.append(jnp.asarray(key, jnp.uint32), jnp.asarray(step).astype(jnp.uint32))
    found = pl.pallas_call(
        _kernel,
        grid=(programs,),
        in_specs=[pl.BlockSpec((9,), lambda i: (0,))],
        out_specs=pl.BlockSpec((16, _BLOCKS), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((16, programs * _BLOCKS), jnp.uint32),
        compiler_params=triton.CompilerParams(num_warps=_BLOCKS // 32, num_stages=1),
        interpret=interpret,
        name="chacha20",
    )(given)
    return found[:, :number]


def _kernel(given, out):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *key, step = (triton.load(given.at[np.int32(k)]) for k in range(9))
    first = pl.program_id(0) * _BLOCKS
    counter = (first + jnp.arange(_BLOCKS, dtype=jnp.int32)).astype(jnp.uint32)
    start = start_of(key, (counter, step, np.uint32(0), np.uint32(0)))
    for k, words_of in enumerate(after_rounds(start, ROUNDS)):
        triton.store(out.at[np.int32(k), :], words_of)
