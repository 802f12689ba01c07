"""What `fit` takes as data: arrays, files of them that stay on disk, and anything with rows by their place.

A guarantee is for one row of the data. It holds only of a source that keeps what `Source` promises; of that a
part is checked while a run reads (`SourceRows`), and the rest is the promise of who wrote the source.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from . import fingerprints


class Source(Protocol):
    """Rows by their place, and what a source promises with them.

    Row `i` is a function of record `i` alone and the same at every reading: of no other row, of nothing that
    was read before or with it, of no clock and no generator. Else one record changes the gradients of other
    examples, whose clip norms then bound nothing. So: no statistics of the private data (means, vocabularies,
    deduplication) in a transformation unless they are public, no augmentation at random (`fit(loss_key=)` has
    keys for it), no order that changes from epoch to epoch (`fit` draws batches itself), no packing of
    several records into one row unless the row is what is to be protected. A record in two rows has twice
    the influence that is accounted for.

    Attributes of a source beside these: `gather(indices) -> pytree of arrays (len(indices), ...)`, where rows
    can be read at one go.
    """

    def __len__(self) -> int:
        """Rows; the same throughout a run."""
        ...

    def __getitem__(self, index: int) -> Any:
        """A pytree of numbers or arrays, of the same structure, shapes and dtypes for every row."""
        ...

    def fingerprint(self) -> str:
        """A text that changes with the content; see `train.batches.fingerprints`."""
        ...


def as_rows(data):
    """The data as an object with `take(indices, size)` and `fingerprint`.

    Raises:
      ValueError: for what is neither arrays nor a source, or a source whose rows are not the same twice.
    """
    if isinstance(data, ArrayRows | SourceRows):
        return data
    if hasattr(data, "take") and hasattr(data, "fingerprint"):
        return SourceRows(Taken(data))
    arrow = sys.modules.get("pyarrow")  # imported by whoever has a table
    if arrow is not None and isinstance(data, arrow.Table):
        from .tables import ArrowTable

        return SourceRows(ArrowTable(data))
    if _is_source(data):
        return SourceRows(data if hasattr(data, "fingerprint") else Indexed(data))
    leaves = jax.tree.leaves(data)
    mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
    if mapped and sum(leaf.nbytes for leaf in leaves) > fingerprints.CONTENT_LIMIT:
        return SourceRows(MemoryMapped(data))
    return ArrayRows(data)


def _is_source(data) -> bool:
    """Whether it has rows by their place and is no container of arrays."""
    leaf = jax.tree_util.all_leaves([data]) and not isinstance(data, str) and not hasattr(data, "__array__")
    return leaf and hasattr(data, "__getitem__") and hasattr(data, "__len__")


class ArrayRows:
    """A pytree of arrays (rows, ...) in memory as a data set."""

    def __init__(self, arrays):
        self.arrays = jax.tree.map(np.asarray, arrays)
        self._length = _length(self.arrays)
        for leaf in jax.tree.leaves(self.arrays):
            if leaf.dtype.kind == "f" and not all(
                np.isfinite(part).all() for part in fingerprints.pieces(leaf)
            ):
                raise ValueError("data must be finite, had NaN or infinity")

    def __len__(self) -> int:
        return self._length

    def take(self, indices, size: int):
        """Rows at `indices`, padded with zeros to `size`."""
        return jax.tree.map(lambda leaf: _padded(leaf[indices], size), self.arrays)

    def fingerprint(self) -> str:
        """Digest of all content."""
        return fingerprints.of_arrays(self.arrays)


def _length(arrays) -> int:
    """Rows of a pytree of arrays of numbers; ValueError for others."""
    for path, leaf in jax.tree.leaves_with_path(arrays):
        _check_numbers(path, leaf)
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in jax.tree.leaves(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"data must be arrays with the same number of rows, had {sorted(lengths)}")
    return lengths.pop()


def _check_numbers(path, leaf) -> None:
    if leaf.dtype.kind not in "biufcV":  # V: bfloat16 and its like
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "data"
        raise ValueError(f"data must be numbers, had {leaf.dtype} in {name}: turn text into tokens")


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    found = np.zeros((size, *rows.shape[1:]), rows.dtype)
    found[: len(rows)] = rows
    return found


class MemoryMapped:
    """A pytree of arrays (rows, ...) that stay in their files: a batch is one indexed read.

    Rows are not looked at before a batch asks for them: what is not finite there counts as zero when its
    gradient is clipped.

    Args:
      arrays: pytree of `np.memmap`, or of paths of `.npy` files.
      fingerprint: "content" or "sampled", see `train.batches.fingerprints`; by default the content up to 4
      GiB.

    Raises:
      ValueError: no such file, other lengths, no numbers; "sampled" for a mapping whose file is not known.
    """

    def __init__(self, arrays, fingerprint: str | None = None):
        self.arrays = jax.tree.map(_opened, arrays)
        leaves = jax.tree.leaves(self.arrays)
        if _length(self.arrays) == 0:
            raise ValueError("data must have at least one row, had 0")
        self._paths = [getattr(leaf, "filename", None) for leaf in leaves]
        self.how = fingerprints.way(fingerprint, sum(leaf.nbytes for leaf in leaves))
        if self.how == fingerprints.SAMPLED:
            if None in self._paths:
                raise ValueError("fingerprint must be 'content' for arrays that are in no file")
            for leaf in leaves:
                fingerprints.read_at_random(getattr(leaf, "_mmap", None))

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.arrays)[0])

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: np.array(leaf[index]), self.arrays)

    def gather(self, indices: np.ndarray):
        """Rows at `indices`, copied to memory."""
        return jax.tree.map(lambda leaf: np.asarray(leaf[indices]), self.arrays)

    def fingerprint(self) -> str:
        """Of all content as it would be of these arrays in memory, or of some rows and the files' times."""
        if self.how == fingerprints.CONTENT:
            return fingerprints.of_arrays(self.arrays)
        shapes = [(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(self.arrays)]
        return fingerprints.of_source(self, self.how, f"{shapes} {fingerprints.of_files(self._paths)}")


def _opened(leaf):
    if not isinstance(leaf, str | os.PathLike):
        return leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    try:
        found = np.load(leaf, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.memmap):
            raise ValueError("it holds several")
        return found
    except (OSError, ValueError) as error:
        raise ValueError(f"data file {os.fspath(leaf)} must be a .npy file of numbers: {error}") from None


class Indexed:
    """Anything with `len(source)` and `source[index]`, a Grain source or `MapDataset` above all.

    Where it has `__getitems__` (PyTorch) or `_getitems` (Grain) a batch is read by it at one go.

    Args:
      source: its rows are pytrees of numbers or arrays, each the same whenever it is read (`Source`).
      version: a text that is changed whenever the content is, for data that is too large to be read whole.
        The fingerprint is then of it and of 1,024 rows evenly spaced: **a change of other rows under the same
        version is not seen**. By default every row is read once, when a run with a folder begins or goes on.

    Raises:
      ValueError: for something else.
    """

    def __init__(self, source, version: str | None = None):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ValueError(f"data must have a length and rows by index, was {type(source).__name__}")
        if version is not None and not (isinstance(version, str) and version):
            raise ValueError(f"version must be a text, was {version!r}")
        self.source, self.version = source, version
        several = (getattr(source, name, None) for name in ("__getitems__", "_getitems"))
        self._several: Callable | None = next(filter(None, several), None)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index]

    def gather(self, indices: np.ndarray):
        """Rows at `indices`, one under the other."""
        places = [int(index) for index in indices]
        rows = [self.source[i] for i in places] if self._several is None else self._several(places)
        return stacked(rows)

    def fingerprint(self) -> str:
        """Of every row; or of the version and some rows."""
        how = fingerprints.CONTENT if self.version is None else fingerprints.SAMPLED
        return fingerprints.of_source(self, how, str(self.version))


