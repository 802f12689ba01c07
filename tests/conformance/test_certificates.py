"""Every kind of evidence through one table of requirements. A new one needs a line in `MEMBERS`.

Nothing is drawn: they are those of stored plans. That samples are drawn again bit for bit is in
tests/core/test_guards.py, that forged counts are seen by it too.
"""

import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from msgspec import structs

from jaxacct.common.files import to_json
from jaxacct.core import evidence as data
from jaxacct.core.check import check
from jaxacct.core.evidence import evidence_from_json, evidence_to_json
from jaxacct.core.text import budget_items, verdict_lines, verdict_to_json
from tests.refusals import refused
from tests.stored_plans import claim_with, whole, with_side

# By type: a stored plan that has it, and in which direction.
MEMBERS = {
    data.Mean: ("plain", "remove"),
    data.Dominated: ("replicas", "add"),
    data.WeightBound: None,  # of much noise: tests/core/test_guards.py
    data.NotRun: None,
    data.Bound: ("analytic", None),
    data.Sampled: ("replicas", None),
}
OTHER_CLAIM = "the samples are for another mechanism, target or data set"
KINDS = pytest.mark.parametrize("kind", [kind for kind, stored in MEMBERS.items() if stored])


def test_every_kind_of_evidence_is_in_the_table():
    assert set(MEMBERS) == {*typing.get_args(data.Side), *typing.get_args(data.Evidence)}
    for kind, stored in MEMBERS.items():
        if stored:
            name, direction = stored
            found = whole(name).evidence
            assert type(found if direction is None else getattr(found, direction)) is kind


@KINDS
def test_it_holds_for_its_own_claim_and_no_other(kind):
    plan = whole(MEMBERS[kind][0])
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
    plan = whole(MEMBERS[kind][0])
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
    name, direction = MEMBERS[data.Mean]
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
