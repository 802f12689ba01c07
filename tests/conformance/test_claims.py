"""Claims and evidence, each through one table.

Claims, for every scheme: a field of the claim -> the numbers that must change with it. That a number is right
says nothing where the claim asks for it with another argument. Each is computed again from the proofs
(proofs/rounding.md, section 8), and compared with what the claim, its budget and its file state. Users come
first: their reserve depends on epsilon.

Evidence of every kind: a new one needs a line in `STORED`. Nothing is drawn: they are those of stored plans.
That samples are drawn again bit for bit is in tests/core/test_guards.py, and that forged counts are seen.
"""

import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from msgspec import structs
from scipy import stats

from jaxacct import BandedToeplitz, FixedOrder, Mechanism, Plan
from jaxacct.common.files import to_json
from jaxacct.core import evidence as data
from jaxacct.core.check import check
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound, evidence_from_json, evidence_to_json
from jaxacct.core.text import budget_items, verdict_lines, verdict_to_json
from jaxacct.report.facts import mechanism_rows
from jaxacct.schemes import SCHEMES
from tests.conformance.test_schemes import MEMBERS
from tests.refusals import refused
from tests.stored_plans import claim_with, whole, with_side

SCHEMES_OF_CLAIMS = {name: members[0] for name, members in MEMBERS.items()}
SCHEMES_OF_CLAIMS["fixed-order"] = FixedOrder(4, 2, 2)
USERS_FIRST = sorted(SCHEMES_OF_CLAIMS, key=lambda name: SCHEMES_OF_CLAIMS[name].unit == "example")
# With a reserve for truncated batches.
TRUNCATED = "poisson", "cyclic-poisson", "balls-in-bins", "b-min-sep"
STOPS, SHARE = 1e-9, 1e-3  # probability of a stopped run, and the most of delta that its reserve takes
EPSILON, DELTA, SIZE = 2.0, 1e-5, 40_000


def claim_of(scheme, *, epsilon=EPSILON, delta=DELTA, size=SIZE, truncate_to=None) -> Claim:
    """The claim of the scheme with independent noise; one that dictates its data set has that."""
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), 1.0)
    return Claim(
        mechanism, ClaimedTarget.at(epsilon, delta), scheme.required_dataset_size or size, truncate_to
    )


def expected(claim: Claim) -> dict:
    """The same numbers by the formulas of the proofs."""
    scheme, size = claim.mechanism.scheme, claim.dataset_size
    stops = not (claim.truncate_to or scheme.batch_size_cap or scheme.patterns)
    times = 1 if scheme.others_are_independent else 1 + math.exp(claim.target.epsilon)
    reserve = min(STOPS * times, SHARE * claim.target.delta)
    numbers = {"stops": reserve / times if stops else None, "reserve": reserve if stops else None}
    largest = claim.truncate_to or scheme.batch_size_cap
    if scheme.patterns:
        largest = math.ceil(scheme.expected_batch_sizes(size).mean())
    elif stops:  # at most this probability that any step exceeds it, by the union over steps
        rates = scheme.max_rate if scheme.batch_rates is None else scheme.participation_probabilities()
        tails = stats.binom.sf(np.arange(size + 1)[:, None], size, rates).mean(axis=1)
        largest = int(np.argmax(tails <= numbers["stops"] / scheme.iterations))
        largest = min(size, largest + 1)  # one more than that, for the rounding of the tail
    mean = scheme.expected_batch_sizes(size).mean()
    return numbers | {"largest": largest, "mean": pytest.approx(float(mean), rel=1e-12)}


def found(claim: Claim) -> dict:
    stops = claim.overflow
    mean, largest = claim.batch_sizes
    numbers = {"stops": None, "reserve": None}
    if stops is not None:
        numbers = {"stops": stops.probability, "reserve": stops.delta}
    return numbers | {"largest": largest, "mean": mean}


def near(one, other) -> bool:
    return one == (other if not isinstance(other, float) else pytest.approx(other, rel=1e-12, abs=0))


def test_every_scheme_is_in_the_table():
    assert set(SCHEMES_OF_CLAIMS) == set(SCHEMES)
    independent = [SCHEMES_OF_CLAIMS[name].others_are_independent for name in USERS_FIRST]
    assert not independent[0] and set(independent) == {True, False}, "the column of users is not empty"


