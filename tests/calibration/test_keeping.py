"""`calibrate` keeps what is given and selects the rest as `recommend` does; one band only when asked for."""

import time
from typing import Any

import pytest

import jaxacct as ja
from jaxacct.calibration.choice import COEFFICIENTS, INVERSE, Choice
from jaxacct.cli import main as cli
from jaxacct.cli import problem as problem_module
from jaxacct.proposals import registry
from jaxacct.strategies import ending, workload_named
from tests import commands
from tests.calibrating import asked_of
from tests.refusals import refused
from train.noise import redrawn

SMALL: dict[str, Any] = dict(dataset_size=80, batch_size=10, iterations=12, epsilon=0.5, delta=1e-2)
SIZES = ["--dataset-size", "80", "--batch-size", "10", "--iterations", "12"]
RATE = ["--sampling-probability", "0.1", "--iterations", "12"]
TARGET = ["--epsilon", "0.5", "--delta", "1e-2"]
FILE = ja.BandedToeplitz((1.0, 0.4, 0.2))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(scheme, strategy, options) with which the command calibrates, which it does not."""
    monkeypatch.chdir(tmp_path)
    FILE.save("c.txt")
    of = asked_of(monkeypatch)
    return lambda *words, target=TARGET: of(*words, *target)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("--scheme b-min-sep", dict(scheme="b-min-sep")),
        ("--scheme balls-in-bins", dict(scheme="balls-in-bins")),
        ("--scheme balanced-min-sep", dict(scheme="balanced-min-sep")),
        ("--min-separation 2", dict(min_separation=2)),
        ("--strategy square-root", dict(strategy="square-root")),
        ("--scheme b-min-sep --strategy c.txt", dict(scheme="b-min-sep", strategy=FILE)),
        ("--workload momentum:0.9", dict(workload="momentum:0.9")),
        ("--memory-copies 0", dict(memory_copies=0)),
        ("--strategy optimal-inverse", dict(strategy="optimal-inverse")),
        ("--bands 2 --memory-copies 3", dict(bands=2, memory_copies=3)),
        ("--proposal plain --noise-multiplier 3 --max-samples 90000", dict(scheme="b-min-sep")),
        ("--max-batch-size 30", dict(scheme="b-min-sep")),
        ("--rule fixed --checkpoint-dir here", {}),
        ("--adjacency add-or-remove-one", dict(adjacency="add-or-remove-one")),
        ("--adjacency replace-one", dict(adjacency="replace-one")),
    ],
)
def test_what_is_given_is_kept_and_the_rest_selected(words, given, asked, monkeypatch, capsys):
    searched = []

    def search(progress=None, **numbers):
        searched.append((numbers, ja.recommend(**numbers)))
        return searched[-1][1]

    monkeypatch.setattr(problem_module, "recommend", search)
    scheme, strategy, options = asked(*SIZES, *words.split())
    ((numbers, found),) = searched
    wanted = {name: SMALL[name] for name in ("dataset_size", "batch_size", "iterations")} | given
    wanted = dict(target=ja.Target(0.5, 1e-2), workload="prefix-sum", adjacency="zero-out") | wanted
    wanted["workload"] = workload_named(wanted["workload"], 12)
    assert {name: value for name, value in numbers.items() if value is not None} == wanted
    assert (scheme, strategy) == (found.chosen.scheme, found.chosen.strategy)
    steering = options["options"]
    assert steering.estimate == found.chosen.noise_multiplier
    assert options["dataset_size"] == 80 and options["target"].point == (0.5, 1e-2)
    if words.startswith(("--scheme b-min-sep", "--min-separation 2", "--proposal", "--noise-multiplier")):
        assert strategy.bands > 1  # it was one band
    for name, value in dict(proposal="plain", noise_multiplier=3.0, max_samples=90000, rule="fixed").items():
        if f"--{name.replace('_', '-')}" in words:
            assert (options | vars(steering))[name] == value
    assert capsys.readouterr().out == f"{found.why()}\n\n"


@pytest.mark.parametrize(
    ("words", "scheme", "bands"),
    [
        ([*SIZES, "--scheme", "poisson"], ja.Poisson(12, 1 / 8), 1),
        ([*RATE, "--scheme", "poisson"], ja.Poisson(12, 0.1), 1),
        ([*RATE, "--bands", "1"], ja.BMinSep(12, 1, 0.1), 1),
        ([*RATE, "--bands", "4"], ja.BMinSep(12, 4, 0.1), 4),
        ([*RATE, "--strategy", "c.txt"], ja.BMinSep(12, 3, 0.1), 3),
        ([*SIZES, "--strategy", "bisr", "--bands", "4"], ja.BMinSep(12, 4, 0.2), 12),
        ([*SIZES, "--accountant", "unamplified", "--bands", "2"], ja.BMinSep(12, 2, 1 / 7), 2),
        (
            [*SIZES, *"--scheme b-min-sep --min-separation 2 --bands 2 --strategy square-root".split()],
            ja.BMinSep(12, 2, 1 / 7),
            2,
        ),
        (["--iterations", "12", *"--scheme balls-in-bins --min-separation 4 --bands 2".split()], None, 2),
    ],
)
def test_where_nothing_is_left_to_select_nothing_is_searched(
    words, scheme, bands, asked, monkeypatch, capsys
):
    monkeypatch.setattr(problem_module, "recommend", lambda **_: pytest.fail("something was searched"))
    kept, strategy, _ = asked(*words)
    assert kept == (scheme or ja.BallsInBins(12, 4)) and strategy.bands == bands
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        RATE,
        [*RATE, "--scheme", "b-min-sep"],
        [*RATE, "--min-separation", "4"],
        [*RATE, "--strategy", "square-root"],
        [*RATE, "--noise-multiplier", "2"],
        [*SIZES, "--strategy", "bisr"],
        [*SIZES, "--cold-start"],
        [*SIZES, "--scheme", "truncated-b-min-sep", "--truncate-to", "20"],
        ["--dataset-size", "80", "--batch-size", "2", "--iterations", "12"]
        + ["--scheme", "multi-attribution", "--examples-per-user", "2"],
        [*SIZES, "--accountant", "unamplified"],
        ["--iterations", "12", "--scheme", "balls-in-bins", "--min-separation", "4"],
    ],
    ids=" ".join,
)
def test_one_band_only_when_asked_for(words, capsys):
    line = commands.refusal(capsys, "calibrate", *words, *TARGET)
    assert line.startswith("jaxacct: bands must be given here") and "1 is DP-SGD" in line


NO_PROPOSALS = ["nope", "", "replicas", "replicas:x", "replicas:2,33", "half-space", "Plain"]


@pytest.mark.parametrize("name", NO_PROPOSALS)
def test_an_invalid_proposal_is_refused_before_any_work(name, monkeypatch, capsys):
    monkeypatch.setattr(problem_module, "recommend", lambda **_: pytest.fail("something was searched"))
    started = time.thread_time()
    line = commands.refusal(capsys, "calibrate", *SIZES, *TARGET, "--proposal", name)
    assert "proposal" in line and time.thread_time() - started < 1
    refused("proposal", lambda: ja.recommend(**SMALL).calibrate(ja.CalibrationOptions(proposal=name)))
    refused("proposal", registry.check_name, name, False)


def test_names_of_proposals_that_exist_pass():
    for name in ("plain", "replicas:2", "replicas:16", "replicas:2,3"):
        registry.check_name(name, False)
    registry.check_name("replicas:2", True)


def test_given_coefficients_are_recorded():
    """The search can be repeated with the file; the plan's claim holds the numbers."""
    found = ja.recommend(**SMALL, strategy=FILE)
    assert {row.matrix for row in found.candidates} == {COEFFICIENTS}
    assert all(row.strategy == ending(FILE, row.scheme) for row in found.candidates)
    assert found.choice.given == ("bands", "strategy") and found.choice.command().endswith(" --strategy FILE")
    assert Choice(**vars(found.choice)) == found.choice
    assert found.chosen.options("my c.txt").endswith("--strategy 'my c.txt'")
    for bad, message in (
        (dict(strategy=FILE, bands=2), "bands must be those of the strategy 3, got 2"),
        (dict(strategy=FILE, memory_copies=2), "bands must be at most memory_copies 2, got 3"),
        (dict(strategy=(1.0, 0.5)), "strategy must be one of .* or a jaxacct.BandedToeplitz"),
        (dict(strategy="coefficients"), "strategy must be one of optimal"),
    ):
        refused(message, ja.recommend, **SMALL | bad)


