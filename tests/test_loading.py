"""Every refusal of calibration and verification is made again where a plan is loaded.

The forgeries are consistent in themselves (`tests/tampering.py`): only what is forged can give them away.
"""

import dataclasses

import dp_accounting as dp
import numpy as np
import pytest
from jaxacct.verification.certificates import of_direction

from jaxacct import (
    BandedToeplitz,
    BMinSep,
    IndependentAttribution,
    Mechanism,
    Plan,
    Toeplitz,
    TruncatedBMinSep,
)
from jaxacct.accountants import truncation
from jaxacct.batch_sizes import batch_sizes, overflow
from jaxacct.kernels import randomness
from jaxacct.proposals import sampling
from jaxacct.proposals.base import Draws
from jaxacct.proposals.candidates import proposals_at
from jaxacct.proposals.composed import composed_add_candidates
from jaxacct.proposals.extrapolation import at_distances
from jaxacct.statistics.composed import Composed
from jaxacct.strategies import Dense
from jaxacct.verification.replay import Replayed
from tests.proposals import proposal_by_name
from tests.tampering import DRAWN, analytic, drawn_directions, histograms, is_line, loaded, restated, whole
from tests.test_allowances import gaussian_profile

EACH = pytest.mark.parametrize("kind", DRAWN)


@EACH
def test_what_is_restated_without_a_change_loads(kind):
    """Otherwise what follows would show nothing."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        again = restated(plan, direction)
        assert again == plan and loaded(again) == plan


def hopeless(plan, direction):
    """As many draws, nearly all with the largest term; as many losses in the one bin that has it."""
    first, second = histograms(plan, direction)
    number = int(first.sum())
    for part in (first, second):
        part[:] = 0
    first[-1] = number
    if is_line(plan, direction):
        second[0] = number
    else:
        second[-1 if direction == "remove" else 0] = number
    return [first, second]


@EACH
def test_a_rejected_direction_is_not_loaded(kind):
    """Whichever it is, whatever the other one says, and whether the file owns up to it or not."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        rejected = restated(plan, direction, hopeless(plan, direction))
        assert not getattr(rejected.evidence, direction).accepted
        claimed = restated(plan, direction, hopeless(plan, direction), accepted=True)
        for forged in (rejected, claimed):
            assert not forged.certified
            with pytest.raises(ValueError, match=f"{direction}: the histogram does not support|accepted is"):
                loaded(forged)


@EACH
@pytest.mark.parametrize("share", [0.0, 0.99])
def test_no_margin_below_the_one_that_is_needed_is_loaded(kind, share):
    """Of mean tests and of lines, with the bounds that it would give."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        lines = getattr(plan.evidence, direction).lines
        needed = sum(line.amount for line in lines if line.kind == "epsilon")
        forged = restated(plan, direction, margin=share * needed)
        if is_line(plan, direction):
            assert forged.evidence.add.extrapolation.margin == share * needed
        with pytest.raises(ValueError, match=r"put aside for rounding where|not those that the losses have"):
            loaded(forged)


@EACH
def test_what_is_put_aside_is_not_made_less(kind):
    """Each item in turn, and all that it goes into: they are functions of mechanism and target."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        seen = getattr(plan.evidence, direction)
        for place, line in enumerate(seen.lines):
            less = dataclasses.replace(line, amount=line.amount * 0.999)
            if less == line:
                continue
            for lines in (
                (*seen.lines[:place], less, *seen.lines[place + 1 :]),
                seen.lines[:place] + seen.lines[place + 1 :],
            ):
                changed = dataclasses.replace(seen, lines=lines)
                evidence = dataclasses.replace(plan.evidence, **{direction: changed})
                assert not dataclasses.replace(plan, evidence=evidence).certified


