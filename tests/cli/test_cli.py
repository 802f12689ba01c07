"""The command line: outputs, exit codes, one line for bad input, no file left half-written."""

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

import pytest
from flax import nnx

from jaxacct import NonFiniteLossError, Plan
from jaxacct.cli import main as cli
from jaxacct.cli import output
from jaxacct.cli.commands import recommend
from jaxacct.cli.commands.calibrate import DIGITS
from jaxacct.cli.main import run
from jaxacct.report.facts import describe
from jaxacct.statistics.lines import KINDS
from tests.commands import exit_code
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
    assert exit_code("calibrate", *common, *TARGET, "--json") == 0
    assert json.loads(capsys.readouterr().out)["claim"]["noise_multiplier"] == 0.6
    command = "estimate", *common
    assert exit_code(*command, "--epsilon", "2", "--samples", "2000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "estimate"
    assert found["low"] <= found["value"] <= found["high"]
    assert exit_code(*command, "--delta", "1e-2", "--samples", "2000", "--json") == 0
    assert json.loads(capsys.readouterr().out)["quantity"] == "epsilon"
    assert exit_code(*command, "--epsilon", "2", "--samples", "500") == 0
    assert "estimate, not a guarantee" in capsys.readouterr().out


def test_what_is_infinite_is_null_in_json(capsys):
    """JSON has no infinity, not even inside of an object."""
    output.show({"delta": math.inf, "by": {"bound": [-math.inf, 1.0]}}, True)
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values == {"delta": None, "by": {"bound": [None, 1.0]}}
    refused("JSON", output.show, {"delta": math.nan}, True)


def test_not_certified_exits_1_and_says_why(capsys):
    assert exit_code("calibrate", *COMMON, *TARGET, "--noise-multiplier", "0.3") == 1
    message = capsys.readouterr().err
    assert "could not be certified" in message
    assert message.count("\n") == 1


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
    assert exit_code("calibrate", *COMMON, *TARGET) == 1
    assert capsys.readouterr().err == "jaxacct: not certified: 1 of 8 privacy losses are not finite\n"


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

    from jaxacct.cli.commands import estimate

    real = estimate.estimate_delta
    monkeypatch.setattr(estimate, "estimate_delta", estimated)
    command = "estimate --iterations 1 --scheme poisson --sampling-probability 0.5 --bands 1"
    command += " --noise-multiplier 1 --epsilon 1 --samples 256 --confidence 0.625 --json"
    assert run(command.split()) == 0
    assert asked == [0.625] and json.loads(capsys.readouterr().out)["confidence"] == 0.625


@pytest.mark.parametrize("given", [["--epsilon", "1"], ["--delta", "1e-5"]], ids=" ".join)
def test_where_no_lower_end_is_proven_that_is_said(given, capsys):
    """In place of 0."""
    words = "estimate --scheme poisson --sampling-probability 0.01 --iterations 200 --noise-multiplier 1"
    assert run([*words.split(), *given]) == 0
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
