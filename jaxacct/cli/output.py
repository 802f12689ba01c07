"""What commands print and write, and the checks of files before the work that they are for."""

import functools
import math
import sys

from jaxacct.common import files


def show(value, as_json: bool) -> None:
    """Print a text, or JSON values as one object, with null for what is infinite; ValueError for NaN."""
    print(files.to_json(_without_infinity(value)) if as_json else value)


def _without_infinity(value):
    if isinstance(value, dict):
        return {name: _without_infinity(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def show_verdict(verdict, verbose: bool, as_json: bool) -> None:
    """Print a verdict in lines, or as one JSON object."""
    from jaxacct.core import text

    lines = [*text.verdict_lines(verdict, verbose), "verified" if verdict.certified else "NOT verified"]
    show(text.verdict_to_json(verdict) if as_json else "\n".join(lines), as_json)


def complain(message: str) -> None:
    """Print one line on standard error."""
    print("jaxacct: " + " ".join(message.split()), file=sys.stderr)


def refuse(when: str, **values) -> None:
    """Refuse arguments that would be ignored, but for False: a flag that is not set."""
    for name, value in values.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} must not be given {when}")


def check_out(out: str | None, force: bool) -> None:
    """Check that a plan can be written to `out`, replacing no file of another kind unless `force`."""
    if force and out is None:
        raise ValueError("force must not be given without out")
    is_plan = functools.partial(files.holds_schema, schema="jaxacct-plan")
    files.check_target(out, None if force else is_plan, "a plan")
