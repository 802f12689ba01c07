"""Two replicas of balanced min-sep participation: exact weights from a table with counts, exact draws.

While one replica is free and the other is locked out for s more steps, the state is s, whether the last
participation of the locked-out one was kept, and how many participations remain: f of the free replica, g of
the other; s = 0 is both free. `V_i(state)` is the mean weight of the steps from i on over all pairs of
patterns that the state allows, where two kept participations d steps apart attract each other by
`E_d = exp(a_d / sigma^2)` (proofs/fixed_counts.md, section 4), and U_i(state) that mean times the number of
these pairs. The probability of no participation before a step is a ratio of two numbers U, so the next one is
found by bisection. Draws have U as float32 mantissas and exponents of its own for every state.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import fixed_counts, threefry
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas import one_participation
from jaxacct.schemes.replicas.base import (
    MIN_ENTRY,
    Attracting,
    fits_two,
    log_attractions,
    power_of_2,
    rarest_event,
    summary_of_two,
)


def kinds_of(scheme) -> list[tuple[float, bool]]:
    """Return the kinds of a participation, (probability, whether it is kept)."""
    kept = scheme.keep_probability
    return [(1.0, True)] if kept == 1 else [(1 - kept, False), (kept, True)]


def table_bytes(mechanism: Attracting) -> float:
    """Return the bytes of the table."""
    scheme = mechanism.scheme
    if scheme.max_participations == 1:
        return one_participation.table_bytes(mechanism)
    states = scheme.min_separation * len(kinds_of(scheme)) * (scheme.max_participations + 1) ** 2
    return 8.0 * (scheme.iterations + scheme.min_separation) * states


def max_replicas(mechanism: Attracting) -> int:
    """Return 2 where two replicas have tables, else 1."""
    return 2 if fits_two(mechanism, table_bytes(mechanism)) else 1


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the samples drawn in the time of the table: a number of it costs about as much as a step."""
    del m
    return table_bytes(mechanism) / 8 / mechanism.scheme.iterations


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_2, float64; inf for too inexact draws."""
    assert m == 2
    return _summary(mechanism)[0]


def log_normalizer_about(mechanism: Attracting, m: int) -> float:
    """Return ln Z_2 where draws may be too inexact, too: not for certificates."""
    if mechanism.scheme.max_participations == 1:
        return log_normalizer(mechanism, m)
    return _log_total(mechanism)


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the draws (proofs/fixed_counts.md, section 5)."""
    assert m == 2
    return _summary(mechanism)[1], 2.0**-40 * mechanism.scheme.max_participations


@functools.lru_cache(maxsize=256)
def _summary(mechanism: Attracting) -> tuple[float, float]:
    """Return (ln of the normalizer, relative error of the drawn distribution)."""
    scheme = mechanism.scheme
    k = scheme.max_participations
    if k == 1:
        log_z, rarest = one_participation.summary(mechanism)
    else:
        log_z, rarest = _log_total(mechanism), _rarest(mechanism)
    return summary_of_two(log_z, rarest, 2 * k)


@functools.lru_cache(maxsize=256)
def _log_total(mechanism: Attracting) -> float:
    """Return ln of the mean weight of two patterns; inf beyond float64."""
    k = mechanism.scheme.max_participations
    total = float(_weights(mechanism)[0, 0, 0, k, k])
    return math.log(total) if 0 < total < math.inf else math.inf


def _hazards(scheme) -> np.ndarray:
    """Return (n + b, k + 1) float64: the share of patterns of f steps from step i on that have step i."""
    n, b, f = scheme.iterations, scheme.min_separation, np.arange(scheme.max_participations + 1)
    columns = fixed_counts.num_columns(n - np.arange(n + b)[:, None], f, b)  # pyrefly: ignore[bad-argument-type]
    return np.where((f > 0) & (columns >= f), f / np.maximum(columns, 1), 0.0)


