"""Accuracy on MNIST or Fashion-MNIST by sampling scheme and epsilon: BandMF against DP-SGD.

    python -m tests.benchmarks.real_data --data-folder DIR --out runs/mnist --seconds 3600

Of the 60,000 training images a fixed permutation makes 50,000 private; 10,000 are declared public. Learning
rate, momentum and clip norm of each cell are the best of the same trials, on public images only: a trial
draws batches from the public images with the same sampling probability and the same noise in the mean
gradient, and is judged on public images that it did not train on. Then each seed trains on the private images
under a certified plan and is judged on the test images. Seeds are paired over cells: equal initial
parameters. Plans and finished runs are kept; the same command continues.
"""

import csv
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
import optax
from flax import nnx
from scipy.stats import qmc

from jaxacct import (
    BalancedMinSep,
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    CyclicPoisson,
    Mechanism,
    Plan,
    Poisson,
    calibrate,
)  # fmt: skip
from jaxacct.common.files import write_atomically
from jaxacct.report.figure import save
from tests.benchmarks.figure_4 import Accuracies, drawn, half_width, markdown
from train import command as _command
from train import fit
from train.__main__ import accuracy
from train.batches.data import Split, from_arrays, load
from train.batches.sampler import Sampler
from train.models import SmallCNN, cross_entropy
from train.optimizers import privatize
from train.options import TrainOptions
from train.step import make_step, nnx_loss

PRIVATE, PUBLIC_TRAIN = 50_000, 8_000
DELTA = 1e-5
COLUMNS = tuple("phase method epsilon noise_multiplier rate momentum clip seed accuracy seconds".split())
DP_SGD = "DP-SGD (Poisson)"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Sizes of a comparison.

    Attributes:
      batch_size: mean batch size of private runs.
      epochs: mean participations of an example.
      epsilons: targets, at delta 1e-5.
      trials: settings that each cell tries on public images.
      seeds: private runs of a cell.
      bands: bands of the matrices of BandMF, and its minimum separation.
    """

    batch_size: int = 500
    epochs: int = 5
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    trials: int = 8
    seeds: int = 5
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
        }

    def strategy(self, bands: int) -> BandedToeplitz:
        return BandedToeplitz.optimal(
            iterations=self.iterations, bands=bands, min_separation=bands, participations=self.epochs
        )

    def settings(self) -> list[tuple[float, float, float]]:
        """Return (learning rate, momentum, clip norm) of each trial, the same for each method.

        The product of learning rate and clip norm, which bounds a step, is from 0.5 to 20.
        """
        clips = (0.3, 1.0, 3.0)
        points = qmc.Sobol(3, scramble=True, rng=0).random(self.trials)
        return [
            (float(0.5 * 40**a / clips[int(3 * c)]), (0.0, 0.9)[int(2 * b)], clips[int(3 * c)])
            for a, b, c in points
        ]


def optimizer_of(rate: float, momentum: float, iterations: int):
    """Return SGD whose rate falls linearly; `rate` is that of the sum of a momentum's weights."""
    schedule = optax.linear_schedule(rate * (1 - momentum), 0.0, iterations)
    return optax.sgd(schedule, momentum=momentum or None)


def model_of(split: Split, seed: int) -> SmallCNN:
    return SmallCNN(split.train.shape, split.num_classes, nnx.Rngs(seed))


def trial(protocol: Protocol, method: str, plan: Plan, setting, public: Split) -> float:
    """Return the accuracy of one trial on public images, with the noise in the mean gradient of the plan."""
    rate, momentum, clip = setting
    size = len(public.train)
    scheme, _ = protocol.schemes(size)[method]
    scale = size / PRIVATE
    mechanism = Mechanism(scheme, plan.mechanism.strategy, plan.mechanism.noise_multiplier * scale)
    batch = protocol.batch_size * scale
    noisy = privatize(mechanism, clip_norm=clip, expected_batch_size=batch)
    model = model_of(public, 0)
    loss, params = nnx_loss(model, cross_entropy)
    step = make_step(
        loss, noisy, optimizer_of(rate, momentum, protocol.iterations), clipping="ghost", skip_padding=True
    )
    largest = int(batch + 8 * batch**0.5)
    source, state = Sampler(scheme, size, largest), step.init(params)
    for _ in range(protocol.iterations):
        drawn_batch = source.next()
        rows = public.train.take(drawn_batch.indices[drawn_batch.mask], largest)
        state, _ = step(state, rows, drawn_batch.mask)
    return accuracy(model, public.test)(state.params)["accuracy"]


def private_run(protocol: Protocol, plan: Plan, setting, seed: int, split: Split) -> float:
    """Return the test accuracy of one run under a certified plan; the seed is that of the parameters."""
    rate, momentum, clip = setting
    model = model_of(split, seed)
    options = TrainOptions(clipping="ghost", verify=False, progress=False)
    result = fit(
        plan, model, cross_entropy, split.train, optimizer_of(rate, momentum, protocol.iterations),
        clip_norm=clip, options=options,
    )  # fmt: skip
    return accuracy(model, split.test)(result.params)["accuracy"]


