"""A plan as one page for a privacy reviewer: HTML without scripts or links to elsewhere, pictures inside."""

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.accountants import analytic
from jaxacct.accountants.tradeoff import EpsilonDelta
from jaxacct.calibration.choice import choice_of
from jaxacct.common.files import write_atomically
from jaxacct.common.progress import Progress
from jaxacct.common.records import exact
from jaxacct.core import text, truncation
from jaxacct.core.check import Verdict
from jaxacct.core.evidence import Sampled
from jaxacct.core.plan import Plan
from jaxacct.estimates.profile import Profile, privacy_profile
from jaxacct.report import facts, risk
from jaxacct.report import plots as plot
from jaxacct.report.page import ASSUMPTIONS, NOT_COVERED, STYLE, escaped, listed, section, table
from jaxacct.report.run_card import ON_TRUST, RunCard

FIRST_LINE = "<!DOCTYPE html><!-- jaxacct report -->"

CONFIDENCE = 0.999
DRAWS = 20_000  # samples of the page for each direction: seconds for most plans
RATES = np.array(text.RATES)
_FURTHEST = 3.0  # epsilon of the profile of a plan whose own is 0


def measure(plan: Plan, draws: int, key=None, progress: Progress | None = None) -> Profile:
    """Return the privacy profile from `draws` fresh samples for each direction, with 99.9 % bands in all.

    Where an accountant is exact up to its grid, from that, without samples.
    For a composed plan the profile of both mechanisms. For truncated batches the reserve at each epsilon
    (`truncation.reserve`) is added to the upper ends, and the lower ends are 0. No band is above what the
    certified point implies.
    """
    is_known = analytic.exact(plan.mechanism, compose_with=plan.compose_with) is not None
    points = 16 if is_known else 31
    grid = np.linspace(0, 1.5 * plan.epsilon if plan.epsilon > 0 else _FURTHEST, points)
    options: dict[str, Any] = dict(confidence=CONFIDENCE, key=key, progress=progress)
    options |= dict(num_samples=None if is_known else draws)
    profile = privacy_profile(plan.mechanism, grid, compose_with=plan.compose_with, **options)
    implied = EpsilonDelta(plan.epsilon, plan.delta).delta(grid)
    added = np.zeros_like(grid)
    if plan.truncation_delta is not None:
        added = np.array([_truncation_adds(plan, float(epsilon)) for epsilon in grid])

    def bounded(lower, estimate, upper):
        if plan.truncation_delta is not None:
            lower = np.zeros_like(lower)
        return np.minimum(np.stack([lower, estimate, upper + added]), implied)

    sides = {direction: bounded(*bands) for direction, bands in profile.directions.items()}
    lower, estimate, upper = bounded(profile.lower, profile.estimate, profile.upper)
    return replace(profile, lower=lower, estimate=estimate, upper=upper, directions=sides)


def _truncation_adds(plan: Plan, epsilon: float) -> float:
    """Return the reserve of delta(epsilon) for truncated batches; 1 where no bound covers this noise."""
    assert plan.dataset_size is not None and plan.max_batch_size is not None
    if not truncation.covers(plan.mechanism, epsilon):
        return 1.0
    return truncation.reserve(plan.mechanism.scheme, epsilon, plan.dataset_size, plan.max_batch_size)


