"""Batches in a fixed order: sensitivity, noise and error beside jax-privacy's; accuracy on digits.

python -m tests.benchmarks.fixed_order peer              # a minute
python -m tests.benchmarks.fixed_order digits --out DIR  # 120 runs of 400 steps; finished runs are kept
"""

import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from dp_accounting.pld import privacy_loss_mechanism
from jax_privacy.matrix_factorization import sensitivity as peer
from jax_privacy.matrix_factorization import toeplitz

from jaxacct import (
    BandedToeplitz,
    BufferedToeplitz,
    CalibrationOptions,
    FixedOrder,
    Mechanism,
    Plan,
    Toeplitz,
    calibrate,
    prefix_sum_error,
)
from jaxacct.accountants import unamplified
from jaxacct.strategies import by_name, workload_named
from tests.benchmarks import figure_4
from tests.benchmarks.results import record
from tests.train.fitting import fit
from train.batches.data import load
from train.optimizers import sgd

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


PROTOCOL = figure_4.Protocol(400, (2.0, 8.0), (0.015, 0.05, 0.15, 0.5), 5)
POISSON = "DP-SGD (Poisson)"
SHUFFLED, SAME = "shuffled anew in every epoch, BLT", "one order in all epochs, BLT"
WORKLOAD = "momentum:0.95,linear"  # of `train.optimizers.sgd`, with which all are trained


def plan_of(name: str, epsilon: float) -> Plan:
    """The certified plan of a method; a BLT is made for epochs and for the optimizer."""
    target = dict(epsilon=epsilon, delta=PROTOCOL.delta, dataset_size=figure_4.ROWS)
    if name == POISSON:
        scheme, strategy = PROTOCOL.mechanisms()[POISSON]
        return calibrate(
            scheme, strategy, **target, options=CalibrationOptions(accountant="pld", grid_ratio=1.001)
        )
    scheme = FixedOrder.from_batch_size(
        **PROTOCOL.sizes, min_separation=1 if name == SHUFFLED else PROTOCOL.epoch
    )
    workload = workload_named(WORKLOAD, PROTOCOL.iterations)
    return calibrate(
        scheme,
        by_name("buffered", 1, scheme, workload=workload),
        **target,
        options=CalibrationOptions(grid_ratio=1.001),
    )


def run(plan: Plan, rate: float, seed: int) -> float:
    """Test accuracy of softmax regression; the seed is that of the initial parameters."""
    split, generator = load("digits"), np.random.default_rng(seed)
    rows = [part.take(np.arange(len(part)), len(part)) for part in (split.train, split.test)]
    train, test = ({"x": each["inputs"].reshape(-1, 64), "y": each["labels"]} for each in rows)
    params = {"w": jnp.float32(generator.normal(0, 0.05, (64, 10))), "b": jnp.zeros(10)}

    def loss(params, example):
        logits = example["x"] @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    found = fit(plan, params, loss, train, sgd(rate, PROTOCOL.iterations), progress=False).params
    answers = np.argmax(test["x"] @ np.asarray(found["w"]) + np.asarray(found["b"]), axis=1)
    return float(np.mean(answers == test["y"]))


def digits(folder: Path) -> None:
    """Train all cells that `folder` lacks, and store the accuracies."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    for seed, epsilon, name in itertools.product(
        range(PROTOCOL.seeds), PROTOCOL.epsilons, (POISSON, SHUFFLED, SAME)
    ):
        plan = plan_of(name, epsilon)
        for rate in PROTOCOL.rates:
            key = f"{name}|{epsilon:g}|{rate:g}|{seed}"
            if key not in done:
                done[key] = run(plan, rate, seed)
                path.write_text(json.dumps(done, indent=1))
                print(key, done[key], flush=True)
    store(done)


def store(done: dict[str, float]) -> None:
    """Store the record: of each cell the learning rate with the best mean."""
    rows = []
    for epsilon in PROTOCOL.epsilons:
        row, poisson, seeds = [f"{epsilon:g}"], None, range(PROTOCOL.seeds)
        for name in (POISSON, SHUFFLED, SAME):
            cells = {
                rate: 100 * np.array([done[f"{name}|{epsilon:g}|{rate:g}|{i}"] for i in seeds])
                for rate in PROTOCOL.rates
            }
            rate, best = max(cells.items(), key=lambda cell: cell[1].mean())
            sigma = plan_of(name, epsilon).noise_multiplier
            row.append(f"{_interval(best)} (σ {sigma:.3f}, rate {rate:g})")
            if poisson is None:
                poisson = best
            else:
                row.append(_interval(best - poisson, "+"))
        rows.append(row)
    record(
        "fixed_order_digits",
        question="Accuracy on digits with a loader that shuffles, against Poisson sampling",
        order=43,
        columns=["epsilon", POISSON, SHUFFLED, "difference", SAME, "difference"],
        rows=rows,
        note=f"Softmax regression, 400 steps of 72 of 1,440 examples, delta 1e-4, {PROTOCOL.seeds} seeds, "
        "95 % t intervals, per cent; differences to DP-SGD are paired by seed. All have the same budget: the "
        f"best of {len(PROTOCOL.rates)} learning rates by the mean over seeds, which is not paid for. One "
        f"buffer, made for {WORKLOAD}. Nothing of the fixed orders is amplified.",
    )


def _interval(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.1f} ± {figure_4.half_width(values):.1f}"


if __name__ == "__main__":
    if sys.argv[1:] == ["peer"]:
        beside_peer()
    elif sys.argv[1:2] == ["digits"] and sys.argv[2:3] == ["--out"] and len(sys.argv) == 4:
        digits(Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
