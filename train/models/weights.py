"""Initial weights from files that others wrote: `load_weights`.

The guarantee does not cover the data that these weights were trained on, so they must be public.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..arguments import check_callable, check_model
from .saving import filled, named, plain

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
      ValueError: no such file, a missing library, names that the file or the model lacks, another shape,
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
        library = importlib.import_module("safetensors.flax")
    except ImportError:
        raise ValueError("weights from .safetensors need `pip install safetensors`") from None
    try:
        found = library.load_file(path).items()
        return {name.replace("/", "%2F"): np.asarray(leaf) for name, leaf in found}
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


__all__ = ["load_weights"]
