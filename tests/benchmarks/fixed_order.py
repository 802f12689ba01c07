"""Batches in a fixed order: sensitivity, noise and error beside jax-privacy's; accuracy on digits.

python -m tests.benchmarks.fixed_order peer              # a minute
python -m tests.benchmarks.fixed_order digits --out DIR  # 400 steps; finished runs are kept
"""

import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from dp_accounting.pld import privacy_loss_mechanism
from jax_privacy.matrix_factorization import sensitivity as peer
from jax_privacy.matrix_factorization import toeplitz

from jaxacct import (
    BandedToeplitz,
    BufferedToeplitz,
    FixedOrder,
    Mechanism,
    Plan,
    Toeplitz,
    calibrate,
    prefix_sum_error,
)
from jaxacct.accountants import unamplified
from tests.benchmarks import figure_4
from tests.benchmarks.results import FOLDER, record
from train.batches.data import load

EPSILON, DELTA = 8.0, 1e-5
# Steps, least separation, participations.
ORDERS = [(200, 20, 10), (200, 1, 10), (1000, 250, 4), (1000, 1, 4), (1000, 50, 20)]


def matrices(n: int, b: int, k: int) -> dict:
    """Strategies by name: banded within the separation, square root, BLT."""
    root = Toeplitz(BandedToeplitz.square_root(n).coefficients)
    found: dict = {"square root, n bands": root}
    found["BLT, 2 buffers"] = BufferedToeplitz.optimal(
        iterations=n, buffers=2, min_separation=b, participations=k
    )
    if b > 1:
        bands = min(b, 16)
        found[f"optimal, {bands} bands"] = BandedToeplitz.optimal(
            iterations=n, bands=bands, min_separation=b, participations=k
        )
    return found


def min_sigma(length: float) -> float:
    """The least noise multiplier at the target, by bisection on dp-accounting's Gaussian mechanism."""

    def excess(sigma):
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sensitivity=length)
        return math.log(max(loss.get_delta_for_epsilon(EPSILON), 1e-300) / DELTA)

    return float(scipy.optimize.brentq(excess, 0.2 * length, 2 * length, xtol=1e-12, rtol=1e-12))


def compared(n: int, b: int, k: int, strategy) -> tuple[float, float, float, float, float, float]:
    """(sensitivity, noise, error) of ours and of jax-privacy's with dp-accounting."""
    mechanism = Mechanism(FixedOrder(n, b, k), strategy, 1.0)
    noise = unamplified.noise_multiplier_for(mechanism, EPSILON, DELTA)
    error = prefix_sum_error(strategy, iterations=n, noise_multiplier=noise)
    with jax.enable_x64(True):
        coefficients = jnp.asarray(strategy.array)
        if strategy.bands <= b:
            matrix = jnp.asarray(strategy.columns(n, np.arange(n)))
            length = float(peer.get_sensitivity_banded(matrix, b, k))
        else:
            length = math.sqrt(float(toeplitz.minsep_sensitivity_squared(coefficients, b, k, n)))
        theirs = min_sigma(length)
        square = float(toeplitz.per_query_error(strategy_coef=coefficients, n=n).mean())
    return unamplified.sensitivity(mechanism), length, noise, theirs, error, square * theirs**2


def beside_peer() -> None:
    """Store sensitivities, noise multipliers and errors beside jax-privacy's for the same matrices."""
    rows = []
    for n, b, k in ORDERS:
        for name, strategy in matrices(n, b, k).items():
            found = compared(n, b, k, strategy)
            ratios = [abs(ours / theirs - 1) for ours, theirs in zip(found[::2], found[1::2], strict=True)]
            shown = [f"{value:.9g}" for value in found]
            rows.append([f"{n}, {b}, {k}", name, *shown, f"{max(ratios):.1e}"])
            print(" | ".join(rows[-1]), flush=True)
    record(
        "fixed_order_peer",
        question="Fixed-order batches: sensitivity, noise and error beside jax-privacy's",
        order=52,
        columns=[
            "n, b, k",
            "matrix",
            "sensitivity",
            "jax-privacy's",
            "noise multiplier",
            "by dp-accounting",
            "prefix-sum error",
            "jax-privacy's",
            "largest relative difference",
        ],
        rows=rows,
        note=f"epsilon {EPSILON:g}, delta {DELTA:g}. Theirs: get_sensitivity_banded, "
        "minsep_sensitivity_squared and per_query_error of jax-privacy 2.0.0, GaussianPrivacyLoss of "
        "dp-accounting. They have no bound for shuffled epochs (steps_per_epoch).",
    )


