"""Ghost clipping inside `jax.lax.scan` and `jax.checkpoint`: the gradients of JAX, none written down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from train.clipping import equations, ghost, parts
from train.clipping.ghost import ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.rows_apart import programs_in

pytestmark = pytest.mark.usefixtures("default_promotion")

ROWS, LAYERS, POSITIONS, WIDTH, TABLE = 5, 3, 2, 40, 70
GRID = Grid(1.0, 20)
MASK = np.ones(ROWS, bool)


def drawn(*shape):
    generator = np.random.default_rng(len(shape) + shape[-1])
    return (generator.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


PARAMS = {
    "layers": drawn(LAYERS, WIDTH, WIDTH),
    "turned": drawn(WIDTH, LAYERS, WIDTH),  # scanned over its second axis
    "scales": np.ones((LAYERS, WIDTH), np.float32),
    "outer": drawn(2, LAYERS, WIDTH, WIDTH),  # a scan in a scan
    "same": drawn(WIDTH, WIDTH),  # of every pass
    "recomputed": drawn(WIDTH, WIDTH),
    "table": drawn(TABLE, WIDTH),  # rows of which each pass takes
    "kernels": drawn(LAYERS, 3, 4, 4),
    "handed on": drawn(WIDTH, WIDTH),
}
# Parameter -> equation, and the places of the programs that it is in.
TAPPED = {
    "kernels": ("Convolution", ["Stacked"]),
    "layers": ("Product", ["Stacked"]),
    "outer": ("Product", ["Stacked", "Stacked"]),
    "recomputed": ("Product", []),
    "same": ("Product", ["Repeated"]),
    "table": ("Lookup", ["Repeated"]),
    "turned": ("Product", ["Stacked"]),
}


def rows():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, POSITIONS, WIDTH)).astype(np.float32)
    ids = generator.integers(0, TABLE, (ROWS, LAYERS)).astype(np.int32)
    ids[0] = 7  # in every pass the same row
    return {"x": x, "ids": ids, "scale": np.float32([1e-3, 3.0, 0.1, 100.0, 1.0])}


def loss(params, example):
    """Every kind of use; what all passes share is used at a single position of each."""

    def layer(x, each):
        kernel, turned, scale, word, window = each
        x = jnp.tanh((x @ kernel) * scale + x @ turned.T)
        first = jnp.tanh(x[0] @ params["same"] + params["table"][word])
        seen = lax.conv(first.reshape(1, 4, -1), window.transpose(2, 1, 0), (1,), "SAME")
        return x.at[0].add(first + seen.reshape(-1)), first.sum()

    @jax.checkpoint
    def again(x):
        return jnp.tanh(x @ params["recomputed"])

    def of_two(x, kernels):
        return lax.scan(jax.checkpoint(lambda x, k: (jnp.sin(x @ k), None), prevent_cse=False), x, kernels)

    def handed(carried, _):
        x, kernel = carried
        return (jnp.sin(x @ kernel), 0.5 * kernel), None

    scanned = params["layers"], params["turned"].swapaxes(0, 1), params["scales"]
    x, firsts = lax.scan(layer, example["x"], (*scanned, example["ids"], params["kernels"]), reverse=True)
    x, _ = lax.scan(of_two, again(x), params["outer"])
    (x, _), _ = lax.scan(handed, (x, params["handed on"]), None, length=2)
    return example["scale"] * (jnp.sum(x**2) + firsts.sum())


def kinds(program):
    found = {}
    for leaf, tap in program.taps.items():
        equation, around = tap.equation, []
        while isinstance(equation, equations.Stacked | equations.Repeated):
            around.append(type(equation).__name__)
            equation = equation.inner
        found[sorted(PARAMS)[leaf]] = type(equation).__name__, around
    return found


def summed(sum_of, params, batch, of=loss, mask=MASK):
    return jax.jit(lambda params, batch: sum_of(of, params, batch, mask, grid=GRID))(params, batch)


def test_norms_and_sums_are_those_of_gradients_of_examples():
    batch = rows()
    assert kinds(ghost._program(loss, PARAMS, batch)) == TAPPED
    ours, theirs = (summed(sum_of, PARAMS, batch) for sum_of in (ghost_gradient_sum, clipped_gradient_sum))
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=5e-7)
    scale = ghost.suits(loss, PARAMS, batch, grid=GRID)[1]
    for name, units in ours.total.units().items():
        expected = scale * theirs.total.units()[name]
        # Gradients of examples are truncated to whole units each.
        np.testing.assert_allclose(units, expected, rtol=1e-5, atol=ROWS + 8, err_msg=name)


def recurrent(kernel, example):
    """Each pass has the same input and cotangent: the outer products of the passes are one direction."""
    x = example["x"]
    return jnp.sum(lax.scan(lambda _, x: (x, x @ kernel), x, x[None].repeat(8, 0))[1])


def test_passes_of_one_matrix_add_up():
    """Attack: norms of passes by Pythagoras are sqrt(8) too short for aligned ones, which are clipped less.

    Where passes count as heads, one example moves the sum by 2.8 clip norms.
    """
    kernel, batch = np.zeros((WIDTH, WIDTH), np.float32), {"x": np.ones((ROWS, WIDTH), np.float32)}
    found = summed(ghost_gradient_sum, kernel, batch, recurrent, np.arange(ROWS) == 0)
    moved = np.sqrt(np.square(found.total.units().astype(np.float64)).sum()) / 2**GRID.bits
    assert 0.99 < moved <= 1.0


def largest(program) -> int:
    """Entries of the largest array of a program."""
    sizes = [0]
    for eqn in getattr(program, "jaxpr", program).eqns:
        sizes += [var.aval.size for var in eqn.outvars if hasattr(var.aval, "size")]
        sizes += map(largest, programs_in(eqn.params))
    return max(sizes)


def deep(kernels, example):
    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel), None

    return jnp.sum(lax.scan(jax.checkpoint(layer, prevent_cse=False), example["x"], kernels)[0] ** 2)


def unrolled(kernels, example):
    x = example["x"]
    for kernel in kernels:
        x = x + jnp.tanh(x @ kernel)
    return jnp.sum(x**2)


def fast_share(model, batch, of):
    graph, params, others = nnx.split(model, nnx.Param, ...)
    return ghost.suits(
        lambda params, example: of(nnx.merge(graph, params, others), example), params, batch, grid=GRID
    )[0]


class Layers(nnx.Module):
    """Four dense layers, made and run by transformations of nnx."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0)
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def test_a_scan_of_remat_takes_the_memory_of_its_layers_unrolled():
    """No gradient of an example is in the program; gradients written down are four times as much memory."""
    width, layers, size = 128, 4, 16
    kernels, batch = drawn(layers, width, width), {"x": np.zeros((size, POSITIONS, width), np.float32)}

    def lowered(sum_of, of, params):
        options = dict(grid=GRID, microbatch_size=size)
        return jax.jit(lambda p, b: sum_of(of, p, b, np.ones(size, bool), **options)).trace(params, batch)

    def memory(traced):
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    scanned = lowered(ghost_gradient_sum, deep, kernels)
    assert largest(scanned.jaxpr) < size * kernels.size / 4
    apart = lowered(ghost_gradient_sum, unrolled, list(kernels))
    assert memory(scanned) < 1.25 * memory(apart)
    assert memory(lowered(clipped_gradient_sum, deep, kernels)) > 4 * memory(scanned)


