"""DiceSGD against clipped DP-SGD on digits: accuracy by clip threshold at one guarantee that holds.

    PYTHONPATH=. python tests/benchmarks/dice.py --out runs/dice [--seeds 2]

Finished runs are kept in a CSV file: the same command goes on where it was. Prints the table and draws
tests/benchmarks/figures/dice.png. One line has the noise that is printed in the paper: no guarantee.
"""

import argparse
import csv
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import optax

from jaxacct import BandedToeplitz, CalibrationOptions, Poisson, calibrate
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.common.files import write_atomically
from tests.benchmarks.individual import FIGURES, imbalanced, network, pyplot
from tests.oracles.printed_dice import paper_theorem_3_7_sigma
from tests.train.fitting import fit

EPSILON, DELTA, STEPS, BATCH = 8.0, 1e-4, 200, 128
CLIPS = (0.03, 0.1, 0.3, 1.0, 3.0)
RATES = (0.1, 0.3, 1.0)
COLUMNS = "method clip_norm rate seed accuracy noise".split()


def clipped(size: int, clip_norm: float):
    """DP-SGD on Poisson batches; its noise is in units of the clip norm, on the sum."""
    scheme = Poisson.from_batch_size(dataset_size=size, batch_size=BATCH, iterations=STEPS)
    plan = calibrate(
        scheme,
        BandedToeplitz((1.0,)),
        epsilon=EPSILON,
        delta=DELTA,
        dataset_size=size,
        options=CalibrationOptions(accountant="pld"),
    )
    return plan, plan.mechanism.noise_multiplier * clip_norm / BATCH


def dice(size: int, clip_norm: float, share: float = 1.0):
    """DiceSGD with C2 = `share` C1."""
    plan = DicePlan.calibrate(
        EPSILON,
        DELTA,
        dataset_size=size,
        batch_size=BATCH,
        iterations=STEPS,
        clip_norm=clip_norm,
        error_clip_norm=share * clip_norm,
    )
    return plan, plan.noise_std


def printed(size: int, clip_norm: float):
    """DiceSGD with the noise of algorithm 4 (C2 = C1 = C): what it promises does not hold."""
    sigma = paper_theorem_3_7_sigma(
        EPSILON, DELTA, iterations=STEPS, dataset_size=size, clip_norm=clip_norm, error_bound=clip_norm
    )
    plan, _ = dice(size, clip_norm)
    return dataclasses.replace(plan, noise_std=sigma, epsilon=1e12), sigma


METHODS = {
    "clipped DP-SGD": clipped,
    "DiceSGD, C2 = C1": dice,
    f"DiceSGD, C2 = C1 / {BATCH}": lambda size, clip_norm: dice(size, clip_norm, 1 / BATCH),
    "DiceSGD, printed noise (no guarantee)": printed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / "dice.csv"
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    done = {tuple(row[c] for c in COLUMNS[:4]) for row in rows}
    train, test = imbalanced("digits", {})
    params, loss, logits = network(64, 10)
    for method, clip_norm in itertools.product(METHODS, CLIPS):
        plan = None
        for rate, seed in itertools.product(RATES, range(options.seeds)):
            cell = (method, str(clip_norm), str(rate), str(seed))
            if cell in done:
                continue
            if plan is None:
                plan, noise = METHODS[method](len(train["y"]), clip_norm)
            keys = ((seed, 2, 3, 4), np.arange(8, dtype=np.uint32) + seed)
            # A step of the clip norm's size moves the parameters by `rate`, whatever the threshold.
            end = fit(
                plan, params, loss, train, optax.sgd(rate / clip_norm), clip_norm=clip_norm, keys=keys,
                verify=False,
            )  # fmt: skip
            right = float((np.argmax(logits(end.params, test["x"]), axis=1) == test["y"]).mean())
            rows.append(dict(zip(COLUMNS, (*cell, str(right), str(noise)), strict=True)))
            lines = [",".join(COLUMNS)] + [",".join(f'"{row[c]}"' for c in COLUMNS) for row in rows]
            write_atomically(table, "\n".join(lines) + "\n")
    best = summary(rows)
    print("| C1 | " + " | ".join(METHODS) + " |\n" + "|---" * (len(METHODS) + 1) + "|")
    for clip_norm in CLIPS:
        cells = [best[method, clip_norm] for method in METHODS]
        shown = [f"{100 * a:.1f} (noise {n:.2g})" for a, _, n in cells]
        print(f"| {clip_norm:g} | " + " | ".join(shown) + " |")
    draw(best)


def summary(rows) -> dict:
    """(method, clip norm) to (mean accuracy, half its range, noise on the mean) at the best rate."""
    cells = {}
    for row in rows:
        cell = cells.setdefault((row["method"], float(row["clip_norm"])), {})
        cell.setdefault(float(row["rate"]), []).append((float(row["accuracy"]), float(row["noise"])))
    found = {}
    for key, by_rate in cells.items():
        chosen = np.array(max(by_rate.values(), key=lambda part: np.mean([a for a, _ in part])))
        found[key] = chosen[:, 0].mean(), np.ptp(chosen[:, 0]) / 2, chosen[0, 1]
    return found


def draw(best: dict) -> None:
    plot = pyplot()
    figure, panels = plot.subplots(1, 2, figsize=(11, 4.2))
    for method in METHODS:
        points = [best[method, c] for c in CLIPS]
        style = "o--" if "no guarantee" in method else "o-"
        accuracy, half, noise = zip(*points, strict=True)
        panels[0].errorbar(CLIPS, accuracy, yerr=half, fmt=style, capsize=3, label=method)
        panels[1].plot(CLIPS, np.array(noise) / CLIPS, style, label=method)
    title = f"({EPSILON:g}, {DELTA:g})-DP, {STEPS} steps of {BATCH}"
    panels[0].set(xscale="log", xlabel="clip threshold C1", ylabel="test accuracy", title=title, ylim=(0, 1))
    panels[1].set(xscale="log", yscale="log", xlabel="clip threshold C1", ylabel="noise on the mean / C1")
    panels[1].set_title("Noise")
    panels[1].legend(fontsize=8, loc="center", bbox_to_anchor=(0.6, 0.72))
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(FIGURES / "dice.png", dpi=130)


if __name__ == "__main__":
    main()
