"""Keys: from the operating system by default, one per fixed block of samples.

A block of `BLOCK_SIZE` samples has the key `fold_in(fold_in(run, stream), block index)`. What a block
draws is independent of the batch of blocks, the devices and the workers, and any block can be drawn again
alone.
"""

import enum
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from jaxacct.kernels.recurrence import log1p_coefficients, polynomial
from jaxacct.kernels.threefry import bits_32, bits_32_at_once, two_words

BLOCK_SIZE = 128


class Stream(enum.IntEnum):
    """Independent streams of a run, by purpose. Stored evidence is drawn again by these numbers.

    Attributes:
      ESTIMATE_PILOT: this number and those after it, one for each pilot of an estimate.
      CANDIDATE: this number and those around it, one for each noise multiplier that a calibration verifies.
      SEARCH: this number and those after it, one for each noise multiplier of a calibration's search.
    """

    REMOVE = 0
    ADD = 1
    REMOVE_PILOT = 2
    ADD_PILOT = 3
    ESTIMATE_PILOT = 100
    CANDIDATE = 1_000_000
    SEARCH = 2**30

    def at(self, place: int) -> "Stream":
        """Return this stream's counterpart for the direction of that `place` (0 or 1)."""
        return Stream(self + place)


def fresh_key():
    """Return a threefry key of 64 bits from the operating system's generator."""
    return key_from_words(np.frombuffer(os.urandom(8), np.uint32).tolist())


def checked_key(key):
    """Return a fresh key for None, else `key` if it is one JAX key; ValueError otherwise."""
    if key is None:
        return fresh_key()
    try:
        if jax.random.key_data(key).shape == (2,):
            return key
    except TypeError:
        pass
    raise ValueError("key must be one JAX key of threefry, such as jax.random.key(0), or None")


def key_from_words(words):
    """Return the threefry key of two 32-bit words, as stored in evidence to repeat draws."""
    # By NumPy: for a list JAX would compile a program that makes it an array.
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(words, np.uint32)), impl="threefry2x32")


def key_words(key) -> list[int]:
    """Return the two 32-bit words of a key."""
    return [int(word) for word in np.asarray(jax.random.key_data(key))]


def stream_key(key, stream: int):
    """Return the key of one independent stream of a run (a direction, a pilot, ...)."""
    return jax.random.fold_in(key, int(stream))


@functools.partial(jax.jit, static_argnums=2)  # one call: its parts took a twelfth of a batch of draws
def block_keys(key, first_block, num_blocks: int):
    """Return the (num_blocks,) keys of consecutive blocks of one stream from `first_block`, a uint32, on."""
    indices = jnp.arange(num_blocks, dtype=jnp.uint32) + first_block
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


_MINUS_LOG1P = -log1p_coefficients(11, -0.25, 0.5)  # relative error 2e-9
_THREE_QUARTERS = 0x3F400000  # the bits of the float32 0.75


@jax.jit
def minus_log_uniform(high, low):
    """Return `-ln u`, `u = (high + low) 2^-32`, float32 with a small *relative* error at both ends.

    Near u = 1 the logarithm is taken of 1 - (1 - u), and 1 - u is formed from the bits; elsewhere of `m 2^e`
    with m in [3/4, 3/2). `high` is uint32, `low` the bits below, float32 in (0, 1].
    """
    value = high.astype(jnp.float32) + low
    complement = (~high).astype(jnp.float32) + (1 - low)
    bits = lax.bitcast_convert_type(value, jnp.int32)
    exponent = (bits - _THREE_QUARTERS) >> 23
    mantissa = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
    near_one = high >= jnp.uint32(3 << 30)
    t = jnp.where(near_one, -complement * jnp.float32(2.0**-32), mantissa - 1)
    halvings = jnp.where(near_one, 0, 32 - exponent).astype(jnp.float32)
    return halvings * jnp.float32(np.log(2)) + t * polynomial(_MINUS_LOG1P, t)


# Radii whose 40-bit index is below 2^8 times this take their remaining bits from a word of their row.
_RARE_RADII = 16
RARE_RADII = 2**8 * _RARE_RADII
RARE_RADIUS_PROBABILITY = RARE_RADII * 2.0**-40
_NORMAL_ROUNDINGS = 15  # of a radius times a sine, relative to the radius


