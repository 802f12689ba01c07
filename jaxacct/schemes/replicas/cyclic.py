"""Replicas of random-phase cyclic Poisson participation.

Given m phases in ascending order, the possible participations in order of time are a chain that visits the
phases in turn. Each is less than b steps from the m - 1 before it, of the other replicas, and overlaps
no earlier one; so the state is which of the last m - 1 participated. Z_m is a mean over all tuples of phases.
A draw samples the phases from their joint distribution, then goes forward through the chain with the weight
of the remaining sites, which is computed for the drawn phases (proofs/proposals.md, section 2.4).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.lockouts import rank, states
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas.base import (
    Attracting,
    draw_indices,
    log_attractions,
    log_lift,
    thresholds_in_order,
)

_MAX_TUPLES = 2.0e6  # of phases, in any order
_MAX_NUMBERS = 1.0e8  # computed for Z_m: of ordered tuples, sites and states
_MORE_OF_TWO = 5  # two replicas may have so many times these


def max_replicas(mechanism: Attracting) -> int:
    """Return the largest m up to 8 whose tables take seconds and whose draws no longer than their losses."""
    scheme = mechanism.scheme

    def fits(m: int) -> bool:
        more = _MORE_OF_TWO if m == 2 else 1
        few = scheme.min_separation**m <= more * _MAX_TUPLES and _numbers(mechanism, m) <= more * _MAX_NUMBERS
        return few and m * scheme.max_participations <= 2 * scheme.iterations

    return next((m - 1 for m in range(2, 9) if not fits(m)), 8)


def _numbers(mechanism: Attracting, m: int) -> float:
    sites, b = m * mechanism.scheme.max_participations, mechanism.scheme.min_separation
    return float(math.comb(b + m - 1, m)) * sites * 2 ** (m - 1)


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the samples drawn in the time of the tables of m replicas: a number costs about a step."""
    return 3 * _numbers(mechanism, m) / mechanism.scheme.iterations


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from.

    The weights ahead have errors, but the same at one site as at the next: the product of the probabilities
    of all sites has the roundings of each sum alone. Logarithms there are at most those of the two chances
    and of the attraction of the last m - 1 sites. A probability is a float32 number, compared with a uniform
    one; phases have thresholds of 2^-32.
    """
    scheme, p = mechanism.scheme, mechanism.scheme.sampling_probability
    sites = m * scheme.max_participations
    largest = m**2 * float(log_attractions(mechanism).max()) + log_lift(mechanism, m)
    largest += abs(math.log(p)) + (abs(math.log1p(-p)) if p < 1 else 0.0)
    relative = math.expm1(min(600.0, sites * 2.0**-24 * (20 + 8 * largest)))
    return relative, sites * 2.0**-22 + m * scheme.min_separation * 2.0**-32


@functools.lru_cache(maxsize=256)
def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m, float64; inf where it overflows."""
    phases, totals = _totals(mechanism, m)
    with np.errstate(over="ignore"):
        mean = float(totals @ _orders(phases)) / float(mechanism.scheme.min_separation) ** m
    return math.log(mean) if math.isfinite(mean) else math.inf


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that `draw_with_one` needs."""
    p, b = mechanism.scheme.sampling_probability, mechanism.scheme.min_separation
    _, totals = _totals(mechanism, m)
    every = np.sort(np.indices((b,) * m).reshape(m, -1).T, axis=1)
    with np.errstate(divide="ignore"):
        chances = np.log(np.array([1 - p, p])) + np.array([0.0, log_lift(mechanism, m)])
    return {
        "starts": thresholds_in_order(totals[rank(every)].reshape((b,) * m)),
        "pulls": jnp.asarray(log_attractions(mechanism), jnp.float32),
        "chances": jnp.asarray(chances, jnp.float32),
    }


def _orders(phases: np.ndarray) -> np.ndarray:
    """Return (tuples,) float64: the number of orders of the phases of an ascending tuple."""
    orders = np.full(len(phases), float(math.factorial(phases.shape[1])))
    run = np.ones(len(phases))
    for place in range(1, phases.shape[1]):
        run = np.where(phases[:, place] == phases[:, place - 1], run + 1, 1)
        orders /= run
    return orders


@functools.lru_cache(maxsize=4)
def _totals(mechanism: Attracting, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ascending tuples of phases, (tuples, m); the total weight of the chain of each, float64)."""
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    phases, last = states(b, m), np.arange(2 ** (m - 1))
    weights = np.ones((len(phases), last.size))
    with np.errstate(over="ignore", invalid="ignore"):
        attraction = np.exp(log_attractions(mechanism))
        joins = p * np.exp(log_lift(mechanism, m))

        def pulls(j, row):
            pull = np.full_like(weights, joins)
            for ago in range(1, m):
                apart = phases[:, j] - phases[:, j - ago] + (b if ago > j else 0)
                pull *= np.where(last >> (ago - 1) & 1, attraction[row, apart][:, None], 1.0)
            return pull

        far_from_end = [pulls(j, -1) for j in range(m)]
        stay = (last << 1) & (last.size - 1)
        for site in range(m * scheme.max_participations - 1, -1, -1):
            turn, j = divmod(site, m)
            position = phases[:, j] + turn * b
            row = n - 1 - position
            near = row.min() < len(attraction) - 1
            pull = pulls(j, np.clip(row, 0, len(attraction) - 1)) if near else far_from_end[j]
            found = (1 - p) * weights[:, stay] + pull * weights[:, stay | 1]
            weights = np.where((position < n)[:, None], found, weights) if row.min() < 0 else found
    return phases, weights[:, 0]


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (sums of m participation vectors, one of these, lifts), float32; see `replicas.base`."""
    n, b, m = scheme.iterations, scheme.min_separation, len(arrays["starts"])
    phase_key, chain_key = threefry.split(key)
    drawn = draw_indices([threefry.fold_in(phase_key, k) for k in range(m)], arrays["starts"], num_samples)
    phases = jnp.sort(jnp.stack(drawn), axis=0)
    sites = jnp.arange(m * scheme.max_participations)
    positions = phases[sites % m] + b * (sites // m)[:, None]
    take = _take_probabilities(scheme, arrays, phases, positions)
    uniforms = uniform_64(chain_key, positions.shape)
    columns = jnp.arange(num_samples)

    def site(last, at):
        probabilities, u = at
        value = (u <= probabilities[last, columns]).astype(jnp.int32)
        return ((last << 1) | value) & (2 ** (m - 1) - 1), value

    _, values = jax.lax.scan(site, jnp.zeros(num_samples, jnp.int32), (take, uniforms))
    # Replicas of one phase are exchangeable, so the first of them is the one.
    mine = sites[:, None] % m == jnp.argmax(phases == drawn[0][None], axis=0)[None]
    nowhere = jnp.zeros((num_samples, n), jnp.float32)
    values = values.astype(jnp.float32)
    together, alone = (
        nowhere.at[columns, positions].add(part, mode="drop") for part in (values, jnp.where(mine, values, 0))
    )
    return together, alone, together.sum(axis=1)


def _take_probabilities(scheme, arrays, phases, positions):
    """Return (sites, states, num_samples) float32: of participating at each site, given the last ones."""
    n, b, m = scheme.iterations, scheme.min_separation, len(phases)
    last = np.arange(2 ** (m - 1))
    stay = (last << 1) & (last.size - 1)
    ends = arrays["pulls"].shape[0]

    def site(ahead, at):
        j, position = at
        row = jnp.clip(n - 1 - position, 0, ends - 1)
        pull = jnp.zeros_like(ahead)
        for ago in range(1, m):
            apart = phases[j] - phases[(j - ago) % m] + jnp.where(ago > j, b, 0)
            pull = pull + jnp.where((last >> (ago - 1) & 1)[:, None], arrays["pulls"][row, apart], 0.0)
        joins = arrays["chances"][1] + pull + ahead[stay | 1]
        skips = arrays["chances"][0] + ahead[stay]
        there = position < n
        found = jnp.logaddexp(joins, skips)
        found = jnp.where(there, found - found.max(axis=0, keepdims=True), ahead)
        return found, jnp.where(there, jax.nn.sigmoid(joins - skips), 0.0)

    inputs = jnp.arange(len(positions)) % m, positions
    nothing = jnp.zeros((last.size, positions.shape[1]), jnp.float32)
    return jax.lax.scan(site, nothing, inputs, reverse=True)[1]
