"""Clipped sums without the gradients of examples: equal to gradients on every kind of layer, and attacked.

Attacks are on `sum_t left_t right_t^T`, whose factors the examples are: anything can be planted there.
"""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.refusals import refused
from tests.train.runs import made
from train.clipping import ghost, parts
from train.clipping.equations import Product
from train.clipping.ghost import budget, ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clip_rows_to_grid, clipped_gradient_sum
from train.models.loss import nnx_loss

POSITIONS, CHANNELS, WORDS = 4, 6, 9
SIZE, MICRO = 6, 3


class Everything(nnx.Module):
    """One of each layer, on two small images and four words."""

    def __init__(self, rngs: nnx.Rngs):
        c = CHANNELS
        self.words = nnx.Embed(WORDS, c, rngs=rngs)
        self.places = nnx.Embed(POSITIONS, c, rngs=rngs)
        self.parities = nnx.Embed(2, c, rngs=rngs)
        self.strided = nnx.Conv(2, 4, (3, 3), strides=2, rngs=rngs)
        self.grouped = nnx.Conv(4, c, (2, 3), feature_group_count=2, kernel_dilation=2, rngs=rngs)
        self.layer_norm, self.rms_norm = nnx.LayerNorm(c, rngs=rngs), nnx.RMSNorm(c, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, c, decode=False, rngs=rngs)
        self.low_rank = nnx.LoRALinear(c, c, lora_rank=2, rngs=rngs)
        self.low_rank.lora.lora_b[...] = jax.random.normal(rngs.params(), (2, c))
        self.product = nnx.Einsum("thk,hkn->thn", (2, c // 2, 5), None, rngs=rngs)
        self.half = nnx.Linear(c, c, dtype=jnp.bfloat16, rngs=rngs)
        self.twice = nnx.Linear(c, c, use_bias=False, rngs=rngs)
        self.again = nnx.Linear(c, c, use_bias=False, rngs=rngs)
        self.turned = nnx.Param(jax.random.normal(rngs.params(), (3, c)))
        self.stacked = nnx.Param(jax.random.normal(rngs.params(), (2, c)))
        self.last = nnx.Linear(c, 3, rngs=rngs)
        self.idle = nnx.Param(jnp.ones(2))

    def __call__(self, words, image):
        x = self.words(words) + self.places(jnp.arange(POSITIONS)) + self.parities(words % 2)
        seen = self.grouped(jnp.tanh(self.strided(image)))
        x = x + seen.reshape(-1, CHANNELS).mean(axis=0, keepdims=True)
        x = x + self.attention(self.layer_norm(x))
        x = self.low_rank(self.rms_norm(x)) + self.half(x).astype(x.dtype)
        x = x + self.product(x.reshape(POSITIONS, 2, -1)).sum((1, 2))[:, None]
        x = self.twice(jnp.tanh(self.twice(x)))
        x = nnx.remat(lambda layer, y: layer(y))(self.again, x)
        x, _ = jax.lax.scan(lambda y, scale: (jnp.tanh(y * scale[None]), None), x, self.stacked[...])
        pooled = x.mean(axis=0)
        return self.last(pooled) + self.turned[...] @ pooled + self.words.attend(x).mean()


# How the parameters that have a fast path are used; the others have gradients written down, as they are used
# several times, or cost less so (a small matrix at several positions: the adapters).
TAPPED = dict.fromkeys(("places.embedding", "parities.embedding"), "Lookup")
TAPPED |= dict.fromkeys(("strided.kernel", "grouped.kernel"), "Convolution")
TAPPED |= {f"attention.{name}.kernel": "Product" for name in ("query", "key", "value", "out")}
TAPPED |= {f"{name}.kernel": "Product" for name in ("low_rank", "product", "half", "again", "last")}
TAPPED |= {"turned": "Product"}


def of_everything(model, example):
    """The scale of an example scales its gradient; its words and images decide the rest."""
    found = model(example["words"], example["image"])
    return example["scale"] * jnp.sum(jnp.sin(found) * found)


def examples():
    generator = np.random.default_rng(0)
    return {
        "words": generator.integers(0, WORDS, (SIZE, POSITIONS)).astype(np.int32),
        "image": generator.normal(size=(SIZE, 5, 7, 2)).astype(np.float32),
        "scale": np.float32([1e-3, 3.0, 0.1, np.inf, 1e4, 1.0]),
    }


def name(path) -> str:
    return ".".join(str(getattr(part, "key", "")) for part in path).rstrip(".")


@pytest.fixture
def exact_products():
    """Products of the loss itself in float32: a GPU's default has 10 bits."""
    with jax.default_matmul_precision("highest"):
        yield


def test_every_kind_of_layer(exact_products):
    """Against gradients of JAX, added up by NumPy in float64: to rounding of float32, or of bfloat16."""
    loss, params = nnx_loss(made(lambda: Everything(nnx.Rngs(0))), of_everything, (nnx.Param, nnx.LoRAParam))
    batch, mask, grid = examples(), np.arange(SIZE) < SIZE - 1, Grid(2.0, 22)
    program = ghost._program(loss, params, batch)
    paths = [name(path) for path, _ in jax.tree.leaves_with_path(params)]
    assert {paths[leaf]: type(tap.equation).__name__ for leaf, tap in program.taps.items()} == TAPPED
    options = dict(grid=grid, microbatch_size=MICRO)
    found = jax.jit(functools.partial(ghost_gradient_sum, loss, **options))(params, batch, mask)
    # One at a time: outside of loops XLA multiplies an infinity in one row by zeros between the rows, and all
    # rows' gradients of a grouped kernel are NaN (tests/train/clipping/test_clipping.py).
    of_one = functools.partial(jax.value_and_grad(loss), params)
    losses, gradients = jax.jit(lambda batch: jax.lax.map(of_one, batch))(batch)
    kept = np.isfinite(losses) & mask
    gradients = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[kept], gradients)
    squares = sum(np.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(gradients))
    target = budget(grid, sum(leaf.size for leaf in jax.tree.leaves(params)), SIZE, 1000) * grid.unit
    norms = np.sqrt(squares)
    weights = np.minimum(1, target / np.maximum(norms, 1e-300))
    clipped = weights < 1
    assert 0 < clipped.sum() < clipped.size
    np.testing.assert_allclose(found.norms[kept], norms, rtol=2**-7)  # four roundings to bfloat16
    assert np.isinf(found.norms[3]) and found.norms[5] == found.losses[5] == 0
    np.testing.assert_allclose(found.losses[kept], losses[kept], rtol=2**-7)
    assert found.clipped_fraction == pytest.approx(clipped.sum() / clipped.size)
    ours = jax.tree.leaves(jax.jit(lambda total: total.scaled(1.0))(found.total))
    for path, a, b in zip(paths, ours, jax.tree.leaves(gradients), strict=True):
        expected = np.tensordot(weights, b, 1)
        # On a GPU a number that `half` gives to later layers may be rounded to the other bfloat16.
        others = 2e-3 if jax.default_backend() == "cpu" else 2**-8
        rough = 2e-2 if path.startswith("half") else others
        atol = rough * abs(expected).max() + 1e-5
        np.testing.assert_allclose(a, expected, rtol=rough, atol=atol, err_msg=path)


HEIGHT, WIDTH = 5, 8
GRID = Grid(1.0, 8)
SUMS = ghost_gradient_sum, clipped_gradient_sum


def bilinear(params, example):
    """Its gradient is `sum_t left_t right_t^T`."""
    return jnp.sum((example["left"] @ params) * example["right"])


@functools.cache
def summed(micro: int = 2, grid: Grid = GRID):
    """The program, compiled when first used."""
    options = dict(grid=grid, microbatch_size=micro)
    return jax.jit(functools.partial(ghost_gradient_sum, bilinear, jnp.zeros((HEIGHT, WIDTH)), **options))


def drawn(seed: int, rows: int = 4, positions: int = POSITIONS) -> dict[str, np.ndarray]:
    """Factors of normal numbers, (rows, positions, ...) float32."""
    generator, sizes = np.random.default_rng(seed), {"left": HEIGHT, "right": WIDTH}
    return {n: generator.normal(size=(rows, positions, k)).astype(np.float32) for n, k in sizes.items()}


def integers(batch, mask, micro: int = 2) -> np.ndarray:
    """The total, exactly."""
    return summed(micro)(batch, np.asarray(mask)).total.units()


def moved(batch, mask, at: int, order=None, micro: int = 2) -> int:
    """Square in grid units of what example `at` changes, where the others go to other rows as well."""
    mask, order = np.array(mask), np.arange(len(mask)) if order is None else np.asarray(order)
    without = mask.copy()
    without[at] = False
    neighbour = {name: rows[order] for name, rows in batch.items()}
    change = integers(batch, mask) - integers(neighbour, without[order], micro)
    return int((change**2).sum())


def rank_one(left, right, scale=1.0):
    """(positions, ...) factors of one example with one position."""
    factors = {"left": np.zeros((POSITIONS, HEIGHT)), "right": np.zeros((POSITIONS, WIDTH))}
    factors["left"][0], factors["right"][0] = left, np.asarray(right) * scale
    return factors


def stacked(*rows):
    return {name: np.stack([row[name] for row in rows]).astype(np.float32) for name in ("left", "right")}


def on_the_edge():
    """One whose entries are all rounded down by a hair, and one that lifts each a little and one by far."""
    other = rank_one(np.ones(HEIGHT), np.full(WIDTH, 0.4999 * GRID.unit))
    canary = rank_one(np.eye(HEIGHT)[0], np.eye(WIDTH)[0], 1e3)
    canary["left"][1], canary["right"][1] = np.ones(HEIGHT), np.full(WIDTH, 1e3 * 0.01 * GRID.unit)
    return stacked(other, canary, rank_one(0, 0), rank_one(0, 0))


def cancelling(remainder: float, size: float, seed: int = 0):
    """Three positions that cancel, and one that is left."""
    generator = np.random.default_rng(seed)
    left = np.float32(generator.integers(1, 1000, HEIGHT))
    example = rank_one(left, np.float32(generator.normal(size=WIDTH)), size)
    example["left"][1:3], example["right"][1:3] = [2 * left, -3 * left], example["right"][0]
    example["left"][3], example["right"][3] = np.eye(HEIGHT)[1], np.eye(WIDTH)[1] * remainder
    return example


def test_no_neighbour_is_further_than_the_clip_norm():
    """Rounding of the total, cancellation, over- and underflow; others that move to other rows."""
    generator = np.random.default_rng(0)
    batches = [on_the_edge()]
    for size in (1e-42, 1e-20, 1e-3, 1.0, 1e20, 1e38):
        sizes = {"left": (POSITIONS, HEIGHT), "right": (POSITIONS, WIDTH)}
        rows = [{name: generator.normal(size=each) for name, each in sizes.items()} for _ in range(3)]
        rows[0]["right"] *= size
        batches.append(stacked(*rows, cancelling(100.0, min(1e12, 1e3 * size))))
    batches += [stacked(*(cancelling(100.0, 1e12, 4 * i + j) for j in range(4))) for i in range(2)]
    worst = 0
    for batch in batches:
        for at in range(4):
            for order, micro in ((None, 2), (generator.permutation(4), 3)):
                change = moved(batch, np.ones(4, bool), at, order, micro)
                assert change <= 4**GRID.bits
                worst = max(worst, change)
    assert worst > 0.9 * 4**GRID.bits


def test_parts_of_gradients_have_no_subnormal_number():
    """What some processors take for 0 is 0 everywhere; the smallest normal numbers stay as they are."""
    values = np.array([1e-40, -1e-45, 2.0**-126, -(2.0**-126), 0.0, 1.0], np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(parts.plain)(values)), [0.0, 0.0, *values[2:]])


