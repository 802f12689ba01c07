"""Weights of two replicas of a sampling table (proofs/sampling_table.md, section 5).

Participations of two replicas attract each other where they are less than a lockout apart. At a step at which
one replica is eligible, the other one is eligible, too, or it left l steps ago: with a participation, which
attracts later ones, or without one (a start, a participation that was not kept, a turn that it waited). The
weight of all that follows is a table of when the other one left, of l, and of the participations left. A
weight is the mean of e to the attraction of what follows, so it is at least 1 and no entry underflows.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from jaxacct.kernels.table import Outcome
from jaxacct.schemes.replicas.base import Attracting, log_attractions, log_lift
from jaxacct.schemes.table import SamplingTable

_PADDING = 10


class Weights(NamedTuple):
    """Weights of everything from a step on, float64, (K, K) by participations left.

    Attributes:
      both: (steps, K, K): both replicas are eligible.
      alone: (rows, L + 1, K, K): the first is eligible l = 1 .. L steps after the base of the row, and the
        other one at the release of the row. Rows are the step at which the other one left: with a
        participation, without one where that occurs, and then the first eligible steps.
    """

    both: np.ndarray
    alone: np.ndarray


class Rows(NamedTuple):
    """Base and release of the rows of `Weights.alone`, (rows,) int64, and where their kinds begin.

    Attributes:
      kinds: numbers of examples with which the other one left, each with a row a step.
      starts: first row of the first eligible steps.
    """

    base: np.ndarray
    release: np.ndarray
    kinds: tuple[int, ...]
    starts: int

    def first(self, outcome: Outcome) -> int:
        """Return the row of an outcome at step 0."""
        return self.kinds.index(outcome.examples) * (self.starts // len(self.kinds))


def rows_of(table: SamplingTable) -> Rows:
    """Return the rows of a table."""
    kinds = tuple(dict.fromkeys(outcome.examples for outcome in table.outcomes))
    base, release = _base_and_release(table.lockout, len(kinds), len(table.starts))
    return Rows(base, release, kinds, len(kinds) * table.iterations)


def _base_and_release(lockout: np.ndarray, kinds: int, num_starts: int) -> tuple[np.ndarray, np.ndarray]:
    steps, starts = np.arange(len(lockout)), np.arange(num_starts)
    base = np.concatenate([*[steps] * kinds, starts - lockout.max()])
    return base, np.concatenate([*[steps + lockout] * kinds, starts])


def _room(table: SamplingTable) -> int:
    """Return the length of a row of `Weights.alone` in memory.

    Neighbours of a step are a row less a number apart: were it a power of two, a cache would hold few.
    """
    return int(table.lockout.max()) + _PADDING


class _Group(NamedTuple):
    """Outcomes of an eligible replica that lead from `before` participations left, to `after`, by kind."""

    chance: np.ndarray  # (n, kinds, K)
    before: slice
    after: slice


def _groups(mechanism: Attracting, rows: Rows) -> list[_Group]:
    """Return the outcomes with one participation less afterwards, and the others, where counts matter."""
    table, groups = mechanism.scheme.table, {}
    for outcome, chance in zip(table.outcomes, _chances(mechanism), strict=True):
        less = outcome.counts and table.num_left > 1
        of_kind = groups.setdefault(less, np.zeros((len(chance), len(rows.kinds), chance.shape[1])))
        of_kind[:, rows.kinds.index(outcome.examples)] += chance
    every = slice(None)
    return [
        _Group(x, *((slice(1, None), slice(-1)) if less else (every, every))) for less, x in groups.items()
    ]


def _both_leave(table: SamplingTable, one: _Group, two: _Group, attractions: np.ndarray) -> np.ndarray:
    """Return (n, K, K) weights of both leaving, by kinds with `attractions`, (n, kinds, kinds)."""
    if table.is_shared:  # the outcome of one is that of the other
        return np.einsum("nak,nl,naa->nkl", one.chance, table.leaves, attractions)
    return np.einsum("nak,nbl,nab->nkl", one.chance, two.chance, attractions)


@functools.lru_cache(maxsize=1)
def weights_of(mechanism: Attracting) -> Weights:
    """Return the weights, backwards in time; inf or NaN beyond float64."""
    table, logs = mechanism.scheme.table, log_attractions(mechanism)
    n, K, longest = table.iterations, table.num_left, int(table.lockout.max())
    rows, lockout, width = rows_of(table), table.lockout.tolist(), min(logs.shape[1], longest + 1)
    states, places = _states_of_one(tuple(lockout), len(rows.kinds), len(table.starts))
    both = np.ones((n + longest + 1, K, K))
    alone = np.ones((len(rows.base), _room(table), K, K))
    flat, left = alone.reshape(-1, K, K), alone[: rows.starts].reshape(-1, n, _room(table), K, K)
    alone = alone[:, : longest + 1]
    end = np.minimum(n - 1 - np.arange(n), len(logs) - 1)
    kinds = np.array(rows.kinds)
    attracted = np.ones((len(kinds), len(logs), len(kinds), longest + 1, 1, 1))  # by the other one's kind
    exponents = np.multiply.outer(np.outer(kinds, kinds), logs[:, :width])
    attracted[..., :width, 0, 0] = np.exp(exponents).swapaxes(1, 2)
    if K == 1 and table.min_lockout == longest and not table.is_shared:
        _fill_one_column(mechanism, both.reshape(-1), flat.reshape(-1), attracted[..., 0, 0], end.tolist())
        return Weights(both, alone)
    groups, wait = _groups(mechanism, rows), 1 - table.leaves[:, :, None]
    chances = [group.chance[..., None] for group in groups]
    both_wait, met = wait * wait.swapaxes(1, 2), attracted[:, :, :, 0, 0, 0][:, end].swapaxes(0, 1)
    both_leave = [(_both_leave(table, a, b, met), a, b) for a in groups for b in groups]
    for i in range(n - 1, -1, -1):
        # Both are eligible.
        total, other_waits = both_wait[i] * both[i + 1], wait[i].T
        then = left[:, i, 1].swapaxes(1, 2)
        for group, chance in zip(groups, chances, strict=True):
            one = (chance[i][:, group.before] * then[:, group.after]).sum(axis=0) * other_waits
            total[group.before] += one
            total[:, group.before] += one.T
        then = both[i + lockout[i]]
        for chance, one, two in both_leave:
            total[one.before, two.before] += chance[i, one.before, two.before] * then[one.after, two.after]
        both[i] = flat[places[i]] = total
        # One is eligible, and the other one left l steps ago, or has not started.
        for at in states[i]:
            value, then = wait[i] * flat[at.ahead], left[:, i][:, at.left].swapaxes(2, 3)
            if at.longer is not None:
                then = np.where(at.is_longer, flat[at.longer], then)
            if at.kind is not None and kinds[at.kind]:
                then = then * attracted[at.kind, end[i]][:, at.ages]
            for group, chance in zip(groups, chances, strict=True):
                parts = chance[i][:, None, group.before] * then[:, :, group.after]
                value[:, group.before] += parts.sum(axis=0)
            flat[at.here] = value
    return Weights(both, alone)


def _fill_one_column(mechanism: Attracting, both, flat, attracted: np.ndarray, end: list[int]) -> None:
    """Fill the weights of `weights_of` in place where participations are not counted, of one lockout.

    By slices of few numbers, in a third of the time: a calibration computes them for every noise multiplier.
    """
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    n, longest, size = table.iterations, int(table.lockout.max()), _room(table)
    states, places = _states_of_one(tuple(table.lockout.tolist()), len(rows.kinds), len(table.starts))
    kinds = range(len(rows.kinds))
    by_kind = np.zeros((n, len(kinds)))
    for outcome, chance in zip(table.outcomes, _chances(mechanism), strict=True):
        by_kind[:, rows.kinds.index(outcome.examples)] += chance[:, 0]
    together = np.einsum("na,nb,anb->n", by_kind, by_kind, attracted[:, :, :, 0][:, end]).tolist()
    waits, chances = (1 - table.leaves[:, 0]).tolist(), by_kind.tolist()
    for i in range(n - 1, -1, -1):
        wait, begins = waits[i], [(kind * n + i) * size for kind in kinds]
        alone = sum(chance * flat[begin + 1] for chance, begin in zip(chances[i], begins, strict=True))
        value = wait * (wait * both[i + 1] + 2 * alone) + together[i] * both[i + longest]
        both[i] = flat[places[i]] = value
        for at in states[i]:
            values = wait * flat[at.ahead]
            for kind, chance, begin in zip(kinds, chances[i], begins, strict=True):
                then = flat[begin : begin + size][at.left]
                if at.longer is not None:
                    then = np.where(at.is_longer[:, 0, 0], flat[at.longer], then)
                if at.kind is not None and rows.kinds[at.kind] and rows.kinds[kind]:
                    then = attracted[at.kind, end[i], kind, at.ages] * then
                values += chance * then
            flat[at.here] = values


class _States(NamedTuple):
    """States of one eligible replica at a step, as indices of `Weights.alone` with its first two axes as one.

    Attributes:
      here: of the states.
      ahead: after a wait.
      left: steps until the other one is eligible, in a row.
      ages: steps since it left.
      kind: place in `Rows.kinds`; None where it has not started.
      longer: after the lockout of the first, where the other one is ineligible for longer; None where never.
      is_longer: where that is.
    """

    here: Any
    ahead: Any
    left: Any
    ages: Any
    kind: int | None
    longer: Any = None
    is_longer: Any = None


@functools.lru_cache(maxsize=2)
def _states_of_one(
    lockout: tuple[int, ...], kinds: int, num_starts: int
) -> tuple[list[list[_States]], list[list[int]]]:
    """Return by step the states in which one replica is eligible, and those in which both are again.

    The latter are indices of `Weights.alone` of the release of each row. Indices are slices where all
    lockouts are the same, which take a third of the time. Nothing depends on probabilities.
    """
    n, longest, size = len(lockout), max(lockout), max(lockout) + _PADDING
    base, release = _base_and_release(np.array(lockout), kinds, num_starts)
    places: list[list[int]] = [[] for _ in range(n)]
    for row, (left, again) in enumerate(zip(base.tolist(), release.tolist(), strict=True)):
        if again < n:  # at n and later all weights are 1
            places[again].append(row * size + again - left)
    is_constant = min(lockout) == longest
    states = []
    for i, d in enumerate(lockout):
        found, oldest = [], min(longest - 1, i)
        if is_constant:
            for kind in range(kinds) if oldest else ():
                start = (kind * n + i - 1) * size + 1
                here, ahead = (_backwards(place, size - 1, oldest) for place in (start, start + 1))
                left = _backwards(longest - 1, 1, oldest)
                found.append(_States(here, ahead, left, slice(1, oldest + 1), kind))
        else:
            ages = np.arange(1, oldest + 1)
            left = release[i - ages] - i
            ages, left = ages[left > 0], left[left > 0]
            is_longer = (left > d)[:, None, None] if (left > d).any() else None
            for kind in range(kinds) if ages.size else ():
                here = (kind * n + i - ages) * size + ages
                longer = here + np.minimum(d, longest - ages) if is_longer is not None else None
                found.append(_States(here, here + 1, np.minimum(left, d), ages, kind, longer, is_longer))
        if (number := num_starts - 1 - i) > 0:
            start, end = (kinds * n + i + 1) * size + longest - 1, number * (size - 1)
            here, ahead = (slice(place, place + end, size - 1) for place in (start, start + 1))
            left = np.arange(1, number + 1)
            longer = np.arange(number) * (size - 1) + start + d if number > d else None
            found.append(
                _States(here, ahead, np.minimum(left, d), left, None, longer, (left > d)[:, None, None])
            )
        states.append(found)
    return states, places


def _backwards(start: int, step: int, number: int) -> slice:
    """Return the slice of `number` indices from `start` on, each lower by `step`."""
    stop = start - number * step
    return slice(start, stop if stop >= 0 else None, -step)


def start_weights(table: SamplingTable, weights: Weights) -> np.ndarray:
    """Return (starts^2,) the weights of both first eligible steps."""
    longest, first = int(table.lockout.max()), table.starts
    reach = np.diag(weights.both[: len(first), -1, -1])
    for late, ages in enumerate(weights.alone[rows_of(table).starts :, :longest, -1, -1]):
        reach[late, :late] = ages[longest - late :]
    reach += np.tril(reach, -1).T
    return (first[:, None] * first * reach).ravel()


def pairs_of_outcomes(table: SamplingTable) -> list[tuple[int | None, int | None]]:
    """Return what two eligible replicas may do, by numbers of outcomes; None is a wait."""
    numbers = [None, *range(len(table.outcomes))]
    return [(a, b) for a in numbers for b in numbers if (a, b) != (None, None)]


def outcomes_of_two(mechanism: Attracting, weights: Weights) -> list[np.ndarray]:
    """Return the weights of the outcomes of two eligible replicas, (n, K, K) each."""
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    chances, steps = _chances(mechanism), np.arange(table.iterations)
    terms = []
    for a, b in pairs_of_outcomes(table):
        ways = [1 - table.leaves if x is None else chances[x] for x in (a, b)]
        if a is None or b is None:
            one = table.outcomes[int(b if a is None else a)]  # pyrefly: ignore[bad-argument-type]
            # By the counts of who left, and the other's.
            then = _after(table, weights.alone[rows.first(one) + steps, 1].swapaxes(1, 2), one)
            then = then.swapaxes(1, 2) if a is None else then
        else:
            one, two = table.outcomes[a], table.outcomes[b]
            then = _after(table, weights.both[steps + table.lockout], one)
            then = _after(table, then.swapaxes(1, 2), two).swapaxes(1, 2)
            met = _attractions(mechanism, steps, 0 * steps, one.examples * two.examples)
            then = then * met[:, None, None]
            if table.is_shared:
                ways[1] = table.leaves * (a == b)
        terms.append(ways[0][:, :, None] * ways[1][:, None, :] * then)
    return terms


def outcomes_of_one(mechanism: Attracting, weights: Weights, part: slice) -> list[np.ndarray]:
    """Return the weights of the outcomes of one eligible replica in `part` of the rows of `alone`."""
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    n, longest = table.iterations, int(table.lockout.max())
    number = np.arange(len(rows.base))[part, None]
    ages = np.broadcast_to(np.arange(longest + 1), (len(number), longest + 1))
    at = np.clip(rows.base[part, None] + ages, 0, n - 1)  # steps of the states
    left = np.clip(rows.release[part, None] - at, 0, longest)
    d = table.lockout[at]
    others = np.array([*rows.kinds, 0])[np.minimum(number // n, len(rows.kinds))]
    terms = []
    for outcome, chance in zip(table.outcomes, _chances(mechanism), strict=True):
        then = weights.alone[rows.first(outcome) + at, np.minimum(left, d)].swapaxes(2, 3)
        longer = weights.alone[number, np.minimum(ages + d, longest)]
        then = _after(table, np.where((left > d)[..., None, None], longer, then), outcome)
        met = _attractions(mechanism, at, ages, others * outcome.examples)[..., None, None]
        terms.append(chance[at][..., None] * met * then)
    return terms


def _chances(mechanism: Attracting) -> list[np.ndarray]:
    """Return (n, K) the probabilities of the outcomes of a table, with the lift of participations."""
    return [o.chance * np.exp(o.examples * log_lift(mechanism)) for o in mechanism.scheme.table.outcomes]


def _attractions(mechanism: Attracting, steps: np.ndarray, ages: np.ndarray, times) -> np.ndarray:
    """Return e to `times` the attraction of participations at `steps` to those `ages` steps before."""
    logs = log_attractions(mechanism)
    end = np.minimum(mechanism.scheme.iterations - 1 - steps, len(logs) - 1)
    return np.exp(times * np.where(ages < logs.shape[1], logs[end, np.minimum(ages, logs.shape[1] - 1)], 0.0))


def _after(table: SamplingTable, values: np.ndarray, outcome) -> np.ndarray:
    """Return values by the participations left before an outcome, of those by what is left after it."""
    return values[..., table.one_less, :] if outcome.counts else values


def parts_of(mechanism: Attracting) -> list[slice]:
    """Return the rows of `alone` in parts of a few million numbers, which limits memory."""
    table = mechanism.scheme.table
    rows, each = len(rows_of(table).base), (int(table.lockout.max()) + 1) * table.num_left**2
    at_once = max(1, 2**22 // (each * len(table.outcomes)))
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def min_event(mechanism: Attracting, weights: Weights) -> float:
    """Return a lower bound on the probability of an event at a step, in any state that has one.

    It is the smallest of these probabilities, or of those that an eligible unit leaves, if that is smaller.
    """
    table, longest = mechanism.scheme.table, int(mechanism.scheme.table.lockout.max())
    rows, n = rows_of(table), table.iterations
    waits = np.where(table.leaves > 0, 1 - table.leaves, 0.0)
    # Of steps before the first and after the last, too, at which there is no event.
    padded = np.pad(waits, ((longest, 2 * longest), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest - 1, axis=0).swapaxes(1, 2)
    leaves = (table.leaves[:, :, None] > 0) | (table.leaves[:, None, :] > 0)
    both = (1 - table.leaves)[:, :, None] * (1 - table.leaves)[:, None, :]
    both *= weights.both[1 : n + 1] / weights.both[:n]
    none = both.max(where=leaves, initial=0.0)
    for part in parts_of(mechanism):
        now = weights.alone[part, 1:]
        alone = now[:, 1:] / now[:, :-1]
        alone *= windows[rows.base[part] + 1 + longest][..., None]
        none = max(none, alone.max(initial=0.0))
    return 1 - none - 2.0**-50
