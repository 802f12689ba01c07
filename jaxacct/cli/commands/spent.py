"""`jaxacct spent`."""

from typing import Any

from jaxacct.accountants import history
from jaxacct.cli import output
from jaxacct.cli.events import Events, parsed
from jaxacct.cli.usage import Integer, Number
from jaxacct.core.plan import Plan
from jaxacct.core.text import rounded_up


def command(
    plan: str | None = None,
    /,
    *,
    step: Integer | None = None,
    event: Events = (),
    epsilon: Number | None = None,
    delta: Number | None = None,
    group: Integer | None = None,
    json: bool = False,
) -> int:
    """Print what the first steps of a plan's run have spent, or what a list of events has; both are bounds.

    For example:

        jaxacct spent plan.json --step 500
        jaxacct spent --event 1.1,0.01,1000 --event 0.9,0.01,500 --delta 1e-6

    Args:
      plan: file written by calibrate; with --step.
      step: number of steps, fixed before the run or independent of the data. A run that stops at a step that
        depends on its outputs has spent the epsilon of its plan.
      event: NOISE,RATE,STEPS of DP-SGD with Poisson sampling (noise multiplier, sampling probability, steps),
        or an event of dp-accounting as JSON: its fields, and its class as kind. May be repeated.
      epsilon: print delta of the events here.
      delta: print epsilon of the events here.
      group: neighbours of the events differ by up to this number of records, 1 by default.
      json: print one JSON object.
    """
    if (plan is None) == (not event):
        raise ValueError("a plan must be given with --step, or --event, and not both")
    if plan is not None:
        output.refuse("with a plan, whose delta is taken", epsilon=epsilon, delta=delta, group=group)
        return _show(_of_plan(Plan.load(plan), step), json)
    output.refuse("with --event", step=step)
    events = parsed(event)
    if delta is not None and epsilon is None:
        epsilon = history.epsilon(events, delta=delta, group=group or 1)
    elif epsilon is not None and delta is None:
        delta = history.delta(events, epsilon=epsilon, group=group or 1)
    else:
        raise ValueError("epsilon or delta must be given with --event, and only one of them")
    return _show({"epsilon": epsilon, "delta": delta, "events": len(events)}, json)


def _of_plan(plan: Plan, step: int | None) -> dict[str, Any]:
    """Return what the first steps of a plan's run have spent."""
    if step is None:
        raise ValueError(f"step must be given with a plan, from 1 to {plan.iterations}")
    if not plan.certified:
        raise ValueError("plan must be certified, got one that is not")
    # Truncated batches have a reserve of their own at every epsilon, which nothing shows for the first steps.
    left = 0.0 if plan.truncation_delta is not None else plan.delta - plan.claim.reserved
    spent, accountant = history.epsilon_of_first_steps(
        plan.mechanism, step, delta=left, largest=plan.epsilon, compose_with=plan.compose_with
    )
    about = "the plan's own epsilon" if accountant is None else f"accountant {accountant}"
    return {"epsilon": spent, "delta": plan.delta, "steps": step, "of": plan.iterations, "by": about}


def _show(bound: dict[str, Any], json: bool) -> int:
    words = f"epsilon {rounded_up(bound['epsilon'], 6)} at delta {rounded_up(bound['delta'], 6)} at most"
    if "of" in bound:
        words = f"the first {bound['steps']:,} of {bound['of']:,} steps: {words} ({bound['by']})"
    else:
        words = f"{bound['events']} events together: {words}"
    output.show(bound if json else words, json)
    return 0
