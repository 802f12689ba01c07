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
_MOST_PLACES = 2**27  # cells that the words of `Arrays.places` can tell apart
_TAIL_EXPONENT = 66 * math.log(2)  # tails below 2^-66 are not tabulated


class Tables(NamedTuple):
    """Alias tables and what they are off by in one draw: ln of a density ratio, total variation."""

    arrays: "Arrays"
    relative: float
    variation: float


class Arrays(NamedTuple):
    """What `draw_binomial` looks up.

    A look-up is what a draw takes most of its time for, so what is needed together is in one word.

    Attributes:
      places: (probabilities, levels, 2^digit_bits) uint32: 32 times the first cell of every digit's table,
        plus log2 of how many cells it has, k.
      lowest: (probabilities, some levels, 2^digit_bits) int32: the lowest value of every digit's table, of
        the last levels; 0 in those before.
      cells: (cells,) uint32: the threshold's high 32 - k bits, and the alias in the other k.
      low: (cells,) uint32: the 30 bits of the threshold below these.
    """

    places: Any
    lowest: Any
    cells: Any
    low: Any

    def of(self, probability: int) -> "Arrays":
        """Those of one probability: `places` and `lowest` without their first axis."""
        return self._replace(places=self.places[probability], lowest=self.lowest[probability])


def draw_binomial(key, trials, arrays: Arrays):
    """Binomial(trials, p) draws with a key: `binomial_of_words`."""
    words = threefry.bits_32(key, (2, arrays.places.shape[0], trials.shape[0]))
    return binomial_of_words(words, trials, arrays)


def binomial_of_words(words, trials, arrays: Arrays):
    """Binomial(trials, p) draws: the sum of one table look-up per digit of `trials`.

    Args:
      words: (2, levels, num_samples) uniform uint32.
      trials: (num_samples,) int32.
      arrays: of one probability.

    Returns (num_samples,) int32.
    """
    levels, radix = arrays.places.shape
    digit_bits = radix.bit_length() - 1
    level = jnp.arange(levels, dtype=jnp.uint32)[:, None]
    digit = (trials.astype(jnp.uint32) >> (level * digit_bits)) & (radix - 1)
    place = _at(arrays.places, level * radix + digit)
    log_cells = place & 31
    shift = 32 - log_cells
    own = words[0] >> shift
    cell = (place >> 5) + own
    packed = _at(arrays.cells, cell)
    high, limit = words[0] & ((jnp.uint32(1) << shift) - 1), packed >> log_cells
    below = words[1] >> (32 - _LOW_BITS) < _at(arrays.low, cell)
    keep = (high < limit) | ((high == limit) & below)
    alias = packed & ((jnp.uint32(1) << log_cells) - 1)
    total = jnp.where(keep, own, alias).sum(axis=0, dtype=jnp.uint32).astype(jnp.int32)
    if high_levels := arrays.lowest.shape[0]:
        index = (level * radix + digit)[levels - high_levels :] - (levels - high_levels) * radix
        total = total + _at(arrays.lowest, index).sum(axis=0, dtype=jnp.int32)
    return total


def _at(table, index):
    """Elements of an array of any shape by their place in it; a look-up that checks nothing."""
    return jnp.asarray(table).reshape(-1).at[index].get(mode="promise_in_bounds")


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
        first = offset + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        offset += sum(sizes)
        shape = (levels, 1 << digit_bits)
        logs = np.rint(np.log2(sizes)).astype(np.int64)
        sets.append(((first << 5 | logs).reshape(shape), np.reshape(lowest_values, shape)))
        widest = np.reshape(sizes, shape).max(axis=1).sum()
        # A probability is a product of at most that many ratios from the mode, each of three roundings and
        # an odds p / (1-p) of two, then normalised by a sum of the same.
        relative = max(relative, 2 * 6 * 2.0**-53 * float(widest))
        variation = max(variation, float(widest + 1) * 2.0**-_TOTAL_BITS)
    if offset > _MOST_PLACES:
        raise ValueError(f"batches of {most:,} examples must need smaller tables, was {offset:,} cells")
    places, lowest = (np.stack(part) for part in zip(*sets, strict=True))
    # Levels of small digits have no value that is out of reach.
    without = int(np.argmax(np.append(lowest.any(axis=(0, 2)), True)))
    packed, low = (np.concatenate(part) for part in zip(*map(_packed, cells), strict=True))
    # Of a rounded size, so that programs serve other probabilities; what is added is never looked up.
    spare = (1 << (offset - 1).bit_length()) - offset
    packed, low = (np.pad(part, (0, spare)) for part in (packed, low))
    arrays = Arrays(places.astype(np.uint32), lowest[:, without:].astype(np.int32), packed, low)
    return Tables(arrays, relative, variation)


def _packed(table: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(`cells`, `low`) of one alias table, uint32."""
    limits, alias = table
    cells = len(limits)
    capacity = 2**_TOTAL_BITS // cells
    # A cell that is all its own: with itself as alias, a threshold that fits the bits draws the same.
    alias = np.where(limits == capacity, np.arange(cells), alias)
    limits = np.minimum(limits, capacity - 1)
    packed = (limits >> _LOW_BITS) * cells + alias
    return packed.astype(np.uint32), (limits & (2**_LOW_BITS - 1)).astype(np.uint32)


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
