"""Replicas of b-min-sep participation: exact weights by dynamic programming, draws by thinning.

Two participation vectors interact only where participations are less than `bands` apart, with the factor
`E_d = exp(a_d / sigma^2)`, `a` the autocorrelation of the coefficients. States and codes are those of
`kernels.lockouts`; `U_i(state)` is the total weight from step i on (proofs/derivations.md section 9,
proofs/proposals.md). Where C has more bands than the separation, every participation has the factor
`log_lift` for those farther apart (proofs/non_banded.md, "Replicas"). Balls-in-bins is p = 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import lockouts, threefry
from jaxacct.kernels.lockouts import moves, rank, start_states, states
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.kernels.table import counts_at
from jaxacct.schemes.replicas import aged
from jaxacct.schemes.replicas.base import (
    MAX_TABLE_BYTES,
    MIN_ENTRY,
    Attracting,
    attractions,
    draw_indices,
    log_lift,
    start_distribution,
    starts_locked_out,
    stationary_lockouts,
    thresholds_of,
)

_SMALL_TABLES = 1e6  # bytes that take some milliseconds


def table_bytes(mechanism: Attracting, m: int) -> float:
    """Return the bytes of all tables of m replicas."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    real = 12.0 * (n + b) * math.comb(b + m - 2, m - 1)
    if not starts_locked_out(mechanism.scheme):
        return real
    return real + 12.0 * b * math.comb(2 * b + m - 3, m - 1) + 16.0 * b**m


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return how many samples are drawn in the time that the tables take: a number costs about five steps.

    Measured on a CPU at n = 1500: 0.16 microseconds a number, 30 a sample. Three times that, because a
    calibration builds tables for every noise multiplier and draws all samples for few of them.
    """
    return 3 * 5 * table_bytes(mechanism, m) / 12 / mechanism.scheme.iterations


def max_replicas(mechanism: Attracting) -> int:
    """Return the largest m up to 8 whose tables fit `MAX_TABLE_BYTES`, at least 1."""
    return max([1, *(m for m in range(2, 9) if table_bytes(mechanism, m) <= MAX_TABLE_BYTES)])


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Bound the (relative, total variation) errors of the distribution that `draw_counts` draws from.

    Waits are as in `BMinSep.draw_error`, of one walk for all replicas. A float32 ratio is compared with a
    uniform that is fine near 0, so the hazard of a step has a relative error of a few roundings, and the
    probability of no participation by that over 1 - p. Where strong attraction needs more, it is added for
    small tables, and `tables` refuses large ones. The m starts have thresholds of 2^-32 steps; at every step
    the m comparisons have a uniform in steps of 2^-64, and hazards below `MIN_ENTRY` < 2^-64 are dropped.
    """
    if _by_age(mechanism, m):
        return aged.errors(mechanism)
    scheme = mechanism.scheme
    p, walks = scheme.sampling_probability, scheme.iterations + 2 * scheme.max_participations
    if (lift := log_lift(mechanism, m)) > 0:
        p = p / (p + (1 - p) * math.exp(-lift))  # where no other replica participates
    roundings = 20 * m * walks * (1.0 if p <= 0.5 else 0.5 / max(1 - p, 1e-300))
    relative = math.expm1(min(600.0, 2.0**-24 * roundings))
    if table_bytes(mechanism, m) <= _SMALL_TABLES:
        relative = max(relative, _needed_of(mechanism, m))
    steps = 2 * m * scheme.iterations * 2.0**-64
    return relative, m * scheme.min_separation * 2.0**-32 + steps


@functools.lru_cache(maxsize=256)
def _needed_of(mechanism: Attracting, m: int) -> float:
    arrays = _small_arrays(mechanism, m)
    return 0.0 if arrays is None else _needed(mechanism, m, arrays)


@functools.lru_cache(maxsize=4)  # for the errors, and then for the draws
def _small_arrays(mechanism: Attracting, m: int) -> dict | None:
    return _backward(mechanism, m, with_hazards=True)[1]


