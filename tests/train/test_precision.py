"""Compute in bfloat16 with float32 parameters; physical batches that add up to the batch of the plan."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.train.modules import made
from tests.train.plans import plan
from tests.train.test_loop import ROWS, flat, run
from train.clipping.ghost import budget, ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.models.loss import nnx_loss
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

WIDTH, GRID = 32, Grid(1.0, 20)
COVERED = plan("poisson", dataset_size=ROWS, iterations=6, rate=0.3, sigma=0.1)
SUMS = {"per_example": clipped_gradient_sum, "ghost": ghost_gradient_sum}


class Network(nnx.Module):
    """The recipe: parameters of float32, everything computed in `dtype`."""

    def __init__(self, dtype):
        given = dict(dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        self.first = nnx.Linear(WIDTH, WIDTH, **given)
        self.last = nnx.Linear(WIDTH, 1, **given)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))[0]


def squared(model, example):
    # The loss itself is of float32: a sum of many small bfloat16 numbers stands still.
    return (model(example["x"]).astype(jnp.float32) - example["y"]) ** 2


def network(dtype):
    return made(lambda: Network(dtype))


def rows():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1]}


def test_bfloat16_compute_with_float32_parameters():
    """Products of bfloat16; parameters, optimizer state and updates of float32; nearly the same model."""
    given = dict(plan=COVERED, loss=squared, data=rows(), optimizer=optax.adam(0.01), clipping="ghost")
    half, full = (run(model=network(dtype), **given) for dtype in (jnp.bfloat16, jnp.float32))
    for leaf in jax.tree.leaves((half.params, half.opt_state[0].mu)):
        assert leaf.dtype == jnp.float32
    before = flat(nnx.state(network(jnp.float32), nnx.Param))
    moved = np.abs(flat(full.params) - before).max()
    gap = np.abs(flat(half.params) - flat(full.params))
    assert 0 < gap.mean() < 0.1 * moved

    loss, params = nnx_loss(network(jnp.bfloat16), squared)
    private = privatize(COVERED.mechanism, clip_norm=1.0, expected_batch_size=18.0)
    step = make_step(loss, private, optax.sgd(0.1), clipping="ghost")
    some = jax.tree.map(lambda leaf: leaf[:8], rows())
    program = str(step.trace(step.init(params), some, np.ones(8, bool)).jaxpr)
    assert "bf16" in program and "dot_general" in program


@pytest.mark.parametrize("clipping", SUMS)
def test_one_example_moves_the_sum_by_no_more_than_the_clip_norm(clipping):
    """Whatever bfloat16 rounds: the norm that is clipped is that of the numbers that are summed."""
    loss, params = nnx_loss(network(jnp.bfloat16), squared)
    total = jax.jit(lambda batch, mask: SUMS[clipping](loss, params, batch, mask, grid=GRID).total)
    for scale, gone in itertools.product((1e-4, 1.0, 1e4), (0, 3)):
        batch = {name: np.float32(scale) * leaf[:6] for name, leaf in rows().items()}
        both = (total(batch, mask).units() for mask in (np.ones(6, bool), np.arange(6) != gone))
        moved = jax.tree.map(lambda a, b: (a - b).astype(object), *both)
        assert sum(int((leaf**2).sum()) for leaf in jax.tree.leaves(moved)) <= 4**GRID.bits


def linear(params, example):
    """Its gradient is the example, whatever the parameters: exact in float32, in whatever order."""
    return jnp.vdot(params["w"], example["x"])


def whole_numbers(size=ROWS):
    x = np.random.default_rng(1).integers(-4, 5, (size, 2, WIDTH)).astype(np.float32)
    return {"x": x / 64}  # some are clipped, some are not


@functools.cache
def summed(clipping: str, micro: int):
    params = {"w": jnp.zeros((2, WIDTH))}
    sum_of = functools.partial(SUMS[clipping], linear, params, grid=Grid(0.32, 20), microbatch_size=micro)
    return jax.jit(sum_of)(whole_numbers(), np.arange(ROWS) < ROWS - 3)


@pytest.mark.parametrize("micro", [1, 7, ROWS])
def test_physical_batches_add_up_to_the_integer(micro):
    """Sums are of integers, so microbatches of any size add up to the sum of the whole batch, bit for bit."""
    whole, parts = summed("per_example", ROWS), summed("per_example", micro)
    assert 0.2 < float(whole.clipped_fraction) < 0.8
    np.testing.assert_array_equal(whole.total.units()["w"], parts.total.units()["w"])
    # The oracle: gradients of examples clipped one by one in NumPy, cut to the grid, added as integers.
    x = whole_numbers()["x"][: ROWS - 3].astype(np.float64)
    norms = np.sqrt((x**2).sum((1, 2), keepdims=True))
    units = np.trunc(x * np.minimum(1, 0.32 / norms) * (1 - 2.0**-24) / Grid(0.32, 20).unit).astype(np.int64)
    np.testing.assert_array_equal(parts.total.units()["w"], units.sum(0))


@pytest.mark.parametrize("micro", [1, 7])
def test_ghost_sums_of_physical_batches_are_within_what_is_paid_for(micro):
    """Against the exact sum in NumPy: errors of at most half of the reserve for two neighbours."""
    total = summed("ghost", micro).total.units()["w"]
    x = whole_numbers()["x"][: ROWS - 3].astype(np.float64)
    pieces = -(-ROWS // micro)
    allowed = budget(Grid(0.32, 20), 2 * WIDTH, ROWS, micro + pieces, min(micro, 64) + pieces)
    norms = np.sqrt((x**2).sum((1, 2), keepdims=True) * (1 + 2.0**-24))
    exact = (x * np.minimum(1 / Grid(0.32, 20).unit, allowed.target / norms)).sum(0)
    assert np.linalg.norm(total - exact) <= (allowed.summation + allowed.rounding) / 2
