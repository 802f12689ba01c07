"""What `calibrate` prints at its end: paths quoted and printed once, commands that work for this plan."""

import importlib
import json
import math
import shlex

import pytest
from flax import nnx

from jaxacct.cli import main as cli
from jaxacct.cli.commands.calibrate import DIGITS
from train.batches.data import load

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


def test_the_data_set_without_a_download():
    assert len(load("digits").train) == DIGITS