def _as_arrays(row):
    """A row with arrays for leaves; ValueError where it is no example."""
    if row is None:
        raise ValueError("data must have an example at every place, had None: filter before, not in a source")
    row = jax.tree.map(np.asarray, row)
    for path, leaf in jax.tree.leaves_with_path(row):
        _check_numbers(path, leaf)
    return row


def stacked(rows) -> Any:
    """Rows with arrays for leaves as one pytree of arrays (rows, ...).

    Raises:
      ValueError: rows of other structure or shapes, or what is no number.
    """
    rows = [_as_arrays(row) for row in rows]
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except (ValueError, TypeError):
        raise ValueError(
            "data must have rows of the same names and shapes, had others: pad or cut them to one length"
        ) from None


class Taken:
    """An object with `len`, `take(indices, size)` and `fingerprint()`, read by place."""

    def __init__(self, data):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        return _row(self.take(np.array([index]), 1), 0)

    def take(self, indices: np.ndarray, size: int):
        """Rows at `indices`; ValueError where they are not padded to `size`."""
        found = _as_arrays(self.data.take(indices, size))
        if {leaf.shape[:1] for leaf in jax.tree.leaves(found)} != {(size,)}:
            raise ValueError(f"data must return rows padded to size {size} from take, returned others")
        return jax.tree.map(lambda leaf: leaf[: len(indices)], found)

    def fingerprint(self) -> str:
        """The object's own."""
        return self.data.fingerprint()


