"""A trained model is loaded back with the bits that were released."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.train.fitting import fit
from tests.train.plans import plan
from tests.train.test_loop import PARAMS, ROWS, data, loss
from train import load_model, save_model, with_params
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
    theirs = jax.tree.leaves(result.params)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(other, nnx.Param)), theirs)
    model = Linear(nnx.Rngs(3))
    filled = with_params(model, result.params)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(filled)), theirs)
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
@pytest.mark.usefixtures("default_promotion")
def test_a_pytree(params, function, covered, tmp_path):
    result = fit(covered, params, function, data(), sgd(0.1, 2), out=tmp_path / "run")
    found = load_model(tmp_path / "run", params)
    chex.assert_trees_all_equal_structs(found, params)
    chex.assert_trees_all_equal(found, result.params, strict=True)


def test_no_run(tmp_path):
    with pytest.raises(ValueError, match="run must be the folder of a finished run"):
        load_model(tmp_path, PARAMS)


def test_names_with_separators_are_files_of_their_own(tmp_path):
    """A point or a slash in a name is no step into it."""
    params = {
        "a.b": jnp.zeros(2),
        "a": {"b": jnp.ones(3), "c/d": jnp.full(2, 2.0)},
        "a/c/d": jnp.full(1, 3.0),
    }
    params |= {"list": [jnp.full(2, 4.0), jnp.full(1, 5.0)], "list.0": jnp.full(3, 6.0)}
    save_model(tmp_path, params)
    like = jax.tree.map(jnp.zeros_like, params)
    chex.assert_trees_all_equal(load_model(tmp_path, like), params, strict=True)
    names = {path.name for path in (tmp_path / "model").iterdir() if path.is_dir()}
    assert names >= {"a%2Eb", "a.b", "a.c%2Fd", "a%2Fc%2Fd", "list.0", "list%2E0"}
    with pytest.raises(
        ValueError, match="model must have parameters of different names, has two of one name"
    ):
        save_model(tmp_path / "same", {"a.b": jnp.zeros(2), "a%2Eb": jnp.ones(2)})
