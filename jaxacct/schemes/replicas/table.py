"""Two replicas of a sampling table: Z_2 and draws, for any table (proofs/sampling_table.md, section 5).

Draws wait in each state for a unit exponential of hazards (`kernels.exponentials`), whose cumulative sums are
-ln of the probability of waiting times the weight.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import exponentials
from jaxacct.kernels.exponentials import added, first_reached, look_up, subtracted
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.table import (
    SHARE_ERROR,
    chosen,
    counts_at,
    draw_place,
    share_errors,
    shares,
    words_at,
    words_of_shares,
)
from jaxacct.schemes.replicas import table_weights
from jaxacct.schemes.replicas.base import Attracting
from jaxacct.schemes.replicas.table_weights import pairs_of_outcomes, rows_of, start_weights, weights_of
from jaxacct.schemes.table import SamplingTable

_MIN_WEIGHT = 1e-30  # smaller ones are refused
_MAX_ENTRIES = 1e8
_MAX_LOG_ERROR = 0.5  # of the density that is drawn from


def fits(mechanism: Attracting) -> bool:
    """Return whether a device holds the table, and units start within a lockout that covers all overlaps."""
    table, strategy = mechanism.scheme.table, mechanism.strategy
    longest = int(table.lockout.max())
    starts = len(table.start) <= longest and (not table.never or longest == table.iterations)
    overlaps = table.min_lockout >= min(strategy.bands, mechanism.scheme.min_separation, table.iterations)
    return strategy.is_toeplitz and starts and overlaps and entries(table) <= _MAX_ENTRIES


def entries(table: SamplingTable) -> float:
    """Return the number of weights of two replicas, with room for words of more than three outcomes."""
    each = (int(table.lockout.max()) + 1) * table.num_left**2 * max(1, len(table.outcomes) - 2)
    return float(len(rows_of(table).base)) * each


def log_normalizer(mechanism: Attracting) -> float:
    """Return ln Z_2, float64; inf where draws would be too inexact."""
    return log_normalizer_about(mechanism) if math.isfinite(_relative_error(mechanism)) else math.inf


@functools.lru_cache(maxsize=256)
def log_normalizer_about(mechanism: Attracting) -> float:
    """Return ln Z_2 where draws may be too inexact, too: not for certificates; inf beyond float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(start_weights(mechanism.scheme.table, weights_of(mechanism)).sum())
    return math.log(total) if 0 < total < math.inf else math.inf


