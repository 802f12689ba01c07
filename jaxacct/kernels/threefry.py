"""Words of the counter-based generator Threefry-2x32-20, for use inside kernels.

All have the bits of `jax.random`. `two_words` has the twenty rounds unrolled, so that XLA computes them where
they are used; JAX runs them as a loop on a CPU, over arrays in memory: 25 of 65 microseconds a sample at
n = 7200. The others keep JAX's loop: unrolled, they are recomputed for every use, and some programs no longer
finish compiling.

Keys are JAX keys of the implementation "threefry2x32".

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def two_words(key, shape):
    """Return two independent arrays of `shape` of uniform uint32 words, as `jax.extend.random.threefry_2x32`.

    Both words of a counter are used, where `bits_32` keeps one of them.
    """
    first, second = jax.random.key_data(key)
    size = math.prod(shape)
    counters = jnp.arange(2 * size, dtype=jnp.uint32)
    return _rounds(first, second, counters[:size].reshape(shape), counters[size:].reshape(shape))


@jax.jit  # traced once per shape, not once per program: a third of a program's tracing time otherwise
def _rounds(first, second, x, y):
    """Return the words of the counters (x, y) under the key of two words; all shapes broadcast."""
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = jnp.broadcast_arrays(x + keys[0], y + keys[1])

    def shaped(number):
        return jnp.broadcast_to(number, x.shape)

    # By `lax`, as operators of arrays take five times as long to trace.
    shifts = [[(shaped(np.uint32(r)), shaped(np.uint32(32 - r))) for r in four] for four in _ROTATIONS]
    for injection in range(5):
        for left, right in shifts[injection % 2]:
            x = lax.add(x, y)
            y = lax.bitwise_or(lax.shift_left(y, left), lax.shift_right_logical(y, right))
            y = lax.bitwise_xor(y, x)
        x = lax.add(x, shaped(keys[(injection + 1) % 3]))
        y = lax.add(y, shaped(keys[(injection + 2) % 3] + jnp.uint32(injection + 1)))
    return x, y


def bits_32(key, shape):
    """Return uniform uint32 words of `shape`: the bits of `jax.random.bits`, drawn flat.

    XLA compiles the rounds of threefry over one long axis in half the time it takes over several.
    """
    return jax.random.bits(key, (math.prod(shape),), jnp.uint32).reshape(shape)


def bits_32_at_once(key, shape):
    """Return the words of `bits_32` by unrolled rounds: a quarter of the time for many, on a CPU.

    For words that are used once, and not in a loop (see above).
    """
    size = math.prod(shape)
    return bits_32_at(key, size, jnp.arange(size)).reshape(shape)


def bits_32_at(key, size: int, places):
    """Return uint32 of the shape of `places`: these words of `bits_32(key, (size,))`, without the others."""
    # Does `jax.random.bits` give every word a counter of its own?
    if not jax.config.jax_threefry_partitionable:  # pyrefly: ignore[missing-attribute]
        return bits_32(key, (size,))[places]
    first, second = jax.random.key_data(key)
    x, y = _rounds(first, second, jnp.uint32(0), places.astype(jnp.uint32))
    return x ^ y
