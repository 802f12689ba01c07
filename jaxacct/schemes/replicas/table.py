"""Two replicas of a sampling table: Z_2 and draws, for any table (proofs/sampling_table.md, section 5).

Participations of two replicas attract each other where they are less than a lockout apart. At a step where a
replica is eligible the other one is eligible, too, or it joined l steps ago, or it is away for s more steps
without a kept participation that overlaps later ones. The weight of all that follows is a table of the step,
of l or s, and of the participations left of both. All weights are logarithms in float64, so that none
underflows; draws compare 64 random bits with probabilities of the outcomes of a step.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import threefry
from jaxacct.kernels.table import below
from jaxacct.schemes.replicas.base import Attracting, fits_two, log_attractions
from jaxacct.schemes.table import SamplingTable

MIN_OUTCOME = 1e-30
"""Smallest probability of an outcome that draws may have; tables with a smaller one are refused."""
_MAX_ENTRIES = 3e7
_MAX_LOG_ERROR = 0.5  # of the density that is drawn from
_OUTCOMES = 3  # of one eligible replica: a kept participation, one that is not kept, a wait


class _Weights(NamedTuple):
    """Ln of the weights of everything from a step on, (K, K) by participations left of the two replicas."""

    both: np.ndarray
    """(rows, K, K): both are eligible."""
    joined: np.ndarray
    """(rows, L + 1, K, K): the first is eligible, the other one joined l steps ago."""
    away: np.ndarray
    """(rows, L + 1, K, K): the first is eligible, the other one is away for s more steps."""


class _Step(NamedTuple):
    """Ln of the weights of what may happen at a step, outcomes along the first axis."""

    both: np.ndarray
    """(9, K, K)."""
    joined: np.ndarray
    """(3, L - 1, K, K), of l = 1 .. L - 1; -inf where there is no such state."""
    away: np.ndarray
    """(3, L - 1, K, K), of s = 1 .. L - 1."""


def max_replicas(mechanism: Attracting) -> int:
    """Return 2 where the table has as many entries as a device holds and columns do not overlap, else 1."""
    table = mechanism.scheme.table
    return 2 if _entries(table) <= _MAX_ENTRIES and fits_two(mechanism, 0.0) else 1


def _entries(table: SamplingTable) -> float:
    states = 9 + 2 * _OUTCOMES * (int(table.lockout.max()) - 1)
    return float(table.iterations) * states * table.num_left**2 + 10 * float(len(table.start)) ** 2


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the samples drawn in the time of the tables, approximately."""
    del m
    return 4 * _entries(mechanism.scheme.table) / mechanism.scheme.iterations


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_2, float64; inf where draws would be too inexact."""
    log_z, error = _summary(mechanism)
    return log_z if m == 2 and error < math.inf else math.inf


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from."""
    del m
    return _summary(mechanism)[1], 0.0


@functools.lru_cache(maxsize=256)
def _summary(mechanism: Attracting) -> tuple[float, float]:
    """Return (ln Z_2, relative error of draws)."""
    return _tables(mechanism)[:2]


@functools.lru_cache(maxsize=1)
def _tables(mechanism: Attracting) -> tuple[float, float, dict]:
    """Return ln Z_2, the relative error of the drawn density, and the thresholds of draws."""
    table, pulls = mechanism.scheme.table, log_attractions(mechanism)
    weights = _empty(table)
    thresholds: list = [None] * table.iterations
    error, largest = 0.0, 0.0
    for i in range(table.iterations - 1, -1, -1):
        step = _step(table, weights, _pulls_at(pulls, table.iterations - 1 - i), i)
        rows, worst = [], 0.0
        for name, terms in zip(_Step._fields, step, strict=True):
            total = np.logaddexp.reduce(terms, axis=0)
            at = getattr(weights, name)[i]
            (at if name == "both" else at[1:-1])[...] = total
            chances, relative = _chances(terms, total)
            rows.append(chances.reshape(len(terms) - 1, -1))
            worst = max(worst, relative)
            largest = max(largest, float(np.abs(total[np.isfinite(total)]).max(initial=0.0)))
        error += worst
        thresholds[i] = rows
    log_z, starts, relative = _starts(table, weights)
    # Of logarithms, exponentials and sums of a step (section 5); the errors of weights ahead cancel.
    error += relative + (table.iterations + 2) * 2.0**-53 * (30 + 8 * largest)
    error = math.expm1(error) if error < _MAX_LOG_ERROR and math.isfinite(log_z) else math.inf
    joined = [np.stack([row[place] for row in thresholds]) for place in range(3)]
    arrays = {
        "both": _words(joined[0]),
        "one": _words(np.concatenate(joined[1:], axis=2)),
        "starts": _words(starts),
    }
    return log_z, error, arrays


