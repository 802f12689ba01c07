"""Batches read ahead by a thread: the same bits, nothing past the end, failures where they belong."""

import itertools
import os
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.runs import Crash, crashed, data, flat, run
from train.batches.prefetch import ahead
from train.batches.sources import ArrayRows

pytestmark = pytest.mark.usefixtures("shared_programs")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("jaxacct-prefetch")]


class Watched(ArrayRows):
    """Record which thread reads; at the batch `signalled` Control-C is pressed, and reading is slow."""

    def __init__(self, signalled=None):
        super().__init__(data())
        self.signalled, self.readers, self.batches = signalled, [], []

    def take(self, indices, size):
        if len(indices):  # of none: to compile
            self.readers.append(threading.current_thread().name)
            self.batches.append(np.array(indices))
            if len(self.batches) == self.signalled:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
        return super().take(indices, size)


def test_it_ends_with_the_same_bits_and_reads_the_same_batches(tmp_path):
    """Also what is kept on the way, a crash and what goes on after it included; 12 steps, 12 batches."""
    one, other = Watched(), Watched()
    alone = run(data=one, prefetch=0, out=tmp_path / "alone", checkpoint_every=5)
    crashed(8, data=other, prefetch=3, out=tmp_path / "ahead", checkpoint_every=5)
    # What was drawn ahead of the step that failed is trained on before it fails: a checkpoint is of 5 steps.
    assert sorted(path.name for path in (tmp_path / "ahead/checkpoints").iterdir()) == ["0", "5"]
    found = run(data=other, prefetch=3, out=tmp_path / "ahead", checkpoint_every=5)
    np.testing.assert_array_equal(flat(found.params), flat(alone.params))
    a, b = ((tmp_path / name / "private/metrics.jsonl").read_text() for name in ("alone", "ahead"))
    assert a == b
    assert not threads()
    # Seven steps before the crash, of which five were kept; then those from the sixth on.
    kept = sum(bool(len(batch)) for batch in one.batches[:5])
    again = other.batches[:kept] + other.batches[-len(one.batches) + kept :]
    assert all(map(np.array_equal, one.batches, again)) and len(again) == len(one.batches) <= 12
    assert len(other.batches) <= len(one.batches) + 2
    assert set(one.readers) == {threading.current_thread().name}
    assert set(other.readers) == {"jaxacct-prefetch_0"}


def test_nothing_is_made_past_the_end_nor_further_ahead_than_asked():
    made = []
    items = (made.append(i) or i for i in range(20))
    with ahead(itertools.islice(items, 7), 2) as found:
        first = next(found)
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:  # one taken, two waiting, one in the hand
            time.sleep(0.001)
        time.sleep(0.02)
        assert (first, made) == (0, [0, 1, 2, 3])
        assert list(found) == [1, 2, 3, 4, 5, 6]
    assert made == list(range(7)) and not threads()


def test_a_failure_comes_where_its_item_was_to_come():
    def items():
        yield 1
        yield 2
        raise OSError(5, "the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"), ahead(items(), 5) as found:
        for item in found:
            seen.append(item)
            time.sleep(0.01)
    assert seen == [1, 2] and not threads()


def test_who_leaves_in_between_leaves_no_thread():
    """Also where the thread waits for room, or fails after the consumer has stopped."""
    for depth in (1, 3):
        with pytest.raises(Crash), ahead(iter(range(10**9)), depth) as found:
            next(found)
            raise Crash
        assert not threads()


def test_the_precision_of_the_caller_is_that_of_the_thread(x64):
    with ahead((jnp.zeros(1).dtype for _ in range(1)), 1) as found:
        assert next(found) == jnp.float64


@pytest.mark.usefixtures("interruptible")
def test_control_c_ends_a_run_that_reads(tmp_path):
    """In the middle of reading the fourth batch; the folder goes on from its last checkpoint."""
    options = dict(out=tmp_path / "run", checkpoint_every=5, prefetch=1)
    with pytest.raises(KeyboardInterrupt):
        run(data=Watched(signalled=4), **options)
    assert not threads()
    np.testing.assert_array_equal(flat(run(**options).params), flat(run().params))
