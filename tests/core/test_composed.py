"""Bounded weights where another mechanism is composed in (proofs/composition.md), against quadrature."""

import dataclasses
import functools
import json
import math

import dp_accounting as dp
import jax
import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct.accountants.composition import _GRID, event_profile
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta
from jaxacct.kernels import randomness
from jaxacct.proposals import threshold
from jaxacct.proposals.base import Draws, ProposalSpec, Setting
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.families import replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.verification.replay import replay
from tests.conformance.test_schemes import IDENTITY
from tests.draws import divergence_interval, draws_of
from tests.oracles import enumeration
from tests.proposals_by_name import proposal_by_name
from tests.refusals import refused
from tests.stored_plans import claim_with, forged, loaded, with_side

FALSE_ALARM = 1e-6 / 20  # of each interval
BLOCKS = 256
MECHANISMS = [
    ja.Mechanism(ja.BMinSep(2, 2, 0.4), IDENTITY, 0.8),
    ja.Mechanism(ja.BMinSep(2, 2, 0.04), IDENTITY, 0.8),
    ja.Mechanism(ja.Poisson(2, 0.3), IDENTITY, 2.0),
]


@functools.cache
def gaussian(noise: float, floor: float = 0.0) -> TabulatedProfile:
    """The profile of a Gaussian, without dp-accounting; `floor` as if losses were cut off."""
    values = np.exp(gdp_log_delta(_GRID, 1.0 / noise))
    values = np.minimum.accumulate(np.maximum(values, floor))
    return TabulatedProfile(_GRID, np.clip(values, 0.0, 1.0), of_gaussians=True)


def two_steps(mechanism, epsilon, direction, profile):
    """The divergence of both together, by the trapezoid rule over both scores of two steps and C = I."""
    grid, step = np.linspace(-9, 9, 401, retstep=True)
    along = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * step
    density, shift = np.multiply.outer(along, along), 1 / mechanism.noise_multiplier
    law = enumeration.pattern_distribution(mechanism.scheme)

    def log_ratio(x):
        """At outputs of the vector x."""
        u, v = (np.exp((grid + count * shift) * shift - shift**2 / 2) for count in x)
        return np.log(sum(weight * np.multiply.outer(u ** y[0], v ** y[1]) for y, weight in law.items()))

    if direction == "add":
        return float(np.sum(density * profile(epsilon + log_ratio((0, 0)))))
    return sum(w * float(np.sum(density * profile(epsilon - log_ratio(x)))) for x, w in law.items())


@pytest.mark.parametrize("power", [1.0, 1.5, 4.0])
def test_the_largest_product_is_that_of_the_table(power):
    """Between the points as well, where a chord lies above the profile."""
    t = np.linspace(-20, 20, 400_001)
    for profile in (gaussian(2.0), gaussian(0.7), gaussian(2.0, 1e-9), TabulatedProfile(*COARSE)):
        composed = Composed(profile, 1e-5)
        with np.errstate(divide="ignore"):
            dense = float(np.max(power * t + np.log(composed.above_floor(t))))
        assert dense <= composed.log_max(power) <= dense + 1e-4


COARSE = np.array([-3.0, -1.0, 0.0, 0.5, 3.0]), np.array([0.99, 0.7, 0.4, 1e-9, 1e-9])


def test_without_an_end_there_are_no_replicas():
    """A profile that stays above a thousandth of delta bounds nothing against the weights."""
    composed = Composed(gaussian(2.0, 1e-6), 1e-5)
    assert composed.left_out == composed.log_max(1.0) == math.inf
    found = candidates(MECHANISMS[0], 1.0, "remove", ja.Budget.split(1e-5), composed=composed)
    assert [candidate.proposal.name for candidate in found] == ["plain"]
    with pytest.raises(ValueError, match="replicas:2 is not available for this mechanism"):
        proposal_by_name(MECHANISMS[0], 1.0, "remove", "replicas:2", composed=composed)
    assert Composed(gaussian(2.0, 1e-6), 2e-3).left_out <= 2e-6


