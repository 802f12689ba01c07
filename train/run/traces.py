"""Digests of loss and optimizer as they are traced, which no machine, mesh or microbatch size changes."""

import jax
import jax.numpy as jnp
import optax

from ..batches import fingerprints
from ..clipping.programs import shapes
from ..models.loss import Loss


def of_parts(loss: Loss, optimizer: optax.GradientTransformation, state, rows) -> dict[str, str]:
    """Return digests of the loss with its gradient and of the optimizer: what a run is bound to everywhere.

    ValueError for an optimizer that calls Python; a loss that does is refused before
    (`train.clipping.rows_apart`).

    Args:
      loss: of one example.
      optimizer: with all that is chained to it.
      state: of the run, with `params` and `opt_state`.
      rows: pytree of arrays (rows, ...): a batch.
    """

    def of_one(loss, params, example):
        return jax.value_and_grad(loss.at(0))(params, example)

    loss, params, opt_state = shapes((loss, state.params, state.opt_state))
    update = jax.make_jaxpr(optimizer.update)(shapes(params, dtype=jnp.float32), opt_state, params)
    fingerprints.refuse_callbacks("optimizer", update)
    return {
        "loss": fingerprints.of_trace(jax.make_jaxpr(of_one)(loss, params, shapes(rows, 1))),
        "optimizer": fingerprints.of_trace(update),
    }
