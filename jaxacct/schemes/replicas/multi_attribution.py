"""Two replicas of a user's counts under multi-attribution, weighed by dynamic programming, drawn by steps.

As for b-min-sep, but participations d steps apart with counts a and j attract by `E_d^{a j}`, so a state
also holds the count with which the barred replica took part: `U_i(s, a)` is the total weight from step i on
when one replica is free and the other barred for s more steps, having taken part b - s steps ago with count
a (0 for the virtual history of a warm start, which does not interact); s = 0 when both are free.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.b_min_sep import (
    MAX_TABLE_BYTES,
    attractions,
    draw_index,
    start_law,
    thresholds_of,
)
from jaxacct.schemes.replicas.base import Attracting, log_lift


def _numbers(mechanism: Attracting) -> float:
    """Numbers in the larger table."""
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.examples_per_user
    return float(n + b) * (b * (k + 1) * (k + 3) + (k + 1) ** 2) + 2.0 * b * b


def table_samples(mechanism: Attracting, m: int) -> float:
    """As for b-min-sep: a number of a table costs about five steps."""
    return 5 * _numbers(mechanism) / mechanism.scheme.iterations


def most_replicas(mechanism: Attracting) -> int:
    """2, or 1 where the tables of two do not fit."""
    return 2 if 8 * _numbers(mechanism) <= MAX_TABLE_BYTES else 1


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """(relative, total variation) errors of the law that `draw_counts` draws from.

    Every step rounds at most (k_u + 1)^2 probabilities to multiples of 2^-32, and the start 2 b.
    """
    scheme = mechanism.scheme
    cells = scheme.iterations * (scheme.examples_per_user + 1) ** 2 + 2 * scheme.min_separation
    return 0.0, cells * 2.0**-32


@functools.lru_cache(maxsize=64)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """ln Z_2, float64; inf where it overflows."""
    return _backward(mechanism)[0]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """The arrays that `draw_counts` needs."""
    _, weights, moves = _backward(mechanism)
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    alone = [thresholds_of(_law(_alone(weights, moves, i))) for i in range(n)] if b > 1 else []
    together = [thresholds_of(_law(_together(weights, moves, i).reshape(-1))) for i in range(n)]
    arrays = {"together": jnp.stack(together), "alone": jnp.stack(alone) if alone else None, "starts": None}
    if _warm(mechanism.scheme):
        joint = _starts(mechanism.scheme, weights)
        arrays["starts"] = [thresholds_of(_law(joint.sum(axis=1))), thresholds_of(_law(joint))]
    return arrays


def _warm(scheme) -> bool:
    return scheme.warm_start and scheme.min_separation > 1


def _law(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)


def _backward(mechanism: Attracting):
    """(ln Z_2, U of shape (n + b, b, k_u + 1), what `_alone` and `_together` need), backwards in time."""
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.examples_per_user
    counts = np.arange(k + 1)
    law = scheme.count_probabilities()
    with np.errstate(over="ignore", invalid="ignore"):
        attraction = attractions(mechanism)
        law = law * np.exp(log_lift(mechanism, 2) * counts)
        # Powers before products: an infinite attraction to the power 0 is 1.
        pairs = law[:, None] * law * attraction[:, 0, None, None] ** np.outer(counts, counts)
        s = np.arange(1, b)
        # (ends, b - 1, k + 1, k + 1)
        pulls = law * attraction[:, b - s, None, None] ** np.outer(counts, counts)
        moves = (n, b, k, pairs, pulls)
        weights = np.ones((n + b, b, k + 1))
        for i in range(n - 1, -1, -1):
            if b > 1:
                weights[i, 1:] = _alone(weights, moves, i).sum(axis=-1)
            weights[i, 0] = _together(weights, moves, i).sum()
        total = _starts(scheme, weights).sum() if _warm(scheme) else weights[0, 0, 0]
        log_z = float(np.log(total))
    return (log_z if math.isfinite(log_z) else math.inf), weights, moves


def _alone(weights, moves, i: int) -> np.ndarray:
    """(b - 1, k + 1, k + 1): of state (s, a) at step i, the weight of the free replica joining with j."""
    n, b, k, _, pulls = moves
    s = np.arange(1, b)
    parts = np.empty((b - 1, k + 1, k + 1))
    parts[:, :, 0] = weights[i + 1, : b - 1]
    # It is barred when the other is free again, s steps on.
    parts[:, :, 1:] = weights[i + s, b - s, 1:][:, None, :]
    return parts * pulls[min(n - 1 - i, len(pulls) - 1)]


def _together(weights, moves, i: int) -> np.ndarray:
    """(k + 1, k + 1): the weights of the counts of two free replicas at step i."""
    n, b, _, pairs, _ = moves
    after = np.empty(pairs.shape[1:])
    after[0, 0] = weights[i + 1, 0, 0]
    # Barred for b - 1 more steps from the next one on, which is not at all where b = 1.
    after[1:, 0] = after[0, 1:] = weights[i + 1, b - 1, 1:]
    after[1:, 1:] = weights[i + b, 0, 0]
    return after * pairs[min(n - 1 - i, len(pairs) - 1)]


def _starts(scheme, weights) -> np.ndarray:
    """(b, b): the weights of the two replicas' initial bars under a warm start."""
    b, n = scheme.min_separation, scheme.iterations
    law = start_law(scheme.timing)
    first, second = np.indices((b, b))
    earliest = np.minimum(first, second)
    reach = weights[np.minimum(earliest, n), np.abs(first - second), 0]
    return law[:, None] * law * reach


