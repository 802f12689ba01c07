"""Per-example clipping: sensitivity, masks, microbatches, odd gradients, bad losses."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refused
from train.clipping.grid import Grid
from train.clipping.joined import Layout
from train.clipping.per_example import clip_rows_to_grid, clipped_gradient_sum, global_norm

SIZES = {"w": (3, 4), "b": (4,)}
GRID = Grid(1.0, 20)


def generator_of(key) -> np.random.Generator:
    """Of NumPy: draws and single rows need no programs of their own."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def random_params(key):
    generator = generator_of(key)
    return {name: np.float32(generator.normal(size=shape)) for name, shape in SIZES.items()}


def loss(params, example):
    """A small network with a tanh layer; the scale of an example scales its gradient."""
    hidden = jnp.tanh(example["x"] @ params["w"] + params["b"])
    return example["scale"] * jnp.sum(hidden * example["y"])


value_of, gradient_of = jax.jit(loss), jax.jit(jax.grad(loss))


SIZE = 8  # of the batches of most tests, which so have programs in common


@functools.cache
def summed(clip_norm: float = 1.0, normalize: bool = False):
    """The program of a sum on a grid of 20 bits, and of the same in float32; traced once for all tests."""
    options = dict(grid=Grid(clip_norm, 20), normalize=normalize)

    def both(params, batch, mask):
        found = clipped_gradient_sum(loss, params, batch, mask, **options)
        return found, found.total.scaled(1.0)

    return jax.jit(both)


def random_batch(key, size=SIZE):
    generator = generator_of(key).spawn(1)[0]
    x, y = (np.float32(generator.normal(size=(size, width))) for width in (3, 4))
    return {"x": x, "y": y, "scale": np.ones(size, np.float32)}


def float64_norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree))))


CLIP_NORMS = 1e-3, 1.0, 50.0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
def test_against_a_plain_loop(clip_norm, normalize, key):
    params, batch = random_params(key), random_batch(key)
    mask = np.arange(SIZE) < 5
    found, total = summed(clip_norm, normalize)(params, batch, mask)
    expected = jax.tree.map(lambda p: np.zeros(p.shape), params)
    for i in range(5):
        g = gradient_of(params, jax.tree.map(lambda a: a[i], batch))  # noqa: B023
        norm = float64_norm(g)
        scale = clip_norm / (norm + 0.01) if normalize else min(1.0, clip_norm / norm)
        expected = jax.tree.map(lambda e, v: e + scale * np.asarray(v, np.float64), expected, g)  # noqa: B023
        assert found.norms[i] == pytest.approx(norm, rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=6e-6 * clip_norm)
    assert found.clipped_fraction == pytest.approx(np.mean(np.asarray(found.norms[:5]) > clip_norm))
    first = jax.tree.map(lambda a: a[0], batch)
    assert found.losses[0] == pytest.approx(float(value_of(params, first)), rel=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 4 else pytest.mark.slow) for seed in range(12)]
)
def test_sensitivity(seed, normalize):
    """Zero-out one example of random models and adversarial scales: the sum moves by at most the clip norm.

    Scales run from subnormal to overflowing gradients; the move is measured in float64 from sums of one
    other example, so that rounding of the sum itself does not hide a violation.
    """
    key = jax.random.key(seed)
    clip_norm = CLIP_NORMS[seed % 3]
    params, batch, first = random_params(key), random_batch(key), np.arange(SIZE) < 1
    other = np.arange(SIZE) == 1
    for scale in (0.0, 1e-42, 1e-20, 1e-3, 1.0, 1e4, 1e25, 1e37, np.inf, np.nan):
        batch = batch | {"scale": np.where(first, np.float32(scale), np.float32(1e-6))}
        masks = first | other, other
        with_it, without = (summed(clip_norm, normalize)(params, batch, mask)[1] for mask in masks)
        moved = jax.tree.map(lambda a, b: np.subtract(a, b, dtype=np.float64), with_it, without)
        assert float64_norm(moved) <= clip_norm
        if scale == 1e4:
            assert float64_norm(moved) > clip_norm * (0.95 if normalize and clip_norm > 1 else 0.01)


