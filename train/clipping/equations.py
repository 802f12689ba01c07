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
    """Factors of the gradients of a matrix, `sum_t left_t (x) right_t` for each head."""

    left: jax.Array
    """(heads, positions, inputs)."""
    right: jax.Array
    """(heads, positions, outputs): cotangents."""


class Picked(NamedTuple):
    """Factors of the gradient of a table: `right_t` is added to row `rows_t`, if that is not -1."""

    rows: jax.Array
    """(positions,) int32, -1 or a row of the table."""
    right: jax.Array
    """(positions, columns): cotangents."""


# Members of an equation: `parameter`, the number of the argument that is the parameter; `read(values)`,
# of its arguments what its factors are made of; `sizes`: heads, positions, inputs, outputs of an `Outer`, or
# positions, rows, columns of a `Picked`; `factors(read, cotangent)`; `laid_out(gradient)`, in the shape of
# the argument.


def undone(array, back) -> jax.Array:
    """Return what changes of shape were applied to, by their inverses `back`."""
    for undo in back:
        array = undo(array)
    return array


@dataclass(frozen=True)
class Product:
    """`dot_general`: (heads, positions, inputs) times (heads, inputs, outputs), however they are laid out."""

    parameter: int
    shapes: tuple[tuple[int, ...], ...]  # of both arguments
    contracted: tuple[tuple[int, ...], ...]
    batched: tuple[tuple[int, ...], ...]

    def read(self, values) -> jax.Array:
        return values[1 - self.parameter]

    def _axes(self, which: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Axes of an argument: heads, contracted, the rest."""
        heads, inputs = self.batched[which], self.contracted[which]
        rest = set(range(len(self.shapes[which]))) - set(heads) - set(inputs)
        return tuple(heads), tuple(inputs), tuple(sorted(rest))

    def _sizes(self, which: int, axes) -> int:
        return math.prod(self.shapes[which][axis] for axis in axes)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, inputs, positions = self._axes(1 - self.parameter)
        outputs = self._axes(self.parameter)[2]
        counted = [self._sizes(1 - self.parameter, axes) for axes in (heads, positions, inputs)]
        return counted[0], counted[1], counted[2], self._sizes(self.parameter, outputs)

    def factors(self, other, cotangent) -> Outer:
        heads, positions, inputs, outputs = self.sizes
        batch, contracted, rest = self._axes(1 - self.parameter)
        left = other.transpose(batch + rest + contracted).reshape(heads, positions, inputs)
        if self.parameter == 1:
            return Outer(left, cotangent.reshape(heads, positions, outputs))
        return Outer(left, cotangent.reshape(heads, outputs, positions).swapaxes(1, 2))

    def laid_out(self, gradient) -> jax.Array:
        order = sum(self._axes(self.parameter), ())
        shape = self.shapes[self.parameter]
        return gradient.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


@dataclass(frozen=True)
class Convolution:
    """`conv_general_dilated`: an outer product of patches and cotangents at every place, by group."""

    shapes: tuple[tuple[int, ...], ...]  # of image, kernel, result
    specs: tuple[tuple[int, ...], ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    image_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    groups: int
    parameter: int = 1

    def read(self, values) -> jax.Array:
        return values[0]

    def _canonical(self, which: int) -> tuple[int, ...]:
        """Return a shape, its batch (or outputs) and channels before its places."""
        return tuple(self.shapes[which][axis] for axis in self.specs[which])

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        outputs, channels, *window = self._canonical(1)
        batch, _, *places = self._canonical(2)
        return self.groups, batch * math.prod(places), channels * math.prod(window), outputs // self.groups

    def factors(self, other, cotangent) -> Outer:
        groups, positions, inputs, outputs = self.sizes
        right = self._channels_last(cotangent, 2).reshape(positions, groups, outputs)
        left = self._patches(self._channels_last(other, 0)).reshape(positions, groups, inputs)
        return Outer(left.swapaxes(0, 1), right.swapaxes(0, 1))

    def _channels_last(self, array, which: int):
        batch, channels, *places = self.specs[which]
        return array.transpose(batch, *places, channels)

    def _patches(self, image):
        """Return (batch and places, groups, window, channels of a group), by moving entries only."""
        config = [(*pad, step - 1) for pad, step in zip(self.padding, self.image_dilation, strict=True)]
        image = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        window, places = self._canonical(1)[2:], self._canonical(2)[2:]
        seen = []
        for offset in np.ndindex(*window):
            begin = [at * step for at, step in zip(offset, self.kernel_dilation, strict=True)]
            end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, places, self.strides, strict=True)]
            first, last = (0, *begin, 0), (image.shape[0], *end, image.shape[-1])
            part = lax.slice(image, first, last, (1, *self.strides, 1))
            seen.append(part.reshape(-1, self.groups, image.shape[-1] // self.groups))
        return jnp.stack(seen, axis=2)

    def laid_out(self, gradient) -> jax.Array:
        outputs, channels, *window = self._canonical(1)
        split = gradient.reshape(self.groups, *window, channels, outputs // self.groups)
        split = jnp.moveaxis(split, (-1, -2), (1, 2)).reshape(outputs, channels, *window)
        return split.transpose(np.argsort(self.specs[1]))


@dataclass(frozen=True)
class Lookup:
    """`gather` or `dynamic_slice` of rows of a table, along its first axis."""

    shape: tuple[int, ...]  # of the table
    offsets: tuple[int, ...]  # axes of the result that are those of a row
    positions: int
    clip: bool  # indices beyond the table are its nearest; else nothing is taken from there
    parameter: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.positions, self.shape[0], math.prod(self.shape[1:])

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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Repeated:
    """An equation of a scan with the same parameter in every pass: the passes are positions."""

    inner: Any  # `Equation`
    passes: int

    @property
    def sizes(self):
        """As of `inner`, with the positions of all passes."""
        if is_lookup(self.inner):
            positions, *others = self.inner.sizes
            return self.passes * positions, *others
        heads, positions, *others = self.inner.sizes
        return heads, self.passes * positions, *others

    def factors(self, other, cotangent) -> Outer | Picked:
        each = jax.vmap(self.inner.factors)(other, cotangent)
        if isinstance(each, Picked):
            return Picked(*(array.reshape(-1, *array.shape[2:]) for array in each))
        return Outer(*(_together(array) for array in each))

    def laid_out(self, gradient) -> jax.Array:
        return self.inner.laid_out(gradient)


def _together(array) -> jax.Array:
    """Return (passes, heads, positions, entries) as (heads, passes * positions, entries)."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1, array.shape[3])


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
    if is_lookup(equation):
        positions, _, columns = equation.sizes
        return positions * (1 + columns)
    heads, positions, inputs, outputs = equation.sizes
    return heads * positions * (inputs + outputs)


def _is_real(*vars) -> bool:
    """Return whether all of these are real floating-point numbers."""
    return all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in vars)