@pytest.mark.parametrize("positions", [POSITIONS, 1])
def test_norms_and_totals_are_exact_whatever_products_are_asked_for(positions):
    """With both from 8 bits, numbers that are rounded down for the norm and up for the total win."""
    grid = Grid(1.0, 20)
    right = np.linspace(1, 2, 13)[:4, None, None] * np.full((1, positions, WIDTH), 1e3)
    batch = {"left": np.ones((4, positions, HEIGHT), np.float32), "right": right.astype(np.float32)}
    with jax.default_matmul_precision("BF16_BF16_F32"):
        for at in range(4):
            change = summed(4, grid)(batch, np.arange(4) == at).total.units()
            assert 0.99 * 4**grid.bits < (change**2).sum() <= 4**grid.bits


def test_float32_sums_are_paid_for():
    """Of 64 gradients along one entry, at 2^23 units a clip norm: rounded by 32 units each time.

    Where that is not taken off what gradients are scaled to, one of them passes the clip norm by little.
    """
    generator, grid = np.random.default_rng(4), Grid(1.0, 23)
    batch = {name: np.zeros((64, 1, n), np.float32) for name, n in (("left", HEIGHT), ("right", WIDTH))}
    found = []
    for _ in range(30):
        batch["left"][:, 0, 0] = 10.0 ** generator.uniform(-30, 30, 64)
        batch["right"][:, 0, 0] = generator.uniform(0.5, 0.99, 64) / batch["left"][:, 0, 0]
        batch["right"][0, 0, 0] *= 3
        sums = [summed(64, grid)(batch, np.arange(64) >= first).total for first in (0, 1)]
        found.append(np.subtract(*(int(s.units()[0, 0]) for s in sums)))
    assert 0.998 * 2**23 < min(found) and max(found) <= 2**23


