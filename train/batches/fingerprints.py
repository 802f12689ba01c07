"""Digests of data that copy no file and, of huge ones, read only a part; what they then cover is said here.

A fingerprint keeps a run from going on with other data by mistake. It is kept under the run's secret key and
protects nothing against who may write to the run's folder.

content   every byte of every row, read once in pieces.
sampled   the number of rows, `SAMPLED_ROWS` of them evenly spaced (the first and the last among them), and of
          each file its size and the time of its last modification. A change is not seen if it leaves all of
          these alone: of rows in between, by who sets the time back or on a file system that keeps none. The
          other way round a file that was copied or touched is refused though it holds the same.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..clipping.rows_apart import programs_in

CONTENT, SAMPLED = "content", "sampled"
CONTENT_LIMIT = 2**32
"""Bytes up to which all content is read where nobody says otherwise: seconds."""
SAMPLED_ROWS = 1024
_AT_ONCE = 2**24  # bytes


def way(given: str | None, num_bytes: int) -> str:
    """ "content" or "sampled", by what is asked for, or else by size; ValueError for something else."""
    if given not in (None, CONTENT, SAMPLED):
        raise ValueError(f"fingerprint must be 'content' or 'sampled', was {given!r}")
    return given or (CONTENT if num_bytes <= CONTENT_LIMIT else SAMPLED)


def pieces(array: np.ndarray) -> Iterable[np.ndarray]:
    """Rows of an array, some at a time."""
    size = max(1, _AT_ONCE // max(1, array.nbytes // max(1, len(array))))
    return (array[first : first + size] for first in range(0, len(array), size))


def of_arrays(arrays) -> str:
    """Of dtypes, shapes and all content of a pytree of arrays (rows, ...)."""
    content = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(arrays):
        content.update(f"{leaf.dtype}{leaf.shape}".encode())
        for piece in pieces(leaf):
            content.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def of_rows(gather: Callable[[np.ndarray], Any], places: np.ndarray, about: str, at_once: int) -> str:
    """Of a text and of the rows at these places, `at_once` of them in memory."""
    content = hashlib.blake2b(about.encode(), digest_size=16)
    for first in range(0, len(places), at_once):
        content.update(of_arrays(gather(places[first : first + at_once])).encode())
    return content.hexdigest()


def evenly(length: int) -> np.ndarray:
    """Places of `SAMPLED_ROWS` rows, of all where they are fewer."""
    return np.unique(np.linspace(0, length - 1, min(length, SAMPLED_ROWS)).round().astype(np.int64))


def of_program(traced: jax.stages.Traced) -> str:
    """Of what is computed and of all constants, which JAX may keep in the text or beside it."""
    content = hashlib.sha256(traced.lower().as_text().encode())
    for value in _constants(traced.jaxpr):
        if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        content.update(f"{array.dtype} {array.shape}\n".encode() + array.tobytes())
    return content.hexdigest()


def _constants(part) -> Iterable[Any]:
    """Constants of a program and of those within it, in their order."""
    yield from getattr(part, "consts", ())
    for eqn in getattr(part, "jaxpr", part).eqns:
        yield from (var.val for var in eqn.invars if isinstance(var, Literal))
        for inner in programs_in(eqn.params):
            yield from _constants(inner)
    yield from (var.val for var in getattr(part, "jaxpr", part).outvars if isinstance(var, Literal))


def of_files(paths: Iterable[Any]) -> str:
    """Sizes and times of the last modification, as text; nothing of names, so that a folder may move."""
    found = [os.stat(path) for path in paths]
    return " ".join(f"{each.st_size}/{each.st_mtime_ns}" for each in found)


def read_at_random(mapping) -> None:
    """Say that a mapped file is read here and there; else megabytes are read around each place."""
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def of_source(source, how: str, about: str, at_once: int = 256) -> str:
    """Of all rows of a source with `gather`, or of some and of `about`, a text that changes with the rest."""
    length = len(source)
    if how == CONTENT:
        return of_rows(source.gather, np.arange(length), f"{CONTENT} {length}", at_once)
    return of_rows(source.gather, evenly(length), f"{SAMPLED} {length} {about}", at_once)


__all__ = [
    "CONTENT",
    "CONTENT_LIMIT",
    "SAMPLED",
    "SAMPLED_ROWS",
    "evenly",
    "of_arrays",
    "of_files",
    "of_program",
    "of_rows",
    "of_source",
    "pieces",
    "read_at_random",
    "way",
]
