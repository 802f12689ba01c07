"""Exit codes and error lines of the commands that train."""

import sys
from collections.abc import Callable

from jaxacct.cli.interrupted import leave
from jaxacct.cli.usage import parse, single
from jaxacct.common.compilation_cache import keep_compiled_programs

from .batches.sampler import BatchOverflowError
from .run.folder import CheckpointError


def run(command: Callable[..., int | None], name: str, *, prog: str, argv: list[str] | None) -> None:
    """Run a command line and exit: 0 done, 1 an overfull batch, 2 bad input or a full disk, 130 interrupted.

    The parameters of `command` are the options; `name` begins the error line.
    """
    keep_compiled_programs()
    try:
        code = parse(single(command, prog), sys.argv[1:] if argv is None else argv)()
    except (ValueError, CheckpointError, BatchOverflowError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 1 if isinstance(error, BatchOverflowError) else 2
    except KeyboardInterrupt:
        leave(f"{name}: interrupted; the same command continues the run")
    sys.exit(code)
