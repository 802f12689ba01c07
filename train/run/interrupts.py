"""Ctrl-C while a run trains: it ends after the step in progress, with a checkpoint."""

import contextlib
import signal
import sys
import threading
from collections.abc import Generator


@contextlib.contextmanager
def postponed(active: bool = True) -> Generator[threading.Event]:
    """Yield an event that the first Ctrl-C sets in place of raising; the second one raises as usual.

    Nothing changes where `active` is False, outside of the main thread, or where the program handles Ctrl-C.
    """
    asked = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    if not active or not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield asked
        return

    def ask(*_) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.set()
        print("stopping with a checkpoint after this step; Ctrl-C again stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
