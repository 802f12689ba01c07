"""Batches of a run, committed on disk before the noise of their step is drawn."""

import hashlib
import os
from pathlib import Path

import numpy as np

from .given import BatchesError
from .sampler import SamplerState


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
        self.last = max(found, default=0)
        """Last step that was committed, 0 for none."""
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
