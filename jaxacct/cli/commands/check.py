"""`jaxacct check` and `jaxacct check-run`."""

import contextlib
import io

from jaxacct import checker
from jaxacct.cli.output import show
from jaxacct.common.files import read_json, to_json
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.report.run_card import ON_TRUST, RunCard, about_plan, read_plan


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


def of_run(run: str, plan: str, /, *, json: bool = False) -> int:
    """Check that the model, the card (result.json) and the plan of a run belong together.

    For example:

        jaxacct check-run run/ plan.json

    Args:
      run: folder of a finished run, or a copy of its model and result.json.
      plan: file of the plan that it should have followed.
      json: print one JSON object: belong, flaws, the plan's digest, the guarantee, what is taken on trust.
    """
    loaded, card = read_plan(plan), RunCard.load(run)
    flaws, adds = card.flaws(run, loaded), card.adds(loaded)
    trust = [*ON_TRUST, *([f"what the run adds to its plan: {adds}"] if adds and not flaws else [])]
    digest, said = about_plan(loaded)["digest"], loaded.statement()
    about = {"plan": digest, "guarantee": said, "steps": card.steps, "on_trust": trust}
    head = (
        f"model, card and plan belong together\nplan {digest}\n{said}\n"
        f"{card.steps} of {loaded.iterations} steps, clip norm {card.clip_norm:g}\ntaken on trust:"
    )
    head = "model, card and plan do NOT belong together:" if flaws else head
    words = "\n".join([head, *(f"  {line}" for line in flaws or trust)])
    show({"belong": not flaws, "flaws": flaws} | about if json else words, json)
    return 1 if flaws else 0
