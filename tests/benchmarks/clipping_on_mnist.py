"""Ways to clip on MNIST: filters of individual privacy loss, whole batches, error feedback, quantiles.

    python -m tests.benchmarks.clipping_on_mnist PART --data-folder DIR

Parts: `filters` (arXiv 2209.15596), `batches` (arXiv 2212.05796) and `dice` (arXiv 2311.14632). Each stores
`results/mnist_PART.json`. 50,000 images are private; learning rates are the best of few on 10,000 public ones
(`real_data`). Programs are plain float32, as in `lean`: what they train is for comparison.
"""

import functools
import sys
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from jaxacct import BandedToeplitz, CalibrationOptions, Poisson, calibrate
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.accountants.tradeoff import gdp_epsilon, gdp_mu
from jaxacct.individual import IndividualGDPFilter
from tests.benchmarks import lean
from tests.benchmarks.real_data import PRIVATE, splits
from tests.benchmarks.results import record
from tests.benchmarks.seeds_on_mnist import shown
from tests.oracles.printed_dice import paper_theorem_3_7_sigma
from train import command as _command

DELTA = 1e-5
SEEDS = range(3)
FILTERED = 10_000  # private images of full batches


def _scaled(tree, factor):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def _flat(tree) -> jax.Array:
    return jax.flatten_util.ravel_pytree(tree)[0]


# Filters.


@functools.partial(jax.jit, static_argnames=("model", "budget", "steps", "filtered"))
def full_batches(model, params, x, y, key, sigma, clip, rate, *, budget, steps, filtered):
    """Return (parameters, which examples are active in the last step) of DP gradient descent."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    n, rule = len(y), IndividualGDPFilter(budget)

    def step(carry, key):
        flat, state = carry
        params = unravel(flat)
        norms = jnp.minimum(lean.gradient_norms(model, params, x, y), clip)
        active = jnp.ones(n, bool)
        if filtered:
            state, active = rule.step(state, norms / (sigma * clip))
        total = _flat(lean.clipped_sum(model, params, x, y, active, clip))
        noise = sigma * clip * jax.random.normal(key, flat.shape)
        return (flat - rate * (total + noise) / n, state), active

    (flat, _), active = jax.lax.scan(step, (flat, rule.init(n)), jax.random.split(key, steps))
    return unravel(flat), active[-1]


def filters(folder: str) -> None:
    """Without a filter, with one, and without one over as many steps at more noise; equal epsilon."""
    (private, test), (tune, judge) = splits(folder)
    private = private[0][:FILTERED], private[1][:FILTERED]
    labels = np.asarray(private[1])
    mu, short, long = float(gdp_mu(1.0, DELTA)), 50, 150
    rows = []
    for clip in (0.5, 4.0):
        for name, steps, filtered, sigma in (
            ("no filter", short, False, short**0.5 / mu),
            ("filter", long, True, short**0.5 / mu),
            ("no filter", long, False, long**0.5 / mu),
        ):

            def run(data, seed, rate, share=1.0, steps=steps, filtered=filtered, sigma=sigma, clip=clip):
                # Public trials have the noise in the mean gradient, so their budget is that of less noise.
                return full_batches(
                    lean.Linear, lean.Linear.init(0), *data, jax.random.key(seed), sigma * share, clip,
                    rate / clip, budget=mu / share, steps=steps, filtered=filtered,
                )  # fmt: skip

            def judged(step):
                params, _ = run(tune, 99, step, len(tune[1]) / FILTERED)
                return lean.accuracy(lean.Linear, params, judge)

            step = max((1.0, 3.0, 10.0), key=judged)
            accuracies, by_class, actives = [], [], []
            for seed in SEEDS:
                params, active = run(private, seed, step)
                accuracies.append(lean.accuracy(lean.Linear, params, test))
                parts = [test[1] == c for c in range(10)]
                by_class.append([lean.accuracy(lean.Linear, params, (test[0][p], test[1][p])) for p in parts])
                actives.append([np.asarray(active)[labels == c].mean() for c in range(10)])
            worst, kept = np.mean(by_class, 0), np.mean(actives, 0)
            rows.append(
                [clip, name, steps, f"{sigma:.1f}", step, shown(accuracies),
                 f"{100 * worst.min():.1f} ({worst.argmin()})", f"{100 * worst.max():.1f} ({worst.argmax()})",
                 f"{100 * kept.min():.0f} to {100 * kept.max():.0f}"]
            )  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    record(
        "mnist_filters",
        question="Filters of individual privacy loss on MNIST (arXiv 2209.15596)",
        order=74,
        columns=["clip norm", "filter", "steps", "noise", "step, rate x clip norm", "test accuracy",
                 "hardest class", "easiest class", "active in the last step, % by class"],
        rows=rows,
        note=f"(1, 1e-5), full batches of {FILTERED:,} private images, softmax regression; 3 runs, "
        "95 % t intervals, per cent. Noise and steps of the first two lines of a clip norm are those of mu = "
        f"{mu:.3f} in {short} steps: the filter excludes an example when its own mu is spent. The last line "
        "spends mu evenly.",
    )  # fmt: skip


# Batches of which whole terms are clipped.


@functools.partial(jax.jit, static_argnames=("model", "size"))
def _rounds(model, params, x, y, rounds, key, noise, clip, rate, *, size):
    """Return the parameters after rounds (R, m s) of terms of `size` records; noise on the sum / clip."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    terms, steps = rounds.shape[1] // size, len(rounds)

    def step(carry, given):
        flat, velocity = carry
        rows, key, done = given
        params = unravel(flat)
        if size == 1:
            total = _flat(lean.clipped_sum(model, params, x[rows], y[rows], jnp.ones(terms), clip))
        else:

            def term(_, rows):
                def mean(params):
                    example = {"inputs": x[rows], "labels": y[rows]}
                    return jax.vmap(functools.partial(lean.loss, model, params))(example).mean()

                gradient = _flat(jax.grad(mean)(params))
                return None, gradient * jnp.minimum(1.0, clip / jnp.linalg.norm(gradient))

            total = jax.lax.scan(term, None, rows.reshape(terms, size))[1].sum(0)
        drawn = (total + noise * clip * jax.random.normal(key, flat.shape)) / terms
        velocity = 0.9 * velocity + drawn
        return (flat - 0.1 * rate * (1 - done / steps) * velocity, velocity), None

    given = rounds, jax.random.split(key, steps), jnp.arange(steps, dtype=jnp.float32)
    return unravel(jax.lax.scan(step, (flat, jnp.zeros_like(flat)), given)[0][0])


