"""Per-example clipping: sensitivity, masks, microbatches, odd gradients, bad losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.clipping import clipped_gradient_sum, global_norm

SIZES = {"w": (3, 4), "b": (4,)}


def random_params(key):
    return {
        name: jax.random.normal(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(SIZES.items())
    }


def loss(params, example):
    """A small network with a tanh layer; the scale of an example scales its gradient."""
    hidden = jnp.tanh(example["x"] @ params["w"] + params["b"])
    return example["scale"] * jnp.sum(hidden * example["y"])


def random_batch(key, size, scale=1.0):
    a, b = jax.random.split(key)
    return {
        "x": jax.random.normal(a, (size, 3)),
        "y": jax.random.normal(b, (size, 4)),
        "scale": jnp.full(size, scale),
    }


def float64_norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree))))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_against_a_plain_loop(clip_norm, normalize, key):
    params, batch = random_params(key), random_batch(key, 7)
    mask = jnp.array([True] * 5 + [False] * 2)
    found = clipped_gradient_sum(loss, params, batch, mask, clip_norm=clip_norm, normalize=normalize)
    expected = jax.tree.map(lambda p: np.zeros(p.shape), params)
    for i in range(5):
        g = jax.grad(loss)(params, jax.tree.map(lambda a: a[i], batch))  # noqa: B023
        norm = float64_norm(g)
        scale = clip_norm / (norm + 0.01) if normalize else min(1.0, clip_norm / norm)
        expected = jax.tree.map(lambda e, v: e + scale * np.asarray(v, np.float64), expected, g)  # noqa: B023
        assert found.norms[i] == pytest.approx(norm, rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found.total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=1e-6 * clip_norm)
    assert found.clipped_fraction == pytest.approx(np.mean(np.asarray(found.norms[:5]) > clip_norm))
    assert found.losses[0] == pytest.approx(
        float(loss(params, jax.tree.map(lambda a: a[0], batch))), rel=1e-5
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_sensitivity(seed, normalize):
    """Zero-out one example of random models and adversarial scales: the sum moves by at most the clip norm.

    Scales run from subnormal to overflowing gradients; the move is measured in float64 from sums of one
    other example, so that rounding of the sum itself does not hide a violation.
    """
    key = jax.random.key(seed)
    clip_norm = float(10.0 ** jax.random.uniform(key, minval=-3, maxval=3))
    params, batch = random_params(key), random_batch(key, 2)
    summed = jax.jit(functools.partial(clipped_gradient_sum, loss, clip_norm=clip_norm, normalize=normalize))
    for scale in (0.0, 1e-42, 1e-20, 1e-3, 1.0, 1e4, 1e25, 1e37, np.inf, np.nan):
        batch["scale"] = jnp.array([scale, 1e-6])
        with_it, without = (
            summed(params, batch, mask).total for mask in (jnp.array([True, True]), jnp.array([False, True]))
        )
        moved = jax.tree.map(
            lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), with_it, without
        )
        assert float64_norm(moved) <= clip_norm
        if scale == 1e4:
            assert float64_norm(moved) > clip_norm * (0.95 if normalize and clip_norm > 1 else 0.01)


@pytest.mark.parametrize("micro", [1, 2, 3, 8, 100])
def test_microbatches_change_nothing(micro, key):
    params, batch = random_params(key), random_batch(key, 8)
    mask = jnp.array([True, False] * 4)
    whole = clipped_gradient_sum(loss, params, batch, mask, clip_norm=1.0)
    parts = clipped_gradient_sum(loss, params, batch, mask, clip_norm=1.0, microbatch_size=micro)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_padding_and_poison_contribute_exactly_zero(key):
    params, batch = random_params(key), random_batch(key, 4)
    mask = jnp.array([True, True, False, False])
    clean = clipped_gradient_sum(loss, params, batch, mask, clip_norm=1.0)
    batch["x"] = batch["x"].at[2].set(jnp.nan).at[3].set(jnp.inf)
    padded = clipped_gradient_sum(loss, params, batch, mask, clip_norm=1.0)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(padded), strict=True):
        np.testing.assert_array_equal(a, b)
    batch["x"] = batch["x"].at[1].set(jnp.nan)
    poisoned = clipped_gradient_sum(loss, params, batch, mask, clip_norm=1.0)
    alone = clipped_gradient_sum(loss, params, batch, jnp.array([True, False, False, False]), clip_norm=1.0)
    for a, b in zip(jax.tree.leaves(poisoned.total), jax.tree.leaves(alone.total), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isinf(poisoned.norms[1])


def test_an_empty_batch_is_zero(key):
    found = clipped_gradient_sum(
        loss, random_params(key), random_batch(key, 3), jnp.zeros(3, bool), clip_norm=1.0
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found))


def test_memory_follows_the_microbatch(key):
    """Temporary memory of the compiled sum: 64 examples at a time against 4."""
    params = {"w": jnp.zeros((256, 256))}
    batch, mask = {"x": jnp.zeros((64, 256))}, jnp.ones(64, bool)

    def temporary(micro):
        def total(params, batch, mask):
            return clipped_gradient_sum(
                lambda p, e: jnp.sum(jnp.tanh(e["x"] @ p["w"])),
                params,
                batch,
                mask,
                clip_norm=1.0,
                microbatch_size=micro,
            ).total

        return jax.jit(total).lower(params, batch, mask).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4) < temporary(64) / 4


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_bad_clip_norm(value, key):
    with pytest.raises(ValueError, match="clip_norm"):
        clipped_gradient_sum(
            loss, random_params(key), random_batch(key, 2), jnp.ones(2, bool), clip_norm=value
        )


def test_a_loss_that_is_not_per_example_is_refused(key):
    params, batch, mask = random_params(key), random_batch(key, 4), jnp.ones(4, bool)

    def vector(params, example):
        return example["x"] @ params["w"]

    def batched(params, batch):
        return jax.vmap(loss, (None, 0))(params, batch).mean()

    with pytest.raises(ValueError, match="one number for one example"):
        clipped_gradient_sum(vector, params, batch, mask, clip_norm=1.0)
    with pytest.raises(ValueError, match="loss must"):
        clipped_gradient_sum(batched, params, batch, mask, clip_norm=1.0)
    with pytest.raises(ValueError, match="rows like mask"):
        clipped_gradient_sum(loss, params, batch, jnp.ones(5, bool), clip_norm=1.0)


def test_global_norm_does_not_overflow():
    assert global_norm({"a": jnp.array([3e30, 4e30])}) == pytest.approx(5e30)
    assert global_norm({"a": jnp.zeros(3)}) == 0
