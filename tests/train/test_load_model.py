"""A trained model is loaded back with the bits that were released."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.plans import plan
from tests.train.test_loop import PARAMS, ROWS, data, loss
from train import fit, load_model, with_params
from train.optimizers import sgd

pytestmark = pytest.mark.usefixtures("shared_programs")


class Linear(nnx.Module):
    def __init__(self, rngs, width=3):
        self.layer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)[..., 0]


def squared(model, example):
    return (model(example["x"]) - example["y"]) ** 2


def array_loss(params, example):
    return (example["x"] @ params - example["y"]) ** 2


@pytest.fixture(scope="module")
def covered():
    return plan("poisson", dataset_size=ROWS, iterations=2)


def test_a_module(covered, tmp_path):
    result = fit(covered, Linear(nnx.Rngs(0)), squared, data(), sgd(0.1, 2), out=tmp_path / "run")
    other = Linear(nnx.Rngs(7))
    assert load_model(tmp_path / "run", other) is other
    ours, theirs = (jax.tree.leaves(state) for state in (nnx.state(other, nnx.Param), result.params))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    model = Linear(nnx.Rngs(3))
    filled = with_params(model, result.params)
    for a, b in zip(jax.tree.leaves(nnx.state(filled)), theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (model.layer.kernel[...] != filled.layer.kernel[...]).all()
    with pytest.raises(
        ValueError, match=r"model must be of the structure that was trained: its layer\.kernel"
    ):
        load_model(tmp_path / "run", Linear(nnx.Rngs(0), width=4))
    with pytest.raises(ValueError, match="model must be of the structure"):
        load_model(tmp_path / "run", {"w": jnp.zeros(3)})


@pytest.mark.parametrize(
    ("params", "function"), [(PARAMS, loss), (jnp.zeros(3, jnp.bfloat16), array_loss)], ids=["tree", "array"]
)
def test_a_pytree(params, function, covered, tmp_path):
    result = fit(covered, params, function, data(), sgd(0.1, 2), out=tmp_path / "run")
    found = load_model(tmp_path / "run", params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(result.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_no_run(tmp_path):
    with pytest.raises(ValueError, match="run must be the folder of a finished run"):
        load_model(tmp_path, PARAMS)
