"""Values that a second process computes while the first one does something else.

Choosing what to certify is a second and a half of Python on one core, a third of which are matrices that are
the same whatever else is found. A value is the same wherever it is computed: what the second process does not
have, or fails at, the first one computes.

A process is copied only where that is safe: on Linux, while it has one thread. So it is before JAX has begun
any and before anything shows how far it is, as in a command that has just started.
"""

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Call = tuple[Callable, tuple]


class _Second:
    """The second process, seen from the first."""

    def __init__(self, process: int, connection):
        self._process, self._connection = process, connection
        self._values: dict[tuple[str, tuple], Any] = {}
        self._begun: tuple[str, tuple] | None = None

    def has(self, name: tuple[str, tuple]) -> bool:
        """Whether there is a value of that name; waits for one that has been begun."""
        try:
            while name not in self._values and (self._begun == name or self._connection.poll()):
                self._begun, value = self._connection.recv()
                if value:
                    self._values[self._begun], self._begun = value[0], None
        except (EOFError, OSError):  # it is done, or has failed
            self._begun = None
        return name in self._values

    def value(self, name: tuple[str, tuple]):
        """What `has` has found."""
        return self._values[name]

    def end(self) -> None:
        """End it, done or not."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._connection.close()


_second: _Second | None = None


@contextlib.contextmanager
def second_process(calls: Callable[[], Iterable[Call]]) -> Iterator[bool]:
    """Have a second process make `calls` of pure functions, one after the other, for `value` to ask for.

    Yields whether there is one.
    """
    global _second
    started = _started(calls) if _second is None and _may_be_copied() else None
    if started is None:
        yield False
        return
    _second = started
    try:
        yield True
    finally:
        _second = None
        started.end()


def value(function: Callable, *args):
    """`function(*args)` of a pure function: from the second process where it has that, or is at it."""
    name = function.__name__, args
    if _second is not None and _second.has(name):
        return _second.value(name)
    return function(*args)


def _may_be_copied() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1 and len(os.sched_getaffinity(0)) > 1
    except (OSError, AttributeError):  # not Linux
        return False


def _started(calls: Callable[[], Iterable[Call]]) -> _Second | None:
    from multiprocessing import Pipe

    ours, theirs = Pipe(duplex=False)
    try:
        process = os.fork()
    except OSError:  # no room for one
        ours.close()
        theirs.close()
        return None
    if process:
        theirs.close()
        return _Second(process, ours)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
        gc.disable()
        ours.close()
        nowhere = os.open(
            os.devnull, os.O_RDWR
        )  # what the first process writes to may wait for all to close it
        for stream in range(3):
            os.dup2(nowhere, stream)
        for function, args in calls():
            name = function.__name__, args
            theirs.send((name, ()))
            theirs.send((name, (function(*args),)))
    finally:
        os._exit(0)  # whatever went wrong: the first process will see it for itself


__all__ = ["Call", "second_process", "value"]