PROTOCOL = figure_4.Protocol(400, (2.0, 8.0), (0.3,), 3)
SHUFFLED, SAME = "shuffled anew in every epoch, BLT", "one order in all epochs, BLT"


def plan_of(name: str, epsilon: float) -> Plan:
    """The certified plan of a loader: a BLT of two buffers made for epochs."""
    epoch = PROTOCOL.epoch
    sizes = dict(iterations=PROTOCOL.iterations, dataset_size=figure_4.ROWS)
    separation = 1 if name == SHUFFLED else epoch
    scheme = FixedOrder.from_batch_size(**sizes, batch_size=figure_4.ROWS / epoch, min_separation=separation)
    strategy = BufferedToeplitz.optimal(
        iterations=PROTOCOL.iterations,
        buffers=2,
        min_separation=epoch,
        participations=scheme.max_participations,
    )
    target = dict(epsilon=epsilon, delta=PROTOCOL.delta, dataset_size=figure_4.ROWS)
    return calibrate(scheme, strategy, **target, grid_ratio=1.001)


def digits(folder: Path) -> None:
    """Train all cells that `folder` lacks, and store accuracies beside those of figure 4's protocol."""
    folder.mkdir(parents=True, exist_ok=True)
    path, split = folder / "runs.json", load("digits")
    done = json.loads(path.read_text()) if path.exists() else {}
    for epsilon, name in itertools.product(PROTOCOL.epsilons, (SHUFFLED, SAME)):
        plan = plan_of(name, epsilon)
        for rate, seed in itertools.product(PROTOCOL.rates, range(PROTOCOL.seeds)):
            key = f"{name}|{epsilon:g}|{rate:g}|{seed}"
            if key not in done:
                done[key] = figure_4.run(PROTOCOL, plan, rate, seed, split)
                path.write_text(json.dumps(done, indent=1))
                print(key, done[key], flush=True)
    store(done)


def store(done: dict[str, float]) -> None:
    """Store the record: of each cell the learning rate with the best mean."""
    stored = json.loads((FOLDER / "digits.json").read_text())
    columns = stored["columns"]
    rows = []
    for epsilon in PROTOCOL.epsilons:
        of_samplers = next(row for row in stored["rows"] if float(row[0]) == epsilon)
        row = [f"{epsilon:g}", of_samplers[columns.index("DP-SGD (Poisson)")]]
        row.append(of_samplers[columns.index("BandMF, b-min-sep")])
        for name in (SHUFFLED, SAME):
            cells = [
                [100 * done[f"{name}|{epsilon:g}|{rate:g}|{seed}"] for seed in range(PROTOCOL.seeds)]
                for rate in PROTOCOL.rates
            ]
            best = max(cells, key=np.mean)
            half = scipy.stats.t.ppf(0.975, len(best) - 1) * np.std(best, ddof=1) / math.sqrt(len(best))
            sigma = plan_of(name, epsilon).noise_multiplier
            row.append(f"{np.mean(best):.1f} ± {half:.1f} (σ {sigma:.3f})")
        rows.append(row)
    record(
        "fixed_order_digits",
        question="Accuracy on digits with a loader that shuffles, against Poisson sampling",
        order=43,
        columns=["epsilon", "DP-SGD (Poisson)", "BandMF, b-min-sep", SHUFFLED, SAME],
        rows=rows,
        note=f"400 steps of 72 of 1,440 examples, delta 1e-4, {PROTOCOL.seeds} seeds, 95 % t intervals, per "
        "cent; noise multiplier in brackets. Poisson and b-min-sep are those of the table before (5 seeds, "
        "the best of three learning rates; here 0.3 alone). Nothing of the fixed orders is amplified.",
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["peer"]:
        beside_peer()
    elif sys.argv[1:2] == ["digits"] and sys.argv[2:3] == ["--out"] and len(sys.argv) == 4:
        digits(Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
