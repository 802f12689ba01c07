"""Safety margins as they are applied, orchestration, and NaN at every stage: deterministic, with stubs.

Each test is for a small plausible mistake that acceptance rates are too coarse to see.
"""

import ast
import dataclasses
import functools
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import (
    BandedToeplitz,
    BMinSep,
    Budget,
    Mechanism,
    Plan,
    Poisson,
    calibrate,
    calibration,
    cli,
    verify,
)
from jaxacct.accountants import analytic, truncation
from jaxacct.batch_sizes import batch_sizes, max_batch_size
from jaxacct.files import read_json, to_json
from jaxacct.kernels import randomness
from jaxacct.likelihood import rounding
from jaxacct.proposals import sampling
from jaxacct.proposals.base import Draws, plain
from jaxacct.proposals.candidates import candidates, proposal_by_name, threshold
from jaxacct.records import differences, read
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import NonFiniteLossError
from jaxacct.strategies import Toeplitz
from jaxacct.verification import extrapolation, run
from jaxacct.verification.certificates import of_direction
from jaxacct.verification.target import Target
from tests.benchmarks import mutants

MECHANISM = Mechanism(BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3), 1.5)
BUDGET = Budget.split(1e-2)
NAN = math.nan


def a_run(proposal=None, rule="anytime", **fields) -> run.Run:
    proposal = proposal or plain(MECHANISM, "remove")
    target = Target(1.0, 1e-2, BUDGET)
    made = run.Run(proposal, target, rule, 12_800, {proposal.name: 1.0}, "job")
    return dataclasses.replace(made, **fields)


def counts(**at) -> np.ndarray:
    """A histogram of terms from {"_5": 3}: three terms in bin 5."""
    found = np.zeros(len(bounds.TERM_EDGES), np.int64)
    for place, number in at.items():
        found[int(place[1:])] = number
    return found


# -- What is applied, and in which direction ---


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_margin_is_taken_from_epsilon(direction):
    losses = np.linspace(-2, 2, 128)
    draws = Draws(losses, np.zeros_like(losses))
    found = run._terms(a_run(plain(MECHANISM, direction)), draws, 0.3)
    excess = 0.7 - losses if direction == "remove" else 0.7 + losses
    assert np.allclose(found, np.maximum(0, -np.expm1(excess)), rtol=1e-12, atol=0)
    assert (found >= run._terms(a_run(plain(MECHANISM, direction)), draws, 0.0)).all()


def test_weights_are_raised_by_what_they_are_off():
    """Those of two replicas are `Z e^-L`: a loss that is off by a margin makes them off by as much."""
    proposal, margin = proposal_by_name(MECHANISM, 1.0, "remove", "2 replicas"), 0.3
    draws = Draws(np.linspace(1.0, 3.0, 128), np.full(128, -20.0))
    found = run._terms(a_run(proposal), draws, margin)
    raised = np.exp(margin - 20.0 - proposal.log_scale) * -np.expm1(1.0 - margin - draws.loss)
    assert np.allclose(found, raised, rtol=1e-12, atol=0) and 0 < found.max() < 1


def test_thresholds_are_lowered_by_how_far_the_drawn_law_is_off():
    exact = plain(MECHANISM, "remove")
    off = dataclasses.replace(exact, total_variation=1e-3)
    assert threshold(off, 0.01) == pytest.approx(threshold(exact, 0.01) - 1e-3, rel=1e-9)


def test_nothing_is_drawn_only_where_no_mean_could_be_above():
    """Terms are at most 1: with a threshold a little below that they are drawn."""
    for above, accepted in ((0.05, None), (-0.05, True)):
        scaled = dataclasses.replace(plain(MECHANISM, "remove"), log_scale=math.log(BUDGET.delta_v) + above)
        found = run.nothing_to_draw(a_run(scaled))
        assert (found and found.accepted) == accepted


def test_a_target_is_of_one_adjacency_and_spends_no_more_than_its_delta():
    target, other = Target(1.0, 1e-2, BUDGET), dataclasses.replace(MECHANISM)
    assert target.digest(other) == target.digest(MECHANISM)
    object.__setattr__(other, "adjacency", "replace-one")  # which there is not yet
    assert target.digest(other) != target.digest(MECHANISM)
    with pytest.raises(ValueError, match="budget must spend at most delta"):
        Target(1.0, 0.99e-2, BUDGET)


