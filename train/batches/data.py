"""Data sets: digits that need no download; MNIST, CIFAR-10 and CINIC-10 from a local folder as published.

Folders of images are read through Grain when a batch asks for them, and need not fit in memory.
"""

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from . import fingerprints

_DIGITS_TRAIN = 1440


@dataclass(frozen=True)
class Dataset:
    """Labelled images.

    Attributes:
      source: `{"inputs": (height, width, channels) uint8 or float32, "label": int}` by index, of Grain or in
        memory; perhaps with `gather` for many indices.
      shape: (height, width, channels).
      scale: inputs are divided by this.
      content: digest of the content, or of names and sizes where files are read when needed.
    """

    source: Any
    shape: tuple[int, int, int]
    scale: float
    content: str

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices, size: int) -> dict[str, np.ndarray]:
        """Return inputs (size, height, width, channels) float32 in [0, 1] and labels (size,) int32.

        Rows beyond `indices` are zero.
        """
        inputs = np.zeros((size, *self.shape), np.float32)
        labels = np.zeros(size, np.int32)
        if hasattr(self.source, "gather"):
            records = self.source.gather(indices)
            inputs[: len(indices)], labels[: len(indices)] = records["inputs"], records["label"]
        else:
            for row, index in enumerate(indices):
                record = self.source[int(index)]
                inputs[row], labels[row] = record["inputs"], record["label"]
        inputs /= np.float32(self.scale)
        return {"inputs": inputs, "labels": labels}

    def fingerprint(self) -> str:
        """Return the digest of the data set."""
        return self.content


@dataclass(frozen=True)
class Split:
    """A published training and test set."""

    name: str
    train: Dataset
    test: Dataset
    num_classes: int


def load(name: str, folder=None) -> Split:
    """Return a data set by name, in a folder with the published layout but for digits.

    "digits" (1797 images of 8 x 8 of scikit-learn; a fixed permutation puts 1440 in the training set),
    "mnist" (the four idx files, gzipped or not), "cifar-10" (cifar-10-batches-bin) or
    "cinic-10" (train, valid and test, each with a folder of PNG files a class).
    """
    if name not in LOADERS:
        raise ValueError(f"data must be one of {', '.join(LOADERS)}, got {name!r}")
    if name == "digits":
        return _digits()
    if folder is None:
        raise ValueError(f"data {name} needs its folder: data_folder must be given")
    if not Path(folder).is_dir():
        raise ValueError(f"data_folder must be a folder, got {str(folder)!r}")
    return LOADERS[name](Path(folder))


class _Rows:
    """Images in memory."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index) -> dict:
        return {"inputs": self.inputs[index], "label": self.labels[index]}

    gather = __getitem__  # of many indices as of one


def from_arrays(inputs, labels, scale: float = 1.0) -> Dataset:
    """Return a data set of images (rows, height, width, channels) and labels (rows,) in memory."""
    inputs, labels = np.asarray(inputs), np.asarray(labels, np.int32)
    if inputs.ndim != 4 or labels.shape != inputs.shape[:1]:
        raise ValueError(
            "inputs must be (rows, height, width, channels) with a label a row, got "
            f"{inputs.shape} with labels {labels.shape}"
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        bad = int((~np.isfinite(inputs)).any(axis=(1, 2, 3)).sum())
        raise ValueError(f"inputs must be finite, got NaN or infinity in {bad} of {len(inputs)} rows")
    digest = fingerprints.of_arrays([inputs, labels])
    return Dataset(_Rows(inputs, labels), inputs.shape[1:], scale, digest)


def _digits() -> Split:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    parts = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    train, test = (from_arrays(images[part], labels[part], scale=16.0) for part in parts)
    return Split("digits", train, test, 10)


def _mnist(folder: Path) -> Split:
    def part(name: str) -> Dataset:
        images = _idx(folder / f"{name}-images-idx3-ubyte", 3)
        labels = _idx(folder / f"{name}-labels-idx1-ubyte", 1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise ValueError(f"data_folder {folder} must hold 28 x 28 images with a label each, in {name}")
        return from_arrays(images[..., None], _labels(labels, folder / name), scale=255.0)

    return Split("mnist", part("train"), part("t10k"), 10)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Bytes in the idx format: two zeros, type 8, the number of dimensions, their sizes, the entries."""
    zipped = path.with_name(f"{path.name}.gz")
    content = _content(path if path.exists() or not zipped.exists() else zipped)
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"data file {zipped} cannot be unzipped: {error}") from None
    first = 4 + 4 * dimensions
    sizes = np.frombuffer(content[4:first], ">u4").astype(np.int64)
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) - first != sizes.prod():
        raise ValueError(f"data file {path} must be an idx file of {dimensions} dimensions of bytes")
    return np.frombuffer(content, np.uint8, offset=first).reshape(sizes)


