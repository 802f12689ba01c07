"""Large arrays are drawn piece by piece: the integers of whole ones, with the memory of a piece."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedInverse, BandedToeplitz, BufferedToeplitz
from tests.train.noise.test_redrawn import KEY, LEVELS
from tests.train.runs import flat
from train.noise import pieces, recursion, redrawn
from train.noise.normals import Cut
from train.noise.pieces import Pieces

# Pieces of one and of several rows, over two axes, of a prime number of rows; one too small to be cut.
SHAPES = {"a": (12, 10), "b": (6, 5, 7, 3), "c": (31, 8), "d": (9,), "e": ()}
STRATEGIES = {
    "one band": BandedToeplitz.square_root(1),
    "bands": BandedToeplitz.square_root(4),
    "inverse": BandedInverse.bisr(iterations=12, bands=4),
    "buffers": BufferedToeplitz((0.9, 0.5), (0.2, 0.1), 12),
}


@pytest.fixture
def small(monkeypatch):
    """Pieces of at most 40 numbers."""

    def of(most: int) -> None:
        monkeypatch.setattr(pieces, "_MOST", dict.fromkeys(("cpu", "others"), most))
        monkeypatch.setattr(pieces, "_LEAST", 1)

    return of


def integers(strategy, draw, state, params):
    step = jax.jit(lambda state: draw(strategy, LEVELS, state, params))
    for _ in range(6):
        found, state = step(state)
        yield flat((found, state.recent))


@pytest.mark.parametrize("name", STRATEGIES)
def test_pieces_have_the_integers_of_whole_arrays(small, name):
    """And what is kept of them, over more steps than there are bands; so has noise that is drawn again."""
    strategy, params = STRATEGIES[name], {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    begin = {recursion.draw: functools.partial(recursion.init, strategy, params, KEY)}
    if name == "inverse":
        begin[redrawn.draw] = functools.partial(redrawn.init, params, KEY)
    whole = [list(integers(strategy, draw, state(), params)) for draw, state in begin.items()]
    small(40)
    assert [Pieces.of(shape).number for shape in SHAPES.values()] == [3, 30, 31, 1, 1]
    found = [list(integers(strategy, draw, state(), params)) for draw, state in begin.items()]
    for ours, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_pieces_of_a_part_are_the_part(small):
    """What a device has of an array, any axis cut: each number is in one piece, where it stands."""
    small(40)
    for whole, part, begin in (
        ((6, 10, 14), (3, 10, 7), (3, 0, 7)),
        ((8, 60), (2, 60), (4, 0)),
        ((128,), (64,), (64,)),
        ((7, 50), (7, 50), (0, 0)),
    ):
        cut = Cut(whole, part, begin)
        places = np.arange(math.prod(whole)).reshape(whole)
        own = places[tuple(slice(b, b + n) for b, n in zip(begin, part, strict=True))]
        found = Pieces.of(cut)
        assert found.number > 1 and math.prod(found.shape) <= 40
        met = []
        for number in range(found.number):
            piece = found.at(number)
            at = tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.shape, strict=True))
            met.append(places[at].reshape(-1))
        np.testing.assert_array_equal(np.concatenate(met), own.reshape(-1))


def test_a_piece_that_would_be_tiny_is_not_made(monkeypatch):
    """A prime number of rows, each of a few numbers, would be a loop of as many turns."""
    monkeypatch.setattr(pieces, "_MOST", dict.fromkeys(("cpu", "others"), 2**13))
    assert Pieces.of((10**12,)).shape == (8000,)  # at once, though a trillion rows could be counted
    assert Pieces.of((10_007, 3)).number == 1 and Pieces.of((10_007, 2**12)).number == 10_007


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_array_of_the_program_is_as_large_in_float64(small, name):
    """Normals, their words and sums of earlier vectors are those of a piece."""
    strategy, params = STRATEGIES[name], jax.ShapeDtypeStruct((64, 1000), jnp.float32)
    state = jax.eval_shape(lambda: recursion.init(strategy, jnp.zeros((64, 1000)), KEY))
    small(2000)
    draw = jax.jit(lambda state: recursion.draw(strategy, LEVELS, state, params), donate_argnums=0)
    temporary = draw.lower(state).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 64_000
