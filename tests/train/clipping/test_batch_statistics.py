"""Statistics of a batch: batch norm of nnx and linen is refused, that of others is found in their programs.

The programs are those that batch norm of Haiku (variance as the mean of squares), Keras (of deviations) and
Equinox (sums over a named axis of `jax.vmap`) trace to.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from tests.refusals import refused
from tests.train.runs import PARAMS, flat, loss, run, squared
from train.clipping.per_example import check_loss
from train.models.loss import nnx_loss

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

FROZEN = {"use_running_average": True}
TEXT = "must not contain batch norm that takes the statistics of a batch"


class Normed(nnx.Module):
    def __init__(self, options, in_call=None):
        self.norm = nnx.BatchNorm(3, use_bias=False, rngs=nnx.Rngs(0), **options)
        self.norm.mean[...] = jnp.array([0.5, -1.0, 2.0])
        self.in_call = in_call or {}

    def __call__(self, x):
        return self.norm(x, **self.in_call).sum()


TAKEN = {"use_running_average": False}


def test_statistics_of_a_batch_are_refused_of_nnx():
    """Also where a call takes them after all."""
    for model, message in (
        (Normed({}), f"model {TEXT}.*use_running_average=True"),
        (Normed(TAKEN), f"model {TEXT}.*use_running_average=True"),
        (Normed(FROZEN, TAKEN), "loss must not write to the model, wrote to norm"),
    ):
        refused(message, run, model=model, loss=squared)


def test_frozen_statistics_of_nnx_are_used_and_bind_a_run(tmp_path):
    """The gradient of scales around the stored mean; other statistics do not go on in the folder."""
    model = Normed({})
    model.eval()
    found = run(model=model, loss=squared, out=tmp_path / "run", steps=2)
    assert flat(found.params).shape == (3,) and (flat(found.params) != 1).all()
    np.testing.assert_array_equal(model.norm.mean[...], [0.5, -1.0, 2.0])
    function, params = nnx_loss(model, squared)
    one = {"x": jnp.ones(3), "y": jnp.float32(0)}
    assert float(function(params, one)) == pytest.approx((0.5 + 2 - 1) ** 2, rel=1e-4)
    other = Normed(FROZEN)
    other.norm.mean[...] = jnp.zeros(3)
    refused("another frozen part", run, model=other, loss=squared, out=tmp_path / "run", steps=2)


def of_linen(options, in_call=None):
    module = linen.BatchNorm(use_bias=False, use_scale=False, **options)
    statistics = {"mean": jnp.zeros(3), "var": jnp.ones(3)}

    def function(statistics, params, example):
        # As in evaluation: what a module writes is dropped.
        variables = {"batch_stats": statistics}
        x, _ = module.apply(variables, example["x"], **(in_call or {}), mutable=["batch_stats"])
        return loss(params, example | {"x": x})

    return jax.tree_util.Partial(function, statistics)


@pytest.mark.parametrize("clipping", ["per_example", "ghost"])
def test_statistics_of_a_batch_are_refused_of_linen(clipping):
    for given in ((TAKEN, {}), ({}, TAKEN)):
        message = f"loss {TEXT}.*use_running_average=True"
        refused(message, run, loss=of_linen(*given), clipping=clipping)


@pytest.mark.parametrize(("options", "in_call"), [(FROZEN, None), ({}, FROZEN)])
def test_frozen_statistics_of_linen_are_used(options, in_call):
    """With mean 0 and variance 1 the model is the one without batch norm, but for its epsilon."""
    found = run(loss=of_linen(options, in_call), steps=2)
    np.testing.assert_allclose(flat(found.params), flat(run(model=PARAMS, steps=2).params), atol=1e-4)


VECTOR, IMAGE = np.ones(5, np.float32), np.ones((6, 6, 3), np.float32)
KERNEL = jnp.ones((5, 4))


def of_deviations(x, axes=0):
    return (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-5)


def of_squares(x):
    mean = x.mean(0)
    return (x - mean) / jnp.sqrt(jnp.square(x).mean(0) - mean**2 + 1e-5)


def by_name(x):
    def one(x):
        mean = lax.pmean(x, "batch")
        return (x - mean) / jnp.sqrt(lax.pmean((x - mean) ** 2, "batch") + 1e-5)

    return jax.vmap(one, axis_name="batch")(x)


class Merged(nnx.Module):
    """Its parameters are given as a state: no module is there to be asked for its batch norm."""

    def __init__(self):
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x).sum()


GRAPH, SCALES, STATISTICS = nnx.split(Merged(), nnx.Param, ...)


def in_scan(params, x):
    found, _ = lax.scan(lambda y, _: (of_deviations(y @ params @ params.T), None), x[None], None, length=2)
    return found.sum()


def carried(params, x):
    """The example is in the carry from the second pass on."""

    def one(carry, row):
        return carry + row, of_deviations(carry @ params)

    return lax.scan(one, jnp.zeros((1, 5)), jnp.stack([x, x])[:, None])[1].sum()


TAKING = {
    "deviations": lambda params, x: of_deviations(x[None] @ params).sum(),
    "squares": lambda params, x: of_squares(x[None] @ params).sum(),
    "a named axis": lambda params, x: by_name(x[None] @ params).sum(),
    "scan": in_scan,
    "a carry": carried,
    "cond": lambda params, x: lax.cond(x[0] > 0, of_deviations, jnp.cos, x[None] @ params).sum(),
    "while": lambda params, x: lax.while_loop(
        lambda y: y[0, 0] < 0, lambda y: of_deviations(y), x[None] @ params
    ).sum(),
    "remat": jax.checkpoint(lambda params, x: of_deviations(x[None] @ params).sum()),
    "relu": lambda params, x: jax.nn.relu(of_deviations(jax.jit(jax.nn.silu)(x[None] @ params))).sum(),
}


def test_statistics_of_a_batch_of_one_are_refused():
    """Those of images and of a merged module, too."""
    start = r"^loss must not divide by .*first axis of"
    for taking in TAKING.values():
        refused(rf"{start} \(1, \d\): batch norm; use", check_loss, taking, KERNEL, VECTOR[None], 1)
    of_image = lambda p, x: p * of_deviations(x[None], (0, 1, 2)).sum(), 1.0, IMAGE[None]
    refused(rf"{start} \(1, 6, 6, 3\)", check_loss, *of_image, 1)
    merged = lambda p, x: nnx.merge(GRAPH, p, STATISTICS, copy=True)(x[None]), SCALES, VECTOR[None]
    refused(rf"{start} \(1, 5\)", check_loss, *merged, 1)


def module(made, x):
    params = jax.eval_shape(made.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return (lambda params, x: made.apply(params, x).sum()), params, x


def number(function, x=VECTOR[None]):
    return (lambda params, x: params * function(x).sum()), jnp.ones(()), x


ALLOWED = {
    "group norm": lambda: module(linen.GroupNorm(num_groups=3), IMAGE[None]),
    "layer norm": lambda: module(linen.LayerNorm(), VECTOR[None]),
    "layer norm of one feature": lambda: module(linen.LayerNorm(), VECTOR[:, None]),
    "instance norm": lambda: module(linen.InstanceNorm(), IMAGE[None]),
    "attention": lambda: module(linen.MultiHeadDotProductAttention(1), VECTOR[None, None]),
    "a kernel of one pixel, standardized": lambda: (
        lambda params, x: (x @ of_deviations(params)).sum(),
        jnp.ones((1, 4)),
        np.ones(1, np.float32),
    ),
    "an image, standardized": lambda: number(lambda x: (x - x.mean()) / x.std(), IMAGE[None]),
    "softmax": lambda: number(lambda x: jax.nn.softmax(x, axis=0)),
    "root mean square": lambda: number(lambda x: jnp.sqrt(jnp.mean(x**2, axis=0))),
    "a norm": lambda: number(lambda x: x / jnp.linalg.norm(x, axis=0)),
    "two means": lambda: number(lambda x: (x - x.mean(0)) / (1 + jnp.square(x).mean(0))),
    "stored statistics": lambda: number(lambda x: (x - 1) * lax.rsqrt(jnp.ones(5) + 1e-5)),
}


def test_other_norms_are_trained():
    for made in ALLOWED.values():
        loss, params, x = made()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_loss(loss, params, jnp.asarray(x)[None], 1)
