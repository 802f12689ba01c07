"""fit with the user's own loader: what it trains, what it refuses before it trains, and resuming."""

import itertools
import json
import shutil

import grain
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, BufferedToeplitz, FixedOrder, Mechanism
from tests.refusals import refused
from tests.train import runs
from tests.train.runs import KEYS, PARAMS, Crash, crashed, loss, plan, plan_of
from train import fit
from train.batches.given import BatchesError, Committed, GivenBatches
from train.batches.sampler import SamplerState
from train.noise.normals import next_key
from train.options import TrainOptions
from train.run import machine
from train.run.folder import CheckpointError

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")
ROWS, SIZE, EPOCH, STEPS = 20, 4, 5, 12
SCHEME = FixedOrder(STEPS, 1, 3, SIZE, EPOCH)
MATRIX = BufferedToeplitz((0.9, 0.3), (0.2, 0.4), STEPS)


def data():
    return runs.data(ROWS)


def shuffled(seed=0, epochs=3) -> np.ndarray:
    """(steps, SIZE) ids of epochs that are shuffled anew."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(ROWS).reshape(EPOCH, SIZE) for _ in range(epochs)])[:STEPS]


def certified(scheme=SCHEME, strategy=MATRIX, sigma=100.0):
    return plan_of(Mechanism(scheme, strategy, sigma), ROWS)


def run(batches, plan=None, rows="arrays", **options):
    rows = data() if isinstance(rows, str) else rows
    given = {name: options.pop(name, None) for name in ("out", "evaluate")}
    options = TrainOptions(keys=KEYS, **({"checkpoint_every": 5} | options))
    plan = certified() if plan is None else plan
    return fit(plan, PARAMS, loss, rows, optax.sgd(1.0), **given, batches=batches, options=options)


def given_of(batches, scheme=SCHEME) -> GivenBatches:
    return GivenBatches(batches, scheme.patterns, ROWS, scheme.size_of_batches(ROWS), STEPS)


def flat(result) -> np.ndarray:
    return runs.flat(result.params)


class Tensor:
    """A PyTorch tensor in what fit sees of it."""

    def __init__(self, values):
        self.values, self.ndim = np.asarray(values), np.ndim(values)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


class StandInLoader:
    """A PyTorch `DataLoader` in what fit sees of it: tensors with `__array__`, a length, no indexing."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __iter__(self):
        return map(Tensor, self.ids)


def grain_loader(ids):
    """A Grain `DataLoader` of ids in that order, in batches."""
    source = ids.ravel().tolist()
    sampler = grain.samplers.IndexSampler(len(source), shuffle=False, num_epochs=1)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(SIZE)])


@pytest.fixture
def one_key(monkeypatch):
    """Noise that does not depend on the batches, for runs to be compared."""
    monkeypatch.setattr("train.noise.normals.next_key", lambda words, text: words)


@pytest.mark.usefixtures("one_key")
def test_all_loaders_train_the_same_bits():
    ids = shuffled()
    loaders = ids, list(ids), (each for each in ids), StandInLoader(ids), grain_loader(ids)
    found = [*map(run, loaders), run(ids.astype(np.uint16), prefetch=0)]
    for other in found[1:]:
        np.testing.assert_array_equal(flat(other), flat(found[0]))
    assert not np.array_equal(flat(run(shuffled(1))), flat(found[0]))
    assert "at most 3 of them" in found[0].statement


def advance(given: GivenBatches, steps=STEPS) -> np.ndarray:
    """(steps, ids) of the next batches."""
    return np.array([given.next() for _ in range(steps)])


def drawn(batches) -> tuple[np.ndarray, GivenBatches]:
    """(ids of all steps, the batches)."""
    given = given_of(batches)
    return advance(given), given


class Repeated(StandInLoader):
    """A data set of TensorFlow that repeats for ever: `len` raises."""

    def __len__(self):
        raise TypeError("The dataset is infinite.")

    def __iter__(self):
        return itertools.cycle(super().__iter__())


