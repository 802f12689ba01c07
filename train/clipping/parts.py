"""What the gradients of examples are made of, by parameter: gradients, factors, or rows of a table.

For `train.clipping.ghost`: the norms of the gradients of examples and their weighted sums, in float64 (sums
in float32 where that costs little), without the gradients (proofs/released_numbers.md, section 5).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import equations as _equations
from . import uses as _uses
from .sums import check_real

ROWS_IN_FLOAT32 = 64  # rows that are added up there before their sums are, in float64
_LEAST = 2.0**-126  # smaller floats are zero on some processors and not on others
_MAX_LOOKED_UP = 2**13
# A gradient written down costs the time of so many products an entry.
_WRITTEN = 24
_SMALL = 2**13  # entries of a gradient that stays in a processor's cache
_MANY = 2**20  # entries of a large sum
_AT_ONCE = 2**18  # entries of a gradient whose squares are added up together


def is_written_down(equation) -> bool:
    """Return whether a gradient costs less than inner products of positions, or these are too inexact."""
    if _equations.is_lookup(equation):
        return equation.sizes[1] > _MAX_LOOKED_UP  # every two of them are compared
    heads, positions, inputs, outputs = equation.sizes
    products, entries = positions**2 * (inputs + outputs), inputs * outputs
    if positions > 1 and heads * entries <= _SMALL:
        # Products of positions and their sum are in float64, which takes twice the time of float32.
        products = 2 * products + positions * entries
    return products > _WRITTEN * entries or heads * positions**2 + inputs + outputs > 2**26


class Sizes(NamedTuple):
    """What a part's rounding errors depend on; of one example.

    Attributes:
      terms: added up for one entry of its gradient.
      squares: added up for its norm.
      rank_one: whether each gradient is one outer product, in which nothing cancels; then float32 may do.
      is_whole: whether gradients are written down.
    """

    terms: int
    squares: int
    rank_one: bool = False
    is_whole: bool = False


def sizes_of(tap: _uses.Tap | None, leaf) -> Sizes:
    """Return the sizes of the part of a parameter, an array or a shape."""
    if tap is None or is_written_down(tap.equation):
        return Sizes(1, np.size(leaf), is_whole=True)
    heads, positions, inputs, outputs = tap.equation.sizes
    if _equations.is_lookup(tap.equation):
        return Sizes(positions, 2 * positions * outputs)
    squares = heads * (positions * (inputs + outputs) + positions**2)
    return Sizes(positions, squares, rank_one=heads == positions == 1)


def _square(array) -> jax.Array:
    """Return (rows,) sums of squares, of large arrays a part at a time: a part is copied in float64."""
    size = math.prod(array.shape[1:])
    least = -(-size // _AT_ONCE)
    number = next((n for n in range(least, 8 * least) if size % n == 0), 1)
    parts = array.reshape(len(array), number, -1)

    def of_part(at):
        return jnp.sum(jnp.square(parts[:, at].astype(jnp.float64)), axis=1)

    return of_part(0) if number == 1 else jnp.sum(lax.map(of_part, jnp.arange(number)), axis=0)


def _squares(array) -> jax.Array:
    """Return (rows, heads) sums of squares of (rows, heads, positions, entries)."""
    return jnp.sum(jnp.square(array), (2, 3))


def _products(subscripts: str, *arrays) -> jax.Array:
    """Return sums of products in float64, for any `jax.default_matmul_precision`."""
    return jnp.einsum(subscripts, *arrays, precision=lax.Precision.HIGHEST)


def _weighted(weights, array):
    return weights.reshape(-1, *(1,) * (array.ndim - 1)) * array.astype(jnp.float64)


def _added_in_float32(add, *arrays) -> jax.Array:
    """Return `add` of all rows: `ROWS_IN_FLOAT32` at a time in float32, and these sums' sum in float64."""
    narrow = [array.astype(jnp.float32) for array in arrays]
    some = (slice(at, at + ROWS_IN_FLOAT32) for at in range(0, len(arrays[0]), ROWS_IN_FLOAT32))
    sums = [add(*(array[rows] for array in narrow)).astype(jnp.float64) for rows in some]
    return functools.reduce(jnp.add, sums)


@dataclass(frozen=True)
class Whole:
    """Gradients written down: (rows, ...). Parts are float32, examples along the first axis."""

    gradient: jax.Array

    def norms(self) -> tuple[jax.Array, jax.Array]:
        """Return (rows,) float64 squares: of the gradient's norm, and of its norm without cancellation."""
        square = _square(self.gradient)
        return square, square

    def total(self, weights, in_float32: bool = False) -> jax.Array:
        """Return `sum_i weights_i gradient_i`, float64; from float32 sums only where nothing cancels."""
        scaled = _weighted(weights, self.gradient)
        if in_float32:  # the outer product of 1 and itself
            return _added_in_float32(functools.partial(jnp.sum, axis=0), scaled)
        return jnp.sum(scaled, axis=0)


