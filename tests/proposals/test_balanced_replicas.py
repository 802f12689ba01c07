"""Pairs of patterns with fixed numbers of participations, and what is certified from them, by enumeration."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxacct import (
    BalancedMinSep,
    BandedToeplitz,
    EpochwiseAllocation,
    FiniteToeplitz,
    Mechanism,
    verify,
)
from jaxacct.kernels import randomness
from jaxacct.proposals import registry
from jaxacct.proposals.base import Setting
from jaxacct.proposals.families import pairs
from jaxacct.proposals.families.replicas import max_replicas, replica_proposal
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction
from tests.oracles import tuples
from tests.schemes.test_schemes import FALSE_ALARM, chi_square_p_value

# (scheme, bands, noise multiplier, n rows alone)
SETTINGS = [
    (BalancedMinSep(8, 3, 2), 3, 0.8, False),
    (BalancedMinSep(6, 2, 1.4), 2, 0.7, True),
    (EpochwiseAllocation(8, 3, 2), 2, 0.7, False),
    pytest.param(BalancedMinSep(5, 5, 0.6), 4, 0.5, False, marks=pytest.mark.slow),
    pytest.param(EpochwiseAllocation(8, 3, 1), 1, 0.8, False, marks=pytest.mark.slow),
]


def mechanism_of(scheme, bands, sigma, finite):
    strategy = BandedToeplitz.square_root(bands)
    if finite:
        strategy = FiniteToeplitz(strategy.coefficients, scheme.iterations)
    return Mechanism(scheme, strategy, sigma)


def enumerated(mechanism):
    """(Z_2, distribution of the sums of two patterns) of those of the scheme."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    rows = strategy.rows(scheme.iterations)
    return tuples.count_distribution(scheme, strategy.coefficients, mechanism.noise_multiplier, 2, rows)


@pytest.mark.parametrize(("scheme", "bands", "sigma", "finite"), SETTINGS)
def test_pairs_follow_the_enumerated_distribution(scheme, bands, sigma, finite, key):
    """The normalizer and the distribution of pairs; a wrong one is rejected."""
    mechanism, num = mechanism_of(scheme, bands, sigma, finite), 60_000
    z, distribution = enumerated(mechanism)
    replicas = scheme.replicas
    assert replicas.log_normalizer(mechanism, 2) == pytest.approx(math.log(z), abs=1e-12)
    arrays = replicas.tables(mechanism, 2)
    draw = jax.jit(lambda k: replicas.draw_positions_with_one(k, scheme, arrays, num))
    positions, counts, mine = map(np.asarray, draw(key))
    assert np.diff(np.sort(np.where(positions < scheme.iterations, positions, -1), axis=1)).min() >= 0
    both, first = (np.zeros((num, scheme.iterations + 1)) for _ in range(2))
    for full, part in ((both, counts), (first, mine)):
        np.add.at(full, (np.arange(num)[:, None], positions), part)
    both, first = both[:, :-1], first[:, :-1]
    assert chi_square_p_value(both, distribution) > FALSE_ALARM
    assert first.max() <= 1 and (both - first).min() >= 0 and (both - first).max() <= 1
    assert first.sum(axis=1).max() <= scheme.max_participations
    # The two are exchangeable.
    assert abs((2 * first - both).sum(axis=1).mean()) < 5 * math.sqrt(scheme.max_participations / len(both))
    relative, variation = replicas.errors(mechanism, 2)
    assert 0 < relative < 0.1 and 0 < variation < 1e-8
    _, other = enumerated(Mechanism(scheme, mechanism.strategy, 1.15 * sigma))
    if scheme.max_participations > 1:
        assert chi_square_p_value(both, other) < FALSE_ALARM


