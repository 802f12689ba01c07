"""What both ways of clipping share: their options, the pieces of a batch, and checks of a loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxacct.common import validate as _validate

from ..models.loss import Numbered, WritingLossError, error_of_loss, no_batch_statistics
from ..procedures import by_device as _by_device
from ..procedures.stored import stored
from . import rows_apart as _rows_apart
from .grid import MAX_BATCH, Grid, GridSum
from .joined import Layout
from .programs import Traced, flow, shapes


class ClippedSum(NamedTuple):
    """The sum of clipped gradients, and what must not leave the machine without noise.

    Only `total`, with noise added, is covered by a guarantee; the rest is private.

    Attributes:
      total: sum over the batch of gradients in whole grid units.
      norms: (batch,) float32: gradient norms before clipping, 0 where padded, inf where not finite.
      losses: (batch,) float32: losses, 0 where padded.
      clipped_fraction: share of the real examples that count whose gradient was scaled down.
      records: (batch, ...): of the examples after this step, where some were admitted.
      also: pytree like the parameters, float64: the sum of something else of each gradient.
    """

    total: GridSum
    norms: jax.Array
    losses: jax.Array
    clipped_fraction: jax.Array
    records: Any = ()
    also: Any = ()


class RowSum(NamedTuple):
    """The sum of clipped gradients of a device's rows.

    Attributes:
      values: in grid units, float64: the `join` of a layout.
      layout: which small arrays are side by side.
      added: numbers of the parameters whose sums are those of all devices, and of which each has its part.
    """

    values: list
    layout: Layout
    added: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How gradients are clipped and added up: keyword arguments of every function here and in `ghost`.

    Attributes:
      grid: with the clip norm C; `train.optimizers.privatize` says which serves its noise.
      microbatch_size: examples that are in memory at a time, by default as many as processors are fast on;
        rounded down to a power of two. Compilers compute rows that are left over by vector instructions
        otherwise, and an example's gradient then depends on its row (proofs/adjacency.md, section 2).
      normalize: scale every gradient to norm C x norm / (norm + 0.01) rather than only long ones
        (automatic clipping, Bu et al. 2023, with its stability constant 0.01).
      skip_padding: do no work for microbatches after the last real example. The run time then reveals
        their number, which is private. Not with a mesh.
      mesh: devices that compute equally many of the rows each, with all parameters, `microbatch_size` rows at
        a time. Required where any of the arrays is on several devices.
      specs: how each parameter is sharded over the mesh, and its total then; by default all are whole.

    Raises:
      ValueError: something else for a grid, a microbatch size below 1, or `skip_padding` with a mesh.
    """

    grid: Grid
    microbatch_size: int | None = None
    normalize: bool = False
    skip_padding: bool = False
    mesh: jax.sharding.Mesh | None = None
    specs: tuple[jax.sharding.PartitionSpec, ...] = ()

    def __post_init__(self):
        _validate.instance("grid", self.grid, Grid, "a train.clipping.grid.Grid")
        if self.microbatch_size is not None:
            _validate.positive_integer("microbatch_size", self.microbatch_size)
        if self.skip_padding and self.mesh is not None:  # devices wait for each other
            raise ValueError("skip_padding must not be True with mesh: most devices would have nothing to do")

    def micro(self, default: Callable[[], int], rows: int) -> int:
        """Return how many of `rows` rows are in memory at a time."""
        size = min(default() if self.microbatch_size is None else self.microbatch_size, rows)
        return 2 ** (size.bit_length() - 1)

    def summed(self, of_rows: Callable[..., Any], loss, params, batch, mask, records=()) -> ClippedSum:
        """Return the sum over a batch, each device of the mesh computing its own rows.

        `of_rows` is `((loss, params), Across, batch, mask, records) -> (RowSum, (norms, whether each is long,
        losses, records, ...))` of some rows, the last as in `ClippedSum`; it runs with `jax_enable_x64`.
        """
        _by_device.refuse_several_devices(self.mesh, params=params, batch=batch, mask=mask, records=records)
        mask = jnp.asarray(mask, bool)
        size = mask.shape[0]
        _by_device.rows_of_each(size, self.mesh)
        if size > MAX_BATCH:
            raise ValueError(f"batch must have at most {MAX_BATCH} rows, got {size}")
        check_rows(batch, size)
        batch, records = jax.tree.map(jnp.asarray, (batch, records))

        def add(total: RowSum, over) -> GridSum:
            if over is None:
                return GridSum.of(total.values, self.grid, layout=total.layout)
            leaves, structure = jax.tree.flatten(total.layout.split(total.values))
            added = [leaf if i in total.added else over.added(i, leaf) for i, leaf in enumerate(leaves)]
            return GridSum.of(jax.tree.unflatten(structure, added), self.grid, over)

        with jax.enable_x64(True):
            over_rows = _by_device.over_rows(
                of_rows,
                add,
                lambda specs: GridSum(specs, PartitionSpec(), self.grid),
                self.mesh,
                self.specs,
                self.grid.device_unit(size),
            )
            total, (norms, long, losses, *others) = over_rows(loss, params, batch, mask, records)
        counted = mask & jnp.isfinite(norms) & jnp.isfinite(losses)
        clipped = jnp.sum(long & counted) / jnp.maximum(1, counted.sum())
        return ClippedSum(total, norms, losses, clipped, *others)