def _words(probabilities: np.ndarray) -> np.ndarray:
    """Return (2, ..) uint32: the words of cumulative probabilities as thresholds of 64 bits."""
    scaled = np.ldexp(np.clip(probabilities, 0.0, 1.0), 32)
    high = np.minimum(np.floor(scaled), 2.0**32 - 1)
    low = np.minimum(np.round(np.ldexp(scaled - high, 32)), 2.0**32 - 1)
    return np.stack([high, low]).astype(np.uint32)


def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that draws need."""
    del m
    table = mechanism.scheme.table
    kept = {"lockout": table.lockout.astype(np.int32), "turns": np.bool_(table.turns)}
    return jax.device_put(_tables(mechanism)[2] | kept)


def _empty(table: SamplingTable) -> _Weights:
    """Return weights of 1, those past the end."""
    n, K, longest = table.iterations, table.num_left, int(table.lockout.max())
    rows = n + max(longest, len(table.start)) + 1
    return _Weights(np.zeros((rows, K, K)), *(np.zeros((rows, longest + 1, K, K)) for _ in range(2)))


def _pulls_at(pulls: np.ndarray, from_end: int) -> np.ndarray:
    """Return (b + 1,) `<c_i, c_{i-d}> / sigma^2` of a step so far from the last one and d steps before it."""
    return pulls[min(len(pulls) - 1, from_end)]


def _step(table: SamplingTable, weights: _Weights, pulls: np.ndarray, i: int) -> _Step:
    """Return ln of the weights of all outcomes of step i in every state."""
    less, d, longest = table.one_less, int(table.lockout[i]), int(table.lockout.max())
    both, joined, away = weights
    with np.errstate(divide="ignore"):
        wait = np.log1p(-table.join[i])[:, None]
        join = np.log(table.join[i])[:, None]
        kept, lost = join + math.log(table.keep), join + np.log1p(-np.float64(table.keep))
    wait_one, kept_one, lost_one = wait, kept, lost

    def swap(values):
        return np.swapaxes(values, -1, -2)

    # Both are eligible. `alone` is the weight after one joins and the other, the first index, waits.
    after_both = both[i + d][less][:, less]
    if table.turns or d == 1:
        alone = [both[i + d][:, less]] * 2
    else:
        alone = [joined[i + 1, 1][:, less], away[i + 1, d - 1][:, less]]
    of_both = [
        kept + swap(kept) + pulls[0] + after_both,
        kept + swap(lost) + after_both,
        lost + swap(kept) + after_both,
        lost + swap(lost) + after_both,
        kept + swap(wait) + swap(alone[0]),
        lost + swap(wait) + swap(alone[1]),
        swap(kept) + wait + alone[0],
        swap(lost) + wait + alone[1],
        wait + swap(wait) + both[i + (d if table.turns else 1)],
    ]
    # One is eligible, and the other one in s steps.
    ages = np.arange(1, longest)
    before = np.maximum(i - ages, 0)
    remaining = np.where(i >= ages, table.lockout[before] - ages, 0)
    found = []
    for target, s, pull in (
        (joined, remaining, np.append(pulls, np.zeros(longest))[ages][:, None, None]),
        (away, ages, 0.0),
    ):
        exists, s = s >= 1, np.maximum(s, 1)
        here = np.minimum(i + s, len(both) - 1)
        # After a participation: whichever is eligible first; the other one's lockout then has begun.
        first_again = target[
            i + d, np.minimum(ages + d, longest) if target is joined else np.maximum(s - d, 0)
        ]
        longer = np.where((s > d)[:, None, None], first_again[:, less], both[here][:, less])
        shorter_kept = swap(joined[here, np.minimum(s, longest)])[:, less]
        shorter_lost = swap(away[here, np.clip(d - s, 0, longest)])[:, less]
        is_shorter = (s < d)[:, None, None]
        after_kept = np.where(is_shorter, shorter_kept, longer)
        after_lost = np.where(is_shorter, shorter_lost, longer)
        if table.turns:
            waits = swap(away[here, np.maximum(d - s, 0)])
        else:
            older = joined[i + 1, np.minimum(ages + 1, longest)] if target is joined else away[i + 1, s - 1]
            waits = np.where((s == 1)[:, None, None], both[i + 1], older)
        terms = [kept_one + pull + after_kept, lost_one + after_lost, wait_one + waits]
        if target is joined:
            # Where the other one cannot have joined so long ago, there is no such state.
            possible = exists[:, None, None] & np.ones_like(terms[0], bool)
            terms = [np.where(possible, term, 0.0 if k == 2 else -np.inf) for k, term in enumerate(terms)]
        found.append(np.stack(terms))
    return _Step(np.stack(of_both), *found)


def _chances(terms: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the cumulative probabilities of all outcomes but the last, and the largest relative error.

    A cumulative probability t has an error of 2^-52 t and of 2^-64, which the outcomes on both sides share.
    """
    with np.errstate(invalid="ignore"):
        chances = np.exp(terms - np.where(np.isfinite(total), total, 0.0))
    if chances.size and chances[chances > 0].min(initial=1.0) < MIN_OUTCOME:
        return chances[:-1], math.inf
    reached = np.cumsum(chances, axis=0)
    errors = 2.0**-52 * (reached + np.append(np.zeros_like(reached[:1]), reached[:-1], axis=0)) + 2.0**-63
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(chances > 0, errors / chances, 0.0)
    return reached[:-1], float(relative.max(initial=0.0))


