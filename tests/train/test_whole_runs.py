"""What fails at the end fails first; runs that end early, go on later or train on nothing; averages."""

import json
import logging
import os
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.refusals import refused
from tests.train.runs import PARAMS, ROWS, data, flat, loss, plan, run
from tests.train.test_dice_plan import PLAN as DICE
from train import load_model, save_model
from train.optimizers import average_of, averaging
from train.run.folder import RunFolder
from train.run.trained import Watch

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion", "interruptible")


def fails_before_the_first_step(message, **options):
    seen = []
    refused(message, run, callback=lambda *each: seen.append(each), **options)
    assert not seen
    if out := options.get("out"):
        assert not (out / "private/batches").exists() and not (out / "model").exists()


@pytest.mark.parametrize("returned", [PARAMS, {"accuracy": "good"}], ids=["parameters", "text"])
def test_what_fails_at_the_end_fails_before_the_first_step(returned, tmp_path):
    for out in (tmp_path, None):
        message = "evaluate must return a dictionary of numbers"
        fails_before_the_first_step(message, out=out, evaluate=lambda params: returned)
    assert run(out=tmp_path).steps == 12


def test_a_model_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr("train.run.folder.write_model", full)
    message = "model must have parameters that can be written to .*: no space left"
    fails_before_the_first_step(message, out=tmp_path)


def test_models_with_empty_arrays_and_long_names_are_written(tmp_path):
    model = PARAMS | {"none": jnp.zeros((0, 3)), 300 * "a": jnp.zeros(2)}
    trained = run(out=tmp_path, model=model).params
    np.testing.assert_array_equal(flat(load_model(tmp_path, model)), flat(trained))


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


def undefined(params, example):
    return jnp.log(-1.0 - jnp.abs(example["y"])) + params["b"]


def flat_loss(params, example):
    return 0.0 * loss(params, example)


@pytest.mark.parametrize(("given", "dice"), [(undefined, False), (undefined, True), (flat_loss, False)])
def test_a_run_that_trains_on_nothing_is_named_once(given, dice, tmp_path, caplog):
    """In the operator's log alone; the run ends as any other, and no file that is published differs."""
    seen, words = [], "no example of the first 10 steps had a finite loss"
    if given is flat_loss:
        words = "all gradients of the first 10 steps are zero"
    covered = DICE if dice else plan("poisson", dataset_size=ROWS, rate=0.5)
    with caplog.at_level(logging.WARNING, "jaxacct.train"):
        run(plan=covered, loss=given, out=tmp_path, callback=lambda step, info: seen.append(info))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1 and words in warned[0] and "private" in warned[0] and "\n" not in warned[0]
    for name in ("result.json", "run.json"):
        assert "finite loss" not in (tmp_path / name).read_text()
    sampled = np.array([info["dropped"] for info in seen])
    assert (sampled > 0).all() if given is undefined else not sampled.any()
    if given is undefined:
        assert all(info["clipped_fraction"] == 0 and info["max_norm"] is None for info in seen)
    else:
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


DECAY, STEPS = 0.7, 12


def iterates(**options) -> list[np.ndarray]:
    """The parameters after each step, by the state that checkpoints hold."""
    seen = []
    real = RunFolder.save

    def kept(self, state, drawn):
        seen.append(flat(state.params).astype(np.float64))
        return real(self, state, drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save", kept)
        result = run(checkpoint_every=1, **options)
    return seen[1:], result


def test_the_average_of_all_iterates_is_published(tmp_path):
    """Weights decay^(t - s) on the iterates of a run without it, which has the same bits."""
    each, last = iterates(out=tmp_path / "last")
    published = run(out=tmp_path / "average", average=DECAY, evaluate=lambda params: {"w": params["w"][0]})
    weights = DECAY ** np.arange(STEPS)[::-1]
    wanted = (weights[:, None] * np.array(each)).sum(0) / weights.sum()
    np.testing.assert_allclose(flat(published.params), wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(flat(published.params) - flat(last.params)).max() > 1e-2  # another model
    np.testing.assert_array_equal(flat(load_model(tmp_path / "average", PARAMS)), flat(published.params))
    # `evaluate` sees the average, and the guarantee is the same.
    assert published.evaluation == {"w": float(published.params["w"][0])}
    assert published.statement == last.statement
    assert json.loads((tmp_path / "average/result.json").read_text())["guarantee"] == last.statement


def test_the_result_has_the_optimizer_state():
    """That of optax's own updates; an average is beside it."""
    optimizer = optax.adam(0.1)
    result = run(optimizer=optimizer)
    assert jax.tree.structure(result.opt_state) == jax.tree.structure(optimizer.init(PARAMS))
    assert result.opt_state[0].count == STEPS
    averaged = run(optimizer=optimizer, average=DECAY)
    for a, b in zip(*map(jax.tree.leaves, (averaged.opt_state.inner, result.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "opt_state" not in repr(result)


def test_bfloat16_parameters_are_averaged_in_float32():
    """A small step is below the resolution of a bfloat16 average, which would stand still."""
    step = averaging(optax.sgd(1.0), 0.999)
    params = jnp.ones(3, jnp.bfloat16)
    state = step.init(params)
    for _ in range(300):
        updates, state = step.update(jnp.full(3, -0.01), state, params)
        params = optax.apply_updates(params, updates)
    assert state.average.dtype == jnp.float32
    assert average_of(state, params).dtype == jnp.bfloat16
    steps = np.cumsum(np.full(300, 0.01)) + 1
    weights = 0.999 ** np.arange(300)[::-1]
    assert abs(float(state.average[0]) - (weights * steps).sum() / weights.sum()) < 0.05


def test_float_leaves_become_arrays(tmp_path):
    """Numbers, of Python or NumPy, among the parameters train as arrays of one number do."""
    whole = run(out=tmp_path / "arrays")
    for zero in (0.0, np.float64(0)):
        mixed = run(model={"w": np.zeros(3), "b": zero}, out=tmp_path / type(zero).__name__)
        assert isinstance(mixed.params["b"], jax.Array) and not mixed.params["b"].weak_type
        np.testing.assert_array_equal(flat(mixed.params), flat(whole.params))
    save_model(tmp_path, {"w": np.zeros(3), "b": 0.0})


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice(step, info):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, callback=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["0"]
