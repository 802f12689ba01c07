"""Accuracy on digits by sampling scheme: DP-SGD, b-min-sep and fixed counts, each under its certified plan.

    python -m tests.benchmarks.digits --out DIR [--by-fit 20] [--seconds 3600]

Each seed permutes the 1,797 digits anew: 1,080 are private, 360 public, 357 the test set. The learning rate
of each seed, method and epsilon is the best of the same rates by six trials each on the public digits: a
trial draws batches from 240 of them, with the sampling probability of the private run and the same noise in
the mean gradient, and is judged on the other 120. So intervals cover the choice of the rate and of the split.
Scheme, separation and matrix of a method are those that `recommend` selects for it; the last method is what
`calibrate` selects without a scheme. Runs are those of `lean`; plans and finished runs are kept.
"""

import functools
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxacct import CalibrationOptions, Mechanism, Plan, calibrate, recommend
from jaxacct.common.files import write_atomically
from tests.benchmarks import lean
from tests.benchmarks.figure_4 import half_width
from tests.benchmarks.results import record
from train import command as _command
from train import fit
from train.options import TrainOptions

PRIVATE, TUNE, JUDGE = 1080, 240, 120
SIZES = dict(dataset_size=PRIVATE, batch_size=54.0, iterations=400)
DELTA, CLIP, MOMENTUM = 1e-4, 0.3, 0.9
DP_SGD = "DP-SGD (Poisson)"
METHODS: dict[str, Any] = {
    DP_SGD: "poisson",
    "b-min-sep": "b-min-sep",
    "balanced b-min-sep": "balanced-min-sep",
    "default": None,
}
EPSILONS = (1.0, 2.0, 4.0, 8.0)
STEPS = (0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0)  # learning rate times clip norm
TRIALS = 6


class Linear(lean.Linear):
    """Softmax regression on 64 pixels: 650 parameters."""

    pixels = 64


class Perceptron(lean.Perceptron):
    """One hidden layer of 64 tanh on 64 pixels: 4,810 parameters."""

    pixels = 64


MODELS: dict[str, Any] = {"linear": Linear, "perceptron": Perceptron}
NAMES = {"linear": "softmax regression (650 parameters)", "perceptron": "a perceptron (4,810 parameters)"}


def plan_of(method: str, epsilon: float, folder: Path) -> Plan:
    """Return the certified plan of a method, from `folder` or certified and stored there."""
    path = folder / f"{METHODS[method] or 'default'}-{epsilon:g}.json"
    if not path.exists():
        found = recommend(**SIZES, epsilon=epsilon, delta=DELTA, scheme=METHODS[method])
        how = dict(accountant="pld") if method == DP_SGD else dict(estimate=found.chosen.noise_multiplier)
        calibrate(
            found.chosen.scheme, found.chosen.strategy, epsilon=epsilon, delta=DELTA, dataset_size=PRIVATE,
            choice=found.choice, options=CalibrationOptions(**how),
        ).save(path)  # fmt: skip
    return Plan.load(path)


@functools.cache
def split(seed: int):
    """Return (private, test, public) digits of a seed, each (inputs (rows, 64), labels)."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 0]).permutation(len(labels))
    inputs, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order], jnp.int32)
    parts = slice(PRIVATE), slice(PRIVATE + TUNE + JUDGE, None), slice(PRIVATE, PRIVATE + TUNE + JUDGE)
    return tuple((inputs[part], labels[part]) for part in parts)


def setting_of(step: float) -> lean.Setting:
    """Return the setting with this learning rate times the clip norm."""
    return lean.Setting(step / CLIP, MOMENTUM, CLIP)


def trials(model, plan: Plan, seed: int, number: int) -> list[float]:
    """Return the accuracy of each step on the public digits, with the plan's noise in the mean gradient."""
    inputs, labels = split(seed)[2]
    order = np.random.default_rng([seed, 1, number]).permutation(TUNE + JUDGE)
    tune, judge = ((inputs[part], labels[part]) for part in (order[:TUNE], order[TUNE:]))
    scale = TUNE / PRIVATE
    noise = plan.mechanism.noise_multiplier * scale
    mechanism = Mechanism(plan.mechanism.scheme, plan.mechanism.strategy, noise)
    settings = [(setting_of(step), 1000 * (1 + number) + seed) for step in STEPS]
    found = lean.train(model, mechanism, SIZES["batch_size"] * scale, settings, tune)
    return [lean.accuracy(model, params, judge) for params in found]


