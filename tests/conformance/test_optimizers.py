"""Every registered optimizer through one table of requirements."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.optimizers import OPTIMIZERS

MEMBERS = ("sgd", "adam")
STEPS = 12
pytestmark = pytest.mark.usefixtures("default_promotion")


def test_every_registered_optimizer_is_in_the_table():
    assert set(MEMBERS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", MEMBERS)
def test_requirements(name):
    """It goes down a parabola, one program does all steps, dtypes are kept."""
    chex.clear_trace_counter()
    optimizer = OPTIMIZERS[name](0.1, STEPS)
    params = {"w": jnp.asarray([1.0, -2.0], jnp.float32), "b": jnp.asarray(0.5, jnp.float32)}

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        updates, state = optimizer.update(params, state, params)  # the gradient of half the square
        return jax.tree.map(jnp.add, params, updates), state

    state = optimizer.init(params)
    sizes = [float(np.linalg.norm(params["w"]))]
    for _ in range(STEPS):
        params, state = step(params, state)
        chex.assert_type(jax.tree.leaves(params), jnp.float32)
        chex.assert_tree_all_finite(params)
        sizes.append(float(np.linalg.norm(params["w"])))
    assert sizes[-1] < sizes[0]
