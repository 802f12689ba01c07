"""Pairs of patterns with fixed numbers of participations, and what is certified from them, by enumeration."""

import functools
import math

import jax
import numpy as np
import pytest
from scipy import stats

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
from jaxacct.proposals.families.replicas import replica_proposal
from jaxacct.schemes.replicas import balanced_min_sep as replicas
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction
from tests.oracles import tuples
from tests.schemes.test_schemes import FALSE_ALARM, chi_square_p_value

# (scheme, bands, noise multiplier, n rows alone)
SETTINGS = [
    (BalancedMinSep(8, 3, 2), 3, 0.8, False),
    (BalancedMinSep(8, 3, 2.5, rotated=False), 3, 0.6, False),
    (BalancedMinSep(7, 1, 3), 1, 0.9, False),
    (BalancedMinSep(6, 2, 1.4), 2, 0.7, True),
    (BalancedMinSep(7, 3, 2), 3, 0.6, True),
    (BalancedMinSep(5, 5, 0.6), 4, 0.5, False),
    (BalancedMinSep(5, 5, 1), 5, 0.5, True),
    (BalancedMinSep(6, 6, 0.8), 6, 0.6, True),
    (EpochwiseAllocation(8, 3, 2), 2, 0.7, False),
    (EpochwiseAllocation(7, 4, 3), 3, 0.6, True),
    (EpochwiseAllocation(8, 3, 1), 1, 0.8, False),
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


def linear(scheme):
    """The scheme whose pairs are drawn, and ln of how many more patterns it has."""
    if not isinstance(scheme, BalancedMinSep):
        return scheme, 0.0
    found = BalancedMinSep(scheme.iterations, scheme.min_separation, scheme.participations, rotated=False)
    return found, found.log_num_patterns - scheme.log_num_patterns


@pytest.mark.parametrize(("scheme", "bands", "sigma", "finite"), SETTINGS)
def test_pairs_follow_the_enumerated_distribution(scheme, bands, sigma, finite, key):
    """The normalizer, the share of pairs that fit, and their distribution; a wrong one is rejected."""
    mechanism, num = mechanism_of(scheme, bands, sigma, finite), 60_000
    z, distribution = enumerated(mechanism)
    drawn, log_more = linear(scheme)
    z_drawn, _ = enumerated(Mechanism(drawn, mechanism.strategy, sigma))
    replicas = scheme.replicas
    log_z = replicas.log_normalizer(mechanism, 2)
    assert log_z == pytest.approx(math.log(z_drawn) + 2 * log_more, abs=1e-12)
    arrays = replicas.tables(mechanism, 2)
    positions, counts, mine, fits = map(
        np.asarray, jax.jit(lambda k: replicas.draw_fitting(k, scheme, arrays, num))(key)
    )
    share = z / math.exp(log_z)
    assert stats.binomtest(int(fits.sum()), num, min(share, 1.0)).pvalue > FALSE_ALARM
    assert np.diff(np.sort(np.where(positions < scheme.iterations, positions, -1), axis=1)).min() >= 0
    both, first = (np.zeros((num, scheme.iterations + 1)) for _ in range(2))
    for full, part in ((both, counts), (first, mine)):
        np.add.at(full, (np.arange(num)[:, None], positions), part)
    both, first = both[fits, :-1], first[fits, :-1]
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
    BalancedMinSep(3, 2, 2, rotated=False),
    EpochwiseAllocation(3, 2),
    EpochwiseAllocation(4, 3, 2),
]


@pytest.mark.parametrize(
    ("scheme", "propose"),
    [
        pytest.param(one, propose, marks=pytest.mark.slow if i in slow else (), id=f"{name}-scheme{i}")
        for propose, name, slow in (
            (replica_proposal, "replicas", (3, 4)),
            (pairs.pair_proposal, "pairs", (1, 2, 3, 4)),
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


def test_a_rotated_distribution_has_the_divergence_of_its_own_patterns(key):
    """Linear pairs are drawn by a cyclic chain: without the zero weights the mean would be larger."""
    scheme, sigma, epsilon = BalancedMinSep(5, 2, 2), 1.0, 0.5
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
    draws = replica_proposal(mechanism, 2, epsilon).draw(key, 0, 400)
    terms = np.exp(draws.log_weight) * -np.expm1(np.minimum(epsilon - draws.loss, 0))
    distribution = tuples.pattern_distribution(scheme)
    patterns, weights = np.array(list(distribution)), np.array(list(distribution.values()))
    rng = np.random.default_rng(0)
    x = patterns[rng.choice(len(patterns), 400_000, p=weights)]
    y = x + sigma * rng.standard_normal(x.shape)
    ratios = (np.exp((y - 0.5) @ patterns.T / sigma**2) * weights).sum(axis=1)
    other = np.maximum(1 - math.exp(epsilon) / ratios, 0)
    error = math.hypot(terms.std() / math.sqrt(terms.size), other.std() / math.sqrt(other.size))
    assert abs(terms.mean() - other.mean()) < 4.9 * error
    kept = np.exp(replicas.log_normalizer(mechanism, 2) - draws.loss)
    unweighted = kept * -np.expm1(np.minimum(epsilon - draws.loss, 0))
    assert unweighted.mean() - other.mean() > 4.9 * error


@pytest.mark.parametrize(
    ("scheme", "proposal"),
    [
        (ATTACKED[0], "replicas:2"),
        pytest.param(ATTACKED[1], "replicas:2", marks=pytest.mark.slow),
        (ATTACKED[3], "replicas:2"),
        (ATTACKED[4], "replicas:2"),
        (ATTACKED[1], "plain"),
        pytest.param(ATTACKED[0], "plain", marks=pytest.mark.slow),
        pytest.param(ATTACKED[3], "plain", marks=pytest.mark.slow),
        pytest.param(ATTACKED[4], "plain", marks=pytest.mark.slow),
    ],
    ids=str,
)
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
    assert replicas.max_replicas(mechanism_of(BalancedMinSep(7200, 256, 28), 256, 0.4, False)) == 1
    assert replicas.max_replicas(mechanism_of(BalancedMinSep(1000, 64, 4), 16, 0.4, False)) == 2


def test_attraction_beyond_float32_is_no_proposal():
    """Pairs of eight replicas at this noise once ended a calibration with an OverflowError."""
    mechanism = mechanism_of(BalancedMinSep(100, 16, 4), 8, 0.25, False)
    assert replicas.log_normalizer(mechanism, 2) == math.inf
    found = registry.candidates(Setting(mechanism, 8.0, Direction.REMOVE, None), lambda proposal: 1e9)
    assert all(math.isfinite(proposal.relative_error) for proposal in found)
    assert {proposal.name for proposal in found} <= {"plain", "replicas:2"}
