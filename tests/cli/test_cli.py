"""The command line: help, outputs, exit codes, one line for bad input, whole files, what is spent."""

import importlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import dp_accounting as dp
import pytest
from flax import nnx

import jaxacct as ja
from jaxacct import NonFiniteLossError, Plan
from jaxacct.accountants import history
from jaxacct.accountants.history import epsilon_of_first_steps
from jaxacct.cli import main as cli
from jaxacct.cli import output
from jaxacct.cli.commands import estimate, recommend
from jaxacct.cli.commands.calibrate import DIGITS
from jaxacct.cli.usage import SYNONYMS, parse
from jaxacct.report.facts import describe, facts
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.statistics.lines import KINDS
from tests.commands import exit_code, printed, refusal, values_of
from tests.refusals import refused

# The mechanism of `test_calibrate`, whose programs are compiled anyway.
COMMON = "--scheme b-min-sep --dataset-size 3000 --batch-size 50 --iterations 60".split()
COMMON += "--bands 6 --min-separation 6 --strategy square-root".split()
TARGET = ["--epsilon", "2", "--delta", "2e-2"]


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert exit_code("calibrate", *COMMON, *TARGET, "--out", path) == 0
    return path


def test_show_prints_every_line_of_the_error_budget(plan_path):
    plan = Plan.load(plan_path)
    shown = describe(plan, verbose=True).splitlines()
    booked = [item for each in plan.verdict.directions for item in each.items if item.amount > 0]
    assert {line.kind for line in booked} == set(KINDS)
    for line in booked:
        assert any(f"{line.amount:.2g} " in text and text.endswith(f": {line.name}") for text in shown)
    short = describe(plan)
    assert not any(line.name in short for line in booked) and "scale" not in short and "replicas" not in short
    assert short.count(" certified: ") == 1 and "at most that of the remove direction" in short
    assert f"{plan.evidence.remove.num_samples:,} samples" in short


def test_calibrate_writes_a_plan_that_show_and_verify_read(plan_path, capsys):
    assert exit_code("show", plan_path) == 0
    shown = capsys.readouterr().out
    assert "is (2, 0.02)-differentially private" in shown
    assert "noise multiplier" in shown
    assert "delta_v" in shown
    assert exit_code("verify", plan_path, "--json") == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["certified"] is True
    assert not [line for line in out.err.splitlines() if " so far" not in line]  # of a slow machine


def test_json_is_one_object_and_nothing_else(capsys):
    # Near the noise of the plan, so that the same distributions are drawn from.
    common = *COMMON, "--noise-multiplier", "0.6"
    found = values_of(capsys, "calibrate", *common, *TARGET)
    assert found["claim"]["noise_multiplier"] == 0.6
    command = "estimate", *common
    found = values_of(capsys, *command, "--epsilon", "2", "--samples", "2000")
    assert found["kind"] == "estimate"
    assert found["low"] <= found["value"] <= found["high"]
    found = values_of(capsys, *command, "--delta", "1e-2", "--samples", "2000")
    assert found["quantity"] == "epsilon"
    assert exit_code(*command, "--epsilon", "2", "--samples", "500") == 0
    assert "estimate, not a guarantee" in capsys.readouterr().out


def test_what_is_infinite_is_null_in_json(capsys):
    """JSON has no infinity, not even inside of an object."""
    output.show({"delta": math.inf, "by": {"bound": [-math.inf, 1.0]}}, True)
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values == {"delta": None, "by": {"bound": [None, 1.0]}}
    refused("JSON", output.show, {"delta": math.nan}, True)


def test_not_certified_exits_1_and_says_why(capsys):
    line = refusal(capsys, "calibrate", *COMMON, *TARGET, "--noise-multiplier", "0.3", code=1)
    assert "could not be certified" in line


@pytest.mark.parametrize("steps", ["50k", "5e4", "50000", "50_000", "0.05M"])
def test_numbers_as_people_write_them(steps, monkeypatch):
    """As a word of its own and after an equals sign; a number of decimals may be written so too."""
    seen = []
    monkeypatch.setattr(recommend, "recommend", lambda **given: seen.append(given) or 1 / 0)
    common = ["--batch-size", "0.2k", "--iterations=1e3", "--epsilon", "8", "--delta", "1e-5"]
    with pytest.raises(ZeroDivisionError):
        cli.main(["recommend", "--dataset-size", steps, *common])
    ((given),) = seen
    assert (given["dataset_size"], given["batch_size"], given["iterations"]) == (50_000, 200.0, 1000)


