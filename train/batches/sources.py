"""Data of `fit`: arrays, files of them that stay on disk, and anything with rows by index.

A guarantee is for one row of the data. It holds only for a source that keeps the promise of `Source`, of
which a part is checked while a run reads (`SourceRows`).
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from . import fingerprints


class Source(Protocol):
    """Rows by index, and what a source promises with them.

    Row `i` is a function of record `i` alone and the same at every reading: of no other row, of nothing that
    was read before or with it, of no clock and no generator; under add-or-remove-one adjacency nor of `i`,
    which changes for all later records where one is absent. Else one record changes the gradients of other
    examples, which clipping does not bound. So: no statistics of the private data (means, vocabularies,
    deduplication) in a transformation unless they are public, no random augmentation (use
    `TrainOptions(loss_key=)`), no order that changes from epoch to epoch, no packing of several records into
    one row unless the row is the privacy unit. A record in two rows has twice the influence that is accounted
    for.

    Optional: `gather(indices) -> pytree of arrays (len(indices), ...)` reads rows at once.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any:
        """Return a pytree of numbers or arrays, of the same structure, shapes and dtypes for every row."""

    def fingerprint(self) -> str:
        """Return a text that changes with the content; see `train.batches.fingerprints`."""


LARGE = 2**32  # bytes from which mapped arrays are not checked before they are trained on


def as_rows(data):
    """Return the data as an object with `take(indices, size)` and `fingerprint`; ValueError for others."""
    if isinstance(data, ArrayRows | SourceRows):
        return data
    library = sys.modules.get("datasets")
    if library is not None and isinstance(data, library.Dataset):
        data = _formatted(data)
    if _is_source(data):
        return SourceRows(data if hasattr(data, "fingerprint") else Indexed(data))
    leaves = jax.tree.leaves(data)
    mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
    if mapped and sum(leaf.nbytes for leaf in leaves) > LARGE:
        return SourceRows(MemoryMapped(data))
    return ArrayRows(data)


# Formats of Hugging Face data sets in which a row is a dictionary; "custom" is a transform.
_ROW_FORMATS = (None, "numpy", "custom", "jax", "torch", "tensorflow")


def _formatted(data):
    """Return a Hugging Face data set as its user formatted it; without a format, its columns as arrays."""
    given = data.format
    if given["type"] not in _ROW_FORMATS:
        raise ValueError(
            "data must be a Hugging Face data set whose rows are dictionaries, got format "
            f"{given['type']!r}: use with_format('numpy')"
        )
    if given["type"] is not None:
        return data
    # Else lists of Python's numbers. Its columns are part of a format.
    return data.with_format("numpy", given["columns"], given["output_all_columns"])


def _is_source(data) -> bool:
    """Return whether it has rows by index and is no container of arrays."""
    container = not jax.tree_util.all_leaves([data]) or isinstance(data, str) or hasattr(data, "__array__")
    return not container and hasattr(data, "__getitem__") and hasattr(data, "__len__")


class ArrayRows:
    """Data set of a pytree of arrays (rows, ...) in memory."""

    def __init__(self, arrays):
        self.arrays = jax.tree.map(np.asarray, arrays)
        self._length = _length(self.arrays)
        if wrong := changed_by_jax(self.arrays):
            raise ValueError(wrong)
        floats = (leaf for leaf in jax.tree.leaves(self.arrays) if leaf.dtype.kind == "f")
        if not all(np.isfinite(part).all() for leaf in floats for part in fingerprints.pieces(leaf)):
            raise ValueError("data must be finite, got NaN or infinity")

    def __len__(self) -> int:
        return self._length

    def take(self, indices, size: int):
        """Return the rows at `indices`, padded with zeros to `size`."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"indices must be 0 to {len(self) - 1}")

        def taken(leaf):
            found = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
            # Written to its place: NumPy does that only in a mode that takes any index.
            np.take(leaf, indices, axis=0, out=found[: len(indices)], mode="clip")
            return found

        return jax.tree.map(taken, self.arrays)

    def fingerprint(self) -> str:
        """Return a digest of all content."""
        return fingerprints.of_arrays(self.arrays)


def _length(arrays) -> int:
    """Rows of a pytree of arrays of numbers; ValueError for others."""
    for path, leaf in jax.tree.leaves_with_path(arrays):
        check_numbers(path, leaf)
        if leaf.ndim == 0:
            raise ValueError(
                f"data must be arrays with a row for each example, got a single number in {_name(path)}"
            )
    lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"data must be arrays with the same number of rows, got {sorted(lengths)}")
    return lengths.pop()


def padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Return the rows with zeros after them, `size` in all."""
    found = np.zeros((size, *rows.shape[1:]), rows.dtype)
    found[: len(rows)] = rows
    return found


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


class MemoryMapped(Indexed):
    """Source of a pytree of arrays (rows, ...) that stay in their files: a batch is one indexed read.

    Rows are not checked in advance: a value that is not finite counts as zero when its gradient is clipped.

    Args:
      arrays: pytree of `np.memmap`, as of `np.load(path, mmap_mode="r")`.
      version: as of `Indexed`, so that files are not read whole when a run begins.

    Raises:
      ValueError: other lengths, no numbers.
    """

    def __init__(self, arrays, version: str | None = None):
        self.arrays = arrays
        leaves = jax.tree.leaves(self.arrays)
        if _length(self.arrays) == 0:
            raise ValueError("data must have at least one row, got 0")
        super().__init__(leaves[0], version)
        for leaf in leaves if version is not None else ():
            fingerprints.read_at_random(getattr(leaf, "_mmap", None))

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: np.array(leaf[index]), self.arrays)

    def gather(self, indices: np.ndarray):
        """Return the rows at `indices`, copied to memory."""
        return jax.tree.map(lambda leaf: np.asarray(leaf[indices]), self.arrays)

    def fingerprint(self) -> str:
        """Return the digest of these arrays in memory, or of the version and some rows."""
        return fingerprints.of_arrays(self.arrays) if self.version is None else super().fingerprint()