def batches(folder: str) -> None:
    """Clipping of terms of s records, at noise 2 and equal guarantees."""
    (private, test), (tune, judge) = splits(folder)
    epochs, sigma, records, model = 4, 2.0, 500, lean.Linear
    steps, clip, rows = epochs * PRIVATE // records, 0.3, []

    def drawn(n: int, rng, shuffled: bool) -> np.ndarray:
        """Return (steps, records); public images, of which there are fewer, take more epochs."""
        if not shuffled:
            return np.array([rng.choice(n, records, replace=False) for _ in range(steps)], np.int32)
        rounds = n // records
        orders = [rng.permutation(n)[: rounds * records] for _ in range(-(-steps // rounds))]
        return np.concatenate(orders).reshape(-1, records)[:steps].astype(np.int32)

    for size, shuffled in ((1, True), (1, False), (5, True), (20, True), (100, True), (500, True)):

        def run(data, seed, step, size=size, shuffled=shuffled):
            order = drawn(len(data[1]), np.random.default_rng(seed), shuffled)
            return _rounds(
                model, model.init(seed), *data, order, jax.random.key(seed), 2 * sigma, clip, step / clip,
                size=size,
            )  # fmt: skip

        grid = (0.3, 3.0, 12.0, 30.0) if size == 1 else (0.3, 0.03, 0.01, 0.003, 0.001)
        found = {s: lean.accuracy(model, run(tune, 99, s), judge) for s in grid}
        step = max(found, key=found.__getitem__)
        values = [lean.accuracy(model, run(private, seed, step), test) for seed in SEEDS]
        kind = "individual" if size == 1 else "batch"
        rows.append(
            [kind, "shuffling" if shuffled else "subsampling", records // size, size,
             f"{2 * sigma * size / records:.3f}", step, shown(values)]
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    mu = epochs**0.5 / sigma
    record(
        "mnist_batches",
        question="Batch clipping against individual clipping on MNIST (arXiv 2212.05796)",
        order=75,
        columns=["clipping", "sampling", "terms m", "records s", "noise on the mean / C",
                 "step, rate x C", "test accuracy"],
        rows=rows,
        note=f"Noise 2 C sigma with sigma = 2, rounds of 500 records, 4 epochs of 50,000, softmax "
        f"regression; 3 runs, 95 % t intervals, per cent. Every shuffled line is G_{mu:.2f}: epsilon "
        f"{float(gdp_epsilon(DELTA, mu)):.2f} at 1e-5 against an adversary who sees the batches. Printed for "
        "an unnamed network and m, s, epochs: 98.3 % (batch, shuffling), 98.4 % (individual, subsampling).",
    )  # fmt: skip


# Error feedback and quantiles.


class Rule(NamedTuple):
    """What a step of `_clipped` does; the noise is on the mean, in clip norms where `quantile`.

    Attributes:
      clip: C1, or the first one.
      fed_back: C2; 0 for no error feedback.
      noise: standard deviation.
      counted: noise on the share of examples within the clip norm; 0 for a fixed clip norm.
    """

    clip: float
    fed_back: float
    noise: float
    counted: float = 0.0


@functools.partial(jax.jit, static_argnames=("model", "kind"))
def _clipped(model, params, x, y, indices, mask, key, rule: Rule, rate, batch, *, kind: str):
    """Return the parameters after all batches; rates fall linearly."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    steps = len(indices)

    def step(carry, given):
        flat, error, clip = carry
        rows, real, key, done = given
        params, noisy = unravel(flat), jax.random.split(key)
        z = jax.random.normal(noisy[0], flat.shape)
        example = x[rows], y[rows], real
        v = _flat(lean.clipped_sum(model, params, *example, clip)) / batch
        drawn = v + rule.noise * z
        if kind == "dice":
            raw = _flat(lean.clipped_sum(model, params, *example, jnp.inf)) / batch
            fed = error * jnp.minimum(1.0, rule.fed_back / jnp.maximum(jnp.linalg.norm(error), 1e-30))
            drawn, error = drawn + fed, error + raw - v - fed
        if kind == "quantile":
            drawn = (v + rule.noise * clip * z) / clip
            within = (real * (lean.gradient_norms(model, params, *example[:2]) <= clip)).sum() / batch
            share = within + rule.counted * jax.random.normal(noisy[1])
            clip = clip * jnp.exp(-0.2 * (share - 0.5))
        return (flat - rate * (1 - done / steps) * drawn, error, clip), None

    given = indices, mask, jax.random.split(key, steps), jnp.arange(steps, dtype=jnp.float32)
    first = flat, jnp.zeros_like(flat), jnp.asarray(rule.clip, jnp.float32)
    return unravel(jax.lax.scan(step, first, given)[0][0])


def dice(folder: str) -> None:
    """Table 2 on MNIST: clipped DP-SGD, DiceSGD at printed and at valid noise, quantile-tuned clipping."""
    (private, test), (tune, judge) = splits(folder)
    batch, steps, model, rows = 1000, 150, lean.Linear, []
    sizes = dict(dataset_size=PRIVATE, batch_size=batch, iterations=steps)

    def rules(clip: float, epsilon: float) -> dict:
        """Name to (kind, rule)."""
        scheme = Poisson.from_batch_size(**sizes)
        plan = calibrate(
            scheme,
            BandedToeplitz((1.0,)),
            epsilon=epsilon,
            delta=DELTA,
            dataset_size=PRIVATE,
            options=CalibrationOptions(accountant="pld"),
        )
        z = plan.mechanism.noise_multiplier
        counted = batch / 20  # of Andrew et al., arXiv 1905.03871
        tuned = (z**-2 - (2 * counted) ** -2) ** -0.5

        def noise(share: float) -> float:
            problem = sizes | dict(clip_norm=clip, error_clip_norm=share * clip)
            return DicePlan.calibrate(epsilon, DELTA, **problem).noise_std

        printed = paper_theorem_3_7_sigma(
            epsilon, DELTA, iterations=steps, dataset_size=PRIVATE, clip_norm=clip, error_bound=clip
        )
        return {
            "clipped DP-SGD": ("poisson", Rule(clip, 0.0, z * clip / batch)),
            "quantile-tuned, median": ("quantile", Rule(clip, 0.0, tuned / batch, counted / batch)),
            "DiceSGD, C2 = C1 / B": ("dice", Rule(clip, clip / batch, noise(1 / batch))),
            "DiceSGD, C2 = C1": ("dice", Rule(clip, clip, noise(1.0))),
            "DiceSGD, printed noise (no guarantee)": ("dice", Rule(clip, clip, printed)),
            "SGD, not private": ("poisson", Rule(1e9, 0.0, 0.0)),
        }

    def batches_of(kind: str, n: int, size: float, rng):
        if kind == "dice":
            epochs = -(-steps * size // n)
            order = np.concatenate([rng.permutation(n) for _ in range(int(epochs))])
            return order[: int(steps * size)].reshape(steps, -1), np.ones((steps, int(size)), np.float32)
        largest = int(size + 5 * size**0.5 + 5)
        counts = np.minimum(rng.binomial(n, size / n, steps), largest)
        indices = np.array([rng.choice(n, largest, replace=False) for _ in counts])
        return indices, (np.arange(largest) < counts[:, None]).astype(np.float32)

    def run(data, seed, kind, rule, rate, size):
        given = batches_of(kind, len(data[1]), size, np.random.default_rng(seed))
        return _clipped(
            model, model.init(seed), *data, *map(jnp.asarray, given), jax.random.key(seed), rule, rate, size,
            kind=kind,
        )  # fmt: skip

    for epsilon, clip in ((2.0, 1.0), (2.0, 0.1), (8.0, 1.0)):
        for name, (kind, rule) in rules(clip, epsilon).items():
            if rule.clip > 1e6 and (epsilon, clip) != (2.0, 1.0):
                continue  # without privacy there is one line
            unit = 1.0 if rule.clip > 1e6 or kind == "quantile" else clip
            found = {}
            for step in (0.1, 0.5, 2.0, 8.0, 30.0):
                params = run(tune, 99, kind, rule, step / unit, batch * len(tune[1]) / PRIVATE)
                found[step] = lean.accuracy(model, params, judge)
            step = max(found, key=found.__getitem__)
            values = [
                lean.accuracy(model, run(private, seed, kind, rule, step / unit, batch), test)
                for seed in SEEDS
            ]
            noise = f"{rule.noise:.2g}" + (" C" if kind == "quantile" else "")
            rows.append([f"{epsilon:g}", f"{clip:g}", name, noise, step, shown(values)])
            print(rows[-1], file=sys.stderr, flush=True)
    record(
        "mnist_dice",
        question="DiceSGD on MNIST at printed and at valid noise (arXiv 2311.14632, protocol of table 2)",
        order=76,
        columns=["epsilon", "C1", "method", "noise on the mean", "step, rate x C1", "test accuracy"],
        rows=rows,
        note="150 steps of 1,000 of 50,000 (3 epochs), delta 1e-5, softmax regression, SGD; 3 "
        "runs, 95 % t intervals, per cent. Printed for a vision transformer on CIFAR-10 at (2, 1e-5): 95.2 "
        "(clipped, C = 1), 97.4 (DiceSGD), 94.5 and 97.5 (C = .1), 99.0 (SGD). The printed noise has no "
        "guarantee (proofs/dice.md). Quantile-tuned clipping (arXiv 1905.03871) begins at C1, its count of "
        "examples within the clip norm has noise B / 20, and its step is in clip norms.",
    )


PARTS = {"filters": filters, "batches": batches, "dice": dice}


def command(part: str, data_folder: str) -> int:
    """Ways to clip on MNIST, each a record.

    Args:
      part: "filters", "batches" or "dice".
      data_folder: folder with the four idx files.
    """
    if part not in PARTS:
        raise ValueError(f"part must be among {', '.join(PARTS)}, got {part!r}")
    PARTS[part](data_folder)
    return 0


if __name__ == "__main__":
    _command.run(command, "clipping_on_mnist", prog="python -m tests.benchmarks.clipping_on_mnist", argv=None)