def test_a_plan_is_written_even_if_the_output_is_closed(tmp_path, monkeypatch):
    """`jaxacct calibrate --out plan.json | head` was seen to lose the plan."""

    def unread(*_):
        raise BrokenPipeError

    monkeypatch.setattr(output, "show", unread)
    problem = "--bands 1 --iterations 9 --sampling-probability 0.1 --epsilon 2 --delta 1e-3".split()
    with pytest.raises(BrokenPipeError):
        cli.run(["calibrate", *problem, "--accountant", "unamplified", "--out", str(tmp_path / "plan.json")])
    assert Plan.load(tmp_path / "plan.json").certified


def test_a_loss_that_is_not_finite_is_no_bad_input(monkeypatch, capsys):
    def fail(*_, **__):
        raise NonFiniteLossError("1 of 8 privacy losses are not finite")

    monkeypatch.setattr("jaxacct.cli.commands.calibrate.calibrate", fail)
    line = refusal(capsys, "calibrate", *COMMON, *TARGET, code=1)
    assert line == "jaxacct: not certified: 1 of 8 privacy losses are not finite\n"


def test_interrupt_and_resume(tmp_path, capsys):
    """Ctrl-C, then the same command goes on: a real process and a real signal."""
    folder, out = tmp_path / "check", tmp_path / "plan.json"
    # Thirty thousand draws in each direction.
    command = [sys.executable, "-m", "jaxacct", "calibrate", *COMMON, "--epsilon", "2", "--delta", "5e-4"]
    command += ["--proposal", "plain", "--noise-multiplier", "1.9"]
    command += ["--checkpoint-dir", str(folder), "--out", str(out), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    deadline = time.monotonic() + 120
    while not list(folder.glob("remove-*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    # A signal that lands in the callback of a weak reference is lost: Python's affair, and rare.
    assert process.returncode in (0, 130), err
    assert out.exists() != (process.returncode == 130)
    assert exit_code(*command[3:]) == 0
    assert json.loads(capsys.readouterr().out)["claim"]["noise_multiplier"] == 1.9
    assert out.exists()


def test_intervals_of_the_command_have_the_confidence_that_is_given(monkeypatch, capsys):
    asked = []

    def estimated(mechanism, at, *, confidence, **options):
        asked.append(confidence)
        return real(mechanism, at, confidence=confidence, **options)

    real = estimate.estimate_delta
    monkeypatch.setattr(estimate, "estimate_delta", estimated)
    command = "estimate --iterations 1 --scheme poisson --sampling-probability 0.5 --bands 1"
    command += " --noise-multiplier 1 --epsilon 1 --samples 256 --confidence 0.625"
    assert values_of(capsys, *command.split())["confidence"] == 0.625 and asked == [0.625]


@pytest.mark.parametrize("given", [["--epsilon", "1"], ["--delta", "1e-5"]], ids=" ".join)
def test_where_no_lower_end_is_proven_that_is_said(given, capsys):
    """In place of 0."""
    words = "estimate --scheme poisson --sampling-probability 0.01 --iterations 200 --noise-multiplier 1"
    assert exit_code(*words.split(), *given) == 0
    said = capsys.readouterr().out
    assert re.search(r"at most \S+ \(without samples; upper bound only\)", said) and "between" not in said


RUN = "--batch-size 72 --iterations 3 --epsilon 4 --delta 1e-4 --bands 1 --scheme poisson".split()


def steps(arguments: list[str], capsys) -> str:
    """The end of the output."""
    assert cli.run(["calibrate", *arguments]) == 0
    return capsys.readouterr().out.rpartition("\n\n")[2]


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  jaxacct ")]


@pytest.mark.usefixtures("default_promotion")
def test_every_command_runs(tmp_path, monkeypatch, capsys):
    class Line(nnx.Linear):  # compiles faster than a network
        def __init__(self, shape, classes, rngs):
            super().__init__(math.prod(shape), classes, rngs=rngs)
            self.axes = len(shape)

        def __call__(self, x):
            return super().__call__(x.reshape(*x.shape[: x.ndim - self.axes], -1))

    monkeypatch.setattr(importlib.import_module("jaxacct.train.command"), "SmallCNN", Line)
    monkeypatch.chdir(tmp_path)
    text = steps([*RUN, "--dataset-size", str(DIGITS), "--out", "it's my plan.json"], capsys)
    assert text.count("it's my plan.json") == 1  # the others are quoted
    report, train = commands(text)
    assert cli.run([*shlex.split(report)[1:], "--draws", "0"]) == 0
    assert cli.run(shlex.split(train)[1:]) == 0
    assert (tmp_path / "it's my plan-report.html").exists()
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 3


def test_what_cannot_work_is_not_printed(tmp_path, monkeypatch, capsys):
    """Training on digits takes a plan for digits, and training at all a plan with a data set."""
    monkeypatch.chdir(tmp_path)
    other = steps([*RUN, "--dataset-size", "5000", "--out", "plan.json"], capsys)
    assert len(commands(other)) == 1 and "jaxacct.train.fit" in other and "5,000 examples" in other
    rate = [word for word in RUN if word not in ("--batch-size", "72")]
    bare = steps([*rate, "--sampling-probability", "0.05", "--out", "plan.json"], capsys)
    assert len(commands(bare)) == 1 and "--dataset-size and --batch-size" in bare
    unwritten = steps([*RUN, "--dataset-size", "5000"], capsys)
    assert "--out plan.json" in unwritten and not commands(unwritten)


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize(
    "arguments",
    [["--help"], pytest.param(["spent", "--event", "1,1,1", "--delta", ".1"], marks=pytest.mark.slow)],
)
def test_a_closed_pipe(arguments):
    """As with `| head`: no traceback and no line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jaxacct", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=os.environ, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.OUTPUT_CLOSED, b"")


EVERY_COMMAND = [[name] for name in cli.COMMANDS]
EVERY_COMMAND += [["tradeoff", name] for name in ("general", "last-iterate")]


def read(words):
    """The command that a command line chooses."""
    return parse(cli.app_for(words[0] if words else None), words)


@pytest.mark.parametrize("group", [[], ["tradeoff"]], ids=["jaxacct", "jaxacct tradeoff"])
def test_without_a_command_the_help_is_printed(group, capsys):
    assert printed(capsys, *group) == printed(capsys, *group, "--help")


def test_the_help_of_a_command(capsys):
    for words in EVERY_COMMAND:
        text = printed(capsys, *words, "--help")
        # Not `{None}|FLOAT (default: None)`, and no flags that are not set.
        assert not re.search(r"None|NoneType|default: (False|True)|\|FLOAT|NO-", text)
        for name in (name for name in SYNONYMS if name.startswith("--")):  # a hint names what it has
            with pytest.raises(ValueError) as caught:
                read([*words, name, "1"])
            hinted = re.search("did you mean ([a-z-]+)", str(caught.value))
            assert hinted is None or re.search(rf"(?<![a-z-]){hinted[1]}(?![a-z-])", text), caught.value
        for panel in text.split("╭─ ")[1:]:
            rows = [line[2:3] for line in panel.splitlines() if re.match(r"│ [* ]  [A-Z-]", line)]
            assert rows == sorted(rows, reverse=True), f"required options are not first: {panel}"
        panels = re.findall("╭─ ([A-Z][a-z ]*) ─", text)
        if words in (["calibrate"], ["recommend"]):
            search = ["Search"] if words == ["calibrate"] else []
            assert panels == ["Run", "Privacy target", *search, "Options"]


@pytest.mark.parametrize("words", [[], *EVERY_COMMAND], ids=" ".join)
def test_examples_can_be_read(words, capsys):
    """Each in the help is a command line that this version has, broken where a shell goes on reading."""
    lines = printed(capsys, *words, "--help").splitlines()
    begins = [place for place, line in enumerate(lines) if line.startswith(" jaxacct ")]
    assert begins or words == ["tradeoff"]
    for place in begins:
        line = lines[place].strip()
        while line.endswith("\\"):
            place += 1
            line = line[:-1] + lines[place].strip()
        program, *given = shlex.split(line)
        assert program == "jaxacct" and given[: len(words)] == words and callable(read(given))


def test_train_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(cli.HOMES, "train", "jaxacct.no_such_module:train")
    assert "pip install 'jaxacct[train]'" in refusal(capsys, "train", "--plan", "plan.json")


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.parametrize("asked", [False, True])
def test_no_colour_where_none_is_wanted(asked):
    """On a terminal; with the variable no escape code is printed at all."""
    pty = pytest.importorskip("pty")
    environment = {n: value for n, value in os.environ.items() if n != "NO_COLOR"} | {"TERM": "xterm"}
    environment |= {"NO_COLOR": "1"} if asked else {}
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "jaxacct", "--help"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = b""
    try:
        while part := os.read(main, 4096):
            text += part
    except OSError:  # the end of a terminal on Linux
        pass
    os.close(main)
    assert process.wait() == 0 and b"calibrate" in text
    assert (b"\x1b[" in text) != asked


def fixed_order(**numbers) -> ja.FixedOrder:
    given = dict(iterations=300, separation=20, dataset_size=10_000, batch_size=100, min_separation=20)
    return ja.FixedOrder.from_numbers(Numbers(**given | numbers))


def test_events_of_the_command_line_are_those_of_the_function(capsys):
    found = values_of(
        capsys, "spent", "--event", "2,1,3", "--event", '{"kind": "ZCDpEvent", "rho": 0.02}', "--epsilon", "2"
    )
    assert found["delta"] == ja.delta([(2.0, 1.0, 3), dp.dp_event.ZCDpEvent(0.02)], epsilon=2.0)
    assert (
        values_of(capsys, "spent", "--event", '{"kind": "NonPrivateDpEvent"}', "--delta", "0.1")["epsilon"]
        is None
    )


def test_an_estimate_of_a_run_together_with_events(capsys, monkeypatch):
    """Epsilon and delta are those of the run and all events."""
    run = "--scheme poisson --bands 1 --sampling-probability 0.1 --iterations 5 --noise-multiplier 2"
    given, seen = ["estimate", *run.split()], []

    def spy(mechanism, at, *, compose_with, **_):
        seen.append(compose_with)
        raise ValueError("seen")

    for name in ("estimate_epsilon", "estimate_delta"):
        monkeypatch.setattr(f"jaxacct.cli.commands.estimate.{name}", spy)
    event = ["--event", "4,1,1", "--event", '{"kind": "ZCDpEvent", "rho": 0.02}']
    for target in ("--delta 1e-5", "--epsilon 1"):
        assert exit_code(*given, *target.split(), *event) == 2
        assert exit_code(*given, *target.split()) == 2
    assert seen == [history.joined([(4.0, 1.0, 1), dp.dp_event.ZCDpEvent(0.02)]), None] * 2


def test_a_plan_of_a_fixed_order_says_its_limits_and_what_is_spent(capsys, tmp_path):
    """A device with a timer alone may join five times where the batches imply three: more noise."""
    assert fixed_order().participations == 3 and fixed_order().steps_per_epoch == 100
    scheme = fixed_order(max_participations=5)
    assert (scheme.participations, scheme.steps_per_epoch) == (5, None)
    plan = ja.calibrate(scheme, ja.BandedToeplitz.square_root(20), epsilon=8, delta=1e-6, dataset_size=10_000)
    rows = dict(facts(plan))
    assert rows["participations"] == "at most 5, at least 20 steps apart"
    rho = float(rows["zCDP"].removeprefix("rho = "))
    assert rho == pytest.approx(2.5 / plan.noise_multiplier**2, rel=1e-9)
    assert rho >= 2.5 / plan.noise_multiplier**2
    plan.save(tmp_path / "plan.json")
    found = values_of(capsys, "spent", tmp_path / "plan.json", "--step", "40")
    expected = ja.epsilon([(plan.noise_multiplier / math.sqrt(2), 1.0, 1)], delta=1e-6)
    assert found["epsilon"] == pytest.approx(expected, rel=1e-3) and found["by"] == "accountant unamplified"
    line = refusal(capsys, "spent", tmp_path / "plan.json", "--step", "301")
    assert "steps must be at most the run's 300, got 301" in line


def test_fewer_participations_than_the_batches_have_room_for_are_refused():
    refused("batch_size must be smaller", fixed_order, max_participations=2)
    numbers = Numbers(10, 1, sampling_probability=0.1, max_participations=3)
    refused("max_participations does not apply to poisson", ja.Poisson.from_numbers, numbers)


@pytest.mark.parametrize("event", ["2,1,1", "1.5,1,1", "3,1,1"])
def test_printed_numbers_are_not_below_the_bound(event, capsys):
    """The attack: six digits to the nearest are below every other bound."""
    exact = values_of(capsys, "spent", "--event", event, "--delta", "1e-5")["epsilon"]
    assert cli.run(["spent", "--event", event, "--delta", "1e-5"]) == 0
    shown = float(capsys.readouterr().out.split("epsilon ")[1].split()[0])
    assert exact <= shown <= exact * (1 + 1e-5)


def test_reserves_of_a_plan_are_not_spent_twice(capsys, tmp_path, monkeypatch):
    """Truncated batches: 1.8757 by all of delta, where the divergence of one step is at least 2.028e-3."""
    run_of = dict(epsilon=2.0, delta=2e-3, dataset_size=100, options=ja.CalibrationOptions(accountant="pld"))
    truncated = ja.calibrate(ja.Poisson(1, 0.1), ja.BandedToeplitz.identity(), **run_of, max_batch_size=20)
    truncated.save(tmp_path / "plan.json")
    found = values_of(capsys, "spent", tmp_path / "plan.json", "--step", "1")
    assert (found["epsilon"], found["by"]) == (truncated.epsilon, "the plan's own epsilon")
    stopped = ja.calibrate(ja.Poisson(1, 0.1), ja.BandedToeplitz.identity(), **run_of)
    stopped.save(tmp_path / "plan.json")
    deltas = []

    def spy(*args, delta, **options):
        deltas.append(delta)
        return epsilon_of_first_steps(*args, delta=delta, **options)

    monkeypatch.setattr("jaxacct.accountants.history.epsilon_of_first_steps", spy)
    assert 1.99 < values_of(capsys, "spent", tmp_path / "plan.json", "--step", "1")["epsilon"] <= 2.0
    assert deltas == [stopped.delta - stopped.claim.reserved] and stopped.claim.reserved > 0
