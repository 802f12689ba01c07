"""fit: a plain reference training, refusals, interruption and resume, secrets, early ends, averages."""

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BufferedToeplitz, Plan
from jaxacct.common.files import write_atomically
from tests.refusals import refused
from tests.train.runs import KEYS, PARAMS, ROWS, Crash, crash_at, crashed, data, flat, loss, plan, run
from tests.train.test_dice import PLAN as DICE
from train import load_model, save_model, training
from train.batches.given import keyed
from train.batches.sampler import Sampler
from train.batches.sources import ArrayRows
from train.noise import recursion as noise
from train.optimizers import average_of, averaging, privatize
from train.procedures.step import make_step
from train.run.folder import CheckpointError, RunFolder
from train.run.trained import Watch

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion", "interruptible")


@functools.cache
def draw_of(strategy, levels: float):
    """`noise.draw` as a program."""
    return jax.jit(lambda state: noise.draw(strategy, levels, state, PARAMS))


def test_against_a_loop_in_plain_numpy():
    """Sampler, clipping, noise and SGD put together by hand in float64 give the same parameters."""
    for kind in ("poisson", "b-min-sep"):
        covered = plan(kind, dataset_size=ROWS, sigma=0.3)
        ours = run(plan=covered, clip_norm=0.7)
        sampler = Sampler(covered.mechanism.scheme, ROWS, ROWS, KEYS[0])
        state = noise.init(covered.mechanism.strategy, PARAMS, KEYS[1])
        levels = 0.3 * 2.0**21
        w, rows = np.zeros(4), data()
        for _ in range(12):
            batch = sampler.next()
            total = np.zeros(4)
            for i in batch:
                x = np.append(rows["x"][i].astype(np.float64), 1.0)
                g = 2 * (x @ w - rows["y"][i]) * x
                total += g * min(1.0, 0.7 / np.linalg.norm(g))
            drawn, state = draw_of(covered.mechanism.strategy, levels)(state)
            drawn = np.append(np.asarray(drawn["w"], np.float64), drawn["b"]) / levels
            w -= 0.05 * (total + 0.7 * 0.3 * drawn) / covered.expected_batch_size
        np.testing.assert_allclose(np.append(ours.params["w"], ours.params["b"]), w, rtol=2e-4, atol=2e-5)
        assert ours.steps == 12


def wide(params, example):
    return (example["x"] @ params["w"].mean(axis=1) - example["y"]) ** 2


