"""`DiceRule` as a transformation of optax: per-example gradients in, the release out."""

import jax
import jax.numpy as jnp
import optax

from train.dice import DiceRule, _fresh


def dice_aggregate(*, key=None, **options) -> optax.GradientTransformationExtraArgs:
    """Return the transformation; without a `mask` all rows are examples."""
    rule = DiceRule(**options)

    def update(updates, state, params=None, *, mask=None, **_):
        rows = len(jax.tree.leaves(updates)[0])
        (clipped, raw), _norms = rule.sums(updates, jnp.ones(rows, bool) if mask is None else mask)
        return rule.release(state, clipped, raw)

    return optax.GradientTransformationExtraArgs(lambda params: _fresh(params, key), update)


def dice_sgd(rate: float, **options) -> optax.GradientTransformationExtraArgs:
    """Return the same before SGD."""
    return optax.chain(dice_aggregate(**options), optax.sgd(rate))
