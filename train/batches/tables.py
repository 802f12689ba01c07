"""Rows of a `pyarrow.Table`, with which Arrow, Parquet and Hugging Face files are read."""

import os
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import compute, parquet, types

from jaxacct.common.validate import in_one_line

from .indexed import Indexed

_MISSING = "column {} must have a value in every row, has missing ones"


class ArrowTable(Indexed):
    """Source of a `pyarrow.Table`, in memory or mapped: a row is a dictionary of numbers and of arrays.

    Its columns hold numbers, or lists of numbers of one length; text and images become numbers before, or in
    a source that wraps it. ValueError for other columns, or missing values.
    """

    def __init__(self, source, version: str | None = None):
        super().__init__(source, version)
        for name, column in zip(source.column_names, source.columns, strict=True):
            if column.null_count:  # Arrow keeps it: no row is read
                raise ValueError(_MISSING.format(name))

    def __getitem__(self, index):
        return {name: column[0] for name, column in self.gather(np.array([index])).items()}

    def gather(self, indices: np.ndarray):
        # Slices copy nothing, while `Table.take` may join a whole column.
        taken = pyarrow.concat_tables([self.source.slice(int(index), 1) for index in indices])
        return {name: _numbers(taken.column(name).combine_chunks(), name) for name in taken.column_names}


def parquet_table(path: str | os.PathLike) -> ArrowTable:
    """Return the rows of a Parquet file, or of a folder of them, in memory."""
    if Path(path).suffix != ".parquet":
        raise ValueError(
            f"data must be arrays, rows by index, a .parquet or a .npz file, got {os.fspath(path)!r}"
        )
    try:
        return ArrowTable(parquet.read_table(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"data {os.fspath(path)} must be a Parquet file: {in_one_line(error)}") from None


def _numbers(array, name: str) -> np.ndarray:
    """Return (rows, ...) of an Arrow column of numbers, or of lists of one length."""
    shape, kind = [len(array)], array.type
    while not array.null_count and hasattr(array, "flatten") and hasattr(array.type, "value_type"):
        lengths = compute.call_function("list_value_length", [array]).unique()
        if len(lengths) != 1:
            raise ValueError(f"column {name} must have lists of one length, has others: pad or cut them")
        shape.append(lengths[0].as_py())
        array = array.flatten()
    if array.null_count:
        raise ValueError(_MISSING.format(name))
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise ValueError(f"column {name} must hold numbers or lists of them, holds {kind}: select others")
    return array.to_numpy(zero_copy_only=False).reshape(shape)
