"""Waits of a process with hazards that depend on the step, exact to 2^-38 of a nat.

A cumulative hazard is the negative logarithm of the probability of waiting, in units of 2^-44 nats: 64 bits
in two words, arrays of uint32, the high one first. A wait ends at the first step whose cumulative hazard
exceeds that of its beginning by a unit exponential, which has the same unit.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.randomness import multiply_high

GRID = 44  # binary digits after the point of a hazard
CERTAIN = 64.0  # hazard of a certain event, in nats: a wait goes on with probability e^-64
ERROR = 2.0**-38  # bound on both ends of a wait together, nats (proofs/sampling_table.md, section 4)
_PLACES = 11  # binary digits by which the logarithm is tabulated


def words_of(values, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return uint32 words: multiples of 2^-digits of non-negative float64, at most 2^64 - 1 of them."""
    scaled = np.ldexp(np.asarray(values, np.float64), digits - 32)
    high = np.minimum(np.floor(scaled), 2.0**32 - 1)
    low = np.minimum(np.rint(np.ldexp(scaled - high, 32)), 2.0**32 - 1)
    return high.astype(np.uint32), low.astype(np.uint32)


def integers_of(chances) -> np.ndarray:
    """Return (n + 1, ..) int64: cumulative hazards before each step, of (n, ..) chances of an event."""
    with np.errstate(divide="ignore"):
        each = np.minimum(-np.log1p(-np.minimum(chances, 1.0)), CERTAIN)
    each = np.rint(np.ldexp(each, GRID)).astype(np.int64)
    return np.append(np.zeros_like(each[:1]), np.cumsum(each, axis=0), axis=0)


def words_of_integers(values) -> tuple[np.ndarray, np.ndarray]:
    """Return uint32 words of int64 values of at least 0."""
    return (values >> 32).astype(np.uint32), (values & (2**32 - 1)).astype(np.uint32)


def _words_of_floats(values) -> tuple[np.ndarray, np.ndarray]:
    return words_of_integers(np.rint(np.ldexp(values, GRID)).astype(np.int64))


_LEFT_ENDS = (2**_PLACES + np.arange(2**_PLACES)) / 2.0 ** (_PLACES + 1)
_LOGS = _words_of_floats(-np.log(_LEFT_ENDS))
_LOGS_OF_2 = _words_of_floats(np.arange(65) * np.log(2.0))
_INVERSES = np.minimum(np.rint((1 / _LEFT_ENDS - 1) * 2.0**32), 2.0**32 - 1).astype(np.uint32)


def look_up(table, place):
    """Return the words at int32 places, all inside, of a table of two flat arrays."""
    return tuple(jnp.asarray(words).at[place].get(mode="promise_in_bounds") for words in table)


def added(a, b):
    """Return the words of a sum."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


def subtracted(a, b):
    """Return the words of a - b, a at least b."""
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]


def below(a, b):
    """Return whether the words a are below the words b."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def exponential_words(words):
    """Return the words of -ln of the uniform number of 64 random bits, two arrays of words.

    With the number 2^-z x, 1/2 <= x < 1, and c the left end of one of 2048 intervals for x, it is
    `z ln 2 - ln c - ln(1 + d)`, d = x / c - 1 < 2^-11. All but the square of d and what follows it are
    integers.
    """
    high, low = words
    none = jnp.zeros_like(high)
    is_small = high == 0
    first, rest = jnp.where(is_small, low, high), jnp.where(is_small, none, low)
    shift = jnp.minimum(lax.clz(first), jnp.uint32(31))
    carried = jnp.where(shift > 0, rest >> (32 - jnp.maximum(shift, jnp.uint32(1))), none)
    first, rest = (first << shift) | carried, rest << shift
    place = ((first >> (31 - _PLACES)) & (2**_PLACES - 1)).astype(jnp.int32)
    offset = (first << (_PLACES + 1)) | (rest >> (31 - _PLACES))
    (inverse,) = look_up([_INVERSES], place)
    more = multiply_high(offset, inverse)
    d = (offset.astype(jnp.float32) + more.astype(jnp.float32)) * jnp.float32(2.0**-GRID)
    curve = (d * d * (0.5 - d * (1 / 3 - d / 4)) * jnp.float32(2.0**GRID)).astype(jnp.uint32)
    places = shift.astype(jnp.int32) + jnp.where(is_small, 32, 0)
    total = added(look_up(_LOGS_OF_2, places), look_up(_LOGS, place))
    # Rounding must not make it negative.
    total = added(total, (none, curve + jnp.uint32(8)))
    return subtracted(subtracted(total, (none, offset)), (none, more))


def first_reached(read, goal, low, high, most: int):
    """Return int32: the first place from `low` on at which `read` is at or above `goal`; `high` for none.

    `read` maps places to words that do not fall; `goal` are words, and `most` bounds high - low. The search
    is a loop: XLA would compute one that is unrolled again for each of its reads.
    """

    def turn(k, low):
        after = low + (1 << (most.bit_length() - 1 - k))
        return jnp.where((after <= high) & below(read(jnp.minimum(after, high) - 1), goal), after, low)

    return lax.fori_loop(0, most.bit_length(), turn, low)
