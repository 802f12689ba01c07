"""Loops over many samples that stop together."""

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def any_left(unfinished):
    """Whether any sample is unfinished, under `jax.vmap` over blocks of samples: in any block.

    As the condition of a `lax.while_loop` it keeps one verdict for all blocks. With a verdict for each, JAX
    would copy the whole state in every turn, to hold on to that of the blocks that are done. A turn must
    leave finished samples as they are.
    """
    return jnp.any(unfinished)


@any_left.def_vmap
def _(axis_size, in_batched, unfinished):
    del axis_size, in_batched
    return any_left(unfinished), False
