"""Data that is read by place: every adapter against the rows in memory, fingerprints, sources that cheat.

A run goes on with the constants that its loss began with, however JAX keeps them: digests of traces.
"""

import hashlib
import time
import tracemalloc

import chex
import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.refusals import refused
from tests.train.runs import ROWS, data, flat, run
from train.batches import fingerprints, sources
from train.batches.sources import ArrayRows, Indexed, MemoryMapped, SourceRows, as_rows

pytestmark = pytest.mark.usefixtures("shared_programs")

PLACES = np.array([59, 3, 31, 3, 0])


class Listed:
    """Rows one by one, without a gather or a fingerprint."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays["y"])

    def __getitem__(self, index):
        return {name: array[index] for name, array in self.arrays.items()}


class Several(Listed):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Formatted(Several):
    """As a `datasets.Dataset` with the format "numpy": columns by name, too, and a `take` of its own."""

    def take(self, n):
        raise AssertionError("it is not that of a data set")


def in_files(folder, arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in arrays}


of_grain = grain.MapDataset.source
SOURCES = {
    "listed": lambda folder: Listed(data()),
    "several": lambda folder: Several(data()),
    "grain": lambda folder: of_grain(Listed(data())),
    "grain-mapped": lambda folder: of_grain(Listed(data())).map(lambda row: dict(row)),
    "memory-mapped": lambda folder: MemoryMapped(in_files(folder, data())),
    "hugging-face": lambda folder: Formatted(data()),
}


def check_rows(rows, places, size: int) -> None:
    """The rows in memory, bit for bit."""
    chex.assert_trees_all_equal(rows.take(places, size), ArrayRows(data()).take(places, size), strict=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_rows_in_memory(kind, tmp_path):
    """In any order, one place several times, and none at all; padded by zeros."""
    rows = as_rows(SOURCES[kind](tmp_path))
    assert len(rows) == ROWS and isinstance(rows, SourceRows)
    for places, size in ((PLACES, 8), (np.arange(ROWS), ROWS), (np.zeros(0, np.int64), 4)):
        check_rows(rows, places, size)


def test_training_from_a_source_ends_with_the_bits_of_arrays(tmp_path):
    source = MemoryMapped(in_files(tmp_path, data()))
    found = run(data=source, out=tmp_path / "run")
    np.testing.assert_array_equal(flat(found.params), flat(run().params))
    np.testing.assert_array_equal(flat(run(data=source, out=tmp_path / "run").params), flat(found.params))
    other = Listed(data() | {"y": np.ones(ROWS, np.float32)})
    refused("a run on other data", run, data=other, out=tmp_path / "run")


def changed(row: int):
    arrays = data()
    arrays["y"][row] += 1
    return arrays


def test_fingerprints_of_content_see_every_row():
    """Those of mapped files are those of the arrays in memory, and as of one piece."""
    arrays = data()
    parts = [f"{name} {a.dtype} {a.shape}\n".encode() + a.tobytes() for name, a in sorted(arrays.items())]
    assert ArrayRows(arrays).fingerprint() == hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
    for make in (Indexed, lambda arrays: MemoryMapped(Listed(arrays).arrays)):
        made = [make(Listed(a) if make is Indexed else a).fingerprint() for a in (arrays, changed(31))]
        assert made[0] != made[1]
    assert MemoryMapped(arrays).fingerprint() == ArrayRows(arrays).fingerprint()


def test_fingerprints_of_a_version_see_what_they_say_they_see(tmp_path, monkeypatch):
    """The version, the length and some rows; a change of another row under it is not seen, and said so."""
    monkeypatch.setattr(fingerprints, "SAMPLED_ROWS", 4)  # rows 0, 20, 39, 59

    def mapped(content, version):
        return MemoryMapped(in_files(tmp_path, content), version).fingerprint()

    def listed(content, version):
        return Indexed(Listed(content), version).fingerprint()

    for digest in (mapped, listed):
        first = digest(data(), "2026-11")
        assert first == digest(data(), "2026-11") == digest(changed(30), "2026-11")
        assert first != digest(changed(20), "2026-11") and first != digest(changed(59), "2026-11")
        assert first != digest(data(), "2026-12") and first != digest(data(), None)
        assert digest(changed(30), None) != digest(data(), None)
        assert digest({name: rows[:-1] for name, rows in data().items()}, "2026-11") != first


def test_what_is_large_stays_on_the_disk(tmp_path, monkeypatch):
    """Without a version all of it is read for the fingerprint all the same."""
    mapped = in_files(tmp_path, data())
    assert isinstance(as_rows(mapped), ArrayRows)
    monkeypatch.setattr(sources, "LARGE", 100)
    rows = as_rows(mapped)
    assert isinstance(rows, SourceRows) and isinstance(rows.source, MemoryMapped)
    assert rows.fingerprint() == ArrayRows(mapped).fingerprint()


class Cheat(Listed):
    """A source whose rows are not what was promised, in one way or another."""

    def __init__(self, how, honest=0):
        super().__init__(data())
        self.how, self.count, self.honest = how, 0, honest
        self.readings = np.zeros(ROWS, int)
        self.buffer = super().__getitem__(np.arange(ROWS))

    def __getitem__(self, index):
        row = super().__getitem__(index)
        self.count += 1
        if self.count <= self.honest:
            return row
        if self.how == "counter":  # normalised by a running mean, say
            return row | {"y": np.float32(row["y"] + self.count)}
        if self.how == "shuffled":  # another order every epoch
            return super().__getitem__((index + self.count // 5) % len(self))
        if self.how == "random":
            return row | {"x": row["x"] + np.random.default_rng().normal(size=3).astype(np.float32)}
        if self.how == "buffer":  # which the last batch was read into, too
            for name, array in self.buffer.items():
                array[:] = row[name]
            return {name: array[0] for name, array in self.buffer.items()}
        return self.at_second_readings(row, index)

    def at_second_readings(self, rows, indices):
        """The first two readings of a row are equal, the next two differ, and so on."""
        np.add.at(self.readings, indices, 1)
        if self.how == "second readings":
            rows = rows | {"y": rows["y"] + np.float32((self.readings[indices] - 1) // 2 % 2)}
        return rows

    def gather(self, indices):
        rows = {name: array[indices] for name, array in self.arrays.items()}
        if len(indices) == 1:
            return rows
        if self.how == "batch" or (self.how == "large batch" and len(indices) > 6):
            rows["y"] = rows["y"] - rows["y"].mean()  # normalised over what is read together
        absorbing = {"last": -1, "first": 0, "one": indices == 17}
        if self.how in absorbing and len(indices) != 6:
            rows["y"][absorbing[self.how]] = rows["y"].sum()
        if self.how == "buffer" and len(indices) != 6:
            for name, array in self.buffer.items():
                array[: len(indices)] = rows[name]
            return {name: array[: len(indices)] for name, array in self.buffer.items()}
        return self.at_second_readings(rows, indices)

    def fingerprint(self):
        return "cheat"


@pytest.mark.parametrize("how", ["counter", "batch", "second readings"])
def test_rows_that_depend_on_others_are_refused_before_anything_is_drawn(how, tmp_path):
    """Each of these would let one record into the gradients of others."""
    assert as_rows(Cheat("honest"))
    message = "data must give the same row whenever and with whatever it is read"
    refused(message, run, data=Cheat(how), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_source_that_begins_to_cheat_stops_the_run():
    """Found by the rows that are read again with every batch; no row of a batch is named."""
    for how in ["counter", "shuffled", "random", "large batch", "last", "first"]:
        with pytest.raises(ValueError, match="came out otherwise") as caught:
            run(data=Cheat(how, honest=21))
        text = str(caught.value)
        if how not in ("counter", "shuffled", "random"):
            assert "a row of a batch" in text


def test_a_source_may_use_its_memory_again():
    """What the checks read then overwrites the batch, which is copied before."""
    rows = as_rows(Cheat("buffer"))
    for indices in batches(3):
        check_rows(rows, indices, 10)


def batches(number, size=8):
    """Places of rows, among them 17 in every fourth batch at a random place."""
    generator = np.random.default_rng(0)
    for batch in range(number):
        indices = generator.choice(np.setdiff1d(np.arange(ROWS), 17), size, replace=False)
        if batch % 4 == 0:
            indices[generator.integers(size)] = 17
        yield indices


@pytest.mark.parametrize("how", ["last", "first", "one", "second readings"])
def test_rows_that_absorb_their_batch_or_change_are_found_at_once(how):
    """All rows of the first batches are read again alone, twice; here the first batch decides."""
    cheat = Cheat("honest")
    rows = as_rows(cheat)
    cheat.how = how
    refused("a row of a batch came out otherwise", lambda: rows.take(next(batches(1)), 10))
    for indices in batches(12):
        as_rows(Cheat("honest")).take(indices, 10)


def taken(how, number, monkeypatch, **options):
    """Batches until a cheat of later batches is found; None where it is not."""
    for name, value in options.items():
        monkeypatch.setattr(sources, name, value)
    cheat = Cheat("honest")
    rows = as_rows(cheat)
    cheat.how = how
    for count, indices in enumerate(batches(number)):
        try:
            rows.take(indices, 10)
        except ValueError:
            return count
    return None


@pytest.mark.parametrize("how", ["last", "first"])
def test_random_places_of_later_batches_and_the_ends_of_first_ones_are_checked(how, monkeypatch):
    """One row of eight a batch: not found in 150 batches with probability (7/8)^150 = 2e-9."""
    with monkeypatch.context() as patch:
        assert taken(how, 150, patch, FIRST_BATCHES=0, DIGESTED_A_BATCH=0) is not None
    assert taken(how, 1, monkeypatch, CHECKED_AT_FIRST=0, DIGESTED_A_BATCH=0) == 0


def test_a_row_that_is_in_no_batch_is_read_again():
    """Row 59, one of six: not read again in 100 batches with probability (5/6)^100 = 1e-8."""
    cheat = Cheat("honest")
    rows = as_rows(cheat)
    cheat.arrays["y"][59] += 1
    with pytest.raises(ValueError, match="row 59 came out otherwise"):
        for _ in range(100):
            rows.take(np.arange(4), 4)


@pytest.mark.parametrize("how", ["last", "first", "one", "second readings", "large batch"])
def test_a_row_is_compared_with_itself_in_earlier_batches(how, monkeypatch):
    """By its digest alone: nothing is read again but the probes, whose places are no cheats'."""
    monkeypatch.setattr(sources, "_same", lambda *_: None)
    assert taken(how, 40, monkeypatch) is not None
    assert taken(how, 40, monkeypatch, DIGESTED=0) is None
    assert taken("honest", 40, monkeypatch) is None