@pytest.mark.parametrize(
    ("words", "matrix"), [("--bands 2", "amplified"), ("--strategy c.txt", COEFFICIENTS)]
)
def test_recommend_prints_a_command_that_calibrates_what_it_selected(words, matrix, asked, capsys):
    assert cli.run(["recommend", *SIZES, *TARGET, *words.split()]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("certify it: jaxacct calibrate ")
    scheme, strategy, _ = asked(*line.removesuffix(" --out plan.json").split(" --epsilon ")[0].split())
    given = {"bands": 2} if matrix == "amplified" else {"strategy": FILE}
    found = ja.recommend(**SMALL, **given)
    assert (scheme, ending(strategy, scheme)) == (found.chosen.scheme, found.chosen.strategy)
    assert found.chosen.matrix == matrix


def test_no_copies_are_those_of_noise_that_is_drawn_again(capsys):
    """Inverses alone, in every kind of search; the command, the table and the choice say the same."""
    fixed = dict(scheme="fixed-order", min_separation=8)
    for given in ({}, fixed, dict(adjacency="replace-one"), dict(bands=4), dict(scheme="balls-in-bins")):
        found = ja.recommend(**SMALL, memory_copies=0, **given)
        assert {row.matrix for row in found.candidates} == {INVERSE}
        assert {row.memory_copies for row in found.candidates} == {found.choice.memory_copies} == {0}
        assert all(redrawn.check(row.strategy).of_inverse for row in found.candidates)
        draws = found.chosen.strategy.named_bands - 1
        again = f", {draws} draw{'s' * (draws > 1)} a step more (about " if draws else "\n"
        assert f"it keeps 0 copies of the parameters{again}" in found.why()
    assert cli.run(["recommend", *SIZES, "--epsilon", "8", "--delta", "1e-2", "--memory-copies", "0"]) == 0
    text = capsys.readouterr().out
    assert 'TrainOptions(noise_memory="recompute")' in text and " --strategy optimal-inverse " in text
