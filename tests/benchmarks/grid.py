"""Calibrated noise over a grid of (bands, separation, epsilon), with cost, as CSV and figure; resumable.

    python tests/benchmarks/grid.py figures-2-3 --out runs/figures.csv
    python tests/benchmarks/grid.py cinic-10 --out runs/cinic.csv

Every finished cell is kept: the same command goes on where it was. Cells that only the analytic fallback
certifies within the sample limit say so in the `method` column.
"""

import argparse
import csv
import dataclasses
import itertools
import sys
import time
from pathlib import Path

from jaxacct import BandedToeplitz, BMinSep, Budget, CyclicPoisson, Mechanism, calibrate, prefix_sum_error
from jaxacct.calibration import analytic_exponent
from jaxacct.files import write_atomically
from jaxacct.proposals.candidates import candidates
from jaxacct.verification.target import Target

COLUMNS = (
    "scheme iterations epoch_length bands separation epsilon delta noise_multiplier prefix_sum_error "
    "method samples seconds predicted_plain_samples proposal"
).split()


@dataclasses.dataclass(frozen=True)
class Cell:
    scheme: str
    iterations: int
    epoch_length: int
    bands: int
    separation: int
    epsilon: float
    delta: float


def figures_2_3() -> list[Cell]:
    """n = 1024, delta = 1e-3 (arXiv 2602.09338, section 7.1): b-min-sep beside cyclic Poisson and
    balls-in-bins.
    """
    cells = []
    for bands, epoch, epsilon in itertools.product((8, 32), (128, 512), (1.0, 4.0, 16.0)):
        for separation in (bands, 64):
            cells.append(Cell("b-min-sep", 1024, epoch, bands, separation, epsilon, 1e-3))
        cells.append(Cell("cyclic-poisson", 1024, epoch, bands, bands, epsilon, 1e-3))
        cells.append(Cell("b-min-sep", 1024, epoch, bands, epoch, epsilon, 1e-3))
    return cells


def cinic_10() -> list[Cell]:
    """n = 1500, |D| / B = 300, delta = 2.8e-6 (arXiv 2602.09338, section 7.2)."""
    return [
        Cell("b-min-sep", 1500, 300, bands, separation, epsilon, 2.8e-6)
        for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5)  # the cheap ones first
        for bands in (2, 4, 8, 16, 32, 64)
        for separation in sorted({bands, 150, 300})
    ]


GRIDS = {"figures-2-3": figures_2_3, "cinic-10": cinic_10}


def run(cell: Cell, max_samples: int | None) -> dict:
    """Calibrate one cell; cyclic Poisson by the usual analysis that reveals the phase."""
    started = time.monotonic()
    strategy = BandedToeplitz.optimal(
        iterations=cell.iterations, bands=cell.bands, min_separation=cell.separation, participations=1
    )
    sizes = dict(dataset_size=1000 * cell.epoch_length, batch_size=1000, iterations=cell.iterations)
    row = dataclasses.asdict(cell)
    if cell.scheme == "cyclic-poisson":
        scheme = CyclicPoisson.from_batch_size(**sizes, cycle_length=cell.separation)
        sigma = 1.01 ** analytic_exponent(
            Mechanism(scheme, strategy, 1.0), Target.at(cell.epsilon, cell.delta), 1.01
        )
        row |= {
            "method": "analytic phase revealed",
            "samples": 0,
            "proposal": "",
            "predicted_plain_samples": 0,
        }
    else:
        scheme = BMinSep.from_batch_size(**sizes, min_separation=cell.separation)
        plan = calibrate(scheme, strategy, epsilon=cell.epsilon, delta=cell.delta, max_samples=max_samples)
        sigma = plan.mechanism.noise_multiplier
        found = candidates(
            Mechanism(scheme, strategy, sigma), cell.epsilon, "remove", Budget.split(cell.delta)
        )
        plain = next(c.predicted_samples for c in found if c.proposal.name == "plain")
        seen = plan.evidence
        row |= {
            "method": "certified" if seen else "analytic fallback",
            "samples": seen.num_samples if seen else 0,
            "proposal": f"{seen.remove.proposal} / {seen.add.proposal}" if seen else "",
            "predicted_plain_samples": round(plain),
        }
    row["noise_multiplier"] = sigma
    row["prefix_sum_error"] = prefix_sum_error(strategy, iterations=cell.iterations, noise_multiplier=sigma)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-samples", type=int, help="a direction; what the target needs by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(options.out.open())) if options.out.exists() else []
    names = [field.name for field in dataclasses.fields(Cell)]
    done = {tuple(row[name] for name in names) for row in rows}
    deadline = time.monotonic() + options.seconds
    cells = GRIDS[options.grid]()
    left = [cell for cell in cells if tuple(str(getattr(cell, name)) for name in names) not in done]
    started = time.monotonic()
    for index, cell in enumerate(left):
        if time.monotonic() > deadline:
            break
        rows.append(run(cell, options.max_samples))
        lines = [",".join(COLUMNS)] + [",".join(str(row[c]) for c in COLUMNS) for row in rows]
        write_atomically(options.out, "\n".join(lines) + "\n")
        each = (time.monotonic() - started) / (index + 1)
        print(
            f"{len(cells) - len(left) + index + 1}/{len(cells)} cells, {each:.0f} s each, "
            f"{each * (len(left) - index - 1) / 60:.0f} min left: {cell}: {rows[-1]['noise_multiplier']:.4f}",
            file=sys.stderr,
            flush=True,
        )
    draw(rows, options.out.with_suffix(".png"))


def draw(rows: list[dict], path: Path) -> None:
    """Prefix-sum error against epsilon: a panel for each epoch length or separation, a line a setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = sorted({int(row["epoch_length"]) for row in rows})
    panels: dict[str, dict[str, list]] = {}
    for row in rows:
        bands, separation = row["bands"], str(row["separation"])
        separation = "= bands" if separation == str(bands) else separation
        if len(epochs) > 1:
            title = f"epoch length {row['epoch_length']}"
            label = f"{row['scheme']}, {bands} bands, separation {separation}"
        else:
            title, label = f"separation {separation}", f"{bands} bands"
        point = float(row["epsilon"]), float(row["prefix_sum_error"])
        panels.setdefault(title, {}).setdefault(label, []).append(point)
    size = (4.6 * len(panels), 4.9 if len(epochs) == 1 else 6.0)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for panel, title in zip(axes[0], sorted(panels), strict=True):
        for label, points in panels[title].items():
            x, y = zip(*sorted(points), strict=True)
            panel.loglog(x, y, "--" if label.startswith("cyclic") else "-", marker=".", label=label)
        ticks = sorted({float(row["epsilon"]) for row in rows})
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set(title=title, xlabel="epsilon")
        panel.grid(alpha=0.3)
        columns = 1 if max(map(len, panels[title])) > 12 else 3
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns)
    axes[0][0].set_ylabel("mean squared prefix-sum error")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
