"""Bytes counted from compiled programs whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.benchmarks.memory_traffic import bytes_moved

pytestmark = pytest.mark.optimized


def counted(function, *shapes) -> float:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return bytes_moved(jax.jit(function).lower(*arguments).compile().as_text())


def test_elementwise_is_one_pass_in_and_one_out():
    assert counted(lambda x: jnp.exp(x) + 1, (1000,)) == 8000
    assert counted(lambda x, y: x * y, (1000,), (1000,)) == 12000


def test_a_loop_counts_as_often_as_it_runs():
    """Each of ten rounds reads a row and the sum, and writes the sum: 3 x 4000 bytes, and counters."""

    def add_rows(rows):
        return lax.scan(lambda total, row: (jnp.sin(total) + row, None), rows[0], rows)[0]

    assert 120_000 <= counted(add_rows, (10, 1000)) < 140_000


def test_a_part_overwritten_is_not_the_whole():
    """Ten rows of 4 kB go into an array of 40 kB, one at a time, 16 to 28 kB a round; not 80."""

    def powers(x):
        return lax.scan(lambda carry, _: (jnp.sin(carry), carry), x, length=10)[1]

    assert 160_000 <= counted(powers, (1000,)) < 320_000


@pytest.mark.parametrize("text", ["", "HloModule nothing"])
def test_no_program_no_bytes(text):
    assert bytes_moved(text) == 0
