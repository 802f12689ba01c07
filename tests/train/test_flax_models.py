"""Models as users of Flax write them: both kinds of clipping against a loop over examples; `fit` trains.

The loop computes `jax.grad` of one example at a time in float64; in float32 for models that draw other masks
in float64, or whose recurrent state is float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.flax_models import MODELS, ROWS
from tests.train.runs import KEYS, fit, plan
from train.clipping.ghost import choose, suits
from train.clipping.grid import Grid
from train.clipping.rows_apart import OneAtATimeError
from train.models.loss import as_loss
from train.procedures.step import CLIPPINGS

pytestmark = pytest.mark.usefixtures("default_promotion")

FEW = 4
# Of norms, relative: activations of bfloat16 have 8 bits, which fused operations round at other places.
MAX_OFF_OF = {"linen_lm_bfloat16": 2e-2}
# Other masks are drawn in float64, or the recurrent state is float32.
FLOAT32 = "linen_vae linen_bidirectional_lstm linen_gru nnx_vit_dropout nnx_vit_remat linen_dropout".split()
ONE_AT_A_TIME = ("linen_mixture_of_experts",)
GRID = Grid(1.0, 20)


def gradients_of_loop(loss, params, rows, dtype=jnp.float64):
    """Return gradients of examples, computed one at a time: (rows, ...) in float64."""
    with jax.enable_x64(dtype == jnp.float64):

        def wide(tree):
            return jax.tree.map(
                lambda a: jnp.asarray(a, dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
            )

        rows, params, loss = wide(rows), wide(params), wide(as_loss(loss))
        each = jax.jit(lambda f, p, rows: jax.lax.map(lambda example: jax.grad(f)(p, example), rows))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each(loss, params, rows))]


def norms_of(gradients):
    return np.sqrt(sum(np.square(leaf).reshape(len(leaf), -1).sum(1) for leaf in gradients))


def check(name: str) -> None:
    """Norms and clipped sums of both kinds against the loop; half of the gradients are clipped."""
    example = MODELS[name]()
    loss, params = example.functional()
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:FEW]), example.rows)
    exact = gradients_of_loop(loss, params, rows, jnp.float32 if name in FLOAT32 else jnp.float64)
    norms = norms_of(exact)
    # A sum of squares in pairs errs by 2^-24 a level, the norm by half of that; a loop in float32 as well.
    rounding = np.log2(sum(leaf[0].size for leaf in exact)) * 2.0**-25 * (1 + (name in FLOAT32))
    max_off = MAX_OFF_OF.get(name, rounding)
    grid = Grid(float(np.median(norms)), 22)
    weights = np.minimum(1.0, grid.clip_norm / norms)
    wanted = [np.tensordot(weights, leaf, 1) for leaf in exact]
    for kind, sum_of in CLIPPINGS.items():
        run = jax.jit(lambda f, p, r, sum_of=sum_of: sum_of(f, p, r, np.ones(FEW, bool), grid=grid))
        if kind == "ghost" and name in ONE_AT_A_TIME:
            with pytest.raises(OneAtATimeError):
                run(loss, params, rows)
            continue
        found = run(loss, params, rows)
        np.testing.assert_allclose(found.norms, norms, rtol=max_off, err_msg=kind)
        scale = suits(loss, params, rows, grid=grid)[1] if kind == "ghost" else 1.0
        sums = [units * grid.unit / scale for units in jax.tree.leaves(found.total.units())]
        off = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(sums, wanted, strict=True)))
        rounded = grid.unit * np.sqrt(sum(leaf.size for leaf in wanted))
        assert off <= FEW * (rounded / scale + 10 * max_off * grid.clip_norm), kind


def trained(name: str, clipping: str):
    example = MODELS[name]()
    covered = plan("poisson", dataset_size=ROWS, iterations=2, rate=0.25)
    options = dict(clipping=clipping, keys=KEYS, progress=False) | example.options
    return fit(covered, example.model, example.loss, example.rows, optax.sgd(0.05), **options)


def check_fit(name: str) -> None:
    """Two steps under a plan: the same batches and noise, so parameters differ by rounding alone."""
    kinds = ["per_example"] if name in ONE_AT_A_TIME else list(CLIPPINGS)
    example = MODELS[name]()
    loss, params = example.functional()
    assert choose(loss, params, example.rows, grid=GRID).clipping == kinds[-1]
    found = [trained(name, kind) for kind in kinds]
    for ours, theirs in zip(*(jax.tree.leaves(each.params) for each in (found[0], found[-1])), strict=True):
        assert jnp.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def in_bfloat16(params, example):
    """Of a dense layer whose input and cotangent bfloat16 has exactly."""
    found = example["x"].astype(jnp.bfloat16) @ params.astype(jnp.bfloat16)
    return jnp.sum(found.astype(jnp.float32) * example["cotangent"])


def test_gradients_of_bfloat16_are_rounded_by_the_loop():
    """The norm of the exact gradient in float64: ghost clipping has it, gradients written down are rounded.

    To the 8 bits of bfloat16, as products of two of its arrays are returned in it.
    """
    generator, width = np.random.default_rng(0), 48
    x, cotangent = (generator.integers(-99, 99, (FEW, 3, width)).astype(np.float32) for _ in range(2))
    rows, params = {"x": x, "cotangent": cotangent}, np.zeros((width, width), np.float32)
    exact = np.einsum("bti,bto->bio", x.astype(np.float64), cotangent.astype(np.float64))
    norms = np.sqrt((exact**2).sum((1, 2)))
    off = {}
    for kind, sum_of in CLIPPINGS.items():
        run = jax.jit(lambda p, r, sum_of=sum_of: sum_of(in_bfloat16, p, r, np.ones(FEW, bool), grid=GRID))
        off[kind] = np.max(np.abs(run(params, rows).norms / norms - 1))
    loop = norms_of(gradients_of_loop(in_bfloat16, params, rows, jnp.float32))
    assert off["ghost"] < 2e-7, off
    assert off["per_example"] > 1e-6 and np.max(np.abs(loop / norms - 1)) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains(name):
    check_fit(name)


def test_one_model():
    """The fast sibling of all of them; a model that trains by both kinds is in `test_automatic.py`."""
    check("linen_custom_rule")
