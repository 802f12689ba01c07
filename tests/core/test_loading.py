"""Every refusal of calibration and verification is made again where a plan is loaded.

What a file holds beside its claim is what was drawn; a forger names the forged claim in it and writes the
digest too (`tests/stored_plans.py`), so that only what is forged can give a forgery away.
"""

import dataclasses
import math

import dp_accounting as dp
import numpy as np
import pytest
from msgspec import structs

import jaxacct as ja
from jaxacct.core import truncation
from jaxacct.core.evidence import NotRun
from jaxacct.kernels import randomness
from jaxacct.proposals import base
from jaxacct.proposals.base import Draws
from jaxacct.proposals.candidates import proposals_at
from jaxacct.schemes.protocol.batch_sizes import overflow
from jaxacct.statistics.hockey_stick import LOSS_BIN_WIDTH, Direction, loss_bounds
from jaxacct.statistics.lines import total
from jaxacct.verification.replay import Replayed, replay
from tests.proposals_by_name import proposal_by_name
from tests.refusals import refused
from tests.stored_plans import (
    KINDS,
    analytic,
    as_json,
    changed,
    claim_with,
    forged,
    histograms,
    loaded,
    sampled_directions,
    whole,
    with_histograms,
    with_side,
)

DRAWN = [kind for kind in KINDS if kind != "analytic"]
EACH = pytest.mark.parametrize("kind", DRAWN)


@EACH
def test_what_is_put_together_again_loads(kind):
    """Otherwise what follows would show nothing."""
    plan = whole(kind)
    assert plan.is_sampled and sampled_directions(plan)
    for direction in sampled_directions(plan):
        again = with_histograms(plan, direction, histograms(plan, direction))
        assert again == plan and loaded(again) == plan
    assert forged(plan) == plan


def hopeless(plan, direction):
    """As many samples, all with the largest term; as many losses in the one bin that has it."""
    first, second = histograms(plan, direction)
    number = int(first.sum())
    for part in (first, second):
        part[:] = 0
    first[-1] = number
    second[place_of_the_largest_term(plan, direction)] = number
    return [first, second]


def place_of_the_largest_term(plan, direction) -> int:
    """Return a bin: `(1 - e^{epsilon - L}) e^{(1 - m) L}` is largest at `L = epsilon + ln(m / (m - 1))`."""
    m = plan.verdict.remove.replicas
    if direction == "add":
        return 0
    if m < 2 or plan.compose_with is not None:
        return -1
    most = plan.epsilon + math.log(m / (m - 1))
    return math.floor(most / LOSS_BIN_WIDTH) + len(loss_bounds("remove")) // 2


@EACH
def test_a_rejected_direction_is_not_loaded(kind):
    """Whichever it is, and whatever the other one says."""
    plan = whole(kind)
    for direction in sampled_directions(plan):
        rejected = with_histograms(plan, direction, hopeless(plan, direction))
        assert not rejected.certified and rejected.verdict.directions
        refused(f"{direction}: (mean-not-below-threshold|undecided)", loaded, rejected)
    for direction in ("remove", "add"):
        evidence = structs.replace(plan.evidence, **{direction: NotRun()})
        with pytest.raises(ValueError, match=f"{direction}: not-run|the add direction .* is dominated"):
            loaded(dataclasses.replace(plan, evidence=evidence))


@EACH
def test_no_margin_below_the_one_that_is_needed_is_loaded(kind):
    """A larger one makes terms larger."""
    for share in [0.0, 0.99]:
        plan = whole(kind)
        for direction in sampled_directions(plan):
            needed = total(getattr(plan.verdict, direction).items, "epsilon")
            assert 0 < needed <= getattr(plan.evidence, direction).margin
            refused("the margin for rounding is", loaded, with_side(plan, direction, margin=share * needed))


@EACH
def test_histograms_that_contradict_each_other_are_not_loaded(kind):
    """The attack: losses beyond epsilon whose terms are 0, which any mean test accepts; and the reverse."""
    plan = whole(kind)
    for direction in sampled_directions(plan):
        terms, losses = histograms(plan, direction)
        none, above, below = np.zeros_like(terms), np.zeros_like(losses), np.zeros_like(losses)
        sign = Direction(direction).sign
        place = losses.size // 2 + sign * math.ceil((plan.epsilon + 1) / LOSS_BIN_WIDTH)
        none[0] = above[place] = losses.sum()
        below[0 if sign > 0 else -1] = losses.sum()
        for parts in [(none, above), *([(terms, below)] if terms[1:].any() else [])]:
            with pytest.raises(ValueError, match="the terms are not those that the losses have"):
                loaded(with_histograms(plan, direction, parts))