@EACH
def test_draws_come_in_whole_blocks(kind):
    """One draw less in both histograms, as small a term as there is."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        first, second = histograms(plan, direction)
        first[np.flatnonzero(first)[0]] -= 1
        where = np.flatnonzero(second)
        second[where[-1 if direction == "add" and not is_line(plan, direction) else 0]] -= 1
        assert first.sum() % randomness.BLOCK_SIZE == randomness.BLOCK_SIZE - 1
        with pytest.raises(ValueError, match="whole block"):
            loaded(restated(plan, direction, [first, second]))
        if not is_line(plan, direction):
            seen = getattr(plan.evidence, direction)
            empty = dataclasses.replace(seen, term_counts=(), loss_counts=(), num_samples=0, estimate=0.0)
            evidence = dataclasses.replace(plan.evidence, **{direction: empty})
            with pytest.raises(ValueError, match="whole block"):
                loaded(dataclasses.replace(plan, evidence=evidence))
        more = histograms(plan, direction)
        more[1][np.flatnonzero(more[1])[0]] += randomness.BLOCK_SIZE
        with pytest.raises(ValueError, match=r"the same draws|equally many|losses have"):
            loaded(restated(plan, direction, more))


@EACH
def test_bets_that_no_verification_makes(kind):
    """Weights beyond 1 would turn any draws into evidence; a rule has bets or none."""
    plan = whole(kind)
    for direction in drawn_directions(plan):
        seen = getattr(plan.evidence, direction)
        if is_line(plan, direction):
            continue
        for bets, weights in (
            ((0.5,), (2.0,)),
            ((1.5,), (1.0,)),
            ((-0.1,), (1.0,)),
            ((0.5, 0.6), (1.0,)),
            ((0.5,), (-1.0,)),
        ):
            changed = dataclasses.replace(seen, bets=bets, bet_weights=weights)
            evidence = dataclasses.replace(plan.evidence, **{direction: changed})
            assert not dataclasses.replace(plan, evidence=evidence).certified
        other_rule = {"anytime": "fixed", "fixed": "anytime"}[plan.evidence.rule]
        for rule in (other_rule, "guess", plan.evidence.rule.upper()):
            evidence = dataclasses.replace(plan.evidence, rule=rule)
            assert not dataclasses.replace(plan, evidence=evidence).certified


# --- Truncated batches, composition, sizes ---

TRUNCATED = Mechanism(BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3), 12.0)


def cut(mechanism, epsilon, **options) -> Plan:
    reserve = truncation.reserve(mechanism.scheme, epsilon, 500, 60)
    return analytic(mechanism, epsilon, 1e-3, dataset_size=500, max_batch_size=60, truncation_delta=reserve,
                    **options)  # fmt: skip


def test_truncated_batches_are_covered_for_the_plan_s_own_noise():
    """A bound of an accountant that holds, at a noise whose tails the reserve does not cover."""
    assert loaded(cut(TRUNCATED, 60.0)).certified
    quiet = dataclasses.replace(TRUNCATED, noise_multiplier=0.3)
    assert loaded(analytic(quiet, 150.0, 1e-3, dataset_size=500)).certified
    assert not truncation.covers(quiet, 150.0)
    with pytest.raises(ValueError, match="does not cover this noise multiplier"):
        loaded(cut(quiet, 150.0))


def test_truncated_batches_need_their_sizes_and_no_composition():
    """Either holds alone."""
    event = dp.GaussianDpEvent(20.0)
    both = cut(TRUNCATED, 2.0, compose_with=event)
    assert loaded(analytic(TRUNCATED, 2.0, 1e-3, compose_with=event)).certified
    assert loaded(cut(TRUNCATED, 2.0)).certified
    with pytest.raises(ValueError, match=r"cannot be cut without .* or composed"):
        loaded(both)
    for name in ("dataset_size", "max_batch_size"):
        assert not dataclasses.replace(cut(TRUNCATED, 2.0), **{name: None}).certified


def test_what_is_spent_on_sizes_is_not_spent_again():
    """The bound is compared with what is left of delta, and each of both with its own."""
    plan = cut(TRUNCATED, 2.0)
    for change in (
        {"truncation_delta": plan.truncation_delta / 2},
        {"overflow_delta": 1e-9},
        {"delta": plan.truncation_delta},
    ):
        assert not dataclasses.replace(plan, **change).certified
    stopping = analytic(TRUNCATED, 2.0, 1e-3)
    assert loaded(stopping) == stopping
    assert not dataclasses.replace(stopping, overflow_delta=1e-9).certified


def test_what_is_spent_on_sizes_is_taken_off_what_a_bound_may_be():
    """A bound that all of delta would allow, and what is left of it does not."""
    alone = analytic(TRUNCATED, 2.0, 1e-3)
    bound = alone.analytic_delta
    assert bound is not None and loaded(analytic(TRUNCATED, 2.0, bound * (1 + 1e-6))).certified
    less = bound * (1 - 3e-10)  # nearer than what two machines' functions may differ by, and still too small
    forged = dataclasses.replace(alone, delta=less, analytic_delta=less)
    with pytest.raises(ValueError, match="above"):
        loaded(forged)
    delta = bound * (1 + 5e-4)  # of which batches too large may take a thousandth
    stops = overflow(TRUNCATED.scheme, 2.0, delta, 500)
    assert stops is not None and stops.delta > delta - bound
    with pytest.raises(ValueError, match="above"):
        loaded(analytic(TRUNCATED, 2.0, delta, dataset_size=500, overflow=stops))
    plenty = overflow(TRUNCATED.scheme, 2.0, 2 * delta, 500)
    assert loaded(analytic(TRUNCATED, 2.0, 2 * delta, dataset_size=500, overflow=plenty)).certified
    reserve = truncation.reserve(TRUNCATED.scheme, 0.6, 500, 60)
    bound = cut(TRUNCATED, 0.6).analytic_delta
    assert bound is not None and reserve < bound < 1e7 * reserve
    for factor, holds in ((0.9, False), (1.1, True)):
        plan = dataclasses.replace(cut(TRUNCATED, 0.6), delta=bound + factor * reserve)
        assert plan.certified is holds


def test_what_is_spent_on_sizes_is_taken_off_what_draws_may_show():
    """A budget of all of delta leaves nothing for batches too large."""
    plan = whole("replicas")
    assert plan.evidence is not None and plan.dataset_size is not None and plan.certified
    stops = overflow(plan.mechanism.scheme, plan.epsilon, plan.delta, plan.dataset_size)
    assert stops is not None
    sizes = batch_sizes(plan.mechanism.scheme, plan.dataset_size, None, stops.probability)
    forged = dataclasses.replace(plan, overflow_delta=stops.delta, max_batch_size=sizes[1])
    with pytest.raises(ValueError, match="the budget spends"):
        loaded(forged)


@EACH
def test_nothing_is_replayed_that_does_not_add_up(kind, nothing_drawn):
    plan = whole(kind)
    direction = drawn_directions(plan)[0]
    forged = restated(plan, direction, hopeless(plan, direction))
    with pytest.raises(ValueError, match="does not add up"):
        forged.replay()


def test_lines_are_of_the_anytime_rule_and_of_what_theorem_4_covers():
    """One Gaussian Q and losses that are exact; the bounds of both laws hold at any stopping time."""
    plan = whole("line")
    certificate = of_direction(plan.evidence.add, "anytime")
    assert certificate.recheck(plan.mechanism, plan.target) == []
    assert of_direction(plan.evidence.add, "fixed").recheck(plan.mechanism, plan.target)
    for what in NOT_EXACT.keys() - {"examples"}:  # two overlap as their likelihood says, exactly
        mechanism = NOT_EXACT[what][0]
        with pytest.raises(ValueError, match="does not cover this scheme and strategy"):
            at_distances(mechanism, 0.02, 1.0, 2.0)


@pytest.fixture
def nothing_drawn(monkeypatch):
    """Losses far on the private side in place of draws."""

    def draws(proposal, stream, first, number, dtype=None):
        del stream, first, dtype
        losses = np.full(128 * number, -60.0 if proposal.direction == "remove" else 60.0)
        yield Draws(losses, np.full_like(losses, -60.0))

    monkeypatch.setattr(sampling, "draw_in_batches", draws)


@EACH
def test_a_plan_verifies_its_own_target(kind, nothing_drawn):
    """Composition and budget included: the digest of fresh evidence is that of the stored one."""
    plan = whole(kind)
    fresh = plan.verify(max_samples=256)
    assert fresh.target == plan.evidence.target and fresh.budget == plan.evidence.budget


@pytest.mark.parametrize(("moved", "close"), [(0, True), (50, True), (51, False), (949, False)])
def test_a_replay_is_close_where_a_twentieth_has_moved(moved, close):
    assert Replayed("remove", 1000, moved, True).close is close


# --- What is offered and what is read by its name ---

CUT_NAMES = ["truncated", "truncated-mean"]
# By mechanism: names that a file may give. Columns or examples overlap, or batches are cut.
NOT_EXACT = {
    "columns": (
        Mechanism(BMinSep(6, 2, 0.01), Toeplitz((0.8, 0.5, 0.33)), 1.0),
        {"remove": ["plain", "replicas:2"], "add": ["plain", "plain-bounded"]},
    ),
    "columns of no Toeplitz matrix": (
        Mechanism(BMinSep(6, 2, 0.01), Dense(np.eye(6) + 0.3 * np.eye(6, k=-2)), 1.0),
        {"remove": ["plain"], "add": ["plain", "plain-bounded"]},
    ),
    "examples": (
        Mechanism(IndependentAttribution(6, 2, 0.01, 2), BandedToeplitz((2.0, 1.0)), 1.0),
        {
            "remove": ["plain", "example-replicas:3", "pairs:4,0"],
            "add": ["plain", "plain-bounded"],
        },
    ),
    "cut batches": (
        Mechanism(TruncatedBMinSep(6, 2, 0.01, 2, 10), BandedToeplitz((2.0, 1.0)), 1.0),
        {side: ["plain", *CUT_NAMES] for side in ("remove", "add")},
    ),
}
NAMES = [
    "plain",
    "zero",
    "plain-bounded",
    "replicas:2",
    "example-replicas:3",
    "inflated-replicas:2,4",
    "pairs:4,0",
    "pairs:4,1",
    "pairs:1,1",
    "mean-overlaps:0",
    "mean-overlaps:1",
    "mean-overlaps:2",
    *CUT_NAMES,
]


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
            with pytest.raises(ValueError, match=r"\S"):
                proposal_by_name(mechanism, epsilon, direction, name)
    offered = {proposal.name for proposal in proposals_at(mechanism, epsilon, direction)}
    assert not offered & (set(NAMES) - set(allowed[direction]))
    assert all(proposal_by_name(mechanism, epsilon, direction, name).name == name for name in offered)


def test_cut_batches_have_no_proposals_of_a_gaussian_q():
    """Composed or not: f has no floor and no tangents."""
    whole_profile = Composed(gaussian_profile(), 1e-4)
    mechanism = NOT_EXACT["cut batches"][0]
    assert composed_add_candidates(mechanism, 1.0, whole_profile) == []
    uncut = dataclasses.replace(mechanism, scheme=mechanism.scheme.uncut)
    assert composed_add_candidates(uncut, 0.02, whole_profile)


@pytest.mark.parametrize("strategy", [mechanism.strategy for mechanism, _ in list(NOT_EXACT.values())[:2]])
def test_cuts_are_known_to_the_likelihood_of_disjoint_columns_alone(strategy):
    with pytest.raises(ValueError, match="must be banded Toeplitz for truncated-b-min-sep"):
        Mechanism(TruncatedBMinSep(6, 2, 0.3, 2, 6), strategy, 1.5)
    # The same scheme where nothing is cut: still Q is a mixture.
    with pytest.raises(ValueError, match="must be banded Toeplitz for truncated-b-min-sep"):
        Mechanism(TruncatedBMinSep(6, 2, 0.3, 6, 6), strategy, 1.5)
