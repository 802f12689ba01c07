"""The mean squared errors of arXiv 2602.09338 (section 7) rebuilt, beside the printed ones.

    python -m tests.benchmarks.paper figure-2 --out runs/paper     # b-min-sep against cyclic Poisson
    python -m tests.benchmarks.paper figure-3 --out runs/paper     # b-min-sep against balls-in-bins
    python -m tests.benchmarks.paper cinic-10 --out runs/paper     # section 7.2: all of them, and DP-SGD
    python -P -m tests.benchmarks.figure_4 --out runs/digits # the protocol of figure 4, on digits

`--short` is the same with fewer steps, in seconds. Every point that is finished is kept.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxacct.common import files
from jaxacct.common.compilation_cache import keep_compiled_programs
from jaxacct.common.progress import watch
from jaxacct.report.figure import save
from tests.benchmarks.paper import cells, statements
from tests.benchmarks.paper.cells import Cell, Setting, Table, certified, promising
from tests.benchmarks.paper.statements import Compared, Verdict
from tests.benchmarks.pictures import over_epsilon


@dataclass(frozen=True)
class Sweep:
    """One of the commands.

    Attributes:
      name: of its files, and of its command.
      whole, short: what is swept.
      methods: what b-min-sep is compared with; ratios to the first one are drawn.
      judge: of points and the number of steps, the printed statements.
    """

    name: str
    whole: Setting
    short: Setting
    methods: tuple[str, ...]
    judge: Callable[[list[Compared], int], list[Verdict]]


OF_FIGURES = cells.SECTION_7_1, cells.SHORT_7_1
FIGURE_2 = Sweep("figure-2", *OF_FIGURES, ("cyclic-poisson", "balls-in-bins"), statements.figure_2)
FIGURE_3 = Sweep("figure-3", *OF_FIGURES, ("balls-in-bins",), statements.figure_3)
ALL = ("cyclic-poisson", "balls-in-bins", "dp-sgd")
CINIC_10 = Sweep("cinic-10", cells.SECTION_7_2, cells.SHORT_7_2, ALL, statements.section_7_2)
SWEEPS = {sweep.name: sweep for sweep in (FIGURE_2, FIGURE_3, CINIC_10)}


def drawn(sweep: Sweep, points: list[Compared]):
    """Ratios of errors, a line an epoch length; of one epoch length errors, a line a method."""
    ticks, epochs = sorted({p.epsilon for p in points}), sorted({p.epoch for p in points})
    if len(epochs) == 1:
        lines = {m: [(p.epsilon, p.others[m]) for p in points] for m in sweep.methods}
        lines = {"b-min-sep": [(p.epsilon, p.error) for p in points]} | lines
        title = f"{sweep.whole.iterations:,} steps, |D| / B = {epochs[0]}"
        return over_epsilon(lines, ticks, yscale="log", ylabel="prefix-sum error", title=title)
    method = sweep.methods[0]
    lines = {f"|D| / B = {epoch}": [] for epoch in epochs}
    for p in points:
        lines[f"|D| / B = {p.epoch}"].append((p.epsilon, p.ratio(method)))
    return over_epsilon(lines, ticks, {"the same": 1}, ylabel=f"prefix-sum error, b-min-sep over {method}")


def rebuild(sweep: Sweep, swept: Setting, folder: Path) -> None:
    """Certify what a sweep needs and is not in the folder yet; write table, picture and verdicts."""
    folder.mkdir(parents=True, exist_ok=True)
    table, found = Table(folder / "cells.csv"), []
    started, points = time.monotonic(), swept.points()
    with watch() as progress:
        for done, (epoch, epsilon) in enumerate(points, 1):
            found.append(compared := _point(sweep, swept, epoch, epsilon, table, progress))
            each = (time.monotonic() - started) / done
            left = each * (len(points) - done) / 60
            ratios = ", ".join(f"{compared.ratio(m):.3f} of {m}" for m in sweep.methods)
            point = f"{done}/{len(points)} points, {left:.0f} min left: |D| / B {epoch}, epsilon {epsilon:g}"
            print(f"{point}: {ratios}", file=sys.stderr, flush=True)
    text = _text(sweep, swept, found, sweep.judge(found, swept.iterations), table)
    files.write_atomically(folder / f"{sweep.name}.txt", text + "\n")
    save(drawn(sweep, found), folder / f"{sweep.name}.png")
    print(f"{text}\n\n{folder / sweep.name}.png, .txt and cells.csv written")


def _point(sweep, swept: Setting, epoch, epsilon, table: Table, progress) -> Compared:
    """The point, its missing cells certified."""
    best: dict[str, Cell] = {}
    for method in ("b-min-sep", *sweep.methods):
        all_cells = swept.cells(method, epoch, epsilon)
        # The bound for cyclic Poisson is quick, and its estimate would be of hidden phases.
        wanted = all_cells if method in ("cyclic-poisson", "dp-sgd") else promising(all_cells, progress)
        for cell in wanted:
            if cell not in table.rows:
                table.add(cell, certified(cell, progress))
        best[method] = table.best(all_cells)
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


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the same command goes on where it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SWEEPS)
    parser.add_argument("--out", type=Path, required=True, help="folder; what is there is gone on with")
    parser.add_argument("--short", action="store_true", help="few steps and two points, in a minute")
    given = parser.parse_args(argv)
    keep_compiled_programs()
    sweep = SWEEPS[given.name]
    rebuild(sweep, sweep.short if given.short else sweep.whole, given.out)


if __name__ == "__main__":
    main()
