"""Accuracy on MNIST or Fashion-MNIST by sampling scheme and epsilon: BandMF against DP-SGD.

    python -m tests.benchmarks.real_data --data-folder DIR --out runs/mnist --seconds 3600

Of the 60,000 training images a fixed permutation makes 50,000 private; 10,000 are declared public. The
learning rate of each cell is the best of the same trials, on public images only: a trial draws batches from
6,000 public images with the same sampling probability and the same noise in the mean gradient, and is judged
on the other 4,000; a rate has three. Then each seed trains on the private images with the certified plan's
batches, matrix and noise multiplier (`lean`; `--by-fit` trains by `train.fit`) and is judged on the test
images. Seeds are paired over cells: equal initial parameters. Plans and finished runs are kept; the same
command continues.
"""

import csv
import dataclasses
import functools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct import (
    BalancedMinSep,
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    BufferedToeplitz,
    CyclicPoisson,
    FixedOrder,
    Mechanism,
    Plan,
    Poisson,
    calibrate,
)  # fmt: skip
from jaxacct.common.files import write_atomically
from jaxacct.report.figure import save
from tests.benchmarks import lean
from tests.benchmarks.figure_4 import Accuracies, drawn, half_width, markdown
from train import command as _command
from train import fit
from train.batches.data import load
from train.options import TrainOptions

PRIVATE, PUBLIC_TRAIN = 50_000, 6_000
DELTA = 1e-5
COLUMNS = tuple("phase method epsilon noise_multiplier rate momentum clip seed accuracy seconds".split())
TRIAL_SEEDS = (1000, 1001, 1002)
# Chosen by trials at epsilon 2: without momentum, or with a clip norm of 1, no method is better.
MOMENTUM, CLIP = 0.9, 0.3
DP_SGD, FIXED = "DP-SGD (Poisson)", "fixed order, BLT"
Runs = list[tuple[lean.Setting, int]]  # with the seed


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Sizes of a comparison.

    Attributes:
      batch_size: mean batch size of private runs.
      epochs: mean participations of an example.
      epsilons: targets, at delta 1e-5.
      seeds: private runs of a cell.
      model: of `lean.MODELS`.
      bands: bands of the matrices of BandMF, and its minimum separation.
    """

    batch_size: int = 500
    epochs: int = 5
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    seeds: int = 5
    model: str = "cnn"
    bands: int = 16

    @property
    def iterations(self) -> int:
        return PRIVATE * self.epochs // self.batch_size

    def schemes(self, dataset_size: int = PRIVATE) -> dict:
        """Return method -> (scheme, bands), for a data set of another size at the same probabilities."""
        batch = self.batch_size * dataset_size / PRIVATE
        sizes = dict(dataset_size=dataset_size, batch_size=batch, iterations=self.iterations)
        return {
            DP_SGD: (Poisson.from_batch_size(**sizes), 1),
            "b-min-sep": (BMinSep.from_batch_size(**sizes, min_separation=self.bands), self.bands),
            "balanced b-min-sep": (
                BalancedMinSep.from_batch_size(**sizes, min_separation=self.bands),
                self.bands,
            ),
            "cyclic Poisson": (CyclicPoisson.from_batch_size(**sizes, cycle_length=self.bands), self.bands),
            "balls-in-bins": (BallsInBins.from_batch_size(**sizes), self.bands),
            FIXED: (FixedOrder.from_batch_size(**sizes, min_separation=self.epoch), 0),
        }

    @property
    def epoch(self) -> int:
        """Steps of an epoch."""
        return PRIVATE // self.batch_size

    def strategy(self, bands: int) -> BandedToeplitz | BufferedToeplitz:
        """Return the matrix of optimal prefix sums: of so many bands, or a BLT for 0."""
        sizes = dict(iterations=self.iterations, participations=self.epochs)
        if not bands:
            return BufferedToeplitz.optimal(**sizes, buffers=3, min_separation=self.epoch)
        return BandedToeplitz.optimal(**sizes, bands=bands, min_separation=bands)

    def settings(self, epsilon: float) -> list[lean.Setting]:
        """Return the setting of each trial, the same for each method: steps of rate x clip norm."""
        steps = (5.0, 12.0, 20.0, 30.0, 50.0)
        if epsilon < 2:
            steps = 2.0, *steps
        return [lean.Setting(step / CLIP, MOMENTUM, CLIP) for step in steps]


def trials(protocol: Protocol, method: str, plan: Plan, runs: Runs, parts) -> list[float]:
    """Return the accuracies of trials on public images, with the noise in the mean gradient of the plan."""
    _, (tune, judge) = parts
    scale = len(tune[1]) / PRIVATE
    scheme, _ = protocol.schemes(len(tune[1]))[method]
    mechanism = Mechanism(scheme, plan.mechanism.strategy, plan.mechanism.noise_multiplier * scale)
    model = lean.MODELS[protocol.model]
    found = lean.train(model, mechanism, protocol.batch_size * scale, runs, tune)
    return [lean.accuracy(model, params, judge) for params in found]


def private_runs(protocol: Protocol, method: str, plan: Plan, runs: Runs, parts) -> list[float]:
    """Return test accuracies of runs; the seed is that of parameters, batches and noise."""
    del method
    (rows, test), _ = parts
    model = lean.MODELS[protocol.model]
    found = lean.train(model, plan.mechanism, protocol.batch_size, runs, rows)
    return [lean.accuracy(model, params, test) for params in found]


def fitted_runs(protocol: Protocol, method: str, plan: Plan, runs: Runs, parts) -> list[float]:
    """Return test accuracies of runs of `train.fit` under the plan; the seed is that of parameters."""
    del method
    (rows, test), _ = parts
    model, found = lean.MODELS[protocol.model], []
    for setting, seed in runs:
        schedule = optax.linear_schedule(setting.rate * (1 - setting.momentum), 0.0, protocol.iterations)
        optimizer = optax.sgd(schedule, momentum=setting.momentum or None)
        result = fit(
            plan, model.init(seed), functools.partial(lean.loss, model),
            {"inputs": np.asarray(rows[0]), "labels": np.asarray(rows[1])}, optimizer, clip_norm=setting.clip,
            options=TrainOptions(verify=False, progress=False),
        )  # fmt: skip
        found.append(lean.accuracy(model, result.params, test))
    return found


PHASES = {"trial": trials, "private": private_runs, "fit": fitted_runs}


def path_of(protocol: Protocol, method: str, epsilon: float, folder: Path) -> Path:
    """Return the file of a cell's plan."""
    return folder / f"{method.replace(' ', '-')}-{protocol.batch_size}-{protocol.epochs}-{epsilon:g}.json"


