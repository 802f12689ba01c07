"""`jaxacct report`."""

import shlex
from pathlib import Path
from typing import Any

from jaxacct import checker
from jaxacct.cli.output import show
from jaxacct.cli.usage import Integer
from jaxacct.common import files, validate
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.report import html, risk
from jaxacct.report.run_card import RunCard, read_plan


def command(
    plan: str,
    /,
    *,
    out: str,
    run: str | None = None,
    no_verify: bool = False,
    draws: Integer = html.DRAWS,
    check: bool = False,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a page for a privacy reviewer: statement, budget, evidence, risk, pictures.

    The plan is verified with fresh samples first, unless its bound is computed without any.

    For example:

        jaxacct report plan.json --out report.html

    Args:
      plan: file written by calibrate.
      out: HTML file to write; it needs no other file and loads nothing.
      run: folder of a run of this plan: the page then says what was run, and how the model is known to be
        its own.
      no_verify: draw no fresh samples to verify the plan; the page says so on top.
      draws: fresh samples for each direction, for estimates of the risk with intervals; 0 for none.
      check: run `jaxacct check` as well; the page says whether both implementations agree.
      force: replace a file that is not a report.
      json: print one JSON object: certified, out, and the certified risk; with --check also its result.
    """
    files.check_target(out, None if force else html.is_report, "a report")
    loaded = read_plan(plan)
    if not isinstance(loaded, Plan):
        raise ValueError(
            f"plan must be of `jaxacct calibrate`, got of {loaded.schema}: `jaxacct show "
            f"{shlex.quote(plan)}` reads it"
        )
    card = None
    if run is not None:
        card = RunCard.load(run)
        for flaw in card.flaws(run, loaded):
            raise ValueError(f"run must be one of {plan}: {flaw}")
    bands = fresh = None
    validate.positive_integer("draws", draws, minimum=0)
    with watch() as progress:
        if loaded.certified and loaded.is_sampled and not no_verify:
            fresh = loaded.verify(progress=progress)
        if draws and loaded.certified and (fresh is None or fresh.certified):
            bands = html.measure(loaded, draws, progress=progress)
    second = checker.check_file(plan)[1] if check else None
    html.save(loaded, out, Path(plan).name, bands, second, card, fresh)
    certified = loaded.certified and (fresh is None or fresh.certified)
    summary: dict[str, Any] = {"certified": certified, "out": out}
    if loaded.is_sampled:
        summary["verified"] = None if fresh is None else fresh.certified
    if second is not None:
        summary["check"] = second
    if certified:
        point = loaded.epsilon, loaded.delta
        summary["advantage_at_most"] = risk.advantage(*point)
        summary["true_positive_rate_at_one_percent_at_most"] = float(risk.true_positive_rate(*point, 0.01))
    said = loaded.statement() if certified else f"NOT CERTIFIED: {(fresh or loaded.verdict).flaws[0]}"
    show(summary if json else f"{said}\n{out} written", json)
    agrees = second is None or second["verdict"] in ("certified", "not covered")
    return 0 if certified and agrees else 1
