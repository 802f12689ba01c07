"""The protocol of figure 4 of arXiv 2602.09338 on digits: accuracy by sampling scheme and epsilon.

    python -P -m tests.benchmarks.figure_4 --out runs/digits          # 100 steps, two epsilons: minutes
    python -P -m tests.benchmarks.figure_4 --out runs/digits --full   # 400 steps, five epsilons: hours

The paper trains a VGG on CINIC-10 with 1,500 steps, |D| / B = 300 and 30 trials; here a small convolutional
network is trained on the digits that scikit-learn brings along, |D| / B = 20, with the paper's optimizer (SGD
with momentum 0.95, the rate falling in a line). Every plan is certified. Of each cell the best of a few
learning rates counts, chosen on the test set: a real job has to choose it on public data or pay.
Plans and finished runs are kept: the same command goes on where it was.
"""

import argparse
import csv
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx
from scipy import stats

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Plan, Poisson, calibrate
from jaxacct.common.files import write_atomically
from jaxacct.report.figure import MARKERS, blank, save
from tests.benchmarks.paper.statements import Verdict
from tests.train.fitting import fit
from train.batches.data import load
from train.command import accuracy
from train.models.networks import SmallCNN, cross_entropy
from train.optimizers import sgd

ROWS = 1440
OURS, CYCLIC, BINS = "BandMF, b-min-sep", "BandMF, cyclic Poisson", "BandMF, balls-in-bins"
NOT_PRIVATE = "not private"
_KEYS = ("iterations", "scheme", "epsilon", "learning_rate", "seed")
COLUMNS = tuple("iterations scheme epsilon noise_multiplier learning_rate seed accuracy seconds".split())


@dataclass(frozen=True)
class Protocol:
    """What is swept.

    Attributes:
      iterations: steps of a run.
      epsilons: targets.
      rates: base learning rates, of which the best counts.
      seeds: runs of a cell, each with initial parameters of its own.
      epoch: |D| / B.
      bands: of b-min-sep and cyclic Poisson; balls-in-bins has as many as an epoch has steps.
      delta: of the targets.
    """

    iterations: int
    epsilons: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int
    epoch: int = 20
    bands: int = 8
    delta: float = 1e-4

    @property
    def sizes(self) -> dict:
        """Of every scheme."""
        return dict(dataset_size=ROWS, batch_size=ROWS / self.epoch, iterations=self.iterations)

    def mechanisms(self) -> dict:
        """Name to (scheme, strategy)."""
        blocks = {
            "DP-SGD (Poisson)": (Poisson.from_batch_size(**self.sizes), 1),
            CYCLIC: (CyclicPoisson.from_batch_size(**self.sizes, cycle_length=self.bands), self.bands),
            BINS: (BallsInBins.from_batch_size(**self.sizes), self.epoch),
            OURS: (BMinSep.from_batch_size(**self.sizes, min_separation=self.bands), self.bands),
        }

        def strategy(scheme, bands):
            return BandedToeplitz.optimal(
                iterations=self.iterations,
                bands=bands,
                min_separation=scheme.min_separation,
                participations=1,
            )

        return {name: (scheme, strategy(scheme, bands)) for name, (scheme, bands) in blocks.items()}

    def jobs(self) -> list[tuple[str, float, float, int]]:
        """(name, epsilon, rate, seed) of every run; without privacy epsilon is infinite."""
        cells = [(NOT_PRIVATE, float("inf"))]
        cells += [(name, e) for e, name in itertools.product(self.epsilons, self.mechanisms())]
        return [(*cell, rate, seed) for cell in cells for rate in self.rates for seed in range(self.seeds)]


SHORT = Protocol(100, (2.0, 8.0), (0.3,), 2)
FULL = Protocol(400, (0.5, 1.0, 2.0, 4.0, 8.0), (0.03, 0.1, 0.3), 5)


def plan_of(protocol: Protocol, name: str, epsilon: float, folder: Path) -> Plan:
    """The certified plan of a cell, from `folder` or certified now."""
    scheme, strategy = protocol.mechanisms()[name]
    named = name.replace(", ", "-").replace(" ", "-").replace("(", "").replace(")", "")
    path = folder / f"{named}-{protocol.iterations}-{epsilon:g}.json"
    if not path.exists():
        calibrate(scheme, strategy, epsilon=epsilon, delta=protocol.delta, dataset_size=ROWS).save(path)
    return Plan.load(path)


