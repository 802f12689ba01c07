"""Accuracy on digits of DP-SGD and BandMF by sampling scheme and epsilon, each under its certified plan.

    PYTHONPATH=. python tests/benchmarks/digits.py --out runs/digits

Plans and finished runs are kept: the same command goes on where it was. Writes digits.csv, digits.png and the
table in the README. The learning rate of each cell is the best of a few by the mean over seeds, which looks
at the data: a real job has to choose it on public data or pay for the choice.
"""

import argparse
import csv
import itertools
import sys
import time
from pathlib import Path

import numpy as np
from flax import nnx
from scipy import stats

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Plan, Poisson, calibrate
from jaxacct.files import write_atomically
from train.__main__ import accuracy
from train.data import load
from train.loop import fit
from train.models import SmallCNN, cross_entropy
from train.optimizers import sgd

ITERATIONS, EPOCH, BANDS, DELTA = 400, 20, 8, 1e-4
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
RATES = (0.03, 0.1, 0.3)
SIZES = dict(dataset_size=1440, batch_size=1440 / EPOCH, iterations=ITERATIONS)
COLUMNS = "scheme epsilon noise_multiplier learning_rate seed accuracy seconds".split()


def mechanisms() -> dict:
    """Name to (scheme, strategy)."""
    blocks = {
        "DP-SGD (Poisson)": (Poisson.from_batch_size(**SIZES), 1),
        "BandMF, cyclic Poisson": (CyclicPoisson.from_batch_size(**SIZES, cycle_length=BANDS), BANDS),
        "BandMF, balls-in-bins": (BallsInBins.from_batch_size(**SIZES), EPOCH),
        "BandMF, b-min-sep": (BMinSep.from_batch_size(**SIZES, min_separation=BANDS), BANDS),
    }

    def strategy(scheme, bands):
        if bands == 1:
            return BandedToeplitz((1.0,))
        return BandedToeplitz.optimal(
            iterations=ITERATIONS, bands=bands, min_separation=scheme.min_separation, participations=1
        )

    return {name: (scheme, strategy(scheme, bands)) for name, (scheme, bands) in blocks.items()}


def plan_of(name, scheme, strategy, epsilon: float, folder: Path) -> Plan:
    path = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{epsilon:g}.json"
    if not path.exists():
        calibrate(scheme, strategy, epsilon=epsilon, delta=DELTA, dataset_size=1440).save(path)
    return Plan.load(path)


def run(plan: Plan, rate: float, seed: int, split) -> float:
    """Test accuracy of one run; the seed is that of the initial parameters."""
    model = SmallCNN(split.train.shape, split.num_classes, nnx.Rngs(seed))
    result = fit(plan, model, cross_entropy, split.train, sgd(rate, ITERATIONS))
    return accuracy(model, split.test)(result.params)["accuracy"]


def not_private(rate: float, seed: int, split) -> float:
    """The same model, batches and optimizer with plain gradients."""
    import jax
    import optax

    from train.sampler import Sampler
    from train.step import nnx_loss

    model = SmallCNN(split.train.shape, split.num_classes, nnx.Rngs(seed))
    loss, params = nnx_loss(model, cross_entropy)
    optimizer = sgd(rate, ITERATIONS)
    state, source = optimizer.init(params), Sampler(Poisson.from_batch_size(**SIZES), 1440, 160)

    @jax.jit
    def step(params, state, rows, mask):
        def mean(params):
            return (jax.vmap(loss, (None, 0))(params, rows) * mask).sum() / mask.sum()

        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(ITERATIONS):
        batch = source.next()
        params, state = step(params, state, split.train.take(batch.indices[batch.mask], 160), batch.mask)
    return accuracy(model, split.test)(params)["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table, split = options.out / "digits.csv", load("digits")
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    done = {(r["scheme"], r["epsilon"], r["learning_rate"], r["seed"]) for r in rows}
    cells = [("not private", None, None, float("inf"))]
    cells += [(name, *pair, e) for e, (name, pair) in itertools.product(EPSILONS, mechanisms().items())]
    jobs = [(*c, rate, seed) for c in cells for rate in RATES for seed in range(options.seeds)]
    jobs = [j for j in jobs if (j[0], str(j[3]), str(j[4]), str(j[5])) not in done]
    started = time.monotonic()
    for index, (name, scheme, strategy, epsilon, rate, seed) in enumerate(jobs):
        since = time.monotonic()
        if scheme is None:
            sigma, found = 0.0, not_private(rate / 3, seed, split)
        else:
            plan = plan_of(name, scheme, strategy, epsilon, options.out)
            sigma, found = plan.mechanism.noise_multiplier, run(plan, rate, seed, split)
        seconds = round(time.monotonic() - since, 1)
        rows.append(dict(zip(COLUMNS, (name, epsilon, sigma, rate, seed, found, seconds), strict=True)))
        lines = [",".join(COLUMNS)] + [",".join(f'"{row[c]}"' for c in COLUMNS) for row in rows]
        write_atomically(table, "\n".join(lines) + "\n")
        left = (time.monotonic() - started) / (index + 1) * (len(jobs) - index - 1) / 60
        print(
            f"{index + 1}/{len(jobs)}, {left:.0f} min left: {name}, eps {epsilon}, rate {rate}: {found:.3f}",
            file=sys.stderr,
            flush=True,
        )
    best = summary(rows)
    print(markdown(best))
    draw(best, options.out / "digits.png")


def summary(rows) -> dict:
    """(scheme, epsilon) to (mean, half-width of the 95 % t interval, noise multiplier) at the better rate."""
    best = {}
    for row in rows:
        cell = best.setdefault((row["scheme"], float(row["epsilon"])), {})
        cell.setdefault(float(row["learning_rate"]), []).append(row)
    found = {}
    for cell, by_rate in best.items():
        chosen = max(by_rate.values(), key=lambda part: np.mean([float(r["accuracy"]) for r in part]))
        values = [float(r["accuracy"]) for r in chosen]
        half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
        found[cell] = float(np.mean(values)), float(half), float(chosen[0]["noise_multiplier"])
    return found


def markdown(best: dict) -> str:
    """Accuracy in per cent with its interval, and the noise multiplier."""
    names = list(dict.fromkeys(name for name, epsilon in best if epsilon < np.inf))
    lines = ["| epsilon | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for epsilon in EPSILONS:
        cells = [best.get((name, epsilon)) for name in names]
        shown = [f"{100 * c[0]:.1f} ± {100 * c[1]:.1f} (σ {c[2]:.3f})" if c else "" for c in cells]
        lines.append(f"| {epsilon:g} | " + " | ".join(shown) + " |")
    plain = best[("not private", np.inf)]
    return "\n".join(lines) + f"\n\nNot private: {100 * plain[0]:.1f} ± {100 * plain[1]:.1f}."


def draw(best: dict, path: Path) -> None:
    """Accuracy against epsilon, a line a scheme."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.5, 4.2))
    for number, name in enumerate(dict.fromkeys(name for name, epsilon in best if epsilon < np.inf)):
        points = [(e, *best[name, e][:2]) for e in EPSILONS if (name, e) in best]
        x, y, error = zip(*points, strict=True)
        shift = 1 + 0.02 * (number - 1.5)
        panel.errorbar(np.array(x) * shift, y, yerr=error, label=name, marker="o", capsize=3)
    panel.axhline(best["not private", np.inf][0], color="grey", linestyle="--", label="not private")
    panel.set(xscale="log", xlabel="epsilon (delta = 1e-4)", ylabel="test accuracy, mean and 95 % interval")
    panel.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
