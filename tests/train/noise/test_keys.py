"""Noise keys of runs, folders that lost their checkpoints, and what a folder shows to others."""

import os
import re
import shutil
import stat
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.refusals import refused
from tests.train import test_batch_clipping, test_dice
from tests.train.runs import KEYS, PARAMS, ROWS, crashed, data, loss, plan, run
from train import load_model, save_model
from train.batches.sampler import Sampler
from train.noise import normals
from train.optimizers import privatize
from train.options import TrainOptions
from train.procedures.batch_clipping import make_round, private_round_update
from train.procedures.convex import Iterate
from train.procedures.dice import dice_sgd, dice_step
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs")

MECHANISM = plan(dataset_size=ROWS).mechanism


def steps(key=None) -> dict:
    """One of each kind of step and transformation that draws noise: `init(params) -> state`."""
    private = privatize(MECHANISM, clip_norm=1.0, expected_batch_size=4.0, key=key)
    fed_back = dict(clip_norm=1.0, error_clip_norm=1.0, noise_std=1.0, batch_size=2)
    return {
        "private": private,
        "step": make_step(loss, private, optax.sgd(0.1)),
        "round": make_round(test_batch_clipping.plan(), loss, optax.sgd(0.1), clip_norm=1.0, key=key),
        "dice step": dice_step(test_dice.PLAN, loss, optax.sgd(0.1), key=key),
        "dice": dice_sgd(0.1, **fed_back, key=key),
    }


def key_in(state) -> np.ndarray:
    (found,) = (np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == np.uint32)
    assert found.shape == (8,)
    return found


SHOWN = np.arange(8, dtype=np.uint32) + np.uint32(3_000_000_001)


def words_in(text: str) -> set[str]:
    return {str(word) for word in SHOWN} & set(re.findall(r"\d+", text))


@pytest.mark.parametrize("name", steps())
def test_no_message_shows_a_key(name):
    """Text of a state, and the error of `jax.jit` for one that is given as a static argument."""
    state = steps(SHOWN)[name].init(PARAMS)
    assert not words_in(repr(state))
    with pytest.raises(ValueError, match=r"secret|private") as raised:
        jax.jit(jnp.shape, static_argnums=0)(state)
    assert not words_in(str(raised.value))


def test_no_message_shows_the_key_of_batches():
    keys = ((3_000_000_011, 3_000_000_012, 3_000_000_013, 3_000_000_014), SHOWN)
    sampler = Sampler.from_plan(plan(dataset_size=ROWS), keys[0])
    sampler.next()
    for each in (sampler.state, TrainOptions(keys=keys), Iterate(jnp.ones(2), jnp.uint32(0), keys[1])):
        assert "30000000" not in repr(each)
        assert type(each).__name__ in repr(each)
    assert sampler.state.digest not in repr(sampler.state)


@pytest.mark.parametrize("name", steps())
def test_two_runs_of_one_object_have_two_keys(name):
    """As in a sweep in a loop of one's own: with one key the difference of two runs has no noise."""
    made = steps()[name]
    keys = [key_in(made.init(PARAMS)) for _ in range(3)]
    assert len({key.tobytes() for key in keys}) == 3
    assert (key_in(steps(KEYS[1])[name].init(PARAMS)) == KEYS[1]).all()


@pytest.mark.parametrize("name", steps())
def test_no_key_is_a_constant_of_a_program(name):
    """Drawn while JAX traces, all runs that the program begins would have it."""
    made = steps()[name]
    many = jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape)), PARAMS)
    message = r"init must be called outside of jax\.jit"
    refused(message, jax.jit(made.init), PARAMS)
    refused(message, jax.jit(lambda: made.init(PARAMS)))
    refused(message, jax.vmap(made.init), many)
    refused(message, jax.lax.map, made.init, many)
    given = steps(KEYS[1])[name]
    assert (key_in(jax.jit(given.init)(PARAMS)) == KEYS[1]).all()


@pytest.mark.parametrize("name", steps())
def test_a_device_without_exact_sines_is_refused(name, monkeypatch):
    """As XLA (jaxlib 0.11.2) compiles them for an H200 without optimizations: in float32."""
    normals._refuse_inexact.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "another")
    transformation = steps()[name]
    assert key_in(transformation.init(PARAMS)).any()
    exact = normals._sine_cosine
    monkeypatch.setattr(normals, "_sine_cosine", lambda a: [x.astype(jnp.float32) for x in exact(a)])
    normals._refuse_inexact.cache_clear()
    with pytest.raises(RuntimeError, match="sines have less than the precision of float64"):
        transformation.init(PARAMS)
    normals._refuse_inexact.cache_clear()