@dataclass(frozen=True)
class Microbatches:
    """A batch of `size` rows in pieces of `micro`, the last padded; perhaps none after the last real row."""

    size: int
    micro: int
    skip_padding: bool

    @property
    def number(self) -> int:
        """Of pieces."""
        return -(-self.size // self.micro)

    def split(self, array):
        """Return (size, ...) to (pieces, micro, ...)."""
        array, pad = jnp.asarray(array), -self.size % self.micro
        array = jnp.concatenate([array, jnp.zeros((pad, *array.shape[1:]), array.dtype)]) if pad else array
        return array.reshape(self.number, self.micro, *array.shape[1:])

    def join(self, array):
        """Return (pieces, micro, ...) to (size, ...)."""
        return array.reshape(self.number * self.micro, *array.shape[2:])[: self.size]

    def accumulate(self, step, carry, inputs, real):
        """Return `jax.lax.scan` over the pieces; `real` (pieces, micro) says which rows are not padding.

        With `skip_padding` those of padding alone are not computed: what they return is zero.
        """
        if not self.skip_padding:
            return jax.lax.scan(step, carry, inputs)
        step, (_, one) = Traced.of(step, carry, jax.tree.map(lambda leaf: leaf[0], inputs))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one)

        def perhaps(carry, both):
            return jax.lax.cond(both[0], step, lambda carry, _: (carry, nothing), carry, both[1])

        return jax.lax.scan(perhaps, carry, (real.any(axis=1), inputs))


def where_row(keep, tree):
    """Return a pytree of arrays (rows, ...) with zeros in the rows that are not kept."""

    def kept(leaf):
        return jnp.where(keep.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(kept, tree)


def stored_rows(kept, arrays, are_sound: Callable[[Any], jax.Array]) -> tuple[jax.Array, Any]:
    """Return `kept`, (rows,) bool, and a pytree of arrays (rows, ...), stored before they are read.

    A row of which `are_sound(arrays)`, (rows,) bool, does not hold is not kept, and zero.
    """

    def mend(state):
        sound = are_sound(state[1])
        return state[0] & sound, where_row(sound, state[1])

    return stored((kept, arrays), lambda state: are_sound(state[1]).all(), mend)


def check_real(name: str, tree) -> None:
    """ValueError for arrays of anything but real floating-point numbers.

    Norms and casts to float64 would drop imaginary parts.
    """
    for leaf in jax.tree.leaves(tree):
        dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} must be arrays of real floating-point numbers, got {dtype}")


