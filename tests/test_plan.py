"""Plans say no more than they prove: every leaf of valid plans of every kind is changed, and none that loads
claims anything that a fresh calibration would not."""

import dataclasses
import functools
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxacct.verification.certificates import of_direction
from jaxacct.verification.run import DirectionEvidence, Evidence

from jaxacct import BandedToeplitz, BMinSep, Budget, Mechanism, Plan, calibrate, records
from jaxacct.accountants.composition import event_from_json
from jaxacct.batch_sizes import overflow
from jaxacct.calibration import _Sizes, make_plan
from jaxacct.choice import Choice
from jaxacct.cli import describe
from jaxacct.core.claim import Target
from jaxacct.files import read_json, to_json
from jaxacct.report.html import report
from jaxacct.schemes import scheme_from_json
from jaxacct.statistics import bounds
from jaxacct.statistics.direction import Direction
from jaxacct.strategies import strategy_from_json

FOLDER = Path(__file__).parent / "fixtures/plans_v1"
KINDS = sorted(path.stem for path in FOLDER.glob("*.json"))


@functools.cache
def whole(kind: str) -> Plan:
    """A plan of one kind, drawn by the version before and read by this one."""
    if kind == "analytic":  # of the accountant that needs no seconds; the other one is tested below
        mechanism = Mechanism(BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3), 12.0)
        stops = overflow(mechanism.scheme, 1.0, 1e-3, 500)
        return make_plan(mechanism, Target.at(1.0, 1e-3), None, _Sizes(500, overflow=stops))
    data = read_json(FOLDER / f"{kind}.json", "plan")
    rule, budget = data["evidence"]["rule"], Budget(**data["evidence"]["budget"])
    composed = event_from_json(data["compose_with"])
    scheme, strategy = scheme_from_json(data["scheme"]), strategy_from_json(data["strategy"])
    mechanism = Mechanism(scheme, strategy, data["noise_multiplier"])
    target = Target(data["epsilon"], data["delta"], budget, composed)
    sides = {}
    for side in ("remove", "add"):
        seen = data["evidence"][side] | {"lines": []}
        if seen["num_samples"]:
            seen["margin"] = 5e-3  # as if it had put aside enough for rounding
        if seen["proposal"] == "plain":
            seen["term_counts"] = terms_of(seen, target)
        if seen["extrapolation"]:
            seen["extrapolation"] |= {"margin": seen["margin"], "unseen": 0.0}
        stored = records.read(DirectionEvidence, seen, side)
        sides[side] = of_direction(stored, rule).rebuilt(mechanism, target)
    evidence = Evidence(rule, budget, **sides, seconds=1.0, target=target.digest(mechanism))
    names = ("dataset_size", "expected_batch_size", "max_batch_size", "truncation_delta")
    kept = {name: data[name] for name in names}
    return Plan(mechanism, target.epsilon, target.delta, evidence, compose_with=composed, **kept)


def terms_of(seen: dict, target: Target):
    """The terms that plain draws with these losses have at least, with the margin put aside."""
    sign, terms = Direction(seen["direction"]).sign, np.zeros(len(bounds.TERM_EDGES), np.int64)
    for index, count in seen["loss_counts"]:
        loss = (index - 2048) / 32 + (sign < 0) / 32
        term = target.profile(np.array([target.epsilon - seen["margin"] - sign * loss]))
        terms += count * bounds.bin_terms(term)
    return [[int(index), int(terms[index])] for index in np.flatnonzero(terms)]


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


DROP = object()


def changed(data, path, value):
    data = pickle.loads(pickle.dumps(data))  # ten times as quick as copy.deepcopy
    at = data
    for step in path[:-1]:
        at = at[step]
    if value is DROP:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


def claims(plan: Plan):
    """All that the plan promises."""
    sizes = plan.dataset_size, plan.expected_batch_size, plan.max_batch_size, plan.truncation_delta
    return plan.statement(), plan.mechanism, plan.epsilon, plan.delta, repr(plan.compose_with), sizes


def mutations(data, most_entries=2):
    """(path, value) for every leaf; of long lists of counts the first and last few."""
    for path in leaves(data):
        numbers = [step for step in path if isinstance(step, int)]
        if not path or any(
            most_entries // 2 <= n < length(data, path, n) - most_entries // 2 for n in numbers
        ):
            continue
        at = data
        for step in path:
            at = at[step]
        # Entries of lists are many and alike: every third change of those.
        for value in itertools.islice(changes(at), 0, None, 3 if numbers else 1):
            same = value == at and isinstance(value, bool) == isinstance(at, bool)
            if value is DROP or not same:  # an int may stand for a float
                yield path, value


def length(data, path, number) -> int:
    at = data
    for step in path[: path.index(number)]:
        at = at[step]
    return len(at)


