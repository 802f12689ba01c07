"""`python -m tests.benchmarks.paper`: see `tests.benchmarks.paper`."""

import json as jsonlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxacct.calibration import calibrate as calibration
from jaxacct.cli.interrupted import leave
from jaxacct.cli.usage import new_app, parse
from jaxacct.common import files
from jaxacct.common.compilation_cache import keep_compiled_programs
from jaxacct.common.progress import watch
from jaxacct.report.figure import blank, save
from tests.benchmarks import paper as described
from tests.benchmarks.paper import pictures, setting, statements
from tests.benchmarks.paper.cells import Table, certified, promising
from tests.benchmarks.paper.setting import Cell, Setting
from tests.benchmarks.paper.statements import Compared, Verdict

PROG = "python -m tests.benchmarks.paper"


@dataclass(frozen=True)
class Sweep:
    """One of the commands.

    Attributes:
      name: of its files, and of its command.
      heading: what it shows, in a sentence.
      whole, short: what is swept.
      methods: what b-min-sep is compared with.
      judge: of points and the number of steps, the printed statements.
      draw: of points, the picture.
    """

    name: str
    heading: str
    whole: Setting
    short: Setting
    methods: tuple[str, ...]
    judge: Callable[[list[Compared], int], list[Verdict]]
    draw: Callable[[list[Compared]], Any]


FIGURE_2 = Sweep(
    "figure-2",
    "Ratios of mean squared errors, b-min-sep over cyclic Poisson: 1,024 steps, delta 1e-3.",
    setting.SECTION_7_1,
    setting.SHORT_7_1,
    ("cyclic-poisson", "balls-in-bins"),
    statements.figure_2,
    lambda points: pictures.ratios(points, "cyclic-poisson", "b-min-sep against cyclic Poisson"),
)
FIGURE_3 = Sweep(
    "figure-3",
    "Ratios of mean squared errors, b-min-sep over balls-in-bins: 1,024 steps, delta 1e-3.",
    setting.SECTION_7_1,
    setting.SHORT_7_1,
    ("balls-in-bins",),
    statements.figure_3,
    lambda points: pictures.ratios(points, "balls-in-bins", "b-min-sep against balls-in-bins"),
)
CINIC_10 = Sweep(
    "cinic-10",
    "Mean squared errors of all methods at the numbers of the CINIC-10 runs: 1,500 steps, |D| / B = 300.",
    setting.SECTION_7_2,
    setting.SHORT_7_2,
    ("cyclic-poisson", "balls-in-bins", "dp-sgd"),
    statements.section_7_2,
    lambda points: pictures.errors(points, "1,500 steps, |D| / B = 300"),
)


OPTIONS = """{heading}

Args:
  out: folder for cells.csv, {name}.png and {name}.txt; what is there is gone on with.
  short: {short} steps and two points, in a minute.
  every: certify every cell of the sweep (hours), not only the two expected to be best of each method.
  seconds: start no cell after so long.
  json: print one JSON object.
"""


def command_of(sweep: Sweep) -> Callable[..., int]:
    """The command that rebuilds a sweep; its help is its docstring."""

    def command(
        out: str, short: bool = False, every: bool = False, seconds: float | None = None, json: bool = False
    ) -> int:
        return rebuild(sweep, out, short, every, seconds, json)

    command.__doc__ = OPTIONS.format(heading=sweep.heading, name=sweep.name, short=sweep.short.iterations)
    return command


def figure_4_command(out: str) -> int:
    """Accuracies are trained: `python -P -m tests.benchmarks.figure_4`.

    Args:
      out: a folder.
    """
    raise ValueError(f"figure-4 trains: python -P -m tests.benchmarks.figure_4 --out {out}")


COMMANDS = {sweep.name: command_of(sweep) for sweep in (FIGURE_2, FIGURE_3, CINIC_10)}
COMMANDS["figure-4"] = figure_4_command


