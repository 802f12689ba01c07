"""The fine-tuning example, short: what it trains and keeps, that it goes on, another's checkpoint."""

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from scipy import special

from tests.train.modules import made
from train import load_model
from train.models import lora
from train.models.networks import Transformer, add_lora, next_token

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = dict(length=15, width=8, layers=1, heads=2)


def small(seed=0):
    return Transformer(lora.VOCABULARY, *SIZES.values(), rngs=nnx.Rngs(seed))


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


def test_pieces():
    np.testing.assert_array_equal(lora.pieces("abcdeé", 2), [[97, 98, 99], [100, 101, 63]])
    with pytest.raises(ValueError, match="text must have at least 8 characters, got 3"):
        lora.pieces("abc", 7)


def command(out, *more, **sizes):
    options = [f"--{name}={value}" for name, value in (SIZES | sizes).items()]
    options += [
        "--steps=3",
        "--batch-size=8",
        "--pretraining-steps=2",
        "--rank=2",
        "--epsilon=0.5",
        *map(str, more),
    ]
    with pytest.raises(SystemExit) as ended:
        lora.main(["--out", str(out), *options])
    return ended.value.code


@pytest.mark.usefixtures("default_promotion")
def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lora, "poisson_plan", functools.cache(lora.poisson_plan))
    text = tmp_path / "text.txt"
    text.write_text("A letter that is nobody's business, of some length. " * 20)
    ours = "--text", text, "--test-text", text
    assert command(tmp_path / "a", *ours) == 0
    said = capsys.readouterr().out
    assert "nats a character" in said and "(0.5, 1e-05)-differentially private" in said
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata((tmp_path / "a/run/model").absolute()).item_metadata.tree
    names = {str(path[-1].key) for path, _ in jax.tree_util.tree_leaves_with_path(stored)}
    assert names == {"lora_a", "lora_b"}
    # Again: it is finished, and nothing was trained anew. With its base as a checkpoint: the same model.
    assert command(tmp_path / "a", *ours) == 0
    assert capsys.readouterr().out == said
    assert command(tmp_path / "b", *ours, "--checkpoint", tmp_path / "a/base") == 0
    tuned = small(5)
    load_model(tmp_path / "a/base", tuned)
    add_lora(tuned, 2, nnx.Rngs(1))
    load_model(tmp_path / "b/run", tuned)
    assert not (tmp_path / "b/base").exists()
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(nnx.state(tuned, nnx.LoRAParam)))
    capsys.readouterr()
    # One of other sizes is refused in a line.
    assert command(tmp_path / "c", *ours, "--checkpoint", tmp_path / "a/base", layers=2) == 2
    error = capsys.readouterr().err.strip()
    assert "model must be of the structure" in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_it_learns(tmp_path, capsys):
    """As a user has it but for fewer steps: both texts are there, and the adapters are better than none."""
    with pytest.raises(SystemExit):
        lora.main(["--out", str(tmp_path), "--steps=40", "--pretraining-steps=200"])
    words = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("nats")).split()
    assert float(words[5]) < float(words[3]) - 0.02


def test_a_run_that_stopped_is_one_line_and_not_bad_input(monkeypatch, capsys):
    def stopped() -> int:
        raise OSError("no space left")

    monkeypatch.setattr(lora, "tune", stopped)
    with pytest.raises(SystemExit) as ended:
        lora.main([])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "lora: no space left\n"