@functools.lru_cache(maxsize=256)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m, float64; inf where it overflows."""
    if _by_age(mechanism, m):
        return aged.log_normalizer(mechanism)
    return _backward(mechanism, m, with_hazards=False)[0]


@functools.lru_cache(maxsize=256)
def log_normalizer_about(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m to a relative error of about 1e-4, in less time for long runs; not for certificates.

    Backwards in time the growth of the weights soon becomes the same at every step, and is extrapolated.
    """
    if _by_age(mechanism, m):
        return aged.log_normalizer(mechanism)
    return _backward(mechanism, m, with_hazards=False, about=m > 2)[0]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that `draw_counts` needs, or `draw_with_one` alone where `aged` has the tables."""
    if _by_age(mechanism, m):
        return aged.tables(mechanism)
    small = table_bytes(mechanism, m) <= _SMALL_TABLES
    arrays = _small_arrays(mechanism, m) if small else _backward(mechanism, m, with_hazards=True)[1]
    if arrays is None:
        raise OverflowError(f"the tables of {m} replicas overflow")
    needed, reserve = _needed(mechanism, m, arrays), errors(mechanism, m)[0]
    if not needed <= reserve:
        raise ValueError(
            f"{m} replicas must attract each other less: float32 draws would have an error of {needed:.2g}, "
            f"more than the reserve of {reserve:.2g}"
        )
    return arrays


def _needed(mechanism: Attracting, m: int, arrays) -> float:
    """Bound the relative error of the distribution of `draw_positions` with these tables.

    Hazards are added up in float32 from m participations down to one, and the rest is none: each has an
    error of a few roundings of the sum that it ends. Where attraction makes all others likely, the relative
    error of a rare one is larger by as much. At p = 1 nothing is random.
    """
    scheme = mechanism.scheme
    if scheme.sampling_probability == 1:
        return 0.0
    none = any_ = 0.0
    b = scheme.min_separation
    for hazards, codes in ((arrays["hazards"], b), (arrays["virtual_hazards"], 2 * b - 1)):
        if hazards is None:
            continue
        which = [move.which for move in moves(b, m, codes)][1:]
        hazards = [np.asarray(hazard, np.float64) for hazard in hazards]
        reached = np.zeros((len(hazards[0]), math.comb(codes + m - 2, m - 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            for hazard, places in reversed(list(zip(hazards, which, strict=True))):
                places = places[: hazard.shape[1]]
                reached[:, places] += hazard
                shares = np.where(hazard > 0, reached[:, places] / hazard, 0.0)
                any_ = max(any_, float(shares.max(initial=0.0)))
            none = max(none, float((reached / np.maximum(1 - reached, 0.0)).max()))
    steps, max_count = scheme.iterations, m * scheme.max_participations
    relative = 2.0**-24 * (m + 2) * (steps * none + max_count * any_)
    return math.expm1(min(600.0, relative)) if relative >= 0 else math.inf


def _by_age(mechanism: Attracting, m: int) -> bool:
    """Return whether the tables are those of `aged`: two replicas with column overlap at any distance."""
    if m != 2 or mechanism.scheme.sampling_probability == 1:
        return False
    return log_lift(mechanism, m) > 0 and aged.longest_age(mechanism) > 0


def _moves_at(n: int, attraction, transitions):
    """Return step -> `transitions` of the row of `attraction` for that step; the last one is cached."""

    @functools.lru_cache(maxsize=1)
    def of_row(row):
        return transitions(attraction[row])

    return lambda i: of_row(min(n - 1 - i, len(attraction) - 1))


def _transitions(b: int, m: int, p: float, q: float, attraction, num_codes: int):
    """Return for j = 0..m participations: (states, weight, steps to the next state, its number).

    p is the weight of a participation (its probability times e^`log_lift`), q the probability of none, and
    `attraction`, (b + 1,), that of the step.
    """
    found = []
    for j, move in enumerate(moves(b, m, num_codes)):
        pull = np.where(move.ago > 0, attraction[move.ago], 1.0).prod(axis=1)
        ways = np.array([math.comb(k, j) for k in range(m + 1)], float)[move.free]
        pairs = attraction[0] ** (j * (j - 1) // 2)
        weight = ways * p**j * q ** (move.free - j) * pairs * pull**j
        found.append((move.which, weight, move.delta, move.after))
    return found


def _backward(mechanism: Attracting, m: int, with_hazards: bool, about: bool = False):
    """Return (ln Z_m, arrays or None) by the recurrence; `about` is for `log_normalizer_about`."""
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0
    log_rest = 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        attraction = attractions(mechanism)
        lifted = p * np.exp(log_lift(mechanism, m))
        # Sums are scaled by q^-b, which must stay far from the limits of float64.
        of_two = m == 2 and not with_hazards and n > 2 * b + len(attraction) and q**b > 1e-50
        moves_at = _moves_at(n, attraction, lambda row: _transitions(b, m, lifted, q, row, b))
        if of_two:
            real, hazards = _real_weights_of_two(n, b, lifted, q, attraction), None
        else:
            real, hazards = _real_weights(n, b, moves_at, with_hazards, len(attraction) if about else None)
            if (rest := n + b - len(real)) > 0:
                log_rest, n = rest * float(_growths(real, b).mean()), n - rest
        if starts_locked_out(scheme):
            moves_at = _moves_at(n, attraction, lambda row: _transitions(b, m, lifted, q, row, 2 * b - 1))
            if of_two:
                virtual, virtual_hazards = lockouts.virtual_weights_of_two(b, lifted, q, real), None
            else:
                virtual, virtual_hazards = _virtual_weights(n, b, moves_at, real, with_hazards)
            thresholds, total = _starts(n, b, m, scheme, virtual, with_hazards)
        else:
            virtual_hazards, thresholds, total = None, None, real[0, 0]
        log_z = float(np.log(total)) + log_rest
    if not (with_hazards and np.isfinite(log_z)):
        return (log_z if np.isfinite(log_z) else math.inf), None
    return log_z, {
        "hazards": jax.device_put(hazards),
        "virtual_hazards": jax.device_put(virtual_hazards),
        "starts": thresholds,
        "rate": jnp.asarray(_rates(b, m, moves_at(0), hazards, virtual_hazards), jnp.float32),
    }


def _real_weights(n: int, b: int, moves_at, with_hazards: bool, num_last_steps: int | None = None):
    """Return U, (n + b, states) float64, and for j = 1..m the float32 probabilities of j participations.

    `moves_at` gives the `_transitions` of a step; only their weights depend on it. `num_last_steps` is the
    number of last steps that differ from the others: the first rows of U are omitted where its growth is
    constant.
    """
    moves = moves_at(0)
    size = len(moves[0][0])
    weights = np.empty((n + b, size))
    weights[n:] = 1.0
    flat = weights.reshape(-1)
    offsets = [delta * size + after for _, _, delta, after in moves]
    hazards = [np.zeros((n, len(which)), np.float32) for which, *_ in moves[1:]] if with_hazards else None
    reachable = [_places(which, len(which)) for which, *_ in moves]
    for i in range(n - 1, -1, -1):
        ahead = flat[i * size :]
        parts = [weight * ahead.take(at) for (_, weight, _, _), at in zip(moves_at(i), offsets, strict=True)]
        _add_up(weights[i], i, parts, reachable, hazards)
        if num_last_steps is not None and (n - i) % b == 0 and n - i >= max(2 * b, b + num_last_steps):
            growths = _growths(weights[i:], b)
            if i * np.ptp(growths) <= 3e-4 * n * growths.mean():
                return weights[i:], hazards
    return weights, hazards


def _growths(weights: np.ndarray, b: int) -> np.ndarray:
    """Return (b,) growth per step of the log weight with all replicas eligible, at the first b steps."""
    return np.log(weights[:b, 0] / weights[b : 2 * b, 0]) / b


def _virtual_weights(n: int, b: int, moves_at, real, with_hazards: bool):
    """Return U and the probabilities for the first b steps with virtual histories, (2 b, number of states).

    U is 0 where states are never reached; the rows from b on are those of `real`.
    """
    moves = moves_at(0)
    m, size, real_size = len(moves) - 1, len(moves[0][0]), real.shape[1]
    weights = np.zeros((2 * b, size))
    weights[: len(real), :real_size] = real[: 2 * b]
    weights[min(b, n) : b] = 1.0
    flat = weights.reshape(-1)
    offsets = [delta * size + after for _, _, delta, after in moves]
    hazards = [np.zeros((b, len(which)), np.float32) for which, *_ in moves[1:]] if with_hazards else None
    for i in range(min(b, n) - 1, -1, -1):
        # At step i a virtual lockout lasts b - 1 - i steps at most: codes below this, states up to `end`.
        codes, parts, reachable = 2 * b - 1 - i, [], []
        for j, (which, weight, _, _) in enumerate(moves_at(i)):
            others = m - max(1, j)
            end = math.comb(codes + others - 1, others)
            parts.append(weight[:end] * flat[i * size :].take(offsets[j][:end]))
            reachable.append(_places(which, end))
        _add_up(weights[i], i, parts, reachable, hazards)
        weights[i, :real_size] = real[i]
    return weights, hazards


def _places(which: np.ndarray, end: int):
    """Return the first `end` of `which` as an index, where possible as a slice: five times as fast."""
    return slice(end) if end and which[end - 1] == end - 1 else which[:end]


def _real_weights_of_two(n: int, b: int, p: float, q: float, attraction) -> np.ndarray:
    """Return U of two replicas, (n + b, b) float64, for n above 2 b and the rows of `attraction`."""
    # The last steps by `_real_weights`: a wait may end after the last step, and E may depend on the step.
    last = b + len(attraction)
    moves_at = _moves_at(last, attraction, lambda row: _transitions(b, 2, p, q, row, b))
    return lockouts.weights_of_two(n, p, q, attraction[-1], _real_weights(last, b, moves_at, False)[0])


def _add_up(row, i: int, parts, reachable, hazards) -> None:
    """Set row i of the weights, and of the hazards, from the parts of j = 0..m participations."""
    row[reachable[0]] = parts[0]
    for which, part in zip(reachable[1:], parts[1:], strict=True):
        row[which] += part
    if hazards is not None:
        for hazard, which, part in zip(hazards, reachable[1:], parts[1:], strict=True):
            share = part / row[which]
            hazard[i, : len(part)] = np.where(share >= MIN_ENTRY, share, 0.0)


def _rates(b: int, m: int, moves, hazards, virtual_hazards) -> np.ndarray:
    """Return the rate of candidate events of each state: at least every hazard until a lockout ends."""
    largest = np.zeros(len(moves[0][0]))
    for tables_, number in ((hazards, len(hazards[0][0])), (virtual_hazards, len(largest))):
        if tables_ is None:
            continue
        total = tables_[0].astype(np.float64)
        highest = total.max(axis=0)
        # A sum of maxima, not the maximum of the sum: larger, which thinning allows.
        for hazard, (which, *_) in zip(tables_[1:], moves[2:], strict=True):
            inside = which[which < number][: hazard.shape[1]]
            highest[inside] += hazard.max(axis=0)
        largest[:number] = np.maximum(largest[:number], highest)
    codes = states(2 * b - 1 if len(largest) > len(hazards[0][0]) else b, m - 1)
    remaining = np.where(codes >= b, codes - (b - 1), codes)
    shortest = np.where(remaining > 0, remaining, b).min(axis=1, initial=b)
    waited = moves[0][3]
    for r in range(2, b):
        here = np.flatnonzero(shortest == r)
        largest[here] = np.maximum(largest[here], largest[waited[here]])
    with np.errstate(divide="ignore"):  # a certain event (p = 1) has an infinite rate
        return -np.log1p(-np.minimum(1.0, largest * (1 + 1e-6)))


def _starts(n: int, b: int, m: int, scheme, virtual, with_thresholds: bool):
    """Return (tables to draw the m initial lockouts one after the other, Z_m) for a stationary start."""
    earliest, number, chance = _start_states(b, m, scheme.sampling_probability)
    reach = np.where(earliest < n, virtual[earliest, number], 1.0)
    total = float((chance * reach).sum())
    if not with_thresholds or not np.isfinite(total):
        return None, total
    distribution, joint = start_distribution(scheme), np.empty((b,) * m)
    others = np.indices((b,) * (m - 1)).reshape(m - 1, -1).T
    chance = distribution[others].prod(axis=1)
    for first in range(b):
        ordered = np.sort(np.column_stack([np.full(len(others), first), others]), axis=1)
        joint[first] = (distribution[first] * chance * reach[rank(ordered)]).reshape((b,) * (m - 1))
    marginals = [joint.sum(axis=tuple(range(k, m))) for k in range(1, m + 1)]
    return [thresholds_of(part / part.sum(axis=-1, keepdims=True)) for part in marginals], total


@functools.lru_cache(maxsize=4)
def _start_states(b: int, m: int, p: float):
    """Return `start_states`, the same for every noise multiplier."""
    return start_states(b, m, stationary_lockouts(b, p))


def _draw_starts(key, arrays, b: int, m: int, num: int):
    """Draw (first step with an eligible replica, ascending codes of the other m - 1) at the start."""
    if arrays["starts"] is None:
        return jnp.zeros(num, jnp.int32), jnp.zeros((num, m - 1), jnp.int32)
    drawn = draw_indices([threefry.fold_in(key, k) for k in range(m)], arrays["starts"], num)
    initial = jnp.sort(jnp.stack(drawn, axis=1), axis=1)
    left = initial[:, 1:] - initial[:, :1]
    return initial[:, 0], jnp.where(left > 0, left + b - 1, 0)


def draw_counts(key, scheme, arrays, num_samples: int):
    """Draw sums of m replicas' participation vectors, (num_samples, iterations) float32."""
    return counts_at(*draw_positions(key, scheme, arrays, num_samples), scheme.iterations)


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Draw (sums as `draw_counts`, the participation vector of one replica, lifts), float32."""
    if "ahead" in arrays:
        return aged.draw_with_one(key, scheme, arrays, num_samples)
    positions, counts, mine = draw_positions_with_one(key, scheme, arrays, num_samples)
    n = scheme.iterations
    return counts_at(positions, counts, n), counts_at(positions, mine, n), counts.sum(axis=1)


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Draw `draw_with_one` as positions, counts and one replica's part; not with the tables of `aged`."""
    walk_key, choice_key = threefry.split(key)
    positions, counts = draw_positions(walk_key, scheme, arrays, num_samples)
    mine = lockouts.shares_of_one(
        choice_key, positions, counts, len(arrays["hazards"]), scheme.min_separation
    )
    return positions, counts, mine


def draw_positions(key, scheme, arrays, num_samples: int):
    """Draw the same sums as `lockouts.draw_positions` has them, in m max_participations slots."""
    n, b, m = scheme.iterations, scheme.min_separation, len(arrays["hazards"])
    start_key, walk_key = threefry.split(key)
    step, codes = _draw_starts(start_key, arrays, b, m, num_samples)
    return lockouts.draw_positions(walk_key, step, codes, arrays, n, b, m * scheme.max_participations)
