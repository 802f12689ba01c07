"""Data sets: digits that need no download; MNIST from a local folder as published."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .sources import ArrayRows

_DIGITS_TRAIN = 1440


@dataclass(frozen=True)
class Split:
    """A published training and test set of labelled images.

    Rows are inputs (height, width, channels) float32 in [0, 1] and labels () int32.
    """

    train: ArrayRows
    test: ArrayRows
    num_classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.train.arrays["inputs"].shape[1:]


def load(name: str, folder=None) -> Split:
    """Return a data set by name, in a folder with the published layout but for digits.

    "digits" (1797 images of 8 x 8 of scikit-learn; a fixed permutation puts 1440 in the training set),
    or "mnist" (the four idx files, gzipped or not).
    """
    if name == "digits":
        return _digits()
    if name != "mnist":
        raise ValueError(f"data must be one of digits, mnist, got {name!r}")
    if folder is None:
        raise ValueError(f"data {name} needs its folder: data_folder must be given")
    if not Path(folder).is_dir():
        raise ValueError(f"data_folder must be a folder, got {str(folder)!r}")
    return _mnist(Path(folder))


def from_arrays(inputs, labels, scale: float = 1.0) -> ArrayRows:
    """Return a data set of images (rows, height, width, channels), over `scale`, and labels (rows,)."""
    return ArrayRows({"inputs": np.float32(inputs) / np.float32(scale), "labels": np.int32(labels)})


def _digits() -> Split:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    parts = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    train, test = (from_arrays(images[part], labels[part], scale=16.0) for part in parts)
    return Split(train, test, 10)


def _mnist(folder: Path) -> Split:
    def part(name: str) -> ArrayRows:
        images = _idx(folder / f"{name}-images-idx3-ubyte", 3)
        labels = _idx(folder / f"{name}-labels-idx1-ubyte", 1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels) or labels.max(initial=0) > 9:
            raise ValueError(
                f"data_folder {folder} must hold 28 x 28 images with a label 0..9 each, in {name}"
            )
        return from_arrays(images[..., None], labels, scale=255.0)

    return Split(part("train"), part("t10k"), 10)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Bytes in the idx format: two zeros, type 8, the number of dimensions, their sizes, the entries."""
    zipped = path.with_name(f"{path.name}.gz")
    path = zipped if zipped.exists() and not path.exists() else path
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"data file {path} cannot be read: {reason}") from None
    first = 4 + 4 * dimensions
    sizes = np.frombuffer(content[4:first], ">u4").astype(np.int64)
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) - first != sizes.prod():
        raise ValueError(f"data file {path} must be an idx file of {dimensions} dimensions of bytes")
    return np.frombuffer(content, np.uint8, offset=first).reshape(sizes)
