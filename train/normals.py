"""Standard normals that leave no holes: ChaCha words from a 256-bit key, Box-Muller in float64.

Noise that takes only some values tells sums apart (proofs/released_numbers.md), so a pair of normals is made
from 160 random bits: 96 for the radius, 64 for the angle. Within radius 10.2 neighbouring radii are less than
2^-20 apart; a pair lies beyond it with probability 2^-75. No value is beyond `LARGEST`.

The words are those of ChaCha (RFC 8439) with 12 rounds, so a normal depends on the key, the step and its
number only, and the key is out of reach of any search.
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 12
LARGEST = math.sqrt(2 * 97 * math.log(2))  # radius of the smallest uniform, half of 2^-96: 11.6
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_PAIRS, _WORDS = 3, 5  # pairs a block of 16 words, words a pair; one word is left over
# Bound the memory for words, which CPUs are fast on where caches hold it; a normal's place depends on them.
_BLOCKS_AT_ONCE = {"cpu": 2**11, "others": 2**16}
ARRANGEMENT = 2  # another number wherever normals of the same key go to other places than before


def fresh_key() -> np.ndarray:
    """(8,) uint32 from the operating system's generator: 256 secret bits."""
    return np.frombuffer(os.urandom(32), np.uint32)


@functools.partial(jax.jit, static_argnames="size")
def standard_normals(key, step, size: int) -> jax.Array:
    """(size,) float64: independent standard normals for one step; jittable, whatever `jax_enable_x64` says.

    Args:
      key: (8,) uint32.
      step: () integer.
      size: static.
    """
    blocks = max(1, -(-size // (2 * _PAIRS)))
    at_once = min(blocks, _BLOCKS_AT_ONCE["cpu" if jax.default_backend() == "cpu" else "others"])

    def some(first):
        return _box_muller(chacha(key, (first + jnp.arange(at_once, dtype=jnp.uint32), step, 0, 0)))

    starts = jnp.arange(0, blocks, at_once, dtype=jnp.uint32)
    pairs = some(starts[0])[None] if len(starts) == 1 else jax.lax.map(some, starts)
    with jax.enable_x64(True):
        drawn = jnp.concatenate([pairs.real.reshape(-1), pairs.imag.reshape(-1)])
    return jax.lax.slice_in_dim(drawn, 0, size)


def chacha(key, counter, rounds: int = ROUNDS) -> jax.Array:
    """(16, blocks) uint32: the ChaCha block function of a (8,) key and four words, (blocks,) or () each.

    Source: RFC 8439, section 2.3; there the counter is the first of the four words.
    """
    counter = jnp.broadcast_arrays(*[jnp.atleast_1d(word).astype(jnp.uint32) for word in counter])
    one = jnp.ones_like(counter[0])
    key = jnp.asarray(key, jnp.uint32)[:, None] * one
    start = (jnp.asarray(_CONSTANTS)[:, None] * one, key[:4], key[4:], jnp.stack(counter))

    def double_round(_, rows):
        a, b, c, d = _quarter_rounds(*rows)
        # The same on diagonals: rows turned so that they stand in columns, and back.
        b, c, d = (jnp.roll(row, -turn, axis=0) for turn, row in ((1, b), (2, c), (3, d)))
        a, b, c, d = _quarter_rounds(a, *_apart(b, c, d))
        return _apart(a, *(jnp.roll(row, turn, axis=0) for turn, row in ((1, b), (2, c), (3, d))))

    done = jax.lax.fori_loop(0, rounds // 2, double_round, _apart(*start))
    return jnp.concatenate([row + first for row, first in zip(done, start, strict=True)])


def _quarter_rounds(a, b, c, d):
    """Four quarter rounds side by side: (4, blocks) rows.

    `a + b` and `c + d` of the first half are computed twice and never written: six passes over memory for
    eight, which takes half the time on CPUs.
    """
    (d1,) = _apart(_rotate(d ^ (a + b), 16))
    (b1,) = _apart(_rotate(b ^ (c + d1), 12))
    (a2,) = _apart(a + (b + b1))
    (d2,) = _apart(_rotate(d1 ^ a2, 8))
    (c2,) = _apart(c + (d1 + d2))
    (b2,) = _apart(_rotate(b1 ^ c2, 7))
    return a2, b2, c2, d2


def _apart(*arrays):
    """Kept from fusing: XLA would compute shared parts again for every use, ten times slower."""
    return jax.lax.optimization_barrier(arrays)


def _rotate(words, by: int):
    return (words << by) | (words >> (32 - by))


def _box_muller(words) -> jax.Array:
    """(3, blocks) pairs of float64 normals, as complex numbers, of (16, blocks) words.

    Of two arrays of real numbers XLA would compute radius, sine and cosine once for each.
    """
    with jax.enable_x64(True):
        exact = words[: _PAIRS * _WORDS].reshape(_PAIRS, _WORDS, -1).astype(jnp.float64)
        a, b, c, d, e = (exact[:, i] for i in range(_WORDS))
        uniform = a * 2.0**-32 + b * 2.0**-64 + (c + 0.5) * 2.0**-96
        radius = jnp.sqrt(jnp.maximum(0.0, -2 * _log(uniform)))
        sine, cosine = _sine_cosine(d * 2.0**-32 + e * 2.0**-64)
        return jax.lax.complex(radius * cosine, radius * sine)


def _log(x):
    """Natural log of float64 in (0, 1], to 1e-15 (1 + |log x|); XLA's own is scalar on CPUs.

    x = m 2^k with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)), by its series.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int64)
    exponent = (bits - int(np.float64(np.sqrt(0.5)).view(np.int64))) >> 52
    mantissa = jax.lax.bitcast_convert_type(bits - (exponent << 52), jnp.float64)
    s = (mantissa - 1) / (mantissa + 1)
    series = _horner(s * s, [1 / n for n in range(1, 25, 2)])
    return 2 * s * series + exponent.astype(jnp.float64) * math.log(2)


def _sine_cosine(turns):
    """Of float64 turns in [0, 1], to 1e-15: Taylor series within an eighth of a turn, then quadrants."""
    quadrant = jnp.floor(4 * turns + 0.5)
    t = (4 * turns - quadrant) * (math.pi / 2)
    sine = t * _horner(t * t, [(-1) ** i / math.factorial(2 * i + 1) for i in range(9)])
    cosine = _horner(t * t, [(-1) ** i / math.factorial(2 * i) for i in range(9)])
    quadrant = quadrant.astype(jnp.int32)
    swap = (quadrant & 1) == 1
    sine, cosine = jnp.where(swap, cosine, sine), jnp.where(swap, sine, cosine)
    sine = jnp.where((quadrant & 2) != 0, -sine, sine)
    return sine, jnp.where(((quadrant + 1) & 2) != 0, -cosine, cosine)


def _horner(x, coefficients):
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
