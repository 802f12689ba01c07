"""Per-example clipped gradient sums in microbatches: memory follows the microbatch, not the batch."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..procedures import by_device as _by_device
from .grid import Grid
from .joined import Layout
from .programs import in_fast_layout, without_batch_groups
from .sums import ClippedSum, Clipping, Microbatches, RowSum, check_loss, check_real, stored_rows, where_row

# Scaled to this much less than the clip norm, so that rounding of the norm (float64, one part in 2^53 a
# parameter) does not make the exact check of what is summed refuse an honest gradient.
_SLACK = 2.0**-24
# By default: entries of all gradients in memory at a time, and examples.
_AT_ONCE = {"cpu": (3 * 2**19, 32), "others": (2**27, 2**20)}


def clipped_gradient_sum(
    loss: Callable[..., jax.Array],
    params,
    batch,
    mask,
    *,
    admit: Callable[[Any, jax.Array], tuple[Any, jax.Array]] | None = None,
    records: Any = (),
    also: Callable[[Any], Any] | None = None,
    **options,
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
      admit: sum over the admitted examples alone: `(records of some rows, (rows,) float64) -> (their records
        after this step, (rows,) bool)`, the second argument being the exact square of each clipped gradient
        in grid units, 0 where it is not finite. It is called for all rows, sampled (`mask`) or not, once
        each. A rejected example contributes exactly zero, and has norm and loss 0 in the result.
      records: pytree of arrays (batch, ...), for `admit`.
      also: of one gradient, a pytree of arrays, another pytree of arrays of these shapes, float64. They are
        summed over the examples that count, unclipped, without a mesh.
      **options: those of `Clipping`; by default `default_microbatch_size` gradients are in memory at a time.

    Raises:
      ValueError: bad arguments, or a loss that is not a scalar for one example.
    """
    clipping, x64 = Clipping(**options), jax.config.read("jax_enable_x64")

    def of_rows(whole, _, batch, mask, records):
        loss, params = _by_device.whole(whole)
        own, layout = mask.shape[0], Layout.of(params)
        micro = clipping.micro(lambda: default_microbatch_size(params), own)
        pieces = Microbatches(own, micro, clipping.skip_padding and admit is None)
        with jax.enable_x64(x64):
            # As it is run.
            loss = check_loss(loss, params, batch, own, one_at_a_time=True)

        def of_each(rows):
            with jax.enable_x64(x64):
                return jax.lax.map(one, rows) if loss.alone else in_fast_layout(jax.vmap(one))(rows)

        def one(example):
            value, gradient = without_batch_groups(jax.value_and_grad(loss))(params, example)
            return gradient, (jnp.isfinite(value), jnp.float32(value))

        def accumulate(total, inputs):
            rows, real, followed = inputs
            gradients, (finite, losses) = of_each(rows)
            gradients = layout.join(jax.tree.leaves(gradients))
            counted = finite & (real if admit is None else True)  # all are charged
            clipped = clip_rows_to_grid(gradients, clipping.grid, clipping.normalize, counted)
            kept, counts, norms, long = clipped
            if admit is not None:
                squares = jax.vmap(_square)(counts)
                with jax.enable_x64(x64):
                    followed, let_in = admit(followed, squares)
                real = real & let_in
                counts = where_row(real, counts)
            norms, losses = where_row(real, (norms, losses))
            summands = [counts] if also is None else [counts, where_row(kept, jax.vmap(also)(gradients))]
            total = jax.tree.map(lambda a, n: a + n.sum(axis=0, dtype=jnp.float64), total, summands)
            return total, (norms, real & long, losses, followed)

        inputs = jax.tree.map(pieces.split, (batch, mask, records))
        zeros = [layout.zeros()] * (1 if also is None else 2)
        (total, *others), found = pieces.accumulate(accumulate, zeros, inputs, inputs[1])
        return RowSum(total, layout), (*jax.tree.map(pieces.join, found), *map(layout.split, others))

    return clipping.summed(of_rows, loss, params, batch, mask, records)


def default_microbatch_size(params) -> int:
    """As many gradients as processors are fast on, by tests/benchmarks/results/clipping.json; 2^k.

    On CPUs at most 32 examples of a million entries or so, which caches hold; on others memory bounds it.
    """
    entries = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    most, examples = _AT_ONCE["cpu" if jax.default_backend() == "cpu" else "others"]
    return min(examples, 2 ** max(0, math.floor(math.log2(most / max(1, entries)))))


def _square(counts) -> jax.Array:
    """Return the sum of the squares of integers, float64: exact up to 2^53, and above where it is larger."""
    with jax.enable_x64(True):
        squares = jax.tree.map(lambda n: jnp.sum(jnp.square(n.astype(jnp.float64))), counts)
        return sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float64))


def clip_rows_to_grid(gradients, grid: Grid, normalize: bool = False, counted=True):
    """Return (kept, gradients in grid units, norms before, whether each was clipped), of (rows, ...).

    Whole units, exactly of norm at most 2^bits. A gradient is not kept, and zero, where it is not `counted`
    ((rows,) bool) or not finite, or would be too long after scaling.

    The integers are stored, and then checked: a compiler may compute a gradient once for the check and once
    for the sum, and round it otherwise where a product and a sum become one operation. Of a difference that
    cancels, what is summed would then be thousands of times as long as what was checked.
    """
    scale = functools.partial(_scaled_to_grid, grid=grid, normalize=normalize)
    counts, finite, norms, long = jax.vmap(scale)(gradients)

    def are_short(counts):
        with jax.enable_x64(True):
            # Squares of integers whose sum is at most 2^46 add up without rounding, so this check is exact.
            return jax.vmap(_square)(counts) <= 4.0**grid.bits

    kept = finite & counted
    kept, counts = stored_rows(kept, where_row(kept, counts), are_short)
    return kept, counts, norms, long


def _scaled_to_grid(gradient, grid: Grid, normalize: bool):
    """Return (one gradient in grid units, int32, unchecked; if it is finite; its norm; if it is long)."""
    check_real("gradient", gradient)
    with jax.enable_x64(True):
        norm, max_norm = global_norm(gradient), grid.clip_norm
        if normalize:
            scale = max_norm / (norm + 0.01)
        else:
            scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-300))
        factor = scale * ((1 - _SLACK) / grid.unit)

        def count(leaf):
            # What is too large for 32 bits stays too long.
            whole = jnp.nan_to_num(jnp.trunc(leaf.astype(jnp.float64) * factor))
            return jnp.clip(whole, -(2.0**30), 2.0**30).astype(jnp.int32)

        finite, long = jnp.isfinite(norm), ~(norm <= max_norm)
        shown = jnp.where(finite, norm, jnp.inf).astype(jnp.float32)
        return jax.tree.map(count, gradient), finite, shown, long


def global_norm(tree) -> jax.Array:
    """Euclidean norm of all leaves together, float64: squares of floats neither over- nor underflow there."""
    with jax.enable_x64(True):
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float64))) for leaf in jax.tree.leaves(tree)))