def test_ids_of_several_dtypes():
    """Each batch has one of its own, of integers; the digest is that of the ids."""
    ids = shuffled()
    kinds = [np.uint8, np.int64, np.uint64, ">i4", np.int8]
    mixed = [each.astype(kinds[step % len(kinds)]) for step, each in enumerate(ids)]
    mixed[3] = mixed[3].tolist()
    found, given = drawn(mixed)
    np.testing.assert_array_equal(found, ids)
    assert given.state.digest == drawn(ids)[1].state.digest
    for wrong, said in (
        (np.array([2**63, 1, 2, 3], np.uint64), "ids from 0 to 19, got 1 .. 9223372036854775808"),
        ([0, 1.0, 2, 3], "arrays of integer ids, got float64"),
        (np.array([0, 1, 2, 3], object), "arrays of integer ids, got object"),
        ([True, 1, 2, 3][:1] * 4, "arrays of integer ids, got bool"),
        ({"id": np.arange(4)}, "arrays of integer ids, got object"),
    ):
        refused(said, given_of, [wrong] * STEPS)


def broken():
    """Each is wrong at step 7, the third of the second epoch."""
    good = shuffled()
    of_batch = {
        "too early": ([good[6, 0], *good[7, 1:]], "must not have id"),  # as in step 6, of the same epoch
        "twice in a batch": ([good[7, 1], *good[7, 1:]], "every id once"),
        "too large": ([ROWS, *good[7, 1:]], "ids from 0 to 19"),
        "negative": ([-1, *good[7, 1:]], "ids from 0 to 19"),
        "smaller batch": (good[7][:3], "the plan's 4 ids, got 3 at step 7"),
        "larger batch": (np.arange(5), "the plan's 4 ids, got 5 at step 7"),
        "floats": (good[7].astype(float), "arrays of integer ids, got float64"),
        "not a number": (np.full(SIZE, np.nan), "arrays of integer ids, got float64"),
        "text": (np.array(["a"] * 4), "arrays of integer ids"),
        "truth values": (np.ones(4, bool), "arrays of integer ids, got bool"),
        "a matrix": (good[:4], "arrays of integer ids"),
        "ragged": ([[1], [2, 3], [4]], "arrays of integer ids"),
    }
    found = {name: ([*good[:7], wrong, *good[8:]], said) for name, (wrong, said) in of_batch.items()}
    return found | {"ends early": ((each for each in good[:7]), "12 steps of the run, ended after 7")}


def test_a_wrong_batch_is_refused():
    """In one line, at its step, and at no earlier one."""
    for name in broken():
        batches, said = broken()[name]
        given = given_of(batches)
        advance(given, 7)
        with pytest.raises(BatchesError, match=said) as raised:
            given.next()
        assert "\n" not in str(raised.value) and given.state.step == 7