def test_no_stream_serves_twice(monkeypatch):
    """Searches aside: verification, pilots and the line of one run draw from keys that all differ."""
    used = []

    def nothing(proposal, stream, first, number, dtype=None):
        used.append(tuple(randomness.key_words(stream)))
        zeros = np.full(128 * number, -50.0 if proposal.direction == "remove" else 50.0)
        yield Draws(zeros, np.zeros_like(zeros))

    monkeypatch.setattr(sampling, "draw_in_batches", nothing)
    monkeypatch.setattr(rounding, "loss_margin", lambda *arguments, **options: 0.0)
    monkeypatch.setattr(run, "cheaper_extrapolation", lambda *arguments: used.append(words(arguments[-1])))
    monkeypatch.setattr(
        run, "certify", lambda *arguments, **options: used.append(words(arguments[3])) or stop()
    )

    def words(key):
        return tuple(randomness.key_words(key))

    def stop():
        raise KeyboardInterrupt

    key = jax.random.key(1)
    evidence = verify(MECHANISM, 1.0, 1e-3, proposal="plain", key=key)
    assert evidence.accepted
    assert run.choose_extrapolation(a_run(plain(MECHANISM, "add"), predicted={"plain": 1.0}), key) is None
    with pytest.raises(KeyboardInterrupt):
        run.extrapolate(a_run(plain(MECHANISM, "add")), a_line(), key, None, None)
    # A direction asks for its stream again and again; so each key once in the order of first use.
    assert len(dict.fromkeys(used)) == 6
    assert {evidence.remove.key, evidence.add.key} < set(used)


def test_the_fixed_rule_does_not_peek():
    """However clear the counts are, before the last block there is no verdict; then there is."""
    fixed, clear = a_run(rule="fixed"), counts(_0=10**9)
    for blocks in (1, 16, 99):
        assert run._verdict(fixed, clear, blocks, 100, 0.01, (), ()) is None
    assert run._verdict(fixed, clear, 100, 100, 0.01, (), ())[0] is True
    assert run._verdict(a_run(), clear, 16, 100, 0.01, (0.5,), (1.0,))[0] is True


def test_only_plain_draws_where_what_is_composed_hides_nothing():
    composed = Composed(TabulatedProfile(np.array([-1.0, 1.0]), np.array([1.0, 1.0])), BUDGET.delta_v)
    for direction in ("remove", "add"):
        found = candidates(MECHANISM, 1.0, direction, BUDGET, composed=composed)
        assert [c.proposal.name for c in found] == ["plain"]
        assert len(candidates(MECHANISM, 1.0, direction, BUDGET)) > 1
    assert proposal_by_name(MECHANISM, 1.0, "remove", "2 replicas").replicas == 2
    for direction, name in (("remove", "2 replicas"), ("add", "half-space"), ("add", "zero")):
        with pytest.raises(ValueError, match="is none for"):
            proposal_by_name(MECHANISM, 1.0, direction, name, composed=composed)


def a_line() -> extrapolation.Extrapolation:
    return extrapolation.at_distances(Mechanism(Poisson(30, 0.1), BandedToeplitz((1.0,)), 1.0), 0.5, 1.0, 2.0)


def test_both_confidence_bounds_of_a_line_share_q():
    line, near, far = a_line(), counts(_0=9000, _5000=1000), counts(_0=4000, _5100=6000)
    found = extrapolation.bound_from_counts(line, 1e-6, 0.0, near, far)
    upper, lower = bounds.upper_confidence_bound(near, 5e-7), bounds.lower_confidence_bound(far, 5e-7)
    assert (found.near_upper, found.far_lower, found.q) == (upper, lower, 1e-6)
    assert found.bound == math.exp(line.log_bound(upper, lower))
    assert found.bound < math.exp(line.log_bound(bounds.upper_confidence_bound(near, 5e-8), lower))


def test_a_line_is_accepted_at_its_part_of_q_and_tells_all_of_it(monkeypatch):
    stretch = counts(_0=9000, _5000=1000), counts(_0=4000, _5100=6000)
    monkeypatch.setattr(extrapolation, "count_terms", lambda *arguments: stretch)
    line, seen = a_line(), []
    at_once = extrapolation.bound_from_counts(line, 1e-6, 0.0, *stretch)
    for share in (1.0, 1e-3):
        found = extrapolation.certify(
            line, at_once.bound * (1 + 1e-9), 1e-6, None, share=share, keep=seen.append
        )
        assert found.q == 1e-6
    assert len(seen) > 2  # one stretch for the first
    assert at_once.bound > found.bound


def test_a_line_is_judged_by_delta_v_and_not_by_delta():
    line, target = a_line(), a_run().target
    found = extrapolation.bound_from_counts(line, 1e-6, 0.0, counts(_0=9000, _5000=1000), counts(_5100=9000))
    for bound, accepted in ((target.budget.delta_v, True), (math.nextafter(target.budget.delta_v, 1), False)):
        assert bound < target.delta
        judged = dataclasses.replace(found, bound=bound)
        seen = run.line_evidence(a_run(plain(MECHANISM, "add")), line, judged, jax.random.key(0))
        assert seen.accepted == accepted


