"""Safety margins as they are applied, orchestration, and NaN at every stage: deterministic, with stubs.

Each test is for a small plausible mistake that acceptance rates are too coarse to see.
"""

import ast
import dataclasses
import itertools
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from dp_accounting import dp_event
from msgspec import structs
from scipy import stats

import jaxacct as ja
from jaxacct.accountants import analytic
from jaxacct.accountants.composition import event_profile
from jaxacct.calibration import pilots as pilots_module
from jaxacct.calibration import route
from jaxacct.calibration.grid import Grid, Problem
from jaxacct.common.files import read_json, to_json
from jaxacct.common.records import differences, read
from jaxacct.core import check as checking
from jaxacct.core import shares, truncation
from jaxacct.core import verify as verifying
from jaxacct.core.check import check
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound, Dominated, NotRun, Sampled, WeightBound
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.kernels import randomness
from jaxacct.proposals import base
from jaxacct.proposals import threshold as thresholds
from jaxacct.proposals.base import Draws, plain
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.threshold import Resolved, threshold
from jaxacct.schemes.protocol.batch_sizes import max_batch_size
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import Direction, NonFiniteLossError
from jaxacct.verification.replay import replay
from tests.benchmarks import mutants
from tests.commands import exit_code
from tests.oracles.settings import slow
from tests.proposals_by_name import proposal_by_name
from tests.refusals import refused
from tests.stored_plans import KINDS, claim_with, forged, sampled_directions, with_side
from tests.stored_plans import whole as stored_plan

MECHANISM = ja.Mechanism(ja.BMinSep(24, 3, 0.05), ja.BandedToeplitz.square_root(3), 1.5)
BUDGET = ja.Budget.split(1e-2)
NAN = math.nan


CLAIM = Claim(MECHANISM, ClaimedTarget(1.0, 1e-2, BUDGET), None, None)


def of(proposal=None, theta=None) -> Resolved:
    """A proposal of the claim, with another threshold where one is given."""
    found = checking.resolve_proposal(CLAIM, proposal or plain(MECHANISM, "remove"))
    return found if theta is None else dataclasses.replace(found, threshold=theta)


def is_settled(stop, terms, blocks, theta, bets, weights, limit=100) -> bool:
    level = stop.share * BUDGET.failure_probability
    return verifying._is_settled(of(theta=theta), stop, level, terms, blocks, limit, bets, weights)


def counts(**at) -> np.ndarray:
    """A histogram of terms from {"_5": 3}: three terms in bin 5."""
    found = np.zeros(len(bounds.TERM_EDGES), np.int64)
    for place, number in at.items():
        found[int(place[1:])] = number
    return found


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_margin_is_taken_from_epsilon(direction):
    losses = np.linspace(-2, 2, 128)
    draws = Draws(losses, np.zeros_like(losses))
    found = of(plain(MECHANISM, direction)).terms(draws, 0.3)
    excess = 0.7 - losses if direction == "remove" else 0.7 + losses
    assert np.allclose(found, np.maximum(0, -np.expm1(excess)), rtol=1e-12, atol=0)
    assert (found >= of(plain(MECHANISM, direction)).terms(draws, 0.0)).all()


def test_weights_are_raised_by_what_they_are_off():
    """Those of two replicas are `Z e^-L`: a loss error of a margin changes them by as much."""
    proposal, margin = proposal_by_name(MECHANISM, 1.0, "remove", "replicas:2"), 0.3
    draws = Draws(np.linspace(1.0, 3.0, 128), np.full(128, -20.0))
    found = of(proposal).terms(draws, margin)
    raised = np.exp(margin - 20.0 - proposal.log_scale) * -np.expm1(1.0 - margin - draws.loss)
    assert np.allclose(found, raised, rtol=1e-12, atol=0) and 0 < found.max() < 1


def test_thresholds_are_lowered_by_how_far_the_drawn_distribution_is_off():
    exact = plain(MECHANISM, "remove")
    off = dataclasses.replace(exact, total_variation=1e-3)
    assert threshold(off, 0.01) == pytest.approx(threshold(exact, 0.01) - 1e-3, rel=1e-9)


def test_a_proposal_whose_errors_use_up_delta_is_refused():
    """With a threshold of at most 0 no samples certify: they would be drawn in vain."""
    for error in (BUDGET.delta_v, 2 * BUDGET.delta_v):
        off = dataclasses.replace(plain(MECHANISM, "remove"), total_variation=error)
        assert -0.1 < threshold(off, BUDGET.delta_v) <= 0
        refused("does not resolve delta_v", of, off)


def test_nothing_is_drawn_only_where_no_mean_could_be_above():
    """Terms are at most 1: with a threshold a little below that they are drawn."""
    for above, certified in ((0.05, False), (-0.05, True)):
        scaled = dataclasses.replace(plain(MECHANISM, "remove"), log_scale=math.log(BUDGET.delta_v) + above)
        assert of(scaled).needs_samples is not certified