def _starts(table: SamplingTable, weights: _Weights) -> tuple[float, np.ndarray, float]:
    """Return (ln Z_2, (m^2,) cumulative probabilities of both first eligible steps, relative error)."""
    first = np.append(table.start, table.never)
    one, two = np.indices((len(first), len(first)))
    place, apart = np.minimum(one, two), np.abs(one - two)
    longest = weights.away.shape[1] - 1
    if not table.turns and len(table.start) > longest + 1:
        raise ValueError("start must have at most one lockout's entries for replicas")
    ahead = np.where(
        apart == 0, weights.both[place, -1, -1], weights.away[place, np.minimum(apart, longest), -1, -1]
    )
    never = len(first) - 1
    ahead = np.where((one == never) | (two == never), 0.0, ahead)
    with np.errstate(divide="ignore"):
        terms = (np.log(first)[:, None] + np.log(first) + ahead).ravel()
    log_z = float(np.logaddexp.reduce(terms))
    chances, error = _chances(terms[:, None], np.array([log_z]))
    return log_z, chances[:, 0], error


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Draw sums of two replicas, the first of them, and 0 lifts: (num_samples, n) float32 twice, and rows."""
    table = scheme.table
    n, K, longest = table.iterations, table.num_left, int(table.lockout.max())
    start_key, step_key = threefry.split(key)
    first = _first_steps(start_key, num_samples, arrays["starts"], len(table.start))
    words = threefry.two_words(step_key, (n, num_samples))
    never = jnp.full((2, num_samples), -2 * longest - 2, jnp.int32)
    left = jnp.full((2, num_samples), K - 1, jnp.int32)

    def step(carry, given):
        free, last, left = carry
        i, words, lockout, of_both, of_one = given
        eligible = free == i
        leader = jnp.where(eligible[0], 0, 1)
        of_leader = left[leader, jnp.arange(num_samples)]
        of_other = left[1 - leader, jnp.arange(num_samples)]
        other_free = free[1 - leader, jnp.arange(num_samples)]
        age = i - last[1 - leader, jnp.arange(num_samples)]
        # States of one eligible replica: l = 1 .. L - 1 since the other one joined, then s = 1 .. L - 1.
        state = jnp.where(age < longest, age - 1, longest - 1 + jnp.clip(other_free - i - 1, 0, longest - 2))
        place = (state * K + of_leader) * K + of_other
        both = eligible[0] & eligible[1]
        words = tuple(word[None] for word in words)
        from_both = jnp.sum(~below(words, of_both[:, :, left[0] * K + left[1]]), axis=0)
        if longest > 1:
            from_one = jnp.sum(~below(words, of_one[:, :, place]), axis=0)
        else:
            from_one = jnp.full(num_samples, _OUTCOMES - 1)
        # Outcomes by replica: 0 kept, 1 not kept, 2 wait.
        pairs = jnp.asarray([(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]).T
        alone = jnp.stack([jnp.where(leader == 0, from_one, 2), jnp.where(leader == 1, from_one, 2)])
        outcome = jnp.where(both, pairs[:, from_both], jnp.where(eligible, alone, 2))
        joins, kept = eligible & (outcome < 2), eligible & (outcome == 0)
        wait = jnp.where(joins | table.turns, lockout, 1)
        last = jnp.where(kept, i, jnp.where(eligible, never, last))
        free = jnp.where(eligible, i + wait, free)
        left = left - joins.astype(jnp.int32) if K > 1 else left
        return (free.astype(jnp.int32), last.astype(jnp.int32), left), kept

    given = (
        jnp.arange(n, dtype=jnp.int32),
        words,
        arrays["lockout"],
        *(jnp.moveaxis(arrays[k], 1, 0) for k in ("both", "one")),
    )
    _, kept = lax.scan(step, (first, never, left), given)
    counts = kept.astype(jnp.float32)
    return counts.sum(axis=1).T, counts[:, 0].T, jnp.zeros(num_samples)


def _first_steps(key, num_samples: int, thresholds, starts: int):
    """Return (2, num_samples) int32: the first eligible steps of two replicas; above all steps is none."""
    words = threefry.two_words(key, (num_samples, 1))
    place = jnp.sum(~below(words, thresholds[:, None, :]), axis=1, dtype=jnp.int32)
    steps = jnp.stack([place // (starts + 1), place % (starts + 1)])
    return jnp.where(steps < starts, steps, 2**30)
