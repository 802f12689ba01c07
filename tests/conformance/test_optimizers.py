"""Every registered optimizer through one table of requirements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.optimizers import OPTIMIZERS

MEMBERS = ("sgd", "adam")
STEPS = 12


def test_every_registered_optimizer_is_in_the_table():
    assert set(MEMBERS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", MEMBERS)
def test_requirements(name):
    """It goes down a parabola, one program does all steps, dtypes are kept."""
    optimizer = OPTIMIZERS[name](0.1, STEPS)
    params = {"w": jnp.asarray([1.0, -2.0], jnp.float32), "b": jnp.asarray(0.5, jnp.float32)}
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(name)
        updates, state = optimizer.update(params, state, params)  # the gradient of half the square
        return jax.tree.map(jnp.add, params, updates), state

    state = optimizer.init(params)
    sizes = [float(np.linalg.norm(params["w"]))]
    for _ in range(STEPS):
        params, state = step(params, state)
        assert params["w"].dtype == jnp.float32 and all(
            np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)
        )
        sizes.append(float(np.linalg.norm(params["w"])))
    assert len(traces) == 1
    assert sizes[-1] < sizes[0]
