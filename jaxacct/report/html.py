"""A plan as one page for a privacy reviewer: HTML without scripts or links to elsewhere, pictures inside."""

import html
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.accountants import truncation
from jaxacct.calibration.choice import choice_of
from jaxacct.common.files import write_atomically
from jaxacct.common.progress import Progress
from jaxacct.common.records import exact
from jaxacct.core import text
from jaxacct.core.evidence import Sampled
from jaxacct.core.plan import Plan
from jaxacct.estimates.profile import Profile, privacy_profile
from jaxacct.report import facts, risk
from jaxacct.report import plots as plot

FIRST_LINE = "<!DOCTYPE html><!-- jaxacct report -->"

# Assumptions of a guarantee, how the code meets them, and the test that attacks them.
ASSUMPTIONS = (
    (
        "Batches are drawn exactly as the scheme says, from secret keys.",
        "The trainer's own sampler, with keys of the operating system; an interrupted run goes on with them.",
        "tests/train/batches/test_sampler.py::test_each_example_follows_the_accounted_distribution",
    ),
    (
        "Which examples were in a batch, and sizes of batches, are not released.",
        "They are in the private log alone.",
        "tests/train/test_loop.py::test_logs_are_json_and_tell_no_times",
    ),
    (
        "Each example's gradient is clipped to the clip norm, whatever it is.",
        "Norms in float64, an exact integer check after scaling; what is not finite counts as zero.",
        "tests/train/clipping/test_clipping.py::test_every_power_of_two_is_clipped",
    ),
    (
        "Noise has the stated size and matrix, and its low bits are independent of the gradients.",
        "Gradients on a public grid, integer sums, integer noise from a 256-bit key.",
        "tests/train/clipping/test_released_numbers.py::test_the_low_bit_attack_finds_nothing",
    ),
    (
        "Only the noisy sums and what follows from them are released.",
        "A canary audit of the trainer stays below the certified epsilon; broken trainers do not.",
        "tests/train/audit/test_audit.py::test_the_trainer_stays_under_the_certified_epsilon_and_broken_ones_do_not",
    ),
)

_STYLE = """
body { font: 16px/1.5 Georgia, serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #999; }
.statement { border-left: 5px solid #1f4e79; padding: .6rem 1rem; background: #f2f5f8; font-size: 1.1rem; }
.refused { border-color: #a00; background: #fbecec; }
table { border-collapse: collapse; width: 100%; } td, th { border: 1px solid #bbb; padding: .35rem .6rem; }
th { background: #eee; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 14px/1.4 monospace; background: #f4f4f4; } pre { padding: .6rem; white-space: pre-wrap; }
svg { max-width: 100%; height: auto; } .note { color: #444; font-size: .92rem; }
"""


CONFIDENCE = 0.999
_FURTHEST = 3.0  # epsilon of the profile of a plan whose own is 0


def measure(plan: Plan, draws: int, key=None, progress: Progress | None = None) -> Profile:
    """Return the privacy profile from `draws` fresh samples for each direction, with 99.9 % bands in all.

    For a composed plan the profile of both mechanisms. For truncated batches the reserve at each epsilon
    (`truncation.reserve`) is added to the upper ends, and the lower ends are 0.
    """
    grid = np.linspace(0, 1.5 * plan.epsilon if plan.epsilon > 0 else _FURTHEST, 13)
    options: dict[str, Any] = dict(num_samples=draws, confidence=CONFIDENCE, key=key, progress=progress)
    found = privacy_profile(plan.mechanism, grid, compose_with=plan.compose_with, **options)
    if plan.truncation_delta is None:
        return found
    added = np.array([_cuts_add(plan, float(epsilon)) for epsilon in grid])

    def with_cuts(lower, estimate, upper):
        del lower
        return np.stack([np.zeros_like(upper), estimate, np.minimum(1.0, upper + added)])

    sides = {direction: with_cuts(*bands) for direction, bands in found.directions.items()}
    lower, estimate, upper = with_cuts(found.lower, found.estimate, found.upper)
    return replace(found, lower=lower, estimate=estimate, upper=upper, directions=sides)


def _cuts_add(plan: Plan, epsilon: float) -> float:
    """Return the reserve of delta(epsilon) for truncated batches; 1 where no bound covers this noise."""
    assert plan.dataset_size is not None and plan.max_batch_size is not None
    if not truncation.covers(plan.mechanism, epsilon):
        return 1.0
    return truncation.reserve(plan.mechanism.scheme, epsilon, plan.dataset_size, plan.max_batch_size)