def test_what_a_line_does_not_see_is_taken_for_the_worst(monkeypatch):
    """More at the nearer event, less at the farther one: both raise the bound at 0."""
    line = a_line()

    def bound(unseen, near, far):
        monkeypatch.setattr(type(line), "unseen", unseen)
        return line.log_bound(near, far)

    assert bound(0.01, 0.1, 0.4) == bound(0.0, 0.1 + 0.01, 0.4 - 0.01)
    assert bound(0.0, 0.11, 0.4) > bound(0.0, 0.1, 0.4) < bound(0.0, 0.1, 0.39)


def test_a_margin_raises_near_terms_and_lowers_far_ones(monkeypatch):
    losses = np.linspace(-1.0, -0.2, 128)
    monkeypatch.setattr(
        sampling, "draw_in_batches", lambda *arguments: iter([Draws(losses, np.zeros_like(losses))])
    )

    def means(margin):
        seen = extrapolation.count_terms(a_line(), jax.random.key(0), margin, 0, 1)
        return [bounds.mean_upper(part) for part in seen]

    (near, far), (near_margin, far_margin) = means(0.0), means(0.2)
    assert near == far
    assert far_margin < far < near_margin


def test_cross_terms_begin_where_columns_overlap():
    """Bands b + 1 at separation b share c_0 c_b; bands b share nothing."""
    for bands in (2, 3, 5):
        strategy = Toeplitz(tuple(BandedToeplitz.square_root(bands).coefficients))
        c = np.array(strategy.coefficients)
        assert not strategy.cross_terms(40, bands).any()
        shared = float(strategy.cross_terms(40, bands - 1))
        assert shared >= c[0] * c[-1] > 0.01


def test_overflow_is_for_the_whole_run():
    for size, rate, steps in ((1000, 0.05, 1), (1000, 0.05, 5000), (60_000, 0.001, 7200)):
        most = max_batch_size(size, rate, steps)
        assert steps * stats.binom.sf(most, size, rate) <= 1e-9
        assert steps * stats.binom.sf(most - 2, size, rate) > 1e-9


