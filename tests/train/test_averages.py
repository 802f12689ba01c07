"""Averages of iterates are what is published and survive interruptions; the optimizer state in `Result`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.test_command import convex
from tests.train.test_loop import PARAMS, flat, run
from train import load_model
from train.optimizers import average_of, averaging
from train.procedures.convex import LogisticRegression
from train.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

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


def test_refused(tmp_path):
    for value in (0.0, 1.0, -0.5, optax.contrib.schedule_free_eval_params):
        with pytest.raises(ValueError, match=r"average must be in \(0, 1\), got"):
            run(average=value)
    # Of a plan of last iterates only the last one is covered.
    with pytest.raises(ValueError, match="average must not be given for a plan of last-iterate"):
        run(plan=convex(), model=None, loss=LogisticRegression(10, 2.0, 0.02), optimizer=None, average=0.9)
