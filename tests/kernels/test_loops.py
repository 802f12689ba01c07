"""Loops over blocks of samples that stop together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from jaxacct.kernels.programs import any_left
from tests.proposals_by_name import replica_proposal


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


def test_no_copy_of_the_state_a_turn(key):
    """Replicas of several blocks at once: no select over the counts inside the loop."""
    mechanism = Mechanism(BMinSep(60, 4, 0.1), BandedToeplitz.square_root(4), 1.0)
    proposal = replica_proposal(mechanism, 2, 1.0)
    draw = functools.partial(
        proposal.draw_block,
        scheme=mechanism.scheme,
        strategy=mechanism.strategy,
        sigma=1.0,
        tables=proposal.tables(),
        dtype=jnp.float32,
    )
    keys = jax.random.split(key, 3)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda k: draw(k)))(keys)
    loops = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    assert loops
    for loop in loops:
        assert all(v.aval.ndim == 0 for v in loop.params["cond_jaxpr"].jaxpr.outvars)
        whole = [
            e
            for e in loop.params["body_jaxpr"].jaxpr.eqns
            if e.primitive.name == "select_n" and e.outvars[0].aval.size >= 3 * 128 * 60
        ]
        assert not whole
    together = jax.jit(jax.vmap(lambda k: draw(k)))(keys)
    alone = jax.jit(lambda k: draw(k))
    for index, one in enumerate(keys):
        np.testing.assert_allclose(together.loss[index], alone(one).loss, rtol=1e-4, atol=1e-5)
