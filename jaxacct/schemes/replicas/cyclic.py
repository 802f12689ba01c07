"""Two replicas of random-phase cyclic Poisson participation; three and more are in `cyclic_many`.

Given two phases d apart, the possible participations in order of time are a chain that alternates between
the replicas, each overlapping only its neighbours: d steps apart within a round, b - d across rounds. So the
weight is a product of 2 x 2 transfer matrices, and draws are made forward with the weight of the remaining
sites.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas import cyclic_many
from jaxacct.schemes.replicas.base import (
    MAX_TABLE_BYTES,
    Attracting,
    attractions,
    draw_indices,
    log_lift,
    thresholds_in_order,
)


def max_replicas(mechanism: Attracting) -> int:
    """Return up to 8, while tables take seconds; 1 where those of two do not fit `MAX_TABLE_BYTES`."""
    scheme = mechanism.scheme
    ends = len(mechanism.strategy.products_from_end(1))
    # Four numbers for each: weights and probabilities in float64, and these in float32.
    numbers = 4.0 * scheme.min_separation * ends * (2 * scheme.max_participations + 1)
    if 20 * numbers > MAX_TABLE_BYTES:
        return 1
    m = 2
    while m < 8 and cyclic_many.fits(mechanism, m + 1):
        m += 1
    return m


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return 0 for two: their tables take no time."""
    return 0.0 if m == 2 else cyclic_many.table_samples(mechanism, m)


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from.

    For two: a float32 probability against a uniform of 2^-32 steps at each site, and the phases' thresholds.
    """
    if m > 2:
        return cyclic_many.errors(mechanism, m)
    scheme = mechanism.scheme
    return 0.0, 2 * scheme.max_participations * 2.0**-23 + 2 * scheme.min_separation * 2.0**-32


@functools.lru_cache(maxsize=256)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m, float64; inf where it overflows."""
    if m > 2:
        return cyclic_many.log_normalizer(mechanism, m)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(_chains(mechanism)[-1].sum())
    return float(np.log(total)) if np.isfinite(total) else np.inf


