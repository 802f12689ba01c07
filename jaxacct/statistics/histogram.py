"""Histograms of draws: kept sparse in files, added up block by block in the one loop that all drawing goes
through."""

from collections.abc import Callable
from typing import Any

import numpy as np


def draw_histograms(
    count: Callable[[int, int], Any],
    settled: Callable[[int, Any], Any],
    next_stop: Callable[[int], int],
    *,
    add: Callable[[Any, Any], Any],
    done: int = 0,
    counts: Any = None,
    keep: Callable[[int, Any], None] = lambda done, counts: None,
):
    """Draw blocks one stretch after the other until what was counted settles something; returns that.

    What settles is asked before anything is drawn, so that a resumed run ends where the whole one did.

    Args:
      count: (first, last) -> what the blocks first..last-1 hold; a function of the blocks alone.
      settled: (blocks done, counts) -> the answer, or None to go on.
      next_stop: blocks done -> where the next stretch ends; of the blocks alone, so that a resumed run stops
        at the same places.
      add: (counts, what a stretch holds) -> counts; counts are None before the first.
      done, counts: what `keep` was last called with, to go on from there.
      keep: called with (blocks done, counts) after each stretch.
    """
    while (answer := settled(done, counts)) is None:
        stop = next_stop(done)
        if not stop > done:
            raise ValueError(f"a stretch of blocks must not be empty, was {done}..{stop}")
        counts, done = add(counts, count(done, stop)), stop
        keep(done, counts)
    return answer


def add_counts(counts, more):
    """The sums of histograms, one by one."""
    return tuple(more) if counts is None else tuple(map(np.add, counts, more))


def dense_counts(sparse, size: int) -> np.ndarray:
    """(size,) int64 counts from (index, count) pairs."""
    counts = np.zeros(size, np.int64)
    for index, count in sparse:
        counts[index] = count
    return counts


def sparse_counts(counts: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(index, count) pairs of the non-zero counts."""
    return tuple((int(i), int(counts[i])) for i in np.flatnonzero(counts))


def checked_counts(sparse, size: int, name: str) -> np.ndarray:
    """(size,) int64 counts from stored (index, count) pairs of strictly ascending indices and counts above 0.

    Raises:
      ValueError: for anything else: a repeated index would hide all but its last count.
    """
    counts, before = np.zeros(size, np.int64), -1
    for pair in sparse:
        index, count = pair
        if type(index) is not int or type(count) is not int:
            raise ValueError(f"{name} must hold pairs of integers, held {pair!r}")
        if not before < index < size:
            raise ValueError(f"{name} must have strictly ascending indices below {size}, had {index}")
        if not 0 < count < 2**62:
            raise ValueError(f"{name} must have counts above 0, had {count} at {index}")
        counts[index], before = count, index
    return counts
