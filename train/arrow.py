"""Arrow files on disk as data: what Hugging Face's `datasets` keeps, read through a memory map.

They are opened with pyarrow and stay where they are; the package `datasets` is not needed. Text becomes
numbers by a `decode` of one row, or before.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import fingerprints


class ArrowFiles:
    """Rows of Arrow files (stream or file format, not compressed inside), mapped and not loaded.

        data = ArrowFiles("imdb-tokens/train", columns=["input_ids", "label"], lengths={"input_ids": 128})

    Args:
      paths: a folder of `datasets.Dataset.save_to_disk`; or files, in the order of their rows.
      columns: that are read, all by default. Rows are dictionaries of them: numbers of a column of numbers,
        arrays of one of lists.
      lengths: of columns of lists: longer ones are cut, shorter ones padded with zeros. Lists of a fixed
        size need none.
      decode: makes an example of one row, given as a dictionary of Python values, and of that row alone
        (`train.sources.Source`). For text, images and whatever is no number.
      fingerprint: "content" or "sampled", see `train.fingerprints`; by default the content up to 4 GiB.

    Raises:
      ValueError: no such files, a column that is not there or holds no numbers, missing values.
    """

    def __init__(
        self,
        paths: str | os.PathLike | Sequence[str | os.PathLike],
        columns: Sequence[str] | None = None,
        *,
        lengths: dict[str, int] | None = None,
        decode: Callable[[dict], Any] | None = None,
        fingerprint: str | None = None,
    ):
        single = isinstance(paths, str | os.PathLike)
        self._paths = _files(Path(paths)) if single else [Path(path) for path in paths]
        if not self._paths:
            raise ValueError(f"data must be at least one Arrow file, was {paths!r}")
        self._lengths, self._decode = dict(lengths or {}), decode
        self._how = fingerprints.way(fingerprint, sum(_size(path) for path in self._paths))
        batches = [batch for path in self._paths for batch in _batches(path, self._how) if batch.num_rows]
        if not batches:
            raise ValueError("data must have at least one row, had 0")
        schema = batches[0].schema
        if any(not batch.schema.equals(schema) for batch in batches):
            raise ValueError("data must be Arrow files with the same columns, these differ")
        columns = list(schema.names if columns is None else columns)
        missing = sorted(set(columns) - set(schema.names)) + sorted(set(self._lengths) - set(columns))
        if missing or not columns:
            raise ValueError(
                f"columns must be of {', '.join(schema.names)}, was {', '.join(missing) or 'none'}"
            )
        self._batches = [batch.select(columns) for batch in batches]
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        if decode is None:
            for name in columns:
                self._check(name)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int):
        import jax

        return jax.tree.map(lambda leaf: leaf[0], self.gather(np.array([index])))

    def gather(self, indices: np.ndarray):
        """Rows at `indices`: one read of each record batch that holds some of them."""
        table = self._table(np.asarray(indices, np.int64))
        if self._decode is not None:
            from .sources import stacked

            return stacked([self._decode(row) for row in table.to_pylist()])
        return {
            name: _array(table.column(name), self._lengths.get(name), name) for name in table.column_names
        }

    def fingerprint(self) -> str:
        """Of all rows as they are read; or of some of them and the files' sizes and times."""
        return fingerprints.of_source(self, self._how, fingerprints.of_files(self._paths))

    def _table(self, indices: np.ndarray):
        """The rows in order, in memory."""
        import pyarrow

        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows must be in 0..{len(self) - 1}")
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        where = np.searchsorted(self._ends, ordered, side="right")
        cuts = np.flatnonzero(np.diff(where)) + 1
        parts = []
        for part in np.split(ordered, cuts) if len(ordered) else []:
            batch = int(np.searchsorted(self._ends, part[0], side="right"))
            first = int(self._ends[batch]) - self._batches[batch].num_rows
            parts.append(self._batches[batch].take(pyarrow.array(part - first)))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        table = pyarrow.Table.from_batches(parts, self._batches[0].schema).combine_chunks()
        return table.take(pyarrow.array(back))

    def _check(self, name: str) -> None:
        """ValueError for a column that is not a number, or a list of them, in every row."""
        import pyarrow

        types = pyarrow.types
        kind = value = _storage(self._batches[0].schema.field(name).type)
        variable = types.is_list(kind) or types.is_large_list(kind)
        if variable:
            value = _storage(kind.value_type)
        while types.is_fixed_size_list(value):
            value = _storage(value.value_type)
        if not (types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)):
            raise ValueError(
                f"column {name} must hold numbers or lists of them, holds {kind}: give columns, or a decode"
            )
        if variable and self._lengths.get(name) is None:
            raise ValueError(f"lengths must say how long the lists of {name} are to be")
        if not variable and name in self._lengths:
            raise ValueError(f"lengths must be of columns of lists without a size, {name} holds {kind}")
        if any(_nulls(batch.column(name)) for batch in self._batches):
            raise ValueError(f"column {name} must have a value in every row, has missing ones: give a decode")


def _files(folder: Path) -> list[Path]:
    """The files of a folder of `save_to_disk` in the order of their rows; of another all that are Arrow's."""
    if folder.is_file():
        return [folder]
    if (folder / "dataset_dict.json").exists():
        raise ValueError(f"data folder {folder} holds several splits: give the folder of one, train perhaps")
    state = folder / "state.json"
    if not state.exists():
        raise ValueError(f"data must be a folder of save_to_disk or Arrow files, was {str(folder)!r}")
    try:
        found = json.loads(state.read_text(encoding="utf-8"))
        if found.get("_indices_data_files"):
            raise ValueError("it keeps its rows in another order: call flatten_indices() before save_to_disk")
        return [folder / str(each["filename"]) for each in found["_data_files"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"data folder {folder} cannot be read: {error}") from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}") from None


def _batches(path: Path, how: str) -> Iterator[Any]:
    """The record batches of a file, of which only the places are read."""
    import pyarrow

    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if how == fingerprints.SAMPLED:
            fingerprints.read_at_random(mapped)
        content = pyarrow.py_buffer(mapped)
        if mapped[:6] == b"ARROW1":
            reader = pyarrow.ipc.open_file(content)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(content)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"data file {path} must be an Arrow file: {str(error).splitlines()[0]}") from None


def _storage(kind):
    """What an extension type (`datasets` has some for arrays) is kept as."""
    return getattr(kind, "storage_type", kind)


def _nulls(array) -> int:
    """Missing values of a column and of the lists in it."""
    array = getattr(array, "storage", array)
    found = array.null_count
    while hasattr(array, "values") and hasattr(array.type, "value_type"):
        array = getattr(array.values, "storage", array.values)
        found += array.null_count
    return found


def _array(column, length: int | None, name: str) -> np.ndarray:
    """(rows, ...) of a column in memory."""
    import pyarrow

    array = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    if isinstance(array, pyarrow.ChunkedArray):
        array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else pyarrow.array([], array.type)
    array, rows, shape = getattr(array, "storage", array), len(array), []
    if length is not None:
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        flat = _array(array.flatten(), None, name)
        return _cut_or_padded(flat, lengths, length)
    while pyarrow.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = getattr(array.flatten(), "storage", array.flatten())
    return array.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def _cut_or_padded(flat: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """(rows, length, ...) of lists that lie one after the other."""
    found = np.zeros((len(lengths), length, *flat.shape[1:]), flat.dtype)
    starts = np.cumsum(lengths) - lengths
    for row, (start, own) in enumerate(zip(starts, np.minimum(lengths, length), strict=True)):
        found[row, :own] = flat[start : start + own]
    return found


__all__ = ["ArrowFiles"]
