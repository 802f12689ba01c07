"""A loss of one example, with what it reads beside the parameters: frozen weights, and a key.

Both are public, and arguments of the step rather than literals of its program; a run is bound to them.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, linen, nnx

from ..batches.fingerprints import of_arrays
from ..clipping import programs as _programs

_M = TypeVar("_M", bound=nnx.Module)


class WritingLossError(ValueError):
    """A loss wrote to its model."""


class Numbered(NamedTuple):
    """An example, or a batch of them, with its index in the data set: the input of a loss with a key.

    Attributes:
      number: () uint32 of one example, (batch,) of a batch.
    """

    example: Any
    number: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["frozen", "key"], meta_fields=["function"])
@dataclass(frozen=True)
class Loss:
    """`loss(params, example) -> scalar`; its leaves as a pytree are the arrays that it reads beside these.

    Attributes:
      function: `(frozen, key of the step or None, params, example) -> scalar`.
      frozen: dictionary of pytrees of arrays, which are not trained; public.
      key: a `jax.random` key or None; public. With one, examples are `Numbered`, and the loss gets a key
        derived from it, the step and the example's number, independent of the rest of the batch.
    """

    function: Callable[..., jax.Array]
    frozen: dict[str, Any] = field(default_factory=dict)
    key: Any = None

    def at(self, step) -> Callable[..., jax.Array]:
        """Return `(params, example) -> scalar` of one step."""
        key = None if self.key is None else jax.random.fold_in(self.key, step)
        return jax.tree_util.Partial(self.function, self.frozen, key)

    def __call__(self, params, example) -> jax.Array:
        return self.at(0)(params, example)

    def wrapped(self, wrapper: Callable[..., Callable[..., jax.Array]]) -> "Loss":
        """Return the loss `wrapper(this loss)`, which reads the same arrays."""

        def function(frozen, key, params, example):
            return wrapper(functools.partial(self.function, frozen, key))(params, example)

        return Loss(function, self.frozen, self.key)

    def digests(self) -> dict[str, str]:
        """Return digests, by name, of the frozen arrays and the key, which a run is bound to."""
        if "key" in self.frozen:
            raise ValueError("frozen must not have a part called key: that is the name of the loss key")
        named = self.frozen if self.key is None else self.frozen | {"key": self.key}
        return {name: of_arrays(tree) for name, tree in named.items() if jax.tree.leaves(tree)}


def as_loss(loss, key=None) -> Loss:
    """Return a `Loss` of a function of (params, example), or of (params, example, key) with a `key`.

    Arrays bound by `jax.tree_util.Partial(function, ...)` are frozen; those that a plain function closes over
    are literals of the program, slow to compile where they are large.
    """
    if isinstance(loss, Loss):
        return loss
    frozen = {"arguments": loss} if isinstance(loss, jax.tree_util.Partial) else {}

    def function(frozen, key, params, example):
        call = frozen.get("arguments", loss)
        if key is None:
            return call(params, example)
        return call(params, example.example, jax.random.fold_in(key, example.number))

    return Loss(function, frozen, key)


_RAW = "outside of variables: make it an nnx.Param to train it, or an nnx.Variable (or give wrt=) to keep it"


def nnx_loss(model: nnx.Module, loss: Callable[..., jax.Array], wrt=None, key=None):
    """Return `(Loss, params)` of an nnx model and `loss(model, example) -> scalar`.

    With a `key`, a public `jax.random` key, the loss is of (model, example, key), and the streams of the
    model (of `nnx.Dropout`, say) are seeded for every step and example. Variables that `wrt` (`nnx.Param` by
    default) does not select are frozen. ValueError for batch norm with the statistics of a batch, and when
    traced for a loss that writes to the model.
    """
    refuse_batch_statistics(model)
    wrt, is_default = nnx.Param if wrt is None else wrt, wrt is None
    rescaled = any(isinstance(node, nnx.SpectralNorm | nnx.WeightNorm) for _, node in nnx.iter_graph(model))
    try:
        graph, params, streams, others = nnx.split(model, wrt, nnx.RngState, ...)
    except (TypeError, ValueError):
        raise ValueError(f"wrt must be an nnx filter of some variables, got {wrt!r}") from None
    raw = [
        _name(path)
        for path, leaf in nnx.to_flat_state(others)
        if not isinstance(leaf, nnx.Variable) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    hint = f", and has the array {', '.join(raw[:3])} {_RAW}" if raw else ""
    if not jax.tree.leaves(params):
        raise ValueError(f"wrt must select parameters of the model, {wrt!r} selects none{hint}")
    if raw and is_default:
        warnings.warn(f"model is trained in part{hint}", stacklevel=2)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"wrt must select floating-point arrays, selects {_name(path)} of {jnp.result_type(leaf)}"
            )

    def traced(params, streams, others, args):
        """Return the loss, and the state of the model after it."""
        merged = nnx.merge(graph, params, streams, others, copy=True)
        return loss(merged, *args), nnx.state(merged)

    def function(frozen, key, params, example):
        streams, args = frozen["streams"], (example,)
        if key is not None:
            of_example = jax.random.fold_in(key, example.number)
            for_loss, for_streams = jax.random.split(of_example)
            args, streams = (example.example, for_loss), _seeded(streams, for_streams)

        given = params, streams, frozen["variables"]
        value, after = traced(*given, args)
        _refuse_writes(traced, given, args, after, seeded=key is not None, rescaled=rescaled)
        return value

    return Loss(function, {"variables": others, "streams": streams}, key), params


def with_params(model: _M, params) -> _M:
    """Return a copy of a model with other variables.

    Args:
      model: an `nnx.Module`; unchanged.
      params: variables to set: `Result.params`, or the argument of `evaluate`.
    """
    copy = nnx.clone(model)
    nnx.update(copy, params)
    return copy


_BATCH_STATISTICS = (
    "{} must not contain batch norm that takes the statistics of a batch: every gradient would depend on all "
    "examples, so clipping would not bound what one can change; use group or layer norm, or public, "
    "frozen statistics (use_running_average=True)"
)


def refuse_batch_statistics(model: nnx.Module) -> None:
    """ValueError for batch norm that does not use stored statistics (`model.eval()`), which are frozen."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.BatchNorm) and module.use_running_average is not True:
            raise ValueError(_BATCH_STATISTICS.format("model"))


