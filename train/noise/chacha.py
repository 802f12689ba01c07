"""ChaCha20 in programs of XLA (RFC 8439, section 2.3)."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 20
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_COLUMNS = tuple((i, i + 4, i + 8, i + 12) for i in range(4))
_DIAGONALS = tuple((i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4))


def blocks(key, counter, rounds: int = ROUNDS) -> jax.Array:
    """Return (16, blocks) uint32: ChaCha blocks of a (8,) key and four words, (blocks,) or () each.

    Source: RFC 8439, section 2.3; there the counter is the first of the four words.
    """
    return jnp.stack(after_rounds(start_of(jnp.asarray(key, jnp.uint32), counter), rounds))


def start_of(key: Iterable, counter: Iterable) -> list[jax.Array]:
    """Return the 16 words that rounds begin with, (blocks,) uint32 each."""
    counter = jnp.broadcast_arrays(*[jnp.atleast_1d(word).astype(jnp.uint32) for word in counter])
    return [jnp.full_like(counter[0], word) for word in (*_CONSTANTS, *key)] + list(counter)


def after_rounds(start: list[jax.Array], rounds: int) -> list[jax.Array]:
    """Return the 16 words of the blocks."""

    def double_round(_, words):
        for places in (*_COLUMNS, *_DIAGONALS):
            words = _quarter_round(words, *places)
        return words

    # Words as arrays of their own: one kernel a double round on a GPU, ten times as fast as rows of four.
    done = jax.lax.fori_loop(0, rounds // 2, double_round, start)
    return [word + first for word, first in zip(done, start, strict=True)]


def _quarter_round(words, a, b, c, d):
    words = list(words)
    for one, other, moved, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        words[one] = words[one] + words[other]
        words[moved] = _rotate(words[moved] ^ words[one], by)
    return words


def _rotate(words, by: int):
    return (words << by) | (words >> (32 - by))
