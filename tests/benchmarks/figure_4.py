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
import itertools
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from scipy import stats

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Plan, Poisson, calibrate
from jaxacct.common.files import write_atomically
from jaxacct.report.figure import save
from tests.benchmarks.paper.statements import Verdict
from tests.benchmarks.pictures import over_epsilon
from tests.benchmarks.results import Kept
from tests.train.runs import fit
from train.batches.data import load
from train.batches.sampler import Sampler
from train.command import accuracy
from train.models.loss import nnx_loss
from train.models.networks import SmallCNN, cross_entropy
from train.optimizers import sgd

ROWS = 1440
OURS, CYCLIC, BINS = "BandMF, b-min-sep", "BandMF, cyclic Poisson", "BandMF, balls-in-bins"
NOT_PRIVATE = "not private"
FOUND = ("noise_multiplier", "accuracy", "seconds")


@dataclass(frozen=True)
class Job:
    """One run; without privacy epsilon is infinite."""

    iterations: int
    scheme: str
    epsilon: float
    learning_rate: float
    seed: int


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
            sizes = dict(iterations=self.iterations, bands=bands, participations=1)
            return BandedToeplitz.optimal(**sizes, min_separation=scheme.min_separation)

        return {name: (scheme, strategy(scheme, bands)) for name, (scheme, bands) in blocks.items()}

    def jobs(self) -> list[Job]:
        """All runs."""
        cells = [(NOT_PRIVATE, np.inf), *((name, e) for e in self.epsilons for name in self.mechanisms())]
        runs = itertools.product(cells, self.rates, range(self.seeds))
        return [Job(self.iterations, *cell, rate, seed) for cell, rate, seed in runs]


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
    table, split = Kept(folder / "figure-4.csv", Job, FOUND, above_0="accuracy"), load("digits")
    jobs = [job for job in protocol.jobs() if job not in table.rows]
    started = time.monotonic()
    for done, job in enumerate(jobs, 1):
        since, rate, sigma = time.monotonic(), job.learning_rate, 0.0
        if job.scheme == NOT_PRIVATE:
            found = not_private(protocol, rate / 3, job.seed, split)
        else:
            plan = plan_of(protocol, job.scheme, job.epsilon, folder)
            sigma, found = plan.mechanism.noise_multiplier, run(protocol, plan, rate, job.seed, split)
        took = round(time.monotonic() - since, 1)
        table.add(job, dict(zip(FOUND, map(str, (sigma, found, took)), strict=True)))
        left = (time.monotonic() - started) / done * (len(jobs) - done) / 60
        left = f"{done}/{len(jobs)} runs, {left:.0f} min left"
        print(f"{left}: {job}: {found:.3f}", file=sys.stderr, flush=True)
    best = summary({job: row for job, row in table.rows.items() if job.iterations == protocol.iterations})
    text = "\n\n".join([markdown(best), *(verdict.line() for verdict in judged(best))])
    write_atomically(folder / "figure-4.txt", text + "\n")
    print(text)
    save(drawn(best), folder / "figure-4.png")


class Accuracies(NamedTuple):
    """Test accuracies of one cell at its best learning rate, (seeds,) float64, and the noise of its plan."""

    values: np.ndarray
    noise_multiplier: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.values))

    def __str__(self) -> str:
        """In per cent, with the 95 % t interval of the mean."""
        spread = "(one run)" if self.values.size < 2 else f"± {100 * half_width(self.values):.1f}"
        return f"{100 * self.mean:.1f} {spread}"


def half_width(values: np.ndarray) -> float:
    """Of the 95 % t interval of a mean; infinite for one value."""
    if values.size < 2:
        return float("inf")
    return float(stats.t.ppf(0.975, values.size - 1) * np.std(values, ddof=1) / np.sqrt(values.size))


def summary(rows: dict[Job, dict[str, str]]) -> dict[tuple[str, float], Accuracies]:
    """(scheme, epsilon) to its accuracies at the rate with the best mean."""
    cells = defaultdict(lambda: defaultdict(list))
    for job in sorted(rows, key=lambda job: job.seed):
        cells[job.scheme, job.epsilon][job.learning_rate].append(rows[job])
    found = {}
    for cell, by_rate in cells.items():
        most = max(map(len, by_rate.values()))  # a rate whose runs are not all there would win by luck
        runs = [part for part in by_rate.values() if len(part) == most]
        values = [np.array([float(row["accuracy"]) for row in part]) for part in runs]
        best = max(range(len(runs)), key=lambda place, values=values: values[place].mean())
        found[cell] = Accuracies(values[best], float(runs[best][0]["noise_multiplier"]))
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
        found = ", ".join(
            f"{100 * values.mean():+.1f} ± {100 * half_width(values):.1f} at epsilon {epsilon:g}"
            for epsilon, values in sorted(differences.items())
        )
        found = f"differences of accuracy in per cent: {found or 'none'}; 0 is below the 95 % interval at "
        found += f"{len(better)} and above it at {len(worse)} of {len(differences)} epsilons"
        printed = f"b-min-sep is almost always better than {other.removeprefix('BandMF, ')}"
        verdicts.append(Verdict(f"{printed}, by up to {most} % (on CINIC-10)", agrees, found))
    return verdicts


def swept(best: dict[tuple[str, float], Accuracies]) -> tuple[list[str], list[float]]:
    """Private schemes in their order, and epsilons."""
    private = [cell for cell in best if cell[1] < np.inf]
    return list(dict.fromkeys(name for name, _ in private)), sorted({epsilon for _, epsilon in private})


def markdown(best: dict[tuple[str, float], Accuracies]) -> str:
    """Accuracy in per cent with its interval, and the noise multiplier."""
    names, epsilons = swept(best)
    lines = ["| epsilon | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for epsilon in epsilons:
        cells = [best.get((name, epsilon)) for name in names]
        shown = [f"{cell} (σ {cell.noise_multiplier:.3f})" if cell else "" for cell in cells]
        lines.append(f"| {epsilon:g} | " + " | ".join(shown) + " |")
    plain = best.get((NOT_PRIVATE, np.inf))
    after = f"\n\nNot private: {plain}." if plain else ""
    return "\n".join(lines) + after


def drawn(best: dict[tuple[str, float], Accuracies]):
    """Accuracy against epsilon, a line a scheme."""
    names, epsilons = swept(best)
    lines = {name: [] for name in names}
    for (place, name), e in itertools.product(enumerate(names), epsilons):
        if cell := best.get((name, e)):
            half = np.nan_to_num(half_width(cell.values), posinf=0)
            lines[name].append((e * (1 + 0.02 * (place - 1.5)), cell.mean, half))
    levels = {NOT_PRIVATE: best[NOT_PRIVATE, np.inf].mean} if (NOT_PRIVATE, np.inf) in best else {}
    return over_epsilon(lines, epsilons, levels, ylabel="test accuracy, mean and 95 % interval")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the same command goes on where it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder; what is there is gone on with")
    said = "400 steps, five epsilons, three rates, five seeds"
    parser.add_argument("--full", action="store_true", help=said)
    given = parser.parse_args(argv)
    rebuild(FULL if given.full else SHORT, given.out)


if __name__ == "__main__":
    main()
