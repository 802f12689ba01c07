"""Keys: from the operating system by default, one per fixed block of samples.

A block of `BLOCK_SIZE` samples has the key `fold_in(fold_in(run, stream), block index)`. What a block
draws does not depend on how many blocks share a batch, on the number of devices or on the other shards,
and any block can be drawn again alone.
"""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 128


def fresh_key():
    """A threefry key of 64 bits from the operating system's generator."""
    return key_from_words(np.frombuffer(os.urandom(8), np.uint32).tolist())


def checked_key(key):
    """A fresh key for None, else `key` if it is one JAX key; ValueError otherwise."""
    if key is None:
        return fresh_key()
    try:
        if jax.random.key_data(key).shape == (2,):
            return key
    except TypeError:
        pass
    raise ValueError("key must be one JAX key of threefry, such as jax.random.key(0), or None")


def key_from_words(words):
    """The threefry key of two 32-bit words, as stored in evidence so that draws can be repeated."""
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")


def key_words(key) -> list[int]:
    """The two 32-bit words of a key."""
    return [int(word) for word in np.asarray(jax.random.key_data(key))]


def stream_key(key, stream: int):
    """The key of one independent stream of a run (a direction, a pilot, ...)."""
    return jax.random.fold_in(key, stream)


def block_keys(key, first_block: int, num_blocks: int):
    """(num_blocks,) keys of consecutive blocks of one stream."""
    indices = jnp.arange(num_blocks, dtype=jnp.uint32) + jnp.uint32(first_block)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def words_32(key, shape):
    """Two independent arrays of `shape` of uniform uint32 words, from one key of threefry.

    Those of `jax.extend.random.threefry_2x32`, with its twenty rounds written out, so that XLA makes them
    where they are used. JAX runs them as a loop on a CPU, over arrays in memory: 25 of 65 microseconds a
    sample at n = 7200. Both words of a counter are used; `jax.random.bits` keeps one of them.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Threefry-2x32-20.
    """
    first, second = jax.random.key_data(key)
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    size = int(np.prod(shape))
    counters = jnp.arange(2 * size, dtype=jnp.uint32)
    x, y = counters[:size].reshape(shape) + keys[0], counters[size:].reshape(shape) + keys[1]
    for injection in range(5):
        for rotation in _ROTATIONS[injection % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(injection + 1) % 3]
        y = y + keys[(injection + 2) % 3] + jnp.uint32(injection + 1)
    return x, y


def normal_pairs(key, shape, dtype):
    """Two independent arrays of `shape` of standard normals.

    In float32 by the method of Box and Muller: radius from 32 bits, so that it ends at 6.7 where
    `jax.random.normal` ends at 5.4; two bits for the quadrant and 30 for the angle in it, whose sine and
    cosine are Taylor polynomials good to 3e-8 on [-pi/4, pi/4].
    """
    if jnp.dtype(dtype) != jnp.float32:
        # Flat for the sake of the compiler, as in `bits_32`.
        flat = (math.prod(shape),)
        return tuple(jax.random.normal(part, flat, dtype).reshape(shape) for part in jax.random.split(key))
    radius_bits, angle_bits = words_32(key, shape)
    uniform = (radius_bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    radius = jnp.sqrt(-2 * jnp.log(uniform))
    angle = ((angle_bits >> 2).astype(jnp.float32) * jnp.float32(2.0**-30) - 0.5) * jnp.float32(np.pi / 2)
    square = angle * angle
    sine = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362_880))))
    cosine = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40_320)))
    quarter, half = (angle_bits & 1) == 1, (angle_bits & 2) == 2
    x, y = jnp.where(quarter, sine, cosine), jnp.where(quarter, -cosine, sine)
    radius = jnp.where(half, -radius, radius)
    return radius * x, radius * y


def bits_32(key, shape):
    """Uniform uint32 words of `shape`: the bits of `jax.random.bits`, drawn flat.

    XLA compiles the rounds of threefry over one long axis in half the time it takes over several.
    """
    return jax.random.bits(key, (math.prod(shape),), jnp.uint32).reshape(shape)


def uniform_32(key, shape, dtype=jnp.float32):
    """Uniform on (0, 1] with steps of 2^-32, as exact near zero as `dtype` allows.

    `jax.random.uniform` in float32 has steps of 2^-23, which would bias a sampling probability of 1e-4
    by up to a thousandth of itself.
    """
    bits = bits_32(key, shape)
    return (bits.astype(dtype) + 0.5) * jnp.asarray(2.0**-32, dtype)


def exponential_32(key, shape, dtype=jnp.float32):
    """Unit exponential draws with full relative precision at both ends.

    One bit says whether the draw is below the median; `-log(u)` loses the short waits and `-log1p(-u)` the
    long ones, so each serves the half it resolves.
    """
    bits = bits_32(key, shape)
    u = ((bits >> 1).astype(dtype) + 0.5) * jnp.asarray(2.0**-32, dtype)
    return jnp.where(bits & 1, -jnp.log1p(-u), -jnp.log(u))


def bernoulli_error(probability: float, trials: int) -> float:
    """Relative error of the density of `trials` draws of `bernoulli_32`.

    Each success is off by `2^-33 / p` of itself and each failure by `2^-33 / (1 - p)`; more than
    `np + 10 sqrt(np) + 20` successes have a probability below 1e-20.
    """
    if round(probability * 2**32) >= 2**32:
        return trials * (1 - probability)

    def part(p):
        mean = trials * p
        return min(trials, mean + 10 * mean**0.5 + 20) * 2.0**-33 / p

    return float(np.expm1(min(1.0, part(probability) + part(1 - probability))))


def bernoulli_32(key, probability: float, shape):
    """Bernoulli draws whose probability is exact to 2^-33; `probability` 1 is always true."""
    threshold = round(probability * 2**32)
    if threshold >= 2**32:
        return jnp.ones(shape, bool)
    return bits_32(key, shape) < jnp.uint32(threshold)
