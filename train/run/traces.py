"""Digests of loss and optimizer as they are traced, which no machine, mesh or microbatch size changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..batches import fingerprints
from ..models.loss import Loss


def of_parts(loss: Loss, optimizer: optax.GradientTransformation, state, rows) -> dict[str, str]:
    """Return digests of the loss with its gradient and of the optimizer: what a run is bound to everywhere.

    Args:
      loss: of one example.
      optimizer: with all that is chained to it.
      state: of the run, with `params` and `opt_state`.
      rows: pytree of arrays (rows, ...): a batch.
    """

    def of_one(loss, params, example):
        return jax.value_and_grad(loss.at(0))(params, example)

    def updated(updates, opt_state, params):
        return optimizer.update(updates, opt_state, params)

    params, example = _shapes(state.params), jax.tree.map(lambda leaf: _shape(leaf, 1), rows)
    updates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return {
        "loss": fingerprints.of_trace(jax.make_jaxpr(of_one)(_shapes(loss), params, example)),
        "optimizer": fingerprints.of_trace(
            jax.make_jaxpr(updated)(updates, _shapes(state.opt_state), params)
        ),
    }


def _shapes(tree) -> Any:
    return jax.tree.map(_shape, tree)


def _shape(leaf, axes: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf)[axes:], jnp.result_type(leaf))
