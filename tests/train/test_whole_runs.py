"""What fails at the end fails first; runs that end early, go on later, are stopped or train on nothing."""

import json
import logging
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.refusals import refused
from tests.train.plans import plan
from tests.train.test_dice_plan import PLAN as DICE
from tests.train.test_loop import PARAMS, ROWS, data, flat, loss, run
from train.run.trained import Watch

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


@pytest.fixture(autouse=True)
def interruptible():
    """Interrupts reach the tests of a process that was started in the background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


FAILING = [
    (dict(model=PARAMS | {"none": jnp.zeros((0, 3))}), "model must have parameters that can be written"),
    (dict(model=PARAMS | {300 * "a": jnp.zeros(2)}), "model must have parameters that can be written"),
    (dict(evaluate=lambda params: params), "evaluate must return a dictionary of numbers"),
    (dict(evaluate=lambda params: {"accuracy": "good"}), "evaluate must return a dictionary of numbers"),
]


@pytest.mark.parametrize(("change", "message"), FAILING)
def test_what_fails_at_the_end_fails_before_the_first_step(change, message, tmp_path):
    seen = []
    refused(message, lambda: run(out=tmp_path, callback=lambda *each: seen.append(each), **change))
    assert not seen and not (tmp_path / "private/batches").exists() and not (tmp_path / "model").exists()
    if "evaluate" in change:
        refused(message, lambda: run(callback=lambda *each: seen.append(each), **change))
        assert not seen
        assert run(out=tmp_path).steps == 12


def test_evaluate_is_called_once_before_the_first_step(tmp_path):
    """With the initial parameters, and not where a run continues; nothing is left of the trial."""
    seen = []

    def evaluate(params):
        seen.append(flat(params))
        return {"size": 0.0}

    run(out=tmp_path, evaluate=evaluate, steps=4)
    assert len(seen) == 2 and not seen[0].any() and seen[1].any()
    run(out=tmp_path, evaluate=evaluate, steps=4)
    assert len(seen) == 3
    assert not (tmp_path / "private/trial").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_ends_earlier_or_goes_on_later(tmp_path):
    """Its first steps are those of the whole run, so no noise is used twice; the guarantee is the plan's."""
    whole, short = run(), run(steps=6)
    for name, steps in (("early", 12), ("later", 5)):
        out = tmp_path / name
        if steps == 12:
            with pytest.raises(KeyboardInterrupt):
                run(out=out, callback=interrupt_at(3), checkpoint_every=1, prefetch=0)
        else:
            assert run(out=out, steps=5).steps == 5
        ended = run(out=out, steps=6)
        np.testing.assert_array_equal(flat(ended.params), flat(short.params))
        assert ended.statement == whole.statement
        assert json.loads((out / "result.json").read_text())["guarantee"] == whole.statement
        refused(r"steps must be at least 6, as the run in .* is there, got 5", run, out=out, steps=5)
        np.testing.assert_array_equal(flat(run(out=out).params), flat(whole.params))


def interrupt_at(at: int):
    """A callback that does what Ctrl-C does, when it gets this step."""

    def callback(step, info):
        if step == at:
            os.kill(os.getpid(), signal.SIGINT)

    return callback


def test_ctrl_c_writes_a_checkpoint(tmp_path, capsys):
    """After the step in progress; the run goes on from there, to the same bits and logs."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "part", callback=interrupt_at(2))
    assert "stopping with a checkpoint" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    newest = max(int(each.name) for each in (tmp_path / "part/checkpoints").iterdir())
    log = tmp_path / "part/private/metrics.jsonl"
    assert 2 <= newest < 12 and len(log.read_text().splitlines()) == newest
    whole = run(out=tmp_path / "whole")
    np.testing.assert_array_equal(flat(run(out=tmp_path / "part").params), flat(whole.params))
    assert log.read_text() == (tmp_path / "whole/private/metrics.jsonl").read_text()


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice(step, info):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, callback=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["0"]


def undefined(params, example):
    return jnp.log(-1.0 - jnp.abs(example["y"])) + params["b"]


def flat_loss(params, example):
    return 0.0 * loss(params, example)


@pytest.mark.parametrize(
    ("given", "words", "dice"),
    [
        (undefined, "no example of the first 10 steps had a finite loss", False),
        (undefined, "no example of the first 10 steps had a finite loss", True),
        (flat_loss, "all gradients of the first 10 steps are zero", False),
    ],
)
def test_a_run_that_trains_on_nothing_is_named_once(given, words, dice, tmp_path, caplog):
    """In the operator's log alone; the run ends as any other, and no file that is published differs."""
    seen = []
    covered = DICE if dice else plan("poisson", dataset_size=ROWS, rate=0.5)
    steps = dict(steps=12)
    with caplog.at_level(logging.WARNING, "jaxacct.train"):
        run(plan=covered, loss=given, out=tmp_path, callback=lambda step, info: seen.append(info), **steps)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1 and words in warned[0] and "private" in warned[0] and "\n" not in warned[0]
    for name in ("result.json", "run.json"):
        assert "finite loss" not in (tmp_path / name).read_text()
    sampled = np.array([info["dropped"] for info in seen])
    assert (sampled > 0).all() if given is undefined else not sampled.any()
    if given is undefined:
        assert all(info["clipped_fraction"] == 0 and info["max_norm"] is None for info in seen)
    elif given is flat_loss:
        assert all(info["max_norm"] == 0 for info in seen)


def test_dropped_examples_are_counted_and_not_clipped():
    """Full batches against NumPy: a third of the labels is NaN, of the others half has a long gradient."""
    covered = plan("poisson", dataset_size=ROWS, rate=1.0, iterations=1, sigma=1e-4)
    rows = data()
    rows["y"] = np.where(np.arange(ROWS) < 20, 1e30, np.where(np.arange(ROWS) < 40, 9.0, 1e-3)).astype("f4")
    seen = []
    for clipping in ("per_example", "ghost"):
        run(plan=covered, data=rows, clipping=clipping, callback=lambda step, info: seen.append(info))
    norms = 2 * np.abs(rows["y"]) * np.sqrt(1 + np.square(rows["x"]).sum(1))
    for info in seen:
        assert info["dropped"] == 20
        assert info["clipped_fraction"] == pytest.approx(np.mean(norms[20:] > 1))
        assert info["max_norm"] == pytest.approx(norms[20:].max(), rel=1e-3)


def test_nothing_is_said_of_steps_without_examples():
    """Poisson batches may be empty for long; and the last step of a short run is waited for."""
    empty = {"max_norm": None, "dropped": 0.0}
    watch = Watch()
    for step in range(1, 30):
        watch.see(empty, last=step == 29)
    assert watch.is_open
    watch.see({"gradient_norm": 1.0}, last=True)
    assert not watch.is_open


def test_optimizers_are_not_given_the_callers_arrays():
    """Arrays of the caller live on: parameters, keys, and hyperparameters in the optimizer's state."""
    rate = jnp.float32(0.1)
    params = jax.tree.map(jnp.array, PARAMS)
    run(model=params, optimizer=optax.inject_hyperparams(optax.sgd)(rate))
    assert not rate.is_deleted() and not params["w"].is_deleted()
