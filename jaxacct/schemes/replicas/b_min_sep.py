"""Replicas of b-min-sep participation: exact weights by dynamic programming, draws by thinning.

Two participation vectors interact only where participations are less than `bands` apart, with the factor
`E_d = exp(a_d / sigma^2)`, `a` the autocorrelation of the coefficients. Between events at least one of the
m replicas is free, so a state is how long each of the other m - 1 stays barred, in ascending order: a
replica barred for s more steps took part b - s steps ago. `U_i(state)` is the total weight from step i on
(proofs/derivations.md section 9, proofs/proposals.md). Where C has more bands than the separation, those
farther apart share rows too: every participation then has a factor for all of these, the `log_lift`
(proofs/non_banded.md, "Replicas").

A barred replica has the *code* s in 1..b-1; one whose history is virtual (warm start: it bars but does not
interact) has b - 1 + s; a free one 0. States are numbered in colexicographic order, so the states without
virtual history come first and have the same numbers in both tables. Balls-in-bins is p = 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.bars import moves, rank, start_states, states
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.randomness import exponential_64, uniform_64
from jaxacct.schemes.base import counts_at, log_probabilities
from jaxacct.schemes.replicas import aged
from jaxacct.schemes.replicas.base import (
    Attracting,
    begins_barred,
    draw_indices,
    log_lift,
    start_law,
    stationary_bars,
    thresholds_of,
)

# Of all arrays that are built; a process peaks at about three times this, and the device keeps a third.
MAX_TABLE_BYTES = 2.5e9
_SMALL_TABLES = 1e6  # bytes that take some milliseconds


def table_bytes(mechanism: Attracting, m: int) -> float:
    """Bytes of all tables of m replicas."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    real = 12.0 * (n + b) * math.comb(b + m - 2, m - 1)
    if not begins_barred(mechanism.scheme):
        return real
    return real + 12.0 * b * math.comb(2 * b + m - 3, m - 1) + 16.0 * b**m


def table_samples(mechanism: Attracting, m: int) -> float:
    """Samples drawn in the time the tables of m replicas take: a number of a table costs about five steps.

    Measured on a CPU at n = 1500: 0.16 microseconds a number, 30 a sample. Thrice that, because a calibration
    builds tables for every noise multiplier it looks at, and draws all samples for few.
    """
    return 3 * 5 * table_bytes(mechanism, m) / 12 / mechanism.scheme.iterations


def most_replicas(mechanism: Attracting) -> int:
    """The largest m up to 8 whose tables fit `MAX_TABLE_BYTES`; 1 where not even two replicas' do."""
    m = 1
    while m < 8 and table_bytes(mechanism, m + 1) <= MAX_TABLE_BYTES:
        m += 1
    return m


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """(relative, total variation) errors of the law that `draw_counts` draws from.

    Waits as in `BMinSep.draw_error`, of one walk for all replicas. A candidate is kept with a float32 ratio
    against a uniform that is as fine near 0, so the hazard of a step is off by some roundings of itself, and
    the chance of none by that over 1 - p. The m starts have thresholds of 2^-32 steps. Where attraction is so
    strong that more is needed, small tables are looked at and it is booked; with large ones `tables` refuses.
    """
    if _by_age(mechanism, m):
        return aged.errors(mechanism)
    scheme = mechanism.scheme
    p, walks = scheme.sampling_probability, scheme.iterations + 2 * scheme.max_participations
    if (lift := log_lift(mechanism, m)) > 0:
        p = p / (p + (1 - p) * math.exp(-lift))  # what becomes of it where nobody else takes part
    roundings = 20 * m * walks * (1.0 if p <= 0.5 else 0.5 / max(1 - p, 1e-300))
    relative = math.expm1(min(600.0, 2.0**-24 * roundings))
    if table_bytes(mechanism, m) <= _SMALL_TABLES:
        relative = max(relative, _needed_of(mechanism, m))
    return relative, m * scheme.min_separation * 2.0**-32


@functools.lru_cache(maxsize=256)
def _needed_of(mechanism: Attracting, m: int) -> float:
    arrays = _small_arrays(mechanism, m)
    return 0.0 if arrays is None else _needed(mechanism, m, arrays)


