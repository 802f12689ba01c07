"""Batches drawn and read by a thread while the device computes; what is trained is the same bits.

The thread is the only one that draws and reads, in the order of steps, and not beyond the last. Batches read
ahead are in memory only: their members are private.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_PATIENCE = 5.0  # seconds to wait for a reading in progress when a run stops; then it ends on its own


class Ready(NamedTuple):
    """Arguments of a step, and the state of the sampler after drawing them."""

    rows: Any
    mask: Any
    drawn: Any


def batches(source, batch, first: int, last: int) -> Iterator[Ready]:
    """Yield the batches of steps `first` to `last - 1`, each drawn and read when it is asked for."""
    for _ in range(first, last):
        drawn = source.next()
        rows, mask = batch.take(drawn.indices[drawn.mask])
        yield Ready(rows, mask, source.state)


@contextlib.contextmanager
def ahead(found: Iterator[Ready], depth: int):
    """Yield `found` with up to `depth` of its items made before they are asked for; 0 for no thread.

    An exception in the thread is raised in the place of its item. Leaving ends the thread, after a reading in
    progress.
    """
    if depth == 0:
        yield found
        return
    ready, stopped = queue.Queue(depth), threading.Event()
    wide = jax.config.read("jax_enable_x64")  # is of a thread

    def work() -> None:
        error: BaseException = StopIteration()
        try:
            with jax.enable_x64(wide):
                for item in found:
                    ready.put((item, None))
                    if stopped.is_set():
                        return
        except BaseException as failure:
            error = failure
        ready.put((None, error))

    def items() -> Iterator[Ready]:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    thread = threading.Thread(target=work, name="jaxacct-prefetch", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        stopped.set()
        with contextlib.suppress(queue.Empty):  # makes room for an item that the thread is about to put
            while True:
                ready.get_nowait()
        thread.join(_PATIENCE)
