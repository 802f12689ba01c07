"""The whole verifier: soundness just above the line, power below it, resume, evidence."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
from scipy import optimize, stats

import jaxacct as ja
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.common.files import Checkpoint
from jaxacct.core.check import Outcome, check_direction, resolve_proposal
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import NotRun, Sampled
from jaxacct.core.verify import Run, Stop, draw, next_check
from jaxacct.estimates import estimate
from jaxacct.kernels.randomness import key_from_words
from jaxacct.proposals import base as proposals
from jaxacct.proposals.candidates import candidates
from jaxacct.statistics.hockey_stick import Direction, NonFiniteLossError
from jaxacct.verification import replay as again
from tests.oracles import tuples
from tests.oracles.composed_losses import sampled
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.schemes.test_truncated_b_min_sep import pair_delta
from tests.stored_plans import whole

FALSE_ALARM = 1e-6
IDENTITY = ja.BandedToeplitz((1.0,))
EPSILON = 0.5
RARE = ja.Mechanism(ja.BMinSep(60, 6, 0.05), ja.BandedToeplitz.square_root(6), 1.3)


def gaussian_with(delta: float) -> ja.Mechanism:
    """One step, always participating: a Gaussian mechanism with exactly this delta at EPSILON."""
    sigma = optimize.brentq(lambda s: gdp_delta(EPSILON, 1.0 / s) - delta, 0.2, 20)
    return ja.Mechanism(ja.Poisson(1, 1.0), IDENTITY, sigma)


@functools.cache
def offered(mechanism, epsilon, direction, budget) -> list:
    """The same for every run."""
    return [c.proposal for c in candidates(mechanism, epsilon, direction, budget)]


def accepts(mechanism, epsilon, direction, budget, run, plain=False, rule="anytime", max_samples=20_000):
    """Whether one run accepts this direction, whatever it says of the other; not plain is the default."""
    found = offered(mechanism, epsilon, direction, budget)
    chosen = next(p for p in found if p.name == "plain") if plain else found[0]
    assert (chosen.name == "plain") == plain
    claim = Claim(mechanism, ClaimedTarget(epsilon, budget.delta, budget), None, None)
    stop = Stop(rule, max_samples)
    side = draw(Run(resolve_proposal(claim, chosen)), budget, stop, "test", jax.random.key(run))
    evidence = Sampled(claim.digest, rule, 1.0, NotRun(), NotRun())
    return check_direction(claim, Direction(direction), side, evidence).certified


def loose_budget(delta_v=0.1, q=0.05) -> ja.Budget:
    """A budget whose failures are frequent enough to count."""
    return ja.Budget(delta_v + q * (1 - delta_v), delta_v, q)


@pytest.mark.parametrize(("rule", "max_samples"), [("anytime", 10_000), ("fixed", 4096)])
def test_false_acceptances_stay_within_q(rule, max_samples):
    """At delta_v exactly, acceptances of a direction are Binomial(runs, <= q); false alarm 1e-6.

    The test is sharp: a verifier that forgot the budget and accepted when the mean is below the threshold
    would accept about half of the runs, ten times the bound.
    """
    budget, runs = loose_budget(), 64
    mechanism = gaussian_with(budget.delta_v)
    options = dict(plain=True, rule=rule, max_samples=max_samples)
    accepted = sum(accepts(mechanism, EPSILON, "remove", budget, run, **options) for run in range(runs))
    assert accepted <= stats.binom.isf(FALSE_ALARM, runs, budget.failure_probability) < runs / 4


@pytest.mark.parametrize("rule", ["anytime", "fixed"])
def test_accepts_below_the_line(rule):
    """At 70 % of delta_v: the rate of acceptance is far from q."""
    budget = loose_budget()
    mechanism = gaussian_with(0.7 * budget.delta_v)
    options = dict(budget=budget, rule=rule, max_samples=20_000)
    evidence = [
        ja.verify(mechanism, EPSILON, budget.delta, key=jax.random.key(r), **options) for r in range(10)
    ]
    assert sum(e.certified for e in evidence) >= 9
    for seen in evidence:
        for direction in seen.directions:
            if direction.num_samples:
                exact = gdp_delta(EPSILON, 1.0 / mechanism.noise_multiplier)
                error = math.sqrt(exact / direction.num_samples)
                assert abs(direction.estimate - exact) < 6 * error + 0.006 * exact


def test_far_above_the_line_is_hopeless_early_and_undecided_is_rejected():
    budget = ja.Budget.split(1e-2)
    evidence = ja.verify(gaussian_with(0.3), EPSILON, 1e-2, key=jax.random.key(1), max_samples=10**7)
    assert not evidence.certified
    assert evidence.num_samples < 100_000
    assert evidence.remove.outcome == Outcome.MEAN_ABOVE
    assert evidence.add.outcome == Outcome.DOMINATED
    assert budget.delta_v + budget.failure_probability * (1 - budget.delta_v) == pytest.approx(1e-2)
    evidence = ja.verify(gaussian_with(0.01), EPSILON, 0.0101, key=jax.random.key(1), max_samples=5000)
    assert not evidence.remove.certified
    assert evidence.remove.outcome == Outcome.UNDECIDED


class Interrupted(Exception):
    pass


def test_a_plan_is_not_verified_by_its_own_samples(tmp_path):
    """The folder in which its samples were drawn has other samples for `Plan.verify`, which then resumes."""
    with Checkpoint(tmp_path) as checkpoint:
        drawn = ja.verify(RARE, 2.0, 1e-2, checkpoint=checkpoint)
        plan = ja.Plan(drawn.claim, drawn.evidence)
        for options in ({}, dict(proposal="plain")):
            fresh = plan.verify(checkpoint=checkpoint, **options)
            assert fresh.certified and fresh.evidence.remove.key != drawn.evidence.remove.key
            assert plan.verify(checkpoint=checkpoint, **options).evidence == fresh.evidence
        found = ja.verify(RARE, 2.0, 1e-2, checkpoint=checkpoint, proposal="plain")
        assert found.evidence.remove.key != fresh.evidence.remove.key


def test_a_folder_in_use_or_damaged_is_refused(tmp_path):
    with Checkpoint(tmp_path) as checkpoint:
        refused("in use by another process", Checkpoint, tmp_path)
        ja.verify(RARE, 2.0, 1e-2, checkpoint=checkpoint, proposal="plain")
        (path,) = tmp_path.glob("remove-*.json")
        for damaged in (path.read_text()[:-5], "", "[1, 2]"):
            path.write_text(damaged)
            refused(path.name, ja.verify, RARE, 2.0, 1e-2, checkpoint=checkpoint, proposal="plain")
    Checkpoint(tmp_path).close()


def test_checks_are_a_function_of_the_blocks_alone():
    blocks, seen = 0, []
    while blocks < 10_000:
        blocks = next_check(blocks)
        seen.append(blocks)
    assert seen[:4] == [16, 32, 48, 64]
    assert len(seen) < 120


def test_overwhelming_noise_needs_no_draw():
    """A Renyi bound below delta_v certifies alone, however small: no overflow on the way."""
    for sigma in (30.0, 1e4):
        mechanism = ja.Mechanism(ja.BMinSep(200, 20, 0.05), ja.BandedToeplitz.square_root(8), sigma)
        evidence = ja.verify(mechanism, 30.0, 1e-3)
        assert evidence.certified
        assert evidence.num_samples == 0


def test_fresh_randomness_by_default():
    one, two = (ja.verify(RARE, 2.0, 1e-2, proposal="plain") for _ in range(2))
    assert one.evidence.remove.key != two.evidence.remove.key


def test_a_non_finite_loss_stops_the_run(monkeypatch):
    def broken(self, *args):
        draws = original(self, *args)
        draws.loss[5] = np.nan
        return draws

    original = proposals.Proposal.draw
    monkeypatch.setattr(proposals.Proposal, "draw", broken)
    with pytest.raises(NonFiniteLossError, match="privacy losses are not finite"):
        ja.verify(RARE, 2.0, 1e-2, proposal="plain")


@pytest.mark.parametrize(
    ("plain", "rule", "max_samples", "runs"),
    [
        (False, "anytime", 10_000, 64),
        *(
            slow(plain, *how, 1500)
            for plain in (False, True)
            for how in (("anytime", 30_000), ("fixed", 8192))
        ),
    ],
)
def test_false_acceptances_of_bounded_proposals(plain, rule, max_samples, runs):
    """The default, bounded-weight path on a mechanism just above the line; false alarm 1e-6.

    One step of Poisson sampling, whose delta is known; `delta_v` is a millionth below it. The same verifier
    accepts every time when the line is a tenth higher, so the test is not passed by refusing.
    """
    sigma, p, q, epsilon = 1.0, 0.3, 0.05, EPSILON / 4
    mechanism, exact = (
        ja.Mechanism(ja.Poisson(1, p), IDENTITY, sigma),
        float(sampled(epsilon, p, sigma, True)),
    )

    def accepted(delta_v, run, **options):
        return accepts(mechanism, epsilon, "remove", loose_budget(delta_v, q), run, **options)

    options = dict(plain=plain, rule=rule, max_samples=max_samples)
    wrong = sum(accepted(exact * (1 - 1e-6), run, **options) for run in range(runs))
    assert wrong <= stats.binom.isf(FALSE_ALARM, runs, q)
    assert all(accepted(exact * 1.1, run, max_samples=20_000) for run in range(5))


def test_a_replay_is_accepted_where_its_own_draws_prove_the_claim(monkeypatch):
    """What is drawn again decides, by the check of its direction."""
    checked = []

    def refused(claim, direction, side, evidence):
        checked.append((direction, side.num_samples))
        return dataclasses.replace(real(claim, direction, side, evidence), outcome=Outcome.MEAN_ABOVE)

    real, plan = again.check_direction, whole("plain")
    assert all(one.accepted for one in again.replay(plan))
    monkeypatch.setattr(again, "check_direction", refused)
    assert [one.accepted for one in again.replay(plan) if one.drawn] == [False] * len(checked)
    assert checked


@pytest.mark.parametrize("proposal", [None, "plain"])
def test_a_plan_is_verified_by_the_proposal_that_is_asked_for(proposal):
    plan = whole("replicas")
    stored = plan.verdict.remove.proposal
    assert stored != "plain"
    found = plan.verify(proposal=proposal, max_samples=2048, key=jax.random.key(0))
    assert found.remove is not None and found.remove.proposal == (proposal or stored)


@pytest.mark.parametrize(
    "scheme", [ja.Poisson(4, 0.9), ja.TruncatedBMinSep(3, 4, 0.5, 4, 9)], ids=["poisson", "truncated"]
)
def test_bands_of_a_profile_share_their_failure_probability(scheme, monkeypatch):
    """All intervals of all directions that are drawn fail with at most 1 - confidence together."""
    spent = []

    def bands(chosen, grid, draw, q):
        spent.append(q * len(grid))
        return np.tile([[0.0], [0.0], [0.5]], len(grid))

    monkeypatch.setattr(estimate.interval, "bands_of_both", bands)
    mechanism = ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 1.0)
    ja.privacy_profile(mechanism, [0.1, 0.5, 1.0, 2.0], confidence=0.9, num_samples=10)
    assert len(spent) >= len(mechanism.directions)
    assert sum(spent) == pytest.approx(0.1, rel=1e-12)


def test_resumes_where_it_was(tmp_path):
    options = dict(proposal="plain", max_samples=60_000)
    calls, resumed_at = [], []

    def stop_at_third(what, done, expected):
        calls.append(done)
        if len(calls) == 3:
            raise Interrupted

    with Checkpoint(tmp_path) as checkpoint, pytest.raises(Interrupted):
        ja.verify(RARE, 2.0, 1e-3, checkpoint=checkpoint, progress=stop_at_third, **options)
    with Checkpoint(tmp_path) as checkpoint:
        options |= dict(progress=lambda what, done, expected: resumed_at.append(done))
        resumed = ja.verify(RARE, 2.0, 1e-3, checkpoint=checkpoint, **options)
        stored = json.loads(next(tmp_path.glob("key-*.json")).read_text())["key"]
    assert resumed_at[0] > calls[-1]
    assert resumed.evidence == ja.verify(RARE, 2.0, 1e-3, key=key_from_words(stored), **options).evidence


# Of users: n = 1 and three examples, whose counts are Binomial(3, 0.3).
USERS = {j: stats.binom.pmf(j, 3, 0.3) for j in range(4)}, {0: 1.0}
VARIANTS = [
    (ja.MultiAttribution(1, 1, 0.3, 3), lambda: tuples.divergence(*USERS, 1.2, EPSILON, points=20_001)),
    (ja.TruncatedBMinSep(1, 1, 0.4, 4, 8), lambda: pair_delta(7, 0.4, 4, 1.2, EPSILON, "remove")),
]


@pytest.mark.slow  # one scheme, and those of stubs, in CI
@pytest.mark.parametrize(("scheme", "exact"), VARIANTS)
def test_false_acceptances_of_users_and_truncated_batches(scheme, exact):
    """Just above the line, acceptances are Binomial(runs, <= q); false alarm 1e-6, and below it they come."""
    mechanism, quieter = (ja.Mechanism(scheme, IDENTITY, sigma) for sigma in (1.2, 2.4))
    q, runs = 0.05, 64
    budget = loose_budget(0.9999 * float(exact()), q)

    def accepted(mechanism, run):
        options = dict(budget=budget, max_samples=8192, key=jax.random.key(run))
        return ja.verify(mechanism, EPSILON, budget.delta, **options).remove.certified

    limit = stats.binom.isf(FALSE_ALARM, runs, q)
    assert sum(accepted(mechanism, run) for run in range(runs)) <= limit < runs / 4
    assert all(accepted(quieter, run) for run in range(5))
