"""`jaxacct show`."""

from jaxacct.cli import output
from jaxacct.core.plan import Plan
from jaxacct.report.facts import describe
from jaxacct.report.run_card import read_plan


def command(plan: str, /, *, verbose: bool = False, json: bool = False) -> int:
    """Print a plan after checking it.

    For example:

        jaxacct show plan.json
        jaxacct show plan.json --verbose

    Args:
      plan: file written by calibrate, by `jaxacct tradeoff` or by training with DiceSGD.
      verbose: print also all budget items, the proposal distribution, and which fields were recomputed.
      json: print it as one JSON object.
    """
    loaded = read_plan(plan)
    if not isinstance(loaded, Plan):
        from jaxacct.cli.commands.tradeoff import tell

        output.refuse(f"for a plan of {loaded.schema}", verbose=verbose)
        terms = getattr(loaded, "terms", None)
        computed = {} if terms is None else terms.to_json()
        tell({"statement": loaded.statement(), **computed, "steps": loaded.iterations}, json)
        return 0
    output.show(loaded.to_json() if json else describe(loaded, verbose), json)
    return 0