def test_float32_sums_of_many_rows():
    """130 rows at once are added up 64 at a time, the last two as well: right to float32 of 64 terms."""
    grid, batch = Grid(1.0, 20), drawn(6, 130, 1)
    batch["right"][:, 0] *= 1e-3 / np.linalg.norm(batch["right"][:, 0], axis=1, keepdims=True)
    found = summed(130, grid)(batch, np.ones(130, bool)).total.units()
    exact = np.einsum("bk,bn->kn", *(np.float64(rows[:, 0]) for rows in batch.values())) / grid.unit
    np.testing.assert_allclose(found, exact, atol=0.5 + 70 * 2.0**-24 * 130 * 1e-2 / grid.unit)
    assert np.abs(exact).max() > 1000
    # Gradients that are written down, beside such factors.
    rows = batch["left"]
    with jax.enable_x64(True):
        wide, narrow = (parts.Whole(jnp.asarray(rows)).total(jnp.ones(130), kind) for kind in (False, True))
    np.testing.assert_allclose(wide, rows.sum(axis=0, dtype=np.float64), rtol=1e-14)
    np.testing.assert_allclose(narrow, wide, atol=70 * 2.0**-24 * np.abs(rows).sum(axis=0).max())
    assert np.any(wide != narrow)


def test_padding_and_poison_are_exactly_nothing():
    """Infinities beside zeros too: 0 x inf is no number."""
    batch = drawn(1)
    alone = integers(batch, [True, True, False, False])
    assert np.any(alone)
    batch["left"][2, 1] = np.nan
    batch["left"][3], batch["right"][3] = 0.0, 0.0
    batch["left"][3, 0, 0] = np.inf
    np.testing.assert_array_equal(integers(batch, [True, True, False, False]), alone)
    np.testing.assert_array_equal(integers(batch, [True, True, True, True]), alone)
    found = summed()(batch, np.ones(4, bool))
    assert np.isinf(found.norms[2:]).all() and np.isfinite(found.norms[:2]).all()
    empty = summed()(batch, np.zeros(4, bool))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty._replace(total=empty.total.whole)))


