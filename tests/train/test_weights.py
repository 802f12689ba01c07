"""Models in files: the bits that were released, and initial weights from safetensors."""

import json
import struct

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from flax import nnx

from tests.refusals import refused
from tests.train.runs import PARAMS, ROWS, data, fit, flat, loss, made, plan, squared
from train import load_model, load_weights, save_model, with_params
from train.models.lora import add_lora
from train.optimizers import sgd

pytestmark = pytest.mark.usefixtures("shared_programs")


class Linear(nnx.Module):
    def __init__(self, rngs, width=3):
        self.layer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)[..., 0]


def array_loss(params, example):
    return (example["x"] @ params - example["y"]) ** 2


@pytest.fixture(scope="module")
def covered():
    return plan("poisson", dataset_size=ROWS, iterations=2)


def test_a_module(covered, tmp_path):
    refused("run must be the folder of a finished run", load_model, tmp_path, Linear(nnx.Rngs(0)))
    result = fit(covered, Linear(nnx.Rngs(0)), squared, data(), sgd(0.1, 2), out=tmp_path / "run")
    other = Linear(nnx.Rngs(7))
    assert load_model(tmp_path / "run", other) is other
    theirs = jax.tree.leaves(result.params)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(other, nnx.Param)), theirs)
    model = Linear(nnx.Rngs(3))
    filled = with_params(model, result.params)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(filled)), theirs)
    assert (model.layer.kernel[...] != filled.layer.kernel[...]).all()
    message = "model must be of the structure"
    wider = Linear(nnx.Rngs(0), width=4)
    refused(rf"{message} that was trained: its layer\.kernel", load_model, tmp_path / "run", wider)
    refused(message, load_model, tmp_path / "run", {"w": jnp.zeros(3)})


PYTREES = {"tree": (PARAMS, loss), "array": (jnp.zeros(3, jnp.bfloat16), array_loss)}


@pytest.mark.parametrize("name", PYTREES)
@pytest.mark.usefixtures("default_promotion")
def test_a_pytree(name, covered, tmp_path):
    params, function = PYTREES[name]
    result = fit(covered, params, function, data(), sgd(0.1, 2), out=tmp_path / "run")
    found = load_model(tmp_path / "run", params)
    chex.assert_trees_all_equal_structs(found, params)
    chex.assert_trees_all_equal(found, result.params, strict=True)


def test_names_with_separators_are_of_their_own(tmp_path):
    """A point or a slash in a name is no step into it."""
    params = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(3), "c/d": jnp.full(2, 2.0)}}
    params |= {"a/c/d": jnp.full(1, 3.0)}
    params |= {"list": [jnp.full(2, 4.0), jnp.full(1, 5.0)], "list.0": jnp.full(3, 6.0)}
    save_model(tmp_path, params)
    like = jax.tree.map(jnp.zeros_like, params)
    chex.assert_trees_all_equal(load_model(tmp_path, like), params, strict=True)
    names = set(safetensors.numpy.load_file(tmp_path / "model/model.safetensors"))
    assert names >= {"a%2Eb", "a.b", "a.c%2Fd", "a%2Fc%2Fd", "list.0", "list%2E0"}
    chex.assert_trees_all_equal(load_weights(tmp_path / "model/model.safetensors", like), params)
    same = {"a.b": jnp.zeros(2), "a%2Eb": jnp.ones(2)}
    refused("parameters of different names, has two of one name", save_model, tmp_path / "same", same)