@contextlib.contextmanager
def no_batch_statistics():
    """WritingLossError when a linen module is traced that has batch norm with statistics of a batch."""

    def intercept(call, args, kwargs, context):
        module = context.module
        if isinstance(module, linen.BatchNorm) and context.method_name == "__call__":
            given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
            if (module.use_running_average if given is None else given) is not True:
                raise WritingLossError(_BATCH_STATISTICS.format("loss"))
        return call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield


def error_of_loss(error: Exception, *, has_key: bool) -> str:
    """Return one line on what a loss raised: its own error, how it was called, and what helps."""
    first = next(iter(str(error).splitlines()), "").rstrip(".")
    called = "(model or params, one example without a batch axis" + (", key)" if has_key else ")")
    line = f"{type(error).__name__}: {first}, raised by loss{called}"
    words = "deterministic", "rngs", "PRNGKey"  # of nnx, linen and Haiku
    if isinstance(error, errors.InvalidRngError) or any(word in first for word in words):
        line += (
            ": model.eval() or deterministic=True drops nothing; for dropout give TrainOptions(loss_key=0), "
            "which gives the loss a key, rngs={'dropout': key} in linen, and seeds the rngs= of nnx layers"
        )
    elif "with_sharding_constraint" in first:
        line += (
            ": leave it out, as each device computes examples of its own; parameters of linen that are boxed "
            "have it, flax.linen.unbox(params) have not"
        )
    return line


