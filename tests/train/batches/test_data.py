"""Data sets, MNIST from small files in its published layout, written here; bad files."""

import numpy as np

from tests.refusals import refused
from train.batches.data import from_arrays, load


def test_digits_need_no_folder_and_split_the_same_way_every_time():
    a, b = load("digits"), load("digits")
    assert (len(a.train), len(a.test), a.num_classes, a.shape) == (1440, 357, 10, (8, 8, 1))
    assert a.train.fingerprint() == b.train.fingerprint() != a.test.fingerprint()
    rows = [d.take(np.arange(len(d)), len(d))["inputs"].reshape(len(d), -1) for d in (a.train, a.test)]
    together = np.concatenate(rows)
    from sklearn.datasets import load_digits

    expected = load_digits(return_X_y=True)[0] / 16
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))
    assert 0 <= together.min() < together.max() == 1


def test_bad_input(tmp_path):
    refused("data must be one of digits, mnist, got 'svhn'", load, "svhn")
    refused("data_folder must be given", load, "mnist")
    refused("data_folder must be a folder", lambda: load("mnist", tmp_path / "missing"))
    refused("cannot be read", load, "mnist", tmp_path)
    images = np.zeros((3, 2, 2, 1))
    images[1, 0, 1] = np.nan
    refused("must be finite", from_arrays, images, np.zeros(3))


def test_mnist_from_a_folder(tmp_path):
    """The idx format by hand, zipped and not; other shapes, lengths and types are refused."""
    import gzip

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
    np.testing.assert_array_equal(
        found["inputs"][:2, ..., 0], images[[4, 1]].astype(np.float32) / np.float32(255)
    )
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
