"""`clipping="auto"`: what it stands for, that a guarantee does not depend on it, and that a run keeps it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.refusals import refused
from tests.train.runs import KEYS, fit, flat, made, plan, squared
from train.clipping import ghost as automatic
from train.clipping.ghost import choose, ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.programs import Traced, shapes
from train.clipping.sums import check_loss
from train.models.loss import nnx_loss
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

ROWS, WIDTH = 40, 32
GRID = Grid(1.0, 20)


class Mixed(nnx.Module):
    """A dense layer with a fast path, and a scale, a bias and a kernel used twice, which have none."""

    def __init__(self, rngs, shared=4):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.twice = nnx.Linear(shared, shared, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        x = jnp.tanh(self.dense(x) * self.scale)
        some = x[: self.twice.in_features]
        return x.sum() + self.twice(self.twice(some)).sum()


def data(rows=ROWS, scale=1.0):
    generator = np.random.default_rng(0)
    x = scale * generator.normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.zeros(rows, np.float32)}


def mixed(shared=4):
    return nnx_loss(made(lambda: Mixed(nnx.Rngs(0), shared)), squared)


def run(**options):
    covered, model = plan("poisson", dataset_size=ROWS, iterations=4), made(lambda: Mixed(nnx.Rngs(0)))
    return fit(covered, model, squared, data(), optax.sgd(0.05), keys=KEYS, **options)


def test_ghost_where_it_applies(monkeypatch):
    loss, params = mixed()
    chosen = choose(loss, params, data(), grid=GRID)
    reason = "92.4% of the parameters have a fast path; gradients are scaled to 0.9998 clip_norm"
    assert chosen == ("ghost", reason)

    few, weights = (lambda w, example: (example["x"] @ w) ** 2), jnp.zeros(WIDTH)
    assert choose(few, weights, data(), grid=GRID) == ("per_example", "32 parameters are few")
    # Most entries are in a kernel that is used twice: ghost clipping writes its gradients down, too.
    loss, params = mixed(shared=WIDTH)
    chosen = choose(loss, params, data(), grid=GRID)
    assert chosen.clipping == "ghost" and chosen.reason.startswith("47.8%")
    # Much noise needs a coarse grid, where rounding of the whole sum takes much of the clip norm.
    loss, params = mixed()
    chosen = choose(loss, params, data(), grid=Grid(1.0, 9))
    assert chosen == ("per_example", "ghost clipping would scale gradients to 0.93 clip_norm")
    chosen = choose(loss, params, data(), grid=Grid(1.0, 5))
    assert chosen == ("per_example", "ghost clipping would leave less than half of the clip norm")
    # What no kind takes is refused as ever.
    given = lambda w, example: example["x"] @ w, jnp.zeros((WIDTH, WIDTH)), data()
    refused("loss must return one number for one example", choose, *given, grid=GRID)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose(loss, params, data(), grid=GRID) == ("per_example", "ghost clipping is not for tpu")


def test_a_loss_is_checked_once_a_step(monkeypatch):
    """What was checked for the choice is what is computed. A traced loss that was not checked is refused."""
    (loss, params), checked = mixed(), []

    def counted(*given, **options):
        checked.append(check_loss(*given, **options))
        return checked[-1]

    monkeypatch.setattr(automatic, "check_loss", counted)
    mechanism = plan("poisson", dataset_size=ROWS, iterations=4).mechanism
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=8.0)
    step = make_step(loss, private, optax.sgd(0.05))
    step.trace(step.init(params), data(), np.ones(ROWS, bool))
    assert len(checked) == 1

    vector, _ = Traced.of(lambda w, example: example["x"] @ w, jnp.zeros((WIDTH, WIDTH)), shapes(data(), 1))
    given = vector, jnp.zeros((WIDTH, WIDTH)), data()
    for of_rows in (choose, functools.partial(ghost_gradient_sum, mask=np.ones(ROWS, bool))):
        refused("loss must return one number for one example", of_rows, *given, grid=GRID)


def test_the_joint_norm_is_that_of_all_parameters():
    """Of fast and written-down parameters together: the same norms and sums as gradients of examples.

    Attack: an example whose gradient is long in both parts. Norms by part would let it be sqrt(2) too long.
    """
    loss, params = mixed()
    both = ghost_gradient_sum, clipped_gradient_sum
    sums = [jax.jit(functools.partial(sum_of, loss, params, grid=GRID)) for sum_of in both]
    for scale in (1e-3, 1.0, 1e3):
        ours, theirs = (summed(data(6, scale), np.ones(6, bool)) for summed in sums)
        np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-6)
        # Of one example alone, the sum is no longer than the clip norm in whole units: the claim of both.
        for summed in sums:
            units = jax.tree.leaves(summed(data(6, scale), np.arange(6) == 2).total.units())
            square = sum(int((unit.astype(object) ** 2).sum()) for unit in units)
            assert square <= 4**GRID.bits
            if scale >= 1:  # it is clipped, so nearly all of the clip norm is used
                assert square > 0.99 * 4**GRID.bits


def test_a_certificate_does_not_depend_on_what_is_chosen(tmp_path, capsys):
    """The same statement, digest of the plan, batches and noise; the choice is printed once."""
    ours = run(out=tmp_path / "auto")
    assert capsys.readouterr().err.count("clipping: ghost (") == 1
    theirs = run(out=tmp_path / "per_example", clipping="per_example")
    assert "clipping: ghost" not in capsys.readouterr().err
    described = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("auto", "per_example")]
    assert ours.statement == theirs.statement
    assert [each["clipping"] for each in described] == ["ghost", "per_example"]
    assert described[0]["plan"] == described[1]["plan"]
    assert described[0]["generator"] == described[1]["generator"]
    assert 0 < np.abs(flat(ours.params) - flat(theirs.params)).max() < 1e-2


def test_a_run_keeps_the_kind_that_it_began_with(tmp_path, monkeypatch):
    """Where another release would choose otherwise the kind has to be given."""
    run(out=tmp_path, steps=4)
    monkeypatch.setattr(automatic, "MIN_ENTRIES", 10**9)
    message = "another clipping: 'ghost', now 'per_example'"
    refused(message, run, out=tmp_path, steps=4)
    run(out=tmp_path, steps=4, clipping="ghost")
    refused(message, run, out=tmp_path, steps=4, clipping="per_example")
