"""Replicas of balls-in-bins participation (also b-min-sep at p = 1): only m phases are random.

Two replicas with phases f and f' = f + d coincide at lag d, as often as f' participates, and at lag b - d,
once less than f does. So the weight of m phases is a product over pairs, `Z_m` a mean over b^m tuples, and a
draw samples the phases one after the other from its marginals (proofs/proposals.md, section 2.3).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.base import (
    Attracting,
    draw_indices,
    log_attractions,
    log_lift,
    thresholds_in_order,
)

# Tuples of phases; building the tables takes about 24 bytes of memory for each.
MAX_TUPLES = 1.0e8


def max_replicas(mechanism: Attracting) -> int:
    """Return the largest m up to 8 with at most `MAX_TUPLES` tuples of phases, but at least 2."""
    b = mechanism.scheme.min_separation
    return 8 if b == 1 else max(2, min(8, int(math.log(MAX_TUPLES) / math.log(b) + 1e-9)))


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the samples drawn in the time of the tables of m replicas: a tuple costs about two steps."""
    return 2 * float(mechanism.scheme.min_separation) ** m / mechanism.scheme.iterations


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from.

    Each of m phases is drawn with b - 1 thresholds that are multiples of 2^-32.
    """
    return 0.0, m * mechanism.scheme.min_separation * 2.0**-32


@functools.lru_cache(maxsize=256)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m, float64; inf where it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        lifts = np.exp(log_lift(mechanism, m) * _turns(mechanism.scheme))
        total = _sum_of_tuples(pair_weights(mechanism), lifts, m)
    if not math.isfinite(total):
        return math.inf
    return math.log(total) - m * math.log(mechanism.scheme.min_separation)


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> list:
    """Return the thresholds that `draw_with_one` needs: of the first phase, the second given it, ..."""
    return thresholds_in_order(_joint(mechanism, m))


def pair_weights(mechanism: Attracting) -> np.ndarray:
    """Return (b, b) float64: `exp(<C x_f, C x_f'> / sigma^2)` for the participation vectors of two phases."""
    scheme = mechanism.scheme
    n, b = scheme.iterations, scheme.min_separation
    log_attraction = log_attractions(mechanism)
    phase = np.arange(b)
    times = _turns(scheme)
    # Distance of a phase's last turn from the end: all others are at least b away from it.
    from_end = np.clip(n - 1 - phase - b * np.maximum(times - 1, 0), 0, len(log_attraction) - 1)

    def met(times, from_end, lag):
        last = np.where(times > 0, log_attraction[from_end, lag], 0.0)
        return np.maximum(times - 1, 0) * log_attraction[-1, lag] + last

    # Phases whose columns are farther apart than the bands, in both directions, have weight 1.
    overlapping = np.flatnonzero((log_attraction != 0).any(axis=0))
    lags = {0, *overlapping.tolist(), *(b - overlapping[overlapping > 0]).tolist()}
    weights = np.ones((b, b))
    for lag in (lag for lag in lags if 0 <= lag < b):
        early, late = phase[: b - lag], phase[lag:]
        # Once round: from the later phase to the next turn of the earlier one.
        back = met(np.maximum(times[early] - 1, 0), from_end[early], b - lag) if lag else 0.0
        with np.errstate(over="ignore"):
            weights[early, late] = weights[late, early] = np.exp(met(times[late], from_end[late], lag) + back)
    return weights


def _turns(scheme) -> np.ndarray:
    """Return (b,) int64: number of participations of each phase."""
    n, b = scheme.iterations, scheme.min_separation
    return np.ceil(np.maximum(n - np.arange(b), 0) / b).astype(int)


def _sum_of_tuples(pairs: np.ndarray, lifts: np.ndarray, m: int) -> float:
    """Return the sum of the weights of all tuples of m phases, from (b, b) `pairs` and (b,) `lifts`."""
    if m == 1:
        return float(lifts.sum())
    if m == 2:
        return float(lifts @ pairs @ lifts)
    if m == 3:
        return float((np.outer(lifts, lifts) * pairs * ((pairs * lifts) @ pairs)).sum())
    # Given one phase, it is another weight of each of the others.
    each = (_sum_of_tuples(pairs, lifts * row, m - 1) for row in pairs)
    return float(sum(lift * of_others for lift, of_others in zip(lifts, each, strict=True)))


def _joint(mechanism: Attracting, m: int) -> np.ndarray:
    """Return (b,) * m float64: the weight of every tuple of phases."""
    pairs, b = pair_weights(mechanism), mechanism.scheme.min_separation
    joint = np.ones((b,) * m)
    with np.errstate(over="ignore"):
        lifts = np.exp(log_lift(mechanism, m) * _turns(mechanism.scheme))
        for axis in range(m):
            joint *= lifts.reshape([b if axis == other else 1 for other in range(m)])
        for axes in itertools.combinations(range(m), 2):
            joint *= pairs.reshape([b if axis in axes else 1 for axis in range(m)])
    return joint


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (sums of all vectors, the participation vector of one of the m replicas, lifts), float32."""
    n, b = scheme.iterations, scheme.min_separation
    phases = draw_indices([threefry.fold_in(key, k) for k in range(len(arrays))], arrays, num_samples)
    turns = jnp.stack([jax.nn.one_hot(phase, b, dtype=jnp.float32) for phase in phases])
    all_of_them, one = (jnp.tile(part, (1, -(-n // b)))[:, :n] for part in (turns.sum(axis=0), turns[0]))
    return all_of_them, one, all_of_them.sum(axis=1)
