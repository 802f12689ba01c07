"""`jaxacct report`."""

import shlex
from pathlib import Path
from typing import Any

from jaxacct import checker
from jaxacct.cli.commands.show import other_kind
from jaxacct.cli.output import show
from jaxacct.cli.usage import Integer
from jaxacct.common import files, validate
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.report import html, risk
from jaxacct.report.run_card import RunCard


def command(
    plan: str,
    /,
    *,
    out: str,
    run: str | None = None,
    draws: Integer = html.DRAWS,
    check: bool = False,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a page for a privacy reviewer: statement, budget, evidence, risk, pictures.

    Args:
      plan: file written by calibrate.
      out: HTML file to write; it needs no other file and loads nothing.
      run: folder of a run of this plan: the page then says what was run, and how the model is known to be
        its own.
      draws: fresh samples for each direction, for estimates of the risk with intervals; 0 for none.
      check: run `jaxacct check` as well; the page says whether both implementations agree.
      force: replace a file that is not a report.
      json: print one JSON object: certified, out, and the certified risk; with --check also its result.
    """
    files.check_target(out, None if force else html.is_report, "a report")
    other = other_kind(plan)
    if other is not None:
        raise ValueError(
            f"plan must be of `jaxacct calibrate`, got of {other}: `jaxacct show {shlex.quote(plan)}` reads "
            "it"
        )
    loaded = Plan.load(plan)
    card = None
    if run is not None:
        card = RunCard.load(run)
        for flaw in card.flaws(run, loaded):
            raise ValueError(f"run must be one of {plan}: {flaw}")
    bands = None
    if validate.positive_integer("draws", draws, minimum=0) and loaded.certified:
        with watch() as progress:
            bands = html.measure(loaded, draws, progress=progress)
    second = checker.check_file(plan)[1] if check else None
    html.save(loaded, out, Path(plan).name, bands, second, card)
    found: dict[str, Any] = {"certified": loaded.certified, "out": out}
    if second is not None:
        found["check"] = second
    if loaded.certified:
        point = loaded.epsilon, loaded.delta
        found["advantage_at_most"] = risk.advantage(*point)
        found["true_positive_rate_at_one_percent_at_most"] = float(risk.true_positive_rate(*point, 0.01))
    show(found if json else f"{loaded.statement()}\n{out} written", json)
    agrees = second is None or second["verdict"] in ("certified", "not covered")
    return 0 if loaded.certified and agrees else 1