SUMS = BufferedToeplitz((0.9, 0.4), (0.3, 0.2), 12)
HALF = dict(model={"w": jnp.zeros((3, 400), jnp.bfloat16)}, loss=wide, optimizer=optax.sgd(0.05, 0.9))
CUT = plan("poisson", dataset_size=ROWS, rate=0.5, truncation_delta=1e-6, max_batch_size=20)
# Options of a run, and the step in which it crashes.
RESUMED = {
    "adam": (dict(optimizer=optax.adam(0.1)), 0),
    "running sums": (dict(plan=plan(dataset_size=ROWS, strategy=SUMS), optimizer=optax.adam(0.1)), 8),
    "average": (dict(average=0.7), 5),
    # Momentum began in bfloat16 and went on in float32; restored into the first, it was rounded.
    "bfloat16": (HALF, 7),
    # Half of the batches are larger than the maximum: they are cut with `out` and after a crash, too.
    "truncated batches": (dict(plan=CUT), 9),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_after_a_crash_it_ends_with_the_same_bits(name, tmp_path, monkeypatch, shared_programs):
    """An exception in the middle of a step; the second call restores, replays and ends the same."""
    given, stop = RESUMED[name]
    if name == "truncated batches":
        monkeypatch.setattr(Plan, "certified", True)
    options = given | dict(checkpoint_every=4)
    whole = run(out=tmp_path / "whole", **options)
    crashed(stop + 1, out=tmp_path / "part", **options)
    if stop == 0:
        shared_programs.clear()  # as another process, which traces its step anew
    # Other keys offered: those of the run that began count (of the noise, from the checkpoint).
    part = run(out=tmp_path / "part", **options | {"keys": ((9, 9, 9, 9), KEYS[1] + 1)})
    chex.assert_trees_all_equal(part.params, whole.params, strict=True)
    a, b = ((tmp_path / each / "private/metrics.jsonl").read_text() for each in ("whole", "part"))
    assert a == b


def test_a_damaged_checkpoint_is_named(tmp_path):
    run(out=tmp_path, steps=12, checkpoint_every=4)
    newest = tmp_path / "checkpoints/12"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(CheckpointError, match=r"damaged.*remove"):
        run(out=tmp_path, steps=12, checkpoint_every=4)
    shutil.rmtree(newest)
    run(out=tmp_path, steps=12, checkpoint_every=4)


def test_two_processes_on_one_folder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(ValueError, match="in use"):
        run(out=tmp_path)


def test_secrets_are_for_the_owner_and_nowhere_else(tmp_path, capfd):
    for name in ("checkpoints", "private"):
        (tmp_path / name).mkdir(mode=0o755)
    for name in ("secret.json.tmp", "private/metrics.jsonl"):
        (tmp_path / name).touch(mode=0o666)
    run(out=tmp_path, keys=None, evaluate=lambda params: {"size": 0.0}, checkpoint_every=5)
    closed = "secret.json", "checkpoints", "private", "private/metrics.jsonl"
    for name in closed:
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    words = json.loads((tmp_path / "secret.json").read_text())["sampler_key"]
    shown = "".join((tmp_path / name).read_text() for name in ("run.json", "metrics.jsonl", "result.json"))
    shown += "".join(capfd.readouterr())
    assert not any(str(word) in shown for word in words if word > 10**6)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert set().union(*lines) <= {"step", "evaluation"}
    # Opened in the meantime: the next call closes them again.
    for name in reversed(closed):
        (tmp_path / name).chmod(0o777)
    run(out=tmp_path, checkpoint_every=5, evaluate=lambda params: {"size": 0.0})
    for name in closed:
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


def test_logs_are_json_without_times(tmp_path):
    """An empty batch has no median and a poisoned one no finite loss; JSON has no word for either."""
    poisoned = data() | {"y": np.full(ROWS, 1e30, np.float32)}
    run(out=tmp_path, data=poisoned, plan=plan("poisson", dataset_size=ROWS, rate=0.01))

    def refuse(word):
        raise AssertionError(word)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "private/metrics.jsonl").open()]
    assert len(lines) == 12
    assert any(line["median_norm"] is None for line in lines)
    assert any(line["loss"] is None for line in lines)
    assert not any("second" in name for line in lines for name in line)


def test_flags_of_debugging_do_not_stop_a_run():
    """Attack: whether a run ends would depend on one example, here on the sign of its label."""

    def undefined(params, example):
        return jnp.log(example["y"]) * (example["x"] @ params["w"]) + params["b"]

    whole = run(loss=undefined)
    for flag in (jax.debug_nans, jax.debug_infs):
        with flag(True):
            np.testing.assert_array_equal(flat(run(loss=undefined).params), flat(whole.params))


def test_fresh_noise_every_run():
    a, b = (flat(run(keys=None).params) for _ in range(2))
    assert not np.any(a == b)


def test_evaluation_and_progress(tmp_path):
    seen = []
    options = dict(out=tmp_path, progress=lambda *a: seen.append(a), checkpoint_every=5)
    found = lambda params: {"size": jnp.abs(params["w"]).sum(), "none": np.float64("nan")}  # noqa: E731
    result = run(evaluate=found, **options)
    assert seen[-1] == ("training", 12, 12)
    logged = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "evaluation" in line]
    assert [line["step"] for line in logged] == [5, 10]
    assert all(type(value) is float for value in result.evaluation.values())
    stored = json.loads((tmp_path / "result.json").read_text())["evaluation"]
    assert stored == {"size": result.evaluation["size"], "none": None}


def test_a_plan_by_its_path_and_a_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    """No output but the clipping without an interactive terminal, none on request."""
    plan(dataset_size=ROWS).save(tmp_path / "plan.json")
    assert run(plan=tmp_path / "plan.json").statement == run(plan=str(tmp_path / "plan.json")).statement
    assert capsys.readouterr() == ("", 2 * "clipping: per_example (4 parameters are few)\n")
    run(progress=False)
    assert capsys.readouterr() == ("", "")
    shown = []
    monkeypatch.setattr(training, "is_interactive", lambda: True)
    bar = contextlib.nullcontext(lambda *step: shown.append(step))
    monkeypatch.setattr(training, "watch", lambda: bar)
    run(progress=False)
    assert not shown
    run()
    assert shown[-1] == ("training", 12, 12)


