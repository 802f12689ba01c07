"""Batches drawn and read by a thread while the device computes; what is trained is the same bits.

The thread is the only one that draws and reads, in the order of steps, and not beyond the last. Batches read
ahead are in memory only: their members are private.
"""

import collections
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class Ready(NamedTuple):
    """Arguments of a step, and the state of the sampler after drawing them."""

    rows: Any
    mask: Any
    drawn: Any


def batches(source, batch, first: int, last: int) -> Iterator[Ready]:
    """Yield the batches of steps `first` to `last - 1`, each drawn and read when it is asked for."""
    for _ in range(first, last):
        rows, mask = batch.take(source.next())
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
    wide = jax.config.read("jax_enable_x64")  # is of a thread

    def made():
        with jax.enable_x64(wide):
            return next(found, None)

    thread = ThreadPoolExecutor(1, "jaxacct-prefetch")
    coming = collections.deque(thread.submit(made) for _ in range(depth + 1))

    def items() -> Iterator[Ready]:
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(made))
            yield item

    try:
        yield items()
    finally:
        thread.shutdown(cancel_futures=True)
