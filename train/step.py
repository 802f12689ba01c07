"""One private training step: clipped gradient sum, noise, optimizer; jitted, its state donated.

The core takes any pytree of parameters, so linen and plain JAX users call it as it is; `nnx_loss` turns an
nnx model into that form. Given arrays sharded by `NamedSharding`, the step computes what one device does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from train.clipping import clipped_gradient_sum


class TrainState(NamedTuple):
    """All that changes from step to step."""

    params: Any
    opt_state: Any
    """Of the whole chain: the noise buffer and the noise key (secret) come first."""


class StepInfo(NamedTuple):
    """Private: for the eyes of whoever may see the data. No guarantee covers it."""

    loss: jax.Array
    clipped_fraction: jax.Array
    median_norm: jax.Array


def make_step(
    loss: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    microbatch_size: int | None = None,
    normalize: bool = False,
) -> Callable[..., tuple[TrainState, StepInfo]]:
    """`step(state, batch, mask) -> (state, info)`, jitted; `state` is donated.

    Args:
      loss: `loss(params, example) -> scalar` of one example.
      optimizer: a chain that begins with `train.optimizers.privatize` of the same clip norm.
      clip_norm, microbatch_size, normalize: as in `train.clipping`.
    """

    def step(state: TrainState, batch, mask) -> tuple[TrainState, StepInfo]:
        found = clipped_gradient_sum(
            loss,
            state.params,
            batch,
            mask,
            clip_norm=clip_norm,
            microbatch_size=microbatch_size,
            normalize=normalize,
        )
        updates, opt_state = optimizer.update(found.total, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        real = jax.numpy.maximum(1, mask.sum())
        median = jax.numpy.nanmedian(jax.numpy.where(mask, found.norms, jax.numpy.nan))
        info = StepInfo(found.losses.sum() / real, found.clipped_fraction, median)
        return TrainState(params, opt_state), info

    return jax.jit(step, donate_argnums=0)


def nnx_loss(model: nnx.Module, loss: Callable[..., jax.Array]):
    """`(loss(params, example), params)` of an nnx model and `loss(model, example) -> scalar`.

    Raises:
      ValueError: for a model whose examples are not independent of each other (batch norm).
    """
    refuse_batch_statistics(model)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def functional(params, example):
        return loss(nnx.merge(graph, params, rest), example)

    return functional, params


def refuse_batch_statistics(model: nnx.Module) -> None:
    """ValueError for batch norm: statistics of a batch carry each example into all the others' gradients."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, (nnx.BatchNorm, nnx.BatchStat)):
            raise ValueError(
                "model must not contain batch norm: the statistics of a batch make every gradient depend on "
                "all its examples, so clipping does not bound what one can change; use group or layer norm"
            )
