"""Several parallel b-min-sep processes: states and transitions.

Between events at least one of m processes is free to participate, so a state is how long each of the other
m - 1 stays locked out, in ascending order. A process locked out for s more steps participated b - s steps
ago.

A locked-out process has the *code* s in 1..b-1; one with a virtual history (warm start: it is locked out but
has no part in the outputs) has b - 1 + s; a free one 0. States are numbered in colexicographic order, so
those without virtual history come first and have the same numbers in both tables.
"""

import functools
import math
from typing import NamedTuple

import numpy as np


def rank(codes):
    """Return the number of the state with `codes` ascending along the last axis."""
    total = 0
    for place in range(codes.shape[-1]):
        term = codes[..., place]
        for step in range(1, place + 1):
            term = term * (codes[..., place] + step) // (step + 1)
        total = total + term
    return total


def states(num_codes: int, others: int) -> np.ndarray:
    """Return (number of states, others) int32: every ascending tuple of codes, in the order of `rank`."""
    if others == 0:
        return np.zeros((1, 0), np.int32)
    shorter = states(num_codes, others - 1)
    parts = []
    for last in range(num_codes):
        below = shorter[: math.comb(last + others - 1, others - 1)]
        parts.append(np.column_stack([below, np.full(len(below), last, np.int32)]))
    return np.concatenate(parts)


class Move(NamedTuple):
    """Transition in which j of the free processes participate.

    Attributes:
      which: (states,) numbers of the states with at least j free processes.
      free: (states,) how many are free.
      ago: (states, m - 1) int: how many steps ago each of the others participated, 1..b-1; 0 where it is free
        or its history is virtual.
      delta: (states,) steps until the next state, in which again one is free.
      after: (states,) its number.
    """

    which: np.ndarray
    free: np.ndarray
    ago: np.ndarray
    delta: np.ndarray
    after: np.ndarray


@functools.lru_cache(maxsize=16)
def moves(b: int, m: int, num_codes: int) -> tuple[Move, ...]:
    """Return the transitions of j = 0..m participations for every state; j >= 2 has the first ones only.

    There are `num_codes` = b codes, or 2 b - 1 with virtual history.
    """
    found = []
    for j in range(m + 1):
        given = max(0, j - 1)  # free processes besides the first one
        rest = states(num_codes, m - 1 - given) if j < m else np.zeros((1, 0), np.int32)
        codes = np.concatenate([np.zeros((len(rest), given), np.int32), rest], axis=1)
        virtual = codes >= b
        remaining = np.where(virtual, codes - (b - 1), codes)
        real = (codes > 0) & ~virtual
        ago = np.where(real, b - remaining, 0)
        # The first j free processes participate: locked out for b steps from this one on.
        lockouts = np.concatenate([np.zeros((len(codes), 1), np.int32), remaining], axis=1)
        lockouts[:, :j] = b
        delta = np.maximum(1, lockouts.min(axis=1))
        lockouts = np.maximum(lockouts - delta[:, None], 0)
        flags = np.concatenate([np.zeros((len(codes), 1), bool), virtual], axis=1) & (lockouts > 0)
        after = np.sort(lockouts + (b - 1) * flags, axis=1)[:, 1:]
        free = 1 + (codes == 0).sum(axis=1)
        none = np.zeros(len(codes), np.int64)  # `rank` of no other process is a plain 0
        numbers, after = none + rank(codes.astype(np.int64)), none + rank(after.astype(np.int64))
        found.append(Move(numbers, free, ago, delta.astype(np.int64), after))
    return tuple(found)


def start_states(b: int, m: int, distribution: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first step with a free process, state number, probability) of every set of initial lockouts.

    `distribution` are the (b,) probabilities that one of the m processes is locked out for 0..b-1 first
    steps, with virtual history.
    """
    lockouts = states(b, m).astype(np.int64)
    earliest = lockouts[:, 0]
    left = lockouts[:, 1:] - earliest[:, None]
    # Ascending tuples stand for all their orders: m! over the factorials of the lengths of their runs.
    orders = np.full(len(lockouts), float(math.factorial(m)))
    run = np.ones(len(lockouts))
    for place in range(1, m):
        run = np.where(lockouts[:, place] == lockouts[:, place - 1], run + 1, 1)
        orders /= run
    number = np.zeros(len(lockouts), np.int64) + rank(np.where(left > 0, left + b - 1, 0))
    return earliest, number, orders * distribution[lockouts].prod(axis=1)