def test_a_target_is_of_one_adjacency_and_spends_no_more_than_its_delta():
    other = dataclasses.replace(MECHANISM)
    assert dataclasses.replace(CLAIM, mechanism=other).digest == CLAIM.digest
    object.__setattr__(other, "adjacency", "replace-two")  # which there is not
    assert dataclasses.replace(CLAIM, mechanism=other).digest != CLAIM.digest
    refused("budget must spend at most delta", ClaimedTarget, 1.0, 0.99e-2, BUDGET)
    refused("budget must spend at most delta", ja.verify, MECHANISM, 1.0, 1e-4, budget=ja.Budget.split(1e-3))


def test_no_stream_serves_twice(monkeypatch):
    """Searches aside: verification and pilots of one run draw from keys that differ, in either direction."""
    used = []

    def nothing(proposal, stream, first, number, dtype=None):
        used.append(tuple(randomness.key_words(stream)))
        zeros = np.full(128 * number, -50.0 if proposal.direction == "remove" else 50.0)
        yield Draws(zeros, np.zeros_like(zeros))

    monkeypatch.setattr(base, "draw_in_batches", nothing)
    truncated = ja.Mechanism(ja.TruncatedBMinSep(6, 2, 0.1, 4, 10), ja.BandedToeplitz((2.0, 1.0)), 1.5)
    claim = Claim(truncated, ClaimedTarget.at(1.0, 1e-3), None, None)
    verdict = verify_claim(claim, Stop(), "plain", key=jax.random.key(1))
    assert verdict.certified
    # A direction asks for its stream again and again; so each key once in the order of first use.
    assert len(dict.fromkeys(used)) == 4
    assert {verdict.evidence.remove.key, verdict.evidence.add.key} < set(used)


def test_the_fixed_rule_does_not_peek():
    """However clear the counts are, before the last block there is no verdict; then there is."""
    fixed, clear = Stop("fixed"), counts(_0=10**9)
    for blocks in (1, 16, 99):
        assert not is_settled(fixed, clear, blocks, 0.01, (), ())
    assert is_settled(fixed, clear, 100, 0.01, (), ())
    assert is_settled(Stop(), clear, 16, 0.01, (0.5,), (1.0,))


def test_losses_by_pairs_are_not_for_what_is_composed():
    """The attack: evidence that names them would skip the reserve for what is composed."""
    users = ja.Mechanism(ja.IndependentAttribution(64, 16, 0.001, 8), ja.BandedToeplitz.square_root(4), 20.0)
    composed = Composed(event_profile(dp_event.LaplaceDpEvent(1.0)), 0.079)
    assert proposal_by_name(users, 0.9, "remove", "replicas:1").name == "replicas:1"
    with pytest.raises(ValueError, match="proposal replicas:1 is not available"):
        proposal_by_name(users, 0.9, "remove", "replicas:1", composed=composed)


def test_only_plain_draws_where_what_is_composed_hides_nothing():
    composed = Composed(TabulatedProfile(np.array([-1.0, 1.0]), np.array([1.0, 1.0])), BUDGET.delta_v)
    composed = dataclasses.replace(composed, profile=dataclasses.replace(composed.profile, of_gaussians=True))
    found = candidates(MECHANISM, 1.0, "remove", BUDGET, composed=composed)
    assert [c.proposal.name for c in found] == ["plain"]
    assert len(candidates(MECHANISM, 1.0, "remove", BUDGET)) > 1
    assert proposal_by_name(MECHANISM, 1.0, "remove", "replicas:2").replicas == 2
    with pytest.raises(ValueError, match="proposal replicas:2 is not available for this mechanism"):
        proposal_by_name(MECHANISM, 1.0, "remove", "replicas:2", composed=composed)