def test_the_largest_batch_is_that_of_the_binomial_law():
    """Against SciPy's quantile, from one example to a hundred million, certain and rare."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, rate = int(10 ** rng.uniform(0, 8)), float(min(1.0, 10 ** rng.uniform(-7, 0.1)))
        steps = int(10 ** rng.uniform(0, 5))
        expected = min(size, stats.binom.isf(1e-9 / steps, size, rate) + 1)
        assert max_batch_size(size, rate, steps) == expected, (size, rate, steps)


# -- Who decides what is released ---


class Seen:
    def __init__(self, accepted):
        self.accepted = accepted


def ladder(monkeypatch, verdict, covered=lambda self, mechanism: True, fallback=100):
    """(exponent, share) of what was verified, and what `calibrate` released: (exponent, evidence).

    Args:
      verdict: exponent -> whether it is accepted.
    """
    asked = []

    def exponent_of(mechanism):
        return round(math.log(mechanism.noise_multiplier) / math.log(1.01))

    def stub(mechanism, epsilon, delta, share=1.0, **options):
        asked.append((exponent_of(mechanism), share))
        # What is tried first is given up where it takes long; the last resort is not.
        assert options["patience"] == (500 if asked[-1][0] < 12 else math.inf)
        return Seen(verdict(asked[-1][0]))

    monkeypatch.setattr(calibration, "verify", stub)
    monkeypatch.setattr(calibration, "analytic_exponent", lambda *arguments: fallback)
    monkeypatch.setattr(calibration._Search, "smallest_exponent", lambda *arguments: (10, 1000))
    monkeypatch.setattr(calibration._Search, "covered", covered)
    monkeypatch.setattr(
        calibration, "make_plan", lambda mechanism, target, evidence, *rest: (mechanism, evidence)
    )
    mechanism, evidence = calibrate(MECHANISM.scheme, MECHANISM.strategy, epsilon=1.0, delta=1e-3)
    return asked, (exponent_of(mechanism), evidence)


@pytest.mark.parametrize(
    ("accepted", "asked", "released"),
    [
        ({10, 11, 12, 15}, [10], 10),
        ({11, 12, 15}, [10, 11], 11),
        ({12, 15}, [10, 11, 15, 12], 12),
        ({15}, [10, 11, 15, 12], 15),
        ({12}, [10, 11, 15], 100),
    ],
)
def test_the_smallest_two_come_first_then_a_ladder_that_ends_at_a_rejection(
    accepted, asked, released, monkeypatch
):
    """Every rung below a rejected one would be one more chance for a wrong acceptance."""
    seen, (exponent, evidence) = ladder(monkeypatch, accepted.__contains__)
    assert ([at for at, _ in seen], exponent) == (asked, released)
    assert evidence is None if released == 100 else evidence.accepted


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
    first = calibration.FIRST_SHARES
    assert sum(map(Fraction, (*first, 1 - sum(first)))) <= 1 < sum(map(Fraction, first)) + Fraction(1, 10)


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
            job = a_run(patience=patience)
            seen = ((n, counts(_0=n * 128 - hits[n - 1], _5120=hits[n - 1])) for n in range(1, 101))
            verdicts = ((n, run._verdict(job, terms, n, 100, theta, *bets)) for n, terms in seen)
            n, (accepted, reason) = next((n, verdict) for n, verdict in verdicts if verdict)
            ends.append((accepted, n))
            if "given up" in reason:
                assert patience == 3000 and not accepted and 13 <= n < 100
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
        verdict = run._verdict(a_run(patience=patience), seen, blocks, 100, 0.05, *bets)
        assert (verdict is not None and "given up" in verdict[1]) is ends
        assert run._verdict(a_run(patience=patience, rule="fixed"), seen, blocks, 100, 0.05, *bets) is None
    for wrong in (0, math.nan):
        with pytest.raises(ValueError, match="patience must be above 0, was"):
            verify(MECHANISM, 1.0, 1e-2, patience=wrong)


@pytest.mark.parametrize("rule", ["anytime", "fixed"])
def test_a_part_of_the_failure_probability_asks_for_more(rule):
    """1,500 terms of 0 against a threshold of 1e-2: e^-11 or so, at q = 1e-4 and at a millionth of it."""
    nothing, bets = counts(_0=1500), bounds.default_bets()
    whole, part = a_run(rule=rule), a_run(rule=rule, share=1e-6)
    assert run._verdict(whole, nothing, 12, 12, 0.01, *bets)[0]
    assert not run._verdict(part, nothing, 12, 12, 0.01, *bets)[0]
    assert part.level == 1e-6 * BUDGET.failure_probability
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], was 0"):
        verify(MECHANISM, 1.0, 1e-2, share=0)


def test_the_ladder_verifies_nothing_that_cuts_do_not_cover(monkeypatch):
    asked, (exponent, _) = ladder(
        monkeypatch,
        lambda exponent: True,
        covered=lambda self, mechanism: mechanism.noise_multiplier > 1.01**11.5,
    )
    assert ([at for at, _ in asked], exponent) == ([15, 12], 12)


def test_what_an_analytic_bound_certifies_is_not_verified(monkeypatch):
    asked, (exponent, _) = ladder(monkeypatch, lambda exponent: exponent != 10, fallback=12)
    assert ([at for at, _ in asked], exponent) == ([10, 11], 11)


@pytest.mark.parametrize("misled", [-9, 0, 9])
@pytest.mark.parametrize("estimate", [None, 1e-9, 0.75, 1e9])
def test_a_search_ends_at_the_smallest_promising_noise_however_glances_err(misled, estimate, monkeypatch):
    """What a glance says only chooses where to look, and an estimate where to glance: the answer is of looks
    alone, and few of them.
    """
    looked = []

    def cost(self, noise, limit, draws_for=math.inf, glance=False):
        exponent = round(math.log(noise) / math.log(1.01))
        looked.append(exponent) if not glance else None
        return 1.0 if exponent >= truth + glance * misled else math.inf

    monkeypatch.setattr(calibration._Search, "cost", cost)
    search = calibration._Search(*[None] * 9)
    for truth, fallback in ((-296, 40), (-30, -29), (0, 300), (57, 57), (12, 14)):
        looked.clear()
        assert search.smallest_exponent(fallback, 1.01, 1000, estimate) == (truth, 1000)
        assert len(looked) <= 12


def test_a_good_estimate_saves_glances(monkeypatch):
    glanced = []

    def cost(self, noise, limit, draws_for=math.inf, glance=False):
        glanced.append(noise) if glance else None
        return 1.0 if noise > 0.7 else math.inf

    monkeypatch.setattr(calibration._Search, "cost", cost)
    spent = []
    for estimate in (None, 0.68):
        glanced.clear()
        search = calibration._Search(*[None] * 9)  # pyright: ignore[reportArgumentType]
        assert search.smallest_exponent(100, 1.01, 1000, estimate) == (-35, 1000)
        spent.append(len(glanced))
    assert spent[1] <= 3 < 6 <= spent[0]
    with pytest.raises(ValueError, match="estimate must be a finite number above 0, was 0"):
        calibrate(MECHANISM.scheme, MECHANISM.strategy, epsilon=1.0, delta=1e-3, estimate=0)


@pytest.mark.parametrize("seen", [True, False])
def test_looks_begin_where_glances_together_say(seen, monkeypatch):
    """From divergences that fall by a third with every step, in pilots of a hundred hits at the edge."""
    looked = []

    def cost(self, noise, limit, draws_for=math.inf, glance=False):
        exponent = round(math.log(noise) / math.log(1.01))
        looked.append(exponent) if not glance else None
        self.laws[noise, "remove"] = "plain", 0.01
        hits = round(100 * 0.4 * math.exp(-0.35 * (exponent + 30))) if seen and -40 < exponent < 20 else 0
        self.seen[noise, "remove"] = 80, counts(_0=max(0, 10_000 - hits), _5120=hits)
        return 1.0 if exponent >= -30 else math.inf

    monkeypatch.setattr(calibration._Search, "cost", cost)
    monkeypatch.setattr(calibration._Search, "cost_by_trend", lambda self, noise: None)
    search = calibration._Search(None, None, None, Target(1.0, 1e-2, BUDGET), *[None] * 5)  # pyright: ignore[reportArgumentType]
    assert search.smallest_exponent(100, 1.01, 10_000) == (-30, 10_000)
    assert (looked == [-30, -31]) is seen


@pytest.mark.parametrize(("term", "looks"), [(0.0, 0), (1e-2, 1)])
def test_where_an_accountant_has_an_answer_a_glance_does_unless_it_saw_something(term, looks, monkeypatch):
    """To be sure of seeing nothing took a third of a search at delta 1e-6."""
    asked, counts = [], bounds.bin_terms(np.full(2048, term))

    def cost(self, noise, limit, draws_for=math.inf, glance=False):
        asked.append((noise, glance))
        self.seen[noise, "remove"] = 16, counts
        return 1e5 if noise >= 1 else math.inf

    monkeypatch.setattr(calibration._Search, "cost", cost)
    monkeypatch.setattr(calibration._Search, "best_case", lambda self, mechanism: 1e4)
    monkeypatch.setattr(calibration._Search, "at", lambda self, noise: None)
    search = calibration._Search(*[None] * 9)
    assert search.smallest_exponent(30, 1.01, None) == (0, 800_000)
    assert [glance for noise, glance in asked if noise == 1.01**30] == [True, False][: 1 + looks]


@pytest.mark.parametrize(
    ("fewest", "most", "limit"),
    [(9.0, None, 100_000), (1000.5, None, 384_192), (1e6, None, 500_000), (9.0, 7000, 7000)],
)
def test_the_limit_on_samples_is_what_an_easy_target_needs(fewest, most, limit, monkeypatch):
    """Half a million draws of README's run take five seconds and save a fifteenth of a grid step.

    A limit that is given is kept.
    """
    looked = []

    def cost(self, noise, limit, draws_for=math.inf, glance=False):
        looked.append(limit) if not glance else None
        return 1.0 if noise >= 1 else math.inf

    monkeypatch.setattr(calibration._Search, "cost", cost)
    monkeypatch.setattr(calibration._Search, "best_case", lambda self, mechanism: fewest)
    search = calibration._Search(*[None] * 9)
    monkeypatch.setattr(calibration._Search, "at", lambda self, noise: None)
    assert search.smallest_exponent(30, 1.01, most, 1.1) == (0, limit)
    assert set(looked) == {limit}


def test_a_search_goes_on_with_what_a_glance_has_drawn(monkeypatch):
    """A look has the draws of the glance and new ones, none twice, and none are drawn where all are seen."""
    asked, proposal = [], plain(MECHANISM, "remove")

    def draws(chosen, stream, first, number):
        asked.append((first, first + number))
        return [Draws(np.full(number * 128, -30.0), np.zeros(number * 128))]

    monkeypatch.setattr(sampling, "draw_in_batches", draws)
    search = calibration._Search(None, None, None, Target(1.0, 1e-2, BUDGET), *[None] * 5)
    pilot = functools.partial(search.pilot, proposal, None, 1e-3, 1e5)
    assert pilot(glance=True).sum() == 16 * 128
    assert pilot().sum() == pilot(glance=True).sum() == pilot().sum() == 48 * 128
    assert asked == [(0, 16), (16, 32), (32, 48)]


def test_a_budget_above_delta_is_refused():
    with pytest.raises(ValueError, match="budget must spend at most delta"):
        verify(MECHANISM, 1.0, 1e-4, budget=Budget.split(1e-3))


def test_a_checkpoint_is_of_one_job_only():
    import dp_accounting as dp

    target = Target(1.0, 1e-2, BUDGET)
    base = dict(mechanism=MECHANISM, target=target, rule="anytime", proposal=None, max_samples=1000)
    others = [
        dict(mechanism=dataclasses.replace(MECHANISM, noise_multiplier=1.6)),
        dict(target=dataclasses.replace(target, epsilon=1.1)),
        dict(target=dataclasses.replace(target, budget=Budget.split(1e-3))),
        dict(target=dataclasses.replace(target, compose_with=dp.GaussianDpEvent(3.0))),
        dict(rule="fixed"),
        dict(proposal="plain"),
        dict(max_samples=1001),
    ]
    jobs = [run._job_digest(**base), *(run._job_digest(**base | change) for change in others)]
    other = dataclasses.replace(target, compose_with=dp.GaussianDpEvent(4.0))
    jobs.append(run._job_digest(**base | {"target": other}))
    assert len(set(jobs)) == len(jobs)


# -- Forged in memory ---


@pytest.fixture(scope="module")
def drawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "loss_margin", lambda *arguments, **options: 1e-6)
        evidence = verify(MECHANISM, 1.5, 1e-2, proposal="plain", key=jax.random.key(2))
        assert evidence.accepted and evidence.remove.num_samples
        yield Plan(MECHANISM, 1.5, 1e-2, evidence=evidence)


def test_certified_does_not_believe_the_verdict(drawn):
    assert drawn.certified
    evidence = drawn.evidence
    worse = dataclasses.replace(evidence.remove, term_counts=((5120, evidence.remove.num_samples),))
    forged = dataclasses.replace(drawn, evidence=dataclasses.replace(evidence, remove=worse))
    assert forged.evidence.accepted and not forged.certified
    assert forged.statement().startswith("NOT CERTIFIED")
    for change in (
        {"epsilon": 1.4},
        {"delta": 0.02},
        {"mechanism": dataclasses.replace(MECHANISM, noise_multiplier=1.4)},
        {"analytic_delta": 0.0},
        {"evidence": None, "analytic_delta": 0.0},
        {"evidence": None, "analytic_accountant": "unamplified", "analytic_delta": 0.0},
        {"truncation_delta": 1e-9},
    ):
        assert not dataclasses.replace(drawn, **change).certified, change


def test_fit_refuses_what_is_forged_and_what_fresh_draws_do_not_verify(drawn, monkeypatch):
    from train import loop

    forged = dataclasses.replace(drawn, evidence=dataclasses.replace(drawn.evidence, target="0" * 64))
    with pytest.raises(ValueError, match="plan must be certified"):
        loop._check(forged, np.zeros((5, 1)), 1, None)
    asked = []

    def rejects(self, **options):
        asked.append(options)
        rejected = dataclasses.replace(self.evidence.remove, accepted=False, reason="the mean is above")
        return dataclasses.replace(self.evidence, remove=rejected)

    monkeypatch.setattr(Plan, "verify", rejects)
    with pytest.raises(ValueError, match="could not be verified with fresh randomness: remove direction"):
        loop._verify_anew(drawn, None)
    assert "key" not in asked[0]


def test_replay_draws_the_stored_key(drawn):
    assert [(seen.moved, seen.accepted) for seen in drawn.replay()] == [(0, True), (0, True)]
    evidence = drawn.evidence
    number = evidence.remove.num_samples
    lucky = dataclasses.replace(evidence.remove, term_counts=((0, number),), loss_counts=((2047, number),))
    lucky = of_direction(lucky, "anytime").rebuilt(MECHANISM, drawn.target)
    forged = dataclasses.replace(drawn, evidence=dataclasses.replace(evidence, remove=lucky))
    assert forged.certified  # nothing that can be computed is wrong
    assert forged.replay()[0].moved > 0
    analytic_plan = calibration.make_plan(
        Mechanism(MECHANISM.scheme, MECHANISM.strategy, 12.0), Target.at(1.0, 1e-3), None
    )
    with pytest.raises(ValueError, match="no draws to repeat"):
        analytic_plan.replay()


def replayed(plan: Plan, path, capsys, *options) -> tuple[int, str]:
    """Exit code and output of `jaxacct verify --replay` for the plan, as it is stored."""
    plan.save(path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(path), "--replay", *options])
    return stop.value.code, capsys.readouterr().out


def test_the_command_replays(drawn, tmp_path, capsys):
    """Accepted as it was drawn; edited counts are seen, on this machine and on what claims to be another."""
    path = tmp_path / "plan.json"
    code, said = replayed(drawn, path, capsys)
    assert code == 0 and said.endswith("replayed\n") and said.count(" 0 in another bin") == 2
    code, said = replayed(dataclasses.replace(drawn, device="another"), path, capsys, "--json")
    assert code == 0 and json.loads(said)["same_device"] is False
    evidence = drawn.evidence

    def with_losses(losses, **fields) -> Plan:
        edited = dataclasses.replace(evidence.remove, loss_counts=tuple(sorted(losses.items())))
        return dataclasses.replace(drawn, evidence=dataclasses.replace(evidence, remove=edited), **fields)

    losses = dict(evidence.remove.loss_counts)
    place = max(losses, key=losses.__getitem__)
    one = losses | {place: losses[place] - 1, 2047: losses.get(2047, 0) + 1}
    code, said = replayed(with_losses(one), path, capsys)
    assert code == 1 and "1 in another bin" in said and "NOT replayed" in said
    code, said = replayed(with_losses(one, device="another"), path, capsys)
    assert code == 0 and "drawn on another, replayed on" in said
    all_else = {1024: evidence.remove.num_samples}
    code, said = replayed(with_losses(all_else, device="another"), path, capsys)
    assert code == 1 and "NOT replayed" in said


def test_the_command_verifies_an_analytic_plan(tmp_path, capsys):
    """By its accountant alone; what only a draw could use is refused, and so is an edited bound."""
    noisy = dataclasses.replace(MECHANISM, noise_multiplier=12.0)
    plan = calibration.make_plan(noisy, Target.at(1.0, 1e-3), None)
    plan.save(tmp_path / "plan.json")

    def verified(*options):
        with pytest.raises(SystemExit) as stop:
            cli.main(["verify", str(tmp_path / "plan.json"), *options])
        return stop.value.code, capsys.readouterr()

    code, said = verified()
    assert (code, said.out) == (0, f"unamplified: delta(1) <= {plan.analytic_delta!r}\nverified\n")
    code, said = verified("--json")
    assert json.loads(said.out)["accountant"] == "unamplified"
    for option in (["--max-samples", "9"], ["--rule", "fixed"], ["--proposal", "plain"]):
        code, said = verified(*option)
        assert code == 2 and "must not be given for an analytic plan" in said.err
    code, said = verified("--replay")
    assert code == 2 and "there are no draws to repeat" in said.err
    text = to_json(plan.to_json() | {"analytic_delta": plan.analytic_delta / 2})
    (tmp_path / "plan.json").write_text(text)
    code, said = verified()
    assert code == 2 and "analytic_delta is" in said.err and said.err.count("\n") == 1


def test_fit_verifies_before_its_first_step(drawn, monkeypatch):
    """End to end on a drawn plan: it trains; a forged histogram, which no recomputation sees, is refused
    unless the caller says that it need not be verified."""
    import optax

    from train.loop import fit

    by_any_proposal = Plan.verify  # here by the one that is compiled already
    monkeypatch.setattr(Plan, "verify", lambda *of, **how: by_any_proposal(*of, proposal="plain", **how))
    expected, largest = batch_sizes(MECHANISM.scheme, 40)
    honest = dataclasses.replace(drawn, dataset_size=40, expected_batch_size=expected, max_batch_size=largest)
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
    little = dataclasses.replace(MECHANISM, noise_multiplier=0.7)
    digest = drawn.target.digest(little)
    sides = {}
    for name in ("remove", "add"):
        seen = getattr(drawn.evidence, name)
        lucky = dataclasses.replace(seen, term_counts=((0, 2**20),), loss_counts=((2047, 2**20),))
        sides[name] = of_direction(lucky, "anytime").rebuilt(little, drawn.target)
    forged = dataclasses.replace(
        honest, mechanism=little, evidence=dataclasses.replace(drawn.evidence, target=digest, **sides)
    )
    assert forged.certified
    asked.clear()
    with pytest.raises(
        ValueError, match="plan could not be verified with fresh randomness: remove direction"
    ):
        train(forged)
    assert "training" not in asked
    assert train(forged, verify=False, steps=2).steps == 2


# -- NaN ---


def draws(loss=0.5, log_weight=0.0) -> Draws:
    return Draws(np.array([0.1, loss]), np.array([0.0, log_weight]))


STAGES = {
    "epsilon of verify": lambda: verify(MECHANISM, NAN, 1e-2),
    "delta of verify": lambda: verify(MECHANISM, 1.0, NAN, budget=BUDGET),
    "samples of verify": lambda: verify(MECHANISM, 1.0, 1e-2, max_samples=NAN),
    "noise": lambda: Mechanism(MECHANISM.scheme, MECHANISM.strategy, NAN),
    "plan": lambda: Plan(MECHANISM, NAN, 1e-2),
    "budget": lambda: Budget(1e-2, NAN, 1e-4),
    "budget q": lambda: Budget(1e-2, 1e-3, NAN),
    "bins": lambda: bounds.bin_terms([0.1, NAN]),
    "loss bins": lambda: hockey_stick.bin_losses(np.array([0.1, NAN])),
    "loss": lambda: hockey_stick.weighted_terms(draws(loss=NAN), "remove", 1.0),
    "weight": lambda: hockey_stick.weighted_terms(draws(log_weight=NAN), "remove", 1.0),
    "weight of a zero": lambda: hockey_stick.weighted_terms(draws(-9.0, NAN), "remove", 1.0),
    "epsilon of terms": lambda: hockey_stick.weighted_terms(draws(), "remove", NAN),
    "profile": lambda: hockey_stick.weighted_terms(draws(), "remove", 1.0, lambda t: t * NAN),
    "margin of terms": lambda: run._terms(a_run(), draws(), NAN),
    "scale": lambda: threshold(plain_with(log_scale=NAN), 1e-2),
    "relative error": lambda: threshold(plain_with(relative_error=NAN), 1e-2),
    "total variation": lambda: threshold(plain_with(total_variation=NAN), 1e-2),
    "nothing to draw": lambda: run.nothing_to_draw(a_run(plain_with(log_scale=NAN))),
    "margin": lambda: run.finite_margin(NAN),
    "theta": lambda: run._accepts(
        counts(_0=10**6), NAN, "anytime", BUDGET.failure_probability, (0.5,), (1.0,)
    ),
    "theta, fixed": lambda: run._accepts(counts(_0=10**6), NAN, "fixed", BUDGET.failure_probability, (), ()),
    "bets": lambda: run._accepts(
        counts(_0=10**6), 0.1, "anytime", BUDGET.failure_probability, (NAN,), (1.0,)
    ),
    "weights of bets": lambda: run._accepts(
        counts(_0=10**6), 0.1, "anytime", BUDGET.failure_probability, (0.5,), (NAN,)
    ),
    "pilot": lambda: bounds.default_bets(NAN, counts(_0=10)),
    "prediction": lambda: bounds.predicted_samples(NAN, counts(_0=10), 1e-3),
    "upper bound": lambda: bounds.upper_confidence_bound(counts(_0=10), NAN),
    "lower bound": lambda: bounds.lower_confidence_bound(counts(_9=10), NAN),
    "divergence": lambda: bounds.kl(NAN, 0.5),
    "distances": lambda: extrapolation.at_distances(a_line().near.mechanism, 0.5, NAN, 2.0),
    "epsilon of a line": lambda: extrapolation.at_distances(a_line().near.mechanism, NAN, 1.0, 2.0),
    "q of a line": lambda: extrapolation.bound_from_counts(a_line(), NAN, 0.0, counts(_5=9), counts(_9=9)),
    "cuts": lambda: truncation.reserve(MECHANISM.scheme, NAN, 500, 60),
    "cover of cuts": lambda: truncation.covers(MECHANISM, NAN),
    "analytic": lambda: analytic.delta_by("unamplified", MECHANISM, NAN),
    "record": lambda: read(float, NAN, "x"),
    "writing": lambda: to_json({"x": NAN}),
}


def plain_with(**fields):
    return dataclasses.replace(plain(MECHANISM, "remove"), **fields)


@pytest.mark.parametrize("stage", STAGES)
def test_nan_is_refused_at(stage):
    with pytest.raises((ValueError, NonFiniteLossError)) as caught:
        STAGES[stage]()
    assert "\n" not in str(caught.value)


def test_nan_never_compares_as_good(tmp_path, drawn, monkeypatch):
    line = a_line()
    assert not line.log_bound(NAN, 0.5) <= 0.0 or math.exp(line.log_bound(NAN, 0.5)) > 0.1
    assert differences(NAN, NAN) and differences({"x": 1.0}, {"x": NAN})
    (tmp_path / "plan.json").write_text('{"epsilon": NaN}')
    with pytest.raises(ValueError, match="NaN is not a number that JSON has"):
        read_json(tmp_path / "plan.json", "plan")
    margin = dataclasses.replace(drawn.evidence.remove, margin=NAN)
    for change in (margin, dataclasses.replace(drawn.evidence.remove, scale=NAN)):
        changed = dataclasses.replace(drawn, evidence=dataclasses.replace(drawn.evidence, remove=change))
        assert not changed.certified
    monkeypatch.setattr(run, "total", lambda *arguments: NAN)
    monkeypatch.setattr("jaxacct.proposals.extrapolation.total", lambda *arguments: NAN)
    with pytest.raises(NonFiniteLossError, match="margin"):
        run.margin_of(a_run())
    with pytest.raises(NonFiniteLossError, match="margin"):
        extrapolation.margin_of_line(line)


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


def test_a_search_ends_a_pilot_where_it_is_clear_and_not_before():
    """Counts of (terms of 0, terms of 1) at theta 1e-3."""

    def ends(zeros, ones):
        counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
        counts[0], counts[-1] = zeros, ones
        return calibration._seen_enough(counts, 1e-3, 500_000)

    assert not ends(0, 0)
    assert ends(4990, 30) and ends(2000, 10)  # enough seen; far above
    assert ends(5100, 0) and not ends(4800, 0) and not ends(5100, 1)  # far below
    assert ends(10_000, 9) and not ends(9000, 9)
    assert not ends(4000, 10)