def report(
    plan: Plan,
    source: str = "plan.json",
    bands: Profile | None = None,
    second: dict | None = None,
    run: RunCard | None = None,
    fresh: Verdict | None = None,
) -> str:
    """Return the page as HTML.

    Args:
      plan: certified or not; the page of a plan that is not says so first.
      source: what to call its file in the commands.
      bands: of `measure`, for the whole privacy profile.
      second: what `checker.check_file` found, where it was run.
      run: card of a run of this plan, without `flaws`.
      fresh: what fresh samples prove; a page without them says that it shows stored counts, if it does.

    Without matplotlib it has no pictures.
    """
    proven = fresh if plan.certified and fresh is not None else plan.verdict
    certified = proven.certified
    evidence, choice = "\n".join(text.verdict_lines(plan.verdict, verbose=True)), choice_of(plan)
    budget = [(name, f"{delta:.6g}") for name, delta in (*facts.budget(plan), ("in all", plan.delta))]
    described = [(name, value, facts.TERMS.get(name, "")) for name, value in facts.whole(plan)]
    parts = [
        _first(plan, proven, fresh is not None, second),
        section("The mechanism", table(("what", "value", "what it means"), described, dim=(2,))),
        section("What an attacker can do", _risk(plan, bands) if certified else _NO_CLAIM),
        section("The run that was made", _run(plan, run)),
        section("How it was chosen", f"<p>{escaped(choice.statement())}</p>") if choice else "",
        section("Where delta goes", table(("item", "delta"), budget, numbers=(1,))),
        section("The evidence", f"<pre>{escaped(evidence)}</pre>"),
        section("Pictures", _pictures(plan, bands)),
        section(
            "Assumptions",
            table(
                ("assumption", "what the trainer does", "the test that attacks it"),
                [(a, b, f"<code>{escaped(test)}</code>") for a, b, test in ASSUMPTIONS],
                raw=(2,),
            )
            + "<p class=note>A trainer of another make must do the same by itself. Derivations are in the "
            "package's <code>proofs/</code>, statements of papers that fail in "
            "<code>proofs/errata.md</code>.</p>",
        ),
        section("What is not covered", listed(list(NOT_COVERED))),
        section(
            "What was computed again, and what was drawn",
            listed([*_drawn(plan), *_second(second), *text.checked(plan.evidence, plan.choice is not None)]),
        ),
        section("How to check it yourself", f"<pre>{escaped(_commands(plan, source))}</pre>"),
    ]
    title = f"Differential privacy of a training run: ({exact(plan.epsilon)}, {exact(plan.delta)})"
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escaped(title)}</title><style>{STYLE}</style>"
    )
    return f"{FIRST_LINE}\n<html lang='en'><head>{head}</head><body>" + (
        f"<h1>{escaped(title)}</h1>" + "\n".join(filter(None, parts)) + "</body></html>\n"
    )


def _first(plan: Plan, proven: Verdict, is_fresh: bool, second: dict | None) -> str:
    """Return the statement and how far this page has checked it, before everything else."""
    if not proven.certified:
        lines = [" ".join(line.split()) for line in text.verdict_lines(proven)]
        why = f"NOT CERTIFIED: fresh samples do not verify this plan; {'; '.join(lines[1:3])}."
        words = why if is_fresh else text.statement(proven)
        return f'<p class="statement refused">{escaped(words)}</p>'
    if not plan.is_sampled:
        checked = "The bound was computed again for this page; it takes no samples."
    elif is_fresh:
        checked = f"Verified for this page with {proven.num_samples:,} fresh samples."
    else:
        checked = "NOT VERIFIED: stored counts, which anyone can write; `jaxacct verify` draws fresh ones."
    if (second or {}).get("verdict") == "certified":
        checked += " Checked by two implementations that share no code: both certify it."
    kind = "statement refused" if checked.startswith("NOT") else "statement"
    warned = facts.warning(plan)
    return (
        f'<p class="{kind}"><strong>{escaped(checked)}</strong><br>{escaped(plan.statement())}</p>'
        f"<p>{escaped(facts.adjacency_in_words(plan))}</p>"
        + ("" if warned is None else f'<p class="statement refused">Warning: {escaped(warned)}.</p>')
    )


def save(plan: Plan, path, *arguments, **named) -> None:
    """Write the page, atomically; other arguments as for `report`."""
    write_atomically(path, report(plan, *arguments, **named))


def _second(second: dict | None) -> list[str]:
    """Return what the second implementation found."""
    if second is None:
        return []
    said = f"second implementation (jaxacct check): {second['verdict']}"
    if second["verdict"] == "certified":
        return [said + "; both implementations agree"]
    return [said, *second.get("differences", ()), *filter(None, [second.get("reason")])]


