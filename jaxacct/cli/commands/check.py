"""`jaxacct check`."""

from jaxacct import checker
from jaxacct.common.files import read_json


def command(plan: str, /, *, json: bool = False) -> int:
    """Check a plan by the second implementation, with samples of its own; exits with 0, 1, 2 or 3.

    0: certified; 1: not certified, or the implementations disagree; 2: bad input; 3: not covered.

    Args:
      plan: file written by calibrate.
      json: print one JSON object.
    """
    read_json(plan, "plan")  # what cannot be read is refused as by the other commands
    return checker.main([plan, "--json"] if json else [plan])