@pytest.mark.parametrize("of", [deep, unrolled])
def test_sums_of_microbatches_are_added_up_one_at_a_time(monkeypatch, of):
    """The same integers, without a second sum of all layers in memory: by passes of a scan, by parameters."""
    width, size, mask = 128, 16, np.arange(16) % 4 > 0
    kernels, batch = drawn(LAYERS, width, width), {"x": drawn(size, POSITIONS, width)}
    params, found = kernels if of is deep else list(kernels), []
    for many in (0, kernels.size):
        monkeypatch.setattr(parts, "_MANY", many)
        options = dict(grid=GRID, microbatch_size=4)
        run = jax.jit(lambda p, b, o=options: ghost_gradient_sum(of, p, b, mask, **o).total.values)
        program = run.lower(params, batch).compile()
        found.append((program.memory_analysis().temp_size_in_bytes, program(params, batch)))
    (memory, ours), (of_whole, theirs) = found
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert memory < 0.8 * of_whole


@pytest.mark.parametrize("entries", [7, 64, 1000])
def test_squares_of_parts_add_up(monkeypatch, entries):
    """Of gradients that are written down; also where no number of parts divides their size."""
    gradients = drawn(ROWS, LAYERS, 8, 31)
    monkeypatch.setattr(parts, "_AT_ONCE", entries)
    with jax.enable_x64(True):
        (square, _) = parts.Whole(jnp.asarray(gradients)).norms()
        assert square.dtype == np.float64
    np.testing.assert_allclose(square, np.square(np.float64(gradients)).sum((1, 2, 3)), rtol=1e-14)


def test_layers_and_recurrent_cells_of_nnx():
    """All but biases: of a scan of remat, and of `nnx.RNN`."""
    batch = {"x": np.zeros((ROWS, POSITIONS, WIDTH), np.float32)}
    found = fast_share(Layers(nnx.Rngs(0)), batch, lambda model, example: model(example["x"]).sum())
    assert found == WIDTH / (WIDTH + 1)
    cell = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    found = fast_share(
        cell, batch, lambda model, example: model(example["x"], initial_carry=jnp.zeros(WIDTH)).sum()
    )
    assert found > 0.95
