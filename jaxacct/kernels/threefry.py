"""Words, keys and integers of the counter-based generator Threefry-2x32-20, for use inside kernels.

All are the bits of `jax.random`. `two_words` has the twenty rounds written out, so that XLA makes them where
they are used; JAX runs them as a loop on a CPU, over arrays in memory: 25 of 65 microseconds a sample at
n = 7200. The others keep JAX's loop: written out as well, they are computed anew for every use, and some
programs no longer end compiling.

Keys are JAX keys of the implementation "threefry2x32".

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import math

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def two_words(key, shape):
    """Two independent arrays of `shape` of uniform uint32 words: those of `jax.extend.random.threefry_2x32`.

    Both words of a counter are used, where `bits_32` keeps one of them.
    """
    first, second = jax.random.key_data(key)
    size = math.prod(shape)
    counters = jnp.arange(2 * size, dtype=jnp.uint32)
    return _rounds(first, second, counters[:size].reshape(shape), counters[size:].reshape(shape))


def _rounds(first, second, x, y):
    """The words of the counters (x, y) under the key of two words; all of one shape, or such as broadcast."""
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for injection in range(5):
        for rotation in _ROTATIONS[injection % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(injection + 1) % 3]
        y = y + keys[(injection + 2) % 3] + jnp.uint32(injection + 1)
    return x, y


def bits_32_of(keys, size: int):
    """(number of keys, size) uint32: what `bits_32` draws with each of the keys, all at once.

    Inside a loop over steps every step would run JAX's loop over the rounds on a few hundred numbers: half of
    the time of drawing batch sizes.
    """
    # Where it is off, `jax.random.bits` counts in another way.
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.vmap(lambda key: bits_32(key, (size,)))(keys)
    words = jax.random.key_data(keys)
    x, y = _rounds(words[:, :1], words[:, 1:], jnp.uint32(0), jnp.arange(size, dtype=jnp.uint32)[None])
    return x ^ y


def bits_32(key, shape):
    """Uniform uint32 words of `shape`: the bits of `jax.random.bits`, drawn flat.

    XLA compiles the rounds of threefry over one long axis in half the time it takes over several.
    """
    return jax.random.bits(key, (math.prod(shape),), jnp.uint32).reshape(shape)


def bits_32_at_once(key, shape):
    """The words of `bits_32` by rounds that are written out: a quarter of the time for many, on a CPU.

    For words that are used once, and not in a loop (see above).
    """
    return bits_32_of(key[None], math.prod(shape))[0].reshape(shape)


def bits_32_at(key, size: int, places):
    """uint32 of the shape of `places`: the words of `bits_32(key, (size,))` at these, without the others."""
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return bits_32(key, (size,))[places]
    first, second = jax.random.key_data(key)
    x, y = _rounds(first, second, jnp.uint32(0), places.astype(jnp.uint32))
    return x ^ y


def split(key, num: int = 2):
    """(num,) keys: those of `jax.random.split`."""
    return jax.random.split(key, num)


def key_of_words(words):
    """The keys of (..., 2) uint32 words: the inverse of `jax.random.key_data`."""
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def fold_in(key, number):
    """The key of `jax.random.fold_in`, for a number below 2^32."""
    return jax.random.fold_in(key, number)


def integers(key, shape, below: int):
    """Uniform integers 0 .. below - 1 of `shape`, int32: those of `jax.random.randint`.

    Args:
      below: 1 .. 2^31 - 1, static.
    """
    return jax.random.randint(key, shape, 0, below)


def integers_error(below: int) -> float:
    """Relative error of the law of `integers`, at least.

    Up to 2^16 nothing overflows, and 64 bits modulo `below` are off by `below 2^-64`. Above, the low word
    modulo `below` is off by `below 2^-32`; the sum overflows with a probability of that at most, and no
    value is then twice as likely as it should be.
    """
    return below * (2.0**-32 if below <= 2**16 else 2.0**-31)
