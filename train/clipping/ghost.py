"""Clipped gradient sums without the gradients of examples: `clipping="ghost"`.

The gradient of a dense layer is the outer product of its input and the cotangent of its output. Its norm
follows from these two, and the weighted sum over a batch is one matrix product of them, without the gradient
of any example (Goodfellow 2015, "Efficient per-example gradient computations"; book-keeping, arXiv
2210.00038). In one backward pass the cotangents are stored, weighted and multiplied in float64 (in float32
where that costs little: small batches, one position), and the total of the batch is rounded onto the grid
once. The clip norm is reduced by a bound on the rounding (proofs/released_numbers.md, section 5).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..procedures import by_device as _by_device
from . import equations as _equations
from . import uses as _uses
from .grid import Grid, all_of
from .joined import Layout
from .parts import ROWS_IN_FLOAT32, Sizes, is_written_down, onto, part_of, plain, sizes_of
from .programs import Traced, in_fast_layout, without_batch_groups
from .rows_apart import OneAtATimeError
from .sums import ClippedSum, Clipping, Microbatches, RowSum, check_loss, stored_rows

# Norms are taken for sqrt(n^2 + (_SHARE m)^2), m the norm that nothing cancels in: no weight is so large that
# rounding of what cancels could matter.
_SHARE = 2.0**-12
_ROUNDING, _IN_FLOAT32 = 2.0**-53, 2.0**-24
# What float32 sums may cost of the clip norm, where nothing cancels; else they are of float64, in which a
# batch of 1,024 takes a third longer.
_MAX_SPENT = 0.01
# By default, at a time: entries of what the loss computes, of what makes up gradients, and examples.
_AT_ONCE = {"cpu": (2**23, 3 * 2**19, 512), "others": (2**30, 2**27, 2**20)}


BACKENDS = "cpu", "gpu"  # whose float64 is IEEE's
PER_EXAMPLE, GHOST, AUTO = "per_example", "ghost", "auto"
MIN_ENTRIES = 1024
"""Parameters below which gradients of examples cost little beside the rest of a step."""
MIN_SCALE = 0.95
"""Share of the clip norm that must be left: a smaller one is like a larger noise multiplier."""


class Choice(NamedTuple):
    """What clips, and why."""

    clipping: str
    reason: str

    def __str__(self) -> str:
        """Return both as one text, for messages and results."""
        return f"{self.clipping} ({self.reason})"


class TooCoarseError(ValueError):
    """Of the clip norm too little would be left."""


def budget(grid: Grid, parameters: int, batch: int, depth: int, alone: int = 0, roundings: int = 0) -> float:
    """Return the norm of gradients, in grid units, at which neighbouring totals differ by at most 2^bits.

    The rest of the clip norm is for rounding: of the total onto the grid, sqrt(parameters), of the sums of
    devices before that, and of two neighbouring sums.

    Args:
      grid: with the clip norm.
      parameters: entries of a gradient.
      batch: rows of a batch.
      depth: maximum number of terms and partial sums of an entry.
      alone: the same of entries that are added up in float32; 0 for none.
      roundings: to `Grid.device_unit` of sums of devices before they are added up; 0 without a mesh.

    Raises:
      ValueError: less than half of the clip norm would be left, or the clip norm is beyond 1e+-100.
    """
    if not 1e-100 <= grid.clip_norm <= 1e100:
        raise TooCoarseError(
            f"clip_norm must be 1e-100 to 1e100 with clipping 'ghost', got {grid.clip_norm:g}"
        )
    whole, rounding = 2.0**grid.bits, math.sqrt(parameters) * (1 + roundings * grid.device_unit(batch))
    errors = 2 * batch * _gamma(depth + 4) / _SHARE + _spent_in_float32(batch, alone)  # of a target of 1
    target = (whole - rounding) / (1 + errors) * (1 - 2.0**-40)
    if not target >= whole / 2:
        raise TooCoarseError(
            f"clipping must be 'per_example' here: of a clip norm of {whole:g} grid units rounding "
            f"{parameters} parameters and sums of {batch} examples leave 'ghost' less than half"
        )
    return target


def _gamma(terms: int, rounding: float = _ROUNDING) -> float:
    """Bound the rounding error of a sum of products, relative to the sum of absolute values."""
    return terms * rounding / (1 - terms * rounding) if terms * rounding < 0.5 else math.inf


def _spent_in_float32(batch: int, alone: int) -> float:
    """Bound the rounding errors of two neighbouring sums of outer products, for gradients scaled to 1."""
    return 2 * batch * _gamma(alone + 8, _IN_FLOAT32) if alone else 0.0


def ghost_gradient_sum(loss: Callable[..., jax.Array], params, batch, mask, **options) -> ClippedSum:
    """Return `train.clipping.per_example.clipped_gradient_sum` at nearly the cost of the gradient of a batch.

    Gradients are scaled to a little less than the clip norm C (`budget`: C (1 - sqrt(d) 2^-bits) and then
    some): the sum of the batch is rounded onto the grid as a whole. Replacing one example by padding, or
    moving examples to other rows, moves `total` by at most the clip norm all the same. An example whose loss,
    or anything that its gradient is made of, is not finite counts as zero. Parameters and activations of 64
    bits count with 32.

    Dense layers, embeddings and convolutions that each have their parameter for themselves are fast, also in
    `jax.lax.scan` and `jax.checkpoint` (`nnx.scan`, `nnx.remat`, recurrent layers); others (biases, scales,
    parameters in several places) have each example's gradient written down, and are right all the same.

    Arguments are those of `clipped_gradient_sum`; by default the activations of as many examples as a
    processor is fast on are in memory at a time. Without a mesh `loss` may be what `with_choice` checked.

    Raises:
      ValueError: bad arguments, a loss that is not a scalar for one example, too coarse a grid.
    """
    clipping = Clipping(**options)
    if jax.default_backend() not in BACKENDS:
        raise ValueError(f"clipping must be 'per_example' on {jax.default_backend()}: float64 is not IEEE's")
    of_rows = functools.partial(
        _of_rows, clipping=clipping, size=np.shape(mask)[0], x64=jax.config.read("jax_enable_x64")
    )
    return clipping.summed(of_rows, loss, params, batch, mask)


def _of_rows(whole, over, batch, mask, records, *, clipping: Clipping, size: int, x64: bool):
    """Return (`RowSum`, (norms, long, losses, records)) of one device's rows; `over` as in `over_rows`.

    `whole` is (loss, params), `size` the number of rows of all devices, and `x64` the caller's flag, for the
    loss; here it is on.
    """
    grid, (loss, params) = clipping.grid, whole
    with jax.enable_x64(x64):
        # As it is run.
        of_whole = jax.eval_shape(_by_device.whole, params)
        found = _prepared(clipping, loss, of_whole, batch, mask.shape[0], size)
    program, pieces, sizes, target, alone = found
    layout = Layout.of(of_whole, [leaf for leaf, each in enumerate(sizes) if not each.is_whole])
    shards = jax.tree.leaves(params, is_leaf=_by_device.is_shard)
    cut = frozenset(i for i, leaf in enumerate(shards) if _by_device.is_shard(leaf)) - {*layout.small}
    leaves, numbers = program.kept(shards), layout.listed(None, list(range(len(shards))))
    taps = layout.listed(None, [program.taps.get(leaf) for leaf in range(len(leaves))])

    def found_in(rows):
        with jax.enable_x64(x64):
            each = jax.vmap(lambda example: _found(program, leaves, jax.tree.leaves(example)))
            return in_fast_layout(each)(rows)

    upward = 1 + 2 * _gamma(sum(each.squares for each in sizes) + 16)

    def kept(number) -> tuple[Callable[..., Any] | None, bool]:
        """Return what a device keeps of a sum, if not all, and whether of one pass at a time."""
        if number in cut:
            return functools.partial(over.added, number), shards[number].is_whole_along(1)
        return None, True

    def accumulate(total, inputs):
        rows, real = inputs
        arrays, finite, losses = found_in(rows)
        arrays = layout.join(arrays)
        finite, arrays = stored_rows(finite, arrays, _finite_rows)
        parts = [part_of(*each) for each in zip(taps, arrays, strict=True)]
        square, most = (sum(found) for found in zip(*(part.norms() for part in parts), strict=True))
        square = jnp.maximum(square, 0.0)
        bound = jnp.sqrt(square + _SHARE**2 * most) * upward
        if clipping.normalize:
            weight = target / (bound + 0.01)
        else:
            weight = jnp.minimum(1 / grid.unit, target / jnp.maximum(bound, 1e-300))
        keep = finite & jnp.isfinite(bound)
        long = ~keep | ~(jnp.sqrt(square) <= target * grid.unit)
        weight = jnp.where(real & keep, weight, 0.0)
        total = [
            onto(old, part, weight, alone > 0, *kept(number))
            for old, part, number in zip(total, parts, numbers, strict=True)
        ]
        norms = jnp.where(keep, jnp.sqrt(square), jnp.inf).astype(jnp.float32)
        norms, losses = (jnp.where(real, numbers, 0.0) for numbers in (norms, losses))
        return total, (norms, real & long, losses, records)

    if pieces.number == 1:
        total, found = accumulate([None] * len(numbers), (batch, mask))
    else:
        inputs = jax.tree.map(pieces.split, (batch, mask))
        zeros = layout.zeros({number: shards[number].array.shape for number in cut})
        total, found = pieces.accumulate(accumulate, zeros, inputs, inputs[1])
        found = jax.tree.map(pieces.join, found)
    return RowSum(total, layout, cut), found


def _prepared(clipping: Clipping, loss, params, batch, own: int, size: int):
    """Return (program, pieces of `own` rows, sizes of parts, `budget`, its `alone`) of `size` rows in all."""
    program = _program(loss, params, batch)
    sizes = [sizes_of(program.taps.get(at), leaf) for at, leaf in enumerate(jax.tree.leaves(params))]
    micro = clipping.micro(lambda: _fitting(program, params, sizes), own)
    pieces = Microbatches(own, micro, clipping.skip_padding)
    depth = pieces.micro * max(each.terms for each in sizes) + pieces.number
    one = any(each.rank_one for each in sizes)
    alone = min(pieces.micro, ROWS_IN_FLOAT32) + pieces.number if one else 0
    alone = alone if _spent_in_float32(size, alone) <= _MAX_SPENT else 0
    entries = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    roundings = 0 if clipping.mesh is None else clipping.mesh.size * pieces.number
    target = budget(clipping.grid, entries, size, depth, alone, roundings)
    return program, pieces, sizes, target, alone


def suits(loss: Callable[..., Any], params, batch, **options) -> tuple[float, float]:
    """Return what decides whether to use this: (fast share, scale), from shapes alone.

    Arguments are those of `ghost_gradient_sum`.

    Returns:
      Share of the parameters' entries whose gradients are not written down, and the norm that gradients are
      scaled to as a share of the clip norm.

    Raises:
      ValueError: as `ghost_gradient_sum`.
    """
    clipping, size = Clipping(**options), np.shape(jax.tree.leaves(batch)[0])[0]
    own = _by_device.rows_of_each(size, clipping.mesh)
    _, _, sizes, target, _ = _prepared(clipping, loss, params, batch, own, size)
    entries = [np.size(leaf) for leaf in jax.tree.leaves(params)]
    fast = sum(number for number, each in zip(entries, sizes, strict=True) if not each.is_whole)
    return fast / sum(entries), target / 2.0**clipping.grid.bits


def choose(loss: Callable[..., Any], params, batch, **options) -> Choice:
    """Return the kind of clipping that `"auto"` stands for: ghost where it applies, gradients elsewhere.

    The choice depends on shapes, the grid and the device, never on data. One for the whole model is enough:
    ghost clipping decides by parameter already (`parts.is_written_down`), and the norm is that of all
    parameters together (proofs/released_numbers.md, section 5). Arguments as of `ghost_gradient_sum`.
    """
    return with_choice(loss, params, batch, **options)[0]


def with_choice(loss: Callable[..., Any], params, batch, **options) -> tuple[Choice, Callable[..., Any]]:
    """Return `choose`, and the loss for it: as it was checked where that is ghost clipping without a mesh."""
    _by_device.refuse_several_devices(options.get("mesh"), params=params, batch=batch)
    entries = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    if entries < MIN_ENTRIES:
        return Choice(PER_EXAMPLE, f"{entries} parameters are few"), loss
    if jax.default_backend() not in BACKENDS:
        return Choice(PER_EXAMPLE, f"ghost clipping is not for {jax.default_backend()}"), loss
    try:
        checked = _checked(loss, params, batch)
        fast, scale = suits(checked, params, batch, **options)
    except OneAtATimeError as error:
        return Choice(PER_EXAMPLE, str(error)), loss
    except TooCoarseError:
        return Choice(PER_EXAMPLE, "ghost clipping would leave less than half of the clip norm"), loss
    if scale < MIN_SCALE:
        return Choice(PER_EXAMPLE, f"ghost clipping would scale gradients to {scale:.2f} clip_norm"), loss
    why = f"{fast:.1%} of the parameters have a fast path; gradients are scaled to {scale:.4f} clip_norm"
    return Choice(GHOST, why), checked if options.get("mesh") is None else loss


def _checked(loss, params, batch) -> Traced:
    """Return `check_loss`; a loss that it returned, for arrays of these shapes, is not checked again."""
    if getattr(loss, "alone", None) is False:
        return loss
    return check_loss(loss, params, batch, np.shape(jax.tree.leaves(batch)[0])[0])


def _program(loss, params, batch) -> _uses.Program:
    return _uses.traced(_checked(loss, params, batch), len(jax.tree.leaves(params)), _worth_it)


def _worth_it(equation) -> bool:
    """Return whether to tap it: also for convolutions with a stored gradient, which XLA computes slowly."""
    convolves = isinstance(_equations.innermost(equation), _equations.Convolution)
    return convolves or not is_written_down(equation)


def _fitting(program: _uses.Program, params, sizes: list[Sizes]) -> int:
    """As many examples as a processor is fast on with all that their gradients are made of; 2^k."""
    kept = sum(_equations.num_kept(tap.equation) for tap in program.taps.values())
    kept += sum(leaf.size for leaf, each in zip(jax.tree.leaves(params), sizes, strict=True) if each.is_whole)
    computed, made_of, examples = _AT_ONCE["cpu" if jax.default_backend() == "cpu" else "others"]
    fitting = min(computed / max(1, program.computed), made_of / max(1, kept))
    return min(examples, 2 ** max(0, math.floor(math.log2(fitting))))


def _found(program: _uses.Program, leaves, example):
    """Of one example: what each parameter's part is made of; if its loss is finite; its loss.

    That is a gradient, or what an equation is given and the cotangent of what it gives.
    """
    free = {leaf: array for leaf, array in enumerate(leaves) if leaf not in program.taps}

    def value(free, added):
        return program.tapped([free.get(leaf, array) for leaf, array in enumerate(leaves)], example, added)

    gradient = without_batch_groups(jax.value_and_grad(value, (0, 1), has_aux=True))
    (number, beside), (gradients, cotangents) = gradient(free, program.added())
    taps = program.taps.items()
    found = gradients | {leaf: _kept(tap, beside[leaf], cotangents[leaf]) for leaf, tap in taps}
    arrays = [found[leaf] for leaf in range(len(leaves))]
    return jax.tree.map(plain, arrays), jnp.isfinite(number), jnp.float32(number)


def _finite_rows(arrays) -> jax.Array:
    """Return (rows,) bool: whether all numbers of a row are finite."""
    return all_of([jnp.isfinite(a).all(axis=tuple(range(1, a.ndim))) for a in jax.tree.leaves(arrays)])


def _kept(tap: _uses.Tap, other, cotangent) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return a gradient, or what it can be made of."""
    if not is_written_down(tap.equation):
        return other, cotangent
    factors = tap.equation.factors(other.astype(jnp.float32), cotangent.astype(jnp.float32))
    product = jnp.einsum("htk,htn->hkn", *factors, precision=lax.Precision.HIGHEST)
    return tap.gradient(product)
