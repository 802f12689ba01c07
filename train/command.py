"""How the commands that train end, whatever happens to the run."""

import sys
from collections.abc import Callable

from jaxacct.cli.interrupted import leave
from jaxacct.cli.usage import parse, single
from jaxacct.common.compilation_cache import keep_compiled_programs

from .batches.sampler import BatchOverflowError
from .run_folder import CheckpointError


def run(command: Callable[..., int | None], name: str, *, prog: str, argv: list[str] | None) -> None:
    """Run a command line and exit: 0 done, 1 the run stopped, 2 bad input, 130 interrupted.

    Args:
      command: its parameters are the options; returns the exit code, None for 0.
      name: begins the line that says what went wrong.
      prog: how it is called, for its help.
      argv: the arguments; those of the process where None.
    """
    keep_compiled_programs()
    try:
        code = parse(single(command, prog), sys.argv[1:] if argv is None else argv)()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 2
    except (CheckpointError, BatchOverflowError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        leave(f"{name}: interrupted; the same command goes on")
    sys.exit(code)
