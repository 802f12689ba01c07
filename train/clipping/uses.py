"""Taps: the one equation of a loss's program that uses a parameter.

The gradient of a matrix W in `y = x W` is the outer product of x and the cotangent of y. A *tap* is such an
equation: x is read from it, and the cotangent is the gradient with respect to a zero that is added to y. That
is the gradient of W only if nothing else uses W. A parameter has a tap where its only use, after changes of
shape or dtype, is one equation of a known kind; others are differentiated as they are.
"""

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import programs as _programs

# Primitives that are replaced by the program that they call.
_CALLS = frozenset(("jit", "pjit", "closed_call"))


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


# Members of a known equation: `parameter` and `other`, the numbers of the arguments that are the parameter
# and the one that is read; `sizes`: heads, positions, inputs, outputs of an `Outer`, or positions, rows,
# columns of a `Picked`; `factors(other, cotangent)`; `laid_out(gradient)`, in the shape of the argument.


@dataclass(frozen=True)
class Product:
    """`dot_general`: (heads, positions, inputs) times (heads, inputs, outputs), however they are laid out."""

    parameter: int
    shapes: tuple[tuple[int, ...], ...]  # of both arguments
    contracted: tuple[tuple[int, ...], ...]
    batched: tuple[tuple[int, ...], ...]

    @property
    def other(self) -> int:
        return 1 - self.parameter

    def _axes(self, which: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Axes of an argument: heads, contracted, the rest."""
        heads, inputs = self.batched[which], self.contracted[which]
        rest = set(range(len(self.shapes[which]))) - set(heads) - set(inputs)
        return tuple(heads), tuple(inputs), tuple(sorted(rest))

    def _sizes(self, which: int, axes) -> int:
        return math.prod(self.shapes[which][axis] for axis in axes)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, inputs, positions = self._axes(self.other)
        outputs = self._axes(self.parameter)[2]
        counted = [self._sizes(self.other, axes) for axes in (heads, positions, inputs)]
        return counted[0], counted[1], counted[2], self._sizes(self.parameter, outputs)

    def factors(self, other, cotangent) -> Outer:
        heads, positions, inputs, outputs = self.sizes
        batch, contracted, rest = self._axes(self.other)
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
    other: int = 0

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
    """`gather` of whole rows of a table, as `jnp.take(table, rows, axis=0)`."""

    rows: int
    columns: int
    positions: int
    clip: bool  # rows beyond the table are its last; else nothing is taken from there
    parameter: int = 0
    other: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.positions, self.rows, self.columns

    def factors(self, other, cotangent) -> Picked:
        rows = other.reshape(self.positions)
        inside = (rows >= 0) & (rows < self.rows)
        rows = jnp.clip(rows, 0, self.rows - 1).astype(jnp.int32)
        rows = rows if self.clip else jnp.where(inside, rows, -1)
        return Picked(rows, cotangent.reshape(self.positions, self.columns))

    def laid_out(self, gradient) -> jax.Array:
        return gradient


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


def _lookup(eqn, parameter: int) -> Lookup | None:
    table, rows, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    whole_rows = (
        parameter == 0
        and _is_real(eqn.invars[0], eqn.outvars[0])
        and table.ndim == 2
        and numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == (out.ndim - 1,)
        and tuple(eqn.params["slice_sizes"]) == (1, table.shape[1])
        and jnp.issubdtype(rows.dtype, jnp.signedinteger)
    )
    if not whole_rows or mode not in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP):
        return None
    clip = mode == lax.GatherScatterMode.CLIP
    return Lookup(table.shape[0], table.shape[1], math.prod(rows.shape[:-1]), clip)


_KNOWN: dict[str, Callable[[Any, int], Any]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _lookup,
}


def _back(eqn) -> Callable[[Any], Any] | None:
    """Return the inverse of an equation that changes only shape, order or dtype; None for any other."""
    before, after, name = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.primitive.name
    if name == "transpose":
        return lambda array: array.transpose(np.argsort(eqn.params["permutation"]))
    if (name == "reshape" and eqn.params["dimensions"] is None) or name in ("squeeze", "copy", "copy_p"):
        return lambda array: array.reshape(before.shape)
    if name == "convert_element_type" and all(
        jnp.issubdtype(kind.dtype, jnp.floating) for kind in (before, after)
    ):
        return lambda array: array
    return None


Equation = Product | Convolution | Lookup


class Tap(NamedTuple):
    """The equation that uses a parameter: its number in the program, and that of the parameter."""

    leaf: int
    place: int
    equation: Equation
    back: tuple[Callable[[Any], Any], ...]
    """Inverses of the changes of shape before it, the last first."""

    def gradient(self, array) -> jax.Array:
        """Return a gradient as `equation` has it, in the shape of the parameter."""
        array = self.equation.laid_out(array)
        for undo in self.back:
            array = undo(array)
        return array


@dataclass(frozen=True)
class Program:
    """A loss of one example as equations, with a result of this `structure`."""

    closed: Any  # the traced program of parameters and example; calls inlined
    number: int  # of leaves of the parameters
    taps: tuple[Tap, ...]  # at most one a leaf
    structure: Any

    @property
    def computed(self) -> int:
        """Number of entries computed from one example."""
        jaxpr = self.closed.jaxpr
        of_example = _reached(jaxpr, self.number)
        outs = (var for eqn in jaxpr.eqns for var in eqn.outvars if var in of_example)
        return sum(math.prod(var.aval.shape) for var in outs)

    def tapped(self, params, example, added):
        """Return the loss's result and the other argument of each tap's equation.

        `params` and `example` are lists of leaves; `added` has an array a tap, added to the result of its
        equation.
        """
        more = dict(zip((tap.place for tap in self.taps), added, strict=True))
        beside = {}

        def run(place, eqn, values):
            found = _programs.bind(eqn, values)
            if place not in more:
                return found
            tap = next(tap for tap in self.taps if tap.place == place)
            beside[place] = values[tap.equation.other]
            return [found[0] + more[place]]

        jaxpr = self.closed.jaxpr
        found = _programs.evaluate(jaxpr, self.closed.consts, [*params, *example], run)
        return jax.tree.unflatten(self.structure, found), [beside[tap.place] for tap in self.taps]

    def added(self) -> list[jax.Array]:
        """Return zeros for `added`."""
        outs = (self.closed.jaxpr.eqns[tap.place].outvars[0].aval for tap in self.taps)
        return [jnp.zeros(aval.shape, aval.dtype) for aval in outs]


def traced(loss: Callable[..., Any], params, example, is_tapped: Callable[[Equation], bool]) -> Program:
    """Return the program of `loss(params, example)`, pytrees of arrays or shapes, tapped by `is_tapped`."""
    shaped = functools.partial(
        jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))
    )
    given, structure = jax.tree.flatten((shaped(params), shaped(example)))
    outputs = jax.tree.structure(jax.eval_shape(loss, params, example))

    def flat(*leaves):
        closed = jax.make_jaxpr(lambda *args: loss(*jax.tree.unflatten(structure, args)))(*given)
        return _programs.evaluate(closed.jaxpr, closed.consts, leaves, _inlined)

    closed, number = jax.make_jaxpr(flat)(*given), len(jax.tree.leaves(params))
    users, of_example = _users(closed.jaxpr), _reached(closed.jaxpr, number)
    found = (_tap(closed.jaxpr, leaf, users, of_example) for leaf in range(number))
    taps = tuple(tap for tap in found if tap is not None and is_tapped(tap.equation))
    # Two parameters of one equation: it is a function of both.
    times = collections.Counter(tap.place for tap in taps)
    return Program(closed, number, tuple(tap for tap in taps if times[tap.place] == 1), outputs)


def _users(jaxpr):
    """Variable -> the (equation, argument) pairs that read it; (None, None) where it is returned."""
    users = collections.defaultdict(list)
    for place, eqn in enumerate(jaxpr.eqns):
        for position, var in enumerate(eqn.invars):
            if not hasattr(var, "val"):
                users[var].append((place, position))
    for var in jaxpr.outvars:
        if not hasattr(var, "val"):
            users[var].append((None, None))
    return users


def _reached(jaxpr, number: int) -> set:
    """Variables that depend on the example, the arguments after the first `number`."""
    reached = set(jaxpr.invars[number:])
    for eqn in jaxpr.eqns:
        if any(not hasattr(var, "val") and var in reached for var in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def _tap(jaxpr, leaf: int, users, of_example) -> Tap | None:
    var, back = jaxpr.invars[leaf], []
    while True:
        if len(users[var]) != 1:
            return None
        place, position = users[var][0]
        if place is None:  # it is returned
            return None
        eqn = jaxpr.eqns[place]
        undo = _back(eqn) if len(eqn.invars) == 1 else None
        if undo is None:
            break
        back.insert(0, undo)
        var = eqn.outvars[0]
    find = _KNOWN.get(eqn.primitive.name)
    equation = None if find is None else find(eqn, position)
    # A result that is the same for all examples would be stored for each; a lookup has a few integers.
    if equation is None or not (eqn.outvars[0] in of_example or isinstance(equation, Lookup)):
        return None
    return Tap(leaf, place, equation, tuple(back))


def _inlined(place, eqn, values):
    if eqn.primitive.name in _CALLS:
        inner = eqn.params["jaxpr"]
        return _programs.evaluate(inner.jaxpr, inner.consts, values, _inlined)
    return _programs.bind(eqn, values)