def _events(mechanism: Attracting, table: np.ndarray):
    """Return the function of (first, end) that yields (states, kinds, parts): what may happen at these steps.

    Parts are the weights of the events of these states in the order of the draw, (events, steps, .., k + 1,
    k + 1): with both free (`states` is 0), or while one is locked out. They are read from later steps of
    `table`, V.
    """
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.max_participations
    kinds, hazards = kinds_of(scheme), _hazards(scheme)
    joins, waits = hazards[:, 1:, None], 1 - hazards[:, None]
    joins_alone, joins_both = joins * waits, joins * joins.swapaxes(1, 2)
    with np.errstate(over="ignore"):
        attraction = np.exp(log_attractions(mechanism))
    lags = attraction[:, b - np.arange(1, b), None, None]
    # While one is locked out for s more steps: V[i + s, b - s], of the other one locked out; by f and g.
    step, state, *within = table.strides
    shape, strides = (n, b - 1, *table.shape[2:]), (step, step - state, *within)
    released = np.lib.stride_tricks.as_strided(table[1:, b - 1 :], shape, strides).swapaxes(3, 4)

    def at(first, end):
        places = np.minimum(n - 1 - np.arange(first, end), len(attraction) - 1)
        if b > 1:
            then, lag = released[first:end], lags[places]
            for one, (_, was) in enumerate(kinds):
                parts = np.zeros((len(kinds), end - first, b - 1, k + 1, k + 1))
                for other, (chance, kept) in enumerate(kinds):
                    share = chance * joins[first:end, None] * (lag if was and kept else 1.0)
                    np.multiply(share, then[:, :, other, :-1], out=parts[other, :, :, 1:])
                yield slice(1, None), one, parts
        parts = np.zeros((len(kinds), 2 + len(kinds), end - first, k + 1, k + 1))
        alone, both = table[first + 1 : end + 1, b - 1, :, :, :-1], table[first + b : end + b, 0, 0, :-1, :-1]
        for one, (chance, kept) in enumerate(kinds):
            parts[one, 0, :, 1:] = chance * joins_alone[first:end] * alone[:, one].swapaxes(1, 2)
            parts[one, 1] = parts[one, 0].swapaxes(1, 2)
            for other, (again, too) in enumerate(kinds):
                pulled = attraction[places, :1, None] if kept and too else 1.0
                parts[one, 2 + other, :, 1:, 1:] = chance * again * pulled * joins_both[first:end] * both
        yield 0, slice(None), parts.reshape(-1, *parts.shape[2:])

    return at