def test_terms_of_replicas_are_those_of_the_weights_of_their_losses():
    """The attack: as many terms above 0 as losses above epsilon, all of them tiny."""
    plan = whole("replicas")
    terms, losses = histograms(plan, "remove")
    tiny = np.zeros_like(terms)
    tiny[0], tiny[1] = terms[0], terms[1:].sum()
    with pytest.raises(ValueError, match="the terms are not those that the losses have"):
        loaded(with_histograms(plan, "remove", (tiny, losses)))


@EACH
def test_counts_do_not_wrap_around(kind):
    """Four bins of 2^61 are 0 in 64 bits, and less with what else there is."""
    plan = whole(kind)
    direction = sampled_directions(plan)[0]
    many = tuple((place, 2**61) for place in range(4))
    refused("below 2\\^62 together", lambda: loaded(with_side(plan, direction, term_counts=many)))


DERIVED = ("scale", "log_scale", "threshold", "items", "lines", "estimate", "outcome", "accepted", "verdict")
DERIVED += ("reason", "num_samples", "replicas", "total_variation", "relative_error", "delta", "bound")
OF_CLAIM = ("overflow_delta", "truncation_delta", "max_batch_size", "expected_batch_size", "delta_v")


def test_nothing_is_read_that_follows_from_the_claim():
    """A file has no place for scales, thresholds, budget items, verdicts or batch sizes."""
    for kind in KINDS:
        data = as_json(whole(kind))
        evidence = data["evidence"]
        sides = [("evidence", name) for name in ("remove", "add") if name in evidence]
        for at, names in [
            (("evidence",), DERIVED),
            *((side, DERIVED) for side in sides),
            (("claim",), OF_CLAIM),
        ]:
            for name in names:
                if (at, name) == (("claim",), "delta"):
                    continue
                refused("unknown field", ja.Plan.from_json, changed(data, (*at, name), 0.5))
        drawn = {"proposal", "margin", "key", "term_counts", "loss_counts", "bets", "bet_weights"}
        for _, name in sides:
            assert set(evidence[name]) <= drawn | {"kind"}
        assert set(evidence) <= {"kind", "claim", "rule", "share", "remove", "add", "accountant"}


@EACH
def test_draws_come_in_whole_blocks(kind):
    """One sample less in both histograms, as small a term as there is."""
    plan = whole(kind)
    for direction in sampled_directions(plan):
        first, second = histograms(plan, direction)
        first[np.flatnonzero(first)[0]] -= 1
        where = np.flatnonzero(second)
        second[where[-1 if direction == "add" else 0]] -= 1
        assert first.sum() == second.sum()
        assert first.sum() % randomness.BLOCK_SIZE == randomness.BLOCK_SIZE - 1
        refused("whole block", loaded, with_histograms(plan, direction, [first, second]))
        nothing = [np.zeros_like(part) for part in (first, second)]
        refused("whole block", loaded, with_histograms(plan, direction, nothing))
        more = histograms(plan, direction)
        more[1][np.flatnonzero(more[1])[0]] += randomness.BLOCK_SIZE
        refused(r"the same samples|equally many", loaded, with_histograms(plan, direction, more))


@EACH
def test_bets_that_no_verification_makes(kind):
    """Weights beyond 1 would turn any samples into evidence; a rule has bets or none."""
    plan = whole(kind)
    for direction in sampled_directions(plan):
        for bets, weights in (
            ((0.5,), (2.0,)),
            ((1.5,), (1.0,)),
            ((-0.1,), (1.0,)),
            ((0.5, 0.6), (1.0,)),
            ((0.5,), (-1.0,)),
        ):
            assert not with_side(plan, direction, bets=bets, bet_weights=weights).certified
        other_rule = {"anytime": "fixed", "fixed": "anytime"}[plan.evidence.rule]
        for rule in (other_rule, "guess", plan.evidence.rule.upper()):
            assert not dataclasses.replace(plan, evidence=structs.replace(plan.evidence, rule=rule)).certified
        # A rule that has none, where counts alone would do.
        plenty = histograms(plan, direction)
        plenty[0][:], plenty[1][:] = 0, 0
        plenty[0][0] = plenty[1][0 if direction == "remove" else -1] = 2**30
        found = with_histograms(plan, direction, plenty)
        # A composed profile has a floor: terms of 0 are then not those of any loss.
        assert plan.compose_with is not None or getattr(found.verdict, direction).certified
        bets = {"anytime": (), "fixed": (0.5,)}[plan.evidence.rule]
        wrong = with_side(found, direction, bets=bets, bet_weights=bets and (1.0,))
        assert any("bets must be given for the anytime rule alone" in flaw for flaw in wrong.flaws)