def draw_counts(key, scheme, arrays, num_samples: int):
    """Sums of two replicas' counts, (num_samples, iterations) float32."""
    return draw_with_one(key, scheme, arrays, num_samples)[0]


def draw_with_one(key, scheme, arrays, num_samples: int):
    """(`draw_counts`, the counts of one of the two, lifts given), float32."""
    n, b, k = scheme.iterations, scheme.min_separation, scheme.examples_per_user
    first_key, second_key, walk_key = threefry.split(key, 3)
    bars = jnp.zeros((2, num_samples), jnp.int32)
    if arrays["starts"] is not None:
        first = draw_index(first_key, arrays["starts"][0], num_samples)
        bars = jnp.stack([first, draw_index(second_key, arrays["starts"][1][first], num_samples)])
    bits = threefry.bits_32(walk_key, (n, num_samples, 1))
    steps = {"bits": bits, "together": arrays["together"]}
    if arrays["alone"] is not None:
        steps["alone"] = arrays["alone"]

    def step(state, at):
        bars, counts = state
        free = bars == 0
        pair = jnp.sum(at["bits"] >= at["together"], axis=-1).astype(jnp.int32)
        joined = jnp.where(free.all(axis=0), jnp.stack([pair // (k + 1), pair % (k + 1)]), 0)
        if b > 1:
            # The other one's bar and count decide; whoever is barred does not join.
            other, history = bars[::-1], counts[::-1]
            waits = free & (other > 0)
            row = jnp.maximum(bars.max(axis=0), 1) - 1
            thresholds = at["alone"][row, jnp.where(waits, history, 0).max(axis=0)]
            alone = jnp.sum(at["bits"] >= thresholds, axis=-1).astype(jnp.int32)
            joined = jnp.where(waits, alone, joined)
        counts = jnp.where(joined > 0, joined, counts)
        bars = jnp.maximum(jnp.where(joined > 0, b, bars) - 1, 0)
        return (bars, counts), (joined.sum(axis=0), joined[0])

    _, joined = jax.lax.scan(step, (bars, jnp.zeros_like(bars)), steps)
    together, alone = (part.T.astype(jnp.float32) for part in joined)
    return together, alone, together.sum(axis=1)
