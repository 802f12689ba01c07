"""Attacks on runs whose noise is used twice: two models with one noise differ by an exact sum of gradients.

Each attack copies or empties a folder, continues it with something else, and reads the difference of what two
runs publish. Where it is not refused, the noise of both must differ.
"""

import shutil

import numpy as np
import optax
import pytest

from jaxacct import BufferedToeplitz, FixedOrder, Mechanism
from tests.train.plans import plan, plan_of
from tests.train.test_loop import KEYS, PARAMS, ROWS, Crash, crash_at, data, flat, loss, run
from train import fit
from train.batches.given import BatchesError, Committed
from train.batches.sampler import Sampler, SamplerState
from train.noise.normals import next_key
from train.options import TrainOptions
from train.run import machine

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

SIGMA, STEPS, SIZE = 100.0, 12, 4
SCHEME = FixedOrder(STEPS, 1, 3, SIZE, 5)
LOUD = plan_of(Mechanism(SCHEME, BufferedToeplitz((0.9, 0.3), (0.2, 0.4), STEPS), SIGMA), 20)


def order() -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.concatenate([generator.permutation(20).reshape(5, SIZE) for _ in range(3)])[:STEPS]


def swapped(step: int) -> np.ndarray:
    """The order with the batches of two steps, in one epoch, in each other's place."""
    found = order()
    found[[step, step - 1]] = found[[step - 1, step]]
    return found


def last_of_epoch() -> np.ndarray:
    """Ids that step 11, the second of its epoch, may have in place of its own: one of them is another."""
    found = order()[11]
    found[0] = np.setdiff1d(np.arange(20), order()[10:])[0]
    return found


def train(batches, out, **options):
    rows = {name: each[:20] for name, each in data().items()}
    options = TrainOptions(keys=KEYS, **({"checkpoint_every": 5} | options))
    return fit(LOUD, PARAMS, loss, rows, optax.sgd(1.0), out=out, batches=batches, options=options)


def stopped(after: int, out, batches, **options):
    """A run that ends after this many steps, the last of them in no checkpoint."""

    def stop(step, info):
        if step >= after:
            raise Crash

    with pytest.raises(Crash):
        train(batches, out, callback=stop, **options)


def test_another_loss_elsewhere_is_refused(tmp_path, monkeypatch):
    """Attack: the difference of both models was the sum of the last batch, to 2e-4 at noise 100."""
    loud = plan("poisson", dataset_size=ROWS, sigma=SIGMA)
    options = dict(plan=loud, optimizer=optax.sgd(1.0), checkpoint_every=11)
    with crash_at(Sampler, "next", 12), pytest.raises(Crash):
        run(out=tmp_path / "one", **options)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    run(out=tmp_path / "one", **options)
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "9", "numpy": "9"})
    for other in (lambda p, e: 0.0 * loss(p, e), lambda p, e: loss(p, e) + 0.0 * p["b"] ** 2):
        with pytest.raises(ValueError, match="another loss, or a release of JAX"):
            run(out=tmp_path / "copy", loss=other, elastic=True, **options)


def test_other_batches_of_a_step_that_was_begun_are_refused(tmp_path):
    """Attack: ids of steps after the checkpoint, whose noise was drawn for the first ones."""
    out = tmp_path / "run"
    stopped(8, out, order())
    assert sorted(int(each.name) for each in (out / "checkpoints").iterdir())[-1] == 5
    with pytest.raises(BatchesError, match="the same as before at step 5") as refused:
        train(swapped(6), out)
    assert "\n" not in str(refused.value)
    np.testing.assert_array_equal(flat(train(order(), out).params), flat(train(order(), None).params))


def test_copies_with_other_batches_have_other_noise(tmp_path):
    """Attack: copied before the last step, each copy with another example: the difference was its gradient.

    With the same noise that is at most 2 / 4. Of independent noise each of 4 numbers has the standard
    deviation 100 sqrt(2) / 4; all are below 1 / 2 with probability 2e-8.
    """
    other = order()
    other[11] = last_of_epoch()
    stopped(12, tmp_path / "one", order(), checkpoint_every=11)
    shutil.rmtree(tmp_path / "one/private")  # as if it had been copied before step 12 began
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    models = [flat(train(batches, tmp_path / name).params) for name, batches in
              (("one", order()), ("copy", other))]  # fmt: skip
    assert np.abs(models[0] - models[1]).max() > 0.5
    np.testing.assert_array_equal(models[0], flat(train(order(), None).params))


def test_no_two_texts_have_one_key():
    """The key of a step is a function of all keys and texts before it."""
    keys = [next_key(KEYS[1], text) for text in ("a", "b")] + [next_key(KEYS[1] + 1, "a"), KEYS[1]]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4
    assert all(key.shape == (8,) and key.dtype == np.uint32 for key in keys[:3])


def test_a_shown_step_without_its_batches_is_refused(tmp_path):
    """Attack: the record of batches is removed with the newest checkpoints; others may follow."""
    other = order()
    other[11] = last_of_epoch()
    train(order(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/12")
    with pytest.raises(BatchesError, match="the same as before at step 11"):
        train(other, tmp_path)
    (tmp_path / "private/batches").unlink()
    with pytest.raises(
        ValueError, match="has shown step 12 and has neither a checkpoint of it nor its batches"
    ):
        train(other, tmp_path)


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
    with pytest.raises(BatchesError, match="at step 2"):
        other.add(SamplerState(key, 3, "other"))
    other.close()