def private_run(model, plan: Plan, step: float, seed: int) -> float:
    """Return the test accuracy of one run by `lean`."""
    rows, test, _ = split(seed)
    (found,) = lean.train(model, plan.mechanism, SIZES["batch_size"], [(setting_of(step), seed)], rows)
    return lean.accuracy(model, found, test)


def fitted_run(model, plan: Plan, step: float, seed: int) -> float:
    """Return the test accuracy of one run of `train.fit` under the plan."""
    rows, test, _ = split(seed)
    setting = setting_of(step)
    schedule = optax.linear_schedule(setting.rate * (1 - MOMENTUM), 0.0, SIZES["iterations"])
    result = fit(
        plan, model.init(seed), functools.partial(lean.loss, model),
        {"inputs": np.asarray(rows[0]), "labels": np.asarray(rows[1])},
        optax.sgd(schedule, momentum=MOMENTUM), clip_norm=CLIP,
        options=TrainOptions(verify=False, progress=False),
    )  # fmt: skip
    return lean.accuracy(model, result.params, test)


class Runs:
    """Accuracies of finished runs by key, in a JSON file that is written after every cell."""

    def __init__(self, path: Path):
        self.path = path
        self.done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: tuple, run):
        name = "|".join(f"{part:g}" if isinstance(part, float) else str(part) for part in key)
        if name not in self.done:
            self.done[name] = run()
        return self.done[name]

    def save(self) -> None:
        write_atomically(self.path, json.dumps(self.done, indent=1) + "\n")


