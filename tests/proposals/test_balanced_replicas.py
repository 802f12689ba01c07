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
    Mechanism,
    verify,
)
from jaxacct.kernels import randomness
from jaxacct.proposals import registry
from jaxacct.proposals.base import Setting
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction
from tests.oracles import tuples
from tests.proposals_by_name import replica_proposal


def mechanism_of(scheme, bands, sigma):
    return Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)


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
    ("scheme", "m"),
    [
        pytest.param(one, m, marks=pytest.mark.slow if (m, i) != (2, 0) else (), id=f"replicas:{m}-scheme{i}")
        for m in (2, 4)
        for i, one in enumerate(ATTACKED)
    ],
)
def test_means_of_terms_are_the_divergence(scheme, m, key):
    """Scale times mean of terms is H(P, Q), no term is above 1; false alarm 1e-6."""
    sigma, epsilon = 1.1, 0.8
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
    proposal = replica_proposal(mechanism, m, epsilon)
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
    for scheme, bands, has in (
        (BalancedMinSep(7200, 256, 28), 256, False),
        (BalancedMinSep(1000, 64, 4), 16, True),
        (BalancedMinSep(100_000, 64, 1), 32, True),  # at most one participation
        (BalancedMinSep(100_000, 64, 1), 64, False),
    ):
        mechanism = mechanism_of(scheme, bands, 0.4)
        assert (scheme.replicas(mechanism) is not None) == has


@pytest.mark.parametrize("sigma", [0.03, 0.2])  # beyond float64, and where draws would be too inexact
def test_attraction_too_strong_to_draw_is_no_proposal(sigma):
    """Pairs of eight replicas at such noise once ended a calibration with an OverflowError."""
    mechanism = mechanism_of(BalancedMinSep(100, 16, 4), 8, sigma)
    assert log_normalizer(mechanism) == math.inf
    found = registry.candidates(Setting(mechanism, 8.0, Direction.REMOVE, None), lambda proposal: 1e9)
    assert {proposal.name for proposal in found} == {"plain"}
