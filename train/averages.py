"""Averages of the iterates of a run: `TrainOptions(average=)`.

Every iterate is post-processing of what the plan's noise protects, and so is an average of them: it has no
privacy cost. It is part of the optimizer's state, so checkpoints hold it and a resumed run keeps it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxacct.common import validate as _validate


class Averaged(NamedTuple):
    """State of `averaging`."""

    inner: Any
    """Of the optimizer."""
    weight: jax.Array
    """() float32: 1 - decay^steps."""
    average: Any
    """Pytree like the parameters, float32."""


def averaging(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer with an exponential moving average of the parameters in its state.

    The average of steps 1 to t has weights proportional to `decay^(t - s)`; initial parameters have none.
    """
    _validate.open_probability("average", decay)

    def init(params) -> Averaged:
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
        return Averaged(optimizer.init(params), jnp.zeros((), jnp.float32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = optimizer.update(updates, state.inner, params)
        weight = decay * state.weight + (1 - decay)
        share = (1 - decay) / weight
        average = jax.tree.map(
            lambda old, leaf: old + share * (leaf.astype(jnp.float32) - old),
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, Averaged(inner, weight, average)

    return optax.GradientTransformation(init, update)


def average_of(state: Averaged, params):
    """Return the average in the dtypes of the parameters; before the first step the parameters."""
    return jax.tree.map(
        lambda leaf, mean: jnp.where(state.weight > 0, mean, leaf).astype(leaf.dtype), params, state.average
    )