@functools.lru_cache(maxsize=4)  # looked at for the errors, and then drawn with
def _small_arrays(mechanism: Attracting, m: int) -> dict | None:
    return _backward(mechanism, m, with_hazards=True)[1]


@functools.lru_cache(maxsize=256)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """ln Z_m, float64; inf where it overflows."""
    if _by_age(mechanism, m):
        return aged.log_normalizer(mechanism)
    return _backward(mechanism, m, with_hazards=False)[0]


@functools.lru_cache(maxsize=256)
def log_normalizer_about(mechanism: Attracting, m: int) -> float:
    """ln Z_m to a relative 1e-4 or so, of long runs much sooner: a guide, nothing certified may rest on it.

    Backwards in time the weights soon grow alike with every step; what is left is as much more.
    """
    if _by_age(mechanism, m):
        return aged.log_normalizer(mechanism)
    return _backward(mechanism, m, with_hazards=False, about=m > 2)[0]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """The arrays that `draw_counts` needs, or `draw_with_one` alone where ages are told apart."""
    if _by_age(mechanism, m):
        return aged.tables(mechanism)
    small = table_bytes(mechanism, m) <= _SMALL_TABLES
    arrays = _small_arrays(mechanism, m) if small else _backward(mechanism, m, with_hazards=True)[1]
    if arrays is None:
        raise OverflowError(f"the tables of {m} replicas overflow")
    needed, booked = _needed(mechanism, m, arrays), errors(mechanism, m)[0]
    if not needed <= booked:
        raise ValueError(
            f"{m} replicas must attract each other less: float32 draws would be {needed:.2g} off their law, "
            f"beyond the {booked:.2g} that is put aside"
        )
    return arrays


def _needed(mechanism: Attracting, m: int, arrays) -> float:
    """How far off the law of `draw_positions` can be, relative, with these tables.

    Hazards are added up in float32 from all m taking part down to one, and what is left is nobody: each is
    off by some roundings of the sum that it ends. Where attraction makes all the others likely a rare one is
    that much further off. With p = 1 all is certain.
    """
    scheme = mechanism.scheme
    if scheme.sampling_probability == 1:
        return 0.0
    nobody = somebody = 0.0
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
                somebody = max(somebody, float(shares.max(initial=0.0)))
            nobody = max(nobody, float((reached / np.maximum(1 - reached, 0.0)).max()))
    steps, most = scheme.iterations, m * scheme.max_participations
    relative = 2.0**-24 * (m + 2) * (steps * nobody + most * somebody)
    return math.expm1(min(600.0, relative)) if relative >= 0 else math.inf


def _by_age(mechanism: Attracting, m: int) -> bool:
    """Whether tables are those of `aged`: of two replicas that share rows however far apart they are."""
    if m != 2 or mechanism.scheme.sampling_probability == 1:
        return False
    return log_lift(mechanism, m) > 0 and aged.longest_age(mechanism) > 0


def attractions(mechanism: Attracting) -> np.ndarray:
    """(ends, b + 1) float64: `E_d = exp(<c_i, c_{i-d}> / sigma^2)`, e to the `log_attractions`."""
    return np.exp(log_attractions(mechanism))


def log_attractions(mechanism: Attracting) -> np.ndarray:
    """(ends, b + 1) float64: `<c_i, c_{i-d}> / sigma^2` of participations d < b steps apart, 0 for d = b.

    Row k is for the later one at the step i = n - 1 - k, the last row for all earlier steps as well
    (`Strategy.products_from_end`). Those b steps apart or more are in `log_lift`.
    """
    strategy, b = mechanism.strategy, mechanism.scheme.min_separation
    if not strategy.is_toeplitz:
        raise TypeError("replicas need a Toeplitz strategy")
    shared = strategy.products_from_end(b + 1) / mechanism.noise_multiplier**2
    shared[:, b] = 0.0
    return shared


