"""Models: shapes, gradients, one example at a time or many, no batch statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.modules import made
from train.models.loss import nnx_loss, refuse_batch_statistics
from train.models.networks import SmallCNN, cross_entropy

pytestmark = pytest.mark.usefixtures("default_promotion")  # of flax's average pooling


def test_examples_do_not_see_each_other(key):
    model = made(lambda: SmallCNN((8, 8, 1), 10, nnx.Rngs(0)))
    inputs = jax.random.uniform(key, (3, 8, 8, 1))
    forward = nnx.jit(lambda model, inputs: model(inputs))
    together = forward(model, inputs)
    assert together.shape == (3, 10)
    for row in range(3):
        np.testing.assert_allclose(forward(model, inputs[row]), together[row], atol=1e-5)
    refuse_batch_statistics(model)


def test_cross_entropy_against_the_definition(key):
    model = made(lambda: SmallCNN((8, 8, 1), 10, nnx.Rngs(0)))
    example = {"inputs": jax.random.uniform(key, (8, 8, 1)), "labels": jnp.int32(3)}
    logits = np.asarray(nnx.jit(lambda model, inputs: model(inputs))(model, example["inputs"]), np.float64)
    found = float(nnx.jit(cross_entropy)(model, example))
    assert found == pytest.approx(np.log(np.exp(logits).sum()) - logits[3], rel=1e-5)
    loss, params = nnx_loss(model, cross_entropy)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, example)
    assert value == pytest.approx(found, rel=1e-6)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))
