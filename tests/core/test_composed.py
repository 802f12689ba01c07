"""Bounded weights where another mechanism is composed in (proofs/composition.md), against quadrature."""

import dataclasses
import functools
import json
import math

import dp_accounting as dp
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.special import ndtri

from jaxacct import (
    BMinSep,
    Budget,
    Mechanism,
    Plan,
    Poisson,
    calibrate,
    estimate_delta,
    privacy_profile,
    verify,
)
from jaxacct.accountants.composition import _GRID
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.core.check import check_direction
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import NotRun, Sampled
from jaxacct.kernels import randomness
from jaxacct.proposals import threshold
from jaxacct.proposals.add_direction.extrapolation import at_distances, log_bound, plan_extrapolations
from jaxacct.proposals.base import Draws, ProposalSpec, Setting
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.families import composed_replicas as composed_proposals
from jaxacct.proposals.threshold import budget_lines
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import Direction, dense_counts
from jaxacct.verification.replay import replay
from tests.conformance.test_schemes import IDENTITY
from tests.draws import draw_line, draws_of, mean_interval
from tests.oracles import enumeration
from tests.proposals.test_extrapolation import bound_of
from tests.proposals_by_name import proposal_by_name
from tests.stored_plans import claim_with, forged, loaded, with_side

FALSE_ALARM = 1e-6 / 20  # of each interval
BLOCKS = 64
MECHANISMS = [
    Mechanism(BMinSep(2, 2, 0.4), IDENTITY, 0.8),
    Mechanism(BMinSep(2, 2, 0.04), IDENTITY, 0.8),
    Mechanism(Poisson(2, 0.3), IDENTITY, 2.0),
]


@functools.cache
def gaussian(noise: float, floor: float = 0.0) -> TabulatedProfile:
    """The profile of a Gaussian, without dp-accounting; `floor` as if losses were cut off."""
    values = np.array([gaussian_delta(float(t), noise, 1.0) for t in _GRID])
    values = np.minimum.accumulate(np.maximum(values, floor))
    return TabulatedProfile(_GRID, np.clip(values, 0.0, 1.0))


def two_steps(mechanism, epsilon, direction, profile, push=0.0):
    """The divergence of both together, by the trapezoid rule over both scores of two steps and C = I.

    In the add direction with both scores pushed down by `push`.
    """
    sigma, grid = mechanism.noise_multiplier, np.linspace(-9, 9, 601)
    u, v = np.meshgrid(grid, grid, indexing="ij")
    density = np.exp(-(u**2 + v**2) / 2) / (2 * math.pi) * (grid[1] - grid[0]) ** 2
    shift, divergence = 1 / sigma, 0.0

    def log_ratio(u, v):
        parts = [
            math.log(weight) + x[0] * (u * shift - shift**2 / 2) + x[1] * (v * shift - shift**2 / 2)
            for x, weight in enumeration.pattern_distribution(mechanism.scheme).items()
        ]
        return functools.reduce(np.logaddexp, parts)

    if direction == "add":
        return float(np.sum(density * profile(epsilon + log_ratio(u - push, v - push))))
    for x, weight in enumeration.pattern_distribution(mechanism.scheme).items():
        terms = profile(epsilon - log_ratio(u + x[0] * shift, v + x[1] * shift))
        divergence += weight * float(np.sum(density * terms))
    return divergence


def offered(delta=1e-6):
    for mechanism in MECHANISMS:
        for noise, epsilon in ((2.0, 0.5), (1.0, 3.0)):
            composed = Composed(gaussian(noise), delta)
            for direction in ("remove", "add"):
                for found in candidates(
                    mechanism, epsilon, direction, Budget.split(delta), composed=composed
                ):
                    yield mechanism, epsilon, direction, composed, found.proposal


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
    found = candidates(MECHANISMS[0], 1.0, "remove", Budget.split(1e-5), composed=composed)
    assert [candidate.proposal.name for candidate in found] == ["plain"]
    with pytest.raises(ValueError, match="compose_with must have a profile with an end"):
        proposal_by_name(MECHANISMS[0], 1.0, "remove", "composed-replicas:2", composed=composed)
    assert Composed(gaussian(2.0, 1e-6), 2e-3).left_out <= 2e-6


