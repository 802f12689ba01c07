"""`jaxacct check`."""

import contextlib
import io

from jaxacct import checker
from jaxacct.common.files import read_json, to_json
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan


def command(plan: str, /, *, json: bool = False) -> int:
    """Check a plan by both implementations, the second with samples of its own; exits with 0, 1, 2 or 3.

    0: both certify the claim; 1: one of them does not; 2: bad input; 3: the second has no method for the
    claim, so that only the first has spoken.

    For example:

        jaxacct check plan.json
        jaxacct check plan.json --json

    Args:
      plan: file written by calibrate.
      json: print one JSON object.
    """
    read_json(plan, "plan")  # what cannot be read is refused as by the other commands
    try:
        Plan.load(plan)  # which refuses evidence that does not prove the claim
        first = {"verdict": "certified"}
    except ValueError as error:
        first = {"verdict": "refused", "reason": str(error)}
    refused = checker.FAILED if "reason" in first else checker.CERTIFIED
    if not json:
        print(f"first implementation: {': '.join(first.values())}", flush=True)
    with watch() as progress, contextlib.redirect_stdout(io.StringIO()) as said:
        progress("second implementation", 0, 0)
        code, second = checker.check_file(plan) if json else (checker.main([plan]), {})
    if not json:
        print(said.getvalue(), end="")
        return code or refused
    if refused and code == checker.CERTIFIED:
        second["verdict"] = "not certified"
    print(to_json(second | {"first_implementation": first}))
    return code or refused