TRUNCATED = ja.Mechanism(ja.BMinSep(24, 3, 0.05), ja.BandedToeplitz.square_root(3), 12.0)


def truncated_plan(mechanism, epsilon, delta=1e-3) -> ja.Plan:
    return analytic(mechanism, epsilon, delta, dataset_size=500, truncate_to=60)


def test_truncated_batches_are_covered_for_the_plan_s_own_noise():
    """A bound of an accountant that holds, at a noise whose tails the reserve does not cover."""
    assert loaded(truncated_plan(TRUNCATED, 60.0)).certified
    quiet = dataclasses.replace(TRUNCATED, noise_multiplier=0.3)
    assert loaded(analytic(quiet, 150.0, 1e-3, dataset_size=500)).certified
    assert not truncation.covers(quiet, 150.0)
    refused("does not cover this noise multiplier", lambda: loaded(truncated_plan(quiet, 150.0)))


def test_truncated_batches_need_a_data_set_and_no_composition():
    """Either holds alone."""
    both = analytic(TRUNCATED, 2.0, 1e-3, compose_with=dp.GaussianDpEvent(20.0))
    assert loaded(both).certified and loaded(truncated_plan(TRUNCATED, 2.0)).certified
    data = as_json(truncated_plan(TRUNCATED, 2.0))
    composed = as_json(both)["claim"]["compose_with"]
    assert composed is not None
    for field, value, line in (
        ("compose_with", composed, "must not be given together with compose_with"),
        ("dataset_size", None, "dataset_size must be given with max_batch_size"),
    ):
        refused(line, ja.Plan.from_json, changed(data, ("claim", field), value))


def test_what_is_spent_on_sizes_is_not_spent_again():
    """A budget of all of delta leaves nothing for batches that are truncated, or too large."""
    all_of_it = ja.Budget.split(1e-3)
    for plan in (truncated_plan(TRUNCATED, 2.0), analytic(TRUNCATED, 2.0, 1e-3, dataset_size=500)):
        assert loaded(plan).certified and 0 < plan.claim.reserved < 1e-5
        spent = dataclasses.replace(plan, claim=claim_with(plan.claim, budget=all_of_it))
        refused("the budget spends", loaded, spent)
    alone = analytic(TRUNCATED, 2.0, 1e-3)
    assert loaded(alone) == alone and alone.target.budget == all_of_it
    drawn = whole("replicas")
    assert drawn.claim.reserved > 0
    refused("the budget spends", lambda: loaded(forged(drawn, budget=ja.Budget.split(drawn.delta))))


def test_what_is_spent_on_sizes_is_taken_off_what_a_bound_may_be():
    """A bound that all of delta would allow, and what is left of it does not."""
    bound = analytic(TRUNCATED, 2.0, 1e-3).verdict.bound
    assert bound is not None and loaded(analytic(TRUNCATED, 2.0, bound * (1 + 1e-6))).certified
    less = bound * (1 - 3e-10)  # nearer than what two machines' functions may differ by, and still too small
    refused("above", lambda: loaded(analytic(TRUNCATED, 2.0, less)))
    delta = bound * (1 + 5e-4)  # of which batches too large may take a thousandth
    stops = overflow(TRUNCATED.scheme, 2.0, delta, 500)
    assert stops is not None and stops.delta > delta - bound
    refused("above", lambda: loaded(analytic(TRUNCATED, 2.0, delta, dataset_size=500)))
    assert loaded(analytic(TRUNCATED, 2.0, 2 * delta, dataset_size=500)).certified
    reserve = truncation.reserve(TRUNCATED.scheme, 0.6, 500, 60)
    bound = truncated_plan(TRUNCATED, 0.6).verdict.bound
    assert bound is not None and reserve < bound < 1e7 * reserve
    for factor, holds in ((0.9, False), (1.1, True)):
        assert truncated_plan(TRUNCATED, 0.6, bound + factor * reserve).certified is holds


@EACH
def test_nothing_is_replayed_that_does_not_add_up(kind, nothing_drawn):
    plan = whole(kind)
    direction = sampled_directions(plan)[0]
    refused("does not add up", lambda: replay(with_histograms(plan, direction, hopeless(plan, direction))))
    assert not nothing_drawn


