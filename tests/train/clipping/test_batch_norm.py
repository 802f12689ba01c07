"""Batch norm of nnx and linen: refused with the statistics of a batch, allowed with frozen ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests.train.test_loop import PARAMS, flat, loss, run
from train.models.loss import nnx_loss

pytestmark = pytest.mark.usefixtures("shared_programs")

FROZEN = {"use_running_average": True}
TEXT = "must not contain batch norm that takes the statistics of a batch"


class Normed(nnx.Module):
    def __init__(self, options, in_call=None):
        self.norm = nnx.BatchNorm(3, use_bias=False, rngs=nnx.Rngs(0), **options)
        self.norm.mean[...] = jnp.array([0.5, -1.0, 2.0])
        self.in_call = in_call or {}

    def __call__(self, x):
        return self.norm(x, **self.in_call).sum()


def of_nnx(model, example):
    return (model(example["x"]) - example["y"]) ** 2


@pytest.mark.parametrize("options", [{}, {"use_running_average": False}])
def test_statistics_of_a_batch_are_refused_of_nnx(options):
    with pytest.raises(ValueError, match=f"model {TEXT}.*use_running_average=True"):
        run(model=Normed(options), loss=of_nnx)


def test_a_call_that_takes_statistics_after_all_is_refused_of_nnx():
    with pytest.raises(ValueError, match="loss must not write to the model, wrote to norm"):
        run(model=Normed(FROZEN, {"use_running_average": False}), loss=of_nnx)


def test_frozen_statistics_of_nnx_are_used_and_bind_a_run(tmp_path):
    """The gradient of scales around the stored mean; other statistics do not go on in the folder."""
    model = Normed({})
    model.eval()
    found = run(model=model, loss=of_nnx, out=tmp_path / "run", steps=2)
    assert flat(found.params).shape == (3,) and (flat(found.params) != 1).all()
    np.testing.assert_array_equal(model.norm.mean[...], [0.5, -1.0, 2.0])
    function, params = nnx_loss(model, of_nnx)
    one = {"x": jnp.ones(3), "y": jnp.float32(0)}
    assert float(function(params, one)) == pytest.approx((0.5 + 2 - 1) ** 2, rel=1e-4)
    other = Normed(FROZEN)
    other.norm.mean[...] = jnp.zeros(3)
    with pytest.raises(ValueError, match="another frozen part"):
        run(model=other, loss=of_nnx, out=tmp_path / "run", steps=2)


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
@pytest.mark.parametrize(("options", "in_call"), [(FROZEN | {"use_running_average": False}, {}), ({}, None)])
def test_statistics_of_a_batch_are_refused_of_linen(options, in_call, clipping):
    in_call = {"use_running_average": False} if in_call is None else in_call
    with pytest.raises(ValueError, match=f"loss {TEXT}.*use_running_average=True") as caught:
        run(loss=of_linen(options, in_call), clipping=clipping)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "in_call"), [(FROZEN, None), ({}, FROZEN)])
def test_frozen_statistics_of_linen_are_used(options, in_call):
    """With mean 0 and variance 1 the model is the one without batch norm, but for its epsilon."""
    found = run(loss=of_linen(options, in_call), steps=2)
    np.testing.assert_allclose(flat(found.params), flat(run(model=PARAMS, steps=2).params), atol=1e-4)
