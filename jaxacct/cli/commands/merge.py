"""`jaxacct merge`."""

from jaxacct.cli import output
from jaxacct.cli.usage import Integer
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.verification import shards


def command(
    plan: str,
    /,
    *parts: str,
    out: str | None = None,
    redraw: Integer = 0,
    force: bool = False,
    json: bool = False,
) -> int:
    """Merge the parts of a sharded verification into its verdict.

    Args:
      plan: file that the parts were drawn for.
      parts: files written by `jaxacct verify --shard`, of one run.
      redraw: draw this number of randomly chosen stretches of the parts again, and compare.
      out: write the plan with the merged evidence here, if it is certified.
      force: let --out replace a file that is not a plan.
      json: print the verdict as one JSON object.
    """
    output.check_out(out, output.PLAN, force)
    found = [shards.Part.load(part) for part in parts]
    if not found:
        raise ValueError("parts must not be empty")
    reference = Plan.load(plan)
    with watch() as progress:
        merged, verdict = shards.merge(reference, found, redraw=redraw, progress=progress)
    output.show_verdict(verdict, False, json)
    if merged is not None and out:
        merged.save(out)
    return 0 if verdict.certified else 1
