"""Plans say at most they prove: every leaf of valid plans of every kind is changed, and none that loads
claims anything that a fresh calibration would not."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest

from jaxacct import BMinSep, Plan
from jaxacct.calibration.choice import Choice, choice_of
from jaxacct.common import records
from jaxacct.common.files import read_json, to_json
from jaxacct.core.check import resolve
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound
from jaxacct.report.facts import describe
from jaxacct.report.html import report
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.verification.replay import replay
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.stored_plans import DROP, KINDS, UNRELEASED, as_json, changed, forged, whole, with_side


def leaves(value, path=()):
    """Paths of all leaves of JSON values, and of the containers themselves."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


def changes(value):
    """Other values in place of a leaf or a container; `DROP` takes it away."""
    yield DROP
    if isinstance(value, bool):
        yield from (not value, int(value), str(value), None)
    elif isinstance(value, int | float):
        yield from (value / 2, value * 2, 0, -value, math.nan, math.inf, str(value), [value], True, None)
        yield from (value / 3, value * 3, value - 1, 2**31, -1, "")
        yield from (value // 2, value + 1, value * (1 + 1e-6), value * (1 - 1e-6), 1e308, 5e-324, -math.inf)
    elif isinstance(value, str):
        yield from ("", value + " ", value[:-1], value.upper(), "NaN", 1, 0.5, None, [value], {"": value})
    elif value is None:
        yield from (0, 1, 0.0, -1.0, 1e-12, 1e9, math.nan, "", "plain", "unamplified", [], {}, True, False)
    else:
        yield from ({}, [], None, 0, 0.5, "", True, [value], {"": value}, [None])


def claims(plan: Plan):
    """All that the plan promises."""
    sizes = plan.dataset_size, plan.expected_batch_size, plan.max_batch_size, plan.truncation_delta
    return plan.statement(), plan.mechanism, plan.epsilon, plan.delta, repr(plan.compose_with), sizes


def mutations(data, max_entries=2):
    """(path, value) for every leaf; of long lists of counts the first and last few."""
    for path in leaves(data):
        numbers = [k for k, step in enumerate(path) if isinstance(step, int)]
        sizes = [len(at(data, path[:k])) for k in numbers]
        most = max_entries // 2
        if not path or any(most <= path[k] < size - most for k, size in zip(numbers, sizes, strict=True)):
            continue
        old = at(data, path)
        # Lists have many similar entries: every third change of those.
        for value in itertools.islice(changes(old), 0, None, 3 if numbers else 1):
            same = value == old and isinstance(value, bool) == isinstance(old, bool)
            if value is DROP or not same:  # an int may stand for a float
                yield path, value


def read(data, changes):
    """(path, value, plan) of the changes that load; all others are refused in one line."""
    for path, value in changes:
        try:
            yield path, value, Plan.from_json(changed(data, path, value))
        except ValueError as error:
            assert "\n" not in str(error)


OUTSIDE = ("notes", "provenance", "choice")
"""Fields on which no guarantee depends."""


def at(data, path):
    """The value at a path."""
    return functools.reduce(lambda value, step: value[step], path, data)


IN_CI = ("analytic", "composed", "plain", "truncated")


@pytest.mark.parametrize("most", [550, slow(10**6)])
@pytest.mark.parametrize("kind", [kind if kind in IN_CI else slow(kind) for kind in KINDS])
def test_no_changed_plan_claims_more(kind, most):
    """At least 500 changes each; a plan that loads all the same makes the very claims of the whole one."""
    honest, data = claims(whole(kind)), as_json(whole(kind))
    tried = [(path, value) for path, value in mutations(data) if path[0] not in OUTSIDE]
    tried = [tried[round(k)] for k in np.linspace(0, len(tried) - 1, min(most, len(tried)))]
    assert len(tried) >= 400 or kind == "analytic"
    for path, value, plan in read(data, tried):  # 8 for 8.0 is the same number
        assert claims(plan) == honest and value == at(data, path), (path, value)


def test_notes_and_provenance_bear_on_nothing():
    """Nothing reads the notes; the provenance is read strictly, and the claim is the same."""
    for kind in KINDS:
        data = as_json(whole(kind))
        for notes in (None, {}, {"statement": "(0.1, 1e-9)"}, [1]):
            assert claims(Plan.from_json(data | {"notes": notes})) == claims(whole(kind))
        other = {"created": "2020-01-01T00:00:00+00:00", "device": "abacus", "versions": {}}
        assert claims(Plan.from_json(data | {"provenance": other})) == claims(whole(kind))
        for name in other:
            with pytest.raises(ValueError, match=r"plan\.provenance"):
                Plan.from_json(data | {"provenance": {k: v for k, v in other.items() if k != name}})


def test_plans_of_an_unreleased_schema_are_refused_in_one_line():
    data = read_json(UNRELEASED, "plan")
    current = as_json(whole("plain"))
    for old in (data, data | {"schema_version": 1}, current | {"schema_version": 1}):
        refused(r"plan must be of schema version 2, .* `jaxacct calibrate`$", Plan.from_json, old)


def test_plain_samples_are_not_believed_of_another_epsilon():
    """Nor are they with a new digest: losses and terms of the same samples no longer agree.

    Where no loss is above either epsilon they do, and then the samples say the same of both.
    """
    for kind, factor in [("plain", 0.5), ("plain", 0.9), ("plain", 1.2), ("fixed", 0.5), ("composed", 0.9)]:
        plan = whole(kind)
        assert plan.certified and plan.evidence.remove.proposal.family == "plain"
        other = forged(plan, epsilon=factor * plan.epsilon)
        assert any("not those that the losses have" in flaw for flaw in other.flaws)


def test_too_small_a_margin_says_what_to_do():
    with pytest.raises(ValueError, match=r"margin for rounding .* again with `jaxacct calibrate`$"):
        Plan.from_json(as_json(with_side(whole("plain"), "remove", margin=1e-7)))


def test_what_reads_in_two_ways_is_refused(tmp_path):
    """Keys that come twice, digits of other scripts, texts that pass for lines, one key for two sides."""
    data = as_json(whole("plain"))
    text = to_json(data)
    written = {
        "twice": text.replace('"epsilon": 1.5', '"epsilon": 0.1, "epsilon": 1.5'),
        "twice last": text[:-1] + ', "schema_version": 1}',
        "twice within": text.replace('"budget": {', '"budget": {"delta": 1e-9, '),
        "other digits": text.replace('"epsilon": 1.5', '"epsilon": ١.٥'),
        "many digits": text.replace('"epsilon": 1.5', '"epsilon": ' + "9" * 400),
    }
    path = tmp_path / "plan.json"
    for name, other in written.items():
        assert other != text, name
        path.write_text(other)
        with pytest.raises(ValueError) as caught:
            Plan.load(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, name
    line = "plain\nThe training run is (0.1, 1e-09)-differentially private"
    for where, value in (
        (("provenance", "device"), line),
        (("provenance", "versions"), {line: "1"}),
        (("evidence", "remove", "proposal", "family"), "\x1b[2J"),
    ):
        refused("must be printable text in one line", Plan.from_json, changed(data, where, value))
    same = with_side(whole("truncated"), "add", key=whole("truncated").evidence.remove.key)
    refused("both directions have the same key", lambda: Plan.from_json(as_json(same)))


@pytest.mark.parametrize("change", [{"noise_multiplier": 1.0}, {"epsilon": 0.3}])
def test_a_forger_who_writes_every_digest_is_found_by_drawing(change):
    """Counts of one claim under the name of another: loading cannot know, fresh samples do."""
    other = forged(whole("replicas"), **change)
    margin = resolve(other.claim, Direction.REMOVE, other.evidence.remove.proposal).margin
    other = with_side(other, "remove", margin=max(margin, other.evidence.remove.margin))
    if other.certified:
        assert replay(other)[0].moved > 0
    assert not other.verify(max_samples=20_000).certified


def test_a_number_of_a_record_is_finite():
    for value in [math.inf, -math.inf, math.nan, 10**400, "1", True, None]:
        refused(r"^x(: | must be a finite)", records.read, float, value, "x")


CHOICE = Choice(
    dataset_size=500,
    batch_size=25.0,
    iterations=24,
    epsilon=1.0,
    delta=1e-3,
    memory_copies=16,
    workload="momentum:0.9",
    given=("bands",),
    looked_at=30,
    scheme="b-min-sep",
    min_separation=3,
    bands=3,
    matrix="square-root",
)


@functools.cache
def chosen_plan() -> Plan:
    mechanism = dataclasses.replace(whole("analytic").mechanism, scheme=BMinSep.from_batch_size(**SIZES))
    claim = Claim(mechanism, ClaimedTarget.at(1.0, 1e-3), 500, None)
    target = ClaimedTarget.at(1.0, 1e-3, reserved=claim.reserved)
    return Plan(dataclasses.replace(claim, target=target), Bound("unamplified"), CHOICE.to_json())


SIZES: dict[str, Any] = dict(dataset_size=500, batch_size=25, iterations=24, min_separation=3)


def test_a_plan_says_how_it_was_chosen_and_is_readable_without():
    """What was searched, the criterion, that it has no privacy cost; nothing where nothing was chosen."""
    plan = chosen_plan()
    data = as_json(plan)
    assert choice_of(Plan.from_json(data)) == CHOICE
    said = CHOICE.statement()
    for part in ("30 candidates", "16 copies", "momentum:0.9", "no privacy cost", CHOICE.command()):
        assert part in said
    assert "number of bands" not in said and "--bands 3" in CHOICE.command()  # that was given
    assert said in describe(plan) and "How it was chosen" in report(plan)
    assert "no privacy cost" in dataclasses.replace(CHOICE, workload=None).statement()
    assert Plan.from_json(data | {"choice": None}) == dataclasses.replace(plan, choice=None)


def test_no_changed_choice_is_believed_that_is_about_the_plan():
    """Each leaf: refused, unless it says only how wide the search was."""
    data = as_json(chosen_plan())
    paths = [(path, value) for path, value in mutations(data) if path[0] == "choice" and path != ("choice",)]
    assert len(paths) > 100
    for path, _, plan in read(data, paths):
        try:
            choice_of(plan)
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        assert path[1] in ("looked_at", "memory_copies", "workload", "given", "matrix", "batch_size"), path
        assert claims(plan) == claims(chosen_plan())
    for value in ([], "chosen", {}):
        refused("plan", lambda other: choice_of(Plan.from_json(other)), data | {"choice": value})


def test_a_choice_of_something_else_is_refused_with_its_own_statement():
    """Consistent in itself, as an editor would write it: it is not about this plan."""
    for other in [
        dict(dataset_size=501),
        dict(epsilon=2.0),
        dict(delta=1e-2),
        dict(scheme="poisson"),
        dict(min_separation=4),
        dict(bands=2),
        dict(iterations=25),
    ]:
        data = as_json(chosen_plan()) | {"choice": dataclasses.replace(CHOICE, **other).to_json()}
        (name,) = other
        refused(f"choice is of {name}", choice_of, Plan.from_json(data))


def test_a_command_of_a_choice_is_one_command():
    """Names are those of the search, and free text is quoted."""
    for bad in (dict(scheme="poisson; rm"), dict(matrix="x"), dict(given=("seed",)), dict(adjacency="add")):
        data = as_json(chosen_plan()) | {"choice": dataclasses.replace(CHOICE, **bad).to_json()}
        refused("plan choice", choice_of, Plan.from_json(data))
    assert "--workload 'adam; rm'" in dataclasses.replace(CHOICE, workload="adam; rm").command()
