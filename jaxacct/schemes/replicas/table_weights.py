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


@functools.lru_cache(maxsize=1)
def weights_of(mechanism: Attracting) -> Weights:
    """Return the weights, backwards in time; inf or NaN beyond float64."""
    table, pulls = mechanism.scheme.table, np.exp(log_attractions(mechanism))
    n, K, longest = table.iterations, table.num_left, int(table.lockout.max())
    rows, less = rows_of(table), table.one_less
    wait = 1 - table.leaves
    lift = math.exp(log_lift(mechanism, 2))
    outcomes = [(o.chance * (lift if o.kept else 1.0), o.kept, o.counts) for o in table.outcomes]
    both = np.ones((n + longest + 1, K, K))
    alone = np.ones((len(rows.base), longest + 1, K, K))
    of_release: list[list[int]] = [[] for _ in range(n + longest + 1)]
    for row, release in enumerate(rows.release.tolist()):
        of_release[release].append(row)  # at n and later all weights are 1
    pulled = np.ones((len(pulls), longest + 1))
    width = min(pulls.shape[1], longest + 1)
    pulled[:, :width] = pulls[:, :width]
    waits, flat = bool(wait.any()), alone.reshape(-1, K, K)

    def after(values, counts):  # (.., f', g) to (.., f, g)
        return values[..., less, :] if counts and K > 1 else values

    for i in range(n - 1, -1, -1):
        d, pull, q = int(table.lockout[i]), pulled[min(n - 1 - i, len(pulled) - 1)], wait[i][:, None]
        here = [
            (chance[i][:, None], kept, counts, i if kept else rows.away + i)
            for chance, kept, counts in outcomes
        ]
        # Both are eligible.
        total = q * q.T * both[i + 1] if waits else np.zeros((K, K))
        for chance, kept, counts, row in here:
            if waits:
                one = chance * q.T * after(alone[row, 1].T, counts)
                total += one + one.T
            for other, kept_too, counts_too, _ in here:
                then = after(after(both[i + d], counts).T, counts_too).T
                total += chance * other.T * (pull[0] if kept and kept_too else 1.0) * then
        both[i] = total
        for row in of_release[i]:
            alone[row, i - rows.base[row]] = total
        # One is eligible, and the other one left l steps ago, or has not started.
        for states in _states_of_one(table, rows, i):
            value = q * flat[states.ahead] if waits else 0.0
            for chance, kept, counts, row in here:
                then = alone[row][states.left].swapaxes(1, 2)
                if states.longer is not None:
                    then = np.where(states.is_longer, flat[states.longer], then)
                factor = pull[states.ages][:, None, None] if kept and states.attracts else 1.0
                value = value + chance * factor * after(then, counts)
            flat[states.here] = value
    return Weights(both, alone)


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


def _states_of_one(table: SamplingTable, rows: Rows, i: int) -> list[_States]:
    """Return the states at step i; slices where all lockouts are the same, which take a third of the time."""
    longest, starts = int(table.lockout.max()), len(table.starts)
    kinds = ((0, True), (rows.away, False)) if rows.away else ((0, True),)
    size, found = longest + 1, []
    if (table.lockout == longest).all():
        number = min(longest - 1, i)
        for first, attracts in kinds if number else ():
            start = (first + i - 1) * size + 1
            here, ahead = (_backwards(place, longest, number) for place in (start, start + 1))
            left = slice(longest - 1, longest - 1 - number, -1)
            found.append(_States(here, ahead, left, slice(1, number + 1), attracts))
    else:
        d, ages = int(table.lockout[i]), np.arange(1, min(longest - 1, i) + 1)
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
        left, d = np.arange(1, number + 1), int(table.lockout[i])
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


