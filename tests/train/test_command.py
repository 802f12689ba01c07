"""`jaxacct train` of the plans that are not of correlated noise; each kind has a recipe."""

import json
from unittest import mock

import pytest

from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan
from tests import commands
from tests.train import runs
from train.batches.sampler import BatchOverflowError
from train.procedures.convex import LogisticRegression
from train.procedures.protocol import procedure_of
from train.run.folder import CheckpointError

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

GENERAL = GeneralPlan(1440, 1, 36, 1, "shuffling", 1, sigma=1.0, epsilon=50.0, delta=1e-5)


def convex(**change) -> LastIteratePlan:
    run = dict(num_examples=1440, steps=24, batch_size=120, stepsize=0.3, diameter=10.0)
    loss = LogisticRegression(10, 2.0, 0.02)
    return LastIteratePlan.calibrate(20.0, 1e-5, method="cgd", loss=loss, **run | change)


def command(capsys, *words):
    return commands.command(capsys, "train", *words)


def test_every_kind_of_plan_has_a_procedure():
    for plan in (GENERAL, convex()):
        assert procedure_of(plan).supports and plan.iterations > 0


SIZES = dict(dataset_size=1440, batch_size=36, iterations=4, clip_norm=1.0, error_clip_norm=0.1)
DICE = DicePlan.calibrate(8.0, 1e-5, **SIZES)
KINDS = {"dice": (DICE, "DiceSGD, 4 steps of 36 examples"), "general": (GENERAL, "batch clipping, shuffling")}


@pytest.mark.parametrize("kind", ["dice", pytest.param("general", marks=pytest.mark.slow)])
def test_each_kind_of_plan_from_the_command_line(kind, tmp_path, capsys):
    plan, said = KINDS[kind]
    plan.save(tmp_path / "plan.json")
    given = ["--plan", tmp_path / "plan.json", "--out", tmp_path / "run", "--steps", "2"]
    code, out, _ = command(capsys, *given, "--json-output")
    found = json.loads(out)
    assert code == 0 and said in found["guarantee"] and found["steps"] == 2
    code, _, error = command(capsys, *given, "--normalize")
    assert code == 2 and "normalize must not be given for a plan of" in error and error.count("\n") == 1


def test_last_iterates_are_refused_by_the_command_line(tmp_path, capsys):
    convex().save(tmp_path / "plan.json")
    given = ["--plan", tmp_path / "plan.json", "--out", tmp_path / "run"]
    code, _, error = command(capsys, *given)
    assert code == 2 and "plan must not be of last-iterate" in error and error.count("\n") == 1
    other = json.loads((tmp_path / "plan.json").read_text()) | {"noise_std": 1e-3}
    (tmp_path / "other.json").write_text(json.dumps(other))
    code, _, error = command(capsys, "--plan", tmp_path / "other.json", "--out", tmp_path / "new")
    assert code == 2 and "plan must be valid" in error and not (tmp_path / "new").exists()


def test_exit_codes(tmp_path, capsys, monkeypatch):
    """A full disk is no verdict: 1 is of a run that stopped, or of an audit that contradicts its plan."""

    runs.plan("poisson", dataset_size=1440).save(tmp_path / "plan.json")
    given = ["--plan", tmp_path / "plan.json"]
    for error, code in (
        (OSError(28, "No space left on device", "run/checkpoints"), 2),
        (CheckpointError("checkpoint of step 3 could not be written: No space left on device"), 2),
        (ValueError("steps must be positive, got 0"), 2),
        (BatchOverflowError("a batch of 9 examples is larger than 8"), 1),
    ):
        for name in ("train.command.fit", "train.audit.command.audit"):
            monkeypatch.setattr(name, mock.Mock(side_effect=error))
        for words in (["train", *given, "--out", tmp_path / "run"], ["audit", *given]):
            stopped, _, said = commands.command(capsys, *words)
            assert stopped == code, words
            assert said.startswith("jaxacct: ") and said.count("\n") == 1
