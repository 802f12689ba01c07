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

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.randomness import exponential_64, uniform_64


def rank(codes):
    """Return the number of the state with `codes` ascending along the last axis (NumPy or JAX integers)."""
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


def _wait(codes, steps, b: int):
    """Return the codes after `steps` more steps without an event."""
    virtual = codes >= b
    remaining = jnp.maximum(jnp.where(virtual, codes - (b - 1), codes) - steps, 0)
    return remaining + jnp.where(virtual & (remaining > 0), b - 1, 0)


def shares_of_one(key, positions, counts, m: int, b: int):
    """Return (num_samples, slots) float32: 1 where the first of m replicas is among the participants.

    Replicas are exchangeable, so all free ones participate with the same probability. The virtual history of
    those without a participation is not stored: while one of them may be locked out, the first b - 1 steps,
    all that have participated are locked out.
    """
    rows, slots = positions.shape
    words = threefry.bits_32(key, (slots, rows, m))
    earlier = np.tri(m, k=-1, dtype=bool)[None]  # of two with the same word

    def slot(free_from, at):
        step, count, word = at
        free = free_from <= step[:, None]
        # The `count` free ones with the smallest words.
        drawn = jnp.where(free, word >> 1, jnp.uint32(2**31))
        mine, others = drawn[:, :, None], drawn[:, None, :]
        order = ((others < mine) | ((others == mine) & earlier)).sum(axis=2)
        joins = free & (order < count[:, None])
        return jnp.where(joins, step[:, None] + b, free_from), joins[:, 0].astype(jnp.float32)

    inputs = positions.T, counts.T.astype(jnp.int32), words
    return jax.lax.scan(slot, jnp.zeros((rows, m), jnp.int32), inputs)[1].T


def draw_positions(key, step, codes, arrays, n: int, b: int, slots: int):
    """Draw sums of m processes' participations: `(positions, counts)`, (num_samples, slots) int32, float32.

    Positions are distinct, ascending and in the first slots; n is no participation.

    Waits are drawn at a rate that no hazard of the state exceeds (a geometric distribution, exact) and then
    thinned to the hazard of the step, so that float32 never takes a small difference of large numbers. `step`
    is the (num_samples,) first step with an eligible process, `codes` the (num_samples, m - 1) state there,
    and `arrays` the `schemes.replicas.b_min_sep.tables`.
    """
    m, num_samples = len(arrays["hazards"]), len(step)
    positions = jnp.full((num_samples, slots), n, jnp.int32)
    counts = jnp.zeros((num_samples, slots), jnp.float32)
    slot = jnp.zeros(num_samples, jnp.int32)
    rows = jnp.arange(num_samples)

    def unfinished(state):
        return any_left(state[1] < n)

    def advance(state):
        turn, step, codes, slot, positions, counts = state
        wait_key, thin_key = threefry.split(threefry.fold_in(key, turn))
        remaining = jnp.where(codes >= b, codes - (b - 1), codes)
        release = jnp.min(jnp.where(remaining > 0, remaining, n + b), axis=1)
        rate = arrays["rate"][rank(codes)]
        words = threefry.bits_32_each((wait_key, thin_key), (2 * num_samples, 2 * num_samples))
        exponential = exponential_64(wait_key, (num_samples,), threefry.drawn(words[0]))
        wait = jnp.minimum(jnp.floor(exponential / rate), n).astype(jnp.int32)
        released = wait >= release
        wait = jnp.minimum(wait, release)
        at = step + wait
        codes = _ascending(_wait(codes, wait[:, None], b))
        here = jnp.minimum(at, n - 1)
        # u times the rate's probability against the hazards of m, m-1, .., 1 participations, added up.
        uniforms = uniform_64(thin_key, (num_samples,), bits=threefry.drawn(words[1]))
        level = uniforms * -jnp.expm1(-rate)
        reached = jnp.zeros(num_samples)
        taking = jnp.zeros(num_samples, jnp.int32)
        for j in range(m, 0, -1):
            hazard = _hazard(arrays, j, here, codes, b)
            reached = reached + hazard
            taking = jnp.where((level <= reached) & (taking == 0) & (hazard > 0), j, taking)
        taking = jnp.where((at < n) & ~released, taking, 0)
        joined = taking > 0
        positions = positions.at[rows, slot].set(jnp.where(joined, here, n), mode="drop")
        counts = counts.at[rows, slot].set(taking.astype(jnp.float32), mode="drop")
        slot = slot + joined.astype(jnp.int32)
        # The first `taking` replicas, all free, are locked out; then time runs until one is free.
        lockouts = jnp.concatenate([jnp.zeros((num_samples, 1), jnp.int32), codes], axis=1)
        locked_out = jnp.where(lockouts >= b, lockouts - (b - 1), lockouts)
        joins = jnp.arange(m, dtype=jnp.int32)[None] < taking[:, None]
        shortest = jnp.min(jnp.where(joins, b, locked_out), axis=1)
        advance_by = jnp.where(released, 0, jnp.maximum(1, shortest))[:, None]
        moved = jnp.where(joins, b - advance_by, _wait(lockouts, advance_by, b))
        # Those just locked out for b steps advance by at least one, so their codes are below b.
        codes = _all_but_the_first(moved)
        return turn + 1, jnp.minimum(at + advance_by[:, 0], n), codes, slot, positions, counts

    state = jnp.uint32(0), step, codes, slot, positions, counts
    return jax.lax.while_loop(unfinished, advance, state)[-2:]


