"""Binomials whose number of trials varies within a window, drawn on the device without rounding.

`jax.random.binomial` in float32 does not draw Binomial(m, p) for m = 1.4e7: its acceptance test evaluates
`(m + 1) ln((m - mode + 1) / (m - k + 1))`, with an error of about 1 there. Here m is the first number of a
window and digits, `Binomial(m, p) = Binomial(first + digit * unit, p) + sum of Binomial(digit * unit, p)`.
Each part is looked up in an alias table of 62-bit integers made in float64: the draw itself has no rounding
error.

A look-up takes more time than all computation, so a window is as narrow as possible, its tables fit a cache,
and all tables of one digit have equally many cells.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np

_TOTAL_BITS = 62
_LOW_BITS = 30
_TAIL_EXPONENT = 66 * math.log(2)  # tails below 2^-66 are not tabulated
# Maximum cells: of one probability, so that they fit a core's cache; of all; beyond which tables are refused.
_CACHED_CELLS = 2**16
_MAX_CELLS = 2**21
_TOO_MANY_CELLS = 2**24
_MAX_DIGIT_BITS = 12


class Level(NamedTuple):
    """Alias tables of one digit, of every probability and every value of the digit.

    Attributes:
      cells: (probabilities, digits, cells) uint32: the threshold's high 32 - k bits, and the alias in the
        other k = log2(cells).
      low: of the same shape, uint32: the 30 bits of the threshold below these.
      lowest: (probabilities, digits or 1) int32: the value of the first cell.
    """

    cells: Any
    low: Any
    lowest: Any


class Arrays(NamedTuple):
    """Tables that `binomial_of_words` looks up: the first number of trials of each window, and digits."""

    first: Any
    levels: tuple[Level, ...]


class Tables(NamedTuple):
    """Alias tables and their error in one draw: ln of a density ratio, total variation."""

    arrays: Arrays
    relative: float
    variation: float


def binomial_of_words(words, trials, arrays: Arrays, at=0):
    """Return Binomial(trials, p) draws, int32: the sum of one table look-up per digit of `trials`.

    `words` are uniform uint32, two lists of (num_samples,) of every level, the high ones first. `arrays` are
    of `binomial_tables`, `at` the index of the probability there; `trials` outside its window are replaced by
    the nearest end.
    """
    words, low_words = words
    chex.assert_type([trials, *words], [jnp.int32, *[jnp.uint32] * len(words)])
    chex.assert_equal_shape([trials, *words])
    shapes = [level.cells.shape[1:] for level in arrays.levels]
    places = [digits.bit_length() - 1 for digits, _ in shapes]
    window = 1 << sum(places)
    rest = jnp.clip(trials - jnp.asarray(arrays.first)[at], 0, window - 1).astype(jnp.uint32)
    total = jnp.zeros(trials.shape, jnp.int32)
    for number, (level, (digits, cells), word, low_word) in enumerate(
        zip(arrays.levels, shapes, words, low_words, strict=True)
    ):
        digit = rest >> sum(places[number + 1 :])
        rest = rest - (digit << sum(places[number + 1 :]))
        log_cells = cells.bit_length() - 1
        own = word >> (32 - log_cells)
        cell = (jnp.asarray(at, jnp.uint32) * digits + digit) * cells + own
        packed = _at(level.cells, cell)
        high, limit = word & jnp.uint32((1 << (32 - log_cells)) - 1), packed >> log_cells
        keep = (high < limit) | ((high == limit) & (low_word >> (32 - _LOW_BITS) < _at(level.low, cell)))
        value = jnp.where(keep, own, packed & jnp.uint32(cells - 1)).astype(jnp.int32)
        per_digit = level.lowest.shape[1] > 1
        lowest = _at(level.lowest, at * digits + digit.astype(jnp.int32)) if per_digit else None
        total = total + value + (jnp.asarray(level.lowest)[at, 0] if lowest is None else lowest)
    return total


def _at(table, index):
    """Return elements of an array of any shape by flat index, without a bounds check."""
    return jnp.asarray(table).reshape(-1).at[index].get(mode="promise_in_bounds")


@functools.lru_cache(maxsize=8)
def binomial_tables(windows: tuple[tuple[int, int], ...], probabilities: tuple[float, ...]) -> Tables:
    """Return tables of Binomial(m, p), p in (0, 1), for every m in a window (first, last) of every p."""
    first = np.array([low for low, _ in windows])
    p = np.array(probabilities)
    size = max(high - low for low, high in windows) + 1
    digits = _digit_bits(int(first.max()), size, probabilities)
    levels, relative, variation = [], 0.0, 0.0
    for number, bits in enumerate(digits):
        unit = 1 << sum(digits[number + 1 :])
        counts = np.arange(1 << bits) * unit + (first[:, None] if number == 0 else 0 * first[:, None])
        level, widest, farthest = _level(counts, p)
        levels.append(level)
        # A probability is a product of at most that many ratios from the mode, each of three roundings and
        # an odds p / (1-p) of two, then normalised by a sum of the same.
        relative += 2 * 6 * 2.0**-53 * min(widest, farthest + 2)
        # Every value is rounded by at most half a unit, and the mode by the sum of these; a unit for tails.
        variation += (widest / 2 + 1) * 2.0**-_TOTAL_BITS
    return Tables(Arrays(first.astype(np.int32), tuple(levels)), relative, variation)


def _digit_bits(first: int, size: int, probabilities: tuple[float, ...]) -> tuple[int, ...]:
    """Return the bits of every digit, highest first: few digits whose tables fit a cache."""
    p, width = max(probabilities, key=lambda p: p * (1 - p)), functools.lru_cache(_max_width)
    all_bits = (size - 1).bit_length()

    def cells(digits) -> int:
        most = first + size, *(1 << sum(digits[i:]) for i in range(1, len(digits)))
        return sum(
            1 << bits << (width(count, p) - 1).bit_length() for bits, count in zip(digits, most, strict=True)
        )

    found = []
    for number in (1, 2, 3, 4):
        lower = itertools.product(range(1, _MAX_DIGIT_BITS + 1), repeat=number - 1)
        options = [(all_bits - sum(some), *some) for some in lower if sum(some) <= all_bits]
        found += options
        best = min(options, key=cells, default=None)
        if best and cells(best) <= _CACHED_CELLS and cells(best) * len(probabilities) <= _MAX_CELLS:
            return best
    # Windows of millions: few digits if they fit at all.
    fewest = min(found, key=cells)
    for bits in (8, 4, 2, 1):
        fewest = min(*found, (0, *[bits] * -(-all_bits // bits)), key=cells)
        if cells(fewest) * len(probabilities) <= _MAX_CELLS:
            return fewest
    if cells(fewest) * len(probabilities) > _TOO_MANY_CELLS:
        number = f"{cells(fewest):,} cells"
        raise ValueError(f"batches of {first:,} examples must need smaller tables, got {number} cells")
    return fewest


def _level(counts: np.ndarray, p: np.ndarray) -> tuple[Level, int, int]:
    """Return the tables of Binomial(counts, p), the largest width and the largest distance from the mode."""
    lowest, weights = integer_weights(counts.reshape(-1), np.repeat(p, counts.shape[1]))
    used = weights > 0
    start = np.argmax(used, axis=1)
    width = used.shape[1] - np.argmax(used[:, ::-1], axis=1) - start  # up to the last nonzero entry
    low, high = ((lowest + start + some).reshape(counts.shape) for some in (0, width))
    log_cells = max(1, int(width.max() - 1).bit_length())
    # One lowest value of all digits saves a look-up.
    together = int((high.max(axis=1) - low.min(axis=1)).max() - 1).bit_length()
    if together <= log_cells + 1:
        log_cells, low = max(log_cells, together), low.min(axis=1, keepdims=True)
    places = np.broadcast_to(low, counts.shape).reshape(-1, 1) + np.arange(1 << log_cells) - lowest[:, None]
    inside = (places >= 0) & (places < weights.shape[1])
    distribution = np.where(
        inside, np.take_along_axis(weights, places.clip(0, weights.shape[1] - 1), axis=1), 0
    )
    limits, alias = alias_tables(distribution)
    # A full cell: with itself as alias, a threshold that fits the bits draws the same.
    capacity = 2**_TOTAL_BITS >> log_cells
    alias = np.where(limits == capacity, np.arange(1 << log_cells), alias)
    limits = np.minimum(limits, capacity - 1)
    cells = ((limits >> _LOW_BITS << log_cells) + alias).astype(np.uint32)
    rest = (limits & (2**_LOW_BITS - 1)).astype(np.uint32)
    shape = *counts.shape, 1 << log_cells
    peak = weights.argmax(axis=1) - start
    farthest = int(np.maximum(peak, width - 1 - peak).max())
    return Level(cells.reshape(shape), rest.reshape(shape), low.astype(np.int32)), int(width.max()), farthest


def _max_width(count: int, p: float) -> int:
    """Return how many values of Binomial(count, p) have a Bernstein bound above 2^-66."""
    spread = float(_spread(np.array(count), np.array(p)))
    low, high = max(0, math.floor(count * p - spread)), min(count, math.ceil(count * p + spread))
    return high - low + 1


def _spread(counts, p):
    return _TAIL_EXPONENT / 3 + np.sqrt(_TAIL_EXPONENT**2 / 9 + 2 * counts * p * (1 - p) * _TAIL_EXPONENT)


def integer_weights(counts: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Binomial(counts, p) times 2^62 in integers: (rows,) first value, (rows, values) weights."""
    total = 2**_TOTAL_BITS
    mode = np.minimum(counts, np.floor((counts + 1) * p).astype(np.int64))
    # Beyond the mode either way, which is within 1 of the mean.
    reach = np.ceil(_spread(counts, p)).astype(np.int64) + 1
    above, below = (int(np.minimum(reach, most).max()) for most in (counts - mode, mode))
    up, down = mode[:, None] + np.arange(above), mode[:, None] - np.arange(below)
    odds = (p / (1 - p))[:, None]
    rising = np.cumprod((counts[:, None] - up).clip(0) / (up + 1) * odds, axis=1)
    left = down.clip(0)
    falling = np.cumprod(left / (counts[:, None] + 1 - left) / odds, axis=1)
    distribution = np.concatenate([falling[:, ::-1], np.ones((len(counts), 1)), rising], axis=1)
    weights = np.rint(distribution / distribution.sum(axis=1, keepdims=True) * total).astype(np.int64)
    weights[:, below] += total - weights.sum(axis=1)
    return mode - below, weights


