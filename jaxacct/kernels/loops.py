"""Loops over many samples under `jax.vmap`."""

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


def samples_together(function):
    """`function`, which under `jax.vmap` over blocks of samples is called once, with the samples of all.

    It takes (steps, num_samples) arrays, (steps, 1) ones and numbers, and gives a tuple of (num_samples,)
    arrays.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def _(blocks, in_batched, *arrays):
        samples = max(one.shape[-1] for one in arrays if one.ndim > 1)

        def together(one, batched):
            if not batched and (one.ndim < 2 or one.shape[-1] == 1):
                return one
            steps = one.shape[batched:-1] or (1,)
            one = jnp.broadcast_to(
                one.reshape(blocks if batched else 1, *steps, -1), (blocks, *steps, samples)
            )
            return jnp.moveaxis(one, 0, 1).reshape(*steps, blocks * samples)

        found = [one.reshape(blocks, samples) for one in mapped(*map(together, arrays, in_batched))]
        return tuple(found), (True,) * len(found)

    return mapped