@pytest.mark.parametrize("name", USERS_FIRST)
def test_each_field_of_a_claim_changes_its_numbers(name):
    scheme = SCHEMES_OF_CLAIMS[name]
    fixed = scheme.required_dataset_size is not None
    stops = not (scheme.batch_size_cap or scheme.patterns)
    by_epsilon = stops and not scheme.others_are_independent
    table = {
        "epsilon": ({"epsilon": 6.0}, {"stops", "reserve"} if by_epsilon else set()),
        "delta": ({"delta": 1e-11}, {"stops", "reserve"} if stops else set()),
        "dataset_size": ({"size": 2 * SIZE}, {"mean"} if scheme.batch_size_cap else {"mean", "largest"}),
    }
    if fixed:  # another size is another scheme
        del table["dataset_size"]
    if stops:
        table["truncate_to"] = ({"truncate_to": 17}, {"stops", "reserve", "largest"})
    base = claim_of(scheme)
    numbers = found(base)
    for key, value in expected(base).items():
        assert near(numbers[key], value), key
    for field, (change, must_change) in table.items():
        other = claim_of(scheme, **change)
        changed = found(other)
        assert other.digest != base.digest, field
        for key, value in expected(other).items():
            assert near(changed[key], value), (field, key)
        really = {key for key in numbers if not near(changed[key], numbers[key])}
        # A rarer stop has a larger batch, where batches are random.
        if "stops" in must_change and scheme.max_rate < 1:
            must_change = must_change | {"largest"}
        assert really == must_change, field


@pytest.mark.parametrize("name", USERS_FIRST)
def test_the_budget_shows_every_reserve(name):
    """Items of the budget and of the file add up to what the claim reserves, no more and no less."""
    scheme = SCHEMES_OF_CLAIMS[name]
    for change in ({}, {"truncate_to": 39_000}):
        if change and name not in TRUNCATED:
            continue
        claim = claim_of(scheme, **change)
        verdict = check(claim, Bound("revealed-pattern"))
        items = dict(budget_items(verdict))
        reserve, truncated = expected(claim)["reserve"], claim.truncation_delta
        assert items.get("runs stopped by a batch too large") == (reserve and pytest.approx(reserve))
        assert items.get("truncated batches") == truncated
        assert claim.reserved == pytest.approx((reserve or 0) + (truncated or 0))
        assert sum(items.values()) == pytest.approx((verdict.bound or 0.0) + claim.reserved)
        notes = Plan(claim, Bound("revealed-pattern")).to_json()["notes"]
        assert notes["overflow_delta"] == (reserve and pytest.approx(reserve))
        assert notes["max_batch_size"] == expected(claim)["largest"]
        assert f" {claim.batch_sizes[1]} at most" in dict(mechanism_rows(claim))["batch size"]


@pytest.mark.parametrize("name", [name for name in USERS_FIRST if SCHEMES_OF_CLAIMS[name].unit == "user"])
def test_a_budget_that_leaves_no_room_for_stopped_users_is_refused(name):
    """At epsilon 6 the reserve of a user's claim is 404 times that of an example's."""
    claim = claim_of(SCHEMES_OF_CLAIMS[name], epsilon=6.0)
    if claim.mechanism.scheme.others_are_independent:
        return
    refused("the budget spends", claim.check_reserves)
    target = ClaimedTarget.at(6.0, DELTA, reserved=expected(claim)["reserve"] * (1 + 1e-9))
    dataclasses.replace(claim, target=target).check_reserves()
    target = ClaimedTarget.at(6.0, DELTA, reserved=expected(claim)["reserve"] * 0.5)
    refused("the budget spends", lambda: dataclasses.replace(claim, target=target).check_reserves())


# By type: a stored plan that has it, and in which direction.
STORED = {
    data.Mean: ("plain", "remove"),
    data.Dominated: ("replicas", "add"),
    data.WeightBound: None,  # of much noise: tests/core/test_guards.py
    data.NotRun: None,
    data.Bound: ("analytic", None),
    data.Sampled: ("replicas", None),
}
OTHER_CLAIM = "the samples are for another mechanism, target or data set"
KINDS = pytest.mark.parametrize("kind", [kind for kind, stored in STORED.items() if stored])