def run(protocol: Protocol, plan: Plan, rate: float, seed: int, split) -> float:
    """Test accuracy of one run; the seed is that of the initial parameters."""
    model = SmallCNN(split.shape, split.num_classes, nnx.Rngs(seed))
    optimizer = sgd(rate, protocol.iterations)
    result = fit(plan, model, cross_entropy, split.train, optimizer, progress=False)
    return accuracy(model, split.test)(result.params)["accuracy"]


def not_private(protocol: Protocol, rate: float, seed: int, split) -> float:
    """The same model, batches and optimizer with plain gradients."""
    import jax
    import optax

    from train.batches.sampler import Sampler
    from train.models.loss import nnx_loss

    model = SmallCNN(split.shape, split.num_classes, nnx.Rngs(seed))
    loss, params = nnx_loss(model, cross_entropy)
    optimizer = sgd(rate, protocol.iterations)
    largest = round(ROWS / protocol.epoch * 2.2)
    scheme = Poisson.from_batch_size(**protocol.sizes)
    state, source = optimizer.init(params), Sampler(scheme, ROWS, largest)

    @jax.jit
    def step(params, state, rows, mask):
        def mean(params):
            return (jax.vmap(loss, (None, 0))(params, rows) * mask).sum() / mask.sum()

        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(protocol.iterations):
        batch = source.next()
        rows = split.train.take(batch, largest)
        params, state = step(params, state, rows, np.arange(largest) < batch.size)
    return accuracy(model, split.test)(params)["accuracy"]


def rebuild(protocol: Protocol, folder: Path) -> None:
    """Make the runs that are not there yet, then table and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    table, split = folder / "figure-4.csv", load("digits")
    rows = _read(table)
    done = {tuple(row[name] for name in _KEYS) for row in rows}
    jobs = [job for job in protocol.jobs() if (str(protocol.iterations), *map(str, job)) not in done]
    started = time.monotonic()
    for index, (name, epsilon, rate, seed) in enumerate(jobs):
        since = time.monotonic()
        if name == NOT_PRIVATE:
            sigma, found = 0.0, not_private(protocol, rate / 3, seed, split)
        else:
            plan = plan_of(protocol, name, epsilon, folder)
            sigma, found = plan.mechanism.noise_multiplier, run(protocol, plan, rate, seed, split)
        took = round(time.monotonic() - since, 1)
        values = (protocol.iterations, name, epsilon, sigma, rate, seed, found, took)
        rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
        lines = [",".join(COLUMNS)] + [",".join(f'"{row[c]}"' for c in COLUMNS) for row in rows]
        write_atomically(table, "\n".join(lines) + "\n")
        left = (time.monotonic() - started) / (index + 1) * (len(jobs) - index - 1) / 60
        print(
            f"{index + 1}/{len(jobs)} runs, {left:.0f} min left: {name}, epsilon {epsilon:g}, "
            f"rate {rate:g}: {found:.3f}",
            file=sys.stderr,
            flush=True,
        )
    best = summary([row for row in rows if row["iterations"] == str(protocol.iterations)])
    text = "\n\n".join([markdown(best), *(verdict.line() for verdict in judged(best))])
    write_atomically(folder / "figure-4.txt", text + "\n")
    print(text)
    save(drawn(best), folder / "figure-4.png")


def _read(table: Path) -> list[dict[str, str]]:
    """Its rows; ValueError for another file."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"out must hold no other figure-4.csv, {table} is none of this command")
    return rows


@dataclass(frozen=True)
class Accuracies:
    """Test accuracies of one cell at its best learning rate, by seed.

    Attributes:
      values: (seeds,) float64.
      noise_multiplier: of its plan.
    """

    values: np.ndarray
    noise_multiplier: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.values))

    @property
    def half(self) -> float:
        """Of the 95 % t interval of the mean."""
        return half_width(self.values)


def half_width(values: np.ndarray) -> float:
    """Of the 95 % t interval of a mean; infinite for one value."""
    if values.size < 2:
        return float("inf")
    return float(stats.t.ppf(0.975, values.size - 1) * np.std(values, ddof=1) / np.sqrt(values.size))


