"""Trained parameters in a folder, `save_model` and `load_model`; weights that others wrote: `load_weights`.

The guarantee does not cover the data that the weights of others were trained on, so they must be public.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from jaxacct.common.files import read_json, write_bytes_atomically

from ..arguments import check_callable, check_model
from ..batches.fingerprints import of_arrays

_FILE = "model.safetensors"


def save_model(folder, model) -> None:
    """Write the parameters of a model to `folder`, where `load_model` finds them.

    Args:
      folder: made where it is missing; a `model/` in it is replaced.
      model: an `nnx.Module`, of which its `nnx.Param` are written, or a pytree of parameters.
    """
    params = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    write_model(Path(folder).absolute(), params)


def write_model(folder: Path, params) -> None:
    """Write parameters to `model/model.safetensors`; a `model/` that is there is replaced.

    The same parameters are the same bytes, wherever and whenever they were trained: times would show batch
    sizes.
    """
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf, order="C"), named(plain(params)))
    fresh = folder / ".model"
    fresh.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(fresh / _FILE, lambda file: file.write(safetensors.numpy.save(arrays)))
    shutil.rmtree(folder / "model", ignore_errors=True)
    fresh.rename(folder / "model")


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
    file = Path(run).absolute() / "model" / _FILE
    if not file.is_file():
        raise ValueError(f"run must be the folder of a finished run, {str(run)!r} has no model")
    stored = _read(file)
    params = _trained(Path(run), model, set(stored)) if isinstance(model, nnx.Module) else model
    expected = named(plain(params))
    found, given = _shapes(stored), _shapes(expected)
    if found != given:
        name = min(set(found.items()) ^ set(given.items()), key=str)[0]
        raise ValueError(
            "model must be of the structure that was trained: its "
            f"{name} was {found.get(name)} and is {given.get(name)} in model"
        )
    leaves = [
        jax.device_put(stored[name], getattr(leaf, "sharding", None)) for name, leaf in expected.items()
    ]
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


def _trained(run: Path, model: nnx.Module, names: set[str]):
    """Return the stored variables of a model: all parameters, or the trained ones where others are frozen."""
    params = nnx.state(model, nnx.Param)
    if named(plain(params)).keys() == names:
        return params
    began = read_json(run / "run.json", "run") if (run / "run.json").exists() else {}
    began = began.get("frozen") if isinstance(began, dict) else None
    if not isinstance(began, dict):
        return params  # nothing was frozen: the structure is another one

    def stored(path, _) -> bool:
        return ".".join(map(_part, map(jax.tree_util.DictKey, path))) in names

    _, trained, _, frozen = nnx.split(model, stored, nnx.RngState, ...)
    others = of_arrays(frozen) if jax.tree.leaves(frozen) else None
    if named(plain(trained)).keys() == names and others != began.get("variables"):
        raise ValueError("model must have the frozen variables that the run began with, has others")
    return trained


def plain(params):
    """Return parameters as a pytree without modules; a single array is the entry "params"."""
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {"params": pure} if isinstance(pure, jax.Array | np.ndarray) else pure


def named(tree) -> dict[str, Any]:
    """Return the leaves by name, which is the same for attributes, keys and positions.

    Parts are joined by points; a point in a part is `%2E` and a slash `%2F`, as names may be those of files.

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


def _shapes(leaves: dict[str, Any]) -> dict[str, tuple]:
    """Return (shape, dtype) by name."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}


_NUM_NAMES = 3  # shown in a message


def load_weights(path, model, convert: Callable[[str, np.ndarray], tuple[str, Any] | None] | None = None):
    """Return the model with the weights of a file; they must be public.

        model = load_weights("pretrained.safetensors", model, convert=renamed)

    Names are those of the model's variables, joined by points: `layers.0.kernel`. A point or a slash in the
    name of a variable is `%2E` or `%2F`. Floating-point arrays are cast to the dtype that the model has. Load
    first and call `add_lora` then: the file has no adapters.

    Args:
      path: a `.safetensors` file.
      model: an `nnx.Module` or a pytree of parameters, of any values.
      convert: `(name in the file, array) -> (name in the model, array)`, or None to leave it out; for other
        names and layouts. The kernel of a dense layer of PyTorch, for instance, is transposed.

    Returns:
      `model` itself with the variables set, where it is a module; else a pytree like it.

    Raises:
      ValueError: no such file, names that the file or the model lacks, another shape,
        integers for floating-point numbers, NaN or infinity. Then the model is unchanged.
    """
    check_model(model)
    if convert is not None:
        check_callable("convert", convert, "convert(name, array) -> (name, array) or None")
    found = _converted(_read(Path(path).absolute()), convert)
    state = nnx.state(model, nnx.Not(nnx.RngState)) if isinstance(model, nnx.Module) else model
    expected = named(plain(state))
    required = named(plain(nnx.state(model, nnx.Param))) if isinstance(model, nnx.Module) else expected
    missing = required.keys() - found.keys()
    if any(".lora_" in f".{name}" for name in missing) and isinstance(model, nnx.Module):
        raise ValueError(
            "weights must be loaded before add_lora: the model has adapters, which the file lacks"
        )
    _none("weights must have {}, which the model has", missing)
    _none("weights must not have {}, which the model lacks", found.keys() - expected.keys())
    leaves = [_fitting(name, leaf, found.get(name)) for name, leaf in expected.items()]
    return filled(model, state, leaves)


def _none(problem: str, names) -> None:
    """ValueError where there are any names."""
    if names:
        shown = ", ".join(sorted(names)[:_NUM_NAMES]) + (", ..." if len(names) > _NUM_NAMES else "")
        raise ValueError(problem.format(shown) + ": convert can rename or leave out")


def _read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name."""
    if path.suffix != ".safetensors":
        raise ValueError(f"weights must be a .safetensors file, got {path}")
    try:
        return {name.replace("/", "%2F"): leaf for name, leaf in safetensors.numpy.load_file(path).items()}
    except Exception as error:  # `safetensors` has its own, derived from Exception
        raise ValueError(f"weights {path} must be a .safetensors file: {error}") from error


def _converted(found: dict[str, np.ndarray], convert) -> dict[str, Any]:
    if convert is None:
        return found
    kept: dict[str, Any] = {}
    for name, array in found.items():
        pair = convert(name, array)
        if pair is None:
            continue
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"convert must return (name, array) or None, returned {type(pair).__name__} for {name}"
            )
        if pair[0] in kept:
            raise ValueError(f"convert must return each name once, returned {pair[0]} twice")
        kept[pair[0]] = pair[1]
    return kept


def _fitting(name: str, leaf, array):
    """Return an array of the file, as the model has it; the model's own where the file has none."""
    if array is None:
        return leaf
    array = np.asarray(array)
    if array.shape != leaf.shape:
        raise ValueError(f"weights {name} must have the shape {tuple(leaf.shape)}, got {array.shape}")
    kinds = [jnp.issubdtype(each.dtype, jnp.floating) for each in (array, leaf)]
    if kinds[0] != kinds[1] or not (kinds[0] or array.dtype == leaf.dtype):
        raise ValueError(f"weights {name} must be of {leaf.dtype}, got of {array.dtype}")
    if kinds[0] and not np.isfinite(array.astype(np.float64)).all():
        raise ValueError(f"weights {name} must be finite, got NaN or infinity")
    return jnp.asarray(array, leaf.dtype)
