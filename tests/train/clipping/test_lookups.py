"""Ghost clipping of lookups: every spelling, type of index, size of table and mode, against NumPy and JAX.

Gradients are whole numbers below the clip norm, so sums have one right answer to the rounding of the grid.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.train.clipping.test_cancelling import AS_USERS_COMPILE
from train.clipping import ghost
from train.clipping.ghost import ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum

GRID = Grid(1e6, 23)
MODES = {"fill": False, "clip": True, "promise_in_bounds": False}  # -> clamped rather than dropped
TYPES = "int8 uint8 int16 uint16 int32 uint32".split()
# Around the largest number of each type of 8 and 16 bits.
SIZES = 3, 127, 128, 129, 200, 255, 256, 257, 300
LARGE = 32_767, 32_768, 32_769, 40_000, 65_535, 65_536, 65_537
ROWS, COLUMNS = 2, 2
SUMS = ghost_gradient_sum, clipped_gradient_sum


def summed(sum_of, loss, params, batch, **options):
    """Return a pytree of NumPy's float64: the sum of gradients."""
    mask = np.ones(ROWS, bool)
    program = jax.jit(lambda params, batch: sum_of(loss, params, batch, mask, grid=GRID), **options)
    found = program(params, batch)
    return jax.tree.map(lambda units: units * GRID.unit, found.total.units())


def kinds(loss, params, batch) -> set[str]:
    """Return how the parameters are used that have a fast path, and "" for the others."""
    taps = ghost._program(loss, params, batch).taps
    found = {type(tap.equation).__name__ for tap in taps.values()}
    return found | ({""} if len(taps) < len(jax.tree.leaves(params)) else set())


def edges(rows: int, dtype: str) -> np.ndarray:
    """(ROWS, positions): indices in and around the table, and the ends of the type."""
    info = np.iinfo(dtype)
    wanted = 0, 1, rows - 2, rows - 1, rows, rows + 1, -1, -rows, -rows - 1, 127, 128, info.min, info.max
    inside = [each if info.min <= each <= info.max else 0 for each in wanted]
    return np.array([inside, inside[::-1]]).astype(dtype)