def is_report(path: Path) -> bool:
    """Return whether a file begins as these pages do."""
    with open(path, "rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()


_NO_CLAIM = "<p>Nothing is claimed: the plan is not certified.</p>"


def _risk(plan: Plan, bands: Profile | None) -> str:
    """Return the risk by the bands of fresh samples where there are any, and at the certified point."""
    certified = _risks(plan.epsilon, plan.delta)
    names = [f"true positive rate at false positive rate {100 * rate:g} %" for rate in RATES]
    names += ["advantage: true minus false positive rate"]
    names += [
        f"reconstruction of what is guessed with probability {100 * rate:g} % without it" for rate in RATES
    ]
    heads, rows = ["attack on one example"], [[name] for name in names]
    note = (
        "The certified column follows from (epsilon, delta) alone and holds against every test; a single "
        "point says little about tests with false positive rates far above delta. Reconstruction: the "
        "attacker has all other data and the distribution of the example, and is right within a tolerance "
        "of his own (arXiv 2302.07225)."
    )
    if bands is not None:
        tests = zip(risk.interval_of_tests(bands, RATES), (bands.lower, bands.estimate), strict=True)
        low, middle = (np.append(part, edge[0]) for part, edge in tests)
        high = np.minimum(certified, _risks(bands.epsilons, bands.upper))
        for row, at_least, estimate, most in zip(rows, low, middle, high, strict=False):
            begin = f"{min(at_least, most):.3g} to " if at_least else "at most "
            row += [f"{min(estimate, most):.3g}", begin + text.rounded_up(most)]
        for row, most in zip(rows[len(middle) :], high[len(middle) :], strict=True):
            row += ["bounded only", f"at most {text.rounded_up(most)}"]
        heads += ["estimate", f"interval, confidence {100 * bands.confidence:.4g} %"]
        note += (
            f" Estimates are for the best attack, from {bands.num_samples:,} fresh draws a direction; the "
            "intervals hold together with their confidence, which delta does not include; "
            if bands.num_samples
            else " Estimates are for the best attack, computed without a draw; "
        )
        note += "runs stopped by a batch too large are left out."
    for row, most in zip(rows, certified, strict=True):
        row.append(text.rounded_up(most))
    return table([*heads, "certified: at most"], rows, numbers=range(1, 4)) + (
        f"<p class=note>{escaped(note)}</p>"
    )


def _risks(epsilons, deltas) -> list[float]:
    tests, guessed = (of(epsilons, deltas, RATES) for of in (risk.true_positive_rate, risk.reconstruction))
    return [*tests, risk.advantage(epsilons, deltas), *guessed]


def _run(plan: Plan, card: RunCard | None) -> str:
    """Return what was run, or that nothing is known of it."""
    if card is None:
        return (
            "<p>None is shown: a plan says what a run of it would guarantee, not that one was made "
            "(<code>report --run</code>).</p>"
        )
    rows = [
        ("steps", f"{card.steps:,}"),
        ("clip norm", exact(card.clip_norm)),
        ("clipping", card.clipping or "none"),
        ("evaluation", ", ".join(f"{name} {value}" for name, value in card.evaluation.items()) or "none"),
        ("model", f"SHA-256 {card.model} of its files"),
        ("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())),
        ("guarantee", card.adds(plan) or "the plan's"),
    ]
    return (
        table(("what", "as the run's card says"), rows)
        + ("<p>Model, card and plan belong together (<code>jaxacct check-run</code>). Taken on trust:</p>")
        + listed(list(ON_TRUST))
    )


def _drawn(plan: Plan) -> list[str]:
    if not isinstance(plan.evidence, Sampled):
        return ["drawn: nothing"]
    counts = f"{plan.evidence.num_samples:,} samples"
    where = f"{plan.provenance.device}, {plan.provenance.created}"
    return [f"drawn: {counts} on {where}, from the keys in the file"]


def _pictures(plan: Plan, bands: Profile | None) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>None: matplotlib was not installed where this page was made (jaxacct[plot]).</p>"
    figures = [plot.losses(plan), plot.verification(plan.verdict)]
    if plan.certified:
        figures = [plot.profile(plan, bands), plot.tradeoff(plan, bands), *figures]
    shown = "".join(plot.svg(figure) for figure in figures if figure is not None)
    return f"<div class=pictures>{shown}</div>"


def _commands(plan: Plan, source: str) -> str:
    file = shlex.quote(source)
    lines = [
        f"jaxacct show {file}            # everything on this page, computed again",
        f"jaxacct verify {file}          # the guarantee again, from fresh randomness where drawn",
        f"jaxacct check {file}           # by the second implementation, which shares no code",
    ]
    if plan.is_sampled:
        lines.append(f"jaxacct verify {file} --replay # the very draws that this plan names")
    return "\n".join(lines)


__all__ = ["measure", "report", "save"]
