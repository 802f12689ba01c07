"""Records and pictures of accuracy on real images, from the tables of `real_data`.

python -m tests.benchmarks.real_data_record --runs DIR --plans DIR    # DIR/mnist-cnn, DIR/mnist-linear, ...
python -m tests.benchmarks.real_data_record                           # pictures alone, from the records

Cells of stored records without finished runs in DIR are kept, so that a record grows by pieces.
"""

import itertools
import json
import re
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


def name_of(data: str, model: str) -> str:
    """Return the name of a record."""
    return f"real_{data}_{model}".replace("-", "_")


def stored(name: str) -> dict:
    """Return a stored record, or an empty one."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(rows=[], note="")


def extend(name: str, **values) -> None:
    """Add fields to a stored record."""
    text = json.dumps(stored(name) | values, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def accuracies(runs: Path, data: str, model: str, order: int) -> None:
    """Store accuracies of one data set and model by epsilon and method; cells without a run here are kept."""
    name = name_of(data, model)
    table, before = Table(runs / f"{data}-{model}" / "real-data.csv"), stored(name)
    cells, kept = {row[0]: row[1:] for row in before["rows"]}, before.get("runs", {})
    for epsilon in {row["epsilon"] for row in table.rows}:
        found = {method: values_of(table, method, epsilon) for method in METHODS}
        base, key = found[DP_SGD], f"{float(epsilon):g}"
        for index, (method, cell) in enumerate(found.items()):
            if cell is not None:
                first = None if method == DP_SGD or base is None else base[0]
                cells.setdefault(key, [""] * len(METHODS))[index] = _cell(cell[0], first)
                step = round(cell[1].rate * cell[1].clip, 6)
                kept[f"{method}, epsilon {key}"] = {"rate x clip norm": step, "accuracy": cell[0].tolist()}
    if not cells:
        return
    by_fit = "".join(re.findall(r" \d+ runs by `train.fit`[^.]*[^;]*\.$", before["note"]))
    fitted: dict[tuple[str, str], list[float]] = {}
    for row in table.find(phase="fit"):
        fitted.setdefault((row["method"], row["epsilon"]), []).append(float(row["accuracy"]))
    for (method, epsilon), values in fitted.items():
        shown = _cell(np.array(values), None)
        by_fit += f" {len(values)} runs by `train.fit`, {method} at epsilon {float(epsilon):g}: {shown}."
    seconds = [float(row["seconds"]) for row in table.find(phase="private")]
    record(
        name,
        question=f"Accuracy on {DATA[data]}, {MODELS[model]}",
        order=order,
        columns=["epsilon", *METHODS],
        rows=[[key, *cells[key]] for key in sorted(cells, key=float)],
        note=f"Test accuracy in per cent, mean of {Protocol().seeds} runs with 95 % t intervals; in brackets "
        "the paired difference to DP-SGD. delta 1e-5, 50,000 private images, 500 steps of mean batch 500 (5 "
        "epochs), 16 bands, momentum .9, clip norm .3. The learning rate of a cell is the best of four, of "
        "five below epsilon 2, by three trials each on public images, which intervals do not cover. "
        f"Certified plans, programs of `lean`, {np.median(seconds):.1f} CPU-seconds a run.{by_fit}",
    )
    extend(name, runs=kept)


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
    """Store errors of the noise beside accuracies, and how often one ranks methods against the other.

    Accuracies are those of the stored tables. Pairs need runs by seed: those of tables in `runs` are counted,
    other counts are kept.
    """
    before = stored("real_criterion")
    names = [f"{data}-{model}" for data in DATA for model in MODELS if stored(name_of(data, model))["rows"]]
    lines = {(row[0], row[1]): row[2:4] for row in before["rows"]}
    sizes: dict[tuple[str, str], tuple[float, float]] = {}
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        for method, found in errors(plans, epsilon).items():
            key = f"{epsilon:g}", method
            sizes[key], lines[key] = found, [f"{size:.2f}" for size in found]
    means = {}
    for name in names:
        for epsilon, *cells in stored(f"real_{name}".replace("-", "_"))["rows"]:
            means |= {(name, epsilon, m): c.split(" ±")[0] for m, c in zip(METHODS, cells, strict=True)}
    order = sorted(lines, key=lambda key: (float(key[0]), METHODS.index(key[1])))
    rows = [[*key, *lines[key], *(means.get((name, *key), "") for name in names)] for key in order]
    pairs = before.get("pairs", {})
    for name, epsilon in itertools.product(names, sorted({key[0] for key in sizes})):
        path = runs / name / "real-data.csv"
        several = [key for key in pairs if key.split(" ")[0] == epsilon and name in key.split(" ")[1:]]
        if not path.exists() or any(key.count(" ") > 1 for key in several):
            continue
        table, cells = Table(path), []
        for method in METHODS:
            values = values_of(table, method, str(float(epsilon)))
            if values is not None and (epsilon, method) in sizes:
                cells.append((sizes[epsilon, method], values[0]))
        count = [0, 0, 0]  # pairs, wrong by prefix sums, wrong by the optimizer's error
        for (one, values), (other, theirs) in itertools.combinations(cells, 2):
            difference = values - theirs
            if abs(difference.mean()) > half_width(difference):
                count[0] += 1
                for index in (0, 1):
                    count[1 + index] += (one[index] - other[index]) * difference.mean() > 0
        if cells:
            pairs[f"{epsilon} {name}"] = [int(number) for number in count]
    totals = []
    for epsilon in sorted({key.split(" ")[0] for key in pairs}, key=float):
        total = np.sum([count for key, count in pairs.items() if key.split(" ")[0] == epsilon], 0)
        totals.append(f"{total[0]} at epsilon {epsilon} ({total[1]} and {total[2]} wrong)")
    record(
        "real_criterion",
        question="Does less error of the noise mean more accuracy?",
        order=108,
        columns=["epsilon", "method", "prefix-sum error", "error under momentum .9, falling rate", *names],
        rows=rows,
        note="Errors are roots of mean squares per unit of clip norm; accuracies, per cent, of the tables "
        "above. Pairs of methods whose accuracies differ (95 % paired t interval), and how often the order "
        "by prefix sums and by the error of the optimizer that was run (`--workload momentum:0.9,linear`) is "
        f"wrong: {', '.join(totals)}. Intervals do not cover the choice of the learning rate.",
    )
    extend("real_criterion", pairs=pairs)


def draw() -> None:
    """Draw accuracy and difference to DP-SGD against epsilon from the stored records, for each data set."""
    for data in DATA:
        names = [name for model in MODELS if stored(name := name_of(data, model))["rows"]]
        if not names:
            continue
        figure = blank(5.2 * len(names), 8.0)
        for column, name in enumerate(names):
            for row in range(2):
                axes = figure.add_subplot(2, len(names), 1 + column + row * len(names))
                _panel(axes, stored(name), differences=row == 1)
                if column == row == 0:
                    axes.legend(fontsize=8, frameon=False)
        path = FIGURES / f"real-data-{data}.png"
        save(figure, path)
        extend(names[0], picture=f"figures/{path.name}")


def _panel(axes, entry: dict, *, differences: bool) -> None:
    """Draw accuracies of one record, or their differences to DP-SGD."""
    for number, method in enumerate(entry["columns"][1:]):
        points = []
        for epsilon, *cells in entry["rows"]:
            text = cells[number]
            part = text.partition("(")[2].rstrip(")") if differences else text.split(" (")[0]
            if part:
                middle, half = map(float, part.split(" ± "))
                points.append((float(epsilon) * (1 + 0.025 * (number - 2.5)), middle, half))
        if points:
            x, y, half = zip(*points, strict=True)
            style = dict(marker=MARKERS[number % len(MARKERS)], capsize=2, markersize=4, linewidth=1)
            axes.errorbar(x, y, yerr=half, label=method, color=f"C{number}", **style)
    ticks = [0.5, 1, 2, 4, 8]
    axes.set(xscale="log", xlabel="epsilon", xlim=(0.42, 9.5))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if differences:
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_ylabel("difference to DP-SGD, per cent")
    else:
        axes.set_title(entry["question"].removeprefix("Accuracy on "), fontsize=10)
        axes.set_ylabel("test accuracy, per cent")


def command(runs: str | None = None, plans: str | None = None) -> int:
    """Records and pictures of accuracy on real images.

    Args:
      runs: folder of the folders that `real_data` wrote, DATA-MODEL; pictures alone without it.
      plans: folder of their plans.
    """
    if runs is not None:
        if plans is None:
            raise ValueError("plans must be given with runs")
        for order, (data, model) in enumerate(itertools.product(DATA, MODELS), 100):
            if (Path(runs) / f"{data}-{model}" / "real-data.csv").exists():
                accuracies(Path(runs), data, model, order)
        criterion(Path(runs), Path(plans))
    draw()
    return 0


if __name__ == "__main__":
    _command.run(command, "real_data_record", prog="python -m tests.benchmarks.real_data_record", argv=None)