def summary(rows: list[dict[str, str]]) -> dict[tuple[str, float], Accuracies]:
    """(scheme, epsilon) to its accuracies at the rate with the best mean."""
    cells: dict[tuple[str, float], dict[float, list]] = {}
    for row in rows:
        cell = cells.setdefault((row["scheme"], float(row["epsilon"])), {})
        cell.setdefault(float(row["learning_rate"]), []).append(row)
    found = {}
    for cell, by_rate in cells.items():
        most = max(map(len, by_rate.values()))  # a rate whose runs are not all there would win by luck
        whole = [part for part in by_rate.values() if len(part) == most]
        chosen = max(whole, key=lambda part: np.mean([float(row["accuracy"]) for row in part]))
        ordered = sorted(chosen, key=lambda row: int(row["seed"]))
        values = np.array([float(row["accuracy"]) for row in ordered])
        found[cell] = Accuracies(values, float(ordered[0]["noise_multiplier"]))
    return found


def judged(best: dict[tuple[str, float], Accuracies]) -> list[Verdict]:
    """What is printed of figure 4, beside differences by seed with their 95 % intervals."""
    verdicts = []
    for other, most in ((CYCLIC, 2), (BINS, 4)):
        differences = {}
        for (name, epsilon), ours in best.items():
            theirs = best.get((other, epsilon))
            if name == OURS and theirs is not None and theirs.values.size == ours.values.size:
                differences[epsilon] = ours.values - theirs.values
        better = [e for e, values in differences.items() if values.mean() > half_width(values)]
        worse = [e for e, values in differences.items() if values.mean() < -half_width(values)]
        agrees = False if worse else True if better else None
        shown = ", ".join(
            f"{100 * values.mean():+.1f} ± {100 * half_width(values):.1f} at epsilon {epsilon:g}"
            for epsilon, values in sorted(differences.items())
        )
        verdicts.append(
            Verdict(
                f"b-min-sep is almost always better than {other.removeprefix('BandMF, ')}, by up to {most} % "
                "(on CINIC-10)",
                agrees,
                f"differences of accuracy in per cent: {shown or 'none'}; 0 is below the 95 % interval at "
                f"{len(better)} and above it at {len(worse)} of {len(differences)} epsilons",
            )
        )
    return verdicts


def markdown(best: dict[tuple[str, float], Accuracies]) -> str:
    """Accuracy in per cent with its interval, and the noise multiplier."""
    names = list(dict.fromkeys(name for name, epsilon in best if epsilon < np.inf))
    lines = ["| epsilon | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for epsilon in sorted({epsilon for _, epsilon in best if epsilon < np.inf}):
        cells = [best.get((name, epsilon)) for name in names]
        shown = [f"{_in_per_cent(c)} (σ {c.noise_multiplier:.3f})" if c else "" for c in cells]
        lines.append(f"| {epsilon:g} | " + " | ".join(shown) + " |")
    plain = best.get((NOT_PRIVATE, np.inf))
    after = f"\n\nNot private: {_in_per_cent(plain)}." if plain else ""
    return "\n".join(lines) + after


def _in_per_cent(cell: Accuracies) -> str:
    if cell.values.size < 2:
        return f"{100 * cell.mean:.1f} (one run)"
    return f"{100 * cell.mean:.1f} ± {100 * cell.half:.1f}"


def drawn(best: dict[tuple[str, float], Accuracies]):
    """Accuracy against epsilon, a line a scheme."""
    figure = blank(6.5, 4.2)
    axes = figure.add_subplot()
    epsilons = sorted({epsilon for _, epsilon in best if epsilon < np.inf})
    for number, name in enumerate(dict.fromkeys(name for name, epsilon in best if epsilon < np.inf)):
        cells = [(e, best[name, e]) for e in epsilons if (name, e) in best]
        x = np.array([e for e, _ in cells]) * (1 + 0.02 * (number - 1.5))
        half = [c.half if np.isfinite(c.half) else 0.0 for _, c in cells]
        axes.errorbar(x, [c.mean for _, c in cells], yerr=half, label=name, marker=MARKERS[number], capsize=3)
    plain = best.get((NOT_PRIVATE, np.inf))
    if plain:
        axes.axhline(plain.mean, color="0.5", linestyle="--", label=NOT_PRIVATE)
    axes.set(xscale="log", xlabel="epsilon", ylabel="test accuracy, mean and 95 % interval")
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the same command goes on where it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder; what is there is gone on with")
    parser.add_argument(
        "--full", action="store_true", help="400 steps, five epsilons, three rates, five seeds"
    )
    given = parser.parse_args(argv)
    rebuild(FULL if given.full else SHORT, given.out)


if __name__ == "__main__":
    main()