def alias_tables(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Walker's tables of the rows: of 2^62 / cells, cell j gives j below `limits[j]`, else `alias[j]`.

    Heavy cells fill the light ones in order; an exhausted one is filled by the next heavy one. `weights` are
    int64 with rows of the sum 2^62 and a power of two of cells: a table has exactly their distribution.
    """
    cells = weights.shape[1]
    capacity, max_integer = 2**_TOTAL_BITS // cells, np.iinfo(np.int64).max
    # A cell of exactly its capacity gives and takes nothing.
    light, heavy = weights < capacity, weights > capacity
    missing = np.cumsum(np.where(light, capacity - weights, 0), axis=1)
    excess = np.cumsum(np.where(heavy, weights - capacity, 0), axis=1)
    before = missing - np.where(light, capacity - weights, 0)
    # In one order: a heavy cell where it is exhausted, a light one where filling begins.
    ends = np.concatenate(
        [np.where(heavy, excess, max_integer), np.where(light, before, max_integer)], axis=1
    )
    order = np.argsort(ends, axis=1, kind="stable")
    filled, emptied = (np.cumsum(kind, axis=1) for kind in (order >= cells, order < cells))
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(2 * cells), order.shape), axis=1)
    # The n-th light cell is filled by the first heavy one that is not exhausted.
    used_up = np.take_along_axis(emptied, place[:, cells:], axis=1)
    begun = np.take_along_axis(filled, place[:, :cells], axis=1)
    heavy_cells = np.argsort(~heavy, axis=1, kind="stable")
    light_cells = np.argsort(~light, axis=1, kind="stable")
    limits, alias = np.full(weights.shape, capacity), np.broadcast_to(np.arange(cells), weights.shape).copy()
    limits[light] = weights[light]
    alias[light] = np.take_along_axis(heavy_cells, used_up.clip(0, cells - 1), axis=1)[light]
    # The light cell at which a heavy one is exhausted; the last heavy one comes out even.
    ran_out = np.take_along_axis(light_cells, (begun - 1).clip(0), axis=1)
    overdrawn = np.take_along_axis(missing, ran_out, axis=1) - excess
    rank = np.cumsum(heavy, axis=1)
    passed_on = heavy & (rank < rank[:, -1:])
    limits[passed_on] = (capacity - overdrawn)[passed_on]
    alias[passed_on] = np.take_along_axis(heavy_cells, rank.clip(0, cells - 1), axis=1)[passed_on]
    return limits, alias