def test_the_weighted_term_is_bounded_and_would_not_be_with_all_of_the_profile():
    """Attack: at losses far below 0 weights grow without bound; the scale of no composition is too small."""
    loss, epsilon = np.linspace(-40, 40, 80_001), 1.0
    composed = Composed(gaussian(1.0), 1e-6)
    for m in (2, 4):
        proposal = replicas.build(Setting(MECHANISMS[0], epsilon, Direction.REMOVE, composed), m)
        log_weight = proposal.log_normalizer + (1 - m) * loss
        with np.errstate(divide="ignore"):
            drawn = log_weight + np.log(composed.above_floor(epsilon - loss)) - proposal.log_scale
            whole = log_weight + np.log(gaussian(1.0, 1e-9)(epsilon - loss)) - proposal.log_scale
        assert -1e-3 < drawn.max() <= 0
        assert whole.max() > 5
        alone = proposal_by_name(MECHANISMS[0], epsilon, "remove", f"replicas:{m}")
        assert (drawn + proposal.log_scale - alone.log_scale).max() > 0.1


def test_weights_are_booked_as_far_down_as_terms_reach():
    """A profile that ends late has terms at losses far below 0, where weights are e to a larger number."""
    composed = Composed(gaussian(0.3), 1e-6)
    proposal = replicas.build(Setting(MECHANISMS[2], 1.0, Direction.REMOVE, composed), 4)
    alone = proposal_by_name(MECHANISMS[2], 1.0, "remove", "replicas:4")
    booked, before = (
        next(line.amount for line in budget_lines(found, 1e-6) if line.name == "float32 weights")
        for found in (proposal, alone)
    )
    assert composed.end > 15 and composed.above_floor(np.array([composed.end]))[0] == 0
    assert booked >= 3 * 2**-24 * 3 * composed.end > before


def randomized_response(loss: float) -> TabulatedProfile:
    """The profile of a pair with the losses `loss` and `-loss` alone, which is symmetric."""
    likely = 1 / (1 + math.exp(-loss))
    values = likely * np.maximum(0, -np.expm1(_GRID - loss)) + (1 - likely) * np.maximum(
        0, -np.expm1(_GRID + loss)
    )
    return TabulatedProfile(_GRID, np.clip(values, 0.0, 1.0))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_both_together_are_at_most_the_remove_direction_and_the_exchanged_part(mechanism):
    """And without that part not, where losses of the composed mechanism are above epsilon."""
    exceeded = []
    for loss in (0.2, 0.5, 1.0):
        for epsilon in (0.1, 0.3, 0.6, 2.0):
            composed = Composed(randomized_response(loss), 1e-6)
            remove, add = (two_steps(mechanism, epsilon, d, composed.profile) for d in ("remove", "add"))
            assert add <= remove + composed.exchanged(epsilon, mechanism.scheme) + 1e-5
            exceeded.append(add > remove + 1e-4)
            assert loss > epsilon or not exceeded[-1]
    assert any(exceeded)


@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_gaussians_exchange_nothing(noise):
    """Of the remove direction the add direction is at most as large; another profile reserves for it."""
    profile = gaussian(noise)
    often = ja.Poisson(1, 1.0)
    assert Composed(profile, 1e-6).exchanged(1.0, often) == 0
    other = Composed(dataclasses.replace(profile, of_gaussians=False), 1e-6)
    found = [other.exchanged(epsilon, often) for epsilon in (1.0, 4.0)]
    # e^epsilon P'(loss > epsilon) of a Gaussian mechanism; a tenth of it where a tenth participates.
    exact = [math.exp(e) * stats.norm.sf(e * noise + 0.5 / noise) for e in (1.0, 4.0)]
    assert found == pytest.approx(exact, rel=0.2)  # of a pair that is a little larger
    assert other.exchanged(1.0, ja.Poisson(1, 0.1)) == pytest.approx(found[0] / 10, rel=1e-6)
    assert event_profile(dp.GaussianDpEvent(noise)).of_gaussians
    assert event_profile(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(noise))).of_gaussians
    assert not event_profile(dp.LaplaceDpEvent(noise)).of_gaussians
    both = dp.ComposedDpEvent([dp.LaplaceDpEvent(noise), dp.GaussianDpEvent(noise)])
    assert not event_profile(both).of_gaussians
    for epsilon in (0.1, 0.7, 2.0):
        remove, add = (two_steps(MECHANISMS[2], epsilon, d, profile) for d in ("remove", "add"))
        assert add <= remove * (1 + 1e-4)