@pytest.mark.parametrize("name", ["too early", "ends early"])
def test_a_wrong_batch_stops_before_it_is_trained_on(name, tmp_path):
    """It is not trained, no step before it is lost, and the right batches go on to the same bits."""
    batches, said = broken()[name]
    good = shuffled()
    refused(said, run, batches, out=tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    assert sorted(int(each.name) for each in (tmp_path / "run" / "checkpoints").iterdir())[-1] == 7
    if name == "ends early":  # a generator has no length, which a resumed run must share
        good = (each for each in good)
    np.testing.assert_array_equal(flat(run(good, out=tmp_path / "run")), flat(run(shuffled())))


def test_limits_of_the_plan_one_step_off():
    """Attack: b, k and epochs each broken by one step; the same batches are fine one step later."""
    same = np.tile(np.random.default_rng(0).permutation(ROWS).reshape(EPOCH, SIZE), (3, 1))[:STEPS]
    apart = FixedOrder(STEPS, EPOCH, 3, SIZE)
    given_of(same, apart)
    early = same.copy()
    early[1, 0], early[0, 0] = same[0, 0], same[1, 0]
    early = np.concatenate([early[:5], same[5:]])  # that id is in steps 1 and 5: 4 apart in place of 5
    for scheme, batches, step in (
        (apart, early, 5),
        (FixedOrder(STEPS, 1, 2, 2), same[:, :2], 10),  # a third time
        (FixedOrder(STEPS, 1, 3, SIZE, 5), np.concatenate([same[:4], same[:1], same[5:]]), 4),
    ):
        given = given_of(batches, scheme)
        advance(given, step)
        refused(r"must not have id|times at most", given.next)
        assert given.state.step == step
    advance(given_of(same, apart))


def test_what_is_no_loader_is_refused_before_anything(tmp_path):
    for batches, said in (
        (7, "batches must be an iterable, got int"),
        (shuffled()[:11], "at least the 12 steps of the run, got 11"),
        ([], "at least the 12 steps"),
    ):
        refused(said, run, batches, out=tmp_path / "run")
    refused("the plan's 4 ids, got 3 at step 0", run, shuffled()[:, :3], out=tmp_path / "run")
    assert not (tmp_path / "run" / "secret.json").exists()
    other = plan(dataset_size=ROWS)
    refused("batches must not be given for a plan of b-min-sep", run, shuffled(), plan=other)
    run(shuffled()[:6], steps=6)


def test_other_batches_on_resume_are_refused(tmp_path):
    """Another shuffle, an earlier order of two batches, another length."""
    stopped(8, tmp_path / "run", shuffled(), checkpoint_every=2)
    longer = np.concatenate([shuffled(), np.arange(4)[None]])
    for batches, said in (
        (shuffled(1), "the same as before"),
        (swapped(2), "the same as before up to step"),
        (longer, "another batches|'length': 12"),
        ((each for each in shuffled()), "'length': 12"),
    ):
        refused(said, run, batches, out=tmp_path / "run", checkpoint_every=2)
    np.testing.assert_array_equal(flat(run(shuffled(), out=tmp_path / "run")), flat(run(shuffled())))


@pytest.mark.parametrize("field", ["digest", "step"])
def test_an_edited_record_of_participations_is_refused(field, tmp_path):
    """Attack: the record in the checkpoint is changed, so that other batches or more of them would fit."""
    stopped(8, tmp_path / "run", shuffled(), checkpoint_every=2)
    (newest,) = sorted((tmp_path / "run" / "checkpoints").iterdir(), key=lambda each: int(each.name))[-1:]
    (path,) = newest.rglob("sampler/metadata")
    record = json.loads(path.read_text())
    record[field] = {"digest": "0" * 32, "step": record["step"] - 1}[field]
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="damaged"):
        run(shuffled(), out=tmp_path / "run", checkpoint_every=2)


def test_absent_examples_leave_their_places_empty():
    """Add-or-remove-one: the batches of the others are the same with 18 of 20 examples as with all."""
    absent = plan_of(Mechanism(SCHEME, BandedToeplitz.identity(), 0.5, "add-or-remove-one"), ROWS)
    rows = data()
    fewer = {name: each[:18] for name, each in rows.items()}
    there = np.arange(ROWS) < 18
    zeros = {"x": rows["x"] * there[:, None], "y": rows["y"] * there}
    for batches in (shuffled(), None):
        missing = run(batches, plan=absent, rows=fewer)
        # A row of zeros has a gradient in b alone; of one with loss 0 it is zero.
        whole = run(batches, plan=absent, rows=zeros)
        assert missing.steps == whole.steps
    refused("data must have", lambda: run(shuffled(), rows=fewer))


# Attacks on runs whose noise is used twice: two models with one noise differ by an exact sum of gradients.
# Each copies or empties a folder, continues it with something else, and reads the difference of what two runs
# publish. Where it is not refused, the noise of both must differ.


def swapped(step: int) -> np.ndarray:
    """The order with the batches of two steps, in one epoch, in each other's place."""
    found = shuffled()
    found[[step, step - 1]] = found[[step - 1, step]]
    return found


