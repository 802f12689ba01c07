"""Batches of the user's own loader, for plans of fixed-order batches: each is checked before it is used.

The certificate assumes limits on the order: the batch size, how often an example participates and how far
apart. A loader is any iterable that begins at step 0 and yields the ids of a batch, (batch_size,) integers
below the plan's dataset_size: a list or array of index arrays, a PyTorch or Grain `DataLoader` of ids, a
generator.

A resumed run goes through the loader again and skips what was trained on. The digest of all batches so far is
in its checkpoints: other batches than those are refused.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxacct.strategies.worst_pattern import Patterns

from .sampler import Drawn, SamplerState


class BatchesError(ValueError):
    """A batch that the plan does not cover; nothing was trained on it."""


class GivenBatches(Drawn):
    """The batches of a loader, from step 0, each checked.

    Args:
      batches: the loader.
      patterns: participation patterns that the plan covers.
      dataset_size: N of the plan.
      batch_size: of the plan.
      steps: number of steps of the run.

    Raises:
      ValueError: for what is no iterable, or one that states that it is too short.
      BatchesError: for a first batch that is not covered.
    """

    def __init__(self, batches: Iterable, patterns: Patterns, dataset_size: int, batch_size: int, steps: int):
        try:
            found = iter(batches)
        except TypeError:
            raise ValueError(f"batches must be an iterable, got {type(batches).__name__}") from None
        self.length = _length(batches)
        if self.length is not None and self.length < steps:
            raise ValueError(f"batches must have at least the {steps} steps of the run, got {self.length}")
        self._patterns, self._size, self._steps = patterns, dataset_size, steps
        self._batch_size = batch_size
        self._found = found
        self._counts = np.zeros(dataset_size, np.int64)
        self._last = np.full(dataset_size, -1, np.int64)
        super().__init__((0, 0, 0, 0), None, hashlib.blake2b(digest_size=16).hexdigest())
        self._next: np.ndarray | None = self._read()

    def described(self) -> dict[str, int | None]:
        """Return JSON values that a resumed run must share."""
        return {"length": self.length}

    def begin(self, key, drawn: SamplerState | None) -> "GivenBatches":
        """Return itself with the batches of `drawn` skipped; BatchesError where they are others."""
        self.state = SamplerState(tuple(int(word) for word in key), 0, self.state.digest)
        while drawn is not None and self.state.step < drawn.step:
            self.next()
        if drawn is not None and self.state.digest != drawn.digest:
            raise BatchesError(
                f"batches must be the same as before up to step {drawn.step}, where the run continues: give "
                "the loader from its beginning, with the same seed"
            )
        return self

    def _draw(self, step: int) -> np.ndarray:
        """Return the ids of a batch; BatchesError for one that the plan does not cover, or for none."""
        ids = self._read() if self._next is None else self._next
        self._next = None
        self._check(ids, step)
        self._counts[ids] += 1
        self._last[ids] = step
        return ids

    def _read(self) -> np.ndarray:
        """Return the ids of the next batch, of the right type and shape."""
        step = self.state.step
        try:
            item = next(self._found)
        except StopIteration:
            raise BatchesError(
                f"batches must have the {self._steps} steps of the run, ended after {step}: an iterable of "
                "one epoch is not repeated"
            ) from None
        try:
            ids = np.asarray(item)
        except (ValueError, TypeError, RuntimeError):  # ragged, or a tensor that is no array
            ids = np.array(None)
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            if isinstance(item, tuple | list) and np.shape(item[0])[:1] == (self._batch_size,):
                raise BatchesError(
                    f"batches must yield ids alone, got rows at step {step}; give data= and the ids, of a "
                    "PyTorch loader data=loader.dataset and the ids of loader.batch_sampler"
                )
            raise BatchesError(
                f"batches must be arrays of integer ids, got {ids.dtype} of shape {ids.shape} at step {step}"
            )
        if ids.size != self._batch_size:
            raise BatchesError(
                f"batches must have the plan's {self._batch_size} ids, got {ids.size} at step {step}"
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._size:
            raise BatchesError(
                f"batches must have ids from 0 to {self._size - 1}, got {ids.min()} .. {ids.max()} at step "
                f"{step}"
            )
        return ids.astype(np.int64)

    def _check(self, ids: np.ndarray, step: int) -> None:
        """BatchesError where an example participates too often or too early."""
        p = self._patterns
        if np.unique(ids).size < ids.size:
            raise BatchesError(f"batches must have every id once, had one twice at step {step}")
        last = self._last[ids]
        early = int(np.argmax(last))
        if last[early] > max(-1, p.latest(np.array([step]), 1)[0]):
            raise BatchesError(
                f"batches must not have id {ids[early]} at step {step}, as it was in step {last[early]} "
                f"(min_separation {p.min_separation}, steps_per_epoch {p.steps_per_epoch})"
            )
        often = int(np.argmax(self._counts[ids]))
        if self._counts[ids[often]] >= p.participations:
            raise BatchesError(
                f"batches must have an id {p.participations} times at most, had id {ids[often]} again at "
                f"step {step}"
            )


class Committed:
    """Keyed digests of the batches of a run up to each step, one a line.

    Once a line is there, the noise of its step may have been released: who does the step again must have the
    same batches.

    Args:
      path: of the file, made with mode 0600.
      key: of the digests: the sampler's.
      step: of the checkpoint that the run continues from; earlier steps are bound by its own digest.
    """

    def __init__(self, path: Path, key, step: int):
        self._path, self._key = path, key
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1  # what follows was never finished
        os.truncate(path, whole)
        lines = (line.split() for line in content[:whole].decode(errors="replace").splitlines())
        found = {int(line[0]): line[1] for line in lines if len(line) == 2 and line[0].isdigit()}
        self.last = max(found, default=0)  # last step that was committed, 0 for none
        self._found = {at: text for at, text in found.items() if at > step}

    def add(self, drawn: SamplerState) -> None:
        """Commit the batches up to `drawn.step`; BatchesError where others were committed."""
        digest = keyed(self._key, drawn.digest)
        there = self._found.pop(drawn.step, None)
        if there is None and drawn.step > self.last:
            os.write(self._file, f"{drawn.step} {digest}\n".encode())
            self.last = drawn.step
        elif there != digest:
            raise BatchesError(
                f"batches must be the same as before at step {drawn.step - 1}: its noise may have been "
                "released, and must not be used twice"
            )

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def keyed(key, text: str) -> str:
    """Return a digest that reveals nothing about the text without the key, a sampler's."""
    words = np.array(key, np.uint32).tobytes()
    return hashlib.blake2b(text.encode(), key=words, digest_size=16).hexdigest()


class Present:
    """The batches of a source, without the places from `size` on: those of absent examples."""

    def __init__(self, source, size: int):
        self.source, self.size = source, size

    @property
    def state(self) -> SamplerState:
        """Where the source stands."""
        return self.source.state

    def next(self) -> np.ndarray:
        """Return the examples of the next batch that are present."""
        indices = self.source.next()
        return indices[indices < self.size]


def _length(batches) -> int | None:
    """Return the number of batches; None where it is not stated, as of `tf.data` that repeats for ever."""
    try:
        return len(batches)  # pyrefly: ignore
    except (TypeError, NotImplementedError):
        return None
