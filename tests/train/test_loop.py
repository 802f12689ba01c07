"""fit: a plain reference training, what it refuses, interruption and resume, devices, secrets."""

import contextlib
import functools
import json
import os
import shutil

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
from train import training
from train.batches.given import keyed
from train.batches.sampler import Sampler
from train.batches.sources import ArrayRows
from train.noise import recursion as noise
from train.optimizers import privatize
from train.procedures.step import make_step
from train.run.folder import CheckpointError, RunFolder

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


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


def test_a_folder_that_lost_or_changed_its_secret_is_refused(tmp_path, monkeypatch):
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