def test_the_largest_batch_is_that_of_the_binomial_distribution():
    """Against SciPy's quantile, from one example to a hundred million, certain and rare."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, rate = int(10 ** rng.uniform(0, 8)), float(min(1.0, 10 ** rng.uniform(-7, 0.1)))
        steps = int(10 ** rng.uniform(0, 5))
        expected = min(size, stats.binom.isf(1e-9 / steps, size, rate) + 1)
        assert max_batch_size(size, rate, steps) == expected, (size, rate, steps)


def ladder(monkeypatch, verdict, covered=lambda mechanism: True, fallback=100):
    """What was verified, (exponent, share), and released, (exponent, evidence), by a verdict of exponents."""
    asked = []

    def exponent_of(mechanism):
        return round(math.log(mechanism.noise_multiplier) / math.log(1.01))

    def stub(claim, stop, **options):
        asked.append((exponent_of(claim.mechanism), stop.share))
        # What is tried first is given up where it takes long; the last resort is not.
        assert stop.patience == (500 if asked[-1][0] < 12 else math.inf)
        sides = WeightBound(plain(MECHANISM, "remove").spec), NotRun()
        flaws = () if verdict(asked[-1][0]) else ("no",)
        evidence = Sampled(claim.digest, stop.rule, stop.share, *sides)
        return checking.Verdict(claim, evidence, flaws, None, None, None)

    monkeypatch.setattr(route, "verify_claim", stub)
    bound, claim_of = 1.01 ** (fallback - 0.01), Grid.claim

    def claim(self, exponent):
        return claim_of(self, exponent) if covered(self.problem.at(self.step**exponent)) else None

    monkeypatch.setattr(route, "smallest_bound", lambda *arguments: bound)
    monkeypatch.setattr(Grid, "claim", claim)
    monkeypatch.setattr(route.Route, "selected", lambda *arguments: (10, 1000))
    # So weak a target that the bound holds at the fallback.
    found = ja.calibrate(MECHANISM.scheme, MECHANISM.strategy, epsilon=30.0, delta=0.5)
    return asked, (exponent_of(found.mechanism), found.evidence)


@pytest.mark.parametrize(
    ("accepted", "asked", "released", "options"),
    [
        ({10, 11, 12, 15}, [10], 10, {}),
        ({11, 12, 15}, [10, 11], 11, {}),
        ({12, 15}, [10, 11, 15, 12], 12, {}),
        ({15}, [10, 11, 15, 12], 15, {}),
        ({12}, [10, 11, 15], 100, {}),
        # Not verified are what the reserve does not cover, what the bound certifies, and 3 % less than that.
        (range(99), [15, 12], 12, dict(covered=lambda mechanism: mechanism.noise_multiplier > 1.01**11.5)),
        ({}, [10, 11, 12], 14, dict(fallback=14)),
        (range(99), [], 13, dict(fallback=13)),
    ],
)
def test_the_smallest_two_come_first_then_a_ladder_that_ends_at_a_rejection(
    accepted, asked, released, options, monkeypatch
):
    """Every rung below a rejected one would be one more chance for a wrong acceptance."""
    seen, (exponent, evidence) = ladder(monkeypatch, accepted.__contains__, **options)
    assert ([at for at, _ in seen], exponent) == (asked, released)
    assert isinstance(evidence, Bound if released == options.get("fallback", 100) else Sampled)


@pytest.mark.parametrize("private", [(), (15,), (12, 15), (11, 12, 15), (11,), (12,)])
def test_all_that_is_verified_spends_the_failure_probability_once(private, monkeypatch):
    """The probability, exactly, that what is released is not private, every test wrong as often as it may be.

    Private candidates are accepted or not as suits the attack; the others with the probability given to them.
    """
    q, bad, most = 0.25, [at for at in (10, 11, 12, 15) if at not in private], 0.0
    for given in itertools.product([False, True], repeat=len(private)):
        failure = 0.0
        for wrong in itertools.product([False, True], repeat=len(bad)):
            answers = dict(zip((*private, *bad), (*given, *wrong), strict=True))
            asked, (released, _) = ladder(monkeypatch, answers.__getitem__)
            spent = {at: share * q for at, share in asked if at in bad}
            path = math.prod(p if answers[at] else 1 - p for at, p in spent.items())
            failure += (released in bad) * path / 2 ** (len(bad) - len(spent))  # verdicts not asked for
        most = max(most, failure)
    assert 0.9 * q <= most <= q


def test_the_shares_of_all_attempts_are_one_failure_probability():
    """As the binary numbers they are; the ladder, which ends at a rejection, spends its share once."""
    first = shares.FIRST_SHARES
    assert (
        sum(map(Fraction, (*first, shares.LADDER_SHARE))) <= 1 < sum(map(Fraction, first)) + Fraction(1, 10)
    )


def test_all_candidates_together_spend_the_failure_probability_of_what_is_released(monkeypatch):
    """A larger epsilon has a larger reserve for stopped runs of users, and so a smaller q."""
    scheme, spent = ja.IndependentAttribution(100, 4, 0.01, 3), []

    def stub(claim, stop, **options):
        spent.append(stop.share * claim.target.budget.failure_probability)
        evidence = Sampled(claim.digest, stop.rule, stop.share, NotRun(), NotRun())
        return checking.Verdict(claim, evidence, ("no",), None, None, None)

    monkeypatch.setattr(route, "verify_claim", stub)
    monkeypatch.setattr(route.Route, "selected", lambda *arguments: (-50, 1000))
    given = dict(noise_multiplier=3.0, delta=1e-5, dataset_size=1000)
    plan = ja.calibrate(scheme, ja.BandedToeplitz.square_root(4), **given)
    assert isinstance(plan.evidence, Bound) and plan.epsilon > 1.01**-45
    # The ladder ends at a rejection; both of its steps would have one share.
    assert len(spent) == 3 and 0.999 < sum(spent) / plan.target.budget.failure_probability <= 1 + 1e-12


def test_giving_up_accepts_nothing_that_would_not_have_been(monkeypatch):
    """Coins of exactly the forbidden mean and below: with patience, what is accepted is so at the same draw.

    A rule that looked ahead, or began its bets anew, would accept what the patient one had not.
    """
    rng, theta, bets = np.random.default_rng(3), 0.05, bounds.default_bets()
    ended = []
    for mean in (0.05, 0.04, 0.03, 0.02) * 4:
        hits = np.cumsum(rng.binomial(128, mean, 100))
        ends = []
        for patience in (math.inf, 3000.0):
            stop = Stop(patience=patience)
            seen = [(n, counts(_0=n * 128 - hits[n - 1], _5120=hits[n - 1])) for n in range(1, 101)]
            n, terms = next(pair for pair in seen if is_settled(stop, pair[1], pair[0], theta, *bets))
            accepted = checking.accepts(terms, theta, "anytime", BUDGET.failure_probability, *bets)
            ends.append((accepted, n))
            if not accepted and n < 100 and not bounds.hopeless(terms, theta):
                assert patience == 3000 and 13 <= n < 100
        ended.append(ends)
    for whole, hasty in ended:
        assert hasty == whole if hasty[0] else hasty[1] <= whole[1]
    assert {hasty[0] for _, hasty in ended} == {True, False}
    assert any(hasty[1] < whole[1] for whole, hasty in ended)


def test_a_verification_is_given_up_for_what_it_predicts_and_not_before_an_eighth():
    """At a mean of 0.95 theta some 290,000 terms are needed, at 0.5 theta 1,900."""
    bets = bounds.default_bets()
    for share, patience, blocks, ends in (
        (0.95, 20_000, 11, False),
        (0.95, 20_000, 13, True),
        (0.95, math.inf, 13, False),
        (0.5, 20_000, 13, False),
        (1.01, 20_000, 13, True),
    ):
        n = 128 * blocks
        hits = round(0.05 * share * n)
        seen = counts(_0=n - hits, _5120=hits)
        certified = checking.accepts(seen, 0.05, "anytime", BUDGET.failure_probability, *bets)
        assert is_settled(Stop(patience=patience), seen, blocks, 0.05, *bets) is (ends or certified)
        assert not is_settled(Stop("fixed", patience=patience), seen, blocks, 0.05, *bets)
    for wrong in (0, math.nan):
        refused("patience must be above 0, got", Stop, patience=wrong)


@pytest.mark.parametrize("rule", ["anytime", "fixed"])
def test_a_part_of_the_failure_probability_asks_for_more(rule):
    """1,500 terms of 0 against a threshold of 1e-2: e^-11 or so, at q = 1e-4 and at a millionth of it."""
    nothing, bets = counts(_0=1500), bounds.default_bets()
    for share in (1.0, 1e-6):
        level = share * BUDGET.failure_probability
        assert checking.accepts(nothing, 0.01, rule, level, *bets) is (share == 1)
        if rule == "anytime":
            assert is_settled(Stop(share=share), nothing, 12, 0.01, *bets) is (share == 1)
    refused(r"share must be in \(0, 1\], got 0", Stop, share=0)


GRID = Grid(Problem(MECHANISM.scheme, MECHANISM.strategy, "zero-out", epsilon=1.0, delta=1e-3), 1.01)


def selected(truth: int, top: int, estimate=None) -> tuple[tuple[int | None, int], list[int]]:
    """What is selected where pilots allow all exponents from `truth` on, and all that were tried."""
    tried = []

    class Known(pilots_module.Pilots):
        def limit_for(self, claim):
            tried.append(round(math.log(claim.mechanism.noise_multiplier) / math.log(1.01)))
            return 1000.0 if tried[-1] >= truth else None

    options = ja.CalibrationOptions(estimate=estimate)
    pilots = Known(options, None, pilots_module.Clock(None, 60.0))
    return route.Route(GRID.problem, options, pilots, None, None).selected(GRID, GRID.ends[0], top), tried


def test_a_search_ends_at_the_smallest_candidate_that_pilots_allow():
    """An estimate says where to begin, and nothing else."""
    for truth, top in [(-296, 40), (-30, -29), (0, 300), (57, 57), (12, 14)]:
        for estimate in [None, 1e-9, 0.75, 1e9]:
            found, tried = selected(truth, top, estimate)
            assert found == (truth, 1000)
            assert max(tried) <= top and len(tried) <= 20


@pytest.mark.parametrize(("truth", "top"), [(13, 12), (0, -500)])
def test_no_candidate_is_worth_samples(truth, top):
    """None that pilots allow is as small as asked for, or that is below the smallest noise of a search."""
    assert selected(truth, top)[0][0] == top + 1


class Ended(pilots_module.Clock):
    def __init__(self, seconds):
        super().__init__(None, seconds)


def test_the_limit_on_samples_is_what_an_easy_target_needs_in_the_time_left():
    for fewest, most, speed, directions, limit in [
        (9.0, None, None, 2, 100_000),
        (1000.5, None, None, 1, 384_192),
        (1e6, None, None, 1, 384e6),
        (1e9, None, None, 1, 60e11 / 1000),  # of any device
        (9.0, 7000, None, 2, 7000),
        (1e6, None, 100.0, 1, 100 * 60),
        (1e6, None, 100.0, 2, 100 * 60 / 2),
        (1e6, 200, 100.0, 1, 200),
    ]:
        pilots = pilots_module.Pilots(ja.CalibrationOptions(max_samples=most), None, Ended(60.0))
        pilots.speed.extend([speed] if speed else [])
        mechanism = SimpleNamespace(
            directions=("remove", "add")[:directions], scheme=SimpleNamespace(iterations=1000)
        )
        claim: Any = SimpleNamespace(mechanism=mechanism)
        assert pilots.limit(claim, fewest) == pytest.approx(limit, rel=1e-2)


@pytest.mark.parametrize(
    ("terms", "samples", "limit"),
    [
        (2048, 2048, 10**9),  # a hundred terms
        (8, 8192, 409_600),  # ten terms show a mean above the threshold, at a fiftieth of the limit
        (1, 30_720, 1_000_000),  # the threshold would have given thirty
        (0, 10_240, 10**9),  # it would have given ten
        (0, 6144, 49_152),  # an eighth of the limit
    ],
)
def test_a_pilot_ends_with_enough_terms_or_where_they_would_have_been_seen(
    terms, samples, limit, monkeypatch
):
    """The same draws are not repeated, and a pilot of zeros predicts what a verification of zeros needs."""
    asked = []

    def draws(chosen, stream, first, number):
        asked.append((first, first + number))
        losses = np.where(np.arange(number * 128) < terms, 60.0, -30.0)
        return [Draws(losses, np.zeros(number * 128))]

    monkeypatch.setattr(base, "draw_in_batches", draws)
    given = ja.CalibrationOptions(max_samples=limit), jax.random.key(0), Ended(1e9)
    needed = pilots_module.Pilots(*given).predicted(CLAIM, of(theta=1e-3), 0.0)
    assert asked == [(at, at + 16) for at in range(0, samples // 128, 16)]
    zeros = math.log(2 / BUDGET.failure_probability) / 1e-3
    if terms == 1:
        assert 2 * zeros < needed < 20 * zeros
    else:
        assert needed == (math.inf if terms else pytest.approx(zeros, rel=0.01))


def test_what_runs_out_of_time_is_not_certified(monkeypatch):
    """Neither the pilots, nor a verification, nor one whose noise is given."""
    short = dict(epsilon=1.0, delta=1e-3, options=ja.CalibrationOptions(seconds=1e-9))
    plan = ja.calibrate(MECHANISM.scheme, MECHANISM.strategy, **short)
    assert plan.certified and isinstance(plan.evidence, Bound)
    said = []
    ja.calibrate(
        MECHANISM.scheme, MECHANISM.strategy, **short, progress=lambda *report: said.append(report[0])
    )
    assert said[0].startswith("certified without samples: noise multiplier ")
    assert said[1] == "not refined by samples: pilots did not end within 1e-09 seconds"
    with pytest.raises(ja.NotCertifiedError, match="not within 1e-09 seconds of samples"):
        ja.calibrate(MECHANISM.scheme, MECHANISM.strategy, **short, noise_multiplier=0.7)
    monkeypatch.setattr(route.Route, "selected", lambda *arguments: (-30, 1000))
    plan = ja.calibrate(MECHANISM.scheme, MECHANISM.strategy, **short)
    assert plan.certified and isinstance(plan.evidence, Bound)
    for seconds in (0, -1.0, math.nan, "60", True):
        refused("seconds must be a number above 0, got", ja.CalibrationOptions, seconds=seconds)


def pass_time(monkeypatch, passed: dict[str, float], cores: int):
    """Clocks of pilots show the seconds in `passed`, on a machine of so many cores."""
    times = SimpleNamespace(monotonic=lambda: passed["wall"], process_time=lambda: passed["cpu"])
    monkeypatch.setattr(pilots_module, "time", times)
    monkeypatch.setattr(pilots_module.os, "cpu_count", lambda: cores)


def test_the_speed_of_a_pilot_does_not_depend_on_other_processes(monkeypatch):
    """A pilot draws 2,048 samples in a CPU second of two cores, whatever the wall clock says."""
    passed = dict(wall=0.0, cpu=0.0)

    def draws(chosen, stream, first, number):
        passed["cpu"], passed["wall"] = passed["cpu"] + 2.0, passed["wall"] + 50.0
        return [Draws(np.full(number * 128, -30.0), np.zeros(number * 128))]

    pass_time(monkeypatch, passed, cores=2)
    monkeypatch.setattr(base, "draw_in_batches", draws)
    pilots = pilots_module.Pilots(ja.CalibrationOptions(), jax.random.key(0), Ended(60.0))
    pilots.predicted(CLAIM, of(theta=1e-3), 0.0)
    assert max(pilots.speed) == 2048.0


def test_a_checkpoint_is_of_one_job_only():
    others = [
        dict(claim=claim_with(CLAIM, noise_multiplier=1.6)),
        dict(claim=claim_with(CLAIM, epsilon=1.1)),
        dict(claim=claim_with(CLAIM, budget=ja.Budget.split(1e-3))),
        dict(claim=claim_with(CLAIM, compose_with=dp_event.GaussianDpEvent(3.0))),
        dict(claim=claim_with(CLAIM, compose_with=dp_event.GaussianDpEvent(4.0))),
        dict(claim=claim_with(CLAIM, dataset_size=1000)),
        dict(stop=Stop("fixed", 1000)),
        dict(proposal="plain"),
        dict(stop=Stop("anytime", 1001)),
        dict(stop=Stop("anytime", 1000, 0.9)),
        dict(again=Sampled(CLAIM.digest, "anytime", 1.0, NotRun(), NotRun())),
        dict(again=Sampled(CLAIM.digest, "anytime", 0.9, NotRun(), NotRun())),
    ]
    base = dict(claim=CLAIM, stop=Stop("anytime", 1000), proposal=None)
    jobs = [verifying._job_digest(**base), *(verifying._job_digest(**base | change) for change in others)]
    assert len(set(jobs)) == len(jobs)


@pytest.fixture(scope="module")
def drawn():
    verdict = ja.verify(MECHANISM, 1.5, 1e-2, proposal="plain", key=jax.random.key(2))
    assert verdict.certified and verdict.remove.num_samples
    return ja.Plan(verdict.claim, verdict.evidence)


def test_certified_believes_counts_alone(drawn):
    assert drawn.certified
    worse = with_side(drawn, "remove", term_counts=((5120, drawn.evidence.remove.num_samples),))
    assert not worse.certified and worse.statement().startswith("NOT CERTIFIED")
    for change in ({"epsilon": 1.4}, {"delta": 0.02}, {"noise_multiplier": 1.4}, {"dataset_size": 50}):
        assert not dataclasses.replace(drawn, claim=claim_with(drawn.claim, **change)).certified, change
    for evidence in (Bound("unamplified"), Bound("pld"), None, NotRun()):
        assert not dataclasses.replace(drawn, evidence=evidence).certified, evidence


def test_a_certified_direction_does_not_carry_the_other(drawn):
    """One direction dominated, the other rejected, not run, or of another kind."""
    remove, add = drawn.evidence.remove, drawn.evidence.add
    rejected = structs.replace(remove, term_counts=((5120, remove.num_samples),))
    for sides in ((rejected, add), (remove, NotRun()), (NotRun(), add), (add, remove), (add, add)):
        evidence = structs.replace(drawn.evidence, remove=sides[0], add=sides[1])
        assert not check(drawn.claim, evidence).certified
    bound = WeightBound(plain(MECHANISM, "remove").spec)
    found = check(drawn.claim, structs.replace(drawn.evidence, remove=bound))
    assert found.flaws == ("remove: the bound on terms of plain is not below delta_v",)


def test_truncated_batches_are_not_dominated():
    """Q is a mixture: both directions are drawn, and evidence that one follows is refused."""
    plan = stored_plan("truncated")
    assert sampled_directions(plan) == ["remove", "add"] and plan.certified
    found = check(plan.claim, structs.replace(plan.evidence, add=Dominated()))
    assert found.flaws == ("add: the add direction of truncated-b-min-sep needs samples",)


def test_fit_refuses_what_is_forged_and_what_fresh_draws_do_not_verify(drawn, monkeypatch):
    import train.training
    from train.procedures import bandmf

    other = dataclasses.replace(drawn, evidence=structs.replace(drawn.evidence, claim="0" * 64))
    refused("plan must be certified", lambda: train.training.fit(other, np.zeros(1), None, np.zeros((5, 1))))
    asked = []

    def rejects(self, **options):
        asked.append(options)
        number = self.evidence.remove.num_samples
        return with_side(self, "remove", term_counts=((5120, number),), loss_counts=((3000, number),)).verdict

    monkeypatch.setattr(ja.Plan, "verify", rejects)
    refused("could not be verified with fresh randomness: remove: ", bandmf._verify, drawn, None)
    assert "key" not in asked[0]


def test_replay_draws_the_stored_key(drawn):
    assert [(seen.moved, seen.accepted) for seen in replay(drawn)] == [(0, True)]
    number = drawn.evidence.remove.num_samples
    lucky = with_side(drawn, "remove", term_counts=((0, number),), loss_counts=((2047, number),))
    assert lucky.certified  # nothing that can be computed is wrong
    assert replay(lucky)[0].moved > 0
    refused("no samples to draw again", replay, ANALYTIC)


ANALYTIC = ja.Plan(
    Claim(dataclasses.replace(MECHANISM, noise_multiplier=12.0), ClaimedTarget.at(1.0, 1e-3), None, None),
    Bound("unamplified"),
)


@pytest.mark.parametrize(
    "kind", [kind if kind == "plain" else slow(kind) for kind in KINDS if kind != "analytic"]
)
def test_stored_fixtures_are_drawn_again(kind):
    """Up to rounding of the machine: one sample in twenty may have another bin."""
    assert all(seen.close and seen.accepted for seen in replay(stored_plan(kind)))


def replayed(plan: ja.Plan, path, capsys, *options) -> tuple[int, str]:
    """Exit code and output of `jaxacct verify --replay` for the plan, as it is stored."""
    plan.save(path)
    return exit_code("verify", path, "--replay", *options), capsys.readouterr().out


def test_the_command_replays(drawn, tmp_path, capsys):
    """Accepted as it was drawn; edited counts are seen, on this machine and on what claims to be another."""
    path = tmp_path / "plan.json"
    code, said = replayed(drawn, path, capsys)
    assert code == 0 and said.endswith("replayed\n") and said.count(" 0 in another bin") == 1
    another = dataclasses.replace(drawn.provenance, device="another")
    code, said = replayed(dataclasses.replace(drawn, provenance=another), path, capsys, "--json")
    assert code == 0 and json.loads(said)["same_device"] is False
    evidence = drawn.evidence

    def with_losses(losses, **fields) -> ja.Plan:
        edited = with_side(drawn, "remove", loss_counts=tuple(sorted(losses.items())))
        return dataclasses.replace(edited, **fields)

    losses = dict(evidence.remove.loss_counts)
    place = max(losses, key=losses.__getitem__)
    one = losses | {place: losses[place] - 1, place - 1: losses.get(place - 1, 0) + 1}
    code, said = replayed(with_losses(one), path, capsys)
    assert code == 1 and "1 in another bin" in said and "NOT replayed" in said
    code, said = replayed(with_losses(one, provenance=another), path, capsys)
    assert code == 0 and "drawn on another, replayed on" in said
    code, said = replayed(with_losses({1024: evidence.remove.num_samples}, provenance=another), path, capsys)
    assert code == 1 and "NOT replayed" in said


def test_the_command_verifies_an_analytic_plan(tmp_path, capsys):
    """By its accountant alone; what only a draw could use is refused, and so is an edited bound."""
    plan = ANALYTIC
    plan.save(tmp_path / "plan.json")

    def verified(*options):
        return exit_code("verify", tmp_path / "plan.json", *options), capsys.readouterr()

    code, said = verified()
    bound = f"accountant unamplified: delta(1) <= {plan.verdict.bound!r}"
    assert code == 0 and said.out == f"{'evidence':<22}{bound}\nverified\n"
    code, said = verified("--json")
    assert json.loads(said.out)["accountant"] == "unamplified"
    for option in (["--max-samples", "9"], ["--rule", "fixed"], ["--proposal", "plain"]):
        code, said = verified(*option)
        assert code == 2 and "must not be given for an analytic plan" in said.err
    code, said = verified("--replay")
    assert code == 2 and "there are no samples to draw again" in said.err
    data = plan.to_json()
    data["claim"]["noise_multiplier"] = 1.0
    (tmp_path / "plan.json").write_text(to_json(data))
    code, said = verified()
    assert code == 2 and "plan digest does not match" in said.err and said.err.count("\n") == 1


def draws(loss=0.5, log_weight=0.0) -> Draws:
    return Draws(np.array([0.1, loss]), np.array([0.0, log_weight]))


def accepted(theta, rule, bets, weights) -> bool:
    return checking.accepts(counts(_0=10**6), theta, rule, BUDGET.failure_probability, bets, weights)


STAGES = {
    "epsilon of verify": lambda: ja.verify(MECHANISM, NAN, 1e-2),
    "delta of verify": lambda: ja.verify(MECHANISM, 1.0, NAN, budget=BUDGET),
    "samples of verify": lambda: ja.verify(MECHANISM, 1.0, 1e-2, max_samples=NAN),
    "noise": lambda: ja.Mechanism(MECHANISM.scheme, MECHANISM.strategy, NAN),
    "claim": lambda: claim_with(CLAIM, epsilon=NAN),
    "budget": lambda: ja.Budget(1e-2, NAN, 1e-4),
    "budget q": lambda: ja.Budget(1e-2, 1e-3, NAN),
    "bins": lambda: bounds.bin_terms([0.1, NAN]),
    "loss bins": lambda: hockey_stick.bin_losses(np.array([0.1, NAN])),
    "loss": lambda: hockey_stick.weighted_terms(draws(loss=NAN), "remove", 1.0),
    "weight": lambda: hockey_stick.weighted_terms(draws(log_weight=NAN), "remove", 1.0),
    "weight of a zero": lambda: hockey_stick.weighted_terms(draws(-9.0, NAN), "remove", 1.0),
    "epsilon of terms": lambda: hockey_stick.weighted_terms(draws(), "remove", NAN),
    "profile": lambda: hockey_stick.weighted_terms(draws(), "remove", 1.0, lambda t: t * NAN),
    "margin of terms": lambda: of().terms(draws(), NAN),
    "scale": lambda: threshold(plain_with(log_scale=NAN), 1e-2),
    "relative error": lambda: threshold(plain_with(relative_error=NAN), 1e-2),
    "total variation": lambda: threshold(plain_with(total_variation=NAN), 1e-2),
    "no samples": lambda: of(plain_with(log_scale=NAN)),
    "margin": lambda: hockey_stick.finite_margin(NAN),
    "theta": lambda: accepted(NAN, "anytime", (0.5,), (1.0,)),
    "theta, fixed": lambda: accepted(NAN, "fixed", (), ()),
    "bets": lambda: accepted(0.1, "anytime", (NAN,), (1.0,)),
    "weights of bets": lambda: accepted(0.1, "anytime", (0.5,), (NAN,)),
    "pilot": lambda: bounds.default_bets(NAN, counts(_0=10)),
    "prediction": lambda: bounds.predicted_samples(NAN, counts(_0=10), 1e-3),
    "upper bound": lambda: bounds.upper_confidence_bound(counts(_0=10), NAN),
    "lower bound": lambda: bounds.lower_confidence_bound(counts(_9=10), NAN),
    "divergence": lambda: bounds.kl(NAN, 0.5),
    "truncation": lambda: truncation.reserve(MECHANISM.scheme, NAN, 500, 60),
    "cover of truncation": lambda: truncation.covers(MECHANISM, NAN),
    "analytic": lambda: analytic.delta_by("unamplified", MECHANISM, NAN),
    "record": lambda: read(float, NAN, "x"),
    "writing": lambda: to_json({"x": NAN}),
}


def plain_with(**fields):
    return dataclasses.replace(plain(MECHANISM, "remove"), **fields)


def test_nan_is_refused_at():
    for stage in STAGES:
        with pytest.raises((ValueError, NonFiniteLossError)) as caught:
            STAGES[stage]()
        assert "\n" not in str(caught.value)


def test_nan_never_compares_as_good(tmp_path, drawn, monkeypatch):
    assert differences(NAN, NAN) and differences({"x": 1.0}, {"x": NAN})
    (tmp_path / "plan.json").write_text('{"epsilon": NaN}')
    refused("NaN is not a number that JSON has", lambda: read_json(tmp_path / "plan.json", "plan"))
    assert not with_side(drawn, "remove", margin=NAN).certified
    refused("share must be in", Stop, share=NAN)
    found = of()
    monkeypatch.setattr(thresholds, "total", lambda *arguments: NAN)
    with pytest.raises(NonFiniteLossError, match="margin"):
        found.margin  # noqa: B018


def test_every_mutant_can_be_planted():
    """The slow command `python -m tests.benchmarks.mutants` would otherwise rot as the code changes."""
    assert not mutants.misplaced()


def test_a_fresh_key_has_64_bits():
    """Two words of their own: with as few as 32 bits two runs of 65,536 would have one key."""
    words = [word for _ in range(4) for word in randomness.key_words(randomness.fresh_key())]
    assert len(set(words)) == 8


def test_no_name_of_the_mutants_means_two_things():
    """A second test file under a name that there was ran the mutants of the first against it, twice."""
    body = ast.parse(Path(mutants.__file__).read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_other_processes_do_not_shorten_the_time_for_samples(monkeypatch):
    """The seconds are CPU time of this process on two cores, with an executor those of the wall clock."""
    passed = dict(wall=5.0, cpu=0.0)
    pass_time(monkeypatch, passed, cores=16)
    clocks = []

    class Kept(pilots_module.Clock):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            clocks.append(self)

    monkeypatch.setattr(sys.modules["jaxacct.calibration.calibrate"], "Clock", Kept)
    monkeypatch.setattr(route.Route, "plan", lambda route: None)
    with ThreadPoolExecutor(1) as pool:
        for executor in (None, pool):
            options = ja.CalibrationOptions(seconds=60.0, executor=executor)
            ja.calibrate(MECHANISM.scheme, MECHANISM.strategy, epsilon=1.0, delta=1e-3, options=options)
    alone, with_workers = clocks
    assert alone.left == with_workers.left == 60.0
    passed["wall"] += 59.0
    assert (alone.left, with_workers.left) == (60.0, 1.0)
    passed["cpu"] += 100.0
    assert (alone.left, with_workers.left) == (10.0, 1.0)
    passed["cpu"] += 20.0
    with pytest.raises(pilots_module.OutOfTimeError):
        alone("drawing", 0, 0)


def test_half_of_the_time_is_left_to_verify_what_a_pilot_has_found():
    """Twelve seconds a pilot: the fourth begins with less than half a minute left, and is not drawn."""
    clock, seen = SimpleNamespace(left=60.0), []

    def limit_for(claim):
        clock.left -= 12.0
        seen.append(claim.mechanism.noise_multiplier)
        return 1000.0 if seen[-1] > 2.05 else None

    problem = Problem(MECHANISM.scheme, MECHANISM.strategy, "zero-out", epsilon=1.0, delta=1e-3)
    options = ja.CalibrationOptions(estimate=2.0)
    found = route.Route(problem, options, SimpleNamespace(limit_for=limit_for, clock=clock), None, None)
    first, limit = found.selected(Grid(problem, 1.01), 0, 200)
    assert (len(seen), limit) == (3, 1000)
    assert 1.01**first == pytest.approx(min(noise for noise in seen if noise > 2.05), rel=1e-12)


def test_fit_verifies_before_its_first_step(drawn, monkeypatch):
    """End to end on a drawn plan: it trains; a forged histogram, which no recomputation sees, is refused
    unless the caller says that it need not be verified."""
    import optax

    from tests.train.runs import fit

    by_any_proposal = ja.Plan.verify  # here by the one that is compiled already
    monkeypatch.setattr(ja.Plan, "verify", lambda *of, **how: by_any_proposal(*of, proposal="plain", **how))
    sized = claim_with(drawn.claim, dataset_size=40)
    honest = forged(drawn, dataset_size=40, budget=ja.Budget.split(1e-2 - sized.reserved))
    # A margin depends on delta_v, a little.
    honest = with_side(honest, "remove", margin=1.001 * drawn.evidence.remove.margin)
    asked = []

    def train(plan, **options):
        data = {"x": np.ones((40, 1), np.float32)}
        options |= dict(progress=lambda what, done, of: asked.append(what))
        return fit(
            plan, np.zeros(1, np.float32), lambda w, e: (w * e["x"]).sum(), data, optax.sgd(0.1), **options
        )

    assert train(honest).steps == 24
    assert asked.index("remove (plain)") < asked.index("training")  # and it was drawn at all
    # Much too little noise, with a histogram that would be enough: certified by all that can be computed.
    lucky = dict(term_counts=((0, 2**20),), loss_counts=((2047, 2**20),))
    little = forged(honest, noise_multiplier=0.7)
    margin = checking.resolve(little.claim, Direction.REMOVE, plain(MECHANISM, "remove").spec).margin
    little = with_side(little, "remove", margin=margin, **lucky)
    assert little.certified
    asked.clear()
    refused("plan could not be verified with fresh randomness: remove: ", train, little)
    assert "training" not in asked
    assert train(little, verify=False, steps=2).steps == 2