@pytest.mark.parametrize("micro", [1, 7, 60])
def test_microbatches_of_any_size_add_up_to_the_integer(micro):
    """Against gradients that are clipped one by one in NumPy, cut to the grid and added up as integers."""
    grid = Grid(0.32, 20)
    x = np.random.default_rng(1).integers(-4, 5, (60, 64)).astype(np.float32) / 64  # exact in any order
    run = jax.jit(functools.partial(clipped_gradient_sum, jnp.vdot, grid=grid, microbatch_size=micro))
    found = run(np.zeros(64, np.float32), x, np.arange(60) < 57)
    assert 0.2 < float(found.clipped_fraction) < 0.8
    x = x[:57].astype(np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    units = np.trunc(x * np.minimum(1, 0.32 / norms) * (1 - 2.0**-24) / grid.unit).astype(np.int64)
    np.testing.assert_array_equal(found.total.units(), units.sum(0))


def test_padding_and_poison_contribute_exactly_zero(key):
    params, batch = random_params(key), random_batch(key)
    mask = np.arange(SIZE) < 2
    clean, _ = summed()(params, batch, mask)
    batch = jax.tree.map(np.copy, batch)  # JAX may read the first one later, where it lies
    batch["x"][2], batch["x"][3] = np.nan, np.inf
    padded, _ = summed()(params, batch, mask)
    chex.assert_trees_all_equal(clean, padded)
    batch = jax.tree.map(np.copy, batch)
    batch["x"][1] = np.nan
    poisoned, _ = summed()(params, batch, mask)
    alone, _ = summed()(params, batch, np.arange(SIZE) < 1)
    chex.assert_trees_all_equal(poisoned.total, alone.total)
    assert np.isinf(poisoned.norms[1])
    empty, _ = summed()(params, batch, np.zeros(SIZE, bool))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty._replace(total=empty.total.whole)))


def test_bad_input(key):
    params, batch = random_params(key), random_batch(key, 4)

    def of(loss, rows=4, grid=GRID):
        return clipped_gradient_sum(loss, params, batch, jnp.ones(rows, bool), grid=grid)

    refused("one number for one example", of, lambda params, example: example["x"] @ params["w"])
    refused("raised by loss", of, lambda params, rows: jax.vmap(loss, (None, 0))(params, rows).mean())
    refused(r"grid must be a train.clipping.grid.Grid, got 1.0", of, loss, grid=1.0)
    refused("rows like mask", of, loss, rows=5)
    for value in [0.0, -1.0, float("inf"), float("nan"), "1"]:
        refused("clip_norm", Grid, value, 20)


def exact_norm(counts) -> int:
    """Squared norm in grid units, in Python integers."""
    return sum(int(n) ** 2 for leaf in jax.tree.leaves(counts) for n in np.ravel(leaf))


@pytest.mark.parametrize(
    ("dtype", "jitted"),
    [(jnp.float32, True), (jnp.float16, True), (jnp.bfloat16, True), (jnp.float32, False)],
)
def test_every_power_of_two_is_clipped(dtype, jitted):
    """Gradients with an entry above 8.5e37 once counted as norm 0 and passed unclipped (2^126, 2^127 here).

    From the smallest subnormal to the largest float, alone and seven times: never beyond the clip norm, and
    above it within one part in a thousand of it.
    """
    info = jnp.finfo(dtype)
    smallest = int(np.log2(float(info.smallest_subnormal)))
    powers = np.ldexp(1.0, np.arange(smallest, info.maxexp))
    # Of one shape, whatever the kind, so that all are clipped by the same programs.
    program = jax.jit(clip_rows_to_grid, static_argnames=("grid", "normalize"))
    powers = np.append(powers, np.full(300 - powers.size, float(info.max)))
    for normalize, entries in itertools.product((False, True), (1, 7)):
        gradients = {"a": np.where(np.arange(7) < entries, powers[:, None], 0.0).astype(dtype)}
        clipper = program if jitted else clip_rows_to_grid
        kept, counts, norms, _ = clipper(gradients, GRID, normalize=normalize)
        squares = np.array([exact_norm(row) for row in np.asarray(counts["a"])], dtype=float)
        assert (squares <= 2.0**40).all()
        assert np.asarray(kept).all()
        long = powers >= 1.0
        assert (squares[long] >= (0.998 * 2.0**40 if not normalize else 0.97 * 2.0**40)).all()
        finite = np.asarray(norms)[np.isfinite(norms)]
        expected, atol = powers * np.sqrt(entries), np.sqrt(entries) * 2.0**-126
        np.testing.assert_allclose(finite, expected[: len(finite)], rtol=1e-6, atol=atol)


def test_the_guard_refuses_what_scaling_got_wrong(monkeypatch):
    """Whatever the norm is thought to be, what is summed is checked: a norm of half or NaN gives zero."""

    @jax.jit
    def clipped(wrong):
        monkeypatch.setattr("train.clipping.per_example.global_norm", lambda tree: wrong * global_norm(tree))
        return clip_rows_to_grid({"a": jnp.full((1, 5), 3.0)}, GRID)

    assert clipped(1.0)[0]
    for wrong in (0.5, 0.999, np.nan):
        kept, counts, *_ = clipped(wrong)
        assert not kept
        assert exact_norm(counts) == 0


