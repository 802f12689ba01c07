"""Records and pictures of accuracy on real images, from the tables of `real_data`.

python -m tests.benchmarks.real_data_record --runs DIR --plans DIR    # DIR/mnist-cnn, DIR/mnist-linear, ...
python -m tests.benchmarks.real_data_record                           # pictures alone, from the records
"""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxacct import Plan, prefix_sum_error
from jaxacct.report.figure import MARKERS, blank, save
from jaxacct.strategies.base import workload_error
from jaxacct.strategies.workload import workload_named
from tests.benchmarks.figure_4 import half_width
from tests.benchmarks.real_data import DP_SGD, Protocol, Table, best_setting, path_of
from tests.benchmarks.results import FOLDER, record
from train import command as _command

FIGURES = Path(__file__).parent / "figures"
DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
MODELS = {
    "linear": "softmax regression (7,850 parameters)",
    "cnn": "a CNN (3,818 parameters)",
    "wide-cnn": "a CNN (36,250 parameters)",
    "perceptron": "a perceptron (50,890 parameters)",
}
METHODS = tuple(Protocol().schemes())
SEEDS = 10  # private runs of a cell


class Study(NamedTuple):
    """Runs of one table of `real_data`: data set, model, mean batch size and epochs."""

    data: str
    model: str
    batch_size: int = 500
    epochs: int = 5

    @property
    def folder(self) -> str:
        """Name of the folder of the runs."""
        sizes = (self.batch_size, self.epochs)
        return "-".join(map(str, (self.data, self.model) if sizes == (500, 5) else self))

    @property
    def record(self) -> str:
        """Name of the record."""
        return f"real_{self.folder}".replace("-", "_")

    @property
    def protocol(self) -> Protocol:
        """Sizes of the runs."""
        return Protocol(self.batch_size, self.epochs, model=self.model)

    @property
    def title(self) -> str:
        """Data, model and, where they are not the usual ones, sizes."""
        sizes = f", batch {self.batch_size:,}, {self.epochs} epochs" if self[2:] != (500, 5) else ""
        return f"{DATA[self.data]}, {MODELS[self.model]}{sizes}"


STUDIES = tuple(
    study
    for data in DATA
    for study in (
        *(Study(data, model) for model in MODELS),
        *(Study(data, model, 2400, 20) for model in ("cnn", "wide-cnn")),
        Study(data, "cnn", 600, 40),
    )
)


def values_of(table: Table, method: str, epsilon: str):
    """Return (accuracies by seed at the best setting, that setting), or None without finished runs."""
    cell = dict(method=method, epsilon=epsilon)
    best = best_setting(table, cell)
    rows = [] if best is None else table.find(phase="private", **best._asdict(), **cell)
    if best is None or len(rows) < SEEDS:
        return None
    ordered = sorted(rows, key=lambda row: int(row["seed"]))
    return np.array([float(row["accuracy"]) for row in ordered]), best


def _cell(values, base) -> str:
    text = f"{100 * values.mean():.2f} ± {100 * half_width(values):.2f}"
    if base is None:
        return text
    difference = 100 * (values - base)
    return f"{text} ({difference.mean():+.2f} ± {half_width(difference):.2f})"


def stored(name: str) -> dict:
    """Return a stored record, or an empty one."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(rows=[], note="")


def extend(name: str, **values) -> None:
    """Add fields to a stored record."""
    text = json.dumps(stored(name) | values, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def accuracies(runs: Path, study: Study, order: float, device: str) -> None:
    """Store accuracies of one study by epsilon and method."""
    name, protocol = study.record, study.protocol
    table = Table(runs / study.folder / "real-data.csv")
    cells: dict[str, list[str]] = {}
    kept = {}
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
    by_fit = ""
    fitted: dict[tuple[str, str], list[float]] = {}
    for row in table.find(phase="fit"):
        fitted.setdefault((row["method"], row["epsilon"]), []).append(float(row["accuracy"]))
    for (method, epsilon), values in fitted.items():
        shown = _cell(np.array(values), None)
        by_fit += f" {len(values)} runs by `train.fit`, {method} at epsilon {float(epsilon):g}: {shown}."
    record(
        name,
        question=f"Accuracy on {study.title}",
        order=order,
        columns=["epsilon", *METHODS],
        rows=[[key, *cells[key]] for key in sorted(cells, key=float)],
        note=f"Test accuracy in per cent, mean of {SEEDS} runs with 95 % t intervals; in brackets the paired "
        f"difference to DP-SGD. delta 1e-5, 50,000 private images, {protocol.iterations} steps of mean batch "
        f"{protocol.batch_size} ({protocol.epochs} epochs), 16 bands, momentum .9, clip norm .3. The "
        "learning rate of a cell is the best of five, of six below epsilon 2, by three trials each on public "
        "images, which intervals do not cover. Certified plans, programs of `lean`, several runs at a time "
        f"on one {device}.{by_fit}",
    )
    extend(name, runs=kept)


def rates(runs: Path, study: Study) -> None:
    """Store accuracies at each learning rate of runs with `--at-all`."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in Table(runs / study.folder / "real-data.csv").find(phase="private"):
        step = round(float(row["rate"]) * float(row["clip"]), 6)
        cell = found.setdefault((f"{float(row['epsilon']):g}", row["method"]), {})
        cell.setdefault(step, []).append(float(row["accuracy"]))
    steps = sorted({step for cell in found.values() for step in cell})
    record(
        "real_rates",
        question=f"Accuracy by learning rate: {study.title}",
        order=107,
        columns=["epsilon", "method", *(f"rate x clip norm {step:g}" for step in steps)],
        rows=[
            [*key, *(f"{100 * np.mean(cell[step]):.2f}" if step in cell else "" for step in steps)]
            for key, cell in sorted(found.items())
            if len(cell) > 1
        ],
        note="Test accuracy in per cent, means of 3 runs, of 10 at the rate that trials chose. "
        "As in the tables above otherwise.",
    )