def test_the_weighted_term_is_bounded_and_would_not_be_with_all_of_the_profile():
    """Attack: at losses far below 0 weights grow without bound; the scale of no composition is too small."""
    loss, epsilon = np.linspace(-40, 40, 80_001), 1.0
    composed = Composed(gaussian(1.0), 1e-6)
    for m in (2, 3):
        proposal = composed_proposals.build(Setting(MECHANISMS[0], epsilon, Direction.REMOVE, composed), m)
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
    proposal = composed_proposals.build(Setting(MECHANISMS[2], 1.0, Direction.REMOVE, composed), 3)
    alone = proposal_by_name(MECHANISMS[2], 1.0, "remove", "replicas:3")
    booked, before = (
        next(line.amount for line in budget_lines(found, 1e-6) if line.name == "float32 weights")
        for found in (proposal, alone)
    )
    assert composed.end > 15 and composed.above_floor(np.array([composed.end]))[0] == 0
    assert booked >= 3 * 2**-24 * 2 * composed.end > before


@pytest.mark.parametrize("least", [-math.inf, -4.0, 0.1])
def test_terms_of_the_line_have_concave_heights_and_are_above_the_profile(least):
    for profile in (gaussian(2.0), gaussian(0.7), gaussian(2.0, 1e-9), TabulatedProfile(*COARSE)):
        composed = Composed(profile, 1e-5)
        terms = composed.concave_terms(least)
        assert terms is not None
        t = np.linspace(max(least, -30.0) + 1e-6, composed.end - 1e-6, 20_001)
        found, height = terms(t), np.interp(t, terms.places, terms.heights)
        assert np.all(profile(t) <= found + terms.left_out)
        assert np.all(np.diff(height) <= 1e-9) and np.all(np.diff(height, 2) <= 1e-9)
        assert not terms(np.array([composed.end, 50.0])).any()
        assert profile(np.array([composed.end]))[0] <= terms.left_out < 3e-3 * 1e-5
        large = (profile(t) > 1e-3) & (t > -10)
        assert np.all(found[large] < 1.1 * profile(t)[large] + 1e-3) or profile.logs.size < 10
    assert Composed(gaussian(2.0), 1e-5).concave_terms(20.0) is None
    assert Composed(gaussian(2.0, 1e-6), 1e-5).concave_terms(least) is None


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_line_is_above_both_together(mechanism):
    """Heights of the mean are concave along the push: lines through two of them end above the truth."""
    epsilon, composed = 0.3, Composed(gaussian(2.0), 1e-6)
    line = at_distances(mechanism, epsilon, 1.0, 2.0, composed)
    pushes = np.linspace(0, 3, 7)
    means = [two_steps(mechanism, epsilon, "add", line.composed_terms, push) for push in pushes]
    assert np.all(np.diff(ndtri(means), 2) <= 1e-6)
    truth = two_steps(mechanism, epsilon, "add", composed.profile)
    for i in range(1, 6):
        near, far = pushes[i], pushes[i + 1]
        assert math.exp(log_bound(near, far, 0.0, means[i], means[i + 1])) + line.left_out >= truth * (
            1 - 1e-6
        )


def test_a_line_is_certified_and_computed_again():
    """Two steps by quadrature; evidence about another event, or without what is left out, is refused."""
    mechanism, target = MECHANISMS[2], ClaimedTarget.at(0.3, 0.3, OTHER)
    q, key = target.budget.failure_probability, jax.random.key(2)
    line = at_distances(mechanism, 0.3, 0.7, 1.9, target.composition)
    found = draw_line(line, 0.0, q, key, max_samples=20_000)
    bound = bound_of(line, found, q)
    assert two_steps(mechanism, 0.3, "add", target.profile) <= bound
    assert bound <= 3 * two_steps(mechanism, 0.3, "add", target.profile)
    near, far = (dense_counts(part, len(bounds.TERM_EDGES)) for part in (found.near_counts, found.far_counts))
    upper, lower = bounds.upper_confidence_bound(near, q / 2), bounds.lower_confidence_bound(far, q / 2)
    assert bound - math.exp(line.log_bound(upper, lower)) == pytest.approx(line.left_out)
    assert line.left_out > 1e-4
    claim = Claim(mechanism, target, None, None)
    evidence = Sampled(claim.digest, "anytime", 1.0, NotRun(), found)
    seen = check_direction(claim, Direction.ADD, found, evidence)
    assert seen.certified and seen.estimate == bound <= target.budget.delta_v
    assert any(item.amount == line.left_out for item in seen.items)
    # About another event the same counts give another bound.
    for event in (dp.GaussianDpEvent(2.0), None):
        other = Claim(mechanism, ClaimedTarget.at(0.3, 0.3, event), None, None)
        try:
            assert check_direction(other, Direction.ADD, found, evidence).estimate != bound
        except ValueError as error:
            assert "margin" in str(error)