@functools.lru_cache(maxsize=1)
def _chains(mechanism: Attracting):
    """Return (edges, `chain_weights`, rounds of each phase, rows of `edges` for phase pairs, weights)."""
    scheme = mechanism.scheme
    b, n, p = scheme.min_separation, scheme.iterations, scheme.sampling_probability
    with np.errstate(over="ignore", invalid="ignore"):
        edges = edge_weights(attractions(mechanism))
        joins = _joins(mechanism)
        remaining = chain_weights(edges, 2 * scheme.max_participations, joins, 1 - p)
        rounds = np.maximum(0, -(-(n - np.arange(b)) // b))
        early, late = np.sort(np.indices((b, b)), axis=0)
        sites = rounds[early] + rounds[late]
        # Distance of the last possible participation from the end.
        from_end = np.minimum((n - 1 - early) % b, (n - 1 - late) % b)
        end = np.minimum(from_end, edges.shape[1] - 1)
        after = remaining[late - early, end, np.maximum(sites - 1, 0), 0]
        start = np.where(sites > 0, after @ np.array([1 - p, joins]), 1.0) / b**2
    return edges, remaining, rounds, end, start


def _joins(mechanism: Attracting) -> float:
    """Return the weight of participating at a site: the probability times e^`log_lift` of two replicas."""
    return float(mechanism.scheme.sampling_probability * np.exp(log_lift(mechanism, 2)))


def edge_weights(attraction: np.ndarray) -> np.ndarray:
    """Return (b, ends, 3, 2) float64: how a site attracts the one before it if both participate.

    Indexed by the phases' distance, the distance of the last site from the end, the number of sites left
    after this one (2 stands for more: it is b steps or more from the end), and whether the edge between them
    is within a round (0) or across (1).
    """
    ends, b = len(attraction), attraction.shape[1] - 1
    lags = np.stack([np.arange(b), b - np.arange(b)], axis=1)
    last = np.arange(ends)[:, None]
    edges = np.empty((b, ends, 3, 2))
    edges[:, :, 0] = attraction[last, lags[:, None]]
    edges[:, :, 1] = attraction[np.minimum(last + lags[:, None, ::-1], ends - 1), lags[:, None]]
    edges[:, :, 2] = attraction[-1, lags[:, None]]
    return edges


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that `draw_with_one` needs."""
    if m > 2:
        return cyclic_many.tables(mechanism, m)
    scheme = mechanism.scheme
    p, skips = _joins(mechanism), 1 - scheme.sampling_probability
    most = 2 * scheme.max_participations
    edges, remaining, rounds, end, start = _chains(mechanism)
    # P(next site participates | this one's value): (gap, end, sites left after it, edge kind, value).
    take = np.zeros((*edges.shape[:2], most, 2, 2))
    for left in range(most):
        for value in (0, 1):
            edge = edges[:, :, min(left, 2)] if value else 1.0
            pull = p * edge * remaining[:, :, left, ::-1, 1]
            stay = skips * remaining[:, :, left, ::-1, 0]
            take[:, :, left, :, value] = pull / (pull + stay)
    ahead = remaining[:, :, :most, 0]
    first_take = p * ahead[..., 1] / (p * ahead[..., 1] + skips * ahead[..., 0])
    return {
        "phases": thresholds_in_order(start),
        "take": jnp.asarray(take, jnp.float32),
        "first_take": jnp.asarray(first_take, jnp.float32),
        "rounds": jnp.asarray(rounds, jnp.int32),
        "end": jnp.asarray(end, jnp.int32),
    }


def chain_weights(edges: np.ndarray, most: int, p: float, q: float) -> np.ndarray:
    """Return (b, ends, most + 1, 2, 2) float64: weight of the sites after this one.

    Indexed by the phases' distance, the distance of the last site from the end, the number of sites left, the
    kind of the next edge (0 within a round, 1 across) and this site's value.
    """
    weights = np.ones((*edges.shape[:2], most + 1, 2, 2))
    for left in range(1, most + 1):
        for kind in (0, 1):
            after = weights[:, :, left - 1, 1 - kind]
            pull = edges[:, :, min(left - 1, 2), kind]
            weights[:, :, left, kind, 0] = q * after[..., 0] + p * after[..., 1]
            weights[:, :, left, kind, 1] = q * after[..., 0] + p * pull * after[..., 1]
    return weights


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (sums of all vectors, the participation vector of one of the m replicas, lifts), float32."""
    if "starts" in arrays:
        return cyclic_many.draw_with_one(key, scheme, arrays, num_samples)
    b, n = scheme.min_separation, scheme.iterations
    first_key, second_key, chain_key = threefry.split(key, 3)
    one, two = draw_indices((first_key, second_key), arrays["phases"], num_samples)
    early, late = jnp.minimum(one, two), jnp.maximum(one, two)
    gap = late - early
    sites = arrays["rounds"][early] + arrays["rounds"][late]
    end = arrays["end"][one, two]
    most = arrays["take"].shape[2]
    uniforms = uniform_64(chain_key, (most, num_samples))

    def site(previous, inputs):
        index, u = inputs
        left = jnp.clip(sites - 1 - index, 0, most - 1)
        across = jnp.where(index % 2 == 1, 0, 1)  # the edge that leads to this site
        probability = jnp.where(
            index == 0,
            arrays["first_take"][gap, end, left],
            arrays["take"][gap, end, left, across, previous],
        )
        value = ((u <= probability) & (index < sites)).astype(jnp.int32)
        return value, value

    _, values = jax.lax.scan(site, jnp.zeros(num_samples, jnp.int32), (jnp.arange(most), uniforms))
    index = jnp.arange(most)[:, None]
    position = jnp.where(index % 2 == 0, early, late) + b * (index // 2)
    rows = jnp.arange(num_samples)
    nowhere = jnp.zeros((num_samples, n), jnp.float32)
    # The sites of the earlier phase are every other one.
    mine = (index % 2 == 0) == (one <= two)[None]
    values = values.astype(jnp.float32)
    counts, alone = (
        nowhere.at[rows, position].add(part, mode="drop") for part in (values, jnp.where(mine, values, 0.0))
    )
    return counts, alone, counts.sum(axis=1)
