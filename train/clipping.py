"""Per-example clipped gradient sums in microbatches: memory follows the microbatch, not the batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import _validate

# Norms are float32 sums over all parameters; gradients are scaled to this much less than the clip norm, so
# that a norm which was summed a little too small does not let a gradient exceed it.
_SLACK = 1e-5


class ClippedSum(NamedTuple):
    """The sum of clipped gradients, and what must not leave the machine without noise.

    Only `total`, with noise added, is covered by a guarantee; the rest is private.
    """

    total: Any
    """Pytree like the parameters: sum over the batch of gradients of norm at most the clip norm."""
    norms: jax.Array
    """(batch,) float32: gradient norms before clipping, 0 where padded, inf where not finite."""
    losses: jax.Array
    """(batch,) float32: losses, 0 where padded."""
    clipped_fraction: jax.Array
    """Share of the real examples whose gradient was scaled down."""


def clipped_gradient_sum(
    loss: Callable[..., jax.Array],
    params,
    batch,
    mask,
    *,
    clip_norm: float,
    microbatch_size: int | None = None,
    normalize: bool = False,
) -> ClippedSum:
    """Sum over a batch of per-example gradients, each scaled to global norm at most `clip_norm`.

    Replacing one example by padding moves `total` by at most `clip_norm` in Euclidean norm (up to float32
    rounding of the sum itself). An example whose loss or gradient is not finite counts as zero: it can
    neither spoil the model nor have an unbounded effect.

    Args:
      loss: `loss(params, example) -> scalar` of one example, without a batch axis.
      params: pytree of floating-point arrays.
      batch: pytree of arrays (batch, ...).
      mask: (batch,) bool; padding contributes exactly zero.
      clip_norm: C > 0.
      microbatch_size: examples whose gradients are in memory at a time; the whole batch by default.
      normalize: scale every gradient to norm `clip_norm` x norm / (norm + 0.01) rather than only long ones
        (automatic clipping, Bu et al. 2023, with its stability constant 0.01).

    Raises:
      ValueError: bad arguments, or a loss that is not a scalar for one example.
    """
    _validate.positive_number("clip_norm", clip_norm)
    mask = jnp.asarray(mask, bool)
    size = mask.shape[0]
    micro = (
        size if microbatch_size is None else _validate.positive_integer("microbatch_size", microbatch_size)
    )
    micro = min(micro, size)
    _check_loss(loss, params, batch, size)
    pad = -size % micro

    def split(array):
        array = jnp.concatenate([array, jnp.zeros((pad, *array.shape[1:]), array.dtype)]) if pad else array
        # Neighbours go to different microbatches, so that a batch sharded by rows keeps every device busy.
        return array.reshape(micro, -1, *array.shape[1:]).swapaxes(0, 1)

    def join(array):
        return array.swapaxes(0, 1).reshape(-1)[:size]

    def one(example, real):
        value, gradient = jax.value_and_grad(loss)(params, example)
        norm = global_norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(value)
        if normalize:
            scale = clip_norm / (norm + 0.01)
        else:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
        scale = scale * (1 - _SLACK)
        keep = real & finite
        clipped = jax.tree.map(lambda g: jnp.where(keep, g.astype(jnp.float32) * scale, 0.0), gradient)
        norm = jnp.where(real, jnp.where(finite, norm, jnp.inf), 0.0)
        return clipped, norm, jnp.where(real, value.astype(jnp.float32), 0.0)

    def accumulate(total, inputs):
        clipped, norms, losses = jax.vmap(one)(*inputs)
        return jax.tree.map(lambda t, c: t + c.sum(axis=0), total, clipped), (norms, losses)

    zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
    total, (norms, losses) = jax.lax.scan(accumulate, zeros, (jax.tree.map(split, batch), split(mask)))
    norms, losses = join(norms), join(losses)
    clipped = jnp.sum((norms > clip_norm) & mask) / jnp.maximum(1, mask.sum())
    return ClippedSum(total, norms, losses, clipped)


def global_norm(tree) -> jax.Array:
    """Euclidean norm of all leaves together, float32, without overflow of the squares."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]))
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    return unit * jnp.sqrt(sum(jnp.sum(jnp.square(leaf / unit)) for leaf in leaves))


def _check_loss(loss, params, batch, size: int) -> None:
    """Refuse a loss of another shape than () for one example, before anything runs."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] != size:
            raise ValueError(f"batch must have {size} rows like mask, had an array of shape {np.shape(leaf)}")

    def of_one(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a)[1:], jnp.result_type(a)), tree)

    try:
        shape = jax.eval_shape(loss, params, of_one(batch))
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"loss must take (params, one example without a batch axis): {str(error).splitlines()[0]}"
        ) from None
    if getattr(shape, "shape", None) != ():
        raise ValueError(
            "loss must return one number for one example (a mean over a batch has no per-example gradient), "
            f"returned {getattr(shape, 'shape', type(shape).__name__)}"
        )
