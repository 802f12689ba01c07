"""Models as users of Flax write them: both kinds of clipping against a loop over examples; `fit` trains.

The loop computes `jax.grad` of one example at a time in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.fitting import fit
from tests.train.flax_models import MODELS, ROWS
from tests.train.plans import plan
from tests.train.test_loop import KEYS
from train.clipping.automatic import choose
from train.clipping.ghost import ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.rows_apart import OneAtATimeError

pytestmark = pytest.mark.usefixtures("default_promotion")

FEW = 4
# Models whose norms are off by more than 2e-7, as those of a loop in float32 are (`test_the_loop_is_off`).
MAX_OFF = {"linen_lm_bfloat16": 1e-2}
SUMS_OFF = 1e-5
ONE_AT_A_TIME = ("linen_mixture_of_experts",)
FAST = "nnx_lora", "linen_custom_rule"
BOTH = {"per_example": clipped_gradient_sum, "ghost": ghost_gradient_sum}


def gradients_of_loop(loss, params, rows, dtype=jnp.float64):
    """Return gradients of examples, computed one at a time: (rows, ...) in float64."""
    with jax.enable_x64(dtype == jnp.float64):

        def wide(tree):
            return jax.tree.map(
                lambda a: jnp.asarray(a, dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
            )

        rows, params, loss = wide(rows), wide(params), wide(loss)
        each = jax.jit(lambda f, p, rows: jax.lax.map(lambda example: jax.grad(f)(p, example), rows))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each(loss, params, rows))]


def norms_of(gradients):
    return np.sqrt(sum(np.square(leaf).reshape(len(leaf), -1).sum(1) for leaf in gradients))


def norms_of_loop(loss, params, rows, dtype=jnp.float64):
    return norms_of(gradients_of_loop(loss, params, rows, dtype))


def check(name: str) -> None:
    """Norms and clipped sums of both kinds against the loop; half of the gradients are clipped."""
    example = MODELS[name]()
    loss, params = example.functional()
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:FEW]), example.rows)
    exact = gradients_of_loop(loss, params, rows)
    norms = norms_of(exact)
    grid = Grid(float(np.median(norms)), 24)
    weights = np.minimum(1.0, grid.clip_norm / norms)
    wanted = [np.tensordot(weights, leaf, 1) for leaf in exact]
    length = np.sqrt(sum((leaf**2).sum() for leaf in wanted))
    for kind, sum_of in BOTH.items():
        run = jax.jit(lambda f, p, r, sum_of=sum_of: sum_of(f, p, r, np.ones(FEW, bool), grid=grid))
        if kind == "ghost" and name in ONE_AT_A_TIME:
            with pytest.raises(OneAtATimeError):
                run(loss, params, rows)
            continue
        found = run(loss, params, rows)
        np.testing.assert_allclose(found.norms, norms, rtol=MAX_OFF.get(name, 2e-7), err_msg=kind)
        sums = [units * grid.unit for units in jax.tree.leaves(found.total.units())]
        off = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(sums, wanted, strict=True)))
        assert off <= SUMS_OFF * length, kind


def trained(name: str, clipping: str):
    example = MODELS[name]()
    covered = plan("poisson", dataset_size=ROWS, iterations=2, rate=0.25)
    options = dict(clipping=clipping, keys=KEYS, progress=False) | example.options
    return fit(covered, example.model, example.loss, example.rows, optax.sgd(0.05), **options)


def check_fit(name: str) -> None:
    """Two steps under a plan: the same batches and noise, so parameters differ by rounding alone."""
    kinds = ["per_example"] if name in ONE_AT_A_TIME else list(BOTH)
    example = MODELS[name]()
    loss, params = example.functional()
    assert choose(loss, params, example.rows, grid=Grid(1.0, 20)).clipping == kinds[-1]
    found = [trained(name, kind) for kind in kinds]
    for ours, theirs in zip(*(jax.tree.leaves(each.params) for each in (found[0], found[-1])), strict=True):
        assert jnp.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name):
    check(name)
    check_fit(name)


@pytest.mark.parametrize("name", FAST)
def test_some_models(name):
    check(name)


def test_two_steps_under_a_plan():
    check_fit("nnx_lora")
