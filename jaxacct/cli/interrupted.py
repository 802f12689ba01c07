"""How a command ends after Ctrl-C."""

import os
import sys
from typing import NoReturn

EXIT_CODE = 130  # what a shell reports for a process ended by SIGINT


def leave(message: str) -> NoReturn:
    """Say one line on standard error and end the process at once with `EXIT_CODE`.

    Python's own shutdown would take JAX's objects apart while XLA's threads still work on the interrupted
    computation, and now and then that is a segmentation fault. Nothing is lost: files are written whole
    before they get their names.
    """
    if sys.stderr is not None:
        print(message, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # or it was closed before the command began
            stream.flush()
    os._exit(EXIT_CODE)
