"""The counter-based generator Threefry-2x32-20, written out.

The same bits as `jax.random` with its default (partitionable) threefry, whatever JAX is configured to. JAX
runs the twenty rounds as a loop over arrays in memory on a CPU, which takes twice as long to compile and 25
of 65 microseconds a sample at n = 7200; written out, XLA makes the bits where they are used.

Keys are JAX keys of the implementation "threefry2x32".

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import functools
import math

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@functools.partial(jax.jit, inline=True)
def _encrypted(first, second, x, y):
    """The block cipher: words (x, y) of one shape under the key (first, second), all uint32."""
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for injection in range(5):
        for rotation in _ROTATIONS[injection % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(injection + 1) % 3]
        y = y + keys[(injection + 2) % 3] + jnp.uint32(injection + 1)
    return x, y


def _key_of(words):
    return jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")


def two_words(key, shape):
    """Two independent arrays of `shape` of uniform uint32 words: those of `jax.extend.random.threefry_2x32`.

    Both words of a counter are used, where `bits_32` keeps one of them.
    """
    size = math.prod(shape)
    counters = jnp.arange(2 * size, dtype=jnp.uint32)
    x, y = counters[:size].reshape(shape), counters[size:].reshape(shape)
    return _encrypted(*jax.random.key_data(key), x, y)


def bits_32(key, shape):
    """Uniform uint32 words of `shape`: the bits of `jax.random.bits`."""
    counters = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    x, y = _encrypted(*jax.random.key_data(key), jnp.zeros_like(counters), counters)
    return (x ^ y).reshape(shape)


def split(key, num: int = 2):
    """(num,) keys: those of `jax.random.split`."""
    counters = jnp.arange(num, dtype=jnp.uint32)
    return _key_of(_encrypted(*jax.random.key_data(key), jnp.zeros_like(counters), counters))


def fold_in(key, number):
    """The key of `jax.random.fold_in`, for a number below 2^32."""
    word = jnp.asarray(number, jnp.uint32)
    return _key_of(_encrypted(*jax.random.key_data(key), jnp.zeros_like(word), word))


def integers(key, shape, below: int):
    """Uniform integers 0 .. below - 1 of `shape`, int32: those of `jax.random.randint`.

    Args:
      below: 1 .. 2^31 - 1, static.
    """
    high, low = (bits_32(part, shape) for part in split(key))
    # 2^32 high + low modulo `below`, in words of 32 bits, as JAX has it.
    shift = (2**16 % below) ** 2 % 2**32 % below
    return ((high % below * jnp.uint32(shift) + low % below) % below).astype(jnp.int32)


def integers_error(below: int) -> float:
    """Relative error of the law of `integers`, at least.

    Up to 2^16 nothing overflows, and 64 bits modulo `below` are off by `below 2^-64`. Above, the low word
    modulo `below` is off by `below 2^-32`; the sum overflows with a probability of that at most, and no
    value is then twice as likely as it should be.
    """
    return below * (2.0**-32 if below <= 2**16 else 2.0**-31)
