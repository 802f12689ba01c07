"""Bounded-weight proposals, both directions: constants, draws, terms and deltas against oracles."""

import math

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import BalancedMinSep, BandedToeplitz, BMinSep, Mechanism, Poisson
from jaxacct.proposals import registry
from jaxacct.proposals.base import Setting, direction_key
from jaxacct.proposals.families import replicas
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.statistics.hockey_stick import Direction, weighted_terms
from tests.draws import draws_of
from tests.oracles import tuples
from tests.oracles.chi_square import chi_square_p_value
from tests.oracles.settings import PRODUCTION, SMALL, few_in_ci, slow
from tests.proposals_by_name import family_candidates, normalizer_of_two, proposal_by_name
from tests.refusals import refused
from tests.schemes.test_sampling import pld_delta, pld_distribution

FALSE_ALARM = 1e-6
Z = stats.norm.isf(FALSE_ALARM / 2)


def test_normalizer_against_all_tuples():
    """Of two replicas that is exact, and of more an upper bound."""
    for scheme, bands in SMALL:
        for sigma in [0.3, 1.0, 20.0]:
            strategy = BandedToeplitz.square_root(bands)
            mechanism = Mechanism(scheme, strategy, sigma)
            exact, _ = tuples.count_distribution(scheme, strategy.coefficients, sigma, 2)
            assert normalizer_of_two(mechanism) == pytest.approx(math.log(exact), rel=1e-10, abs=1e-13)
    mechanism = Mechanism(BMinSep(4, 2, 0.3), BandedToeplitz((2.0, 1.0)), 1.0)
    exact, _ = tuples.count_distribution(mechanism.scheme, mechanism.strategy.coefficients, 1.0, 4)
    assert math.log(exact) < log_normalizer(mechanism, 4) < 3 * math.log(exact)


@pytest.mark.parametrize(("scheme", "bands"), few_in_ci({10, 19}))
def test_drawn_counts_follow_the_enumerated_distribution(scheme, bands, key):
    """Chi-square over all count vectors, false alarm 1e-6; plain counts must be rejected."""
    strategy = BandedToeplitz.square_root(bands)
    mechanisms = [Mechanism(scheme, strategy, sigma) for sigma in (0.45, 2.0)]
    module = scheme.replicas(mechanisms[0])
    draw_with_one = jax.jit(module.draw_with_one, static_argnums=(1, 3))
    for mechanism in mechanisms:
        sigma = mechanism.noise_multiplier
        _, distribution = tuples.count_distribution(scheme, strategy.coefficients, sigma, 2)
        counts = np.asarray(draw_with_one(key, scheme, module.tables(mechanism), 40_000)[0])
        assert chi_square_p_value(counts, distribution) > FALSE_ALARM
        if sigma == 0.45 and len(distribution) > 1:
            _, plain_distribution = tuples.count_distribution(scheme, strategy.coefficients, 1e6, 2)
            assert chi_square_p_value(counts, plain_distribution) < FALSE_ALARM


# (setting, sigma, Z_2): the outside prototype of proofs/derivations.md, section 9.
PROTOTYPE = [
    (PRODUCTION, 256, 0.47, 1.15441),
    (PRODUCTION, 256, 0.40, 1.42628),
    (PRODUCTION, 256, 0.38, 1.68228),
    (BMinSep(1500, 64, (1 / 300) / (1 - 63 / 300)), 64, 0.6, 14.7),
    (BMinSep(1500, 64, (1 / 300) / (1 - 63 / 300)), 64, 1.0, 1.95),
    (BMinSep(1024, 32, (1 / 256) / (1 - 31 / 256)), 8, 0.4, 5386),
    (BMinSep(1024, 32, (1 / 256) / (1 - 31 / 256)), 8, 2.0, 1.024),
]


@pytest.mark.parametrize(("scheme", "bands", "sigma", "published"), PROTOTYPE)
def test_normalizers_of_the_prototype(scheme, bands, sigma, published):
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    assert math.exp(log_normalizer(mechanism)) == pytest.approx(published, rel=4e-3)


def test_the_scale_is_the_largest_weighted_term():
    """`M = sup over losses of Z e^{(1 - m) L} (1 - e^{epsilon - L})`: neither below it nor above."""
    for epsilon in [0.1, 2.0]:
        for m in [1.5, 2, 3, 7]:
            losses = epsilon + np.linspace(1e-4, 10, 200_001)
            largest = np.max(np.exp(0.3 + (1 - m) * losses) * -np.expm1(epsilon - losses))
            assert math.exp(replicas.log_scale(0.3, m, epsilon)) == pytest.approx(largest, rel=1e-6)


def test_large_jobs_have_no_table():
    for scheme, bands, has in (
        (BalancedMinSep(7200, 256, 28), 256, False),
        (BalancedMinSep(1000, 64, 4), 16, True),
        (BalancedMinSep(100_000, 64, 1), 32, True),  # at most one participation
        (BalancedMinSep(100_000, 64, 1), 64, False),
    ):
        assert (scheme.replicas(Mechanism(scheme, BandedToeplitz.square_root(bands), 0.4)) is not None) == has


@pytest.mark.parametrize(
    ("scheme", "bands", "sigma"),
    [
        (BalancedMinSep(100, 16, 4), 8, 0.03),  # beyond float64
        (BalancedMinSep(100, 16, 4), 8, 0.2),  # draws would be too inexact
        (BMinSep(3000, 4, 0.5), 4, 0.05),
    ],
)
def test_attraction_too_strong_to_draw_is_no_proposal(scheme, bands, sigma):
    """Pairs of eight replicas at such noise once ended a calibration with an OverflowError."""
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    assert log_normalizer(mechanism) == math.inf and not family_candidates("replicas", mechanism, 1.0)
    refused("replicas:2 is not available", proposal_by_name, mechanism, 1.0, "remove", "replicas:2")
    found = registry.candidates(Setting(mechanism, 8.0, Direction.REMOVE, None), lambda proposal: 1e9)
    assert {proposal.name for proposal in found} == {"plain"}


@pytest.mark.parametrize("delta", [1e-6, slow(1e-4)])
def test_poisson_against_pld_at_small_deltas(delta, key):
    """The best proposal against the PLD accountant where plain sampling would see nothing.

    The epsilon is the one at which PLD says `delta`; agreement within the Monte Carlo error, the 2e-3 that
    PLD's rounding may cost, and no vacuity: the error is below a fifth of delta.
    """
    n, p, sigma = 60, 0.1, 1.0
    mechanism = Mechanism(Poisson(n, p), BandedToeplitz((1.0,)), sigma)
    epsilon = pld_distribution(sigma, p, n, "remove").get_epsilon_for_delta(delta)
    best = min(family_candidates("replicas", mechanism, epsilon), key=lambda proposal: proposal.log_scale)
    exact = pld_delta(sigma, p, n, epsilon, "remove")
    terms = weighted_terms(draws_of(best, direction_key(key, "remove"), 400), "remove", epsilon)
    error = terms.std() / math.sqrt(terms.size)
    assert abs(terms.mean() - exact) < Z * error + 5e-3 * exact
    assert error < exact / 5
