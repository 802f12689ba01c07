"""Three and more participation vectors of b-min-sep sampling that attract each other, drawn together.

Two vectors interact only where participations are less than `bands` apart, with the factor
`E_d = exp(a_d / sigma^2)`, `a` the autocorrelation of the coefficients. States are those of
`kernels.lockouts`; `U_i(state)` is the total weight from step i on (proofs/derivations.md section 9,
proofs/proposals.md, section 2.2). Vectors are drawn event by event: waits at a rate that no hazard of the
state exceeds, thinned to the hazard of the step.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.lockouts import Move, moves, rank, start_states, states
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.randomness import minus_log_uniform
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.schemes.replicas.base import MIN_ENTRY, Attracting, attractions, log_lift, stationary_lockouts

MAX_TABLE_BYTES = 5e7  # of all arrays of one number of vectors


def fits(mechanism: Attracting, m: int) -> bool:
    """Return whether m vectors have tables: of b-min-sep below p = 1, and bands within the separation."""
    from jaxacct.schemes.b_min_sep import BMinSep

    scheme = mechanism.scheme
    is_known = type(scheme) is BMinSep and scheme.sampling_probability < 1 and mechanism.strategy.is_toeplitz
    return is_known and log_lift(mechanism) == 0 and _table_bytes(scheme, m) <= MAX_TABLE_BYTES


def _table_bytes(scheme, m: int) -> float:
    n, b = scheme.iterations, scheme.min_separation
    real = 12.0 * (n + b) * math.comb(b + m - 2, m - 1)
    return real + (12.0 * b * math.comb(2 * b + m - 3, m - 1) + 16.0 * b**m) * _is_locked_out(scheme)


def _is_locked_out(scheme) -> bool:
    """Return whether vectors may be locked out at the first step."""
    return scheme.warm_start and scheme.min_separation > 1


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Bound the (relative, total variation) errors of the distribution of `draw_counts`.

    A float32 hazard that is compared with a uniform has an error of a few roundings of the sum that it ends,
    and the probability of no participation by that over its own share: `_needed` bounds both for the tables.
    Waits are those of one walk for all vectors. The m starts have thresholds in steps of 2^-32; at every step
    the m comparisons have a uniform in steps of 2^-64, and hazards below `MIN_ENTRY` < 2^-64 are dropped.
    """
    scheme = mechanism.scheme
    walks, p = scheme.iterations + 2 * scheme.max_participations, scheme.sampling_probability
    roundings = 20 * m * walks * (1.0 if p <= 0.5 else 0.5 / (1 - p))
    relative = math.expm1(min(600.0, 2.0**-24 * roundings))
    steps = 2 * m * scheme.iterations * 2.0**-64
    return max(relative, _needed(mechanism, m)), m * scheme.min_separation * 2.0**-32 + steps