NUM_PROBES = 6
FIRST_BATCHES = 8
CHECKED_AT_FIRST = 64
"""Rows of each of the first batches that are read again, alone; of each later batch it is one."""
DIGESTED_A_BATCH = 256
DIGESTED = 2**17
"""Rows of which a digest is kept in memory."""


class SourceRows:
    """A `Source` as a data set: padded batches, and checks that each row is the same at every reading.

    When it is made, six rows (the first, the middle, the last, others at random) are read alone, together in
    another order, and alone again. Of each of the first 8 batches the first row, the last and 64 at random
    places are read again alone, twice; of each later batch one row, and one of the six. A digest of up to 256
    rows of every batch is compared with those of earlier batches. All must come out bit for bit
    the same. That finds rows that depend on what was read before or with them, on a generator or on the time.
    It does not find a transformation that mixes records in a fixed way, a record that is in two rows, a row
    that differs in one late batch only, or a source that recognises the checks.

    Raises:
      ValueError: when they do not, naming no row of a batch: who is in one is private.
    """

    def __init__(self, source: Source):
        self.source = source
        length = len(source)
        if length == 0:
            raise ValueError("data must have at least one row, had 0")
        # Of the operating system: what is checked is independent of every key of the run.
        self._random = np.random.default_rng()
        others = self._random.choice(length, min(length, NUM_PROBES), replace=False)
        places = list(dict.fromkeys(int(place) for place in (0, length // 2, length - 1, *others)))[
            :NUM_PROBES
        ]
        self._probes = {place: jax.tree.map(np.array, _as_arrays(source[place])) for place in places}
        self._like = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), self._probes[0])
        self._batches, self._digests = 0, {}
        order = self._random.permutation(places)
        together = self._gather(order, len(order))
        for at, place in enumerate(order):
            for again in (_row(together, at), source[int(place)]):
                _same(self._probes[int(place)], again, f"row {place}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices, size: int):
        """Rows at `indices`, padded with zeros to `size`."""
        indices = np.asarray(indices, np.int64)
        if len(indices) == 0:
            return jax.tree.map(lambda leaf: _padded(leaf, size), self._like)
        # A copy, which later readings do not write to.
        found = jax.tree.map(lambda leaf: _padded(leaf, size), self._gather(indices, size))
        self._check(found, indices)
        return found

    def fingerprint(self) -> str:
        """The source's own."""
        return self.source.fingerprint()

    def _gather(self, indices: np.ndarray, size: int):
        gather = getattr(self.source, "gather", None)
        if isinstance(self.source, Taken):
            found = self.source.take(indices, size)
        elif gather is None:
            found = stacked([self.source[int(index)] for index in indices])
        else:
            found = _as_arrays(gather(indices))
        wanted = jax.tree.map(lambda leaf: ((len(indices), *leaf.shape[1:]), leaf.dtype), self._like)
        if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) != wanted:
            raise ValueError("data must have rows of the same names, shapes and dtypes, had others")
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
    """ValueError where a row is not the same, to the bit."""
    a, b = ([np.asarray(leaf) for leaf in jax.tree.leaves(row)] for row in (first, again))
    if [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in a] != [
        (leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in b
    ]:
        raise ValueError(_NOT_THE_SAME.format(what))


__all__ = ["ArrayRows", "Indexed", "MemoryMapped", "Source", "SourceRows", "Taken", "as_rows", "stacked"]