def test_budget():
    """All that moves a total fits into the clip norm, and what does not is refused in a line."""
    for bits, parameters, batch, depth in (
        (20, 10**6, 4096, 10**4),
        (16, 10**5, 2**20, 10**6),
        (23, 1, 1, 1),
    ):
        # Sums of |weights x factors| are at most batch x target / 2^-12; each of the two has an error of
        # gamma.
        gamma = (depth + 4) * 2.0**-53 / (1 - (depth + 4) * 2.0**-53)
        found = budget(Grid(1.0, bits), parameters, batch, depth) * (1 + 2 * batch * 2.0**12 * gamma)
        assert 2.0**bits * (1 - 1e-11) <= found + np.sqrt(parameters) < 2.0**bits
        # Eight sums of devices are rounded, for each of two neighbours by half of what 53 bits leave.
        spread = budget(Grid(1.0, bits), parameters, batch, depth, roundings=8)
        spread *= 1 + 2 * batch * 2.0**12 * gamma
        left = 8 * 2.0 ** (bits + np.ceil(np.log2(batch)) - 53)
        assert 2.0**bits * (1 - 1e-11) <= spread + np.sqrt(parameters) * (1 + left) < 2.0**bits
    for bits, parameters, batch, depth in ((8, 2**14 + 1, 1, 1), (20, 10, 2**24, 2**40)):
        message = r"^clipping must be 'per_example' here: of a clip norm of "
        refused(message, budget, Grid(1.0, bits), parameters, batch, depth)
    message = "clip_norm must be 1e-100 to 1e100 with clipping 'ghost', got 1e-101"
    refused(message, budget, Grid(1e-101, 20), 1, 1, 1)