@pytest.fixture
def nothing_drawn(monkeypatch) -> list:
    """Losses far on the private side in place of draws; the proposals that were to be drawn from."""
    asked = []

    def draws(proposal, stream, first, number, dtype=None):
        del stream, first, dtype
        asked.append(proposal)
        losses = np.full(128 * number, -60.0 if proposal.direction == "remove" else 60.0)
        yield Draws(losses, np.full_like(losses, -60.0))

    monkeypatch.setattr(base, "draw_in_batches", draws)
    return asked


@EACH
def test_a_plan_verifies_its_own_claim(kind, nothing_drawn):
    """Composition and budget included, by the proposals of its own evidence, with fresh keys."""
    plan = whole(kind)
    fresh = plan.verify(max_samples=30_000, rule=plan.evidence.rule)
    assert fresh.claim == plan.claim and fresh.evidence.claim == plan.claim.digest
    assert fresh.evidence.rule == plan.evidence.rule and fresh.evidence.share == 1.0
    assert len(fresh.directions) == 2
    for new, old in zip(fresh.directions, plan.verdict.directions, strict=True):
        assert new.certified
        assert (new.proposal, new.items, new.threshold) == (old.proposal, old.items, old.threshold)
        if old.num_samples:
            assert nothing_drawn and new.side.key != old.side.key


@pytest.mark.parametrize(("moved", "close"), [(0, True), (50, True), (51, False), (949, False)])
def test_a_replay_is_close_where_a_twentieth_has_moved(moved, close):
    assert Replayed("remove", 1000, moved, True).close is close


# By mechanism: names that a file may give. Columns or examples overlap, or batches are truncated.
NOT_EXACT = {
    "columns": (
        ja.Mechanism(ja.BMinSep(6, 2, 0.01), ja.Toeplitz((0.8, 0.5, 0.33)), 1.0),
        {"remove": ["plain", "replicas:2"], "add": []},
    ),
    "columns of no Toeplitz matrix": (
        ja.Mechanism(ja.BMinSep(6, 2, 0.01), ja.Dense(np.eye(6) + 0.3 * np.eye(6, k=-2)), 1.0),
        {"remove": ["plain"], "add": []},
    ),
    "examples": (
        ja.Mechanism(ja.IndependentAttribution(6, 2, 0.01, 2), ja.BandedToeplitz((2.0, 1.0)), 1.0),
        {"remove": ["plain", "replicas:4"], "add": []},
    ),
    "truncated batches": (
        ja.Mechanism(ja.TruncatedBMinSep(6, 2, 0.01, 2, 10), ja.BandedToeplitz((2.0, 1.0)), 1.0),
        {side: ["plain", "truncated"] for side in ("remove", "add")},
    ),
}
NAMES = ["plain", "replicas:2", "replicas:4", "replicas:2,4", "replicas:1", "truncated"]


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("what", NOT_EXACT)
def test_a_file_names_no_proposal_that_is_not_for_its_mechanism(what, direction):
    """Neither offered nor read: proofs for exact likelihoods and disjoint columns do not cover these."""
    mechanism, allowed = NOT_EXACT[what]
    epsilon = 0.02
    for name in NAMES:
        if name in allowed[direction]:
            assert proposal_by_name(mechanism, epsilon, direction, name).name == name
        else:
            refused(r"\S", proposal_by_name, mechanism, epsilon, direction, name)
    offered = {proposal.name for proposal in proposals_at(mechanism, epsilon, direction)}
    assert not offered & (set(NAMES) - set(allowed[direction]))
    assert all(proposal_by_name(mechanism, epsilon, direction, name).name == name for name in offered)


@pytest.mark.parametrize("strategy", [mechanism.strategy for mechanism, _ in list(NOT_EXACT.values())[:2]])
def test_truncation_is_known_to_the_likelihood_of_disjoint_columns_alone(strategy):
    for most in (2, 6):  # also where nothing is truncated: still Q is a mixture
        scheme = ja.TruncatedBMinSep(6, 2, 0.3, most, 6)
        refused("must be banded Toeplitz for truncated-b-min-sep", ja.Mechanism, scheme, strategy, 1.5)


@pytest.mark.parametrize("length", [2**32 - 1, 2**32, 2**45])
@pytest.mark.parametrize("name", ["min_separation", "cycle_length"])
def test_lengths_that_fill_the_memory_are_refused(name, length):
    """In one line, where a file is read, too."""
    kind = ja.BMinSep if name == "min_separation" else ja.CyclicPoisson
    refused(f"{name} must be at most 16777216, got {length}", kind, 24, length, 0.05)
    if name == "cycle_length":
        edited = changed(as_json(whole("plain")), ("claim", "scheme", name), length)
        refused("cycle_length must be at most", ja.Plan.from_json, edited)