def rebuild(sweep: Sweep, out: str, short: bool, every: bool, seconds: float | None, as_json: bool) -> int:
    """Certify what a sweep needs and is not there yet; write table, picture and verdicts.

    Returns 0 when all points are finished, 1 when time was up before.
    """
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds!r}")
    blank(1, 1)  # without matplotlib nothing is begun
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, {out!r} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    swept = sweep.short if short else sweep.whole
    table, found = Table(folder / "cells.csv"), []
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    started, points = time.monotonic(), swept.points()
    with watch() as progress:
        for done, (epoch, epsilon) in enumerate(points):
            compared = _point(sweep, swept, epoch, epsilon, table, every, deadline, progress)
            if compared is None:
                break
            found.append(compared)
            each = (time.monotonic() - started) / (done + 1)
            _say(
                f"{done + 1}/{len(points)} points, {each:.0f} s each, "
                f"{each * (len(points) - done - 1) / 60:.0f} min left: |D| / B {epoch}, epsilon {epsilon:g}: "
                + ", ".join(f"{compared.ratio(m):.3f} of {m}" for m in sweep.methods)
            )
    verdicts = sweep.judge(found, swept.iterations)
    text = _text(sweep, swept, found, verdicts, table)
    files.write_atomically(folder / f"{sweep.name}.txt", text + "\n")
    if found:
        save(sweep.draw(found), folder / f"{sweep.name}.png")
    finished = len(found) == len(points)
    if as_json:
        statements = [{"printed": v.printed, "agrees": v.agrees, "found": v.found} for v in verdicts]
        rows = [
            {"epoch_length": p.epoch, "epsilon": p.epsilon, "b-min-sep": p.error, **p.others} for p in found
        ]
        print(jsonlib.dumps({"finished": finished, "points": rows, "statements": statements}))
    else:
        print(f"{text}\n\n{folder / sweep.name}.png, .txt and cells.csv written")
        if not finished:
            print(f"{len(found)} of {len(points)} points: the same command goes on")
    return 0 if finished else 1


def _point(sweep, swept: Setting, epoch, epsilon, table: Table, every: bool, deadline, progress):
    """The point, its missing cells certified; None where time is up before."""
    best: dict[str, Cell] = {}
    for method in ("b-min-sep", *sweep.methods):
        cells = swept.cells(method, epoch, epsilon)
        # The bound for cyclic Poisson is quick, and its estimate would be of hidden phases.
        wanted = cells if every or method in ("cyclic-poisson", "dp-sgd") else promising(cells, progress)
        for cell in wanted:
            if cell not in table:
                if time.monotonic() > deadline:
                    return None
                table.add(cell, certified(cell, progress))
        best[method] = table.best(cells)  # pyrefly: ignore[unsupported-operation]  as all are there
    # Balls-in-bins is one of the separations.
    ours = min(table.error_of(best[m]) for m in ("b-min-sep", "balls-in-bins") if m in best)
    return Compared(epoch, epsilon, ours, {m: table.error_of(best[m]) for m in sweep.methods})


def _text(sweep: Sweep, swept: Setting, points: list[Compared], verdicts, table: Table) -> str:
    """The table of points and what they say of the printed statements."""
    names = ("b-min-sep", *sweep.methods)
    lines = [
        f"{sweep.name} of arXiv 2602.09338 at {swept.iterations} steps, delta {swept.delta:g}: prefix-sum "
        "error at certified noise, beside that of other methods the ratio of b-min-sep to it",
        "b-min-sep and balls-in-bins are certified by draws, their failure probability in delta (the paper "
        "takes half of delta); cyclic Poisson reveals its phase, as there",
        "",
        "|D| / B  epsilon  " + "  ".join(f"{name:>22}" for name in names),
    ]
    for p in points:
        row = [f"{p.error:>22.5g}", *(f"{p.others[m]:>13.5g} ({p.ratio(m):.3f})" for m in sweep.methods)]
        lines.append(f"{p.epoch:>7}  {p.epsilon:>7g}  " + "  ".join(f"{part:>22}" for part in row))
    samples = sum(int(row["samples"]) for row in table.rows.values())
    lines += ["", f"{len(table.rows)} cells in cells.csv, {samples:,} samples drawn for them", ""]
    return "\n".join([*lines, *(f"{verdict.line()}\n" for verdict in verdicts)]).rstrip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line: exit code 0 all done, 1 time was up, 2 bad input, 130 interrupted."""
    keep_compiled_programs()
    code = 2
    try:
        arguments = sys.argv[1:] if argv is None else argv
        app = new_app(PROG, described.__doc__)
        for name, command in COMMANDS.items():
            app.command(command, name=name)
        code = parse(app, arguments)()
    except KeyboardInterrupt:
        leave(f"{PROG}: interrupted; the same command goes on")
    except (ValueError, calibration.NotCertifiedError) as error:
        _say(f"{PROG}: {error}")
    except OSError as error:
        _say(f"{PROG}: {error.strerror}: {error.filename}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
