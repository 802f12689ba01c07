"""Binomials of varying size, drawn on the device without rounding.

`jax.random.binomial` in float32 does not draw Binomial(m, p) for m = 1.4e7: its acceptance test evaluates
`(m + 1) ln((m - mode + 1) / (m - k + 1))`, off by about 1 there. Here m is written in digits,
`Binomial(m, p) = sum of Binomial(digit * unit, p)`, and each part is looked up in an alias table of 62-bit
integers made in float64: no step of the draw itself rounds.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry

_MOST_CELLS = 2**20
_TOTAL_BITS = 62
_LOW_BITS = 30
_TAIL_EXPONENT = 66 * math.log(2)  # tails below 2^-66 are not tabulated


class Tables(NamedTuple):
    """Alias tables and what they are off by in one draw: ln of a density ratio, total variation."""

    arrays: Any
    relative: float
    variation: float


def draw_binomial(key, trials, one_set, cells):
    """Binomial(trials, p) draws with a key: `binomial_of_words`."""
    levels, num_samples = one_set[0].shape[0], trials.shape[0]
    return binomial_of_words(threefry.bits_32(key, (2, levels, num_samples)), trials, one_set, cells)


def binomial_of_words(words, trials, one_set, cells):
    """Binomial(trials, p) draws: the sum of one table look-up per digit of `trials`.

    Args:
      words: (2, levels, num_samples) uniform uint32.
      trials: (num_samples,) int32.
      one_set: three (levels, 2^digit_bits) int32 arrays: first cell, ln2 of the cells, lowest value.
      cells: the threshold's high and low words (uint32) and the alias (int32) of every cell.

    Returns (num_samples,) int32.
    """
    levels, radix = one_set[0].shape
    digit_bits = radix.bit_length() - 1
    level = jnp.arange(levels, dtype=jnp.int32)[:, None]
    digit = (trials >> (level * digit_bits)) & (radix - 1)
    first, log_cells, lowest = (jnp.asarray(part)[level, digit] for part in one_set)
    shift = (32 - log_cells).astype(jnp.uint32)
    own = (words[0] >> shift).astype(jnp.int32)
    high, low = words[0] & ((jnp.uint32(1) << shift) - 1), words[1] >> (32 - _LOW_BITS)
    cell = first + own
    limit_high, limit_low, alias = (jnp.asarray(part)[cell] for part in cells)
    keep = (high < limit_high) | ((high == limit_high) & (low < limit_low))
    return (lowest + jnp.where(keep, own, alias)).sum(axis=0, dtype=jnp.int32)


@functools.lru_cache(maxsize=8)
def binomial_tables(most: int, probabilities: tuple[float, ...]) -> Tables:
    """Tables of Binomial(digit * unit, p), for every digit of a number up to `most` and every p."""
    bits = max(1, most.bit_length())
    for digit_bits in (8, 4, 2, 1):
        levels = -(-bits // digit_bits)
        counts = [
            digit << (level * digit_bits) for level in range(levels) for digit in range(1 << digit_bits)
        ]
        # Digits that no number up to `most` has are never looked up.
        counts = [count if count <= most else 0 for count in counts]
        widths = sum(_most_width(count, p) for count in counts for p in probabilities[:1])
        if digit_bits == 1 or widths * len(probabilities) <= _MOST_CELLS:
            break
    offset, sets, cells = 0, [], []
    relative = variation = 0.0
    for p in probabilities:
        lowest_values, sizes = [], []
        for count in counts:
            lowest, weights = _integer_weights(count, p)
            limits, alias = _alias_table(weights)
            cells.append((limits, alias))
            lowest_values.append(lowest)
            sizes.append(len(limits))
        first = offset + np.concatenate([[0], np.cumsum(sizes)[:-1]])
        offset += sum(sizes)
        shape = (levels, 1 << digit_bits)
        parts = first, np.log2(sizes), np.array(lowest_values)
        sets.append([np.rint(part).astype(np.int32).reshape(shape) for part in parts])
        widest = np.reshape(sizes, shape).max(axis=1).sum()
        # A probability is a product of at most that many ratios from the mode, each of three roundings and
        # an odds p / (1-p) of two, then normalised by a sum of the same.
        relative = max(relative, 2 * 6 * 2.0**-53 * float(widest))
        variation = max(variation, float(widest + 1) * 2.0**-_TOTAL_BITS)
    # Of a rounded size, so that programs serve other probabilities; what is added is never looked up.
    spare = (1 << (offset - 1).bit_length()) - offset
    limits, alias = (np.pad(np.concatenate(part), (0, spare)) for part in zip(*cells, strict=True))
    words = (limits >> _LOW_BITS).astype(np.uint32), (limits & (2**_LOW_BITS - 1)).astype(np.uint32)
    stacked = tuple(np.stack(part) for part in zip(*sets, strict=True))
    return Tables((stacked, (*words, alias.astype(np.int32))), relative, variation)


def _most_width(count: int, p: float) -> int:
    """How many values of Binomial(count, p) the Bernstein bound leaves above a probability 2^-66."""
    spread = _TAIL_EXPONENT / 3 + math.sqrt(_TAIL_EXPONENT**2 / 9 + 2 * count * p * (1 - p) * _TAIL_EXPONENT)
    low, high = max(0, math.floor(count * p - spread)), min(count, math.ceil(count * p + spread))
    return high - low + 1


def _integer_weights(count: int, p: float) -> tuple[int, np.ndarray]:
    """The lowest value and the probabilities of Binomial(count, p) times 2^62, integers of that sum."""
    total = 2**_TOTAL_BITS
    if count == 0 or p == 1:
        return count, np.array([total])
    spread = _most_width(count, p)
    mode = min(count, math.floor((count + 1) * p))
    up = np.arange(mode, min(count, mode + spread), dtype=np.float64)
    down = np.arange(mode, max(0, mode - spread), -1, dtype=np.float64)
    odds = p / (1 - p)
    rising = np.cumprod((count - up) / (up + 1) * odds)
    falling = np.cumprod(down / (count + 1 - down) / odds)
    law = np.concatenate([falling[::-1], [1.0], rising])
    weights = np.rint(law / math.fsum(law) * total).astype(np.int64)
    weights[len(falling)] += total - int(weights.sum())
    used = np.flatnonzero(weights)
    return mode - len(falling) + int(used[0]), weights[used[0] : used[-1] + 1]


def _alias_table(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table: cell j gives j below `limits[j]` and `alias[j]` above, of 2^62 / cells.

    Heavy cells fill the light ones in order; one that has given too much is filled by the next heavy one.
    Integer arithmetic throughout, so the table has exactly the weights' law.
    """
    cells = 1 << max(1, (len(weights) - 1).bit_length())
    capacity = 2**_TOTAL_BITS // cells
    weights = np.pad(weights, (0, cells - len(weights)))
    limits, alias = np.full(cells, capacity), np.arange(cells)
    # A cell of exactly its capacity gives and takes nothing.
    light, heavy = np.flatnonzero(weights < capacity), np.flatnonzero(weights > capacity)
    if light.size == 0:
        return limits, alias
    missing, excess = np.cumsum(capacity - weights[light]), np.cumsum(weights[heavy] - capacity)
    limits[light] = weights[light]
    before = np.concatenate([[0], missing[:-1]])
    alias[light] = heavy[np.searchsorted(excess, before, side="right")]
    # The light cell at which a heavy one ran out; the last heavy one comes out even.
    overdrawn = missing[np.searchsorted(missing, excess[:-1], side="left")] - excess[:-1]
    limits[heavy[:-1]] = capacity - overdrawn
    alias[heavy[:-1]] = heavy[1:]
    return limits, alias