def errors(mechanism: Attracting) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_outcomes` draws from."""
    table = mechanism.scheme.table
    of_choices = SHARE_ERROR * len(pairs_of_outcomes(table)) + (table.iterations + 1) * 2.0**-62
    return _relative_error(mechanism), 2 * table.max_outcomes * of_choices + _start_errors(mechanism)[1]


@functools.lru_cache(maxsize=256)
def _start_errors(mechanism: Attracting) -> tuple[float, float]:
    """Return (relative, total variation) errors of both first eligible steps."""
    terms = start_weights(mechanism.scheme.table, weights_of(mechanism))
    return share_errors(terms / terms.sum(), len(terms)) if len(terms) > 1 else (0.0, 0.0)


@functools.lru_cache(maxsize=256)
def _relative_error(mechanism: Attracting) -> float:
    """Return the relative error of draws; inf where it is large."""
    table = mechanism.scheme.table
    if not math.isfinite(log_normalizer_about(mechanism)):
        return math.inf
    weights = weights_of(mechanism)
    # A comparison with NaN is false.
    if not all(part.min() >= _MIN_WEIGHT and part.max() < math.inf for part in weights):
        return math.inf
    event = table_weights.min_event(mechanism, weights)
    if not event > 0:
        return math.inf
    error = 2 * table.max_outcomes * exponentials.ERROR / event
    error += 2 * exponentials.ERROR + (table.iterations + 2) * 2.0**-43 + _start_errors(mechanism)[0]
    return math.expm1(error) if error < _MAX_LOG_ERROR else math.inf


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting) -> dict:
    """Return the arrays that draws need."""
    table, weights, rows = mechanism.scheme.table, weights_of(mechanism), rows_of(mechanism.scheme.table)
    n, longest = table.iterations, int(table.lockout.max())
    waited = exponentials.integers_of(table.leaves)[np.minimum(np.arange(n + longest + 1), n)]
    starts, ages = shares(start_weights(table, weights))[:-1], np.arange(longest + 1)

    def alone(part):
        steps = np.clip(rows.base[part, None] + ages, 0, n + longest)
        return _hazards(waited[steps][..., None], weights.alone[part], weights.alone.max())

    def of_one(part):
        return words_of_shares(np.stack(table_weights.outcomes_of_one(mechanism, weights, part)))

    parts = table_weights.parts_of(mechanism)
    of_each = (
        [of_one(part) for part in parts] if len(table.outcomes) > 1 else [(np.zeros((0, 1), np.uint32),) * 2]
    )
    arrays = {
        "both": _hazards(waited[:, :, None] + waited[:, None, :], weights.both, weights.both.max()),
        "alone": [np.concatenate(words) for words in zip(*map(alone, parts), strict=True)],
        "of_both": words_of_shares(np.stack(table_weights.outcomes_of_two(mechanism, weights))),
        "of_one": [np.concatenate(words, axis=1) for words in zip(*of_each, strict=True)],
        "starts": exponentials.words_of(starts, 64),
        "base": rows.base.astype(np.int32),
        "release": rows.release.astype(np.int32),
        "lockout": table.lockout.astype(np.int32),
    }
    return jax.device_put(arrays)


def _hazards(waited: np.ndarray, weights: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return words of the cumulative hazards `waited - ln(weights / largest)`, flat: at least 0."""
    logs, top = (np.rint(np.ldexp(np.log(x), exponentials.GRID)).astype(np.int64) for x in (weights, largest))
    return exponentials.words_of_integers((waited - logs + int(top)).ravel())


def draw_outcomes(key, table: SamplingTable, arrays, num_samples: int):
    """Draw outcomes of two replicas.

    Returns:
      steps: (2 `max_outcomes`, num_samples) int32, ascending, and distinct but for n, which is none.
      numbers: (2, 2 `max_outcomes`, num_samples) int32, of each replica's outcome there; 0 is none, the first
        of the table's outcomes is 1.
    """
    n, K, most, longest = table.iterations, table.num_left, 2 * table.max_outcomes, int(table.lockout.max())
    counts = jnp.asarray([0, *(int(o.counts and K > 1) for o in table.outcomes)], jnp.int32)
    numbers = [[0 if x is None else x + 1 for x in pair] for pair in pairs_of_outcomes(table)]
    pairs = jnp.asarray(numbers, jnp.int32)
    rows, starts = rows_of(table), len(table.starts)
    firsts = jnp.asarray([0, *map(rows.first, table.outcomes)], jnp.int32)
    start_key, wait_key, which_key = jax.random.split(key, 3)
    place = draw_place(start_key, num_samples, arrays["starts"])
    first, second = place // starts, place % starts

    def unfinished(state):
        return any_left((state[0] < most) & (state[1] < n))

    def turn(state):
        k, at, row, who, f, g, steps, numbers = state
        wait = exponentials.exponential_words(words_at(wait_key, k, num_samples))
        base, release = arrays["base"][row], arrays["release"][row]
        here, of_counts = jnp.minimum(at, release), f * K + g

        def place_of(step):
            return (row * (longest + 1) + jnp.clip(step - base, 0, longest)) * K * K + of_counts

        def alone(step):
            return look_up(arrays["alone"], place_of(step))

        def both(step):
            return look_up(arrays["both"], jnp.minimum(step, n) * K * K + of_counts)

        goal = added(alone(here), wait)
        step = first_reached(lambda at: alone(at + 1), goal, here, release, longest)
        single = step < release
        # The rest of the wait is that of both.
        over = subtracted(goal, alone(release))
        over = [jnp.where(at < release, *words) for words in zip(over, wait, strict=True)]
        met = jnp.minimum(release, n)
        of_both = first_reached(lambda at: both(at + 1), added(both(met), over), met, n, n)
        step = jnp.minimum(jnp.where(single, step, of_both), n)
        is_some = step < n
        i = jnp.minimum(step, n - 1)
        words = words_at(which_key, k, num_samples)
        outcome = pairs[chosen(words, arrays["of_both"], i * K * K + of_counts)].T
        one = 1 + chosen(words, arrays["of_one"], place_of(i))
        mine, other = jnp.where(single, one, outcome[0]), jnp.where(single, 0, outcome[1])
        f, g = f - counts[mine], g - counts[other]
        again = i + arrays["lockout"][i]
        # Who is eligible first, and when; the other one's row.
        left, left_too = mine > 0, other > 0
        swap = jnp.where(single, release <= again, left & ~left_too)
        of_mine, of_other = firsts[mine] + i, firsts[other] + i
        at = jnp.where(single, jnp.minimum(release, again), jnp.where(left & left_too, again, i + 1))
        at = jnp.where(is_some, at, n)
        row = jnp.where(single, jnp.where(swap, of_mine, row), jnp.where(left_too, of_other, of_mine))
        both_numbers = jnp.where(is_some[None], jnp.stack([mine, other]), 0)
        numbers = numbers.at[:, k].set(jnp.where((who == 0)[None], both_numbers, both_numbers[::-1]))
        steps = steps.at[k].set(step)
        who = jnp.where(swap, 1 - who, who)
        f, g = jnp.where(swap, g, f), jnp.where(swap, f, g)
        return k + 1, at, row, who, f, g, steps, numbers

    left = jnp.full(num_samples, K - 1, jnp.int32)
    begun = (
        jnp.int32(0),
        jnp.minimum(first, second),
        rows.starts + jnp.maximum(first, second),
        jnp.where(first <= second, 0, 1),
        left,
        left,
        jnp.full((most, num_samples), n, jnp.int32),
        jnp.zeros((2, most, num_samples), jnp.int32),
    )
    *_, steps, numbers = lax.while_loop(unfinished, turn, begun)
    return steps, numbers


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Draw sums of two replicas as positions.

    Returns:
      positions: (num_samples, 2 `max_outcomes`) int32, distinct and ascending; iterations is none.
      counts: float32 of the same shape, how many examples of the two participate there.
      mine: the same of the first replica alone.
    """
    table = scheme.table
    steps, numbers = draw_outcomes(key, table, arrays, num_samples)
    mine, other = jnp.asarray([0, *(o.examples for o in table.outcomes)], jnp.float32)[numbers]
    if not all(o.examples for o in table.outcomes):
        steps = jnp.where(mine + other > 0, steps, table.iterations)
        steps, mine, other = lax.sort((steps, mine, other), dimension=0, num_keys=1)
    return steps.T, (mine + other).T, mine.T


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Draw sums of two replicas, the first of them, and their participations: float32."""
    positions, counts, mine = draw_positions_with_one(key, scheme, arrays, num_samples)
    n = scheme.iterations
    return counts_at(positions, counts, n), counts_at(positions, mine, n), counts.sum(axis=1)
