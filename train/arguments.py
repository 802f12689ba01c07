"""Checks of the arguments of `train.fit`, before anything is computed; messages name the argument."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx


def check_model(model) -> None:
    """ValueError for what is neither an `nnx.Module` nor a pytree of real floating-point arrays."""
    allowed = "model must be an nnx.Module or a pytree of arrays"
    if isinstance(model, nnx.Module):
        return
    if inspect.isclass(model):
        made = f": give an instance, {model.__name__}(..., rngs=nnx.Rngs(0))"
        hint = made if issubclass(model, nnx.Module) else ""
        raise ValueError(f"{allowed}, got the class {model.__name__}{hint}")
    if isinstance(model, linen.Module):
        raise ValueError(
            f"{allowed}, got a linen module: give its parameters, model.init(key, x)['params'], and a loss "
            "that calls model.apply({'params': params}, ..)"
        )
    if isinstance(model, nnx.Optimizer):
        raise ValueError(
            f"{allowed}, got an nnx.Optimizer: give the module, and the optax transformation it has"
        )
    leaves = jax.tree.leaves(model)
    if not leaves:
        raise ValueError(f"{allowed}, got {_shown(model)}, which has none")
    for path, leaf in jax.tree.leaves_with_path(model):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            hint = _hint_of_library(model)
            raise ValueError(f"{allowed}, got {_shown(leaf)}" + (f" at {name}" if name else "") + hint)


_HINTS = {  # library -> how its models are given
    "equinox": "params, static = eqx.partition(model, eqx.is_inexact_array), and a loss that calls "
    "eqx.combine(params, static)",
    "haiku": "give transformed.init(key, x), and a loss that calls transformed.apply(params, key, x)",
    "keras": "give [v.value for v in model.trainable_variables], and a loss that calls "
    "model.stateless_call(params, fixed, x)",
    "transformers": "give model.params, and a loss that calls model(.., params=params)",
    "torch": "PyTorch's modules are not of JAX; load_weights loads a .safetensors file into a model that is",
}


def _hint_of_library(model) -> str:
    libraries = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    return next((f": {_HINTS[name]}" for name in libraries if name in _HINTS), "")


def check_trained(model) -> None:
    """ValueError for a pytree of more than parameters, all of which would get gradients and noise."""
    if isinstance(model, nnx.Module):
        return
    if hasattr(model, "params") and hasattr(model, "opt_state"):
        raise ValueError(f"model must be parameters alone, got a {type(model).__name__}: give its .params")
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, nnx.Module))
    module = next((node for node in nodes if isinstance(node, nnx.Module)), None)
    if module is not None:
        raise ValueError(
            f"model must be one nnx.Module, got a {type(model).__name__} that holds {type(module).__name__}: "
            "make its modules attributes of one, or an nnx.List or nnx.Dict of one"
        )
    if isinstance(model, Mapping) and ("batch_stats" in model or ("params" in model and len(model) > 1)):
        others = ", ".join(str(name) for name in model if name != "params")
        raise ValueError(
            f"model must be parameters alone, got the collections {others} as well: give init(..)['params'], "
            "and bind the others to the loss by jax.tree_util.Partial(loss, others)"
        )
    for path, leaf in jax.tree.leaves_with_path(model):
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"model must have floats of 16 bits or more, got {dtype} at {name}: a step would be rounded "
                "away; keep float32 or bfloat16, and cast in the loss"
            )


def check_optimizer(optimizer) -> optax.GradientTransformation:
    """Return the optimizer; ValueError where it is missing or none of optax."""
    if optimizer is None:
        raise ValueError("optimizer must be given")
    if isinstance(optimizer, nnx.Optimizer) or not (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        hint = ""
        if isinstance(optimizer, nnx.Optimizer):
            hint = ": give the transformation that it was made of"
        elif inspect.isfunction(optimizer):
            hint = f": call it, {optimizer.__name__}(learning_rate)"
        raise ValueError(f"optimizer must be an optax transformation, got {type(optimizer).__name__}{hint}")
    return optimizer


def check_callable(name: str, value, called: str) -> None:
    """ValueError for what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, {called}, got {_shown(value)}")


def check_out(out) -> None:
    """ValueError for what is no path, or the path of a file."""
    if out is None:
        return
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise ValueError(f"out must be the path of a folder, got {_shown(out)}")
    path = Path(out)
    for each in (path, *path.parents):
        if each.exists() and not each.is_dir():
            raise ValueError(f"out must be the path of a folder, {each} is a file")


def check_data(data) -> None:
    """ValueError for what has no rows by index."""
    allowed = "data must be arrays with a row for each example, or have rows by index"
    if data is None or inspect.isclass(data) or isinstance(data, str | bytes | os.PathLike):
        raise ValueError(f"{allowed}, got {_shown(data)}")
    kind = type(data).__name__
    hint = _hint_of_data(data)
    if hint is None and (hasattr(data, "__next__") or (callable(data) and not hasattr(data, "__getitem__"))):
        hint = "batches are drawn at random"
    if hint is not None:
        raise ValueError(f"{allowed}, got a {kind}: {hint}")


def _hint_of_data(data) -> str | None:
    """Return what helps with data that have no rows by index; None for others."""
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return "stack its rows, {name: np.stack([row[name] for row in data]) for name in data[0]}"
    if isinstance(data, list) and data and type(data[0]) is tuple:
        return "stack its rows, tuple(np.stack(column) for column in zip(*data))"
    if not jax.tree_util.all_leaves([data]):
        return None  # a pytree
    library = type(data).__module__.partition(".")[0]
    if hasattr(data, "columns") and library != "datasets":  # of pandas, Polars, PyArrow
        columns = "column_names" if hasattr(data, "column_names") else "columns"
        return f"give its columns by name, {{name: data[name].to_numpy() for name in data.{columns}}}"
    if isinstance(data, Mapping) and hasattr(data, "files"):
        return "an archive of np.load; give its arrays, {name: data[name] for name in data}"
    if isinstance(data, Mapping):
        return f"give one of its parts, data[{next(iter(data), 'train')!r}], or a dictionary of arrays"
    has_rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not hasattr(data, "__iter__") or has_rows or hasattr(data, "__array__"):
        return None
    given = {
        "datasets": "a data set that is loaded without streaming=True",
        "grain": "the MapDataset before to_iter_dataset(), or the data_source",
    }.get(library, "its data set, .dataset" if hasattr(data, "dataset") else "something with rows by index")
    return (
        f"batches are drawn at random, so give {given}; a plan of --scheme fixed-order takes a loader as "
        "batches="
    )


def _shown(value: Any) -> str:
    """Return a value in a few words."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"the {'class' if inspect.isclass(value) else 'function'} {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
