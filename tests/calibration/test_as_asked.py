"""Whatever options are combined, `calibrate` certifies the target, noise and mechanism that are given."""

import functools
import itertools
import json
from typing import Any

import pytest

import jaxacct
from jaxacct import BandedToeplitz, BMinSep, NotCertifiedError, Plan, Poisson, Target
from jaxacct.cli import problem as problem_module
from jaxacct.report import risk
from tests import calibrating, commands
from tests.calibrating import target_of as target_of_words

TARGETS: dict[str, tuple[float, float]] = {
    "--epsilon 0.5 --delta 1e-2": (0.5, 1e-2),
    "--advantage 0.3": (0.0, 0.3),
    "--tpr 0.4 --fpr 0.1": Target.tpr(0.4, fpr=0.1).point,
    "--mu 1 --delta 1e-2": Target.mu(1.0, delta=1e-2).point,
}
OPEN = {"--epsilon 0.5": (0.5, None), "--delta 1e-2": (None, 1e-2)}
SIZES = "--dataset-size 80 --batch-size 10 --iterations 12"
RATE = "--sampling-probability 0.1 --iterations 12 --scheme poisson"
SEARCHED = [SIZES, f"{SIZES} --max-batch-size 40"]
BUILT = [RATE, f"{SIZES} --bands 2 --scheme b-min-sep --min-separation 3 --strategy square-root"]
HOW = ["", "--adjacency add-or-remove-one", "--accountant unamplified", "--rule fixed --max-samples 90000"]


@pytest.fixture
def certified(monkeypatch, tmp_path):
    """The arguments with which `jaxacct.calibrate` is called for a command line."""
    searched = functools.cache(problem_module.recommend)
    monkeypatch.setattr(problem_module, "recommend", lambda progress=None, **given: searched(**given))
    monkeypatch.chdir(tmp_path)
    asked = calibrating.asked_of(monkeypatch)
    return lambda line: asked(*line.split())


def target_of(options) -> tuple:
    """What the function was asked for: (epsilon, delta), None for the one to be found."""
    target = options["target"]
    assert target.missing is None or options["noise_multiplier"] is not None
    return target.epsilon, target.delta


def test_every_combination_asks_for_what_was_given(certified, capsys):
    """Targets by noise, mechanisms and evidence: nothing is dropped, replaced or left to a default.

    Of all lines those whose four places add up to an even number: every three options meet, but that the
    second and third search are made for one target.
    """
    parts = list(TARGETS), ("", "--noise-multiplier 3"), SEARCHED + BUILT, HOW
    places = itertools.product(*(range(len(part)) for part in parts))
    even = [place for place in places if sum(place) % 2 == 0]
    lines = [tuple(part[at] for part, at in zip(parts, place, strict=True)) for place in even]
    lines = [*lines, *itertools.product(OPEN, parts[1][1:], BUILT, HOW)]
    assert len(lines) >= 60
    for target, noise, problem, how in lines:
        if problem in SEARCHED and "accountant" in how:  # that searches nothing, and asks for bands
            continue
        if problem in SEARCHED[1:] and target != parts[0][0]:
            continue
        if "--max-batch-size" in problem and "adjacency" in how:
            continue
        line = " ".join((problem, target, noise, how))
        scheme, strategy, options = certified(line)
        assert target_of(options) == (TARGETS | OPEN)[target], line
        assert options["noise_multiplier"] == (3.0 if noise else None), line
        assert options["adjacency"] == ("add-or-remove-one" if "adjacency" in how else "zero-out"), line
        steering = options["options"]
        assert steering.accountant == ("unamplified" if "accountant" in how else None), line
        stop = ("fixed", 90000) if "rule" in how else ("anytime", None)
        assert (steering.rule, steering.max_samples) == stop, line
        assert options["max_batch_size"] == (40 if "--max-batch-size" in problem else None), line
        if problem == RATE:
            assert (scheme, strategy.bands) == (Poisson(12, 0.1), 1), line
            continue
        assert options["dataset_size"] == 80, line
        assert scheme.expected_batch_sizes(80).mean() == pytest.approx(10), line
        if "square-root" in problem:
            sizes = dict(iterations=12, dataset_size=80, batch_size=10)
            assert scheme == BMinSep.from_batch_size(**sizes, min_separation=3)
            assert strategy.named_bands == 2, line
        else:
            assert strategy.bands > 1, line
    capsys.readouterr()


FULL: dict[str, Any] = dict(scheme=Poisson(1, 1.0), strategy=BandedToeplitz((1.0,)), accountant="unamplified")


def numbers_of(target) -> dict[str, Any]:
    words = target.replace("--", "").split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("noise", [None, 5.0])
@pytest.mark.parametrize("target", TARGETS)
def test_the_plan_states_the_target(target, noise, tmp_path):
    """Of a full batch; stored and loaded again, and a target in words of risk follows from its point."""
    given = numbers_of(target)
    plan = calibrating.calibrate(**FULL, noise_multiplier=noise, **given)
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.certified and noise in (None, plan.noise_multiplier)
    if "tpr" not in given:
        assert (plan.epsilon, plan.delta) == TARGETS[target]
    else:  # any point that implies the rates
        assert risk.true_positive_rate(plan.epsilon, plan.delta, given["fpr"]) <= given["tpr"]
    said = target_of_words(**given).in_words(plan.epsilon, plan.delta)
    assert (said is None) == ("mu" not in given and "tpr" not in given)
    if said is not None:
        assert repr(plan.epsilon) in said and (noise is None or repr(plan.delta) in said)


@pytest.mark.parametrize("target", TARGETS)
def test_too_little_noise_has_no_plan(target, tmp_path, monkeypatch, capsys):
    """Exit 1, one line, no file; never a plan for a weaker target."""
    monkeypatch.chdir(tmp_path)
    line = f"--scheme poisson --sampling-probability 1 --iterations 1 {target} --noise-multiplier 0.1"
    said = commands.refusal(capsys, "calibrate", *line.split(), "--out", "plan.json", code=1)
    assert said.startswith("jaxacct: not certified: noise multiplier 0.1")
    assert "inf" not in said and "nan" not in said and not (tmp_path / "plan.json").exists()
    with pytest.raises(NotCertifiedError):
        calibrating.calibrate(**FULL, noise_multiplier=0.1, **numbers_of(target))


@pytest.mark.parametrize("noise", [1e-6, 0.01])
def test_noise_of_any_small_size_is_not_certified(noise):
    """By samples, whose reserve for the rounding of weights is beyond float64 here, and by bounds."""
    target = dict(epsilon=1.0, delta=1e-5, noise_multiplier=noise)
    for given in (target, target | dict(accountant="pld")):
        with pytest.raises(NotCertifiedError, match=f"noise multiplier {noise:g} could not be certified"):
            calibrating.calibrate(Poisson(12, 0.1), FULL["strategy"], **given)


def test_what_is_printed_is_what_is_stored(tmp_path, monkeypatch, capsys):
    """--json, --out and `show` have the same claim."""
    monkeypatch.chdir(tmp_path)
    line = "--scheme poisson --sampling-probability 1 --iterations 1 --tpr 0.4 --fpr 0.1 --out plan.json"
    printed = commands.values_of(capsys, "calibrate", *line.split())
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert commands.values_of(capsys, "show", "plan.json") == printed
    assert jaxacct.Plan.load("plan.json").certified