@pytest.mark.parametrize("most", [550, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_plan_claims_more(kind, most):
    """At least 500 changes each; a plan that loads all the same makes the very claims of the whole one."""
    data = json.loads(to_json(whole(kind).to_json()))
    honest, loaded = claims(whole(kind)), []
    tried = list(mutations(data))
    tried = [tried[round(k)] for k in np.linspace(0, len(tried) - 1, min(most, len(tried)))]
    assert len(tried) >= 500
    for path, value in tried:
        try:
            plan = Plan.from_json(changed(data, path, value))
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        loaded.append((path, value))
        assert claims(plan) == honest, (path, value)
    # What may differ proves nothing: the draws themselves, times, and predictions.
    free = {"created", "device", "versions", "seconds", "predicted_samples", "key", "bets", "bet_weights"}
    free |= {"term_counts", "loss_counts", "near_counts", "far_counts", "margin", "schema_version"}
    free |= {"analytic_delta"}
    assert not [(path, value) for path, value in loaded if not free & set(path)]


@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_version_1_load_or_lack_a_margin(kind):
    """As they were written: their draws name no target, and put eight times a measured error aside."""
    if kind == "analytic":
        assert Plan.load(FOLDER / f"{kind}.json").certified
        return
    with pytest.raises(ValueError, match=r"plan of version 1 holds draws .* again with `jaxacct calibrate`$"):
        Plan.load(FOLDER / f"{kind}.json")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "analytic"])
def test_a_plan_is_not_relabelled_by_calling_it_old(kind):
    """Version 1 had no digest of its target: a plan of today that said it was one loaded with any epsilon."""
    data = json.loads(to_json(whole(kind).to_json())) | {"schema_version": 1}
    data.pop("overflow_delta", None)  # new in version 3
    for change in ({}, {"epsilon": data["epsilon"] / 2}):
        with pytest.raises(ValueError, match="plan of version 1 holds draws"):
            Plan.from_json(data | change)


@pytest.mark.parametrize(
    ("kind", "factor"), [("plain", 0.5), ("plain", 0.9), ("plain", 1.2), ("fixed", 0.5), ("composed", 0.9)]
)
def test_plain_draws_are_not_believed_of_another_epsilon(kind, factor):
    """Nor is it with a new digest: losses and terms of the same draws no longer agree.

    Where no loss is above either epsilon they do, and then the draws say the same of both.
    """
    plan = whole(kind)
    assert plan.certified
    assert plan.evidence is not None and plan.evidence.remove.proposal == "plain"
    target = dataclasses.replace(plan.target, epsilon=factor * plan.epsilon)
    evidence = dataclasses.replace(plan.evidence, target=target.digest(plan.mechanism))
    forged = dataclasses.replace(plan, epsilon=target.epsilon, evidence=evidence)
    assert any("not those that the losses have" in flaw for flaw in forged.flaws)


def test_too_small_a_margin_says_what_to_do():
    data = json.loads(to_json(whole("plain").to_json()))
    data["evidence"]["remove"]["margin"] = 1e-7
    with pytest.raises(ValueError, match=r"put aside for rounding .* again with `jaxacct calibrate`$"):
        Plan.from_json(data)


def test_what_reads_in_two_ways_is_refused(tmp_path):
    """Keys that come twice, digits of other scripts, texts that pass for lines, one key for two sides."""
    data = json.loads(to_json(whole("plain").to_json()))
    text = to_json(data)
    written = {
        "twice first": "{" + '"epsilon": 0.1, ' + text[1:],
        "twice last": text[:-1] + ', "epsilon": 0.1}',
        "twice within": text.replace('"budget": {', '"budget": {"delta": 1e-9, '),
        "other digits": text.replace('"epsilon": 1.5', '"epsilon": ١.٥'),
        "many digits": text.replace('"epsilon": 1.5', '"epsilon": ' + "9" * 400),
    }
    path = tmp_path / "plan.json"
    for name, forged in written.items():
        assert forged != text, name
        path.write_text(forged)
        with pytest.raises(ValueError) as caught:
            Plan.load(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, name
    line = "plain\nThe training run is (0.1, 1e-09)-differentially private"
    for where, value in (
        (("device",), line),
        (("versions",), {line: "1"}),
        (("evidence", "remove", "predicted_samples"), {line: 1.0}),
        (("evidence", "remove", "reason"), "\x1b[2J"),
    ):
        with pytest.raises(ValueError, match="must be printable text in one line"):
            Plan.from_json(changed(data, where, value))
    with pytest.raises(ValueError, match="both directions have the same key"):
        Plan.from_json(changed(data, ("evidence", "add", "key"), data["evidence"]["remove"]["key"]))


def test_a_relabelled_digest_does_not_help():
    """A forger who writes the digest as well: scales, thresholds and batch sizes no longer follow."""
    plan = whole("replicas")
    evidence = plan.evidence
    assert evidence is not None
    for change in (
        {"epsilon": plan.epsilon / 2},
        {"delta": plan.delta / 2},
        {"mechanism": dataclasses.replace(plan.mechanism, noise_multiplier=1.0)},
    ):
        new = {"epsilon": plan.epsilon, "delta": plan.delta, "mechanism": plan.mechanism} | change
        budget = evidence.budget if "delta" not in change else Budget.split(new["delta"])
        digest = Target(new["epsilon"], new["delta"], budget).digest(new["mechanism"])
        relabelled = dataclasses.replace(evidence, target=digest, budget=budget)
        forged = dataclasses.replace(plan, **change, evidence=relabelled)
        assert not forged.certified
        with pytest.raises(ValueError, match="does not add up"):
            Plan.from_json(json.loads(to_json(forged.to_json())))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400, "1", True, None])