def test_every_kind_of_evidence_is_in_the_table():
    assert set(STORED) == {*typing.get_args(data.Side), *typing.get_args(data.Evidence)}
    for kind, stored in STORED.items():
        if stored:
            name, direction = stored
            found = whole(name).evidence
            assert type(found if direction is None else getattr(found, direction)) is kind


@KINDS
def test_it_holds_for_its_own_claim_and_no_other(kind):
    plan = whole(STORED[kind][0])
    assert check(plan.claim, plan.evidence).certified
    less = claim_with(plan.claim, noise_multiplier=0.05 * plan.noise_multiplier)
    for claim in (less, claim_with(plan.claim, epsilon=plan.epsilon / 100)):
        assert not check(claim, plan.evidence).certified
    if plan.is_sampled:  # samples are for one claim, even where a weaker one would follow
        for change in (dict(delta=1.5 * plan.delta), dict(dataset_size=None)):
            claim = claim_with(plan.claim, **change)
            if claim != plan.claim:
                assert check(claim, plan.evidence).flaws == (OTHER_CLAIM,)


@KINDS
def test_plain_json_values_and_lines_for_people(kind):
    plan = whole(STORED[kind][0])
    values = json.loads(to_json(evidence_to_json(plan.evidence)))
    assert evidence_from_json(values) == plan.evidence
    for verbose in (False, True):
        lines = verdict_lines(plan.verdict, verbose)
        assert lines and all(line.strip() and "\n" not in line for line in lines)
    assert json.loads(to_json(verdict_to_json(plan.verdict)))["certified"] is True
    assert 0 < sum(delta for _, delta in budget_items(plan.verdict)) <= plan.delta
    for broken in ({"kind": "guess"}, {"kind": 1}, {}, None, [values]):
        refused(r"^plan evidence[^\n]*$", evidence_from_json, broken)
    for name in values:
        if name != "kind":
            fewer = {key: value for key, value in values.items() if key != name}
            refused("plan evidence", evidence_from_json, fewer)
    refused("unknown field", evidence_from_json, values | {"accepted": True})


def test_evidence_that_no_verification_makes_is_refused():
    name, direction = STORED[data.Mean]
    plan = whole(name)
    side = getattr(plan.evidence, direction)
    other = dataclasses.replace(side.proposal, family="unheard-of")
    many = dataclasses.replace(side.proposal, parameters=(2, 2, 2))
    half = tuple((index, max(1, count // 2)) for index, count in side.term_counts)
    changes: list[dict] = [{"proposal": other}, {"proposal": many}]
    changes += [{"term_counts": half}, {"term_counts": ()}]
    changes += [{"margin": 0.0}, {"margin": float("nan")}, {"margin": float("inf")}, {"key": (1,)}]
    for change in changes:
        flaws = with_side(plan, direction, **change).flaws
        assert flaws and ("margin" not in change or "the margin for rounding is" in flaws[0]), change
    assert not check(plan.claim, structs.replace(plan.evidence, rule="guess")).certified


def test_the_same_counts_with_less_of_q_are_not_certified():
    """A stored share is what the test has: the smallest at which the counts do is above 0."""
    plan = whole("plain")
    shares = [1.0, *np.logspace(-3, -300, 6)]
    evidence = [structs.replace(plan.evidence, share=float(share)) for share in shares]
    found = [check(plan.claim, each).certified for each in evidence]
    assert found[0] and not found[-1] and found == sorted(found, reverse=True)
    for share in (0.0, -1.0, 1.5, math.nan):
        flaws = check(plan.claim, structs.replace(plan.evidence, share=share)).flaws
        assert "share must be in (0, 1]" in flaws[0]


def test_an_unknown_evidence_is_refused():
    plan = whole("plain")
    for evidence in (None, "certified", data.NotRun(), {"kind": "sampled"}):
        assert not check(plan.claim, evidence).certified
    for side in (None, "certified", plan.evidence):
        assert not check(plan.claim, structs.replace(plan.evidence, add=side)).certified