class Network(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32, width=3):
        first = nnx.Linear(width, 2, rngs=rngs, param_dtype=dtype)
        self.layers = nnx.List([first, nnx.Linear(2, 1, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x[..., 0]


def network(**options):
    return made(lambda: Network(nnx.Rngs(0), **options))


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    sizes = (3, 2), (2, 1)
    shapes = {f"layers.{at}.kernel": size for at, size in enumerate(sizes)}
    shapes |= {f"layers.{at}.bias": size[1:] for at, size in enumerate(sizes)}
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def in_safetensors(path, arrays=None):
    safetensors.numpy.save_file(weights() if arrays is None else arrays, path)
    return path


def test_the_weights_of_a_file(tmp_path):
    model = network()
    streams = jax.random.key_data(model.dropout.rngs.key[...])
    assert load_weights(in_safetensors(tmp_path / "model.safetensors"), model) is model
    for name, array in weights().items():
        _, layer, kind = name.split(".")
        np.testing.assert_array_equal(getattr(model.layers[int(layer)], kind)[...], array)
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), streams)


def test_names_and_layouts_of_another_library(tmp_path):
    """PyTorch: `weight` of (outputs, inputs), prefixes, entries that the model has no use for."""
    theirs = {"net.0.weight": weights()["layers.0.kernel"].T.copy(), "net.0.bias": weights()["layers.0.bias"],
              "net.1.weight": weights()["layers.1.kernel"].T.copy(), "net.1.bias": weights()["layers.1.bias"],
              "net.0.num_batches_tracked": np.int64([3])}  # fmt: skip

    def convert(name, array):
        if name.endswith("num_batches_tracked"):
            return None
        name = name.replace("net.", "layers.")
        return (name.replace("weight", "kernel"), array.T) if name.endswith("weight") else (name, array)

    model = load_weights(in_safetensors(tmp_path / "torch.safetensors", theirs), network(), convert)
    np.testing.assert_array_equal(model.layers[0].kernel[...], weights()["layers.0.kernel"])


def test_floating_point_numbers_are_cast(tmp_path):
    half = {name: jnp.asarray(array, jnp.bfloat16) for name, array in weights().items()}
    safetensors.flax.save_file(half, tmp_path / "half.safetensors")
    model = load_weights(tmp_path / "half.safetensors", network())
    assert model.layers[0].kernel[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.layers[0].kernel[...], half["layers.0.kernel"].astype(jnp.float32))
    model = load_weights(in_safetensors(tmp_path / "whole.safetensors"), network(dtype=jnp.bfloat16))
    assert model.layers[0].kernel[...].dtype == jnp.bfloat16


def test_adapters_are_added_after_loading(tmp_path):
    file = in_safetensors(tmp_path / "a.safetensors")
    model = load_weights(file, network())
    add_lora(model, 1, nnx.Rngs(0))
    np.testing.assert_array_equal(model.layers[0].kernel[...], weights()["layers.0.kernel"])
    refused(r"^weights must be loaded before add_lora: the model has adapters", load_weights, file, model)


# An entry that is changed, its array, and the refusal.
BAD = {
    "too few": ("layers.1.bias", None, r"must have layers\.1\.bias, which the model has: con"),
    "too many": ("head", np.ones(1, np.float32), "must not have head, which the model lacks: con"),
    "another shape": ("layers.0.bias", np.ones(5, np.float32), r".* have the shape \(2,\), got \(5,\)"),
    "integers": ("layers.0.bias", np.ones(2, np.int32), ".* must be of float32, got of int32"),
    "NaN": ("layers.0.bias", np.float32([1, np.nan]), ".* must be finite, got NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_leave_the_model_as_it_is(name, tmp_path):
    changed, array, message = BAD[name]
    arrays = {each: kept for each, kept in (weights() | {changed: array}).items() if kept is not None}
    model = network()
    before = flat(nnx.state(model, nnx.Param))
    file = in_safetensors(tmp_path / "bad.safetensors", arrays)
    assert changed in refused(f"^weights {message}", load_weights, file, model)
    np.testing.assert_array_equal(flat(nnx.state(model, nnx.Param)), before)


def test_bad_files(tmp_path):
    (tmp_path / "short.safetensors").write_bytes(b"xx")
    header = json.dumps({"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    (tmp_path / "cut.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    for path, message in (
        ("no.safetensors", r"must be a \.safetensors file: No such file"),
        ("short.safetensors", r"must be a \.safetensors file: "),
        ("cut.safetensors", r"must be a \.safetensors file: "),
        ("nothing", r"weights must be a \.safetensors file, got "),
    ):
        refused(message, load_weights, tmp_path / path, network())
    file = in_safetensors(tmp_path / "a.safetensors")
    for convert, message in (
        (3, r"convert must be a function, convert\(name, array\) -> \(name, array\) or None, got 3"),
        (lambda name, array: array, "convert must return .* or None, returned ndarray for "),
        (lambda name, array: ("w", array), "convert must return each name once, returned w twice"),
    ):
        refused(message, load_weights, file, network(), convert)
    refused(r"model must be .* or a pytree of arrays, got the class Network", load_weights, file, Network)
