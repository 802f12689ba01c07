"""Rows of anything that has a length and rows by index."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import fingerprints


class Indexed:
    """Source of anything with `len(source)` and `source[index]`, as a Grain source or `MapDataset`.

    Where it has `__getitems__` (PyTorch) or `_getitems` (Grain) a batch is read at once.

    Args:
      source: as `Source` promises.
      version: a text that is changed whenever the content is, for data that is too large to be read whole.
        The fingerprint is then of it and of 1,024 rows evenly spaced: **a change of other rows under the same
        version is not noticed**. By default every row is read once, when a run with a folder begins.

    Raises:
      ValueError: for something else.
    """

    def __init__(self, source, version: str | None = None):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ValueError(f"data must have a length and rows by index, got {type(source).__name__}")
        if version is not None and not (isinstance(version, str) and version):
            raise ValueError(f"version must be a text, got {version!r}")
        self.source, self.version = source, version
        several = (getattr(source, name, None) for name in ("__getitems__", "_getitems"))
        self._several: Callable | None = next(filter(None, several), None)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index]

    def gather(self, indices: np.ndarray):
        """Return the rows at `indices`, stacked."""
        places = [int(index) for index in indices]
        rows = [self.source[i] for i in places] if self._several is None else self._several(places)
        return stacked(rows)

    def fingerprint(self) -> str:
        """Return the digest of every row, or of the version and some rows."""
        return fingerprints.of_source(self, self.version)


def as_arrays(row):
    """Return a row with arrays for leaves; ValueError where it is no example."""
    if row is None:
        raise ValueError("data must have an example at every place, got None: filter before, not in a source")
    row = jax.tree.map(np.asarray, row)
    for path, leaf in jax.tree.leaves_with_path(row):
        check_numbers(path, leaf)
    return row


def stacked(rows) -> Any:
    """Return rows as one pytree of arrays (rows, ...); ValueError where they differ or are no numbers."""
    rows = [as_arrays(row) for row in rows]
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except (ValueError, TypeError):
        raise ValueError(
            "data must have rows of the same names and shapes, got others: pad or cut them to one length"
        ) from None


def check_numbers(path, leaf) -> None:
    """ValueError for an array that is not of numbers."""
    if leaf.dtype.names is not None:
        columns = ", ".join(leaf.dtype.names)
        raise ValueError(
            f"data must be numbers, got records of {columns} in {_name(path)}: give a dictionary of columns, "
            "{name: data[name] for name in data.dtype.names}"
        )
    # V: bfloat16 and its like, which JAX adds to NumPy's.
    if leaf.dtype.kind not in "biufcV" or leaf.dtype == np.dtype(f"V{leaf.dtype.itemsize}"):
        raise ValueError(f"data must be numbers, got {leaf.dtype} in {_name(path)}: turn text into tokens")


def check_kept(arrays) -> None:
    """ValueError for numbers of 64 bits that JAX would change, which computes in 32.

    Integers beyond 32 bits, and floats of at least 2^24 that float32 rounds: times in seconds, say, whose
    differences would be lost. Smaller floats are rounded to a relative 6e-8.
    """
    if jax.config.read("jax_enable_x64"):
        return
    for path, leaf in jax.tree.leaves_with_path(arrays):
        if leaf.dtype.itemsize != 8 or leaf.dtype.kind not in "iuf":
            continue
        if all(_is_kept(piece) for piece in fingerprints.pieces(leaf)):
            continue
        if leaf.dtype.kind == "f":
            allowed = "numbers that float32 keeps where they are 2^24 or more"
            hint = "subtract a public origin, or cast them to float32 to accept the rounding"
        else:
            limits = np.iinfo(f"{leaf.dtype.kind}4")
            allowed = f"integers from {limits.min} to {limits.max}"
            hint = "number them anew, or split them into two columns"
        raise ValueError(f"data must have {allowed}, got others of {leaf.dtype} in {_name(path)}: {hint}")


def _is_kept(piece: np.ndarray) -> bool:
    if piece.dtype.kind != "f":
        limits = np.iinfo(f"{piece.dtype.kind}4")
        return not piece.size or bool(limits.min <= piece.min() and piece.max() <= limits.max)
    large = piece[np.isfinite(piece) & (np.abs(piece) >= 2.0**24)]
    with np.errstate(over="ignore"):
        return bool((large.astype(np.float32) == large).all())


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "data"