def plan_of(protocol: Protocol, method: str, epsilon: float, folder: Path) -> Plan:
    """Return the certified plan of a cell, from `folder` or certified and stored there."""
    scheme, bands = protocol.schemes()[method]
    path = path_of(protocol, method, epsilon, folder)
    if not path.exists():
        strategy = protocol.strategy(bands)
        calibrate(scheme, strategy, epsilon=epsilon, delta=DELTA, dataset_size=PRIVATE).save(path)
    return Plan.load(path)


def splits(folder: str):
    """Return ((private images, test images), (public images, public images that judge trials)).

    Each is (inputs, labels), (n, 28, 28, 1) float32 from 0 to 1 and (n,) int32.
    """
    whole = load("mnist", folder)

    def arrays(dataset):
        rows = dataset.source
        inputs = jnp.asarray(rows.inputs, jnp.float32).reshape(-1, 28, 28, 1) / 255
        return inputs, jnp.asarray(rows.labels, jnp.int32)

    inputs, labels = arrays(whole.train)
    order = np.random.default_rng(0).permutation(len(labels))  # the last rows of MNIST are easier
    inputs, labels = inputs[order], labels[order]
    part = [slice(0, PRIVATE), slice(PRIVATE, PRIVATE + PUBLIC_TRAIN), slice(PRIVATE + PUBLIC_TRAIN, None)]
    private, tune, judge = ((inputs[s], labels[s]) for s in part)
    return (private, arrays(whole.test)), (tune, judge)


class Table:
    """Finished runs in a CSV file, written whole after each run."""

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.rows = list(reader)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(f"out must hold no other {path.name}: its columns must be {COLUMNS}")

    def find(self, **wanted) -> list[dict[str, str]]:
        return [row for row in self.rows if all(row[name] == str(value) for name, value in wanted.items())]

    def add(self, **row) -> None:
        self.rows.append({name: str(row[name]) for name in COLUMNS})
        lines = [",".join(COLUMNS)] + [",".join(f'"{row[c]}"' for c in COLUMNS) for row in self.rows]
        write_atomically(self.path, "\n".join(lines) + "\n")


def best_setting(table: Table, cell: dict) -> lean.Setting | None:
    """Return the setting with the highest mean accuracy over all trial seeds; None without any."""
    found: dict[lean.Setting, list[float]] = {}
    for row in table.find(phase="trial", momentum=MOMENTUM, clip=CLIP, **cell):
        setting = lean.Setting(*(float(row[name]) for name in lean.Setting._fields))
        found.setdefault(setting, []).append(float(row["accuracy"]))
    means = {setting: np.mean(values) for setting, values in found.items() if len(values) == len(TRIAL_SEEDS)}
    return max(means, key=means.__getitem__, default=None)


