"""Batches drawn and read by a thread while the device works; what is trained is the same to the bit.

The thread is the only one that draws and the only one that reads, in the order of steps, and not beyond the
last. What it has ahead is in memory alone: who is in a batch is private.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_PATIENCE = 5.0  # seconds to wait for a reading in progress when a run stops; then it is left to end alone


class Ready(NamedTuple):
    """What a step takes, and where the sampler stands after drawing it."""

    rows: Any
    mask: Any
    drawn: Any


def batches(source, batch, first: int, last: int) -> Iterator[Ready]:
    """The batches of steps `first` to `last - 1`, each drawn and read when it is asked for."""
    for _ in range(first, last):
        drawn = source.next()
        rows, mask = batch.take(drawn.indices[drawn.mask])
        yield Ready(rows, mask, source.state)


@contextlib.contextmanager
def ahead(found: Iterator[Ready], depth: int):
    """`found` with up to `depth` of its items made before they are asked for.

    An exception in the thread is raised where the item was to come, after those before it. Leaving ends the
    thread, at once but for a reading in progress.

    Args:
      found: used by the thread alone from now on.
      depth: 0 for no thread.
    """
    if depth == 0:
        yield found
        return
    queue = _Queue(depth)
    wide = jax.config.read("jax_enable_x64")  # is of a thread

    def work() -> None:
        try:
            with jax.enable_x64(wide):
                for item in found:
                    if not queue.put((item, None)):
                        return
            queue.put((None, StopIteration()))
        except BaseException as error:
            queue.put((None, error))

    thread = threading.Thread(target=work, name="jaxacct-prefetch", daemon=True)
    thread.start()
    try:
        yield queue.items()
    finally:
        queue.close()
        thread.join(_PATIENCE)


class _Queue:
    """A queue of a few items that either side may leave."""

    def __init__(self, depth: int):
        self._items, self._depth, self._closed = collections.deque(), depth, False
        self._changed = threading.Condition()

    def put(self, item) -> bool:
        """Wait for room; False once nobody takes anything any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def items(self) -> Iterator[Any]:
        """What is put until an exception is."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                item, error = self._items.popleft()
                self._changed.notify_all()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def close(self) -> None:
        """Let go of everything."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


__all__ = ["Ready", "ahead", "batches"]