def last_of_epoch() -> np.ndarray:
    """Ids that step 11, the second of its epoch, may have in place of its own: one of them is another."""
    found = shuffled()[11]
    found[0] = np.setdiff1d(np.arange(ROWS), shuffled()[10:])[0]
    return found


def stopped(after: int, out, batches, **options):
    """A run that ends after this many steps, the last of them in no checkpoint."""

    def stop(step, info):
        if step >= after:
            raise Crash

    with pytest.raises(Crash):
        run(batches, out=out, callback=stop, **options)


def test_another_loss_elsewhere_is_refused(tmp_path, monkeypatch):
    """Attack: the difference of both models was the sum of the last batch, to 2e-4 at noise 100."""
    loud = plan("poisson", dataset_size=runs.ROWS, sigma=100.0)
    options = dict(plan=loud, optimizer=optax.sgd(1.0), checkpoint_every=11)
    crashed(12, out=tmp_path / "one", **options)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    runs.run(out=tmp_path / "one", **options)
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "9", "numpy": "9"})
    for other in (lambda p, e: 0.0 * loss(p, e), lambda p, e: loss(p, e) + 0.0 * p["b"] ** 2):
        given = dict(out=tmp_path / "copy", loss=other, elastic=True) | options
        refused("another loss, or a release of JAX", runs.run, **given)


def test_other_batches_of_a_step_that_was_begun_are_refused(tmp_path):
    """Attack: ids of steps after the checkpoint, whose noise was drawn for the first ones."""
    out = tmp_path / "run"
    stopped(8, out, shuffled())
    assert sorted(int(each.name) for each in (out / "checkpoints").iterdir())[-1] == 5
    refused("the same as before at step 5", run, swapped(6), out=out)
    np.testing.assert_array_equal(flat(run(shuffled(), out=out)), flat(run(shuffled())))


def test_copies_with_other_batches_have_other_noise(tmp_path):
    """Attack: copied before the last step, each copy with another example: the difference was its gradient.

    With the same noise that is at most 2 / 4. Of independent noise each of 4 numbers has the standard
    deviation 100 sqrt(2) / 4; all are below 1 / 2 with probability 2e-8.
    """
    other = shuffled()
    other[11] = last_of_epoch()
    stopped(12, tmp_path / "one", shuffled(), checkpoint_every=11)
    shutil.rmtree(tmp_path / "one/private")  # as if it had been copied before step 12 began
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    models = [flat(run(batches, out=tmp_path / name)) for name, batches in
              (("one", shuffled()), ("copy", other))]  # fmt: skip
    assert np.abs(models[0] - models[1]).max() > 0.5
    np.testing.assert_array_equal(models[0], flat(run(shuffled())))


def test_a_shown_step_without_its_batches_is_refused(tmp_path):
    """Attack: the record of batches is removed with the newest checkpoints; others may follow."""
    other = shuffled()
    other[11] = last_of_epoch()
    run(shuffled(), out=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/12")
    refused("the same as before at step 11", run, other, out=tmp_path)
    (tmp_path / "private/batches").unlink()
    refused("has shown step 12 and has neither a checkpoint of it nor its batches", run, other, out=tmp_path)


def test_lines_that_were_never_finished_are_dropped(tmp_path):
    """Step 3 was killed while it was committed: it is committed again, the others are as they were."""
    path, key = tmp_path / "batches", (1, 2, 3, 4)
    states = [SamplerState(key, step, f"digest {step}") for step in range(1, 5)]
    first = Committed(path, key, 0)
    for state in states:
        first.add(state)
    first.flush()
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 + 3])
    again = Committed(path, key, 1)
    assert again.last == 2
    for state in states[1:]:
        again.add(state)
    again.close()
    assert path.read_bytes() == whole and b"digest" not in whole
    other = Committed(path, key, 1)
    refused("at step 2", other.add, SamplerState(key, 3, "other"))
    other.close()