def test_the_checks_cost_little_later():
    """Readings beside the batch: at first each of its rows twice, later one row; and a probe."""
    cheat = Cheat("honest")
    rows = as_rows(cheat)
    counts = []
    for indices in batches(sources.FIRST_BATCHES + 20):
        before = cheat.count
        rows.take(indices, 10)
        counts.append(cheat.count - before)
    assert set(counts[: sources.FIRST_BATCHES]) == {2 * 8 + 1}
    assert set(counts[sources.FIRST_BATCHES :]) == {2}
    assert len(rows._digests) <= ROWS


def test_what_is_read_again_is_drawn_anew_in_every_process():
    """Not of a key of the run, nor of anything fixed."""
    places = [tuple(as_rows(Cheat("honest"))._random.integers(2**62, size=2)) for _ in range(3)]
    assert len(set(places)) == 3


OTHER_DTYPES = "same row|names, shapes and dtypes, got others"
REFUSED = {
    "text": (Listed(data() | {"y": np.array(["a"] * ROWS)}), "data must be numbers, got <U1 in y"),
    "none": (of_grain(Listed(data())).filter(lambda row: False), "got None: filter before"),
    "ragged": (of_grain([np.zeros(1 + i % 2) for i in range(ROWS)]), "same names and shapes, got others"),
    "dtypes": (of_grain([np.zeros(1, "if"[i % 2 == 0]) for i in range(ROWS)]), OTHER_DTYPES),
    "empty": (of_grain([]), "at least one row, got 0"),
}