@functools.cache
def exact_delta(scheme, epsilon, sigma):
    """H(P, Q) and H(Q, P) of two or three steps with C = I, by the trapezoidal rule over all outputs."""
    distribution = tuples.pattern_distribution(scheme)
    patterns, weights = np.array(list(distribution), float), np.array(list(distribution.values()))
    axis = np.linspace(-7 * sigma, 1 + 7 * sigma, 160 if scheme.iterations < 4 else 60)
    normal = np.exp(-np.square(axis - np.array([[0.0], [1.0]])) / 2 / sigma**2)
    normal *= (axis[1] - axis[0]) / math.sqrt(2 * math.pi * sigma**2)

    def density(pattern):
        return functools.reduce(np.multiply.outer, [normal[int(one)] for one in pattern])

    q = density(np.zeros(scheme.iterations))
    p = sum(weight * density(pattern) for pattern, weight in zip(patterns, weights, strict=True))
    ratio = math.exp(epsilon)
    return float(np.maximum(p - ratio * q, 0).sum()), float(np.maximum(q - ratio * p, 0).sum())


ATTACKED = [
    BalancedMinSep(3, 1, 2),
    BalancedMinSep(3, 1, 1.5),
    BalancedMinSep(3, 2, 2),
    EpochwiseAllocation(3, 2),
    EpochwiseAllocation(4, 3, 2),
]


@pytest.mark.parametrize(
    ("scheme", "propose"),
    [
        pytest.param(one, propose, marks=pytest.mark.slow if i in slow else (), id=f"{name}-scheme{i}")
        for propose, name, slow in (
            (replica_proposal, "replicas", (1, 2, 3, 4)),
            (pairs.pair_proposal, "pairs", (0, 1, 2, 3, 4)),
        )
        for i, one in enumerate(ATTACKED)
    ],
)
def test_means_of_terms_are_the_divergence(scheme, propose, key):
    """Scale times mean of terms is H(P, Q), no term is above 1; false alarm 1e-6."""
    sigma, epsilon = 1.1, 0.8
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
    proposal = propose(mechanism, 2 if propose is replica_proposal else 4, epsilon)
    draws = proposal.draw(key, 0, 40_000 // randomness.BLOCK_SIZE)
    terms = np.exp(draws.log_weight - proposal.log_scale) * -np.expm1(np.minimum(epsilon - draws.loss, 0))
    assert terms.max() <= 1 + 1e-4
    exact = exact_delta(scheme, epsilon, sigma)[0]
    error = math.exp(proposal.log_scale) * terms.std() / math.sqrt(terms.size)
    assert abs(math.exp(proposal.log_scale) * terms.mean() - exact) < 4.9 * error + 1e-4 * exact


@pytest.mark.parametrize(("scheme", "proposal"), [(ATTACKED[0], "replicas:2")])
def test_claims_below_the_truth_are_rejected(scheme, proposal):
    """12 verifications at q = 1e-3 of a delta_v of 0.97 of the truth: three wrong ones have chance 2e-7."""
    sigma, epsilon = 1.1, 0.8
    truth = max(exact_delta(scheme, epsilon, sigma))
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
    budget = Budget(0.97 * truth + 1e-3, 0.97 * truth, 1e-3)

    def certified(run, budget, samples):
        given = dict(budget=budget, max_samples=samples, proposal=proposal, key=jax.random.key(run))
        return verify(mechanism, epsilon, budget.delta, **given).certified

    assert sum(certified(run, budget, 20_000) for run in range(12)) < 3
    assert certified(0, Budget(1.1 * truth + 1e-3, 1.1 * truth, 1e-3), 400_000)


def test_large_jobs_have_no_table():
    assert max_replicas(mechanism_of(BalancedMinSep(7200, 256, 28), 256, 0.4, False)) == 1
    assert max_replicas(mechanism_of(BalancedMinSep(1000, 64, 4), 16, 0.4, False)) == 2


@pytest.mark.parametrize("sigma", [0.03, 0.2])  # beyond float64, and where draws would be too inexact
def test_attraction_too_strong_to_draw_is_no_proposal(sigma):
    """Pairs of eight replicas at such noise once ended a calibration with an OverflowError."""
    mechanism = mechanism_of(BalancedMinSep(100, 16, 4), 8, sigma, False)
    assert mechanism.scheme.replicas.log_normalizer(mechanism, 2) == math.inf
    found = registry.candidates(Setting(mechanism, 8.0, Direction.REMOVE, None), lambda proposal: 1e9)
    assert all(math.isfinite(proposal.relative_error) for proposal in found)
    assert {proposal.name for proposal in found} <= {"plain", "replicas:2"}