@pytest.mark.slow
def test_many_participations_are_certified_by_the_line():
    """No half-space helps. The bound is above dp-accounting's."""
    mechanism, other = Mechanism(Poisson(200, 0.02), IDENTITY, 0.7), dp.GaussianDpEvent(5.0)
    target = ClaimedTarget.at(1.5, 2e-3, other)
    (line,) = plan_extrapolations(mechanism, 1.5, jax.random.key(1), target.composition, (20_000,))
    q = target.budget.failure_probability
    found = bound_of(line, draw_line(line, 0.0, q, jax.random.key(2), max_samples=40_000), q)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    sampled = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(0.7))
    accountant.compose(dp.SelfComposedDpEvent(sampled, 200)).compose(other)
    assert accountant._pld is not None
    truth = accountant._pld._pmf_add.get_delta_for_epsilon(1.5)
    assert truth / 1.2 <= found <= 30 * truth


def test_estimates_of_both_together_use_the_line_and_the_probability_of_none(monkeypatch):
    """At the later points every term is beyond the end of the profile: that is a bound without a line."""
    monkeypatch.setattr("jaxacct.estimates.estimate.event_profile", lambda event: gaussian(3.0))
    mechanism, grid = MECHANISMS[2], np.array([0.3, 2.5, 5.0])
    found = privacy_profile(mechanism, grid, num_samples=2000, compose_with="another", key=KEY)
    for direction in ("remove", "add"):
        exact = [two_steps(mechanism, e, direction, gaussian(3.0)) for e in grid]
        assert np.all(found.directions[direction][2] >= exact)
    assert found.directions["add"][2][-1] < 1e-9
    alone = estimate_delta(mechanism, 5.0, num_samples=2000, compose_with="another", key=KEY)
    assert exact[-1] <= alone.high < 1e-9


def test_draws_that_see_something_need_no_line(monkeypatch):
    """Nothing is known from below of what is composed in, but the draws did see the mechanism."""
    ends = {"remove": [0.05, 0.1, 0.1], "add": [0.05, 0.1, 0.2]}
    bands = lambda chosen, *_: np.array(ends[chosen.direction])[:, None]  # noqa: E731
    monkeypatch.setattr("jaxacct.estimates.interval.bands", bands)
    monkeypatch.setattr("jaxacct.estimates.estimate.event_profile", lambda event: gaussian(3.0))
    monkeypatch.delattr("jaxacct.estimates.estimate.line_bounds")
    found = estimate_delta(MECHANISMS[2], 0.3, num_samples=1, compose_with="another", key=KEY)
    assert (found.low, found.value, found.high) == (0.0, 0.1, 0.2)


def one_of_each():
    """One proposal of each kind and direction, with two and three replicas."""
    chosen = {}
    for mechanism, epsilon, direction, composed, proposal in offered():
        chosen.setdefault((direction, proposal.name), (mechanism, epsilon, direction, composed, proposal))
    families = "composed-replicas:2", "composed-replicas:3", "plain-bounded"
    wanted = [f"{way} {name}" for way, name in zip(("remove", "remove", "add"), families, strict=True)]
    return {name: chosen[tuple(name.split(" ", 1))] for name in wanted}