def _ascending(codes):
    """Sort each row of (num, number) in ascending order."""
    return codes if codes.shape[1] == 1 else jnp.sort(codes, axis=1)


def _all_but_the_first(codes):
    """Return (num, number - 1), each row in ascending order. Of two a maximum: XLA sorts row by row."""
    return codes.max(axis=1, keepdims=True) if codes.shape[1] == 2 else jnp.sort(codes, axis=1)[:, 1:]


def _hazard(arrays, j: int, here, codes, b: int):
    """Return the probability that j replicas participate at step `here`; 0 where fewer are free."""
    free = jnp.all(codes[:, : j - 1] == 0, axis=1)
    number = rank(codes[:, j - 1 :])
    hazard = arrays["hazards"][j - 1]
    found = hazard[here, jnp.minimum(number, hazard.shape[1] - 1)]
    if arrays["virtual_hazards"] is not None:
        early = arrays["virtual_hazards"][j - 1]
        found = jnp.where(jnp.any(codes >= b, axis=1), early[jnp.minimum(here, b - 1), number], found)
    return jnp.where(free, found, 0.0)


def weights_of_two(n: int, p: float, q: float, pull: np.ndarray, ending: np.ndarray) -> np.ndarray:
    """Return U of two processes that attract each other, (n + b, b) float64, b steps at a time.

    While one replica is locked out for s more steps, only the other one acts, and at t = i + s both states
    are determined: it participated k steps later, or never, so that with r = b - s + k steps left for it at t

        U_i(s) = q^s U_t(0) + sum_{r = b-s}^{b-1} p q^{r-(b-s)} E_r U_t(r).

    Then t + r is at least i + b: the terms of a sum within its own b steps refer beyond them. So two passes
    over b steps compute all of them, and U_i(0) is a linear recurrence of values b steps ahead.

    Args:
      n: number of steps.
      p: weight of a participation.
      q: probability of no participation.
      pull: (b + 1,) `E_d` of participations d steps apart.
      ending: the last rows of U, longer than b.
    """
    last, b = len(ending) - ending.shape[1], ending.shape[1]
    weights = np.ones((n + b, b))
    weights[n - last :] = ending
    sums = np.zeros_like(weights)
    sums[n - last :] = _suffix_sums(weights[n - last :], p * pull[:b], q)
    steps = np.arange(b)
    waited = q ** steps[1:]
    # Steps of a block as columns: the last one first, as each needs the one after it.
    decay = np.tril(q ** (2.0 * np.maximum(steps[:, None] - steps, 0)))
    for end in range(n - last, 0, -b):
        first = max(0, end - b)
        rows = np.arange(end - 1, first - 1, -1)
        both = weights[rows + b, 0]
        one = q ** (b - 1) * both + sums[rows + b, 1]
        gained = 2 * p * q * one + p**2 * pull[0] * both
        size = len(rows)
        free = decay[:size, :size] @ gained + q ** (2.0 * (steps[:size] + 1)) * weights[end, 0]
        weights[rows, 0] = free
        for _ in range(2):
            weights[first:end, 1:] = _released(weights, sums, waited, first, end)
            sums[first:end] = _suffix_sums(weights[first:end], p * pull[:b], q)
    return weights


def _released(weights, sums, waited, first: int, end: int) -> np.ndarray:
    """Return `q^s U_{i+s}(0) + sums_{i+s}(b - s)`, i = first..end-1, s = 1..b-1: at the end of a lockout."""
    b = weights.shape[1]
    shape, (row, column) = (end - first, b - 1), sums.strides
    # Views by strides, as `sliding_window_view` takes longer than all the rest: one row on with every s in
    # the first, and one column back besides in the second.
    free = np.ndarray(shape, float, weights, (first + 1) * weights.strides[0], 2 * weights.strides[:1])
    along = np.ndarray(shape, float, sums, (first + 1) * row + (b - 1) * column, (row, row - column))
    return waited * free + along


def _suffix_sums(weights: np.ndarray, chances: np.ndarray, q: float) -> np.ndarray:
    """Return `sum_{r >= v} q^{r-v} chances_r U(r)` for v = 0..b-1, of (steps, b) weights U."""
    scale = q ** np.arange(len(chances))
    return np.cumsum((weights * (scale * chances))[:, ::-1], axis=1)[:, ::-1] / scale


def virtual_weights_of_two(b: int, p: float, q: float, real: np.ndarray) -> np.ndarray:
    """Return U of two processes at the first b steps with virtual history, (b, 2 b - 1), for n above 2 b.

    As `weights_of_two`, but a virtual history does not attract.
    """
    sums = _suffix_sums(real[: 2 * b], np.full(b, p), q)
    return np.concatenate([real[:b], _released(real, sums, q ** np.arange(1, b), 0, b)], axis=1)
