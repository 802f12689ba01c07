"""`jaxacct show`."""

from jaxacct.cli import output
from jaxacct.common.files import read_json
from jaxacct.core.plan import SCHEMA, Plan
from jaxacct.report.facts import describe


def command(plan: str, /, *, plot: str | None = None, verbose: bool = False, json: bool = False) -> int:
    """Print a plan after checking it.

    Args:
      plan: file written by calibrate, by `jaxacct tradeoff` or by training with DiceSGD.
      plot: write what the plan implies for delta at other epsilons to this PNG.
      verbose: print also all budget items, the proposal distribution, and which fields were recomputed.
      json: print it as one JSON object.
    """
    output.check_plot(plot)
    other = other_kind(plan)
    if other is not None:
        from jaxacct.cli.commands.tradeoff import show_command

        output.refuse(f"for a plan of {other}", plot=plot, verbose=verbose)
        return show_command(plan, json=json)
    loaded = Plan.load(plan)
    output.show(loaded.to_json() if json else describe(loaded, verbose), json)
    output.draw(plot, "profile", loaded)
    return 0


def other_kind(plan: str) -> str | None:
    """Return the schema of a trade-off or DiceSGD plan; None for every other file."""
    schema = read_json(plan, "plan").get("schema")
    if schema == SCHEMA or not isinstance(schema, str):
        return None
    from jaxacct.report.run_card import STORED_PLANS  # which loads dp-accounting

    return schema if schema in STORED_PLANS else None
