"""Checks of the arguments of `train.fit`, before anything is computed; messages name the argument."""

import inspect
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx


def check_model(model) -> None:
    """ValueError for what is neither an `nnx.Module` nor a pytree of real floating-point arrays."""
    allowed = "model must be an nnx.Module or a pytree of arrays"
    if isinstance(model, nnx.Module):
        return
    if inspect.isclass(model):
        hint = (
            f"give an instance, {model.__name__}(..., rngs=nnx.Rngs(0))"
            if issubclass(model, nnx.Module)
            else ""
        )
        raise ValueError(f"{allowed}, got the class {model.__name__}" + (hint and f": {hint}"))
    if isinstance(model, linen.Module):
        raise ValueError(
            f"{allowed}, got a linen module: give its parameters, model.init(key, x), and a loss that calls "
            "model.apply"
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
            raise ValueError(f"{allowed}, got {_shown(leaf)}" + (f" at {name}" if name else ""))


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
    allowed = "data must be arrays with a row for each example, have rows by index or be a .parquet file"
    path = isinstance(data, str | os.PathLike)
    if path and os.fspath(data).endswith(".parquet"):
        return
    if data is None or inspect.isclass(data) or path or isinstance(data, bytes):
        raise ValueError(f"{allowed}, got {_shown(data)}")
    if hasattr(data, "__next__") or (callable(data) and not hasattr(data, "__getitem__")):
        raise ValueError(f"{allowed}, got a {type(data).__name__}: batches are drawn at random")


def _shown(value: Any) -> str:
    """Return a value in a few words."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"the {'class' if inspect.isclass(value) else 'function'} {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