class Pairs:
    """A data set of (inputs, labels)."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return data()["x"][index], data()["y"][index]


class LoaderOfPairs(StandInLoader):
    """One that yields rows in place of ids, which its `batch_sampler` has."""

    dataset, batch_sampler = Pairs(), shuffled().tolist()

    def __iter__(self):
        return (list(map(Tensor, self.dataset[ids])) for ids in self.ids)


def loss_of_pair(params, example):
    return loss(params, {"x": example[0], "y": example[1]})


@pytest.mark.usefixtures("one_key")
def test_a_loader_of_inputs_and_labels():
    """Both halves of a loader train the bits of arrays; the loader is refused with the line that helps."""
    loader, options = LoaderOfPairs(shuffled()), TrainOptions(keys=KEYS, checkpoint_every=5)
    given = certified(), PARAMS, loss_of_pair, loader.dataset, optax.sgd(1.0)
    found = fit(*given, batches=loader.batch_sampler, options=options)
    np.testing.assert_array_equal(flat(found), flat(run(shuffled())))
    said = r"ids alone, got rows at step 0; .* data=loader\.dataset and the ids of loader"
    refused(said, GivenBatches, loader, SCHEME.patterns, ROWS, SIZE, len(loader))


def test_a_dataset_that_repeats_for_ever():
    """Its length is not stated; the checks of its order are those of any other."""
    ids = shuffled()
    found, given = drawn(Repeated(ids))
    np.testing.assert_array_equal(found, ids)
    assert given.described() == {"length": None}
    given = given_of(Repeated(ids[:4]))  # repeats four batches of an epoch of five
    refused("at step 4, as it was in step 0", advance, given)
    assert given.state.step == 4


def test_a_batch_of_all_examples():
    """The batch size N: every step is an epoch, one participation a step is allowed and no other size."""
    scheme = FixedOrder.from_batch_size(dataset_size=ROWS, batch_size=ROWS, iterations=STEPS)
    assert (scheme.participations, scheme.steps_per_epoch, scheme.min_separation) == (STEPS, 1, 1)
    given = given_of([np.roll(np.arange(ROWS), step) for step in range(STEPS)], scheme)
    assert advance(given).shape == (STEPS, ROWS)
    refused("the plan's 20 ids, got 19", given_of, [np.arange(ROWS - 1)] * STEPS, scheme)
    sizes = dict(dataset_size=ROWS, batch_size=ROWS + 1, iterations=STEPS)
    refused("batch_size must be at most dataset_size 20, got 21", FixedOrder.from_batch_size, **sizes)


def test_examples_that_are_left_over():
    """22 examples in batches of 4: each epoch may leave out others, and none may come twice in one."""
    scheme = FixedOrder.from_batch_size(dataset_size=ROWS + 2, batch_size=SIZE, iterations=STEPS)
    assert scheme.steps_per_epoch == EPOCH
    generator = np.random.default_rng(4)
    ids = np.concatenate([generator.permutation(ROWS + 2)[:ROWS].reshape(EPOCH, SIZE) for _ in range(3)])
    assert len({frozenset(part.ravel()) for part in ids.reshape(3, -1)}) == 3
    advance(GivenBatches(ids, scheme.patterns, ROWS + 2, SIZE, STEPS))
    left = np.setdiff1d(np.arange(ROWS + 2), ids[:EPOCH])
    ids[EPOCH - 1, :2] = left  # the last rows of the first epoch
    ids[EPOCH - 1, 2] = ids[0, 0]
    given = GivenBatches(ids, scheme.patterns, ROWS + 2, SIZE, STEPS)
    refused(f"at step {EPOCH - 1}, as it was in step 0", advance, given)
    assert given.state.step == EPOCH - 1


def test_no_two_texts_have_one_key():
    """The key of a step is a function of all keys and texts before it."""
    keys = [next_key(KEYS[1], text) for text in ("a", "b")] + [next_key(KEYS[1] + 1, "a"), KEYS[1]]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4
    assert all(key.shape == (8,) and key.dtype == np.uint32 for key in keys[:3])
