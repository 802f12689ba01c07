"""Weights of two replicas of a sampling table (proofs/sampling_table.md, section 5).

Participations of two replicas attract each other where they are less than a lockout apart. At a step at which
one replica is eligible, the other one is eligible, too, or it left l steps ago: with a participation, which
attracts later ones, or without one (a start, a participation that was not kept, a turn that it waited). The
weight of all that follows is a table of when the other one left, of l, and of the participations left. A
weight is the mean of e to the attraction of what follows, so it is at least 1 and no entry underflows.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxacct.schemes.replicas.base import Attracting, log_attractions, log_lift
from jaxacct.schemes.table import SamplingTable


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
    """Base and release of the rows of `Weights.alone`, (rows,) int64, and where their kinds begin."""

    base: np.ndarray
    release: np.ndarray
    away: int
    """First row without a participation; 0 where there are none."""
    starts: int


def rows_of(table: SamplingTable) -> Rows:
    """Return the rows of a table."""
    n, longest = table.iterations, int(table.lockout.max())
    steps, starts = np.arange(n), np.arange(len(table.starts))
    kinds = 1 if all(outcome.kept for outcome in table.outcomes) else 2
    base = np.concatenate([*[steps] * kinds, starts - longest])
    release = np.concatenate([*[steps + table.lockout] * kinds, starts])
    return Rows(base, release, n if kinds == 2 else 0, kinds * n)


class _Way(NamedTuple):
    """What an eligible replica may do, for all steps.

    An outcome that counts leads from `before` participations left, one and more, to `after`, one less.
    """

    chance: np.ndarray  # (n, K, 1)
    kept: bool
    row: int  # of step 0
    before: slice
    after: slice


@functools.lru_cache(maxsize=1)
def weights_of(mechanism: Attracting) -> Weights:
    """Return the weights, backwards in time; inf or NaN beyond float64."""
    table, pulls = mechanism.scheme.table, np.exp(log_attractions(mechanism))
    n, K, longest = table.iterations, table.num_left, int(table.lockout.max())
    rows, lockout = rows_of(table), table.lockout.tolist()
    states, places = _states_of_one(table)
    both = np.ones((n + longest + 1, K, K))
    alone = np.ones((len(rows.base), longest + 1, K, K))
    flat = alone.reshape(-1, K, K)
    pulled = np.ones((len(pulls), longest + 1, 1, 1))
    width = min(pulls.shape[1], longest + 1)
    pulled[:, :width, 0, 0] = pulls[:, :width]
    end = np.minimum(n - 1 - np.arange(n), len(pulls) - 1)
    if K == 1 and table.min_lockout == longest:
        _fill_one_column(mechanism, both.reshape(-1), flat.reshape(-1), pulled[:, :, 0, 0])
        return Weights(both, alone)
    ways = []
    for outcome, chance in zip(table.outcomes, _chances(mechanism), strict=True):
        before, after = (slice(1, None), slice(-1)) if outcome.counts and K > 1 else (slice(None),) * 2
        ways.append(_Way(chance[:, :, None], outcome.kept, 0 if outcome.kept else rows.away, before, after))
    wait = 1 - table.leaves[:, :, None]
    both_wait, one_waits = wait * wait.swapaxes(1, 2), [way.chance * wait.swapaxes(1, 2) for way in ways]
    both_leave = [
        (
            one.chance * two.chance.swapaxes(1, 2) * (pulled[end, 0] if one.kept and two.kept else 1.0),
            (one.before, two.before),
            (one.after, two.after),
        )
        for one in ways
        for two in ways
    ]
    for i in range(n - 1, -1, -1):
        # Both are eligible.
        total = both_wait[i] * both[i + 1]
        for way, chance in zip(ways, one_waits, strict=True):
            one = chance[i, way.before] * alone[way.row + i, 1].T[way.after]
            total[way.before] += one
            total[:, way.before] += one.T
        then = both[i + lockout[i]]
        for chance, before, after in both_leave:
            total[before] += chance[i][before] * then[after]
        both[i] = flat[places[i]] = total
        # One is eligible, and the other one left l steps ago, or has not started.
        for at in states[i]:
            value = wait[i] * flat[at.ahead]
            for way in ways:
                then = alone[way.row + i][at.left].swapaxes(1, 2)
                if at.longer is not None:
                    then = np.where(at.is_longer, flat[at.longer], then)
                chance = way.chance[i, way.before]
                if way.kept and at.attracts:
                    chance = chance * pulled[end[i]][at.ages]
                value[:, way.before] += chance * then[:, way.after]
            flat[at.here] = value
    return Weights(both, alone)


def _fill_one_column(mechanism: Attracting, both: np.ndarray, flat: np.ndarray, pulled: np.ndarray) -> None:
    """Fill the weights of `weights_of` in place where participations are not counted, of one lockout.

    By slices of few numbers, in a third of the time: a calibration computes them for every noise multiplier.
    """
    table = mechanism.scheme.table
    n, longest = table.iterations, int(table.lockout.max())
    states, places = _states_of_one(table)
    chances = [chance[:, 0].tolist() for chance in _chances(mechanism)]
    ways = list(zip(table.outcomes, chances, strict=True))
    away, size = rows_of(table).away, longest + 1
    waits, met = (1 - table.leaves[:, 0]).tolist(), pulled[:, 0].tolist()
    for i in range(n - 1, -1, -1):
        end, wait = min(n - 1 - i, len(pulled) - 1), waits[i]
        left = sum(chance[i] for _, chance in ways)
        kept = sum(chance[i] for outcome, chance in ways if outcome.kept)
        value = wait * wait * both[i + 1] + (left**2 + kept**2 * (met[end] - 1)) * both[i + longest]
        for outcome, chance in ways:
            value += 2 * wait * chance[i] * flat[(i if outcome.kept else away + i) * size + 1]
        both[i] = flat[places[i]] = value
        for at in states[i]:
            values = wait * flat[at.ahead]
            for outcome, chance in ways:
                row = (i if outcome.kept else away + i) * size
                then = flat[row : row + size][at.left]
                if at.longer is not None:
                    then = np.where(at.is_longer[:, 0, 0], flat[at.longer], then)
                if outcome.kept and at.attracts:
                    values += chance[i] * pulled[end, at.ages] * then
                else:
                    values += chance[i] * then
            flat[at.here] = values


class _States(NamedTuple):
    """States of one eligible replica at a step, as indices of `Weights.alone` with its first two axes as one.

    Attributes:
      here: of the states.
      ahead: after a wait.
      left: steps until the other one is eligible, in a row.
      ages: steps since it left.
      attracts: whether it participated.
      longer: after the lockout of the first, where the other one is ineligible for longer; None where never.
      is_longer: where that is.
    """

    here: Any
    ahead: Any
    left: Any
    ages: Any
    attracts: bool
    longer: Any = None
    is_longer: Any = None


@functools.lru_cache(maxsize=2)
def _states_of_one(table: SamplingTable) -> tuple[list[list[_States]], list[list[int]]]:
    """Return by step the states in which one replica is eligible, and those in which both are again.

    The latter are indices of `Weights.alone` of the release of each row. Indices are slices where all
    lockouts are the same, which take a third of the time.
    """
    n, longest, rows = table.iterations, int(table.lockout.max()), rows_of(table)
    places: list[list[int]] = [[] for _ in range(n)]
    for row, (base, release) in enumerate(zip(rows.base.tolist(), rows.release.tolist(), strict=True)):
        if release < n:  # at n and later all weights are 1
            places[release].append(row * (longest + 1) + release - base)
    is_constant = bool((table.lockout == longest).all())
    return [_states_at(table, rows, is_constant, i) for i in range(n)], places


def _states_at(table: SamplingTable, rows: Rows, is_constant: bool, i: int) -> list[_States]:
    longest, starts = int(table.lockout.max()), len(table.starts)
    d, size, found = int(table.lockout[i]), longest + 1, []
    kinds, oldest = ((0, True), (rows.away, False))[: 2 if rows.away else 1], min(longest - 1, i)
    if is_constant:
        for first, attracts in kinds if oldest else ():
            start = (first + i - 1) * size + 1
            here, ahead = (_backwards(place, longest, oldest) for place in (start, start + 1))
            left = _backwards(longest - 1, 1, oldest)
            found.append(_States(here, ahead, left, slice(1, oldest + 1), attracts))
    else:
        ages = np.arange(1, oldest + 1)
        left = rows.release[i - ages] - i
        ages, left = ages[left > 0], left[left > 0]
        is_longer = (left > d)[:, None, None] if (left > d).any() else None
        for first, attracts in kinds if ages.size else ():
            here = (first + i - ages) * size + ages
            longer = here + np.minimum(d, longest - ages) if is_longer is not None else None
            found.append(_States(here, here + 1, np.minimum(left, d), ages, attracts, longer, is_longer))
    if (number := starts - 1 - i) > 0:
        start = (rows.starts + i + 1) * size + longest - 1
        here, ahead = (slice(place, place + number * longest, longest) for place in (start, start + 1))
        left = np.arange(1, number + 1)
        longer = np.arange(number) * longest + start + d if number > d else None
        is_longer = (left > d)[:, None, None]
        found.append(_States(here, ahead, np.minimum(left, d), left, False, longer, is_longer))
    return found


def _backwards(start: int, step: int, number: int) -> slice:
    """Return the slice of `number` indices from `start` on, each lower by `step`."""
    stop = start - number * step
    return slice(start, stop if stop >= 0 else None, -step)


def start_weights(table: SamplingTable, weights: Weights) -> np.ndarray:
    """Return (starts^2,) the weights of both first eligible steps."""
    rows, longest, first = rows_of(table), int(table.lockout.max()), table.starts
    one, two = np.indices((len(first), len(first)))
    early, late = np.minimum(one, two), np.maximum(one, two)
    reach = weights.alone[rows.starts + late, early - late + longest, -1, -1]
    reach = np.where(early == late, weights.both[early, -1, -1], reach)
    return (first[:, None] * first * reach).ravel()


def pairs_of_outcomes(table: SamplingTable) -> list[tuple[int | None, int | None]]:
    """Return what two eligible replicas may do, by numbers of outcomes; None is a wait."""
    numbers = [None, *range(len(table.outcomes))]
    return [(a, b) for a in numbers for b in numbers if (a, b) != (None, None)]


def outcomes_of_two(mechanism: Attracting, weights: Weights) -> list[np.ndarray]:
    """Return the weights of the outcomes of two eligible replicas, (n, K, K) each."""
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    chances, steps = _chances(mechanism), np.arange(table.iterations)
    pulls = _pulls(mechanism, steps, np.zeros_like(steps))[:, None, None]
    terms = []
    for a, b in pairs_of_outcomes(table):
        ways = [1 - table.leaves if x is None else chances[x] for x in (a, b)]
        factor = ways[0][:, :, None] * ways[1][:, None, :]
        if a is None or b is None:
            one = table.outcomes[int(b if a is None else a)]  # pyrefly: ignore[bad-argument-type]
            left = steps if one.kept else rows.away + steps
            then = weights.alone[left, 1].swapaxes(1, 2)  # by the counts of who left, and the other's
            then = _after(table, then, one)
            terms.append(factor * (then.swapaxes(1, 2) if a is None else then))
            continue
        then = _after(table, weights.both[steps + table.lockout], table.outcomes[a])
        then = _after(table, then.swapaxes(1, 2), table.outcomes[b]).swapaxes(1, 2)
        met = table.outcomes[a].kept and table.outcomes[b].kept
        terms.append(factor * then * (pulls if met else 1.0))
    return terms


def outcomes_of_one(mechanism: Attracting, weights: Weights, part: slice) -> list[np.ndarray]:
    """Return the weights of the outcomes of one eligible replica in `part` of the rows of `alone`."""
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    if len(table.outcomes) == 1:
        return [np.ones(1)]
    n, longest = table.iterations, int(table.lockout.max())
    number = np.arange(len(rows.base))[part, None]
    ages = np.broadcast_to(np.arange(longest + 1), (len(number), longest + 1))
    at = np.clip(rows.base[part, None] + ages, 0, n - 1)  # steps of the states
    left = np.clip(rows.release[part, None] - at, 0, longest)
    d = table.lockout[at]
    met = np.where(number < n, _pulls(mechanism, at, ages), 1.0)[..., None, None]
    terms = []
    for outcome, chance in zip(table.outcomes, _chances(mechanism), strict=True):
        row = at if outcome.kept else rows.away + at
        then = weights.alone[row, np.minimum(left, d)].swapaxes(2, 3)
        longer = weights.alone[number, np.minimum(ages + d, longest)]
        then = _after(table, np.where((left > d)[..., None, None], longer, then), outcome)
        terms.append(chance[at][..., None] * (met if outcome.kept else 1.0) * then)
    return terms


def _chances(mechanism: Attracting) -> list[np.ndarray]:
    """Return (n, K) the probabilities of the outcomes of a table, with the lift of participations."""
    lift = math.exp(log_lift(mechanism))
    return [o.chance * (lift if o.kept else 1.0) for o in mechanism.scheme.table.outcomes]


def _pulls(mechanism: Attracting, steps: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """Return e to the attraction of participations at `steps` to those `ages` steps before."""
    pulls = np.exp(log_attractions(mechanism))
    end = np.minimum(mechanism.scheme.iterations - 1 - steps, len(pulls) - 1)
    return np.where(ages < pulls.shape[1], pulls[end, np.minimum(ages, pulls.shape[1] - 1)], 1.0)


def _after(table: SamplingTable, values: np.ndarray, outcome) -> np.ndarray:
    """Return values by the participations left before an outcome, of those by what is left after it."""
    return values[..., table.one_less, :] if outcome.counts else values


def parts_of(weights: Weights) -> list[slice]:
    """Return the rows of `alone` in parts of a few million numbers, which limits memory."""
    rows = len(weights.alone)
    at_once = max(1, 2**22 // weights.alone[0].size)
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def min_chances(mechanism: Attracting, weights: Weights) -> tuple[float, float]:
    """Return the smallest probabilities of an event at a step, and of an outcome given an event."""
    table = mechanism.scheme.table
    rows, n, ages = rows_of(table), table.iterations, np.arange(int(table.lockout.max()))
    joins = table.leaves > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        waits = -np.log1p(-table.leaves)
        logs = np.log(weights.both[: n + 1])
        both = logs[:-1] - logs[1:] + waits[:, :, None] + waits[:, None, :]
        event = _min_chance(-np.expm1(-both[joins[:, :, None] | joins[:, None, :]]))
        share = _min_share(outcomes_of_two(mechanism, weights))
        for part in parts_of(weights):
            place = rows.base[part, None] + ages
            at = np.clip(place, 0, n - 1)
            release = np.minimum(rows.release[part, None], n)
            is_state = (ages > 0) & (place >= 0) & (place < release)
            logs = np.log(weights.alone[part])
            alone = logs[:, :-1] - logs[:, 1:] + waits[at][..., None]
            is_state = is_state[..., None, None] & joins[at][..., None] & np.ones_like(alone, bool)
            event = min(event, _min_chance(-np.expm1(-alone[is_state])))
            share = min(share, _min_share(outcomes_of_one(mechanism, weights, part)))
    return event, share


def _min_chance(values: np.ndarray) -> float:
    return float(values.min(initial=1.0))


def _min_share(terms: list[np.ndarray]) -> float:
    """Return the smallest positive share of a term in the sum of all."""
    total = np.sum(terms, axis=0)
    return min(float((x / total).min(where=(x > 0) & (total > 0), initial=1.0)) for x in terms)