def _moves_at(n: int, attraction, transitions):
    """step -> `transitions` of the row of `attraction` for that step, the last one made kept."""

    @functools.lru_cache(maxsize=1)
    def of_row(row):
        return transitions(attraction[row])

    return lambda i: of_row(min(n - 1 - i, len(attraction) - 1))


def _transitions(b: int, m: int, p: float, q: float, attraction, num_codes: int):
    """For j = 0..m replicas taking part: (states concerned, weight, steps to the next state, its number).

    Args:
      p: weight of taking part: its probability, times e to the `log_lift`.
      q: probability of not taking part.
      attraction: (b + 1,) of the step that they take part at.
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
    """(ln Z_m, arrays for `draw_counts` or None) by the recurrence, backwards in time.

    Args:
      about: of ln Z_m a guide is enough, and no arrays are wanted.
    """
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0
    log_rest = 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        attraction = attractions(mechanism)
        lifted = p * np.exp(log_lift(mechanism, m))
        # Sums are scaled by q^-b, which must not come near the ends of float64.
        of_two = m == 2 and not with_hazards and n > 2 * b + len(attraction) and q**b > 1e-50
        moves_at = _moves_at(n, attraction, lambda row: _transitions(b, m, lifted, q, row, b))
        if of_two:
            real, hazards = _real_weights_of_two(n, b, lifted, q, attraction), None
        else:
            real, hazards = _real_weights(n, b, moves_at, with_hazards, len(attraction) if about else None)
            if (rest := n + b - len(real)) > 0:
                log_rest, n = rest * float(_growths(real, b).mean()), n - rest
        if begins_barred(scheme):
            moves_at = _moves_at(n, attraction, lambda row: _transitions(b, m, lifted, q, row, 2 * b - 1))
            if of_two:
                virtual, virtual_hazards = _virtual_weights_of_two(b, lifted, q, real), None
            else:
                virtual, virtual_hazards = _virtual_weights(n, b, moves_at, real, with_hazards)
            thresholds, total = _starts(n, b, m, scheme, virtual, with_hazards)
        else:
            virtual_hazards, thresholds, total = None, None, real[0, 0]
        log_z = float(np.log(total)) + log_rest
    if not np.isfinite(log_z):
        return math.inf, None
    if not with_hazards:
        return log_z, None
    arrays = {
        "hazards": _device(hazards),
        "virtual_hazards": _device(virtual_hazards) if virtual_hazards else None,
        "starts": thresholds,
        "rate": jnp.asarray(_rates(b, m, moves_at(0), hazards, virtual_hazards), jnp.float32),
    }
    return log_z, arrays


def _device(hazards):
    return [jax.device_put(h) for h in hazards]  # `jnp.asarray` would compile a program for each shape


def _real_weights(n: int, b: int, moves_at, with_hazards: bool, alike_before: int | None = None):
    """U, (n + b, number of states) float64, and for j = 1..m the float32 probabilities of j taking part.

    Args:
      moves_at: the `_transitions` of a step; only their weights depend on it.
      alike_before: so many steps before the end all steps are alike. The first ones are left out of U where
        its rows grow alike with every step; by default none are.
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
        if alike_before is not None and (n - i) % b == 0 and n - i >= max(2 * b, b + alike_before):
            growths = _growths(weights[i:], b)
            if i * np.ptp(growths) <= 3e-4 * n * growths.mean():
                return weights[i:], hazards
    return weights, hazards


def _growths(weights: np.ndarray, b: int) -> np.ndarray:
    """(b,) by how much the log of the weight with all free grew with a step, from each of the first b on."""
    return np.log(weights[:b, 0] / weights[b : 2 * b, 0]) / b