def best_step(means: np.ndarray) -> float:
    """Return the step with the best mean, of equals the middle one."""
    best = [step for step, mean in zip(STEPS, means, strict=True) if mean == means.max()]
    return best[(len(best) - 1) // 2]


def cell(runs: Runs, kind: str, method: str, epsilon: float, seed: int, plan: Plan) -> tuple[float, float]:
    """Return (test accuracy, chosen step) of a seed."""
    key, model = (kind, method, epsilon, seed), MODELS[kind]
    found = [
        runs.get((*key, "trials", number), lambda: trials(model, plan, seed, number))  # noqa: B023
        for number in range(TRIALS)
    ]
    step = best_step(np.mean(found, axis=0))
    return runs.get((*key, "private", step), lambda: private_run(model, plan, step, seed)), step


def interval(values: np.ndarray, sign: str = "") -> str:
    """Return mean and 95 % t interval in per cent."""
    return f"{100 * values.mean():{sign}.1f} ± {100 * half_width(values):.1f}"


def described(plan: Plan) -> str:
    """Return scheme, separation, bands and noise multiplier."""
    scheme = plan.mechanism.scheme
    parts = (
        [scheme.name] if scheme.min_separation == 1 else [scheme.name, f"separation {scheme.min_separation}"]
    )
    bands = plan.mechanism.strategy.bands
    return ", ".join([*parts, f"{bands} band{'s' if bands > 1 else ''}", f"σ {plan.noise_multiplier:.3f}"])


def command(
    out: str, models: str = "linear,perceptron", seeds: int = 20, by_fit: int = 0,
    seconds: float = float("inf"),
) -> int:  # fmt: skip
    """Accuracies on digits of DP-SGD, b-min-sep and fixed counts at epsilon 1, 2, 4 and 8.

    Args:
      out: folder of plans and runs.json; what is there is gone on with.
      models: "linear" and "perceptron", separated by commas.
      seeds: splits of the data, with a private run each.
      by_fit: private runs of the default at epsilon 2 by `train.fit`, too, of as many seeds.
      seconds: start no cell after so long.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    runs, started = Runs(folder / "runs.json"), time.monotonic()
    kinds, found = models.split(","), {}
    for kind, epsilon, seed, method in itertools.product(kinds, EPSILONS, range(seeds), METHODS):
        if time.monotonic() - started > seconds:
            return 1
        plan = plan_of(method, epsilon, folder)
        accuracy, step = cell(runs, kind, method, epsilon, seed, plan)
        found.setdefault((kind, epsilon, method), []).append((accuracy, step))
        runs.save()
        print(
            kind, f"{epsilon:g}", seed, method, f"{accuracy:.4f}, step {step:g}", file=sys.stderr, flush=True
        )
    fitted = []
    for seed in range(by_fit):
        plan, step = plan_of("default", 2.0, folder), found[kinds[0], 2.0, "default"][seed][1]
        key = kinds[0], "default", 2.0, seed, "fit", step
        fitted.append(runs.get(key, lambda: fitted_run(MODELS[kinds[0]], plan, step, seed)))  # noqa: B023
        runs.save()
    store(found, kinds, folder, np.array(fitted))
    return 0


def store(found: dict, kinds: list[str], folder: Path, fitted: np.ndarray) -> None:
    """Store the record; a difference is paired by seed."""
    rows, different, count = [], [], 0
    for kind, epsilon in itertools.product(kinds, EPSILONS):
        values = {method: np.array(found[kind, epsilon, method])[:, 0] for method in METHODS}
        plans = {method: plan_of(method, epsilon, folder) for method in METHODS}
        count = len(values[DP_SGD])
        rows.append([NAMES[kind], f"{epsilon:g}"])
        for method in METHODS:
            text = interval(values[method])
            if method != DP_SGD:
                text += f" ({interval(values[method] - values[DP_SGD], '+')})"
            rows[-1].append(f"{text}; {described(plans[method])}")
        for one, other in itertools.combinations(list(METHODS)[1:], 2):
            difference = values[one] - values[other]
            if abs(difference.mean()) > half_width(difference):
                different.append(
                    f"{one} minus {other}, {kind}, epsilon {epsilon:g}: {interval(difference, '+')}"
                )
    pairs = (
        f"of the {3 * len(rows)} paired 95 % intervals among b-min-sep, balanced b-min-sep and the default"
    )
    text = f"Only these {pairs} exclude 0: {'; '.join(different)}."
    if not different:
        text = f"Between these three no difference is seen: none {pairs} excludes 0."
    if len(fitted):
        lean_runs = np.array(found[kinds[0], 2.0, "default"])[: len(fitted), 0]
        text += (
            f" By `train.fit`, {kinds[0]}, default at epsilon 2: {interval(fitted)}, paired difference "
            f"{interval(fitted - lean_runs, '+')}."
        )
    record(
        "digits_fixed_counts",
        question="Accuracy on digits with a fixed number of participations",
        order=44,
        columns=["model", "epsilon", *METHODS],
        rows=rows,
        note=f"Test accuracy in per cent, mean of {count} seeds with 95 % t intervals; in brackets the "
        "paired difference to DP-SGD. delta 1e-4, 1,080 private digits, 400 steps of mean batch 54, momentum "
        ".9, clip norm .3. Every seed has its own split (1,080 private, 360 public, 357 test) and chooses "
        f"the learning rate of each cell from {len(STEPS)} by {TRIALS} trials each on its public digits. "
        "Splits share the 1,797 images, so seeds are not independent. "
        "Scheme, separation, matrix: `recommend`, also the scheme of the last column. Certified plans, "
        f"programs of `lean`. {text}",
    )


if __name__ == "__main__":
    _command.run(command, "digits", prog="python -m tests.benchmarks.digits", argv=None)
