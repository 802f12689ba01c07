"""Loops over blocks of samples that stop together."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import any_left


def halve(counts):
    """Turns until every count is zero, each sample's own number of turns, and the counts."""

    def turn(state):
        turns, own, counts = state
        return turns + 1, own + (counts > 0).astype(own.dtype), counts // 2

    start = (0, jnp.zeros_like(counts), counts)
    return jax.lax.while_loop(lambda state: any_left(state[2] > 0), turn, start)


def test_blocks_run_until_the_last_is_done():
    counts = jnp.asarray([[0, 1, 2], [0, 0, 0], [900, 3, 1]])
    turns, own, left = jax.jit(jax.vmap(halve))(counts)
    np.testing.assert_array_equal(turns, [10, 10, 10])
    np.testing.assert_array_equal(own, [[0, 1, 2], [0, 0, 0], [10, 2, 1]])
    assert not left.any()
    nested = jax.vmap(jax.vmap(halve))(counts[:, None])
    np.testing.assert_array_equal(nested[1][:, 0], own)
    assert [int(halve(row)[0]) for row in counts] == [2, 0, 10]