def plan_of(protocol: Protocol, method: str, epsilon: float, folder: Path) -> Plan:
    """Return the certified plan of a cell, from `folder` or certified and stored there."""
    scheme, bands = protocol.schemes()[method]
    path = folder / f"{method.replace(' ', '-')}-{protocol.batch_size}-{protocol.epochs}-{epsilon:g}.json"
    if not path.exists():
        strategy = protocol.strategy(bands)
        calibrate(scheme, strategy, epsilon=epsilon, delta=DELTA, dataset_size=PRIVATE).save(path)
    return Plan.load(path)


def splits(folder: str) -> tuple[Split, Split]:
    """Return (private images with the test images, public images with public ones that judge trials)."""
    whole = load("mnist", folder)
    rows = whole.train.source
    order = np.random.default_rng(0).permutation(len(rows.labels))  # the last rows of MNIST are easier
    inputs, labels = rows.inputs[order], rows.labels[order]
    part = [slice(0, PRIVATE), slice(PRIVATE, PRIVATE + PUBLIC_TRAIN), slice(PRIVATE + PUBLIC_TRAIN, None)]
    private, tune, judge = (from_arrays(inputs[s], labels[s], scale=255.0) for s in part)
    return Split("private", private, whole.test, 10), Split("public", tune, judge, 10)


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


def best_setting(rows: list[dict[str, str]]) -> tuple[float, float, float]:
    """Return the setting of the trial with the highest accuracy."""
    best = max(rows, key=lambda row: float(row["accuracy"]))
    return float(best["rate"]), float(best["momentum"]), float(best["clip"])


def rebuild(protocol: Protocol, data_folder: str, folder: Path, methods: list[str], seconds: float) -> bool:
    """Make the missing runs until the time is up, then table and picture; return whether all exist."""
    folder.mkdir(parents=True, exist_ok=True)
    table, (private, public) = Table(folder / "real-data.csv"), splits(data_folder)
    started = time.monotonic()
    for epsilon in protocol.epsilons:
        for method in methods:
            plan = plan_of(protocol, method, epsilon, folder)
            sigma = plan.mechanism.noise_multiplier
            cell = dict(method=method, epsilon=epsilon, noise_multiplier=sigma)
            jobs = [("trial", setting, 0) for setting in protocol.settings()]
            jobs += [("private", None, seed) for seed in range(protocol.seeds)]
            for phase, setting, seed in jobs:
                if setting is None:
                    setting = best_setting(table.find(phase="trial", **cell))
                rate, momentum, clip = setting
                key = dict(phase=phase, rate=rate, momentum=momentum, clip=clip, seed=seed, **cell)
                if table.find(**key):
                    continue
                since = time.monotonic()
                if since - started > seconds:
                    report(protocol, table, folder)
                    return False
                if phase == "trial":
                    found = trial(protocol, method, plan, setting, public)
                else:
                    found = private_run(protocol, plan, setting, seed, private)
                took = round(time.monotonic() - since, 1)
                table.add(accuracy=found, seconds=took, **key)
                print(f"{phase} {method}, epsilon {epsilon:g}, {setting}, seed {seed}: {found:.4f}, {took} s",
                      file=sys.stderr, flush=True)  # fmt: skip
    report(protocol, table, folder)
    return True


def report(protocol: Protocol, table: Table, folder: Path) -> None:
    """Write accuracies with their intervals and the differences to DP-SGD by seed; draw the picture."""
    cells: dict[tuple[str, float], Accuracies] = {}
    for row in table.find(phase="private"):
        cells.setdefault((row["method"], float(row["epsilon"])), [])
        cells[row["method"], float(row["epsilon"])].append(row)
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
    data_folder: str, out: str, batch_size: int = 500, epochs: int = 5, epsilons: str = "2,8,1,4,0.5",
    methods: str | None = None, trials: int = 8, seeds: int = 5, seconds: float = float("inf"),
) -> int:  # fmt: skip
    """Accuracies of DP-SGD and BandMF on real images by sampling scheme and epsilon, each under its plan.

    Args:
      data_folder: folder with the four idx files of MNIST or Fashion-MNIST.
      out: folder for plans, real-data.csv, real-data.txt and real-data.png; finished runs in it are kept.
      batch_size: mean batch size of private runs.
      epochs: mean participations of an example.
      epsilons: targets, separated by commas.
      methods: names separated by commas; all by default.
      trials: settings that each cell tries on public images.
      seeds: private runs of a cell.
      seconds: no run starts after so many seconds.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds!r}")
    targets = tuple(float(value) for value in epsilons.split(","))
    protocol = Protocol(batch_size, epochs, targets, trials, seeds)
    known = list(protocol.schemes())
    chosen = known if methods is None else methods.split(",")
    if unknown := set(chosen).difference(known):
        raise ValueError(f"methods must be among {', '.join(known)}, got {', '.join(unknown)}")
    return 0 if rebuild(protocol, data_folder, Path(out), chosen, seconds) else 1


def main(argv: list[str] | None = None) -> None:
    """Run the command line: exit code 0 all done, 1 time was up, 2 bad input, 130 interrupted."""
    _command.run(command, "real_data", prog="python -m tests.benchmarks.real_data", argv=argv)


if __name__ == "__main__":
    main()