def test_normalize_reaches_the_step():
    """Mutant 17: one step without momentum against plain NumPy, gradients shorter than the clip norm."""
    covered = plan("poisson", dataset_size=ROWS, rate=1.0, iterations=1, sigma=1e-4)
    rows = {"x": np.full((ROWS, 3), 0.1, np.float32), "y": np.full(ROWS, 0.2, np.float32)}
    found = run(plan=covered, data=rows, clip_norm=50.0, normalize=True, optimizer=optax.sgd(1.0))
    gradient = -2 * 0.2 * np.array([1.0, 0.1, 0.1, 0.1])  # b, w
    scale = 50.0 / (np.linalg.norm(gradient) + 0.01)
    np.testing.assert_allclose(flat(found.params), -scale * gradient, rtol=1e-2, atol=1e-2 * scale)


def test_a_crash_before_the_first_checkpoint_keeps_the_key(tmp_path):
    """Mutant 30: the sampler's key that was stored counts, whatever the second call brings."""
    with crash_at(RunFolder, "save", 1), pytest.raises(Crash):
        run(out=tmp_path)
    stored = json.loads((tmp_path / "secret.json").read_text())["sampler_key"]
    run(out=tmp_path, keys=((9, 9, 9, 9), KEYS[1] + 1), checkpoint_every=4)
    with RunFolder(tmp_path) as folder:
        kept = folder._manager.restore(12)["sampler"]["key"]
    assert stored == list(KEYS[0]) == kept


def test_a_secret_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """Mutant 29: a failure in the middle of the write leaves the old content and nothing else."""
    path = tmp_path / "secret.json"
    write_atomically(path, "old", secret=True)
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new", secret=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_lost_or_changed_its_secret_is_refused(tmp_path):
    """A new key over old checkpoints would go on with noise that other data or batches may have had."""
    folder = tmp_path / "run"
    run(out=folder, checkpoint_every=6)
    secret = json.loads((folder / "secret.json").read_text())
    cases = {
        "checkpoints of a run whose secret.json is gone": None,
        "must hold a sampler key of four words": secret | {"sampler_key": [1, 2, 3, True]},
        "four words and a digest": {"sampler_key": secret["sampler_key"]},
    }
    for message, content in cases.items():
        (folder / "secret.json").unlink(missing_ok=True)
        if content is not None:
            (folder / "secret.json").write_text(json.dumps(content))
        refused(message, run, out=folder, checkpoint_every=6)
    other = keyed([5, 6, 7, 8], ArrayRows(data()).fingerprint())
    (folder / "secret.json").write_text(json.dumps({"sampler_key": [5, 6, 7, 8], "data": other}))
    refused(r"checkpoints of another run than its secret\.json", run, out=folder, checkpoint_every=6)
    (folder / "secret.json").write_text(json.dumps(secret))
    sampler = next((folder / "checkpoints" / "12").glob("sampler/*"))
    sampler.write_text(json.dumps(json.loads(sampler.read_text()) | {"step": 0}))
    with pytest.raises(CheckpointError, match="its sampler is at another step"):
        run(out=folder, checkpoint_every=6)


def test_the_state_keeps_its_dtypes():
    private = privatize(plan(dataset_size=ROWS).mechanism, clip_norm=1.0, expected_batch_size=4.0)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    rows = jax.tree.map(lambda leaf: leaf[:4], data())
    for optimizer in (optax.adam(0.1), optax.sgd(0.05, momentum=0.9), optax.adamw(0.1), optax.lion(0.1)):
        step = make_step(loss, private, optimizer)
        state = step.init(params)
        after, _ = jax.eval_shape(step, state, rows, np.ones(4, bool))
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)


def test_one_sampler_a_run(tmp_path, monkeypatch):
    """Built fresh from the key that is stored, or from the stored state; never one to throw away."""
    built = []
    begin = Sampler.__init__
    monkeypatch.setattr(Sampler, "__init__", lambda self, *a, **k: built.append(a[3]) or begin(self, *a, **k))
    run(out=tmp_path / "run")
    run(out=tmp_path / "run", keys=((9, 9, 9, 9), KEYS[1]))
    assert built == [[1, 2, 3, 4], [1, 2, 3, 4]]


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


def interrupt_at(at: int, times: int = 1):
    """A callback that does what Ctrl-C does, when it gets this step."""

    def callback(step, info):
        for _ in range(times * (step == at)):
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
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, callback=interrupt_at(1, times=2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["0"]
