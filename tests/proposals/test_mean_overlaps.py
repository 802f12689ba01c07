"""Mean overlaps: both bounds by enumeration, against exact deltas, and without draws."""

import math

import jax
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxacct import BandedToeplitz, BMinSep, Budget, IndependentAttribution, Mechanism
from jaxacct.kernels import randomness
from jaxacct.proposals.add_direction import mean_overlaps
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.threshold import budget_lines, threshold
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics import hockey_stick
from tests.oracles import enumeration, tuples
from tests.proposals_by_name import family_candidates, proposal_by_name

STRATEGY = BandedToeplitz((2.0, 1.0))


@pytest.mark.parametrize(("examples", "sigma"), [(2, 0.7), (3, 1.5), (3, 4.0)])
def test_the_tangent_is_below_the_likelihood_of_all_tuples(examples, sigma):
    """At outputs of all sizes; and what examples share in the mean has to be taken off."""
    scheme = IndependentAttribution(4, 2, 0.4, examples)
    mechanism, rng = Mechanism(scheme, STRATEGY, sigma), np.random.default_rng(0)
    c = enumeration.strategy_matrix(STRATEGY.array, 5, 4)
    outputs = sigma * rng.normal(size=(400, 5)) * rng.choice([0.3, 1, 3], size=(400, 1))
    outputs[200:] += c.sum(axis=1) * rng.choice([0, 1], size=(200, 1))
    noise = outputs @ c / sigma  # normalised scores
    exact = enumeration.log_ratio(scheme, STRATEGY.array, sigma, outputs)
    nearest = []
    for at in (noise[0], noise[1], np.zeros(4), np.full(4, 0.5 / sigma), -c.T @ c.sum(axis=1)):
        found = mean_overlaps.mean_overlap_tangent(mechanism, at)
        assert found is not None
        below = found.constant + noise @ found.weights / sigma
        assert (below <= exact).all()
        assert found.norm == pytest.approx(np.linalg.norm(c @ found.weights), rel=1e-9)
        # Without what is shared: the likelihood of examples that never meet.
        shared = (examples - 1) / (2 * examples) * (found.norm / sigma) ** 2
        nearest.append(float((exact - below).min() / shared))
        assert shared > 0
    assert min(nearest) < 1  # so taking off nothing would be wrong


@pytest.mark.parametrize(
    ("examples", "sigma"), [(2, 0.7), (3, 1.5), pytest.param(3, 4.0, marks=pytest.mark.slow)]
)
def test_the_loss_of_every_draw_is_below_that_of_all_tuples(examples, sigma):
    """And what is taken off has to be: with a tenth less the bound is wrong at some output."""
    scheme = IndependentAttribution(4, 2, 0.4, examples)
    rng, c = np.random.default_rng(0), enumeration.strategy_matrix(STRATEGY.array, 5, 4)
    outputs = sigma * rng.normal(size=(400, 5)) * rng.choice([0.3, 1, 3], size=(400, 1))
    outputs[200:] += c.sum(axis=1) * rng.choice([0, 1], size=(200, 1))
    noise = (outputs @ c / sigma).astype(np.float32)
    exact = enumeration.log_ratio(scheme, STRATEGY.array, sigma, outputs)
    bound = jax.jit(mean_overlaps.loss_of_mean_overlaps, static_argnums=(0, 1))
    below = np.asarray(bound(scheme, STRATEGY, noise, sigma))
    assert (below <= exact + 2e-6 * (1 + np.abs(exact))).all()  # scores are rounded to float32
    # One example alone, and its mean participation, by enumeration.
    distribution = enumeration.pattern_distribution(scheme.one)
    vectors = np.array(list(distribution), float)
    logs = np.log(list(distribution.values()))[:, None] + vectors @ (outputs @ c - 0.5).T / sigma**2
    alone = np.asarray(logsumexp(logs, axis=0))
    mean = np.exp(logs - alone).T @ vectors
    shared = examples * (examples - 1) / 2 * ((mean @ c.T) ** 2).sum(axis=1) / sigma**2
    np.testing.assert_allclose(below, examples * alone - shared, rtol=1e-3, atol=1e-3)
    assert (examples * alone - 0.9 * shared > exact + 1e-6).any()


def test_the_bound_is_above_the_exact_delta_of_two_steps(key, monkeypatch):
    """Its clipped terms have a mean above it, too (six standard errors)."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", 0)
    scheme, sigma, epsilon = IndependentAttribution(2, 2, 0.3, 2, False), 2.0, 0.2
    strategy = BandedToeplitz.identity()
    mechanism = Mechanism(scheme, strategy, sigma)
    (proposal,) = family_candidates("mean-overlaps", mechanism, epsilon)
    truth = tuples.two_step_delta(scheme, strategy.coefficients, sigma, epsilon, "add")
    scale = math.exp(proposal.log_scale)
    assert 1e-4 < truth < scale < 1
    draws = proposal.draw(randomness.key_from_words([5, 6]), 0, 64)
    terms = np.minimum(1.0, hockey_stick.weighted_terms(draws, "add", epsilon) / scale)
    error = 6 * terms.std() / math.sqrt(terms.size)
    assert terms.mean() + error > truth / scale


def test_production_needs_no_draws_at_noise_that_largest_overlaps_do_not_allow():
    """Four examples, 64 steps apart: 3.2 was the least noise multiplier before."""
    mechanism = Mechanism(IndependentAttribution(1000, 64, 1 / 187, 4), BandedToeplitz.square_root(16), 2.35)
    budget = Budget.split(1e-5)
    found = {c.proposal.name: c for c in candidates(mechanism, 4.0, "add", budget)}
    assert set(found) == {"mean-overlaps:0", "plain"}
    mean = found["mean-overlaps:0"]
    assert mean.predicted_samples == 0 and threshold(mean.proposal, budget.delta_v) >= 1
    again = proposal_by_name(mechanism, 4.0, "add", mean.proposal.name)
    assert again.log_scale == mean.proposal.log_scale


def test_none_where_likelihoods_are_exact_or_the_direction_is_zero(monkeypatch):
    exact = IndependentAttribution(2, 2, 0.3, 2)
    for scheme in (exact, BMinSep(2, 2, 0.3)):
        assert family_candidates("mean-overlaps", Mechanism(scheme, STRATEGY, 2.0), 0.1) == []
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", 0)
    bounded = Mechanism(IndependentAttribution(2, 2, 0.25, 2), STRATEGY, 2.0)
    assert len(family_candidates("mean-overlaps", bounded, 0.3)) == 1
    assert family_candidates("mean-overlaps", bounded, 5.0) == []
    for variant in (1, 2, 3):
        with pytest.raises(ValueError, match="not available"):
            proposal_by_name(bounded, 0.3, "add", f"mean-overlaps:{variant}")
    (now,) = family_candidates("mean-overlaps", bounded, 0.3)
    assert now.name == "mean-overlaps:0"
    booked = {line.name: line.amount for line in budget_lines(now, 1e-5)}
    assert 0 < booked["distribution of mean overlaps"] < 1e-3
    # No noise at all is in every half-space there: draws of Q itself.
    (plain,) = family_candidates("mean-overlaps", Mechanism(bounded.scheme, STRATEGY, 0.5), 0.1)
    again = proposal_by_name(plain.mechanism, 0.1, "add", "mean-overlaps:2")
    assert again.log_scale == plain.log_scale < 0
    certain = IndependentAttribution(2, 2, 1.0, 2)
    assert family_candidates("mean-overlaps", Mechanism(certain, STRATEGY, 0.5), 0.1) == []
