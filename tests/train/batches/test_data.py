"""Data sets on small files in their published layouts, written here; bad files; padding."""

import pickle

import numpy as np
import pytest
from PIL import Image

from train.batches.data import from_arrays, load


def test_digits_need_no_folder_and_split_the_same_way_every_time():
    a, b = load("digits"), load("digits")
    assert (len(a.train), len(a.test), a.num_classes, a.train.shape) == (1440, 357, 10, (8, 8, 1))
    assert a.train.fingerprint() == b.train.fingerprint() != a.test.fingerprint()
    rows = [d.take(np.arange(len(d)), len(d))["inputs"].reshape(len(d), -1) for d in (a.train, a.test)]
    together = np.concatenate(rows)
    from sklearn.datasets import load_digits

    expected = load_digits(return_X_y=True)[0] / 16
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))
    assert 0 <= together.min() < together.max() == 1


def test_rows_beyond_the_indices_are_exactly_zero():
    taken = load("digits").train.take(np.array([3, 1]), 5)
    assert taken["inputs"].shape == (5, 8, 8, 1)
    assert taken["inputs"].dtype == np.float32
    assert taken["labels"].dtype == np.int32
    assert not taken["inputs"][2:].any()
    assert not taken["labels"][2:].any()
    one = load("digits").train.take(np.array([1]), 1)
    np.testing.assert_array_equal(taken["inputs"][1], one["inputs"][0])


def cifar(folder, rows: int = 4):
    """Random images in the published binary layout; (train images, train labels)."""
    generator = np.random.default_rng(0)
    images, labels = [], []
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = generator.integers(0, 256, (rows, 3072), dtype=np.uint8)
        classes = generator.integers(0, 10, rows, dtype=np.uint8)
        (place / f"{name}.bin").write_bytes(np.column_stack([classes, pixels]).tobytes())
        if name != "test_batch":
            images.append(pixels)
            labels.append(classes)
    return np.concatenate(images), np.concatenate(labels)


def test_cifar_10(tmp_path):
    pixels, labels = cifar(tmp_path)
    split = load("cifar-10", tmp_path)
    assert (len(split.train), len(split.test), split.train.shape) == (20, 4, (32, 32, 3))
    taken = split.train.take(np.arange(20), 20)
    np.testing.assert_array_equal(taken["labels"], labels)
    # Published: 1024 bytes of red, then green, then blue, row by row.
    assert taken["inputs"][7, 2, 5, 1] == np.float32(pixels[7, 1024 + 2 * 32 + 5]) / np.float32(255)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    (place / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="must hold cifar-10-batches-bin, the published binary version"):
        load("cifar-10", tmp_path)
    place.rename(tmp_path / "cifar-10-batches-bin")
    for name in ("data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin"):
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="records of 3073 bytes"):
        load("cifar-10", tmp_path)
    assert not (tmp_path / "ran").exists()


def cinic(folder, classes=10):
    generator = np.random.default_rng(1)
    for part, rows in (("train", 3), ("valid", 1), ("test", 2)):
        for label in range(classes):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for row in range(rows):
                pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                pixels[0, 0] = (label, row, 0)
                Image.fromarray(pixels).save(place / f"img-{row}.png")


def test_cinic_10(tmp_path):
    cinic(tmp_path)
    split = load("cinic-10", tmp_path)
    assert (len(split.train), len(split.test), split.num_classes) == (30, 20, 10)
    taken = split.train.take(np.arange(30), 30)
    np.testing.assert_array_equal(np.round(taken["inputs"][:, 0, 0, 0] * 255), taken["labels"])
    (tmp_path / "train/class4/img-1.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"img-1\.png is not an image"):
        load("cinic-10", tmp_path).train.take(np.arange(30), 30)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="data must be one of digits, mnist, cifar-10, cinic-10, got 'svhn'"):
        load("svhn")
    with pytest.raises(ValueError, match="data_folder must be given"):
        load("cifar-10")
    with pytest.raises(ValueError, match="data_folder must be a folder"):
        load("cifar-10", tmp_path / "missing")
    with pytest.raises(ValueError, match="must hold cifar-10-batches-bin"):
        load("cifar-10", tmp_path)
    with pytest.raises(ValueError, match="10 folders of PNG files, has 0"):
        load("cinic-10", tmp_path)
    cifar(tmp_path)
    short = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    short.write_bytes(short.read_bytes()[:-5])
    with pytest.raises(ValueError, match="records of 3073 bytes"):
        load("cifar-10", tmp_path)
    short.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        load("cifar-10", tmp_path)


def test_bad_arrays():
    images, labels = np.zeros((3, 2, 2, 1)), np.zeros(3)
    with pytest.raises(ValueError, match="1 of 3 rows"):
        from_arrays(np.where(np.arange(12).reshape(3, 2, 2, 1) == 5, np.nan, images), labels)
    with pytest.raises(ValueError, match="a label a row"):
        from_arrays(images, np.zeros(4))
    with pytest.raises(ValueError, match="height, width, channels"):
        from_arrays(np.zeros((3, 4)), labels)


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
        (idx(labels[:4]), "label each"),
        (idx(labels + 1), "labels 0..9"),
        (b"", "idx file"),
        (b"\x1f\x8b nonsense", "unzipped"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=word) as caught:
            load("mnist", tmp_path)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        load("mnist", tmp_path)