def _virtual_weights(n: int, b: int, moves_at, real, with_hazards: bool):
    """The same for the first b steps with virtual histories, (b, number of states)."""
    moves = moves_at(0)
    if not with_hazards:
        return _virtual_weights_alone(n, b, moves_at, real), None
    size, real_size = len(moves[0][0]), real.shape[1]
    weights = np.ones((b, size))
    hazards = [np.zeros((b, len(which)), np.float32) for which, *_ in moves[1:]]
    m = len(moves) - 1
    for i in range(min(b, n) - 1, -1, -1):
        # At step i a virtual history bars for b - 1 - i steps at most: codes below this, states up to here.
        codes, parts, reachable = 2 * b - 1 - i, [], []
        for j, (which, weight, delta, after) in enumerate(moves_at(i)):
            others = m - max(1, j)
            end = math.comb(codes + others - 1, others)
            delta, after = delta[:end], after[:end]
            # Beyond b steps no virtual history is left, and such states are never reached.
            late = (i + delta >= b) | (after < real_size)
            later = real.reshape(-1).take((i + delta) * real_size + np.minimum(after, real_size - 1))
            early = weights.reshape(-1).take(np.minimum(i + delta, b - 1) * size + after)
            parts.append(weight[:end] * np.where(late, later, early))
            reachable.append(_places(which, end))
        _add_up(weights[i], i, parts, reachable, hazards)
    return weights, hazards


def _virtual_weights_alone(n: int, b: int, moves_at, real) -> np.ndarray:
    """U of `_virtual_weights`, 0 where states are never reached: real ones in the rows that are looked up."""
    moves = moves_at(0)
    m, size, real_size = len(moves) - 1, len(moves[0][0]), real.shape[1]
    weights = np.zeros((2 * b, size))
    weights[: len(real), :real_size] = real[: 2 * b]
    weights[min(b, n) : b] = 1.0
    flat = weights.reshape(-1)
    offsets = [delta * size + after for _, _, delta, after in moves]
    for i in range(min(b, n) - 1, -1, -1):
        codes, parts, reachable = 2 * b - 1 - i, [], []
        for j, (which, weight, _, _) in enumerate(moves_at(i)):
            others = m - max(1, j)
            end = math.comb(codes + others - 1, others)
            parts.append(weight[:end] * flat[i * size :].take(offsets[j][:end]))
            reachable.append(_places(which, end))
        _add_up(weights[i], i, parts, reachable, None)
        weights[i, :real_size] = real[i]
    return weights


def _places(which: np.ndarray, end: int):
    """The first `end` of `which` as an index, a slice where it can be: that is five times as fast."""
    return slice(end) if end and which[end - 1] == end - 1 else which[:end]


def _real_weights_of_two(n: int, b: int, p: float, q: float, attraction) -> np.ndarray:
    """U of two replicas, (n + b, b) float64, b steps at a time; for n above 2 b and the rows of `attraction`.

    While one replica is barred for s steps more, only the other one acts, and at t = i + s both are known:
    after k steps without participation, or never, so that with r = b - s + k steps left for it at t

        U_i(s) = q^s U_t(0) + sum_{r = b-s}^{b-1} p q^{r-(b-s)} E_r U_t(r).

    Then t + r is at least i + b: what a sum needs of its own b steps looks beyond them itself. So two passes
    over b steps make all of them, and U_i(0) is a linear recurrence of what is b steps ahead.
    """
    # The last steps by `_real_weights`: a wait may end after the last step, and E may depend on the step.
    last = b + len(attraction)
    weights = np.ones((n + b, b))
    moves_at = _moves_at(last, attraction, lambda row: _transitions(b, 2, p, q, row, b))
    weights[n - last :] = _real_weights(last, b, moves_at, False)[0]
    pull = attraction[-1]
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
    """`q^s U_{i+s}(0) + sums_{i+s}(b - s)`, i = first..end-1, s = 1..b-1: what is known as the bar ends."""
    b = weights.shape[1]
    shape, (row, column) = (end - first, b - 1), sums.strides
    # Views by their strides, as `sliding_window_view` takes longer than all else: one row on with every s in
    # the first, and one column back besides in the second.
    free = np.ndarray(shape, float, weights, (first + 1) * weights.strides[0], 2 * weights.strides[:1])
    along = np.ndarray(shape, float, sums, (first + 1) * row + (b - 1) * column, (row, row - column))
    return waited * free + along


def _suffix_sums(weights: np.ndarray, chances: np.ndarray, q: float) -> np.ndarray:
    """`sum_{r >= v} q^{r-v} chances_r U(r)` for v = 0..b-1, of (steps, b) weights U."""
    scale = q ** np.arange(len(chances))
    return np.cumsum((weights * (scale * chances))[:, ::-1], axis=1)[:, ::-1] / scale