def errors(plans: Path, protocol: Protocol, epsilon: float) -> dict[str, tuple[float, float]]:
    """Return method -> roots of (prefix-sum error, error under momentum .9 at a rate that falls)."""
    found = {}
    for method in METHODS:
        path = path_of(protocol, method, epsilon, plans)
        if path.exists():
            plan = Plan.load(path)
            sizes = dict(iterations=protocol.iterations, noise_multiplier=plan.noise_multiplier)
            workload = workload_named("momentum:0.9,linear", protocol.iterations)
            run = workload_error(plan.mechanism.strategy, workload=workload, **sizes) ** 0.5
            found[method] = prefix_sum_error(plan.mechanism.strategy, **sizes) ** 0.5, run * (1 - 0.9)
    return found


def criterion(runs: Path, plans: Path) -> None:
    """Store errors of the noise beside accuracies, and how often one ranks methods against the other."""
    usual = [study for study in STUDIES if study[2:] == (500, 5) and stored(study.record)["rows"]]
    rows, totals = [], {}
    for epsilon in ("0.5", "1", "2", "4", "8"):
        sizes = errors(plans, Protocol(), float(epsilon))
        means = {}
        for study in usual:
            cells = next((row[1:] for row in stored(study.record)["rows"] if row[0] == epsilon), [])
            means |= {
                (study, method): cell.split(" ±")[0] for method, cell in zip(METHODS, cells, strict=False)
            }
        for method, both in sizes.items():
            found = [means.get((study, method), "") for study in usual]
            rows.append([epsilon, method, *(f"{size:.2f}" for size in both), *found])
        count = np.zeros(3, int)  # pairs, wrong by prefix sums, wrong by the optimizer's error
        for study in STUDIES:
            path = runs / study.folder / "real-data.csv"
            if path.exists():
                count += _pairs(Table(path), errors(plans, study.protocol, float(epsilon)), epsilon)
        totals[epsilon] = count
    text = ", ".join(
        f"{n} at epsilon {e} ({wrong} and {other} wrong)" for e, (n, wrong, other) in totals.items()
    )
    record(
        "real_criterion",
        question="Does less error of the noise mean more accuracy?",
        order=108,
        columns=["epsilon", "method", "prefix-sum error", "error under momentum .9, falling rate"]
        + [study.folder for study in usual],
        rows=rows,
        note="Errors are roots of mean squares per unit of clip norm; accuracies, per cent, of the tables "
        "above. Pairs of methods whose accuracies differ (95 % paired t interval), and how often the order "
        "by prefix sums and by the error of the optimizer that was run (`--workload momentum:0.9,linear`) is "
        f"wrong, over all tables: {text}. Intervals do not cover the choice of the learning rate.",
    )


def _pairs(table: Table, sizes: dict, epsilon: str) -> np.ndarray:
    """Return how many pairs of methods differ in accuracy, and how many of them each error misranks."""
    cells, count = [], np.zeros(3, int)
    for method, both in sizes.items():
        values = values_of(table, method, str(float(epsilon)))
        if values is not None:
            cells.append((both, values[0]))
    for (one, values), (other, theirs) in itertools.combinations(cells, 2):
        difference = values - theirs
        if abs(difference.mean()) > half_width(difference):
            wrong = [(one[index] - other[index]) * difference.mean() > 0 for index in (0, 1)]
            count += np.array([1, *wrong], int)
    return count


def draw() -> None:
    """Draw accuracy and difference to DP-SGD against epsilon from the stored records, for each data set."""
    for data in DATA:
        names = [study.record for study in STUDIES if study.data == data and stored(study.record)["rows"]]
        if not names:
            continue
        blocks, across = -(-len(names) // 3), min(3, len(names))
        figure = blank(4.6 * across, 7.5 * blocks)
        for number, name in enumerate(names):
            block, column = divmod(number, 3)
            for row in range(2):
                axes = figure.add_subplot(2 * blocks, across, 1 + column + (2 * block + row) * across)
                _panel(axes, stored(name), differences=row == 1)
                if number == row == 0:
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
        axes.set_title(
            entry["question"].removeprefix("Accuracy on ").replace(", batch", ",\nbatch"), fontsize=9
        )
        axes.set_ylabel("test accuracy, per cent")


def command(
    runs: str | None = None, plans: str | None = None, device: str = "CPU", at_all: str | None = None
) -> int:
    """Records and pictures of accuracy on real images.

    Args:
      runs: folder of the folders that `real_data` wrote, as `Study.folder`; pictures alone without it.
      plans: folder of their plans.
      device: that computed the runs, for the record.
      at_all: folder of the folder of the small CNN on Fashion-MNIST, with runs at each learning rate.
    """
    if runs is not None:
        if plans is None:
            raise ValueError("plans must be given with runs")
        for order, study in enumerate(STUDIES):
            if (Path(runs) / study.folder / "real-data.csv").exists():
                accuracies(Path(runs), study, 100 + order / 100, device)
        criterion(Path(runs), Path(plans))
    if at_all is not None:
        rates(Path(at_all), Study("fashion-mnist", "cnn"))
    draw()
    return 0


if __name__ == "__main__":
    _command.run(command, "real_data_record", prog="python -m tests.benchmarks.real_data_record", argv=None)