def _seeded(streams, key):
    """Return the streams of a model, each seeded from a key of its own."""

    def begin(number, variable):
        value = variable[...]
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros_like(value))
        own = jax.random.fold_in(key, number)
        return variable.replace(own if value.shape == () else jax.random.split(own, value.shape))

    flat = nnx.to_flat_state(streams)
    return nnx.from_flat_state([(path, begin(i, variable)) for i, (path, variable) in enumerate(flat)])


def _refuse_writes(traced, given, args, after, *, seeded: bool, rescaled: bool) -> None:
    """Raise ValueError where the loss changed a variable of the model.

    The same traced value means no change. Transformations like `nnx.remat` return every variable as another
    value; there the traced program shows whether it is the argument.
    """
    before = {path: variable for state in given for path, variable in nnx.to_flat_state(state)}
    suspects = []
    for path, variable in nnx.to_flat_state(after):
        if isinstance(variable, nnx.Intermediate) or (seeded and isinstance(variable, nnx.RngState)):
            continue  # not read; or seeded for every example
        if path not in before:
            raise WritingLossError(
                f"loss must not add variables to the model, added {_name(path)}: it is not kept"
            )
        if _value(variable) is not _value(before[path]):
            suspects.append(path)
    if not suspects:
        return
    shapes = _programs.shapes((given, args))

    def changed(given, args):
        values = {path: _value(variable) for path, variable in nnx.to_flat_state(traced(*given, args)[1])}
        found = {path: _value(variable) for state in given for path, variable in nnx.to_flat_state(state)}
        return [values[path] for path in suspects], [found[path] for path in suspects]

    for path, same in zip(suspects, _programs.pairs(changed, *shapes), strict=True):
        if not same:
            hint = ""
            if isinstance(before[path], nnx.RngState):
                hint = (
                    "; give loss_key to draw from it, model.eval() or deterministic=True to draw nothing, "
                    "and nnx.RNN its initial_carry= where it draws that"
                )
            elif rescaled:
                hint = "; nnx.SpectralNorm and nnx.WeightNorm write to a copy, nnx.clone(model) in the loss"
            raise WritingLossError(
                f"loss must not write to the model, wrote to {_name(path)}: one example would be seen by "
                f"others, or the value lost{hint}"
            )


def _value(variable):
    if not isinstance(variable, nnx.Variable):
        return variable
    method = getattr(type(variable), "get_raw_value", None)
    # An attribute in Flax 0.12.0, a method since.
    return variable.raw_value if method is None else method(variable)


def _name(path) -> str:
    return ".".join(str(getattr(part, "key", getattr(part, "name", part))) for part in path)


@dataclass(frozen=True)
class NumberedRows:
    """A data set whose examples come with their index."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices, size: int) -> Numbered:
        """Return the rows at `indices` and their numbers, padded with zeros."""
        numbers = np.zeros(size, np.uint32)
        numbers[: len(indices)] = indices
        return Numbered(self.rows.take(indices, size), numbers)

    def fingerprint(self) -> str:
        """Return a digest of the rows."""
        return self.rows.fingerprint()


def numbered(loss: Loss, rows):
    """Return the rows of a data set, with their numbers where the loss has a key."""
    return rows if loss.key is None else NumberedRows(rows)


_IMPLEMENTATION = "threefry2x32"


def public_key(value):
    """Return a threefry key of one or of an integer, whatever JAX's default is; None of None.

    Other keys draw for a whole batch from its first example's (`train.clipping.rows_apart`): ValueError.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
        return jax.random.key(value, impl=_IMPLEMENTATION)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.ndim == 0:
        if value.dtype != jax.random.key(0, impl=_IMPLEMENTATION).dtype:
            raise ValueError(f"loss_key must be a key of {_IMPLEMENTATION}, got one of {value.dtype}")
        return value
    was = repr(value) if isinstance(value, int) else f"{type(value).__name__} of shape {np.shape(value)}"
    raise ValueError(f"loss_key must be an integer from 0 to 2^32 - 1 or one jax.random.key, got {was}")
