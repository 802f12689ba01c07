"""Trained parameters in a folder: `save_model` and `load_model`."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jaxacct.common.files import read_json, write_atomically

from ..run import hosts
from .loss import digest


def save_model(folder, model) -> None:
    """Write the parameters of a model to `folder`, where `load_model` finds them.

    Args:
      folder: made where it is missing; a `model/` in it is replaced.
      model: an `nnx.Module`, of which its `nnx.Param` are written, or a pytree of parameters.
    """
    params = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    write_model(Path(folder).absolute(), params)


def write_model(folder: Path, params) -> None:
    """Write parameters to `model/`, without the times, the path and the devices that Orbax adds.

    The same parameters are then the same bytes, wherever they were trained, and times would show batch sizes.
    """
    model = folder / "model"
    # One file a parameter: Orbax's default, OCDBT, stores when each version was written.
    alone = dict(multiprocessing_options=hosts.orbax_options())
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, **alone)
    with _without_warnings(), ocp.Checkpointer(handler, **alone) as checkpointer:
        # Of arrays on devices Orbax keeps which device had which part, a file each.
        arrays = jax.tree.map(np.asarray, _stored(params))
        checkpointer.save(model, args=ocp.args.PyTreeSave(arrays), force=True)
    (model / "commit_success.txt").unlink(missing_ok=True)
    about = model / "_CHECKPOINT_METADATA"
    if about.exists():
        kept = {name: value for name, value in read_json(about, "model").items() if "timestamp" not in name}
        write_atomically(about, json.dumps(kept))


@contextlib.contextmanager
def _without_warnings():
    """Silence Orbax, which warns where there is no OCDBT to merge."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_model(run, model):
    """Return the trained model of a finished run, or of `save_model`.

    Of a fine-tuned model only the trained variables are stored. They are put into `model`, whose other
    variables must be those that the run began with.

    Args:
      run: folder of the run; only what the guarantee covers, or what is public, is read.
      model: an `nnx.Module` or a pytree of parameters of the same shapes and dtypes, of any values.

    Returns:
      `model` itself with the parameters set, where it is a module; else a pytree like it.

    Raises:
      ValueError: no such folder, parameters of another structure, shape or dtype, or a fine-tuned run that
        began with other frozen variables.
    """
    folder = Path(run).absolute() / "model"
    if not folder.is_dir():
        raise ValueError(f"run must be the folder of a finished run, {str(run)!r} has no model")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = _shapes(checkpointer.metadata(folder).item_metadata.tree)
            params = _trained(Path(run), model, set(found)) if isinstance(model, nnx.Module) else model
            pure = plain(params)
            expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, pure)
            given = _shapes(expected)
            if found != given:
                name = min(set(found.items()) ^ set(given.items()), key=str)[0]
                raise ValueError(f"its {name} was {found.get(name)} and is {given.get(name)} in model")
            stored = named(checkpointer.restore(folder, _stored(expected)))
            leaves = [stored[name] for name in given]
    except _OtherWeightsError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model must be of the structure that was trained: {error}") from None
    return filled(model, params, leaves)


def filled(model, params, leaves: list[Any]):
    """Return a module with other leaves of its variables `params`, itself, or a pytree of these leaves."""
    pure = plain(params)
    loaded = jax.tree.unflatten(jax.tree.structure(pure), leaves)
    if isinstance(model, nnx.Module):
        nnx.replace_by_pure_dict(params, loaded)
        nnx.update(model, params)
        return model
    return loaded["params"] if isinstance(model, jax.Array | np.ndarray) else loaded


class _OtherWeightsError(ValueError):
    """The model has other frozen variables than the run."""


def _trained(run: Path, model: nnx.Module, names: set[str]):
    """Return the stored variables of a model: all parameters, or the trained ones where others are frozen."""
    params = nnx.state(model, nnx.Param)
    if set(_shapes(plain(params))) == names:
        return params
    began = read_json(run / "run.json", "run") if (run / "run.json").exists() else {}
    began = began.get("frozen") if isinstance(began, dict) else None
    if not isinstance(began, dict):
        return params  # nothing was frozen: the structure is another one

    def stored(path, _) -> bool:
        return ".".join(map(_part, map(jax.tree_util.DictKey, path))) in names

    _, trained, _, frozen = nnx.split(model, stored, nnx.RngState, ...)
    others = digest(frozen) if jax.tree.leaves(frozen) else None
    if set(_shapes(plain(trained))) == names and others != began.get("variables"):
        raise _OtherWeightsError("model must have the frozen variables that the run began with, has others")
    return trained


def plain(params):
    """Return parameters as a pytree without modules; a single array is the entry "params"."""
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {"params": pure} if isinstance(pure, jax.Array | np.ndarray) else pure


def named(tree) -> dict[str, Any]:
    """Return the leaves by name, which is the same for attributes, keys and positions.

    Parts are joined by points; a point in a part is `%2E` and a slash `%2F`, as names are those of files.

    Raises:
      ValueError: for two leaves of one name.
    """
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    found = {".".join(_part(part) for part in path): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        raise ValueError("model must have parameters of different names, has two of one name")
    return found


def _part(part) -> str:
    text = jax.tree_util.keystr((part,), simple=True)
    return text.replace(".", "%2E").replace("/", "%2F")


def _stored(params) -> dict[str, Any]:
    """Return parameters as Orbax stores them: dictionaries by the parts of their names."""
    nested: dict[str, Any] = {}
    for name, leaf in named(plain(params)).items():
        *parts, last = name.split(".")
        place = nested
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = leaf
    return nested


def _shapes(tree) -> dict[str, tuple]:
    """Return (shape, dtype) by name."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in named(tree).items()}