def test_bad_sources(tmp_path):
    for source, message in REFUSED.values():
        refused(message, as_rows, source)
    arrays = in_files(tmp_path, data())
    refused(r"same number of rows, got \[3, 60\]", lambda: MemoryMapped({"a": arrays["x"], "b": np.zeros(3)}))
    refused("version must be a text, got 3", MemoryMapped, arrays, 3)
    refused("version must be a text, got ''", lambda: Indexed(Listed(data()), ""))
    refused("must have a length and rows by index, got int", Indexed, 3)
    for place in (-1, ROWS):
        with pytest.raises(IndexError, match=f"indices must be 0 to {ROWS - 1}"):
            ArrayRows(data()).take([0, place], 4)


HUGE = 14_700_000


def test_fourteen_million_rows_start_at_once_and_in_little_memory(tmp_path):
    """A sparse file: 45 GB of zeros that take no room, but for a row of ones."""
    path = tmp_path / "huge.npy"
    array = np.lib.format.open_memmap(path, "w+", np.uint8, (HUGE, 3072))
    array[HUGE // 3] = 1
    array.flush()
    tracemalloc.start()
    begun = time.process_time()
    rows = as_rows(MemoryMapped(np.load(path, mmap_mode="r"), "2026-11"))
    digest = rows.fingerprint()
    found = rows.take(np.array([HUGE // 3, HUGE - 1]), 3)
    seconds, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.sum(axis=1).tolist() == [3072, 0, 0] and len(digest) == 32
    # Measured: 0.02 s, 2 MB. What reads it whole takes minutes, what copies it 45 GB.
    assert seconds < 5 and peak < 50e6


SCHEMA = [("x", pa.list_(pa.float32(), 3)), ("y", pa.float32())]


def test_parquet_files_by_datasets(tmp_path):
    """The rows and the trained bits of arrays."""
    table = pa.table({"x": data()["x"].tolist(), "y": data()["y"]}, pa.schema(SCHEMA))
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    mapped = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=tmp_path / "cache")
    for source in (mapped, mapped.with_format("numpy")):
        rows = as_rows(source)
        assert len(rows) == ROWS
        check_rows(rows, PLACES, 8)
    np.testing.assert_array_equal(flat(run(data=mapped, steps=3).params), flat(run(steps=3).params))


# In JAX 0.8 nothing can be lowered in this way.
needs_apart = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX lowers no constants apart")


def programs(by):
    constant = by + jnp.arange(300.0)

    def of_loop(x):
        return jax.lax.scan(lambda y, _: (y + (constant * x).sum(), None), 0.0, None, length=2)[0]

    def of_branch(x):
        return jax.lax.cond(x > 0, lambda: constant.sum(), lambda: 0.0)

    plain, inner = (lambda x: constant * x), jax.jit(lambda x: constant * x)
    kept = (lambda x: constant), (lambda x: jax.random.bits(jax.random.key(0)).astype(jnp.float32) * by * x)
    return [plain, of_loop, of_branch, lambda x: inner(x).sum(), *kept]


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_apart)])
def test_every_constant_is_in_the_digest(apart):
    before = jax.config.values.get("jax_use_simplified_jaxpr_constants", False)
    try:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", True)
        digests = [
            [fingerprints.of_trace(jax.jit(function).trace(2.0).jaxpr) for function in programs(by)]
            for by in (1, 1, 2)
        ]
    finally:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", before)
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_a_constant_key_is_in_the_digest():
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    traces = [jax.make_jaxpr(lambda x, key=key: jax.random.normal(key) + x)(np.float32(1)) for key in keys]
    digests = list(map(fingerprints.of_trace, traces))
    assert digests[0] == digests[1] != digests[2]


def test_sets_are_in_the_digest_in_one_order():
    """Not in that of the set, which is another for texts in another process, and for these by insertion."""
    sets = frozenset((0, 8)), frozenset((8, 0))
    assert sets[0] == sets[1] and list(sets[0]) != list(sets[1])
    assert len({tuple(fingerprints._parameter(each)) for each in sets}) == 1
    assert tuple(fingerprints._parameter(sets[0])) != tuple(fingerprints._parameter(frozenset()))
