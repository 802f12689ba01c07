"""DiceSGD: clipping with error feedback, whose fixed point is the minimum and not a biased point beside it.

What clipping cuts off is kept in an error `e` and fed back, clipped, in later steps (arXiv 2311.14632,
algorithms 2 and 3). `v = m + clip(e, C2)` plus noise is released; `e` is as private as the data and leaves
neither in checkpoints (`release`) nor in metrics. The valid accountant is `accountants.dice.dice_mu`; it asks
for much noise, as theorem 3.7 of the paper, which asks for less, is false (proofs/dice.md).

Gradients and the error that is fed back are rounded towards zero onto a public grid, so no norm can grow,
and added as integers with integer noise: the release is a function of what was accounted for.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct import _validate

from .clipping import clip_to_grid, global_norm
from .grid import Grid
from .normals import fresh_key, standard_normals

_BITS = 20  # the clip norm in grid units is 2^20
# A gradient of this many clip norms is as far as the error takes notice: it stays finite, whatever the data.
_LARGEST_RESIDUAL = 2.0**40
_AUTOMATIC = 0.01


class DiceState(NamedTuple):
    """What is kept between steps. **Private**: `error` and `key` are secrets."""

    count: jax.Array
    """() int32: steps so far."""
    error: Any
    """Pytree like the parameters, float32: what clipping has cut off and not yet fed back, on the mean."""
    key: jax.Array
    """(8,) uint32: the noise of a step is a function of it and of the count."""


def noise_std_from_multiplier(noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
    """`sigma_1`, on the mean, of noise `z C` on the sum: `z C / B`."""
    z = _validate.positive_number("noise_multiplier", noise_multiplier)
    size = _validate.positive_integer("batch_size", batch_size)
    return z * _validate.positive_number("clip_norm", clip_norm) / size


def dice_aggregate(
    *,
    clip_norm: float,
    error_clip_norm: float,
    noise_std: float,
    batch_size: int,
    automatic: bool = False,
    key=None,
) -> optax.GradientTransformationExtraArgs:
    """Per-example gradients in, `v + w` out: put it first in an optax chain.

    `update(gradients, state, params, mask=mask)`: leaves of `gradients` have a leading axis of examples;
    `mask`, (examples,) bool, is False for padding and must be given where there may be more or fewer than
    `batch_size` of them. An example whose gradient is not finite counts as zero.

    Args:
      clip_norm: C1, of each example's gradient.
      error_clip_norm: C2, of what is fed back; below C1 the method may be biased, and the error may grow.
      noise_std: sigma_1, standard deviation on the mean; 0 trains without any privacy.
      batch_size: B, the fixed divisor: the expected batch size, never the one that was drawn.
      automatic: scale every gradient to norm C1 |g| / (|g| + 0.01) and the error likewise (algorithm 4).
      key: (8,) uint32, from the operating system by default. Only tests should fix it.

    Raises:
      ValueError: bad arguments; updates without a common leading axis, or of another length than `batch_size`
        without a mask.
    """
    grid = Grid(_validate.positive_number("clip_norm", clip_norm), _BITS)
    c2 = _validate.positive_number("error_clip_norm", error_clip_norm)
    sigma = _validate.nonnegative_number("noise_std", noise_std)
    size = _validate.positive_integer("batch_size", batch_size)
    if max(sigma, c2) * size / grid.unit > 2.0**46:
        raise ValueError(
            "noise_std and error_clip_norm must be smaller beside clip_norm / batch_size: no grid fits"
        )
    words = jnp.asarray(fresh_key() if key is None else key, jnp.uint32)

    def init(params) -> DiceState:
        error = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), params)
        return DiceState(jnp.zeros((), jnp.int32), error, words)

    def update(updates, state: DiceState, params=None, *, mask=None, **_):
        del params
        count = _examples(updates, state.error, size, mask)
        mask = jnp.ones(count, bool) if mask is None else jnp.asarray(mask, bool)
        with jax.enable_x64(True):
            units = size / grid.unit  # a mean in grid units of the sum
            kept, counts, _ = jax.vmap(lambda g: clip_to_grid(g, grid, automatic))(updates)
            keep = kept & mask
            total = _sum_where(keep, counts)
            fed_back = _clip_to_units(state.error, c2, units, automatic)
            v = jax.tree.map(jnp.add, total, fed_back)
            raw = _sum_where(keep, jax.vmap(lambda g: _bounded(g, clip_norm * _LARGEST_RESIDUAL))(updates))
            error = jax.tree.map(
                lambda e, g, n: (e.astype(jnp.float64) + g / size - n / units).astype(jnp.float32),
                state.error,
                raw,
                v,
            )
            released = jax.tree.map(
                lambda n, w: ((n + jnp.round(sigma * units * w)) / units).astype(jnp.float32),
                v,
                _normals(state.key, state.count, v),
            )
        return released, DiceState(state.count + 1, error, state.key)

    return optax.GradientTransformationExtraArgs(init, update)


def _examples(updates, error, size: int, mask) -> int:
    """The number of rows, checked; static."""
    leaves = jax.tree.leaves(updates)
    rows = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if jax.tree.structure(updates) != jax.tree.structure(error):
        raise ValueError("updates must have the structure of the parameters that the state was made for")
    if len(rows) != 1 or None in rows:
        raise ValueError("updates must be per-example gradients with one common leading axis")
    (count,) = rows
    if mask is None and count != size:
        raise ValueError(f"mask must be given where updates have {count} rows and batch_size is {size}")
    if mask is not None and np.shape(mask) != (count,):
        raise ValueError(f"mask must have the shape ({count},), had {np.shape(mask)}")
    assert count is not None  # as None is not in rows
    return count


def _sum_where(keep, tree):
    """Sums over the examples that are kept, float64: exact for the integers of a batch."""

    def total(leaf):
        shape = (-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(keep.reshape(shape), leaf.astype(jnp.float64), 0.0).sum(axis=0)

    return jax.tree.map(total, tree)


def _bounded(gradient, most: float):
    """The raw gradient, scaled down where its norm is beyond `most`; float64."""
    scale = jnp.minimum(1.0, most / jnp.maximum(global_norm(gradient), 1e-300))
    return jax.tree.map(lambda g: jnp.nan_to_num(g.astype(jnp.float64)) * scale, gradient)


def _clip_to_units(error, c2: float, units: float, automatic: bool):
    """`clip(e, C2)` in whole units, each entry rounded towards zero, so that its norm is at most C2."""
    norm = global_norm(error)
    scale = c2 / (norm + _AUTOMATIC) if automatic else jnp.minimum(1.0, c2 / jnp.maximum(norm, 1e-300))
    # A little less, for the rounding of the norm itself.
    factor = scale * (units * (1 - 2.0**-40))
    return jax.tree.map(lambda e: jnp.trunc(e.astype(jnp.float64) * factor), error)


def _normals(key, step, like):
    """Standard normals, float64, a pytree like `like`."""
    leaves, structure = jax.tree.flatten(like)
    sizes = [leaf.size for leaf in leaves]
    drawn = jax.lax.split(standard_normals(key, step, sum(sizes)), sizes)
    parts = [part.reshape(leaf.shape) for part, leaf in zip(drawn, leaves, strict=True)]
    return jax.tree.unflatten(structure, parts)


def dice_sgd(
    learning_rate, *, momentum: float | None = None, **options
) -> optax.GradientTransformationExtraArgs:
    """`dice_aggregate(**options)` before SGD."""
    return optax.chain(dice_aggregate(**options), optax.sgd(learning_rate, momentum=momentum))


def dice_adam(learning_rate, *, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, **options):
    """`dice_aggregate(**options)` before Adam (algorithm 3): post-processing of what is released."""
    return optax.chain(dice_aggregate(**options), optax.adam(learning_rate, b1, b2, eps, eps_root))


def release(opt_state):
    """The state with every error and key set to zero: what may leave the trust boundary."""

    def scrub(node):
        if isinstance(node, DiceState):
            return DiceState(node.count, jax.tree.map(jnp.zeros_like, node.error), jnp.zeros_like(node.key))
        return node

    return jax.tree.map(scrub, opt_state, is_leaf=lambda node: isinstance(node, DiceState))


def reset_error(opt_state):
    """Every error set to zero, at times fixed beforehand; `dice_mu(reset_every=)` accounts for it."""

    def reset(node):
        if isinstance(node, DiceState):
            return node._replace(error=jax.tree.map(jnp.zeros_like, node.error))
        return node

    return jax.tree.map(reset, opt_state, is_leaf=lambda node: isinstance(node, DiceState))