NUM_PROBES = 6
FIRST_BATCHES = 8
CHECKED_AT_FIRST = 64  # rows of each of the first batches that are read again; of each later batch it is one
DIGESTED_A_BATCH = 256
DIGESTED = 2**17  # maximum number of rows whose digests are kept in memory


class SourceRows:
    """Data set of a `Source`: padded batches, and checks that each row is the same at every reading.

    At construction six rows (the first, the middle, the last, others at random) are read alone, together in
    another order, and alone again. Of each of the first 8 batches the first row, the last and 64 at random
    are read again alone, twice; of each later batch one row, and one of the six. Digests of up to 256 rows of
    every batch are compared with earlier ones. All must be the same bits. That finds rows that depend on what
    was read before or with them, on a generator or on the time; not a transformation that mixes records in a
    fixed way, a record in two rows, a row that differs in one late batch only, or a source that recognises
    the checks.

    Raises:
      ValueError: when they differ, naming no row of a batch, whose members are private.
    """

    def __init__(self, source: Source):
        self.source = source
        length = len(source)
        if length == 0:
            raise ValueError("data must have at least one row, got 0")
        # From the operating system: what is checked is independent of every key of the run.
        self._random = np.random.default_rng()
        others = self._random.choice(length, min(length, NUM_PROBES), replace=False)
        places = list(dict.fromkeys(int(place) for place in (0, length // 2, length - 1, *others)))[
            :NUM_PROBES
        ]
        self._probes = {place: jax.tree.map(np.array, as_arrays(source[place])) for place in places}
        self._like = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), self._probes[0])
        self._batches, self._digests = 0, {}
        order = self._random.permutation(places)
        together = self._gather(order)
        if wrong := changed_by_jax(together):
            raise ValueError(wrong)
        for at, place in enumerate(order):
            for again in (_row(together, at), source[int(place)]):
                _same(self._probes[int(place)], again, f"row {place}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices, size: int):
        """Return the rows at `indices`, padded with zeros to `size`."""
        indices = np.asarray(indices, np.int64)
        if len(indices) == 0:
            return jax.tree.map(lambda leaf: padded(leaf, size), self._like)
        found = jax.tree.map(lambda leaf: padded(leaf, size), self._gather(indices))
        # To the operator's log alone: whether a run ends must not depend on the data.
        if wrong := changed_by_jax(found):
            warnings.warn(f"{wrong}; JAX changes them", stacklevel=2)
        self._check(found, indices)
        return found

    def fingerprint(self) -> str:
        """Return the source's own."""
        return self.source.fingerprint()

    def _gather(self, indices: np.ndarray):
        gather = getattr(self.source, "gather", None) or Indexed(self.source).gather
        found = as_arrays(gather(indices))
        expected = jax.tree.map(lambda leaf: ((len(indices), *leaf.shape[1:]), leaf.dtype), self._like)
        if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) != expected:
            raise ValueError("data must have rows of the same names, shapes and dtypes, got others")
        return found

    def _check(self, found, indices: np.ndarray) -> None:
        """ValueError where a row of a batch, or one of the six, is not the same at another reading."""
        order = self._random.permutation(len(indices))
        for at in order[:DIGESTED_A_BATCH]:
            digest = hash(tuple(leaf[at].tobytes() for leaf in jax.tree.leaves(found)))
            place = int(indices[at])
            if self._digests.get(place, digest) != digest:
                raise ValueError(_NOT_THE_SAME.format(_OF_A_BATCH))
            if len(self._digests) < DIGESTED:
                self._digests[place] = digest
        first = self._batches < FIRST_BATCHES
        self._batches += 1
        # Twice, as a row may change at every second reading.
        again = {0, len(indices) - 1, *order[:CHECKED_AT_FIRST].tolist()} if first else {int(order[0])}
        for at in 2 * sorted(again) if first else again:
            _same(_row(found, at), self.source[int(indices[at])], _OF_A_BATCH)
        probe = int(self._random.choice(list(self._probes)))
        _same(self._probes[probe], self.source[probe], f"row {probe}")


_OF_A_BATCH = "a row of a batch"
_NOT_THE_SAME = (
    "data must give the same row whenever and with whatever it is read, {} came out otherwise: a row that "
    "depends on others or on chance is not what clipping bounds"
)


def _row(rows, at: int):
    return jax.tree.map(lambda leaf: leaf[at], rows)


def _same(first, again, what: str) -> None:
    """ValueError where the bits of a row differ."""

    def content(row):
        return [(a.dtype, a.shape, a.tobytes()) for a in map(np.asarray, jax.tree.leaves(row))]

    if content(first) != content(again):
        raise ValueError(_NOT_THE_SAME.format(what))


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


def changed_by_jax(arrays) -> str | None:
    """Return what is wrong with numbers of 64 bits that JAX would change, which computes in 32.

    Integers beyond 32 bits, and floats of at least 2^24 that float32 rounds: times in seconds, say, whose
    differences would be lost. Smaller floats are rounded to a relative 6e-8.
    """
    if jax.config.read("jax_enable_x64"):
        return None
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
        return f"data must have {allowed}, got others of {leaf.dtype} in {_name(path)}: {hint}"
    return None


def _is_kept(piece: np.ndarray) -> bool:
    if piece.dtype.kind == "f":
        piece = piece[np.isfinite(piece) & (np.abs(piece) >= 2.0**24)]
    with np.errstate(over="ignore"):
        return bool((piece.astype(f"{piece.dtype.kind}4") == piece).all())


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "data"