def test_arguments_of_the_budget(monkeypatch):
    """3 microbatches of 2 rows with 4 positions each: 8 products to an entry, and 3 sums.

    In float32 only with one position, and where that is cheap.
    """
    calls = []
    monkeypatch.setattr(ghost, "budget", lambda *args: calls.append(args) or budget(*args))
    batch = {"left": np.ones((5, POSITIONS, HEIGHT)), "right": np.ones((5, POSITIONS, WIDTH))}
    alone = {name: rows[:, :1] for name, rows in batch.items()}

    def traced(batch, **options):
        options |= dict(grid=GRID, microbatch_size=2)
        run = functools.partial(ghost_gradient_sum, bilinear, jnp.zeros((HEIGHT, WIDTH)), **options)
        jax.eval_shape(run, batch, np.ones(5, bool))

    traced(batch)
    traced(alone)
    with monkeypatch.context() as patch:
        patch.setattr(ghost, "_MAX_SPENT", 1e-9)
        traced(alone)
    traced(alone, mesh=jax.make_mesh((1,), ("data",)))
    of_one = GRID, HEIGHT * WIDTH, 5, 2 + 3
    of_four = GRID, HEIGHT * WIDTH, 5, 2 * POSITIONS + 3
    assert calls == [(*of_four, 0, 0), (*of_one, 5, 0), (*of_one, 0, 0), (*of_one, 5, 3)]


def both(loss, **options):
    """Programs of the sum by ghost clipping, and of gradients of examples."""
    return [jax.jit(functools.partial(sum_of, loss, **options)) for sum_of in SUMS]


def test_options():
    """Of `clipped_gradient_sum` on the same rows: equal but for what gradients are scaled to."""
    batch = drawn(2)
    mask, given = np.array([True, True, False, False]), dict(grid=Grid(5.0, 23), microbatch_size=1)
    given |= dict(normalize=True, skip_padding=True)
    ours, theirs = (found(jnp.zeros((HEIGHT, WIDTH)), batch, mask) for found in both(bilinear, **given))
    assert 0 < ours.clipped_fraction == theirs.clipped_fraction
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-6)
    np.testing.assert_allclose(ours.total.scaled(1.0), theirs.total.scaled(1.0), rtol=1e-5, atol=1e-5)


def test_bad_input():
    batch, mask = {"left": np.zeros((2, 4, 5)), "right": np.zeros((2, 4, 8))}, np.ones(2, bool)
    run = functools.partial(ghost_gradient_sum, bilinear, jnp.zeros((5, 8)), batch, mask)
    refused(r"grid must be a train.clipping.grid.Grid, got 1.0", run, grid=1.0)
    refused("microbatch_size must be", run, grid=GRID, microbatch_size=0)
    mesh = jax.make_mesh((1,), ("data",))
    refused("skip_padding must not be True with mesh", run, grid=GRID, skip_padding=True, mesh=mesh)
    given = lambda p, e: e["left"] @ p, jnp.zeros((5, 8)), batch, mask
    refused("loss must return one number", ghost_gradient_sum, *given, grid=GRID)


def of_mixed(params, example):
    """A real matrix times complex numbers, in one operation of two dtypes."""
    numbers = (((1,), (0,)), ((), ()))
    options = dict(preferred_element_type=jnp.complex64)
    product = jax.lax.dot_general(jnp.fft.rfft(example), params, numbers, **options)
    return jnp.sum(jnp.abs(product))


def of_filtered(params, example):
    """A real kernel on complex numbers."""
    image = jnp.fft.fft(example)[None]
    kernel, layouts = params.astype(jnp.complex64), ("NWC", "WIO", "NWC")
    found = jax.lax.conv_general_dilated(image, kernel, (1,), "SAME", dimension_numbers=layouts)
    return jnp.sum(jnp.abs(found))