def _virtual_weights_of_two(b: int, p: float, q: float, real: np.ndarray) -> np.ndarray:
    """`_virtual_weights` of two replicas, (b, 2 b - 1), from U; n is above 2 b.

    As `_real_weights_of_two`, but who is barred by virtual history attracts nobody.
    """
    sums = _suffix_sums(real[: 2 * b], np.full(b, p), q)
    return np.concatenate([real[:b], _released(real, sums, q ** np.arange(1, b), 0, b)], axis=1)


def _add_up(row, i: int, parts, reachable, hazards) -> None:
    """Row i of the weights, and of the hazards, from the parts of j = 0..m replicas taking part."""
    row[reachable[0]] = parts[0]
    for which, part in zip(reachable[1:], parts[1:], strict=True):
        row[which] += part
    if hazards is not None:
        for hazard, which, part in zip(hazards, reachable[1:], parts[1:], strict=True):
            hazard[i, : len(part)] = part / row[which]


def _rates(b: int, m: int, moves, hazards, virtual_hazards) -> np.ndarray:
    """Rate of candidate events of each state: at least every hazard met until a barred replica is free."""
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
    """(tables to draw the m initial bars one after the other, Z_m), the bars from the stationary law."""
    earliest, number, chance = _start_states(b, m, scheme.sampling_probability)
    reach = np.where(earliest < n, virtual[earliest, number], 1.0)
    total = float((chance * reach).sum())
    if not with_thresholds or not np.isfinite(total):
        return None, total
    law, joint = start_law(scheme), np.empty((b,) * m)
    others = np.indices((b,) * (m - 1)).reshape(m - 1, -1).T
    chance = law[others].prod(axis=1)
    for first in range(b):
        ordered = np.sort(np.column_stack([np.full(len(others), first), others]), axis=1)
        joint[first] = (law[first] * chance * reach[rank(ordered)]).reshape((b,) * (m - 1))
    marginals = [joint.sum(axis=tuple(range(k, m))) for k in range(1, m + 1)]
    return [thresholds_of(part / part.sum(axis=-1, keepdims=True)) for part in marginals], total


@functools.lru_cache(maxsize=4)
def _start_states(b: int, m: int, p: float):
    """`start_states`, the same for every noise multiplier."""
    return start_states(b, m, stationary_bars(b, p))


def _draw_starts(key, arrays, b: int, m: int, num: int):
    """(first step with a free replica, ascending codes of the other m - 1) at the start."""
    if arrays["starts"] is None:
        return jnp.zeros(num, jnp.int32), jnp.zeros((num, m - 1), jnp.int32)
    bars = draw_indices([threefry.fold_in(key, k) for k in range(m)], arrays["starts"], num)
    bars = jnp.sort(jnp.stack(bars, axis=1), axis=1)
    left = bars[:, 1:] - bars[:, :1]
    return bars[:, 0], jnp.where(left > 0, left + b - 1, 0)


def _wait(codes, steps, b: int):
    """Codes after `steps` more steps without an event."""
    virtual = codes >= b
    remaining = jnp.maximum(jnp.where(virtual, codes - (b - 1), codes) - steps, 0)
    return remaining + jnp.where(virtual & (remaining > 0), b - 1, 0)


def draw_counts(key, scheme, arrays, num_samples: int):
    """Sums of m replicas' participation vectors, (num_samples, iterations) float32."""
    return counts_at(*draw_positions(key, scheme, arrays, num_samples), scheme.iterations)


def draw_with_one(key, scheme, arrays, num_samples: int):
    """(`draw_counts`, the participation vector of one of the m replicas, lifts given), float32."""
    if "ahead" in arrays:
        return aged.draw_with_one(key, scheme, arrays, num_samples)
    positions, counts, mine = draw_positions_with_one(key, scheme, arrays, num_samples)
    n = scheme.iterations
    return counts_at(positions, counts, n), counts_at(positions, mine, n), counts.sum(axis=1)


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """(`draw_positions`, how much of the counts is one of the m replicas': float32 of their shape).

    Not where ages are told apart. The same draws as those of `draw_with_one`.
    """
    walk_key, choice_key = threefry.split(key)
    positions, counts = draw_positions(walk_key, scheme, arrays, num_samples)
    mine = shares_of_one(choice_key, positions, counts, len(arrays["hazards"]), scheme.min_separation)
    return positions, counts, mine


