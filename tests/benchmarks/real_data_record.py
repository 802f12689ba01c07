"""Records and pictures of accuracy on real images, from the tables of `real_data`.

python -m tests.benchmarks.real_data_record --runs DIR --plans DIR    # DIR/mnist-cnn, DIR/mnist-linear, ...
python -m tests.benchmarks.real_data_record                           # pictures alone, from the records
"""

import itertools
import json
from pathlib import Path

import numpy as np

from jaxacct import Plan, prefix_sum_error
from jaxacct.report.figure import MARKERS, blank, save
from jaxacct.strategies.base import workload_error
from jaxacct.strategies.workload_names import workload_named
from tests.benchmarks.figure_4 import half_width
from tests.benchmarks.real_data import DP_SGD, Protocol, Table, best_setting, path_of
from tests.benchmarks.results import FOLDER, record
from train import command as _command

FIGURES = Path(__file__).parent / "figures"
DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
MODELS = {
    "linear": "softmax regression (7,850 parameters)",
    "cnn": "a CNN (3,818 parameters)",
    "perceptron": "a perceptron (50,890 parameters)",
}
METHODS = tuple(Protocol().schemes())


def values_of(table: Table, method: str, epsilon: str):
    """Return (accuracies by seed at the best setting, that setting), or None without finished runs."""
    cell = dict(method=method, epsilon=epsilon)
    best = best_setting(table, cell)
    rows = [] if best is None else table.find(phase="private", **best._asdict(), **cell)
    if best is None or len(rows) < Protocol().seeds:
        return None
    ordered = sorted(rows, key=lambda row: int(row["seed"]))
    return np.array([float(row["accuracy"]) for row in ordered]), best


def _cell(values, base) -> str:
    text = f"{100 * values.mean():.2f} ± {100 * half_width(values):.2f}"
    if base is None:
        return text
    difference = 100 * (values - base)
    return f"{text} ({difference.mean():+.2f} ± {half_width(difference):.2f})"


def accuracies(runs: Path, data: str, model: str, order: int) -> None:
    """Store accuracies of one data set and model by epsilon and method."""
    table = Table(runs / f"{data}-{model}" / "real-data.csv")
    epsilons = sorted({row["epsilon"] for row in table.rows}, key=float)
    rows = []
    for epsilon in epsilons:
        found = {method: values_of(table, method, epsilon) for method in METHODS}
        if not any(found.values()):
            continue
        base = found[DP_SGD]
        cells = []
        for method, cell in found.items():
            first = None if method == DP_SGD or base is None else base[0]
            cells.append("" if cell is None else _cell(cell[0], first))
        rows.append([f"{float(epsilon):g}", *cells])
    if not rows:
        return
    cpu, by_fit = sum(float(row["seconds"]) for row in table.rows), ""
    fitted: dict[tuple[str, str], list[float]] = {}
    for row in table.find(phase="fit"):
        fitted.setdefault((row["method"], row["epsilon"]), []).append(float(row["accuracy"]))
    for (method, epsilon), values in fitted.items():
        shown = _cell(np.array(values), None)
        by_fit += f" {len(values)} runs by `train.fit`, {method} at epsilon {float(epsilon):g}: {shown}."
    record(
        f"real_{data}_{model}".replace("-", "_"),
        question=f"Accuracy on {DATA[data]}, {MODELS[model]}",
        order=order,
        columns=["epsilon", *METHODS],
        rows=rows,
        note=f"Test accuracy in per cent, mean of {Protocol().seeds} runs with 95 % t intervals; in brackets "
        "the paired difference to DP-SGD. delta 1e-5, 50,000 private images, 500 steps of mean batch 500 (5 "
        "epochs), 16 bands, momentum .9, clip norm .3. The learning rate of each cell is the best of four by "
        "three trials each on public images; intervals do not cover that choice. Certified plans, programs "
        f"of `lean`. {cpu / 60:.0f} CPU-minutes.{by_fit}",
    )


def errors(plans: Path, epsilon: float) -> dict[str, tuple[float, float]]:
    """Return method -> roots of (prefix-sum error, error under momentum .9 at a rate that falls)."""
    found = {}
    for method in METHODS:
        path = path_of(Protocol(), method, epsilon, plans)
        if path.exists():
            plan = Plan.load(path)
            sizes = dict(iterations=Protocol().iterations, noise_multiplier=plan.noise_multiplier)
            workload = workload_named("momentum:0.9,linear", Protocol().iterations)
            run = workload_error(plan.mechanism.strategy, workload=workload, **sizes) ** 0.5
            found[method] = prefix_sum_error(plan.mechanism.strategy, **sizes) ** 0.5, run * (1 - 0.9)
    return found