def test_every_kind_is_bounded_and_has_the_mean_by_quadrature():
    key = randomness.key_from_words([5, 6])
    for name, (mechanism, epsilon, direction, composed, proposal) in one_of_each().items():
        profile = proposal.profile or composed.profile
        exact = two_steps(mechanism, epsilon, direction, profile)
        whole = two_steps(mechanism, epsilon, direction, composed.profile)
        assert exact <= whole <= exact + proposal.left_out * (1 + 1e-9) + 1e-15
        draws, scale = draws_of(proposal, key, BLOCKS), math.exp(proposal.log_scale)
        terms = hockey_stick.weighted_terms(draws, direction, epsilon, profile) / scale
        assert terms.min() >= 0 and terms.max() <= 1 + 1e-5, name
        low, high = mean_interval(bounds.bin_terms(np.minimum(terms, 1.0)), FALSE_ALARM)
        slack = proposal.relative_error + proposal.total_variation + 1e-4  # and of float32
        assert scale * low * (1 - slack) <= exact <= scale * high * (1 + slack), name
        assert scale * (high - low) < 0.5 * exact, name


def test_a_weight_far_below_0_is_worth_nothing():
    """Attack: with all of the profile it is worth a whole scale. Pilots count by `Resolved`, too."""
    profile = gaussian(1.0, 1e-9)
    proposal = composed_proposals.build(
        Setting(MECHANISMS[0], 1.0, Direction.REMOVE, Composed(profile, 1e-6)), 3
    )
    loss = np.full(1024, -30.0)
    draws = Draws(loss, proposal.log_normalizer - 2 * loss)
    assert (threshold.Resolved(proposal, 1.0, profile, (), 0.5).terms(draws, 0.0) == 0).all()


@functools.cache
def certified() -> tuple[Plan, float]:
    """A plan from replicas and bounded plain samples, and the exact divergence of both together."""
    exact = max(two_steps(MECHANISMS[1], EPSILON, d, gaussian(3.0)) for d in ("remove", "add"))
    plan = calibrate(
        MECHANISMS[1].scheme,
        IDENTITY,
        epsilon=EPSILON,
        delta=2 * exact,
        noise_multiplier=MECHANISMS[1].noise_multiplier,
        compose_with=OTHER,
        key=jax.random.key(8),
    )
    return plan, exact


OTHER, EPSILON = dp.GaussianDpEvent(3.0), 1.7


def test_a_plan_is_certified_from_few_draws_and_its_evidence_is_computed_again():
    plan, _ = certified()
    seen = plan.verdict
    assert seen.remove.proposal.startswith("composed-replicas")
    offered = candidates(
        plan.mechanism, plan.epsilon, "remove", plan.target.budget, composed=plan.target.composition
    )
    plain = next(one.predicted_samples for one in offered if one.proposal.name == "plain")
    assert seen.num_samples < plain / 50
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert any(line.name == "end of the composed profile" for line in seen.remove.items)
    assert all(replayed.moved == 0 for replayed in replay(plan))


def test_less_than_the_truth_is_not_certified():
    """The same draws, asked for less than both together have: a verdict would be wrong."""
    plan, exact = certified()
    for less in (0.97, 0.8):
        found = verify(plan.mechanism, EPSILON, less * exact, compose_with=OTHER, max_samples=20_000, key=KEY)
        assert not found.certified
    alone = verify(plan.mechanism, EPSILON, 0.8 * exact, max_samples=20_000, key=KEY)
    assert alone.certified  # what is composed makes the difference


KEY = jax.random.key(9)


def test_edited_evidence_is_refused():
    """Attack: with a digest to match, so that the terms and what they are of have to give it away."""
    for edit in [
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("composed-replicas", (9,))),
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("replicas", (2,))),
        lambda plan: with_side(plan, "remove", proposal=ProposalSpec("plain", ())),
        lambda plan: forged(plan, compose_with=None),
        lambda plan: dataclasses.replace(plan, claim=claim_with(plan.claim, compose_with=None)),
    ]:
        assert loaded(certified()[0]).certified
        with pytest.raises(ValueError, match="plan"):
            loaded(edit(certified()[0]))


def test_samples_of_another_composition_do_not_load():
    """Attack: a forger who also makes the digest fit; the stored terms are not those of the stored losses."""
    other = forged(certified()[0], compose_with=dp.GaussianDpEvent(2.9))
    with pytest.raises(ValueError, match="terms are not those that the losses have"):
        loaded(other)