@dataclass(frozen=True)
class Factors:
    """Outer products: left (rows, heads, positions, inputs), right (rows, heads, positions, outputs)."""

    left: jax.Array
    right: jax.Array
    tap: _uses.Tap

    @property
    def passes(self) -> int:
        """Of a scan: the first axis of the parameter; 0 where it has none."""
        equation = self.tap.equation
        if not isinstance(equation, _equations.Stacked) or self.tap.back:
            return 0
        return equation.passes if self.left.shape[1] == equation.passes else 0

    def of_pass(self, number) -> "Factors":
        """Return what the gradient of one pass is made of, by its () integer."""
        left, right = (array[:, number][:, None] for array in (self.left, self.right))
        equation: Any = self.tap.equation
        return Factors(left, right, self.tap._replace(equation=equation.inner, back=equation.back))

    def norms(self):
        left, right = self.left.astype(jnp.float64), self.right.astype(jnp.float64)
        if left.shape[2] == 1:
            most = jnp.sum(_squares(left) * _squares(right), axis=1)
            return most, most
        one, two = (_products("bhtk,bhsk->bhts", array, array) for array in (left, right))
        # Squares of what each position has stand on the diagonals.
        most = jnp.einsum("bhtt->bh", one) * jnp.einsum("bhtt->bh", two)
        return jnp.sum(one * two, (1, 2, 3)), jnp.sum(most, axis=1)

    def total(self, weights, in_float32=False):
        left, right = self.left.astype(jnp.float64), _weighted(weights, self.right)
        if in_float32 and self.left.shape[1:3] == (1, 1):
            # Left factors of length 1, so that right ones are bounded by the scaled gradients.
            length = jnp.sqrt(_squares(left))
            left = left.reshape(len(left), -1) * (1 / jnp.where(length > 0, length, 1.0))
            right = right.reshape(len(left), -1) * length
            return self.tap.gradient(
                _added_in_float32(functools.partial(_products, "tk,tn->kn"), left, right)[None]
            )
        if left.shape[1] == 1:
            left, right = (array.reshape(-1, array.shape[-1]) for array in (left, right))
            return self.tap.gradient(_products("tk,tn->kn", left, right)[None])
        return self.tap.gradient(_products("bhtk,bhtn->hkn", left, right))


@dataclass(frozen=True)
class Table:
    """Rows of a table, -1 for none: rows (rows, positions), right (rows, positions, columns)."""

    rows: jax.Array
    right: jax.Array
    tap: _uses.Tap

    def norms(self):
        # What is added to the same row of the table is added up where that row is met first.
        first = lax.argmax(self.rows[:, :, None] == self.rows[:, None, :], 2, jnp.int32)
        right = jnp.where((self.rows >= 0)[..., None], self.right.astype(jnp.float64), 0.0)
        added = jax.vmap(lambda at, values: jnp.zeros_like(values).at[at].add(values))(first, right)
        return _square(added), self.rows.shape[1] * _square(right)

    def total(self, weights, in_float32=False):
        *_, height, columns = self.tap.equation.sizes
        rows = jnp.where(self.rows >= 0, self.rows, height)
        empty = jnp.zeros((height, columns), jnp.float64)
        return self.tap.gradient(empty.at[rows].add(_weighted(weights, self.right), mode="drop"))


Part = Whole | Factors | Table


def onto(total, part: Part, weights, in_float32: bool, add=None, by_pass: bool = True):
    """Return `total`, or None, and the weighted sum of a part.

    A large sum is in memory beside `total` for one parameter at a time; for one pass, where the parameter has
    an axis of passes of a scan.

    Args:
      total: of earlier rows.
      part: of one parameter.
      weights: (rows,) float64, 0 or more.
      in_float32: as of `total` of the part.
      add: what a device keeps of a sum over its rows, if not all: called with a sum, or with that of one pass
        and 1, the number of axes that are missing there. It may wait for other devices.
      by_pass: whether `add` can be given passes.
    """
    is_large = total is not None and total.size > _MANY
    if isinstance(part, Factors) and part.passes and (by_pass if add else is_large):

        def of_pass(number):
            found = part.of_pass(number).total(weights)
            return add(found, 1) if add else found

        def one(number, total):
            old = lax.dynamic_index_in_dim(total, number, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, old + of_pass(number), number, 0)

        if total is None:
            return lax.map(of_pass, jnp.arange(part.passes))
        return lax.fori_loop(0, part.passes, one, total)

    def added(total):
        found = part.total(weights, in_float32)
        found = add(found) if add else found
        return found if total is None else total + found

    if add or not is_large:
        return added(total)
    # A branch that is always taken: else a compiler makes the sums of all parameters before it adds one up.
    return lax.cond(~(weights[0] < 0), added, lambda total: total, total)


def part_of(tap: _uses.Tap | None, arrays) -> Part:
    """Return the part of a parameter: no number is changed, they only move.

    `arrays` is its gradient, or what its tap reads and the cotangent of what it gives; examples along the
    first axis.
    """
    if tap is None or is_written_down(tap.equation):
        return Whole(arrays)
    with jax.enable_x64(True):
        # Before they are laid out: in patches of an image each entry stands as often as the window is large.
        wide = [a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arrays]
        factors = jax.vmap(tap.equation.factors)(*wide)
    if isinstance(factors, _equations.Picked):
        return Table(factors.rows, factors.right, tap)
    return Factors(factors.left, factors.right, tap)


def plain(array):
    """Float32 that is the same to every processor: nothing subnormal."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array  # rows of a table
    check_real("a part of a gradient", array)
    array = array.astype(jnp.float32)
    return jnp.where(jnp.abs(array) < _LEAST, 0.0, array)
