"""A transformer on characters and its adapters."""

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import special

from tests.train.modules import made
from train.models.lora import add_lora
from train.models.networks import Transformer, next_token

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = dict(length=15, width=8, layers=1, heads=2)


def small(seed=0):
    return Transformer(128, *SIZES.values(), rngs=nnx.Rngs(seed))


run = nnx.jit(lambda model, tokens: model(tokens))


def test_a_transformer_sees_only_what_came_before():
    model, tokens = made(small), np.arange(12)
    other_tokens = np.where(tokens == 7, 99, tokens)
    logits, other = run(model, tokens), run(model, other_tokens)
    assert logits.shape == (12, 128)
    np.testing.assert_array_equal(logits[:7], other[:7])
    assert (np.abs(logits[7:] - other[7:]).max(axis=1) > 0).all()
    expected = -special.log_softmax(np.float64(logits), axis=-1)[np.arange(11), np.arange(1, 12)].mean()
    assert float(nnx.jit(next_token)(model, tokens)) == pytest.approx(expected, rel=1e-5)


def test_adapters_change_nothing_before_they_are_trained():
    model, adapted = made(small), made(small)
    add_lora(adapted, 2, nnx.Rngs(1))
    tokens = np.arange(12)
    np.testing.assert_allclose(run(adapted, tokens), run(model, tokens), atol=1e-6)
    # Rank 2 of four layers in the block and of the last one, (inputs + outputs) each.
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(adapted, nnx.LoRAParam)))
    assert count == 2 * (8 + 24 + 8 + 8 + 8 + 32 + 32 + 8 + 8 + 128)