def report(
    plan: Plan, source: str = "plan.json", bands: Profile | None = None, second: dict | None = None
) -> str:
    """Return the page as HTML.

    Args:
      plan: certified or not; the page of a plan that is not says so first.
      source: what to call its file in the commands.
      bands: of `measure`, for the whole privacy profile.
      second: what `checker.check_file` found, where it was run.

    Without matplotlib it has no pictures.
    """
    certified = plan.certified
    kind = "statement" if certified else "statement refused"
    evidence = "\n".join(text.verdict_lines(plan.verdict, verbose=True))
    parts = [
        f'<p class="{kind}">{_text(plan.statement())}</p>',
        _section("The mechanism", _table(("what", "value"), facts.facts(plan))),
        *_chosen(plan),
        _section("Where delta goes", _budget(plan)),
        _section("The evidence", f"<pre>{_text(evidence)}</pre>"),
        _section("What an attacker can do", _risk(plan, bands) if certified else _NO_CLAIM),
        _section("Pictures", _pictures(plan, bands)),
        _section(
            "Assumptions",
            _table(
                ("assumption", "what the trainer does", "the test that attacks it"),
                [(a, b, f"<code>{_text(test)}</code>") for a, b, test in ASSUMPTIONS],
                raw=(2,),
            )
            + "<p class=note>A trainer of another make must do the same by itself. Derivations are in the "
            "package's <code>proofs/</code>, statements of papers that fail in "
            "<code>proofs/errata.md</code>.</p>",
        ),
        _section("Known errors in print", _errata(plan)),
        _section(
            "What was computed again, and what was drawn",
            _list([*_drawn(plan), *_second(second), *text.checked(plan)]),
        ),
        _section("How to check it yourself", f"<pre>{_text(_commands(plan, source))}</pre>"),
    ]
    title = f"Differential privacy of a training run: ({exact(plan.epsilon)}, {exact(plan.delta)})"
    head = f"<meta charset='utf-8'><title>{_text(title)}</title><style>{_STYLE}</style>"
    return f"{FIRST_LINE}\n<html lang='en'><head>{head}</head><body><h1>{_text(title)}</h1>" + (
        "\n".join(parts) + "</body></html>\n"
    )


def save(
    plan: Plan, path, source: str = "plan.json", bands: Profile | None = None, second: dict | None = None
) -> None:
    """Write the page, atomically; arguments as for `report`."""
    write_atomically(path, report(plan, source, bands, second))


def _second(found: dict | None) -> list[str]:
    """Return what the second implementation found."""
    if found is None:
        return []
    said = f"second implementation (jaxacct check): {found['verdict']}"
    if found["verdict"] == "certified":
        return [said + "; both implementations agree"]
    return [said, *found.get("differences", ()), *filter(None, [found.get("reason")])]