def side_by_side(protocol: Protocol) -> int:
    """Return how many runs one program computes: on an accelerator several take the time of one."""
    return 1 if jax.default_backend() == "cpu" else max(1, 10_000 // protocol.batch_size)


def rebuild(
    protocol: Protocol, data_folder: str, folder: Path, plans: Path, methods: list[str], fitted: int,
    at_all: int, seconds: float,
) -> bool:  # fmt: skip
    """Make the missing runs until the time is up, then table and picture; return whether all exist."""
    folder.mkdir(parents=True, exist_ok=True)
    plans.mkdir(parents=True, exist_ok=True)
    table, (private, public) = Table(folder / "real-data.csv"), splits(data_folder)
    started = time.monotonic()
    for epsilon in protocol.epsilons:
        for method in methods:
            plan = plan_of(protocol, method, epsilon, plans)
            cell = dict(method=method, epsilon=epsilon, noise_multiplier=plan.mechanism.noise_multiplier)
            for phase, seeds in (
                ("trial", TRIAL_SEEDS),
                ("private", range(protocol.seeds)),
                ("private", range(at_all)),
                ("fit", range(fitted)),
            ):
                settings = protocol.settings(epsilon)
                if phase == "fit" or seeds == range(protocol.seeds):
                    settings = [best for best in [best_setting(table, cell)] if best is not None]
                wanted = [(each, seed) for each in settings for seed in seeds]

                def described(run, phase=phase, cell=cell):
                    return dict(phase=phase, seed=run[1], **run[0]._asdict(), **cell)

                missing = [run for run in wanted if not table.find(**described(run))]
                size = side_by_side(protocol)
                for begin in range(0, len(missing), size):
                    runs = missing[begin : begin + size]
                    if time.monotonic() - started > seconds:
                        report(table, folder)
                        return False
                    cpu = time.process_time()
                    found = PHASES[phase](protocol, method, plan, runs, (private, public))
                    took = round((time.process_time() - cpu) / len(runs), 1)
                    for run, accuracy in zip(runs, found, strict=True):
                        table.add(accuracy=accuracy, seconds=took, **described(run))
                    print(f"{phase} {method}, epsilon {epsilon:g}: {np.round(found, 4)}, {took} s each",
                          file=sys.stderr, flush=True)  # fmt: skip
    report(table, folder)
    return True


def report(table: Table, folder: Path) -> None:
    """Write accuracies with their intervals and the differences to DP-SGD by seed; draw the picture."""
    cells: dict[tuple[str, float], Accuracies] = {}
    for row in table.find(phase="private"):
        best = best_setting(table, {name: row[name] for name in ("method", "epsilon")})
        if best is not None and all(row[name] == str(value) for name, value in best._asdict().items()):
            cells.setdefault((row["method"], float(row["epsilon"])), []).append(row)
    found = {
        cell: Accuracies(
            np.array([float(row["accuracy"]) for row in sorted(rows, key=lambda row: int(row["seed"]))]),
            float(rows[0]["noise_multiplier"]),
        )
        for cell, rows in cells.items()
    }
    lines = [markdown(found), ""] if found else []
    for (method, epsilon), ours in sorted(found.items(), key=lambda item: item[0][1]):
        base = found.get((DP_SGD, epsilon))
        if method != DP_SGD and base is not None and base.values.size == ours.values.size:
            difference = 100 * (ours.values - base.values)
            lines.append(f"{method} minus DP-SGD at epsilon {epsilon:g}: "
                         f"{difference.mean():+.2f} ± {half_width(difference):.2f} %")  # fmt: skip
    write_atomically(folder / "real-data.txt", "\n".join(lines) + "\n")
    print("\n".join(lines))
    if found:
        save(drawn(found), folder / "real-data.png")


def command(
    data_folder: str, out: str, plans: str | None = None, model: str = "cnn", batch_size: int = 500,
    epochs: int = 5, epsilons: str = "2,8,0.5,1,4", methods: str | None = None, seeds: int = 5,
    by_fit: int = 0, at_all: int = 0, seconds: float = float("inf"),
) -> int:  # fmt: skip
    """Accuracies of DP-SGD and BandMF on real images by sampling scheme and epsilon, each under its plan.

    Args:
      data_folder: folder with the four idx files of MNIST or Fashion-MNIST.
      out: folder for real-data.csv, real-data.txt and real-data.png; finished runs in it are kept.
      plans: folder for plans, which other data of as many images and other models share; `out` by default.
      model: "cnn", "wide-cnn", "linear" or "perceptron".
      batch_size: mean batch size of private runs.
      epochs: mean participations of an example.
      epsilons: targets, separated by commas.
      methods: names separated by semicolons; all by default.
      seeds: private runs of a cell.
      by_fit: private runs of a cell by `train.fit`, beside the lean ones.
      at_all: private runs of a cell at each learning rate, to see what the choice by trials costs.
      seconds: no run starts after so many seconds.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds!r}")
    if model not in lean.MODELS:
        raise ValueError(f"model must be among {', '.join(lean.MODELS)}, got {model!r}")
    targets = tuple(float(value) for value in epsilons.split(","))
    protocol = Protocol(batch_size, epochs, targets, seeds, model)
    known = list(protocol.schemes())
    chosen = known if methods is None else methods.split(";")
    if unknown := set(chosen).difference(known):
        raise ValueError(f"methods must be among {'; '.join(known)}, got {'; '.join(unknown)}")
    places = Path(out), Path(plans or out)
    return 0 if rebuild(protocol, data_folder, *places, chosen, by_fit, at_all, seconds) else 1


def main(argv: list[str] | None = None) -> None:
    """Run the command line: exit code 0 all done, 1 time was up, 2 bad input, 130 interrupted."""
    _command.run(command, "real_data", prog="python -m tests.benchmarks.real_data", argv=argv)


if __name__ == "__main__":
    main()