def outcomes_of(mechanism: Attracting, weights: Weights) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the weights of the outcomes of two eligible replicas, by step, and of one, by state."""
    table, rows = mechanism.scheme.table, rows_of(mechanism.scheme.table)
    n, longest, less = table.iterations, int(table.lockout.max()), table.one_less
    pulls = np.exp(log_attractions(mechanism))
    end = np.minimum(n - 1 - np.arange(n), len(pulls) - 1)
    lift = math.exp(log_lift(mechanism, 2))
    chances = [o.chance * (lift if o.kept else 1.0) for o in table.outcomes]
    wait, steps = 1 - table.leaves, np.arange(n)
    row_of = np.array([steps if o.kept else rows.away + steps for o in table.outcomes])

    def after(values, outcome):
        return values[..., less, :] if outcome.counts else values

    terms = []
    for a, b in pairs_of_outcomes(table):
        ways = [wait if x is None else chances[x] for x in (a, b)]
        factor = ways[0][:, :, None] * ways[1][:, None, :]
        if a is None or b is None:
            one = int(b if a is None else a)  # pyrefly: ignore[bad-argument-type]
            then = weights.alone[row_of[one], 1].swapaxes(1, 2)  # by the counts of who left, and the other's
            then = after(then, table.outcomes[one])
            terms.append(factor * (then.swapaxes(1, 2) if a is None else then))
            continue
        then = after(weights.both[steps + table.lockout], table.outcomes[a])
        then = after(then.swapaxes(1, 2), table.outcomes[b]).swapaxes(1, 2)
        met = table.outcomes[a].kept and table.outcomes[b].kept
        terms.append(factor * then * (pulls[end, 0][:, None, None] if met else 1.0))
    of_both, terms = terms, []
    if len(table.outcomes) == 1:
        return of_both, [np.ones(1)]
    place = rows.base[:, None] + np.arange(longest + 1)  # steps of the states
    at = np.clip(place, 0, n - 1)
    left = np.clip(rows.release[:, None] - at, 0, longest)
    d = table.lockout[at]
    ages = np.broadcast_to(np.arange(longest + 1), at.shape)
    attracts = (np.arange(len(rows.base)) < n)[:, None]
    met = np.where(
        attracts & (ages < pulls.shape[1]), pulls[end[at], np.minimum(ages, pulls.shape[1] - 1)], 1.0
    )
    terms = []
    for outcome, chance, row in zip(table.outcomes, chances, row_of, strict=True):
        then = weights.alone[row[at], np.minimum(left, d)].swapaxes(2, 3)
        longer = weights.alone[np.arange(len(at))[:, None], np.minimum(ages + d, longest)]
        then = after(np.where((left > d)[..., None, None], longer, then), outcome)
        factor = met[..., None, None] if outcome.kept else 1.0
        terms.append(chance[at][..., None] * factor * then)
    return of_both, terms


def min_chances(mechanism: Attracting, weights: Weights) -> tuple[float, float]:
    """Return the smallest probabilities of an event at a step, and of an outcome given an event."""
    table = mechanism.scheme.table
    rows, n, ages = rows_of(table), table.iterations, np.arange(int(table.lockout.max()))
    place = rows.base[:, None] + ages
    at = np.clip(place, 0, n - 1)
    is_state = (ages > 0) & (place >= 0) & (place < np.minimum(rows.release, n)[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        waits = -np.log1p(-table.leaves)
        logs = np.log(weights.both[: n + 1])
        both = logs[:-1] - logs[1:] + waits[:, :, None] + waits[:, None, :]
        logs = np.log(weights.alone)
        alone = logs[:, :-1] - logs[:, 1:] + waits[at][..., None]
    joins = table.leaves > 0
    of_both = -np.expm1(-both[joins[:, :, None] | joins[:, None, :]])
    of_one = -np.expm1(-alone[is_state[..., None, None] & joins[at][..., None] & np.ones_like(alone, bool)])
    event = min(float(of_both.min(initial=1.0)), float(of_one.min(initial=1.0)))
    share = 1.0
    for terms in outcomes_of(mechanism, weights):
        total = np.sum(terms, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = min(
                share, *(float((x / total).min(where=(x > 0) & (total > 0), initial=1.0)) for x in terms)
            )
    return event, share
