"""A transformation of optax takes two steps, or is refused in one line that says why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.refusals import refused
from tests.train.plans import plan
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("default_promotion")

SGD = optax.sgd(0.1)
PARAMS = {"w": jnp.full((3, 2), 0.1), "b": jnp.zeros(2)}
ROWS = {"x": np.ones((4, 3), np.float32), "y": np.ones((4, 2), np.float32)}
LOSS, NOISE, FAILS = (
    "no guarantee covers the loss or its gradient without noise",
    "must not clip or add noise for privacy",
    "with the model's parameters; it raised|a gradient like the parameters alone: .*; it raised",
)
REFUSED = {
    "lbfgs": (optax.lbfgs(), LOSS),
    "polyak_sgd": (optax.polyak_sgd(), LOSS),
    "momo": (optax.contrib.momo(), LOSS),
    "reduce_on_plateau": (optax.contrib.reduce_on_plateau(), LOSS),
    "dpsgd": (optax.contrib.dpsgd(0.1, 1.0, 1.0, 0), NOISE),
    "lookahead": (optax.lookahead(SGD, 2, 0.5), FAILS),  # wants pairs of parameters
    "scale_by_muon": (optax.contrib.scale_by_muon(), FAILS),  # of matrices alone; `muon` takes all parameters
}
# Those that died of donated state.
TAKEN = {
    "prodigy": optax.contrib.prodigy(),
    "sam": optax.contrib.sam(SGD, optax.sgd(0.01)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=jnp.float32(0.1)),
}


def step_of(transformation):
    private = privatize(plan("poisson", dataset_size=60).mechanism, clip_norm=1.0, expected_batch_size=4.0)

    def loss(params, example):
        return jnp.sum((example["x"] @ params["w"] + params["b"] - example["y"]) ** 2)

    return make_step(loss, private, transformation, clipping="per_example")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    transformation, message = REFUSED[name]
    refused(message, step_of(transformation).init, PARAMS)


@pytest.mark.parametrize("name", TAKEN)
def test_two_steps(name):
    step = step_of(TAKEN[name])
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, ROWS, np.ones(4, bool))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))