@pytest.mark.parametrize("name", ["plain", "replicas:2", "replicas:4"])
def test_every_proposal_reserves_what_the_other_direction_may_exceed(name):
    """Only one direction is drawn: without the reserve the other one would have no bound."""
    composed = Composed(randomized_response(1.0), 1e-6)
    for mechanism in MECHANISMS:
        proposal = proposal_by_name(mechanism, 0.6, "remove", name, composed=composed)
        assert proposal.left_out >= composed.exchanged(0.6, mechanism.scheme) > 0


def test_every_kind_is_bounded_and_has_the_mean_by_quadrature():
    key, composed = randomness.key_from_words([5, 6]), Composed(gaussian(2.0), 1e-6)
    mechanism, epsilon, direction = MECHANISMS[0], 0.5, "remove"
    for name in ("replicas:2", "replicas:4"):
        proposal = proposal_by_name(mechanism, epsilon, direction, name, composed=composed)
        profile = proposal.profile or composed.profile
        exact = two_steps(mechanism, epsilon, direction, profile)
        whole = two_steps(mechanism, epsilon, direction, composed.profile)
        assert exact <= whole <= exact + proposal.left_out * (1 + 1e-9) + 1e-15
        draws = draws_of(proposal, key, BLOCKS)
        low, high = divergence_interval(proposal, draws, epsilon, FALSE_ALARM, profile)
        assert low <= exact <= high and high - low < 0.5 * exact, name


def test_a_weight_far_below_0_is_worth_nothing():
    """Attack: with all of the profile it is worth a whole scale. Pilots count by `Resolved`, too."""
    profile = gaussian(1.0, 1e-9)
    proposal = replicas.build(Setting(MECHANISMS[0], 1.0, Direction.REMOVE, Composed(profile, 1e-6)), 4)
    loss = np.full(1024, -30.0)
    draws = Draws(loss, proposal.log_normalizer - 3 * loss)
    assert (threshold.Resolved(proposal, 1.0, profile, (), 0.5).terms(draws, 0.0) == 0).all()


@functools.cache
def certified() -> tuple[ja.Plan, float]:
    """A plan from replicas and bounded plain samples, and the exact divergence of both together."""
    exact = max(two_steps(MECHANISMS[1], EPSILON, d, gaussian(3.0)) for d in ("remove", "add"))
    target = dict(epsilon=EPSILON, delta=2 * exact, noise_multiplier=MECHANISMS[1].noise_multiplier)
    options = dict(compose_with=OTHER, key=jax.random.key(8))
    return ja.calibrate(MECHANISMS[1].scheme, IDENTITY, **target, **options), exact


OTHER, EPSILON = dp.GaussianDpEvent(3.0), 1.7


def test_a_plan_is_certified_from_few_draws_and_its_evidence_is_computed_again():
    plan, _ = certified()
    seen = plan.verdict
    assert seen.remove.proposal.startswith("replicas")
    offered = candidates(
        plan.mechanism, plan.epsilon, "remove", plan.target.budget, composed=plan.target.composition
    )
    plain = next(one.predicted_samples for one in offered if one.proposal.name == "plain")
    assert seen.num_samples < plain / 50
    assert ja.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert any(line.name == "end of the composed profile" for line in seen.remove.items)
    assert all(replayed.moved == 0 for replayed in replay(plan))


def test_less_than_the_truth_is_not_certified():
    """The same draws, asked for less than both together have: a verdict would be wrong."""
    plan, exact = certified()
    for less in (0.97, 0.8):
        found = ja.verify(
            plan.mechanism, EPSILON, less * exact, compose_with=OTHER, max_samples=20_000, key=KEY
        )
        assert not found.certified
    alone = ja.verify(plan.mechanism, EPSILON, 0.8 * exact, max_samples=20_000, key=KEY)
    assert alone.certified  # what is composed makes the difference


KEY = jax.random.key(9)


def test_edited_evidence_is_refused():
    """Attack: with a digest to match, so that the terms and what they are of have to give it away."""
    for edit in [
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("replicas", (9,))),
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("replicas", (48,))),
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("plain", ())),
        lambda plan: forged(plan, compose_with=None),
        lambda plan: dataclasses.replace(plan, claim=claim_with(plan.claim, compose_with=None)),
    ]:
        assert loaded(certified()[0]).certified
        refused("plan", loaded, edit(certified()[0]))


def test_samples_of_another_composition_do_not_load():
    """Attack: a forger who also makes the digest fit; the stored terms are not those of the stored losses."""
    other = forged(certified()[0], compose_with=dp.GaussianDpEvent(2.9))
    refused("terms are not those that the losses have", loaded, other)
