"""`jaxacct run-key`."""

from jaxacct.common import files
from jaxacct.verification import shards


def command(*, out: str) -> int:
    """Write a fresh run key for the shards of one verification.

    Args:
      out: a new file; an existing one may be in use and is never replaced.
    """
    files.check_target(out, None, "")
    shards.write_run_key(out)
    return 0