@functools.lru_cache(maxsize=64)
def _needed(mechanism: Attracting, m: int) -> float:
    """Bound the relative error of float32 hazards, which are added up from m participations down to one."""
    arrays = _backward(mechanism, m)[1]
    if arrays is None:
        return math.inf
    none = any_ = 0.0
    b = mechanism.scheme.min_separation
    for hazards, codes in ((arrays["hazards"], b), (arrays["virtual_hazards"], 2 * b - 1)):
        if hazards is None:
            continue
        which = [move.which for move in moves(b, m, codes)][1:]
        reached = np.zeros((len(hazards[0]), math.comb(codes + m - 2, m - 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            for hazard, places in reversed(list(zip(hazards, which, strict=True))):
                hazard, places = np.asarray(hazard, np.float64), places[: hazard.shape[1]]
                reached[:, places] += hazard
                any_ = max(any_, float(np.where(hazard > 0, reached[:, places] / hazard, 0.0).max(initial=0)))
            none = max(none, float((reached / np.maximum(1 - reached, 0.0)).max()))
    count = m * mechanism.scheme.max_participations
    relative = 2.0**-24 * (m + 2) * (mechanism.scheme.iterations * none + count * any_)
    return math.expm1(min(600.0, relative)) if relative >= 0 else math.inf


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m = ln E_Q f^m, float64; infinite where it overflows."""
    return _backward(mechanism, m)[0]


def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that `draw_counts` needs; OverflowError where there are none."""
    arrays = _backward(mechanism, m)[1]
    if arrays is None:
        raise OverflowError(f"the tables of {m} vectors overflow")
    return jax.device_put(arrays)


@functools.lru_cache(maxsize=4)  # for the scale, the errors and the draws
def _backward(mechanism: Attracting, m: int) -> tuple[float, dict | None]:
    """Return (ln Z_m, arrays or None) by the recurrence."""
    scheme = mechanism.scheme
    n, b = scheme.iterations, scheme.min_separation
    virtual_hazards = starts = None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weights_at = step_weights(mechanism, m, scheme.sampling_probability)
        real, hazards = _real_weights(n, b, m, weights_at)
        total = real[0, 0]
        if _is_locked_out(scheme):
            virtual, virtual_hazards = virtual_weights(n, b, m, weights_at, real)
            starts, total = _starts(n, b, m, scheme, virtual)
        log_z = float(np.log(total))
    if not np.isfinite(log_z):
        return math.inf, None
    rate = _rates(b, m, hazards, virtual_hazards).astype(np.float32)
    return log_z, dict(hazards=hazards, virtual_hazards=virtual_hazards, starts=starts, rate=rate)


def step_weights(mechanism: Attracting, m: int, p: float):
    """Return (steps after it, number of codes) -> the weights of 0 .. m participations at a step.

    `p` is the probability of an eligible vector's participation.
    """
    b, rows = mechanism.scheme.min_separation, attractions(mechanism)
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0

    @functools.lru_cache(maxsize=2)
    def of_row(row: int, codes: int) -> list[np.ndarray]:
        return [_weight(move, j, m, p, q, rows[row]) for j, move in enumerate(moves(b, m, codes))]

    return lambda after, codes: of_row(min(after, len(rows) - 1), codes)


def _weight(move: Move, j: int, m: int, p: float, q: float, attraction) -> np.ndarray:
    """Return (states,) the weight of j participations; `attraction`, (b + 1,), is that of the step."""
    attracted = np.where(move.ago > 0, attraction[move.ago], 1.0).prod(axis=1)
    ways = np.array([math.comb(k, j) for k in range(m + 1)], float)[move.free]
    return ways * p**j * q ** (move.free - j) * attraction[0] ** (j * (j - 1) // 2) * attracted**j


def _real_weights(n: int, b: int, m: int, weights_at):
    """Return U, (n + b, states) float64, and for j = 1..m the float32 probabilities of j participations."""
    of_moves = moves(b, m, b)
    size = len(of_moves[0].which)
    weights = np.empty((n + b, size))
    weights[n:] = 1.0
    offsets = [move.delta * size + move.after for move in of_moves]
    hazards = [np.zeros((n, len(move.which)), np.float32) for move in of_moves[1:]]
    for i in range(n - 1, -1, -1):
        ahead = weights.reshape(-1)[i * size :]
        parts = [
            weight * ahead.take(at) for weight, at in zip(weights_at(n - 1 - i, b), offsets, strict=True)
        ]
        _add_up(weights[i], i, parts, [move.which for move in of_moves], hazards)
    return weights, hazards


def virtual_weights(n: int, b: int, m: int, weights_at, real):
    """Return U and the probabilities for the first b steps with virtual histories, (2 b, number of states).

    U is 0 where states are never reached; the rows from b on are those of `real`.
    """
    of_moves = moves(b, m, 2 * b - 1)
    size, real_size = len(of_moves[0].which), real.shape[1]
    weights = np.zeros((2 * b, size))
    weights[: len(real), :real_size] = real[: 2 * b]
    weights[min(b, n) : b] = 1.0
    hazards = [np.zeros((b, len(move.which)), np.float32) for move in of_moves[1:]]
    for i in range(min(b, n) - 1, -1, -1):
        # At step i a virtual lockout lasts b - 1 - i steps at most: codes below this, states up to `end`.
        codes, parts, which = 2 * b - 1 - i, [], []
        for j, (move, weight) in enumerate(zip(of_moves, weights_at(n - 1 - i, 2 * b - 1), strict=True)):
            others = m - max(1, j)
            end = math.comb(codes + others - 1, others)
            places = (move.delta * size + move.after)[:end]
            parts.append(weight[:end] * weights.reshape(-1)[i * size :].take(places))
            which.append(move.which[:end])
        _add_up(weights[i], i, parts, which, hazards)
        weights[i, :real_size] = real[i]
    return weights, hazards


def _add_up(row, i: int, parts, which, hazards) -> None:
    """Set row i of the weights, and of the hazards, from the parts of j = 0..m participations."""
    row[which[0]] = parts[0]
    for places, part in zip(which[1:], parts[1:], strict=True):
        row[places] += part
    for hazard, places, part in zip(hazards, which[1:], parts[1:], strict=True):
        share = part / row[places]
        hazard[i, : len(part)] = np.where(share >= MIN_ENTRY, share, 0.0)


def _rates(b: int, m: int, hazards, virtual_hazards) -> np.ndarray:
    """Return the rate of candidate events of each state: at least every hazard until a lockout ends."""
    codes = b if virtual_hazards is None else 2 * b - 1
    of_moves = moves(b, m, codes)
    largest = np.zeros(len(of_moves[0].which))
    for tables_ in (hazards, virtual_hazards or hazards):
        highest = tables_[0].astype(np.float64).max(axis=0)
        # A sum of maxima, not the maximum of the sum: larger, which thinning allows.
        for hazard, move in zip(tables_[1:], of_moves[2:], strict=True):
            inside = move.which[move.which < len(highest)][: hazard.shape[1]]
            highest[inside] += hazard.max(axis=0)
        largest[: len(highest)] = np.maximum(largest[: len(highest)], highest)
    each = states(codes, m - 1)
    remaining = np.where(each >= b, each - (b - 1), each)
    shortest = np.where(remaining > 0, remaining, b).min(axis=1, initial=b)
    for r in range(2, b):
        here = np.flatnonzero(shortest == r)
        largest[here] = np.maximum(largest[here], largest[of_moves[0].after[here]])
    with np.errstate(divide="ignore"):  # a certain event has an infinite rate
        return -np.log1p(-np.minimum(1.0, largest * (1 + 1e-6)))


def _starts(n: int, b: int, m: int, scheme, virtual) -> tuple[list[np.ndarray], float]:
    """Return (thresholds of the m first lockouts one after the other, Z_m) for a stationary start."""
    distribution = stationary_lockouts(b, scheme.sampling_probability)
    total, reach = start_sum(n, b, m, distribution, virtual)
    joint = np.empty((b,) * m)
    others = np.indices((b,) * (m - 1)).reshape(m - 1, -1).T
    chance = distribution[others].prod(axis=1)
    for first in range(b):
        ordered = np.sort(np.column_stack([np.full(len(others), first), others]), axis=1)
        joint[first] = (distribution[first] * chance * reach[rank(ordered)]).reshape((b,) * (m - 1))
    marginals = [joint.sum(axis=tuple(range(k, m))) for k in range(1, m + 1)]
    cumulative = [(np.cumsum(part, -1) / part.sum(-1, keepdims=True))[..., :-1] for part in marginals]
    return [np.minimum(np.round(part * 2.0**32), 2.0**32 - 1).astype(np.uint32) for part in cumulative], total


def start_sum(n: int, b: int, m: int, distribution, virtual) -> tuple[float, np.ndarray]:
    """Return (Z_m for starts of a (b,) `distribution`, the weights of what follows each set of lockouts)."""
    earliest, number, chance = start_states(b, m, distribution)
    reach = np.where(earliest < n, virtual[earliest, number], 1.0)
    return float((chance * reach).sum()), reach


def draw_counts(key, scheme, arrays, num_samples: int):
    """Draw sums of m participation vectors, (num_samples, iterations) float32."""
    n, b, m = scheme.iterations, scheme.min_separation, len(arrays["hazards"])
    start_key, walk_key = jax.random.split(key)
    rows, counts = jnp.arange(num_samples), jnp.zeros((num_samples, n), jnp.float32)

    def unfinished(state):
        return any_left(state[1] < n)

    def advance(state):
        turn, step, codes, counts = state
        remaining = jnp.where(codes >= b, codes - (b - 1), codes)
        release = jnp.min(jnp.where(remaining > 0, remaining, n + b), axis=1)
        rate = arrays["rate"][rank(codes)]
        words = threefry.bits_32(jax.random.fold_in(walk_key, turn), (4, num_samples))
        low = [(word.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32) for word in words[2:]]
        wait = jnp.minimum(jnp.floor(minus_log_uniform(words[0], low[0]) / rate), n).astype(jnp.int32)
        released = wait >= release
        wait = jnp.minimum(wait, release)
        at = step + wait
        codes = jnp.sort(_wait(codes, wait[:, None], b), axis=1)
        here = jnp.minimum(at, n - 1)
        # u times the rate's probability against the hazards of m, m-1, .., 1 participations, added up.
        level = (words[1].astype(jnp.float32) + low[1]) * jnp.float32(2.0**-32) * -jnp.expm1(-rate)
        reached, taking = jnp.zeros(num_samples), jnp.zeros(num_samples, jnp.int32)
        for j in range(m, 0, -1):
            hazard = _hazard(arrays, j, here, codes, b)
            reached = reached + hazard
            taking = jnp.where((level <= reached) & (taking == 0) & (hazard > 0), j, taking)
        taking = jnp.where((at < n) & ~released, taking, 0)
        counts = counts.at[rows, here].add(taking.astype(jnp.float32))
        # The first `taking` vectors, all free, are locked out; then time runs until one is free.
        lockouts = jnp.concatenate([jnp.zeros((num_samples, 1), jnp.int32), codes], axis=1)
        locked_out = jnp.where(lockouts >= b, lockouts - (b - 1), lockouts)
        joins = jnp.arange(m, dtype=jnp.int32)[None] < taking[:, None]
        shortest = jnp.min(jnp.where(joins, b, locked_out), axis=1)
        advance_by = jnp.where(released, 0, jnp.maximum(1, shortest))[:, None]
        # Those just locked out for b steps advance by at least one, so their codes are below b.
        moved = jnp.where(joins, b - advance_by, _wait(lockouts, advance_by, b))
        return turn + 1, jnp.minimum(at + advance_by[:, 0], n), jnp.sort(moved, axis=1)[:, 1:], counts

    step, codes = _draw_starts(start_key, arrays["starts"], b, m, num_samples)
    return jax.lax.while_loop(unfinished, advance, (jnp.uint32(0), step, codes, counts))[-1]


def _draw_starts(key, thresholds, b: int, m: int, num: int):
    """Draw (first step with an eligible vector, ascending codes of the other m - 1) at the start."""
    if thresholds is None:
        return jnp.zeros(num, jnp.int32), jnp.zeros((num, m - 1), jnp.int32)
    drawn: list = []
    for word, rows in zip(threefry.bits_32(key, (m, num)), thresholds, strict=True):
        at = jax.lax.broadcast_to_rank(rows[tuple(drawn)], 2)
        drawn.append(jnp.sum(word[:, None] >= at, axis=-1).astype(jnp.int32))
    initial = jnp.sort(jnp.stack(drawn, axis=1), axis=1)
    left = initial[:, 1:] - initial[:, :1]
    return initial[:, 0], jnp.where(left > 0, left + b - 1, 0)


def _wait(codes, steps, b: int):
    """Return the codes after `steps` more steps without an event."""
    virtual = codes >= b
    remaining = jnp.maximum(jnp.where(virtual, codes - (b - 1), codes) - steps, 0)
    return remaining + jnp.where(virtual & (remaining > 0), b - 1, 0)


def _hazard(arrays, j: int, here, codes, b: int):
    """Return the probability that j vectors participate at step `here`; 0 where fewer are free."""
    number, hazard = rank(codes[:, j - 1 :]), arrays["hazards"][j - 1]
    found = hazard[here, jnp.minimum(number, hazard.shape[1] - 1)]
    if arrays["virtual_hazards"] is not None:
        early = arrays["virtual_hazards"][j - 1]
        found = jnp.where(jnp.any(codes >= b, axis=1), early[jnp.minimum(here, b - 1), number], found)
    return jnp.where(jnp.all(codes[:, : j - 1] == 0, axis=1), found, 0.0)