def check_rows(batch, size: int) -> None:
    """ValueError for arrays without `size` rows."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] != size:
            raise ValueError(f"batch must have {size} rows like mask, got an array of shape {np.shape(leaf)}")


def check_loss(loss, params, batch, size: int, *, one_at_a_time: bool = False) -> Traced:
    """Refuse a loss of another shape than () for one example, or of other numbers than real ones.

    Returns:
      The loss as it was checked. Its examples are never `alone` unless that is allowed by `one_at_a_time`.

    Raises:
      OneAtATimeError: a loss that must, where it is not allowed.
      ValueError: any other loss that does not return one number for one example, raises, writes to its model,
        takes the statistics of a batch, or may mix examples.
    """
    check_real("params", params)
    check_rows(batch, size)
    try:
        with no_batch_statistics():
            program, shape = Traced.of(loss, params, shapes(batch, 1))
    except WritingLossError as error:
        raise WritingLossError(*error.args) from None
    except Exception as error:  # whatever the caller's function raises; the traceback shows where
        raise ValueError(error_of_loss(error, has_key=isinstance(batch, Numbered))) from error
    if getattr(shape, "shape", None) != ():
        raise ValueError(
            "loss must return one number for one example (a mean over a batch has no per-example gradient), "
            f"returned {getattr(shape, 'shape', type(shape).__name__)}"
        )
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        raise ValueError(f"loss must return a real floating-point number, returned {shape.dtype}")
    check_statistics(program.closed.jaxpr, len(jax.tree.leaves(params)))
    gradient = jax.make_jaxpr(jax.grad(program))(params, shapes(batch, 1))
    return replace(program, alone=_rows_apart.check(gradient.jaxpr, one_at_a_time=one_at_a_time))


# After these a statistic is one of many features.
_MIXING = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
_SUMS = frozenset(("reduce_sum", "psum"))
_ROOTS = frozenset(("rsqrt", "sqrt", "pow"))
_EXAMPLE = frozenset(("example",))


def check_statistics(jaxpr, number: int) -> None:
    """ValueError for a loss, of `number` parameters and one example, that takes statistics of the example.

    Batch norm of Keras, Haiku or Equinox takes the mean and the variance over a leading axis of size 1, which
    are not those of training or evaluation elsewhere. That costs no privacy, and spoils models.

    A variance over a leading axis of size 1 is a root of a value of two sums over that axis, with another
    axis left: a mean over all axes is no batch norm, and a norm is of one sum.
    """
    shapes: list[tuple[int, ...]] = []  # of the operands of sums so far

    def step(eqn, results):
        """Add a sum over a leading axis of size 1, by its number, to what its result is computed of."""
        name, sources = eqn.primitive.name, frozenset().union(*results)
        if name in _MIXING:
            return [each & _EXAMPLE for each in results]
        if name in _SUMS and sources & _EXAMPLE and _is_over_one(eqn):
            shapes.append(tuple(eqn.invars[0].aval.shape))
            return [each | {len(shapes) - 1} for each in results]
        if name in _ROOTS and sources & _EXAMPLE and len(sums := sources - _EXAMPLE) > 1:
            raise ValueError(
                "loss must not divide by the statistics of a batch of one example, takes a mean and a "
                f"variance over the first axis of {shapes[max(sums)]}: batch norm; use group or layer norm, "
                "stored statistics (training=False), or remove the axis where it is no batch"
            )
        return results

    flow(jaxpr, [_EXAMPLE if place >= number else frozenset() for place in range(len(jaxpr.invars))], step)


def _is_over_one(eqn) -> bool:
    """Return whether it sums over a leading axis of size 1 and leaves an axis of more entries."""
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    rest = [size for axis, size in enumerate(shape) if axis not in axes]
    return 0 in axes and shape[0] == 1 and any(size > 1 for size in rest)
