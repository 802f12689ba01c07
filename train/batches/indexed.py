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
        how = fingerprints.CONTENT if self.version is None else fingerprints.SAMPLED
        return fingerprints.of_source(self, how, str(self.version))


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
    if leaf.dtype.kind not in "biufcV":  # V: bfloat16 and its like
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "data"
        raise ValueError(f"data must be numbers, got {leaf.dtype} in {name}: turn text into tokens")