def shares_of_one(key, positions, counts, m: int, b: int):
    """(num_samples, slots) float32: 1 where the first of m replicas is among those that take part.

    Replicas are alike, so whoever is free takes part with the same probability. The virtual history of those
    that did not take part yet is not known, and need not be: while one of them may be barred, the first b - 1
    steps, all that did take part are barred.

    Args:
      positions, counts: of `draw_positions`.
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


def draw_positions(key, scheme, arrays, num_samples: int):
    """The same sums as `(positions, counts)`, (num_samples, m max_participations) int32 and float32.

    Positions are distinct, ascending and in the first slots; iterations is no participation.

    Waits are drawn from a rate that no hazard of the state exceeds (a geometric law, exact) and then
    thinned to the hazard of the step at hand, so that no small difference of large numbers is ever taken in
    float32.
    """
    n, b, m = scheme.iterations, scheme.min_separation, len(arrays["hazards"])
    start_key, walk_key = threefry.split(key)
    step, codes = _draw_starts(start_key, arrays, b, m, num_samples)
    slots = m * scheme.max_participations
    positions = jnp.full((num_samples, slots), n, jnp.int32)
    counts = jnp.zeros((num_samples, slots), jnp.float32)
    slot = jnp.zeros(num_samples, jnp.int32)
    rows = jnp.arange(num_samples)

    def unfinished(state):
        return any_left(state[1] < n)

    def advance(state):
        turn, step, codes, slot, positions, counts = state
        wait_key, thin_key = threefry.split(threefry.fold_in(walk_key, turn))
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
        # u times the rate's probability against the hazards of m, m-1, .., 1 taking part, added up.
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
        # The first `taking` replicas, all free, are barred; then time runs on until one is free.
        bars = jnp.concatenate([jnp.zeros((num_samples, 1), jnp.int32), codes], axis=1)
        barred = jnp.where(bars >= b, bars - (b - 1), bars)
        joins = jnp.arange(m, dtype=jnp.int32)[None] < taking[:, None]
        shortest = jnp.min(jnp.where(joins, b, barred), axis=1)
        advance_by = jnp.where(released, 0, jnp.maximum(1, shortest))[:, None]
        moved = jnp.where(joins, b - advance_by, _wait(bars, advance_by, b))
        # Those just barred for b steps have moved at least one, so their codes are below b.
        codes = _all_but_the_least(moved)
        return turn + 1, jnp.minimum(at + advance_by[:, 0], n), codes, slot, positions, counts

    state = jnp.uint32(0), step, codes, slot, positions, counts
    return jax.lax.while_loop(unfinished, advance, state)[-2:]


def _ascending(codes):
    """Each row of (num, number) in ascending order."""
    return codes if codes.shape[1] == 1 else jnp.sort(codes, axis=1)


def _all_but_the_least(codes):
    """(num, number - 1), each row in ascending order. Of two a maximum: XLA sorts row by row."""
    return codes.max(axis=1, keepdims=True) if codes.shape[1] == 2 else jnp.sort(codes, axis=1)[:, 1:]


def _hazard(arrays, j: int, here, codes, b: int):
    """Probability that j replicas take part at step `here`; 0 where fewer are free."""
    free = jnp.all(codes[:, : j - 1] == 0, axis=1)
    number = rank(codes[:, j - 1 :])
    hazard = arrays["hazards"][j - 1]
    found = hazard[here, jnp.minimum(number, hazard.shape[1] - 1)]
    if arrays["virtual_hazards"] is not None:
        early = arrays["virtual_hazards"][j - 1]
        found = jnp.where(jnp.any(codes >= b, axis=1), early[jnp.minimum(here, b - 1), number], found)
    return jnp.where(free, found, 0.0)
