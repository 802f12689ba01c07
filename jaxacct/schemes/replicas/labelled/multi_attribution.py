"""Two replicas of a user's counts under multi-attribution: weights by dynamic programming, draws by steps.

As for b-min-sep, but participations d steps apart with counts a and j attract by `E_d^{a j}`, so a label of a
participation is its count (`labelled.walk`).
"""

import functools

import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.base import MAX_TABLE_BYTES, Attracting, attractions, log_lift
from jaxacct.schemes.replicas.labelled.walk import Chain, backward, walk
from jaxacct.schemes.replicas.labelled.walk import tables as walk_tables


def _numbers(mechanism: Attracting) -> float:
    """Return the size of the larger table."""
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.examples_per_user
    return float(n + b) * (b * (k + 1) * (k + 3) + (k + 1) ** 2) + 2.0 * b * b


def fits(mechanism: Attracting) -> bool:
    """Return whether the tables of two replicas fit."""
    return mechanism.strategy.is_toeplitz and 8 * _numbers(mechanism) <= MAX_TABLE_BYTES


def errors(mechanism: Attracting) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from.

    Every step rounds at most (k_u + 1)^2 probabilities to multiples of 2^-32, and the start 2 b.
    """
    scheme = mechanism.scheme
    cells = scheme.iterations * (scheme.examples_per_user + 1) ** 2 + 2 * scheme.min_separation
    return 0.0, cells * 2.0**-32


@functools.lru_cache(maxsize=64)
def log_normalizer(mechanism: Attracting) -> float:
    """Return ln Z_2, float64; inf where it overflows."""
    return backward(_chain(mechanism))[0]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting) -> dict:
    """Return the arrays that `draw_with_one` needs."""
    chain = _chain(mechanism)
    return walk_tables(chain, backward(chain)[1])


def _chain(mechanism: Attracting) -> Chain:
    scheme = mechanism.scheme
    n, b, k = scheme.iterations, scheme.min_separation, scheme.examples_per_user
    counts, s = np.arange(k + 1), np.arange(1, b)
    with np.errstate(over="ignore", invalid="ignore"):
        attraction = attractions(mechanism)
        distribution = scheme.count_probabilities() * np.exp(log_lift(mechanism) * counts)
        # Powers before products: an infinite attraction to the power 0 is 1.
        pairs = (
            distribution[:, None] * distribution * attraction[:, 0, None, None] ** np.outer(counts, counts)
        )
        # (ends, b - 1, k + 1, k + 1)
        pulls = distribution * attraction[:, b - s, None, None] ** np.outer(counts, counts)

    def alone(weights, i):
        """Return the weights of the free replica joining with j."""
        parts = np.empty((b - 1, k + 1, k + 1))
        parts[:, :, 0] = weights[i + 1, : b - 1]
        # It is locked out when the other is free again, s steps on.
        parts[:, :, 1:] = weights[i + s, b - s, 1:][:, None, :]
        return parts * pulls[min(n - 1 - i, len(pulls) - 1)]

    def together(weights, i):
        """Return ((k + 1)^2,): the counts of both."""
        after = np.empty(pairs.shape[1:])
        after[0, 0] = weights[i + 1, 0, 0]
        # Locked out for b - 1 more steps from the next one on, which is 0 steps for b = 1.
        after[1:, 0] = after[0, 1:] = weights[i + 1, b - 1, 1:]
        after[1:, 1:] = weights[i + b, 0, 0]
        return (after * pairs[min(n - 1 - i, len(pairs) - 1)]).reshape(-1)

    return Chain(scheme.timing, k + 1, alone, together)


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Return the same as `table.draw_positions_with_one`."""
    together, alone, _ = draw_with_one(key, scheme, arrays, num_samples)
    n, slots = scheme.iterations, 2 * scheme.max_participations
    positions = jnp.sort(jnp.where(together > 0, jnp.arange(n, dtype=jnp.int32), n), axis=1)[:, :slots]
    counts, mine = (
        jnp.take_along_axis(part, positions, axis=1, mode="fill", fill_value=0.0)
        for part in (together, alone)
    )
    return positions, counts, mine


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (sums of all vectors, the counts of one of the two, lifts), float32."""
    size = scheme.examples_per_user + 1

    def labels_of(pair):
        return jnp.stack([pair // size, pair % size])

    # As short as counts allow, as there are as many as outputs.
    whole = jnp.int8 if 2 * size < 128 else jnp.int32

    def seen(joined):
        return joined.sum(axis=0).astype(whole), joined[0].astype(whole)

    joined = walk(threefry.split(key, 3), scheme.timing, arrays, num_samples, labels_of, seen)
    together, alone = (part.T.astype(jnp.float32) for part in joined)
    return together, alone, together.sum(axis=1)
