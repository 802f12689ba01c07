"""Networks and their adapters: attention, the memory of a step."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import special

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from tests.train.runs import made
from train.models.lora import add_lora
from train.models.loss import nnx_loss
from train.models.networks import Transformer, next_token
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("default_promotion")


SIZES = dict(length=15, width=8, layers=1, heads=2)


def small(seed=0):
    return Transformer(128, *SIZES.values(), rngs=nnx.Rngs(seed))


logits_of = nnx.jit(lambda model, tokens: model(tokens))


def test_a_transformer_sees_only_what_came_before():
    model, tokens = made(small), np.arange(12)
    other_tokens = np.where(tokens == 7, 99, tokens)
    logits, other = logits_of(model, tokens), logits_of(model, other_tokens)
    assert logits.shape == (12, 128)
    np.testing.assert_array_equal(logits[:7], other[:7])
    assert (np.abs(logits[7:] - other[7:]).max(axis=1) > 0).all()
    expected = -special.log_softmax(np.float64(logits), axis=-1)[np.arange(11), np.arange(1, 12)].mean()
    assert float(nnx.jit(next_token)(model, tokens)) == pytest.approx(expected, rel=1e-5)


def test_adapters_change_nothing_before_they_are_trained():
    model, adapted = made(small), made(small)
    add_lora(adapted, 2, nnx.Rngs(1))
    tokens = np.arange(12)
    np.testing.assert_allclose(logits_of(adapted, tokens), logits_of(model, tokens), atol=1e-6)
    # Rank 2 of four layers in the block and of the last one, (inputs + outputs) each.
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(adapted, nnx.LoRAParam)))
    assert count == 2 * (8 + 24 + 8 + 8 + 8 + 32 + 32 + 8 + 8 + 128)


PAGE = Path(__file__).parents[2] / "jaxacct/guides/questions/language-model.md"
MEGABYTE = 1e6


def memory_of_step(model, rank: int, bands: int, *, length: int, batch: int):
    """(trained parameters, others, megabytes of the state and the weights, megabytes beside them)."""
    kind = nnx.Param
    if rank:
        add_lora(model, rank, nnx.Rngs(1))
        kind = nnx.LoRAParam
    loss, params = nnx_loss(model, next_token, wrt=kind)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, loss)]
    mechanism = Mechanism(BMinSep(100, bands, 0.1), BandedToeplitz.square_root(bands), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=8, key=np.zeros(8, np.uint32))
    step = make_step(loss, private, optax.adam(1e-3), clipping="ghost", microbatch_size=4)
    state = jax.eval_shape(step.init, params)
    rows = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    traced = step.trace(state, rows, jax.ShapeDtypeStruct((batch,), bool))
    found = traced.lower().compile().memory_analysis()
    return *sizes, found.argument_size_in_bytes / MEGABYTE, found.temp_size_in_bytes / MEGABYTE


def stated(trained: int, others: int, bands: int) -> float:
    """Megabytes of weights, of Adam's two moments and of the noise that is kept, as the page says."""
    return 4 * (others + trained * (1 + 2 + bands - 1)) / MEGABYTE


def test_what_is_kept_is_what_the_page_says():
    model = Transformer(64, 8, 16, 1, 2, nnx.Rngs(0))
    trained, others, kept, _ = memory_of_step(model, 2, 4, length=8, batch=4)
    assert trained == 2 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16 + 16 + 64)
    assert stated(trained, others, 4) <= kept < stated(trained, others, 4) + 0.001


OTHERS = 33_747_968  # parameters of the model of the table


def test_the_table_of_the_page():
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for name, _, bands, trained, kept in rows:
        trained, kept = (int(number.replace(",", "")) for number in (trained, kept))
        others = OTHERS if name == "adapters" else 0
        assert kept == round(stated(trained, others, int(bands)))


@pytest.mark.slow
def test_the_memory_of_the_model_of_the_table():
    model = Transformer(8192, 256, 512, 8, 8, nnx.Rngs(0))
    trained, others, kept, beside = memory_of_step(model, 8, 1, length=256, batch=64)
    assert (trained, others) == (593_920, OTHERS)
    assert stated(trained, others, 1) <= kept < stated(trained, others, 1) + 1
    (said,) = re.findall(r"one microbatch: (\d+) megabytes", PAGE.read_text())
    assert beside < 1.1 * int(said)
