"""Data as its user formatted it: transforms and columns of Hugging Face, and numbers of 64 bits.

The data sets that come along; MNIST from small files in its published layout, written here.
"""

import gzip
from pathlib import Path

import datasets
import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import jaxacct
from tests.refusals import refused
from tests.train.runs import ROWS, data
from train.batches.data import from_arrays, load
from train.batches.sources import ArrayRows, as_rows, check_numbers

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

PLACES = np.array([3, 0])


def hugging_face():
    return datasets.Dataset.from_dict({"x": data()["x"], "y": data()["y"]})


def thousandfold(rows):
    return {"x": [np.float32(1000) * np.float32(x) for x in rows["x"]], "y": np.float32(rows["y"])}


FORMATS = {
    "no format": (lambda: hugging_face(), 1, {"x", "y"}),
    "with_transform": (lambda: hugging_face().with_transform(thousandfold), 1000, {"x", "y"}),
    "columns": (lambda: hugging_face().with_format("numpy", columns=["x"]), 1, {"x"}),
    "jax": (lambda: hugging_face().with_format("jax"), 1, {"x", "y"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_users_format(name):
    make, factor, columns = FORMATS[name]
    found = as_rows(make()).take(PLACES, 3)
    assert found.keys() == columns
    np.testing.assert_allclose(found["x"][:2], factor * data()["x"][PLACES], rtol=1e-6)
    assert not found["x"][2].any()


def test_formats_whose_rows_are_tables_are_refused():
    for name in ("pandas", "arrow"):
        message = rf"^data must be .* got format '{name}': use with_format\('numpy'\)$"
        refused(message, as_rows, hugging_face().with_format(name))


WIDE = {
    "int64": (np.array([1, 2**40 + 3]), r"integers from -2147483648 to 2147483647.*of int64 in ids"),
    "negative": (np.array([1, -(2**31) - 1]), "integers from -2147483648"),
    "uint64": (np.array([1, 2**32], np.uint64), "integers from 0 to 4294967295"),
    "seconds": (1.7e9 + np.arange(2), r"float32 keeps where they are 2\^24 or more.*of float64 in ids"),
    "fractions": (np.array([1.0, 1.7e9 + 0.25]), "float32 keeps"),
    "beyond float32": (np.array([1.0, 1e39]), "float32 keeps"),
}


class Rows:
    def __init__(self, column):
        self.column = column

    def __len__(self):
        return len(self.column)

    def __getitem__(self, index):
        return {"ids": self.column[index]}


def test_numbers_that_32_bits_change_are_refused():
    for column, message in WIDE.values():
        said = f"^data must have .*{message}"
        refused(said, ArrayRows, {"ids": column})
        refused(said, lambda column: as_rows(Rows(column)).take(np.arange(2), 2), column)


def test_a_number_of_a_later_batch_is_warned_of_and_ends_no_run():
    """Attack: with a record of its own kind a run would end in the middle, in the first batch that has it."""
    column = np.arange(ROWS)
    rows = as_rows(Rows(column))
    column[next(row for row in range(12, 20) if row not in rows._probes)] = 2**40
    rows.take(np.arange(4, 12), 8)
    with pytest.warns(UserWarning, match=r"^data must have integers .*of int64 in ids.*JAX changes"):
        found = rows.take(np.arange(12, 20), 8)
    assert 2**40 in found["ids"]


def test_numbers_that_32_bits_keep_arrive():
    """Limits of 32 bits, floats below 2^24, larger ones that float32 has, and 64 bits as asked."""
    kept = {
        "ids": np.array([-(2**31), 2**31 - 1]),
        "unsigned": np.array([0, 2**32 - 1], np.uint64),
        "reals": np.array([0.1, 2.0**24 - 0.3]),
        "large": np.array([2.0**40, -(2.0**30)]),
    }
    assert ArrayRows(kept).take(np.arange(2), 2)["ids"].tolist() == [-(2**31), 2**31 - 1]
    with jax.enable_x64(True):
        ArrayRows({"ids": np.array([2**40]), "seconds": np.array([1.7e9 + 0.25])})


def test_records_are_refused_with_the_line_that_helps():
    """`np.load` of a structured array, as of `np.genfromtxt(names=True)`; bfloat16 has the same kind."""
    records = np.zeros(ROWS, [("x", np.float32), ("y", np.float32)])
    refused(r"got records of x, y in data: give a dictionary of columns", ArrayRows, records)
    refused(r"must be numbers, got \|V4 in data", ArrayRows, np.zeros(2, "V4"))
    check_numbers((), np.zeros(2, jax.numpy.bfloat16))


def test_a_folder_of_images_by_the_lines_of_the_guide(tmp_path, monkeypatch):
    guide = (Path(jaxacct.__file__).parent / "guides/data.md").read_text()
    lines = next(part for part in guide.split("```") if "Image.open" in part)
    for name, color in (("cat/1", 0), ("dog/1", 255), ("dog/2", 51)):
        path = tmp_path / f"images/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 5, 3), color, np.uint8)).save(path)
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(lines.removeprefix("python"), found)
    rows = as_rows(found["data"]).take(np.arange(3), 3)
    assert rows["x"].shape == (3, 4, 5, 3) and rows["y"].tolist() == [0, 1, 1]
    np.testing.assert_allclose(rows["x"][:, 0, 0, 0], [0, 1, 0.2], rtol=1e-6)


def test_digits_need_no_folder_and_split_the_same_way_every_time():
    a, b = load("digits"), load("digits")
    assert (len(a.train), len(a.test), a.num_classes, a.shape) == (1440, 357, 10, (8, 8, 1))
    assert a.train.fingerprint() == b.train.fingerprint() != a.test.fingerprint()
    rows = [d.take(np.arange(len(d)), len(d))["inputs"].reshape(len(d), -1) for d in (a.train, a.test)]
    together = np.concatenate(rows)
    expected = load_digits(return_X_y=True)[0] / 16
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))
    assert 0 <= together.min() < together.max() == 1


def test_bad_data_sets(tmp_path):
    refused("data must be one of digits, mnist, got 'svhn'", load, "svhn")
    refused("data_folder must be given", load, "mnist")
    refused("data_folder must be a folder", lambda: load("mnist", tmp_path / "missing"))
    refused("cannot be read", load, "mnist", tmp_path)
    images = np.zeros((3, 2, 2, 1))
    images[1, 0, 1] = np.nan
    refused("must be finite", from_arrays, images, np.zeros(3))


def test_mnist_from_a_folder(tmp_path):
    """The idx format by hand, zipped and not; other shapes, lengths and types are refused."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28), np.uint8), np.array([0, 9, 3, 3, 1], np.uint8)

    def idx(array):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()

    for name in ("train", "t10k"):
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    split = load("mnist", tmp_path)
    found = split.test.take(np.array([4, 1]), 3)
    expected = images[[4, 1]].astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(found["inputs"][:2, ..., 0], expected)
    assert found["labels"].tolist() == [1, 9, 0] and len(split.train) == 5 and split.num_classes == 10
    path = tmp_path / "t10k-labels-idx1-ubyte"
    for bad, word in (
        (idx(labels)[:-1], "idx file"),
        (idx(labels[:4]), "label 0..9 each"),
        (idx(labels + 1), "label 0..9 each"),
        (b"", "idx file"),
        (b"\x1f\x8b nonsense", "cannot be read"),
    ):
        path.write_bytes(bad)
        refused(word, load, "mnist", tmp_path)
    path.unlink()
    refused("cannot be read", load, "mnist", tmp_path)