@functools.lru_cache(maxsize=1)
def _weights(mechanism: Attracting) -> np.ndarray:
    """Return V, (n + b, b, kinds, k + 1, k + 1) float64 by (i, s, kept, f, g); 0 where no pattern is left."""
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.max_participations
    table = np.zeros((n + b, b, len(kinds_of(scheme)), k + 1, k + 1))
    table[n:, :, :, 0, 0] = 1.0
    events, waits = _events(mechanism, table), 1 - _hazards(scheme)[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(n - 1, -1, -1):
            table[i, 1:] = waits[i] * table[i + 1, : b - 1]
            table[i, 0] = waits[i] * waits[i].T * table[i + 1, 0]
            for states, kinds, parts in events(i, i + 1):
                table[i, states, kinds] += parts.sum(axis=0)[0]
    return table


def _rarest(mechanism: Attracting) -> float:
    """Return the inverse of the smallest probability of an event; inf where V is too small.

    It is the largest ratio of V to the part of it with a participation at that step, or of all such parts to
    one of them.
    """
    table, rarest = _weights(mechanism), 1.0
    events = _events(mechanism, table)
    n, at_once = mechanism.scheme.iterations, max(1, 2**16 // table[0].size)
    has_pairs = np.broadcast_to(_pattern_pairs(mechanism.scheme)[0] > 0, table.shape)
    if not table.min(where=has_pairs, initial=1.0) >= MIN_ENTRY:
        return math.inf
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for first in range(0, n, at_once):
            end = min(n, first + at_once)
            for states, kinds, parts in events(first, end):
                # With both free all kinds have the same weights.
                total = table[first:end, states, 0 if states == 0 else kinds]
                rarest = max(rarest, rarest_event(total, parts.sum(axis=0), parts))
    return rarest


@functools.lru_cache(maxsize=4)
def _pattern_pairs(scheme) -> tuple[np.ndarray, np.ndarray]:
    """Return mantissas, float64, and exponents of 2 of the numbers of pairs of patterns of each state.

    Both are (n + b, b, 1, k + 1, k + 1) by (i, s, .., f, g); 0 where there is none.
    """
    n, b, k = scheme.iterations, scheme.min_separation, scheme.max_participations
    counts = [
        math.comb(max(fixed_counts.num_columns(n - i, f, b), 0), f) if f else 1
        for i in range(n + b)
        for f in range(k + 1)
    ]
    lengths = [count.bit_length() for count in counts]
    shares = [count / 2**length for count, length in zip(counts, lengths, strict=True)]
    mantissas, exponents = (np.reshape(part, (n + b, k + 1)) for part in (shares, lengths))
    # The locked-out one is free s steps later; past the last step only patterns without steps are left.
    release = np.minimum(np.add.outer(np.arange(n + b), np.arange(b)), n)
    pairs = mantissas[:, None, :, None] * mantissas[release][:, :, None, :]
    return pairs[:, :, None], (exponents[:, None, :, None] + exponents[release][:, :, None, :])[:, :, None]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that draws need: float32 mantissas and int16 exponents of U, and attractions."""
    assert m == 2
    if mechanism.scheme.max_participations == 1:
        return one_participation.tables(mechanism)
    pairs, exponents = _pattern_pairs(mechanism.scheme)
    mantissas, more = np.frexp(_weights(mechanism) * pairs)
    arrays = {
        "mantissas": np.asarray(mantissas.reshape(-1), np.float32),
        "exponents": np.asarray((more + exponents).reshape(-1), np.int16),
        "attraction": np.asarray(np.exp(log_attractions(mechanism)), np.float32),
    }
    return jax.device_put(arrays)


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Draw pairs of patterns.

    Args:
      key: JAX key.
      scheme: of the tables; static.
      arrays: `tables`.
      num_samples: static.

    Returns:
      positions: (num_samples, 2 max_participations) int32, distinct and ascending; iterations is none.
      counts: float32 of the same shape, how many of the two have a kept participation there.
      mine: the same of the first replica alone.
    """
    if scheme.max_participations == 1:
        return one_participation.draw_positions_with_one(key, scheme, arrays, num_samples)
    n, b, k = scheme.iterations, scheme.min_separation, scheme.max_participations
    kinds = kinds_of(scheme)
    ends = len(arrays["attraction"])

    def weight(i, s, kind, f, g):
        """Return (mantissa, exponent) of U."""
        place = (((i * b + s) * len(kinds) + kind) * (k + 1) + f) * (k + 1) + g
        place = jnp.where((f >= 0) & (g >= 0), place, 0)
        return arrays["mantissas"][place], arrays["exponents"][place].astype(jnp.int32)

    def pull(i, lag):
        return arrays["attraction"][jnp.clip(n - 1 - i, 0, ends - 1), jnp.minimum(lag, b)]

    def turn(carry, key):
        i, s, kind, locked, left = carry
        free = 1 - locked
        f, g = (jnp.take_along_axis(left, which[:, None], axis=1)[:, 0] for which in (free, locked))
        wait_key, event_key = threefry.split(key)
        total, unit = weight(i, s, kind, f, g)
        level = uniform_64(wait_key, (num_samples,)) * total

        def halve(_, between):
            low, high = between
            middle = (low + high) // 2
            share, exponent = weight(middle, jnp.maximum(s - (middle - i), 0), kind, f, g)
            reached = share * power_of_2(exponent - unit) >= level
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        low, _ = jax.lax.fori_loop(0, n.bit_length(), halve, (i, jnp.full_like(i, n)))
        s = jnp.maximum(s - (low - i), 0)
        some = (f + g > 0) & (low < n)
        at = jnp.where(some, low, n - 1)
        # Possible events, with their weights: (free one, kept), (other, kept) and whether each participates.
        chances, events = [], []
        locked_out = s > 0
        for one, (chance, kept) in enumerate(kinds):
            attracted = pull(at, b - s) if kept else 1.0
            was = jnp.asarray([kept for _, kept in kinds])[kind]
            lag = jnp.where(locked_out & was, attracted, 1.0)
            step, then = jnp.where(locked_out, s, 1), jnp.where(locked_out, b - s, b - 1)
            ahead = weight(at + step, then, one, g, f - 1)
            chances.append((chance * lag, ahead, f > 0))
            events.append((True, False, one, 0))
            ahead = weight(at + 1, b - 1, one, f, g - 1)
            chances.append((chance, ahead, (g > 0) & ~locked_out))
            events.append((False, True, 0, one))
            for other, (again, too) in enumerate(kinds):
                pulled = pull(at, jnp.zeros_like(at)) if kept and too else 1.0
                ahead = weight(at + b, 0, 0, f - 1, g - 1)
                chances.append((chance * again * pulled, ahead, (f > 0) & (g > 0) & ~locked_out))
                events.append((True, True, one, other))
        # In the unit of the largest exponent.
        unit = functools.reduce(
            jnp.maximum, [jnp.where(may, ahead[1], -(2**15)) for _, ahead, may in chances]
        )
        parts = [
            jnp.where(may, factor * ahead[0] * power_of_2(ahead[1] - unit), 0.0)
            for factor, ahead, may in chances
        ]
        reached = jnp.cumsum(jnp.stack(parts), axis=0)
        chosen = ((uniform_64(event_key, (num_samples,)) * reached[-1])[None] > reached).sum(axis=0)
        events = jnp.asarray(np.array(events, np.int32))[jnp.minimum(chosen, len(events) - 1)]
        events = jnp.where(some[:, None], events, 0)
        joins = jnp.stack([events[:, 0], events[:, 1]], axis=1)
        kept = joins * jnp.asarray([kept for _, kept in kinds], jnp.int32)[events[:, 2:]]
        by_replica = jnp.where(
            (free == 0)[:, None], jnp.stack([joins, kept]), jnp.stack([joins, kept])[:, :, ::-1]
        )
        joins, kept = by_replica
        left = left - joins
        both = joins.sum(axis=1) == 2
        alone = joins.sum(axis=1) == 1
        locked = jnp.where(alone, jnp.argmax(joins, axis=1).astype(jnp.int32), 0)
        kind = jnp.where(alone, jnp.where(events[:, 0] > 0, events[:, 2], events[:, 3]), 0)
        i = jnp.where(both, at + b, at + jnp.where(locked_out, s, 1))
        s = jnp.where(alone, jnp.where(locked_out, b - s, b - 1), 0)
        i = jnp.where(some, jnp.minimum(i, n), n)
        # States past the last step have no effect.
        position = jnp.where(some, at, n)
        return (i, s, kind, jnp.where(alone, locked, 1), left), (position, kept)

    nothing = jnp.zeros(num_samples, jnp.int32)
    left = jnp.full((num_samples, 2), k, jnp.int32)
    start = nothing, nothing, nothing, nothing + 1, left
    keys = threefry.split_array(key, 2 * k)
    _, (positions, kept) = jax.lax.scan(turn, start, keys)
    positions, kept = positions.T, kept.transpose(1, 0, 2).astype(jnp.float32)
    return positions, kept.sum(axis=2), kept[:, :, 0]
