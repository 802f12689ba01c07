"""The facts of a plan, one table for `jaxacct show`, `jaxacct calibrate` and the page of `report.html`."""

from jaxacct.calibration.choice import choice_of
from jaxacct.common.records import exact
from jaxacct.core import text
from jaxacct.core.plan import Plan
from jaxacct.report import risk


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, value) of target, mechanism and batch sizes.

    Numbers that bear on the guarantee have all digits: a rounded one may be too little noise elsewhere.
    """
    scheme = plan.mechanism.scheme
    advantage = exact(risk.advantage(plan.epsilon, plan.delta))
    return [
        ("epsilon, delta", f"{exact(plan.epsilon)}, {exact(plan.delta)}"),
        ("advantage", f"at most {advantage}   (true minus false positive rate of any test)"),
        ("privacy unit", f"{text.unit_in_words(scheme)}, {plan.mechanism.adjacency} adjacency"),
        *text.mechanism_rows(plan),
    ]


def budget(plan: Plan) -> list[tuple[str, float]]:
    """Return (budget item, delta) of all items and what is left over; they sum to the plan's delta."""
    items = text.budget_items(plan)
    return [*items, ("left over", max(0.0, plan.delta - sum(delta for _, delta in items)))]


def describe(plan: Plan, verbose: bool = False) -> str:
    """Return a plan as text, with every budget item and the proposal distribution if `verbose`."""
    lines = [plan.statement(), "", *(f"{name:<22}{value}" for name, value in facts(plan))]
    lines += text.verdict_lines(plan.verdict, verbose)
    if verbose:
        lines += [f"{text.INDENT}{delta:.6g} of delta: {name}" for name, delta in budget(plan)]
        lines += [f"{text.INDENT}{line}" for line in text.checked(plan)]
    else:
        more = "all budget items, the proposal distribution, and which fields were recomputed"
        lines.append(f"{'more':<22}--verbose: {more}")
    choice = choice_of(plan)
    return "\n".join(lines if choice is None else [*lines, "", choice.statement()])
