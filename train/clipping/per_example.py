"""Per-example clipped gradient sums in microbatches: memory follows the microbatch, not the batch."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate

from ..models.loss import Numbered, WritingLossError, error_of_loss, no_batch_statistics
from ..procedures import by_device as _by_device
from ..procedures.stored import stored
from . import one_example as _one_example
from . import rows_apart as _rows_apart
from .convolutions import in_fast_layout, without_batch_groups
from .grid import MAX_BATCH, Grid, GridSum, RoundedSum
from .groups import Groups

# Scaled to this much less than the clip norm, so that rounding of the norm (float64, one part in 2^53 a
# parameter) does not make the exact check of what is summed refuse an honest gradient.
_SLACK = 2.0**-24
# By default: entries of all gradients in memory at a time, and examples.
_AT_ONCE = {"cpu": (3 * 2**19, 32), "others": (2**27, 2**20)}


class ClippedSum(NamedTuple):
    """The sum of clipped gradients, and what must not leave the machine without noise.

    Only `total`, with noise added, is covered by a guarantee; the rest is private.
    """

    total: GridSum | RoundedSum
    """Sum over the batch of gradients in whole grid units, each of norm at most the clip norm."""
    norms: jax.Array
    """(batch,) float32: gradient norms before clipping, 0 where padded, inf where not finite."""
    losses: jax.Array
    """(batch,) float32: losses, 0 where padded."""
    clipped_fraction: jax.Array
    """Share of the real examples that count whose gradient was scaled down."""
    aux: dict[str, jax.Array]
    """(batch,) float32 each: what the loss returned beside its value, 0 where padded."""
    records: Any = ()
    """(batch, ...): of the examples after this step, where some were admitted."""


def clipped_gradient_sum(
    loss: Callable[..., jax.Array],
    params,
    batch,
    mask,
    *,
    grid: Grid,
    microbatch_size: int | None = None,
    normalize: bool = False,
    skip_padding: bool = False,
    has_aux: bool = False,
    groups: Groups | None = None,
    mesh: jax.sharding.Mesh | None = None,
    specs: tuple[jax.sharding.PartitionSpec, ...] = (),
    equal_rows: bool = False,
    admit: Callable[[Any, jax.Array], tuple[Any, jax.Array]] | None = None,
    records: Any = (),
) -> ClippedSum:
    """Sum over a batch of per-example gradients, each scaled to global norm at most `grid.clip_norm`.

    Each is rounded towards zero onto the grid, where its norm is at most the clip norm by exact arithmetic on
    integers, and the sum is one of integers: replacing one example by padding moves `total` by at most the
    clip norm, exactly, in whatever order it is summed. An example whose loss or gradient is not finite counts
    as zero: it can neither spoil the model nor have an unbounded effect.

    Args:
      loss: `loss(params, example) -> scalar` of one example, without a batch axis.
      params: pytree of floating-point arrays.
      batch: pytree of arrays (batch, ...).
      mask: (batch,) bool; padding contributes exactly zero.
      grid: with the clip norm C; `train.optimizers.privatize` says which serves its noise.
      microbatch_size: examples whose gradients are in memory at a time, at most as many as
        `grid.max_at_once` lets add up in 32 bits; by default `default_microbatch_size`.
      normalize: scale every gradient to norm C x norm / (norm + 0.01) rather than only long ones
        (automatic clipping, Bu et al. 2023, with its stability constant 0.01).
      skip_padding: do no work for microbatches after the last real example. The run time then reveals
        their number, which is private.
      has_aux: the loss returns `(scalar, dictionary of scalars)`.
      groups: of parameters whose gradients are clipped apart (`train.clipping.groups`), all together to
        `grid.clip_norm` at most; `normalize` then is by group, too.
      mesh: devices that compute equally many of the rows each, with all parameters, `microbatch_size` rows at
        a time. Required where any of the arrays is on several devices.
      specs: how each parameter is sharded over the mesh, and its total then; by default all are whole.
      equal_rows: round the microbatch size down to a power of two. Compilers compute rows that are left over
        by vector instructions otherwise, and an example's gradient then depends on its row: for
        add-or-remove-one, where examples change their rows (proofs/adjacency.md, section 2).
      admit: sum over the admitted examples alone: `(records of some rows, (rows,) float64) -> (their records
        after this step, (rows,) bool)`, the second argument being the exact square of each clipped gradient
        in grid units, 0 where it is not finite. It is called for all rows, sampled (`mask`) or not, once
        each. A rejected example contributes exactly zero, and has norm and loss 0 in the result.
      records: pytree of arrays (batch, ...), for `admit`.

    Raises:
      ValueError: bad arguments, or a loss that is not a scalar for one example.
    """
    if not isinstance(grid, Grid):
        raise ValueError(f"grid must be a train.clipping.grid.Grid, got {type(grid).__name__}")
    _by_device.refuse_several_devices(mesh, params=params, batch=batch, mask=mask, records=records)
    mask = jnp.asarray(mask, bool)
    size = mask.shape[0]
    own = _by_device.rows_of_each(size, mesh)
    if microbatch_size is None:
        microbatch_size = default_microbatch_size(params)
    micro = min(_validate.positive_integer("microbatch_size", microbatch_size), own, grid.max_at_once)
    micro = power_of_two(micro) if equal_rows else micro
    if size > MAX_BATCH:
        raise ValueError(f"batch must have at most {MAX_BATCH} rows, got {size}")
    check_rows(batch, size)
    pieces = Microbatches(own, micro, skip_padding and admit is None)

    def of_rows(whole, *given):
        loss, params = whole
        # As it is run.
        alone = check_loss(loss, params, given[0], own, has_aux, one_at_a_time=True)

        def of_each(rows):
            return jax.lax.map(one, rows) if alone else in_fast_layout(jax.vmap(one))(rows)

        def one(example):
            found, gradient = without_batch_groups(jax.value_and_grad(loss, has_aux=has_aux))(params, example)
            value, aux = found if has_aux else (found, {})
            shown = {"": value} | aux
            shown = {name: jnp.float32(each) for name, each in shown.items()}
            return gradient, (jnp.isfinite(value), shown)

        def clipped(rows, real):
            gradients, (finite, shown) = of_each(rows)
            _, counts, norms, long = clip_rows_to_grid(gradients, grid, groups, normalize, real & finite)
            norms, shown = where_row(real, (norms, shown))
            return counts, norms, real & long, shown

        def admitted(admit, rows, sampled, kept):
            counts, norms, long, shown = clipped(rows, jnp.ones_like(sampled))
            kept, let_in = admit(kept, jax.vmap(_square)(counts))
            counted = sampled & let_in
            counts, norms, shown = where_row(counted, (counts, norms, shown))
            return counts, norms, counted & long, shown, kept

        def accumulate(total, inputs):
            rows, real, kept = inputs
            if admit is None:
                counts, norms, long, shown = clipped(rows, real)
            else:
                counts, norms, long, shown, kept = admitted(admit, rows, real, kept)
            # At most `max_at_once` of them, so 32 bits hold their sum.
            part = jax.tree.map(lambda n: n.sum(axis=0, dtype=jnp.int32), counts)
            return total.plus(part), (norms, long, shown, kept)

        inputs = jax.tree.map(pieces.split, given)
        total, found = pieces.accumulate(accumulate, GridSum.zeros(params, grid), inputs, inputs[1])
        return total, jax.tree.map(pieces.join, found)

    over_rows = _by_device.over_rows(
        of_rows, GridSum.across, lambda specs: GridSum(specs, specs, grid), mesh, specs
    )
    total, (norms, long, shown, records) = over_rows(loss, params, batch, mask, records)
    losses = shown.pop("")
    clipped = clipped_share(long, mask, norms, losses)
    return ClippedSum(total, norms, losses, clipped, shown, records)


def clipped_share(long, mask, norms, losses) -> jax.Array:
    """Return the share of `long` among the examples of `mask` with a finite norm and loss, all (batch,)."""
    counted = mask & jnp.isfinite(norms) & jnp.isfinite(losses)
    return jnp.sum(long & counted) / jnp.maximum(1, counted.sum())


def power_of_two(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 2 ** (size.bit_length() - 1)


def default_microbatch_size(params) -> int:
    """As many gradients as processors are fast on, by tests/benchmarks/results/clipping.json; 2^k.

    On CPUs at most 32 examples of a million entries or so, which caches hold; on others memory bounds it.
    """
    entries = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    most, examples = _AT_ONCE["cpu" if jax.default_backend() == "cpu" else "others"]
    return min(examples, 2 ** max(0, math.floor(math.log2(most / max(1, entries)))))


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
        if self.skip_padding:
            return array.reshape(self.number, self.micro, *array.shape[1:])
        # Neighbours go to different microbatches: padding is at the end, and its rows are spread over all.
        return array.reshape(self.micro, self.number, *array.shape[1:]).swapaxes(0, 1)

    def join(self, array):
        """Return (pieces, micro, ...) to (size, ...)."""
        array = array if self.skip_padding else array.swapaxes(0, 1)
        return array.reshape(self.number * self.micro, *array.shape[2:])[: self.size]

    def accumulate(self, step, carry, inputs, real):
        """Return `jax.lax.scan` over the pieces; `real` (pieces, micro) says which rows are not padding."""
        if self.skip_padding:
            return _scan_until_last(step, carry, inputs, real.any(axis=1))
        return jax.lax.scan(step, carry, inputs)


def _scan_until_last(step, carry, inputs, is_needed):
    """Return `jax.lax.scan` that stops after the last input that is needed; later outputs are zero."""
    number = jnp.max(jnp.where(is_needed, jnp.arange(1, len(is_needed) + 1), 0))
    _, one = jax.eval_shape(step, carry, jax.tree.map(lambda leaf: leaf[0], inputs))
    outputs = jax.tree.map(lambda leaf: jnp.zeros((len(is_needed), *leaf.shape), leaf.dtype), one)

    def body(i, both):
        carry, outputs = both
        carry, found = step(carry, jax.tree.map(lambda leaf: leaf[i], inputs))
        return carry, jax.tree.map(lambda all, leaf: all.at[i].set(leaf), outputs, found)

    return jax.lax.fori_loop(0, number, body, (carry, outputs))


def _square(counts) -> jax.Array:
    """Return the sum of the squares of integers, float64: exact up to 2^53, and above where it is larger."""
    with jax.enable_x64(True):
        squares = jax.tree.map(lambda n: jnp.sum(jnp.square(n.astype(jnp.float64))), counts)
        return sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float64))


def where_row(keep, tree):
    """Return a pytree of arrays (rows, ...) with zeros in the rows that are not kept."""

    def kept(leaf):
        return jnp.where(keep.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(kept, tree)


def clip_rows_to_grid(
    gradients, grid: Grid, groups: Groups | None = None, normalize: bool = False, counted=True
):
    """Return (kept, gradients in grid units, norms before, whether a group was clipped), of (rows, ...).

    Whole units, exactly of norm at most 2^bits, and of each group at most its own. A gradient is not kept,
    and zero, where it is not `counted` ((rows,) bool) or not finite, or would be too long after scaling.

    The integers are stored, and then checked: a compiler may compute a gradient once for the check and once
    for the sum, and round it otherwise where a product and a sum become one operation. Of a difference that
    cancels, what is summed would then be thousands of times as long as what was checked.
    """
    scale = functools.partial(_scaled_to_grid, grid=grid, groups=groups, normalize=normalize)
    counts, finite, norms, long = jax.vmap(scale)(gradients)
    leaves, structure = jax.tree.flatten(counts)
    groups = Groups.one(len(leaves)) if groups is None else groups

    def are_short(state):
        short = jnp.ones_like(finite)
        with jax.enable_x64(True):
            # Squares of integers whose sum is at most 2^46 add up without rounding, so this check is exact.
            # It fails closed: a group that fails takes the others along.
            for part, limit in zip(groups.split(state[1]), groups.limits(grid), strict=True):
                short &= sum(jax.vmap(_square)(n) for n in part) <= float(limit)
        return short

    def mend(state):
        short = are_short(state)
        return state[0] & short, where_row(short, state[1])

    kept = finite & counted
    kept, leaves = stored((kept, where_row(kept, leaves)), lambda state: are_short(state).all(), mend)
    return kept, jax.tree.unflatten(structure, leaves), norms, long


def _scaled_to_grid(gradient, grid: Grid, groups: Groups | None, normalize: bool):
    """Return (one gradient in grid units, int32, unchecked; if it is finite; its norm; if it is long)."""
    leaves, structure = jax.tree.flatten(gradient)
    check_real("gradient", leaves)
    groups = Groups.one(len(leaves)) if groups is None else groups
    parts, limits = groups.split(leaves), groups.limits(grid)
    with jax.enable_x64(True):
        norms = [global_norm(part) for part in parts]
        norm = norms[0] if len(norms) == 1 else jnp.sqrt(sum(jnp.square(each) for each in norms))
        long, factors = jnp.zeros((), bool), []
        for each, limit in zip(norms, limits, strict=True):
            max_norm = math.sqrt(limit) * grid.unit
            if normalize:
                scale = max_norm / (each + 0.01)
            else:
                scale = jnp.minimum(1.0, max_norm / jnp.maximum(each, 1e-300))
            factors.append(scale * ((1 - _SLACK) / grid.unit))
            long |= ~(each <= max_norm)
        scaled = [
            jnp.trunc(g.astype(jnp.float64) * factors[at]) for g, at in zip(leaves, groups.of, strict=True)
        ]
        # What is too large for 32 bits stays too long.
        counts = [jnp.clip(jnp.nan_to_num(n), -(2.0**30), 2.0**30).astype(jnp.int32) for n in scaled]
        counts, finite = jax.tree.unflatten(structure, counts), jnp.isfinite(norm)
        return counts, finite, jnp.where(finite, norm, jnp.inf).astype(jnp.float32), long


def global_norm(tree) -> jax.Array:
    """Euclidean norm of all leaves together, float64: squares of floats neither over- nor underflow there."""
    with jax.enable_x64(True):
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float64))) for leaf in jax.tree.leaves(tree)))


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


def check_loss(loss, params, batch, size: int, has_aux: bool = False, *, one_at_a_time: bool = False) -> bool:
    """Refuse a loss of another shape than () for one example, or of other numbers than real ones.

    Returns:
      Whether examples must be computed one at a time: False unless that is allowed by `one_at_a_time`.

    Raises:
      OneAtATimeError: a loss that must, where it is not allowed.
      ValueError: any other loss that does not return one number for one example, raises, writes to its model,
        takes the statistics of a batch, or may mix examples.
    """
    check_real("params", params)
    check_rows(batch, size)

    def of_one(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a)[1:], jnp.result_type(a)), tree)

    try:
        with no_batch_statistics():
            program, shape = jax.make_jaxpr(loss, return_shape=True)(params, of_one(batch))
    except WritingLossError as error:
        raise WritingLossError(*error.args) from None
    except Exception as error:  # whatever the caller's function raises; the traceback shows where
        raise ValueError(error_of_loss(error, has_key=isinstance(batch, Numbered))) from error
    if has_aux:
        two = isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], dict)
        if not two or not all(
            isinstance(name, str) and name and getattr(number, "shape", None) == ()
            for name, number in shape[1].items()
        ):
            raise ValueError("loss must return (number, dictionary of numbers by name) with has_aux")
        shape = shape[0]
    if getattr(shape, "shape", None) != ():
        raise ValueError(
            "loss must return one number for one example (a mean over a batch has no per-example gradient), "
            f"returned {getattr(shape, 'shape', type(shape).__name__)}"
        )
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        raise ValueError(f"loss must return a real floating-point number, returned {shape.dtype}")
    _one_example.check(program.jaxpr, len(jax.tree.leaves(params)))
    gradient = jax.make_jaxpr(jax.grad(loss, has_aux=has_aux))(params, of_one(batch))
    return _rows_apart.check(gradient.jaxpr, one_at_a_time=one_at_a_time)
