"""Noise that is kept nowhere: the integers of kept noise, from the key and the step alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, Mechanism
from tests.refusals import refused
from tests.train.runs import KEYS, PARAMS, ROWS, data, fit, loss, plan
from train.noise import recursion, redrawn
from train.optimizers import privatize
from train.procedures.step import make_step
from train.run import machine

pytestmark = pytest.mark.usefixtures("shared_programs")

LEVELS, KEY = 2.0**19, np.arange(8, dtype=np.uint32)
MANY = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(3)}
INVERSE = BandedInverse.bisr(iterations=12, bands=4)


def integers(strategy, draw, state, steps=7):
    step = jax.jit(lambda state: draw(strategy, LEVELS, state, MANY))
    for _ in range(steps):
        found, state = step(state)
        yield np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])


def test_the_integers_are_those_of_kept_noise():
    """Of every step, the first ones included, in which the earlier vectors are zero."""
    kept = integers(INVERSE, recursion.draw, recursion.init(INVERSE, MANY, KEY))
    again = integers(INVERSE, redrawn.draw, redrawn.init(MANY, KEY))
    for ours, theirs in zip(again, kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nothing_is_kept():
    """No array of the state has the size of the parameters, nor has a checkpoint."""
    mechanism = Mechanism(BMinSep(12, 4, 0.2), INVERSE, 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0, noise_memory="recompute")
    state = private.init(MANY)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == len(KEY) + 1
    kept = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0).init(MANY)
    assert sum(leaf.size for leaf in jax.tree.leaves(kept.recent)) == 3 * 2003


def test_a_state_of_kept_noise_is_not_redrawn():
    """Its vectors would stay those of earlier steps, and be added again by the next kept step."""
    kept = recursion.init(INVERSE, MANY, KEY)
    refused("noise_memory must be 'keep' for this state", redrawn.draw, INVERSE, LEVELS, kept, MANY)
    with pytest.raises((TypeError, ValueError)):
        recursion.draw(INVERSE, LEVELS, redrawn.init(MANY, KEY), MANY)


def trained(tmp_path=None, steps=None, **options):
    covered = plan(dataset_size=ROWS, iterations=12, separation=4, strategy=INVERSE)
    given = dict(keys=KEYS, steps=steps, out=tmp_path) | options
    return fit(covered, PARAMS, loss, data(), optax.sgd(0.1), **given).params


def test_a_run_releases_the_bits_of_kept_noise_and_resumes(tmp_path):
    kept = trained()
    np.testing.assert_array_equal(trained(noise_memory="recompute")["w"], kept["w"])
    trained(tmp_path, 5, noise_memory="recompute")
    found = trained(tmp_path, noise_memory="recompute")
    np.testing.assert_array_equal(found["w"], kept["w"])
    refused("another noise_memory", trained, tmp_path, noise_memory="keep")


def test_where_it_does_not_apply():
    """Each is refused in one line that says what does."""
    sizes = dict(clip_norm=1.0, expected_batch_size=4.0, noise_memory="recompute")
    keep, banded = "^noise_memory must be 'keep'", BandedToeplitz.square_root(4)
    other = Mechanism(BMinSep(12, 4, 0.2), banded, 1.0)
    refused(f"{keep} for .*--strategy optimal-inverse", privatize, other, **sizes)
    refused(r"^noise_memory must be one of keep, recompute, got 'none'", trained, noise_memory="none")
    elastic = dict(noise_memory="recompute", elastic=True)
    refused(f"{keep} with batches, .* and with elastic", trained, **elastic)
    private = privatize(Mechanism(BMinSep(12, 4, 0.2), INVERSE, 1.0), **sizes)
    step, rows = make_step(loss, private, optax.sgd(0.1)), jax.tree.map(lambda leaf: leaf[:4], data())
    refused(f"{keep} with batches", step, step.init(PARAMS), rows, np.ones(4, bool), digest="one")


def test_a_run_kept_on_a_gpu_must_repeat_its_steps(tmp_path, monkeypatch):
    """With a noise key for each call, vectors of earlier calls could not be drawn again."""
    monkeypatch.setattr(machine, "platforms", lambda tree: {"gpu"})
    message, out = "noise_memory must be 'keep' with out on a GPU", tmp_path / "run"
    refused(message, trained, out, noise_memory="recompute")
    assert not out.exists()
    np.testing.assert_array_equal(trained(noise_memory="recompute")["w"], trained()["w"])
