"""Equations of a program whose parameter's gradient is made of few numbers: factors, or rows of a table."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Outer(NamedTuple):
    """Factors of the gradients of a matrix, `sum_t left_t (x) right_t` for each head.

    Attributes:
      left: (heads, positions, inputs).
      right: (heads, positions, outputs): cotangents.
    """

    left: jax.Array
    right: jax.Array


class Picked(NamedTuple):
    """Factors of the gradient of a table: `right_t` is added to row `rows_t`, if that is not -1.

    Attributes:
      rows: (positions,) int32, -1 or a row of the table.
      right: (positions, columns): cotangents.
    """

    rows: jax.Array
    right: jax.Array


# Members of an equation: `read(values)`, of its arguments what its factors are made of; `sizes`: heads,
# positions, inputs (of a lookup the rows of its table), outputs; `factors(read, cotangent)`;
# `laid_out(gradient)`, in the shape of the argument that is the parameter.


def undone(array, back) -> jax.Array:
    """Return what changes of shape were applied to, by their inverses `back`."""
    for undo in back:
        array = undo(array)
    return array


@dataclass(frozen=True, eq=False)
class Product:
    """`dot_general`: (heads, positions, inputs) times (heads, inputs, outputs), however they are laid out."""

    eqn: Any
    parameter: int

    def read(self, values) -> jax.Array:
        return values[1 - self.parameter]

    def _axes(self, which: int) -> tuple[list[int], list[int], list[int]]:
        """Axes of an argument: heads, contracted, the rest."""
        inputs, heads = (list(axes[which]) for axes in self.eqn.params["dimension_numbers"])
        rest = set(range(self.eqn.invars[which].aval.ndim)) - {*heads, *inputs}
        return heads, inputs, sorted(rest)

    def _sizes(self, which: int) -> list[int]:
        shape = self.eqn.invars[which].aval.shape
        return [math.prod(shape[axis] for axis in axes) for axes in self._axes(which)]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, inputs, positions = self._sizes(1 - self.parameter)
        return heads, positions, inputs, self._sizes(self.parameter)[2]

    def factors(self, other, cotangent) -> Outer:
        heads, positions, inputs, outputs = self.sizes
        batch, contracted, rest = self._axes(1 - self.parameter)
        left = other.transpose(batch + rest + contracted).reshape(heads, positions, inputs)
        if self.parameter == 1:
            return Outer(left, cotangent.reshape(heads, positions, outputs))
        return Outer(left, cotangent.reshape(heads, outputs, positions).swapaxes(1, 2))

    def laid_out(self, gradient) -> jax.Array:
        order = [axis for axes in self._axes(self.parameter) for axis in axes]
        shape = self.eqn.invars[self.parameter].aval.shape
        return gradient.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


@dataclass(frozen=True, eq=False)
class Convolution:
    """`conv_general_dilated`: an outer product of patches and cotangents at every place, by group."""

    eqn: Any

    def read(self, values) -> jax.Array:
        return values[0]

    def _canonical(self, which: int) -> tuple[int, ...]:
        """Return the shape of image, kernel or result: batch (or outputs) and channels before the places."""
        shape = (*self.eqn.invars, *self.eqn.outvars)[which].aval.shape
        return tuple(shape[axis] for axis in self.eqn.params["dimension_numbers"][which])

    @property
    def _groups(self) -> int:
        return self.eqn.params["feature_group_count"]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        outputs, channels, *window = self._canonical(1)
        batch, _, *places = self._canonical(2)
        positions = batch * math.prod(places)
        return self._groups, positions, channels * math.prod(window), outputs // self._groups

    def factors(self, other, cotangent) -> Outer:
        groups, positions, inputs, outputs = self.sizes
        right = self._channels_last(cotangent, 2).reshape(positions, groups, outputs)
        left = self._patches(self._channels_last(other, 0)).reshape(positions, groups, inputs)
        return Outer(left.swapaxes(0, 1), right.swapaxes(0, 1))

    def _channels_last(self, array, which: int):
        batch, channels, *places = self.eqn.params["dimension_numbers"][which]
        return array.transpose(batch, *places, channels)

    def _patches(self, image):
        """Return (batch and places, groups, window, channels of a group), by moving entries only."""
        params = self.eqn.params
        config = [
            (*pad, step - 1) for pad, step in zip(params["padding"], params["lhs_dilation"], strict=True)
        ]
        image = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        window, places, strides = self._canonical(1)[2:], self._canonical(2)[2:], params["window_strides"]
        seen = []
        for offset in np.ndindex(*window):
            begin = [at * step for at, step in zip(offset, params["rhs_dilation"], strict=True)]
            end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, places, strides, strict=True)]
            first, last = (0, *begin, 0), (image.shape[0], *end, image.shape[-1])
            part = lax.slice(image, first, last, (1, *strides, 1))
            seen.append(part.reshape(-1, self._groups, image.shape[-1] // self._groups))
        return jnp.stack(seen, axis=2)

    def laid_out(self, gradient) -> jax.Array:
        outputs, channels, *window = self._canonical(1)
        split = gradient.reshape(self._groups, *window, channels, outputs // self._groups)
        split = jnp.moveaxis(split, (-1, -2), (1, 2)).reshape(outputs, channels, *window)
        return split.transpose(np.argsort(self.eqn.params["dimension_numbers"].rhs_spec))


@dataclass(frozen=True, eq=False)
class Lookup:
    """`gather` or `dynamic_slice` of rows of a table, along its first axis."""

    shape: tuple[int, ...]  # of the table
    offsets: tuple[int, ...]  # axes of the result that are those of a row
    positions: int
    clip: bool  # indices beyond the table are its nearest; else nothing is taken from there

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return 1, self.positions, self.shape[0], math.prod(self.shape[1:])

    def read(self, values) -> jax.Array:
        return values[1]

    def factors(self, other, cotangent) -> Picked:
        index = other.reshape(self.positions)
        # Narrow integers may not hold the number of the last row.
        last = min(self.shape[0] - 1, jnp.iinfo(index.dtype).max)
        rows = jnp.clip(index, 0, last).astype(jnp.int32)
        rows = rows if self.clip else jnp.where((index >= 0) & (index <= last), rows, -1)
        rest = [axis for axis in range(cotangent.ndim) if axis not in self.offsets]
        return Picked(rows, cotangent.transpose(*rest, *self.offsets).reshape(self.positions, -1))

    def laid_out(self, gradient) -> jax.Array:
        return gradient.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Stacked:
    """An equation of a scan over parameters, one a pass: each pass is a head of its own, or several."""

    inner: Any  # `Equation`
    back: tuple[Callable[[Any], Any], ...]
    passes: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, *others = self.inner.sizes
        return self.passes * heads, *others

    def factors(self, other, cotangent) -> Outer:
        each = jax.vmap(self.inner.factors)(other, cotangent)
        return Outer(*(array.reshape(-1, *array.shape[2:]) for array in each))

    def laid_out(self, gradient) -> jax.Array:
        each = gradient.reshape(self.passes, -1, *gradient.shape[1:])
        return jax.vmap(lambda one: undone(self.inner.laid_out(one), self.back))(each)


@dataclass(frozen=True, eq=False)
class Repeated:
    """An equation of a scan with the same parameter in every pass: the passes are positions."""

    inner: Any  # `Equation`
    passes: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, positions, *others = self.inner.sizes
        return heads, self.passes * positions, *others

    def factors(self, other, cotangent) -> Outer | Picked:
        each = jax.vmap(self.inner.factors)(other, cotangent)
        if isinstance(each, Picked):
            return Picked(*(array.reshape(-1, *array.shape[2:]) for array in each))
        # (passes, heads, positions, entries).
        return Outer(*(a.swapaxes(0, 1).reshape(a.shape[1], -1, a.shape[3]) for a in each))

    def laid_out(self, gradient) -> jax.Array:
        return self.inner.laid_out(gradient)


def innermost(equation) -> Any:
    """Return the equation of a single pass."""
    return innermost(equation.inner) if isinstance(equation, Stacked | Repeated) else equation


def num_stacked(equation) -> int:
    """Return the number of scans that the parameter has an axis of."""
    if not isinstance(equation, Stacked | Repeated):
        return 0
    return isinstance(equation, Stacked) + num_stacked(equation.inner)


def is_lookup(equation) -> bool:
    """Return whether it takes rows of a table, in a scan or not."""
    return isinstance(innermost(equation), Lookup)


def num_kept(equation) -> int:
    """Return the number of entries of the factors of one example."""
    heads, positions, inputs, outputs = equation.sizes
    return heads * positions * ((1 if is_lookup(equation) else inputs) + outputs)


Equation = Product | Convolution | Lookup | Stacked | Repeated


def known(eqn, parameter: int) -> Equation | None:
    """Return an equation of a program by the number of the argument that is a parameter; None for others."""
    params, name = eqn.params, eqn.primitive.name
    if name in ("gather", "dynamic_slice"):
        return _lookup(eqn) if parameter == 0 and _is_real(eqn.invars[0], eqn.outvars[0]) else None
    if name not in ("dot_general", "conv_general_dilated") or not _is_real(*eqn.invars, *eqn.outvars):
        return None
    if name == "dot_general":
        return Product(eqn, parameter)
    return Convolution(eqn) if parameter == 1 and params["batch_group_count"] == 1 else None


def _is_real(*vars) -> bool:
    """Return whether all of these are real floating-point numbers."""
    return all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in vars)


def _lookup(eqn) -> Lookup | None:
    params, shape = eqn.params, tuple(eqn.invars[0].aval.shape)
    if tuple(params["slice_sizes"]) != (1, *shape[1:]):
        return None
    if eqn.primitive.name == "dynamic_slice":
        return Lookup(shape, tuple(range(len(shape))), 1, clip=True)
    numbers, mode, modes = params["dimension_numbers"], params["mode"], lax.GatherScatterMode
    # `PROMISE_IN_BOUNDS` has the gradient of `FILL_OR_DROP`: nothing where the promise is broken.
    known_mode = mode in (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS)
    if numbers.operand_batching_dims or tuple(numbers.start_index_map) != (0,) or not known_mode:
        return None
    positions = math.prod(eqn.invars[1].aval.shape[:-1])
    return Lookup(shape, tuple(numbers.offset_dims), positions, mode == modes.CLIP)