def criterion(runs: Path, plans: Path) -> None:
    """Store errors of the noise beside accuracies, and how often one ranks methods against the other."""
    names = [f"{data}-{model}" for data in DATA for model in MODELS]
    tables = {name: Table(runs / name / "real-data.csv") for name in names if (runs / name).is_dir()}
    rows, found = [], {name: [] for name in tables}
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        for method, sizes in errors(plans, epsilon).items():
            cells = []
            for name, table in tables.items():
                values = values_of(table, method, str(epsilon))
                cells.append("" if values is None else f"{100 * values[0].mean():.2f}")
                if values is not None:
                    found[name].append((epsilon, sizes, values[0]))
            if any(cells):
                rows.append([f"{epsilon:g}", method, *(f"{size:.2f}" for size in sizes), *cells])
    used = [4 + index for index, name in enumerate(tables) if found[name]]
    rows = [[*row[:4], *(row[index] for index in used)] for row in rows]
    counts: dict[float, list[int]] = {}  # pairs, wrong by prefix sums, wrong by the optimizer's error
    for cells in found.values():
        for (epsilon, sizes, values), (other, others, theirs) in itertools.combinations(cells, 2):
            difference = values - theirs
            if epsilon == other and abs(difference.mean()) > half_width(difference):
                count = counts.setdefault(epsilon, [0, 0, 0])
                count[0] += 1
                for index in (0, 1):
                    count[1 + index] += (sizes[index] - others[index]) * difference.mean() > 0
    told = [f"{n} at epsilon {e:g} ({one} and {two} wrong)" for e, (n, one, two) in counts.items()]
    record(
        "real_criterion",
        question="Does less error of the noise mean more accuracy?",
        order=108,
        columns=["epsilon", "method", "prefix-sum error", "error under momentum .9, falling rate",
                 *(list(tables)[index - 4] for index in used)],
        rows=rows,
        note="Errors are roots of mean squares per unit of clip norm; accuracies, per cent, of the tables "
        "above. Pairs of methods whose accuracies differ (95 % paired t interval), and how often the order "
        "by prefix sums and by the error of the optimizer that was run (`--workload momentum:0.9,linear`) is "
        f"wrong: {', '.join(told)}. Intervals do not cover the choice of the learning rate.",
    )  # fmt: skip


def draw() -> None:
    """Draw accuracy and difference to DP-SGD against epsilon from the stored records."""
    names = [f"real_{data}_{model}".replace("-", "_") for data in DATA for model in MODELS]
    stored = [FOLDER / f"{name}.json" for name in names if (FOLDER / f"{name}.json").exists()]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in stored]
    figure = blank(5.2 * len(found), 8.0)
    for column, entry in enumerate(found):
        for row in range(2):
            axes = figure.add_subplot(2, len(found), 1 + column + row * len(found))
            for number, method in enumerate(entry["columns"][1:]):
                x, y, half = [], [], []
                for cells in entry["rows"]:
                    text = cells[1 + number]
                    if row and "(" not in text:
                        continue
                    part = text.split("(")[1].rstrip(")") if row else text.split(" (")[0]
                    if part:
                        x.append(float(cells[0]) * (1 + 0.025 * (number - 2.5)))
                        y.append(float(part.split(" ± ")[0]))
                        half.append(float(part.split(" ± ")[1]))
                style = dict(marker=MARKERS[number % len(MARKERS)], capsize=2, markersize=4, linewidth=1)
                if x:
                    axes.errorbar(x, y, yerr=half, label=method, color=f"C{number}", **style)
            ticks = [0.5, 1, 2, 4, 8]
            axes.set(xscale="log", xlabel="epsilon")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            if row:
                axes.axhline(0, color="0.4", linewidth=0.8)
                axes.set_ylabel("difference to DP-SGD, per cent")
            else:
                axes.set_title(entry["question"].removeprefix("Accuracy on "), fontsize=10)
                axes.set_ylabel("test accuracy, per cent")
                if column == 0:
                    axes.legend(fontsize=8, frameon=False)
    save(figure, FIGURES / "real-data.png")
    if found:
        first = found[0] | {"picture": "figures/real-data.png"}
        stored[0].write_text(json.dumps(first, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command(runs: str | None = None, plans: str | None = None) -> int:
    """Records and pictures of accuracy on real images.

    Args:
      runs: folder of the folders that `real_data` wrote, DATA-MODEL; pictures alone without it.
      plans: folder of their plans.
    """
    if runs is not None:
        if plans is None:
            raise ValueError("plans must be given with runs")
        order = 100
        for data in DATA:
            for model in MODELS:
                if (Path(runs) / f"{data}-{model}" / "real-data.csv").exists():
                    accuracies(Path(runs), data, model, order)
                    order += 1
        criterion(Path(runs), Path(plans))
    draw()
    return 0


if __name__ == "__main__":
    _command.run(command, "real_data_record", prog="python -m tests.benchmarks.real_data_record", argv=None)