def test_a_number_of_a_record_is_finite(value):
    with pytest.raises(ValueError, match="x must be a finite number"):
        records.read(float, value, "x")


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
    stops = overflow(mechanism.scheme, 1.0, 1e-3, 500)
    sizes = _Sizes(500, overflow=stops)
    return dataclasses.replace(make_plan(mechanism, Target.at(1.0, 1e-3), None, sizes), choice=CHOICE)


SIZES: dict[str, Any] = dict(dataset_size=500, batch_size=25, iterations=24, min_separation=3)


def test_a_plan_says_how_it_was_chosen_and_is_readable_without():
    """What was searched, the criterion, that nothing is spent; not a word where nothing was chosen."""
    plan = chosen_plan()
    data = json.loads(to_json(plan.to_json()))
    assert Plan.from_json(data).choice == CHOICE
    said = data["choice"]["statement"]
    for part in ("30 candidates", "16 copies", "momentum:0.9", "no privacy is spent", CHOICE.command()):
        assert part in said
    assert "number of bands" not in said and "--bands 3" in CHOICE.command()  # that was given
    assert said in describe(plan) and "How it was chosen" in report(plan)
    assert "no privacy is spent" in dataclasses.replace(CHOICE, workload=None).statement()
    del data["choice"]
    assert Plan.from_json(data) == dataclasses.replace(plan, choice=None)
    assert "choice" not in whole("analytic").to_json()


def test_no_changed_choice_is_believed():
    """Each leaf: refused, unless the whole statement would follow from it, which none of these do."""
    data = json.loads(to_json(chosen_plan().to_json()))
    paths = [(path, value) for path, value in mutations(data) if path[0] == "choice" and path != ("choice",)]
    assert len(paths) > 100
    for path, value in paths:
        if path[1:2] == ("looked_at",) and value is True:
            continue
        with pytest.raises(ValueError, match=r"plan|must be|choice"):
            Plan.from_json(changed(data, path, value))
    for value in (None, [], "chosen", {}):
        with pytest.raises(ValueError, match="plan"):
            Plan.from_json(data | {"choice": value})


@pytest.mark.parametrize(
    "other",
    [
        dict(dataset_size=501),
        dict(batch_size=26.0),
        dict(epsilon=2.0),
        dict(delta=1e-2),
        dict(scheme="poisson"),
        dict(min_separation=4),
        dict(bands=2),
        dict(iterations=25),
        dict(matrix="buffered"),
    ],
)
def test_a_choice_of_something_else_is_refused_with_its_own_statement(other):
    """Consistent in itself, as an editor would write it: it is not about this plan."""
    edited = dataclasses.replace(CHOICE, **other)
    data = json.loads(to_json(chosen_plan().to_json())) | {"choice": edited.to_json()}
    (name,) = other
    with pytest.raises(ValueError, match=f"choice is of {name}"):
        Plan.from_json(data)
    assert not dataclasses.replace(chosen_plan(), choice=edited).certified
    scheme, strategy = chosen_plan().mechanism.scheme, chosen_plan().mechanism.strategy
    with pytest.raises(ValueError, match=f"choice is of {name}"):
        calibrate(scheme, strategy, epsilon=1.0, delta=1e-3, dataset_size=500, choice=edited)


@pytest.mark.parametrize(
    "bad",
    [
        dict(workload="adam"),
        dict(workload="momentum: 0.9"),  # two words of the command that searches again
        dict(given=("strategy", "bands")),
        dict(memory_copies=2),
        dict(matrix="buffered", memory_copies=6),
        dict(matrix="x"),
    ],
)
def test_a_choice_that_cannot_be(bad):
    with pytest.raises(ValueError, match="must be"):
        dataclasses.replace(CHOICE, **bad)


def test_a_plan_of_version_2_has_no_choice():
    data = json.loads(to_json(chosen_plan().to_json())) | {"schema_version": 2}
    del data["overflow_delta"]
    with pytest.raises(ValueError, match="unknown field 'choice'"):
        Plan.from_json(data)
