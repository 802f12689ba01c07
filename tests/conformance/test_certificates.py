"""Every kind of certificate through one table of requirements. A new one needs a line in `MEMBERS`.

Nothing is drawn: they are those of stored plans. That draws are made again bit for bit is in
tests/test_guards.py, that forged counts are seen by it too.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from jaxacct.verification.analytic_bound import AnalyticBound
from jaxacct.verification.certificate import Certificate, PlanCertificate
from jaxacct.verification.certificates import CERTIFICATES, BothDirections, of_direction, of_plan
from jaxacct.verification.run import DirectionEvidence, Evidence

from jaxacct.files import to_json
from jaxacct.records import read
from jaxacct.statistics.direction import Direction
from jaxacct.statistics.histogram import add_counts, draw_histograms
from tests.test_plan import whole


def of_one(plan, direction):
    return plan.certificate.of(direction)


# By kind: a stored plan that has one, and how it is had.
MEMBERS = {
    "mean-test": ("replicas", lambda plan: of_one(plan, Direction.REMOVE)),
    "line": ("extrapolated", lambda plan: of_one(plan, Direction.ADD)),
    "analytic-bound": ("analytic", lambda plan: plan.certificate),
    "both-directions": ("replicas", lambda plan: plan.certificate),
}
KINDS = pytest.mark.parametrize("kind", MEMBERS)


def member(kind):
    """(certificate, plan)."""
    name, find = MEMBERS[kind]
    plan = whole(name)
    return find(plan), plan


def test_every_certificate_is_in_the_table():
    assert set(MEMBERS) == set(CERTIFICATES)
    for kind in MEMBERS:
        assert type(member(kind)[0]) is CERTIFICATES[kind] and CERTIFICATES[kind].kind == kind


@KINDS
def test_it_holds_for_its_own_target_and_no_other(kind):
    certificate, plan = member(kind)
    assert certificate.recheck(plan.mechanism, plan.target) == []
    quieter = dataclasses.replace(plan.mechanism, noise_multiplier=0.9 * plan.mechanism.noise_multiplier)
    assert certificate.recheck(quieter, plan.target)
    sharper = dataclasses.replace(plan.target, epsilon=plan.target.epsilon / 2)
    assert certificate.recheck(plan.mechanism, sharper)


@KINDS
def test_plain_json_values_and_lines_for_people(kind):
    certificate, plan = member(kind)
    values = json.loads(to_json(certificate.to_json()))
    if kind == "both-directions":
        assert read(Evidence, values["evidence"], "evidence") == certificate.evidence
    elif kind == "analytic-bound":
        assert of_plan(None, values["analytic_accountant"], values["analytic_delta"]) == certificate
    else:
        again = of_direction(read(DirectionEvidence, values, "evidence"), "anytime")
        assert again == certificate
    lines = certificate.lines(plan.target)
    assert lines and all(line.strip() and "\n" not in line for line in lines)


@KINDS
def test_a_better_claim_than_it_proves_is_seen(kind):
    certificate, plan = member(kind)
    if kind == "analytic-bound":
        better = [dataclasses.replace(certificate, delta=certificate.delta / 2)]
        better += [AnalyticBound("pld", certificate.delta), AnalyticBound(None, None)]
        better += [dataclasses.replace(certificate, delta=math.nan)]
    elif kind == "both-directions":
        sides = dict(remove=certificate.evidence.add, add=certificate.evidence.remove)
        other_target = dataclasses.replace(certificate.evidence, target="0" * 64)
        better = [BothDirections(dataclasses.replace(certificate.evidence, **sides))]
        better += [BothDirections(other_target)]
    else:
        seen = certificate.seen
        changes = [{"scale": seen.scale / 2}, {"margin": 0.0}, {"estimate": 0.0}, {"key": (1,)}]
        better = [dataclasses.replace(certificate, seen=dataclasses.replace(seen, **c)) for c in changes]
        one, two = (tuple((index, count // 2) for index, count in part) for part in certificate.histograms)
        better.append(dataclasses.replace(certificate, seen=certificate.with_histograms(one, two)))
        better.append(dataclasses.replace(certificate, rule="guess"))
    for changed in better:
        assert changed.recheck(plan.mechanism, plan.target), changed


@KINDS
def test_what_a_plan_asks(kind):
    certificate, plan = member(kind)
    assert certificate.drawn == (kind != "analytic-bound")
    if isinstance(certificate, PlanCertificate):
        assert of_plan(**certificate.fields()) == certificate
        assert certificate.how(plan.target) in plan.statement()
        assert 0 < sum(spent for _, spent in certificate.spends()) <= plan.delta
        assert set(certificate.checked()) <= set(plan.checked())
        profile = certificate.profile(plan.mechanism, plan.target, np.array([0.5, 1.0]))
        assert np.isnan(profile).all() != certificate.drawn


def test_a_plan_of_two_certificates_has_none():
    evidence = whole("replicas").evidence
    with pytest.raises(ValueError, match="both drawn evidence and an analytic bound"):
        of_plan(evidence, "unamplified", 1e-9)
    forged = dataclasses.replace(whole("replicas"), analytic_delta=1e-9)
    assert forged.flaws == ("it has both drawn evidence and an analytic bound",)
    assert not forged.holds_for_shared_examples or forged.mechanism.scheme.holds_for_shared_examples


def test_a_certificate_must_say_how_it_is_checked_again():
    class Partial(Certificate):
        kind = "made"

        def to_json(self):
            return {}

        def lines(self, target):
            return []

    with pytest.raises(TypeError, match="recheck"):
        Partial()


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_the_one_loop_goes_on_where_it_was(stop_after):
    """Interrupted after any stretch, the blocks that are drawn and the answer are those of one run."""

    class Interrupted(Exception):
        pass

    def run(drawn, **begun):
        kept = []

        def count(first, last):
            if len(kept) == stop_after and not begun:
                raise Interrupted(kept)
            drawn.extend(range(first, last))
            return [np.arange(first, last).sum(), np.ones(2, int) * (last - first)]

        return draw_histograms(
            count,
            lambda done, counts: (done, counts[0], counts[1].tolist()) if done >= 20 else None,
            lambda done: min(20, 2 * done + 1),
            add=add_counts,
            keep=lambda done, counts: kept.append((done, counts)),
            **begun,
        )

    drawn: list[int] = []
    with pytest.raises(Interrupted) as stopped:
        run(drawn)
    done, counts = stopped.value.args[0][-1] if stop_after else (0, None)
    answer = run(drawn, done=done, counts=counts)
    assert drawn == list(range(20)) and answer == (20, sum(range(20)), [20, 20])
    assert run(drawn, done=20, counts=(190, np.ones(2, int) * 20)) == answer and len(drawn) == 20


def test_a_loop_that_would_not_end_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        draw_histograms(lambda a, b: 0, lambda d, c: None, lambda done: 5, add=lambda a, b: 0, done=5)