@pytest.mark.parametrize(("loss", "shape"), [(of_mixed, (5, 3)), (of_filtered, (2, 8, 3))])
def test_complex_numbers_have_no_fast_path(loss, shape):
    """Imaginary parts were dropped: sums wrong by 38 %; an overflowing example made zero of a whole batch."""
    generator = np.random.default_rng(6)
    params = jnp.asarray(generator.normal(size=shape), jnp.float32)
    batch, mask = generator.normal(size=(4, 3, 8)).astype(np.float32), np.ones(4, bool)
    assert not ghost._program(loss, params, batch).taps
    ours, theirs = both(loss, grid=Grid(1.0, 20))
    found, expected = (sum_of(params, batch, mask) for sum_of in (ours, theirs))
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-6)
    np.testing.assert_allclose(found.total.scaled(1.0), expected.total.scaled(1.0), atol=1e-4)
    batch[2] = 3e38
    with_it, without = (ours(params, batch, each) for each in (mask, np.arange(4) != 2))
    assert np.isinf(with_it.norms[2])
    np.testing.assert_array_equal(with_it.total.units(), without.total.units())


def complex_loss(params, example):
    return jax.lax.complex(example @ params, params[0])


def test_complex_numbers_are_refused_by_whatever_would_drop_a_part():
    batch, mask = np.ones((2, 3), np.float32), np.ones(2, bool)
    for sum_of in SUMS:
        for message, loss, dtype in (
            ("params must be arrays of real floating-point numbers, got", lambda w, x: jnp.abs(x @ w), "c8"),
            ("loss must return a real floating-point number, returned", complex_loss, "f4"),
        ):
            refused(f"{message} complex64", sum_of, loss, jnp.ones(3, dtype), batch, mask, grid=GRID)
    for refuse in (parts.plain, functools.partial(clip_rows_to_grid, grid=GRID)):
        message = r"gradient must be arrays of real .* numbers, got complex64"
        refused(message, refuse, jnp.ones((1, 3), jnp.complex64))


def written_down(positions: int, inputs: int, outputs: int, heads: int = 1) -> bool:
    shapes = (heads, positions, inputs), (heads, inputs, outputs)
    given = [SimpleNamespace(aval=np.broadcast_to(0.0, shape)) for shape in shapes]
    eqn = SimpleNamespace(invars=given, params={"dimension_numbers": (((2,), (1,)), ((0,), (0,)))})
    return parts.is_written_down(Product(eqn, 1))


def test_a_gradient_is_written_down_where_that_takes_less_time():
    """Small matrices at several positions; never at one position, nor what no cache holds at a few."""
    assert written_down(15, 32, 32) and written_down(20, 64, 32)
    assert not written_down(1, 32, 32) and not written_down(1, 512, 1)
    assert not written_down(15, 512, 512) and written_down(256, 64, 64)
    # Whatever the sizes, no more terms are added up for a norm than rounding is paid for.
    sizes = [2**k for k in range(15)]
    for positions, inputs, heads in itertools.product(sizes, sizes, sizes):
        if heads * positions**2 + 2 * inputs > 2**26:
            assert written_down(positions, inputs, inputs, heads)


def test_float32_sums_neither_overflow_nor_vanish():
    """Factors of 1e-37 and 1e37 beside each other, and one that is zero: as in float64."""
    generator = np.random.default_rng(5)
    batch = {name: generator.normal(size=(4, 1, n)) for name, n in (("left", HEIGHT), ("right", WIDTH))}
    for name, by in (("left", [1e-37, 1e37, 0, 1]), ("right", [1e37, 1e-37, 1e38, 1])):
        batch[name] = (batch[name] * np.reshape(by, (4, 1, 1))).astype(np.float32)
    found = summed(4)(batch, np.ones(4, bool))
    exact = np.einsum("bk,bn->bkn", *(np.float64(rows[:, 0]) for rows in batch.values()))
    exact /= np.maximum(1, np.linalg.norm(exact, axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(found.total.scaled(1.0), exact.sum(axis=0), atol=0.1)
    assert np.any(found.total.units())
