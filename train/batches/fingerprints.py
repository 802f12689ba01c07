"""Digests of data, which for huge files cover a part only; they are stored under the run's secret key.

They keep a run from continuing with other data by mistake, and protect nothing against a person who can write
to the run's folder.

By default they cover every byte of every row, read once in pieces. With a version, a text that the user
changes with the data, they cover this text, the number of rows and `SAMPLED_ROWS` of them, evenly spaced (the
first and the last among them). Not noticed: a change of other rows under the same version.
"""

import hashlib
import mmap
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..clipping.rows_apart import is_program

SAMPLED_ROWS = 1024
_AT_ONCE = 2**24  # bytes


def of_bytes(content: bytes) -> str:
    """Return the digest of some bytes."""
    return hashlib.sha256(content).hexdigest()


def pieces(array: np.ndarray) -> Iterable[np.ndarray]:
    """Return the rows of an array, some at a time."""
    size = max(1, _AT_ONCE // max(1, array.nbytes // max(1, len(array))))
    return (array[first : first + size] for first in range(0, len(array), size))


def of_arrays(tree) -> str:
    """Return the digest of names, dtypes, shapes and all content of a pytree of arrays or keys."""
    content = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        content.update(f"{name} {array.dtype} {array.shape}\n".encode())
        for piece in pieces(np.atleast_1d(array)):
            content.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def of_trace(traced: ClosedJaxpr) -> str:
    """Return the digest of a program as it was traced: primitives, their arguments, constants.

    It is that of every machine. A release of JAX that traces otherwise gives another one.
    """
    content = hashlib.sha256()
    for part in _traced(traced):
        content.update(part if isinstance(part, bytes) else f"{part}\n".encode())
    return content.hexdigest()


def refuse_callbacks(name: str, traced: ClosedJaxpr) -> None:
    """ValueError for a program that calls Python: what is computed there is in no digest."""
    found = sorted(_OUTSIDE & {part for part in _traced(traced) if isinstance(part, str)})
    if found:
        raise ValueError(f"{name} must be a program of JAX alone for a run that is kept, got {found[0]}")


def _traced(program) -> Iterable[Any]:
    """Yield texts and bytes that determine a program, with its variables numbered in order."""
    jaxpr, numbers = getattr(program, "jaxpr", program), {}

    def named(var) -> Any:
        if isinstance(var, Literal):
            return _content(var.val)
        return f"{numbers.setdefault(var, len(numbers))} {_ADDRESS.sub('', str(var.aval))}"

    yield from map(_content, getattr(program, "consts", ()))
    yield from map(named, (*jaxpr.constvars, *jaxpr.invars))
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from map(named, (*eqn.invars, *eqn.outvars))
        for name, value in sorted(eqn.params.items()):
            # What the call of a traced function adds says where it is computed.
            if value is not None and (eqn.primitive.name not in _CALLS or name == "jaxpr"):
                yield name
                yield from _parameter(value)
    yield from map(named, jaxpr.outvars)
    yield "end"


def _parameter(value) -> Iterable[Any]:
    """Yield texts and bytes that determine a parameter of a primitive."""
    if is_program(value):
        yield from _traced(value)
    elif isinstance(value, tuple | list):
        yield len(value)
        for each in value:
            yield from _parameter(each)
    elif isinstance(value, frozenset | set):  # in an order that differs from process to process
        yield from sorted(map(repr, value))
    elif isinstance(value, jax.Array | np.ndarray):
        yield _content(value)
    elif callable(value) and not isinstance(value, type):
        yield getattr(value, "__name__", type(value).__name__)
    else:
        yield _ADDRESS.sub("", repr(value))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CALLS = "jit", "pjit"
_OUTSIDE = {"pure_callback", "io_callback"}


def _content(value) -> bytes:
    """Return dtype, shape and bytes of a constant."""
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype} {array.shape}\n".encode() + array.tobytes()


def read_at_random(mapping) -> None:
    """Advise random reads of a mapped file; else megabytes are read around each row."""
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def of_source(source, version: str | None, at_once: int = 256) -> str:
    """Return the digest of all rows of a source with `gather`, or of its version, a text, and of some."""
    length = len(source)
    how, number = ("content", length) if version is None else ("sampled", min(length, SAMPLED_ROWS))
    places = np.unique(np.linspace(0, length - 1, number).round().astype(np.int64))
    content = hashlib.blake2b(f"{how} {length} {version}".encode(), digest_size=16)
    for first in range(0, len(places), at_once):
        content.update(of_arrays(source.gather(places[first : first + at_once])).encode())
    return content.hexdigest()