def test_a_loss_that_is_not_finite_counts_as_zero_whatever_its_gradient():
    """Mutant 18: a NaN loss with a finite gradient."""

    @jax.custom_jvp
    def odd(x):
        return x

    odd.defjvp(lambda primals, tangents: (primals[0] * jnp.nan, tangents[0]))
    sum_of = jax.jit(functools.partial(clipped_gradient_sum, lambda p, e: odd(p @ e), grid=GRID))
    found = sum_of(np.ones(2, np.float32), np.ones((3, 2), np.float32), np.ones(3, bool))
    assert not np.any(found.total.units())


def test_no_work_for_padding_and_the_same_bits(key):
    """Also where real examples are not the first ones; nothing is called after the last microbatch."""
    params, batch, called = random_params(key), random_batch(key, 11), []

    def counted(params, example):
        jax.debug.callback(lambda: called.append(1))  # once a microbatch
        return loss(params, example)

    def summed(skip_padding):
        options = dict(grid=GRID, microbatch_size=4, skip_padding=skip_padding)
        found = functools.partial(clipped_gradient_sum, **options)
        return jax.jit(lambda mask: found(counted, params, batch, mask))

    skipping, constant = summed(True), summed(False)
    for real in ([], [0, 1, 2], [0, 1, 2, 3, 4], [1, 7, 10], range(11)):
        called.clear()
        mask = np.isin(np.arange(11), list(real))
        skipped = jax.block_until_ready(skipping(mask))
        jax.effects_barrier()
        assert len(called) == (max(real) // 4 + 1 if len(real) else 0)
        whole = jax.block_until_ready(constant(mask))
        jax.effects_barrier()
        assert len(called) == 3 + (max(real) // 4 + 1 if len(real) else 0)
        chex.assert_trees_all_equal(skipped, whole)


def test_arrays_that_are_joined_have_the_sums_of_separate_ones():
    """Columns go back to their parameter, whichever are side by side; one alone is not joined."""
    generator = np.random.default_rng(3)
    tree = {"a": (3, 2), "b": (), "c": (2**14 + 1,), "d": (5,)}
    rows = {name: generator.normal(size=(4, *shape)) for name, shape in tree.items()}
    expected = {name: array.sum(0) for name, array in rows.items()}
    for apart in ([], [0], [1, 3], [0, 1, 3]):
        layout = Layout.of(expected, apart)
        arrays = layout.join([jnp.asarray(array) for array in rows.values()])
        sums = [array.sum(0) for array in arrays]
        chex.assert_trees_all_equal_shapes(sums, layout.zeros())
        chex.assert_trees_all_close(layout.split(sums), expected, atol=1e-5)
        assert len(arrays) == 4 - max(0, 2 - len(apart))


def test_memory_follows_the_microbatch():
    """Temporary memory of the compiled sum: 64 examples at a time against 4."""
    given = {"w": jnp.zeros((256, 256))}, {"x": jnp.zeros((64, 256))}, jnp.ones(64, bool)

    def wide(params, example):
        return jnp.sum(jnp.tanh(example["x"] @ params["w"]))

    def temporary(micro):
        run = functools.partial(clipped_gradient_sum, wide, grid=GRID, microbatch_size=micro)
        return jax.jit(run).lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4) < temporary(64) / 4


def test_no_sum_exceeds_the_clip_norm_at_batch_4096():
    """Sums of float32 moved by 1 + 3.7e-5 clip norms here: above the 1e-5 that was left for rounding.

    The canary's part of an integer sum is its own integers, whatever the others are.
    """
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4096, 64)).astype(np.float32) + 3
    rows[0] = 7.0

    def linear(params, example):
        return params @ example

    of_all = jax.jit(functools.partial(clipped_gradient_sum, linear, grid=GRID, microbatch_size=512))
    mask = np.ones(4096, bool)
    others = mask.copy()  # another array: JAX reads the first one later, where it lies
    others[0] = False
    with_it, without = (of_all(np.zeros(64, np.float32), rows, each).total for each in (mask, others))
    a, b = with_it.units(), without.units()
    assert 0.999 * 2**40 < exact_norm([a - b]) <= 2**40
    assert np.abs(a).max() > 2**28  # the sum itself is long


def test_global_norm_does_not_overflow():
    assert global_norm({"a": jnp.array([3e30, 4e30])}) == pytest.approx(5e30)
    assert global_norm({"a": jnp.array([1.7e38, 1e-40])}) == pytest.approx(1.7e38)
    assert global_norm({"a": jnp.zeros(3)}) == 0
