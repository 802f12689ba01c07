"""Planted mistakes of shape and dtype in a step, which would share one noise among parameters."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, Mechanism, Poisson
from train.clipping.grid import GridSum
from train.clipping.sums import ClippedSum
from train.optimizers import privatize
from train.procedures.step import TrainState, advance

PRIVATE = privatize(
    Mechanism(Poisson(3, 0.5), BandedToeplitz.identity(), 1.0),
    clip_norm=1.0,
    expected_batch_size=2.0,
    key=np.arange(8, dtype=np.uint32),
)
PARAMS, ROWS, MASK = jnp.zeros(3), jnp.zeros(2), np.ones(2, bool)


def found(total, losses=ROWS):
    return ClippedSum(GridSum.of(total, PRIVATE.grid), ROWS, losses, jnp.zeros(()), {})


@pytest.mark.parametrize("planted", [found(jnp.zeros(1)), found(PARAMS, losses=ROWS[:, None])])
def test_a_sum_of_another_shape(planted):
    optimizer = optax.sgd(0.1)
    state = TrainState(PARAMS, PRIVATE.init(PARAMS), optimizer.init(PARAMS))
    with pytest.raises(AssertionError, match="shape"):
        advance(PRIVATE, optimizer, state, planted, MASK)


def test_noise_of_another_shape():
    with pytest.raises(AssertionError, match="assert_trees_all_equal_shapes"):
        found(PARAMS).total.scaled(1.0, jnp.zeros(1, jnp.int32))