def test_a_key_that_was_given_is_not_used_up():
    """Steps donate their state, in which the key is; the next run of the same object has it again."""
    key = jnp.arange(8, dtype=jnp.uint32)
    mechanism = plan(dataset_size=ROWS).mechanism
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0, key=key)
    step = make_step(loss, private, optax.sgd(0.1))
    for _ in range(2):
        step(step.init(PARAMS), jax.tree.map(lambda rows: rows[:4], data()), np.ones(4, bool))
    np.testing.assert_array_equal(key, np.arange(8))


def test_a_round_by_itself_needs_a_key_inside_of_a_program():
    one = lambda params: private_round_update(None, params, np.ones((1, 2, 1)), lambda p, r: p, 1.0, 1.0)[0]  # noqa: E731
    refused("init must be called outside", lambda: jax.jit(one)(np.zeros(3, np.float32)))
    assert (one(np.zeros(3, np.float32)) != one(np.zeros(3, np.float32))).all()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(out=folder, keys=None, evaluate=lambda params: {"size": 0.0}, checkpoint_every=4)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Besides the checkpoints.
REMOVED = {
    "checkpoints": "",
    "all secrets": "secret.json private",
    "all but the model": "secret.json private run.json result.json metrics.jsonl",
    "all but the result": "secret.json private run.json model metrics.jsonl",
    "all but evaluations": "result.json model",
    "all that was shown": "private result.json model metrics.jsonl",
}


@pytest.mark.parametrize("removed", REMOVED)
def test_what_was_shown_is_not_trained_again_without_its_checkpoints(removed, finished, tmp_path):
    """Else the same batches, or the same data under a plan for one run, would be shown with fresh noise."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for path in (folder / name for name in ["checkpoints", *REMOVED[removed].split()]):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = content(folder)
    for elastic in (False, True):
        refused(r"has shown step \d+ of a run and has no checkpoints", run, out=folder, elastic=elastic)
    assert before == content(folder)


def test_a_run_that_has_shown_nothing_begins_again(tmp_path):
    crashed(9, out=tmp_path, checkpoint_every=4)
    shutil.rmtree(tmp_path / "checkpoints")
    assert run(out=tmp_path, checkpoint_every=4).steps == 12


TREE = {"a": [jnp.float32(2), np.float32([[3, 2]])], "b": {"c": jnp.ones(4, jnp.bfloat16)}}


@pytest.mark.parametrize("model", [TREE, jnp.arange(5.0)], ids=["tree", "array"])
def test_a_published_model_is_a_function_of_its_parameters(model, tmp_path):
    """The same bytes at another time in another folder: no times, no paths, no names drawn at random."""
    for name in ("one", "another/place"):
        (tmp_path / name).mkdir(parents=True)
        save_model(tmp_path / name, jax.tree.map(lambda leaf: leaf + 1, model))
        save_model(tmp_path / name, model)  # in place of the one before
    one, other = (content(tmp_path / name / "model") for name in ("one", "another/place"))
    assert one == other and one
    assert not any(re.search(rb"timestamp_nsecs|[0-9]{16}", text) for text in one.values())
    loaded = load_model(tmp_path / "one", jax.tree.map(jnp.zeros_like, model))
    chex.assert_trees_all_equal(loaded, model, strict=True)


def test_others_see_nothing_of_the_private_log(finished):
    """Neither its size nor its times, in a folder they may not enter; the rest is open and has no times."""
    assert not list(finished.glob("*private_metrics*"))
    assert stat.S_IMODE((finished / "private").stat().st_mode) == 0o700
    assert len((finished / "private/metrics.jsonl").read_text().splitlines()) == 12
    mask = os.umask(0)
    os.umask(mask)
    for name in ("result.json", "metrics.jsonl", "run.json"):
        assert stat.S_IMODE((finished / name).stat().st_mode) == 0o666 & ~mask
    for path in [finished / "model", *(finished / "model").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444 & ~mask
    published = content(finished / "model") | {"result": (finished / "result.json").read_bytes()}
    times = rb"timestamp_nsecs|(?<![.0-9])[0-9]{16}\b(?![.])"
    assert not any(re.search(times, text) for text in published.values())