def is_report(path: Path) -> bool:
    """Return whether a file begins as these pages do."""
    with open(path, "rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()


_NO_CLAIM = "<p>Nothing is claimed: the plan is not certified.</p>"


def _chosen(plan: Plan) -> list[str]:
    choice = choice_of(plan)
    if choice is None:
        return []
    return [_section("How it was chosen", f"<p>{_text(choice.statement())}</p>")]


def _budget(plan: Plan) -> str:
    rows = [*facts.budget(plan), ("in all", plan.delta)]
    return _table(("item", "delta"), [(name, f"{delta:.6g}") for name, delta in rows], numbers=(1,))


def _risk(plan: Plan, bands: Profile | None) -> str:
    """Return the risk at the certified point, and by the bands of fresh samples where there are any."""
    rates = np.array((1e-4, 1e-3, 0.01, 0.1))
    names = [f"true positive rate at false positive rate {rate:g}" for rate in rates]
    names.append("advantage: true minus false positive rate")
    names += [f"reconstruction of what is guessed with probability {rate:g} without it" for rate in rates]
    columns = [_risks(plan.epsilon, plan.delta, rates)]
    heads = ["attack on one example", "certified: at most"]
    note = (
        "The certified column follows from (epsilon, delta) alone and holds against every test. "
        "Reconstruction: the attacker has all other data and the distribution of the example, and is "
        "right within a tolerance of his own (arXiv 2302.07225)."
    )
    if bands is not None:
        measured = _risks(bands.epsilons, bands.upper, rates)
        columns.append([min(pair) for pair in zip(columns[0], measured, strict=True)])
        heads.append(f"at most, with confidence {bands.confidence:.4g}")
        note += (
            f" The last one is from {bands.num_samples:,} fresh draws a direction: its numbers hold together "
            "with that confidence, which delta does not include; "
            if bands.num_samples
            else " The last one is computed without a draw; "
        )
        note += "runs stopped by a batch too large are left out."
    rows = [
        (name, *(_rounded_up(value) for value in row)) for name, *row in zip(names, *columns, strict=True)
    ]
    return _table(heads, rows, numbers=(1, 2)) + f"<p class=note>{_text(note)}</p>"


def _risks(epsilons, deltas, rates) -> list[float]:
    positive, guessed = (of(epsilons, deltas, rates) for of in (risk.true_positive_rate, risk.reconstruction))
    return [*positive, risk.advantage(epsilons, deltas), *guessed]


# What is printed elsewhere about such mechanisms and fails: the heading in proofs/errata.md, whether it is
# about the plan's mechanism, and what is done here instead.
ERRATA: tuple[tuple[str, Callable[[Plan], bool], str], ...] = (
    (
        "arXiv 2602.09338, theorem 6.1: users who share examples",
        lambda plan: _has_users(plan),
        "Only graphs that the scheme holds for are accepted; the trainer refuses others.",
    ),
    (
        "arXiv 2602.09338, conjecture 6.2: algorithm 4",
        lambda plan: _has_users(plan),
        "Batches are not formed by algorithm 4.",
    ),
    (
        "jax-privacy 2.0: norms of the last columns in the wrong order",
        lambda plan: plan.mechanism.strategy.bands > 2 and "b-min-sep" in plan.mechanism.scheme.name,
        "Losses are computed here, from norms in their order; do not compare with that release.",
    ),
)


def _has_users(plan: Plan) -> bool:
    return "attribution" in plan.mechanism.scheme.name


def _errata(plan: Plan) -> str:
    rows = [(heading, instead) for heading, concerns, instead in ERRATA if concerns(plan)]
    if not rows:
        return "<p>No entry of <code>proofs/errata.md</code> is about a mechanism like this one.</p>"
    return _table(("in proofs/errata.md", "here"), rows)


def _drawn(plan: Plan) -> list[str]:
    if not isinstance(plan.evidence, Sampled):
        return ["drawn: nothing"]
    counts = f"{plan.evidence.remove.num_samples:,} samples (remove), {plan.evidence.add.num_samples:,} (add)"
    where = f"{plan.provenance.device}, {plan.provenance.created}"
    return [f"drawn: {counts} on {where}, from the keys in the file"]


def _rounded_up(bound: float) -> str:
    """Return three digits that are not below the bound."""
    shown = float(f"{bound:.2e}")
    return f"{shown if shown >= bound else min(1.0, shown + 10.0 ** (math.floor(math.log10(bound)) - 2)):.3g}"


def _pictures(plan: Plan, bands: Profile | None) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>None: matplotlib was not installed where this page was made.</p>"
    figures = [plot.losses(plan), plot.verification(plan.verdict)]
    if plan.certified:
        curves = [] if bands is None else [plot.tradeoff_curve(plan, bands)]
        figures = [plot.profile(plan, bands), plot.tradeoff(plan, bands), *curves, *figures]
    return "".join(f"<p>{plot.svg(figure)}</p>" for figure in figures if figure is not None)


def _commands(plan: Plan, source: str) -> str:
    lines = [f"jaxacct show {source}            # everything on this page, computed again"]
    lines.append(f"jaxacct verify {source}          # the guarantee again, from fresh randomness where drawn")
    lines.append(f"jaxacct check {source}           # by the second implementation, which shares no code")
    if plan.is_sampled:
        lines.append(f"jaxacct verify {source} --replay # the very draws that this plan names")
    return "\n".join(lines)


def _text(value) -> str:
    return html.escape(str(value), quote=True)


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>{content}"


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _table(head, rows, numbers=(), raw=()) -> str:
    """Args: columns of `numbers` are set to the right; those of `raw` are HTML already."""

    def cell(place, value):
        kind = " class=number" if place in numbers else ""
        return f"<td{kind}>{value if place in raw else _text(value)}</td>"

    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(cell(*each) for each in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


__all__ = ["measure", "report", "save"]