def _product(eqn, parameter: int) -> Product | None:
    if not _is_real(*eqn.invars, *eqn.outvars):
        return None
    contracted, batched = eqn.params["dimension_numbers"]
    shapes = tuple(tuple(var.aval.shape) for var in eqn.invars)
    return Product(parameter, shapes, tuple(map(tuple, contracted)), tuple(map(tuple, batched)))


def _convolution(eqn, parameter: int) -> Convolution | None:
    p = eqn.params
    if parameter != 1 or p["batch_group_count"] != 1 or not _is_real(*eqn.invars, *eqn.outvars):
        return None
    numbers = p["dimension_numbers"]
    return Convolution(
        tuple(tuple(var.aval.shape) for var in (*eqn.invars, eqn.outvars[0])),
        (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)),
        tuple(p["window_strides"]),
        tuple(map(tuple, p["padding"])),
        tuple(p["lhs_dilation"]),
        tuple(p["rhs_dilation"]),
        p["feature_group_count"],
    )


def _gather(eqn, parameter: int) -> Lookup | None:
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    # `PROMISE_IN_BOUNDS` has the gradient of `FILL_OR_DROP`: nothing where the promise is broken.
    modes = lax.GatherScatterMode
    known = mode in (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS)
    if numbers.operand_batching_dims or tuple(numbers.start_index_map) != (0,) or not known:
        return None
    positions = math.prod(eqn.invars[1].aval.shape[:-1])
    return _lookup(eqn, parameter, tuple(numbers.offset_dims), positions, mode == modes.CLIP)


def _dynamic_slice(eqn, parameter: int) -> Lookup | None:
    return _lookup(eqn, parameter, tuple(range(eqn.invars[0].aval.ndim)), 1, clip=True)


def _lookup(eqn, parameter: int, offsets, positions: int, clip: bool) -> Lookup | None:
    shape = tuple(eqn.invars[0].aval.shape)
    of_rows = tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
    if parameter != 0 or not of_rows or not _is_real(eqn.invars[0], eqn.outvars[0]):
        return None
    return Lookup(shape, offsets, positions, clip)


KNOWN: dict[str, Callable[[Any, int], Any]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
}


Equation = Product | Convolution | Lookup | Stacked | Repeated