def normal_pairs(key, shape, dtype):
    """Return two independent arrays of `shape` of standard normals.

    In float32 by the method of Box and Muller: radius from 40 bits; two bits for the quadrant and 22 for the
    angle in it, whose sine and cosine are Taylor polynomials with an error of 3e-8 on [-pi/4, pi/4]. A radius
    beyond 6.2, whose index is among the lowest 4096 of 2^40, takes 64 bits more from a word of its row (the
    first axis): there is no maximum radius, and only two of them in one row depend on each other. Error of
    the
    distribution: proofs/rounding.md, section 5.
    """
    if jnp.dtype(dtype) != jnp.float32:
        return tuple(jax.random.normal(part, shape, dtype) for part in jax.random.split(key))
    key, row_key = jax.random.split(key)
    words = two_words(key, shape)
    # Compiled together with their use, they take XLA of JAX 0.12 20 s on a CPU, for no gain.
    radius_bits, angle_bits = lax.optimization_barrier(words) if jax.default_backend() == "cpu" else words
    row_words = bits_32(row_key, (2, shape[0], *[1] * (len(shape) - 1))).astype(jnp.float32)
    return _box_muller(radius_bits, angle_bits, row_words)


@jax.jit  # as `threefry._rounds`
def _box_muller(radius_bits, angle_bits, row_words):
    """Return standard normals from the words of `normal_pairs`."""
    row_low = (row_words[0] + (row_words[1] + 0.5) * jnp.float32(2.0**-32)) * jnp.float32(2.0**-32)
    rest = jnp.where(radius_bits < _RARE_RADII, row_low, jnp.float32(0.5))
    low = ((angle_bits >> 24).astype(jnp.float32) + rest) * jnp.float32(2.0**-8)
    radius = jnp.sqrt(2 * minus_log_uniform(radius_bits, low))
    place = ((angle_bits >> 2) & jnp.uint32(2**22 - 1)).astype(jnp.float32) + 0.5
    angle = (place * jnp.float32(2.0**-22) - 0.5) * jnp.float32(np.pi / 2)
    square = angle * angle
    sine = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362_880))))
    cosine = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40_320)))
    quarter, half = (angle_bits & 1) == 1, (angle_bits & 2) == 2
    x, y = jnp.where(quarter, sine, cosine), jnp.where(quarter, -cosine, sine)
    radius = jnp.where(half, -radius, radius)
    return radius * x, radius * y


def normals(key, shape, dtype):
    """Return (num_samples, size) standard normals, pairs side by side."""
    num_samples, size = shape
    pairs = normal_pairs(key, (num_samples, -(-size // 2)), dtype)
    return jnp.concatenate(pairs, axis=1)[:, :size]


@functools.lru_cache(maxsize=64)
def normals_error(pairs: int, rare: float) -> float:
    """Bound the norm of the error of one sample's `pairs` normal pairs in float32.

    The bound holds except for events of three times the probability `rare` (proofs/rounding.md, section 5).
    """
    norm = math.sqrt(2 * pairs) + math.sqrt(-2 * math.log(rare))
    square = (_NORMAL_ROUNDINGS * 2.0**-24 * norm) ** 2
    # The grid of 2^-40 of u. A radius R = sqrt(-2 ln u) with index j has an error of 1 / ((2 j + 1) R).
    index, steps = RARE_RADII, 2.0**40
    while index < steps / 4:
        below = min(1.0, 4 * index / steps)
        each = 1 / ((2 * index + 1) * math.sqrt(-2 * math.log(below)))
        square += _rarely_exceeded(pairs, below, rare) * each**2
        index *= 4
    # u above 1/4: half a step of u moves -ln u by at most 2^-39, and R by that over R, or by its square root.
    square += pairs * (2.0**-39 * 2**8) ** 2 + _rarely_exceeded(pairs, 2.0**-16, rare) * 2 * 2.0**-39
    return math.sqrt(square)


def _rarely_exceeded(trials: int, probability: float, rare: float) -> int:
    """Return a number of successes that is exceeded with probability at most `rare` / 16."""
    if trials * probability > 50:
        return trials  # the error of such levels is small
    count, log = 0, scipy.special.gammaln
    while log(trials + 1) - log(count + 2) - log(trials - count) + (count + 1) * math.log(
        probability
    ) > math.log(rare / 16):
        count += 1
        if count >= trials:
            return trials
    return count


def uniform_64(key, shape):
    """Draw float32 uniforms on (0, 1] with steps of 2^-64, as exact near zero as float32 allows.

    `jax.random.uniform` in float32 has steps of 2^-23, which would bias a probability of 1e-4 by up to a
    thousandth of itself.
    """
    high, low = (words.astype(jnp.float32) for words in bits_32_at_once(key, (2, *shape)))
    return (high + (low + 0.5) * jnp.float32(2.0**-32)) * jnp.float32(2.0**-32)


def multiply_high(a, b):
    """Return the high 32 bits of the product of uint32 arrays: floor(a b / 2^32)."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + (((middle & 0xFFFF) + a_low * b_high) >> 16)


MIN_PROBABILITY = 2.0**-48  # below it, draws of 64 bits have a relevant relative error: tables refuse it