def looked_up(table, ids, mode: str):
    """`gather` itself: without what `jnp` does to negative indices."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, ids[:, None], numbers, (1, COLUMNS), mode=mode)


def expected(rows: int, ids, weights, clip: bool) -> np.ndarray:
    total = np.zeros((rows, COLUMNS))
    for each, weight in zip(ids.ravel().tolist(), np.broadcast_to(weights, ids.shape).ravel(), strict=True):
        if clip or 0 <= each < rows:
            total[min(max(each, 0), rows - 1)] += weight
    return total


def of_tables(dtype: str, sizes, mode: str):
    """Return (loss, parameters, batch, right sums) of lookups in tables of these numbers of rows."""
    batch = {str(rows): edges(rows, dtype) for rows in sizes}
    params = {name: np.zeros((int(name), COLUMNS), np.float32) for name in batch}
    weights = 1.0 + np.arange(next(iter(batch.values())).shape[1])

    def loss(params, example):
        # Zero, not NaN, of indices that fill in NaN.
        each = (jnp.nan_to_num(looked_up(params[name], example[name], mode)) for name in params)
        found = [rows.sum(1) @ jnp.float32(weights) for rows in each]
        return sum(found, jnp.zeros(()))

    return loss, params, batch, {n: expected(int(n), ids, weights, MODES[mode]) for n, ids in batch.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_rows_of_every_type_and_size(dtype, mode):
    """The attack of int8 and 200 rows: the number of the last row is negative in the type of the index."""
    for rows in SIZES + LARGE:
        loss, params, batch, _ = of_tables(dtype, (rows,), mode)
        (tap,) = ghost._program(loss, params, batch).taps.values()
        for ids in batch[str(rows)]:
            found = tap.equation.factors(jnp.asarray(ids)[:, None], jnp.zeros((ids.size, COLUMNS))).rows
            wide = ids.astype(np.int64)
            inside = (wide >= 0) & (wide < rows) | MODES[mode]
            np.testing.assert_array_equal(found, np.where(inside, wide.clip(0, rows - 1), -1), f"{rows} rows")


def test_sums_of_narrow_indices():
    """As users compile them: XLA's older loops write beyond narrow indices' tables."""
    loss, params, batch, right = of_tables("int8", (200,), "fill")
    assert kinds(loss, params, batch) == {"Lookup"}
    for sum_of in SUMS:
        found = summed(sum_of, loss, params, batch, compiler_options=AS_USERS_COMPILE)
        np.testing.assert_allclose(found["200"], right["200"], atol=1.0)


def one_by_one(table, ids):
    return jax.vmap(lambda i: table[i])(ids)


def sliced(table, ids):
    return jax.vmap(lambda i: lax.dynamic_slice(table, (i, 0), (1, table.shape[1]))[0])(ids)


SPELLINGS = {
    "table[ids]": lambda t, i: t[i],
    "unsigned": lambda t, i: t[i.astype(jnp.uint8)],
    "vmapped": one_by_one,
    "dynamic_slice": sliced,
    "a scalar": lambda t, i: t[i[0]],
    "a scalar, dynamic_slice": lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 1),
    "take": lambda t, i: jnp.take(t, i, axis=0, fill_value=0),
    "take, clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "take, wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "columns": lambda t, i: jnp.take(t, i % 2, axis=1, mode="clip"),
    "at, fill": lambda t, i: t.at[i].get(mode="fill", fill_value=0),
    "two axes of indices": lambda t, i: t[i.reshape(2, -1)],
    "entries": lambda t, i: t[i, (i + 1) % 4],
    "three axes": lambda t, i: t.reshape(4, 2, 3)[i, 1],
    "middle axis": lambda t, i: jnp.take(t.reshape(2, 4, 3), i, axis=1, mode="clip"),
    "one row": lambda t, i: t.reshape(1, 24)[i * 0],
}


FAST = {"table[ids]", "unsigned", "a scalar", "a scalar, dynamic_slice", "at, fill", "two axes of indices"}
FAST |= {"take", "take, clip", "take, wrap", "one row"}  # rows along the first axis


def test_every_spelling():
    """Also of indices out of range, as each spelling treats them; sums and norms of gradients of JAX."""
    ids = np.random.default_rng(0).integers(-9, 9, (ROWS, 4)).astype(np.int32)
    batch = {"ids": np.where(np.arange(4) < 2, ids % 4, ids), "scale": np.float32([1.0, 3.0])}
    shape = (4, 6)
    params = {name: np.float32(np.random.default_rng(1).normal(size=shape)) for name in SPELLINGS}

    def loss(params, example):
        found = [jnp.sin(of(params[name], example["ids"])) for name, of in SPELLINGS.items()]
        return example["scale"] * sum(jnp.vdot(x.ravel(), 1.0 + jnp.arange(float(x.size))) for x in found)

    taps = ghost._program(loss, params, batch).taps
    assert kinds(loss, params, batch) == {"Lookup", ""} and {sorted(SPELLINGS)[leaf] for leaf in taps} == FAST
    ours, theirs = (summed(sum_of, loss, params, batch) for sum_of in SUMS)
    for name in SPELLINGS:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1.0, err_msg=name)


def test_the_norm_of_a_row_that_comes_several_times():
    """Its gradients add up before they are squared."""
    ids, table = np.array([[1, 1, 1, 2], [0, 1, 2, 3]], np.int32), np.ones((300, 16), np.float32)
    given = lambda t, i: t[i].sum(), table, ids, np.ones(2, bool)
    norms = [jax.jit(functools.partial(sum_of, given[0], grid=GRID))(*given[1:]).norms for sum_of in SUMS]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)
    np.testing.assert_allclose(norms[1], 4 * np.sqrt([10, 4]), rtol=1e-6)