def _cifar_10(folder: Path) -> Split:
    train, test = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
    place = folder / "cifar-10-batches-bin"
    if not place.is_dir():
        raise ValueError(f"data_folder {folder} must hold cifar-10-batches-bin, the published binary version")
    parts = ([_read_binary(place / f"{name}.bin") for name in names] for names in (train, test))
    joined = (map(np.concatenate, zip(*part, strict=True)) for part in parts)
    first, second = (from_arrays(*part, scale=255.0) for part in joined)
    return Split("cifar-10", first, second, 10)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}") from None


def _read_binary(path: Path):
    content = np.frombuffer(_content(path), np.uint8)
    if content.size == 0 or content.size % 3073:
        raise ValueError(f"data file {path} must be records of 3073 bytes, has {content.size} bytes")
    rows = content.reshape(-1, 3073)
    # One color after the other.
    images = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, _labels(rows[:, 0], path)


def _labels(labels, path: Path):
    if labels.size and not 0 <= labels.min() <= labels.max() <= 9:
        raise ValueError(f"data file {path} must have labels 0..9, got {labels.min()}..{labels.max()}")
    return labels.astype(np.int32)


class _Images:
    """PNG files as a Grain source, read when a record is asked for."""

    def __init__(self, paths, labels):
        self.paths, self.labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index) -> dict:
        from PIL import Image

        try:
            with Image.open(self.paths[index]) as image:
                inputs = np.asarray(image.convert("RGB"))
        except OSError:
            raise ValueError(f"data file {self.paths[index]} is not an image") from None
        if inputs.shape != (32, 32, 3):
            raise ValueError(f"data file {self.paths[index]} must be 32 x 32, got {inputs.shape[:2]}")
        return {"inputs": inputs, "label": self.labels[index]}


def _cinic_10(folder: Path) -> Split:
    """Return train (90,000 images) and test; valid is unused, as in the data set size of arXiv 2602.09338."""
    classes = sorted(part.name for part in folder.glob("train/*"))
    if len(classes) != 10:
        raise ValueError(
            f"data_folder {folder} must hold train/ with 10 folders of PNG files, has {len(classes)}"
        )
    train, test = (_png_folder(folder / part, classes) for part in ("train", "test"))
    return Split("cinic-10", train, test, 10)


def _png_folder(folder: Path, classes: list[str]) -> Dataset:
    paths, labels, digest = [], [], hashlib.blake2b(digest_size=16)
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*.png")):
            paths.append(path)
            labels.append(label)
            digest.update(f"{name}/{path.name} {path.stat().st_size}\n".encode())
    if not paths:
        raise ValueError(
            f"data_folder {folder} must hold PNG files in folders {', '.join(classes)}, has none"
        )
    source = grain.MapDataset.source(_Images(paths, labels))
    return Dataset(source, (32, 32, 3), 255.0, digest.hexdigest())


LOADERS = {"digits": _digits, "mnist": _mnist, "cifar-10": _cifar_10, "cinic-10": _cinic_10}
