"""Private fine-tuning of a public network on images: linear head and LoRA at epsilon 1.

    python -m tests.benchmarks.fine_tuning_images --mnist DIR --fashion DIR --plans DIR

A network (a convolution of 16 channels, one of 32, a dense layer of 64) is trained without privacy on public
images: all of Fashion-MNIST, or classes 0 to 4. It is adapted privately to MNIST, or to classes 5 to 9, under
the batches, matrix and noise multiplier of the plans of `real_data` (p = 1/100, 500 steps): a new linear head
on its 64 features, or LoRA of rank 4 on the dense layer beside a new head. Learning rates are chosen on
public images of the private task, as in `real_data`. Softmax regression on pixels uses nothing public.
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct import Mechanism
from tests.benchmarks import lean
from tests.benchmarks.figure_4 import half_width
from tests.benchmarks.real_data import DP_SGD, PRIVATE, Protocol, plan_of, splits
from tests.benchmarks.results import FOLDER, record
from train import command as _command

EPSILON, RANK, SEEDS = 1.0, 4, 5
STEPS = (3.0, 10.0, 30.0)


class Base:
    """The public network."""

    @staticmethod
    def init(seed: int) -> dict:
        rng = np.random.default_rng(seed)
        sizes = {"first": (25, 16), "second": (144, 32), "third": (512, 64), "last": (64, 10)}
        return {name: lean.layer(rng, *size) for name, size in sizes.items()}

    @staticmethod
    def features(params, x):
        """Return (512,) of one image: what the dense layer is given."""
        found, height, width = lean.patches(x, 5, 2)
        x = lean.pooled(jnp.tanh(lean.dense(params["first"], found)).reshape(height, width, -1))
        return jnp.tanh(lean.dense(params["second"], lean.patches(x, 3, 1)[0])).reshape(-1)

    @staticmethod
    def logits(params, x):
        hidden = jnp.tanh(lean.dense(params["third"], Base.features(params, x)))
        return lean.dense(params["last"], hidden)


def trained(data, epochs: int = 2) -> dict:
    """Return parameters of the base after Adam without privacy."""
    x, y = data
    params, optimizer = Base.init(0), optax.adam(2e-3)

    @jax.jit
    def epoch(params, state, order):
        def step(carry, rows):
            params, state = carry

            def mean(params):
                return jax.vmap(lambda x, y: lean.loss(Base, params, {"inputs": x, "labels": y}))(
                    x[rows], y[rows]
                ).mean()

            updates, state = optimizer.update(jax.grad(mean)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), order)[0]

    state, rng = optimizer.init(params), np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(y))[: len(y) // 100 * 100].reshape(-1, 100)
        params, state = epoch(params, state, order)
    return params


class Head:
    """A new linear layer on 64 features: 650 parameters."""

    @staticmethod
    def init(seed: int) -> dict:
        del seed
        return {"last": {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}}

    logits = staticmethod(lambda params, x: lean.dense(params["last"], x))
    factors = staticmethod(lean.Linear.factors)


def lora_on(third: dict):
    """Return the model of LoRA on a dense layer, beside a new head: 2,954 parameters."""

    class Lora:
        @staticmethod
        def init(seed: int) -> dict:
            down = np.random.default_rng(seed).normal(size=(512, RANK)) / 512**0.5
            parts = {"down": {"w": jnp.asarray(down, jnp.float32)}, "up": {"w": jnp.zeros((RANK, 64))}}
            return parts | Head.init(seed)

        @staticmethod
        def hidden(params, x):
            return jnp.tanh(lean.dense(third, x) + x @ params["down"]["w"] @ params["up"]["w"])

        @staticmethod
        def logits(params, x):
            return lean.dense(params["last"], Lora.hidden(params, x))

        @staticmethod
        def factors(params, x, y) -> dict:
            hidden = Lora.hidden(params, x)
            last = lean.slopes(lean.dense(params["last"], hidden), y)
            slopes = (last @ params["last"]["w"].T) * (1 - hidden**2)
            low = x @ params["down"]["w"]
            return {
                "down": (x, slopes @ params["up"]["w"].T), "up": (low, slopes), "last": (hidden, last),
            }  # fmt: skip

    return Lora


def adapted(protocol: Protocol, method: str, plan, models: dict, parts) -> list[list]:
    """Return (name, parameters, step, accuracies) of each model; `parts` are private, test, tune, judge."""
    found = []
    for name, (model, transform) in models.items():
        private, test, tune, judge = ((transform(x), y) for x, y in parts)
        most = len(private[1])

        def run(data, seed, step, model=model, most=most):
            size = len(data[1])
            scheme, _ = protocol.schemes(size)[method]
            share = size / PRIVATE
            # The noise in the mean gradient is that of the private data, also in public trials.
            sigma = plan.mechanism.noise_multiplier * min(1.0, size / most)
            mechanism = Mechanism(scheme, plan.mechanism.strategy, sigma)
            setting = lean.Setting(step, 0.9, 1.0)
            return lean.train(model, mechanism, protocol.batch_size * share, [(setting, seed)], data)[0]

        scores = {
            step: np.mean([lean.accuracy(model, run(tune, seed, step), judge) for seed in (1000, 1001)])
            for step in STEPS
        }
        step = max(scores, key=scores.__getitem__)
        values = [lean.accuracy(model, run(private, seed, step), test) for seed in range(SEEDS)]
        size = sum(leaf.size for leaf in jax.tree.leaves(model.init(0)))
        found.append([name, size, step, np.array(values)])
        print(method, found[-1], file=sys.stderr, flush=True)
    return found


def kept(task: str | None) -> list[list[str]]:
    """Return the stored lines of the tasks that are not run."""
    path = FOLDER / "fine_tuning_images.json"
    if task is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row[0] != task]


def command(mnist: str, fashion: str, plans: str, task: str | None = None) -> int:
    """Linear head and LoRA on public networks at epsilon 1; stores a record.

    Args:
      mnist: folder with the four idx files of MNIST.
      fashion: folder with those of Fashion-MNIST.
      plans: folder of the plans of `real_data`.
      task: one of the tasks alone; the others' lines of the record are kept.
    """
    chosen = task
    protocol = Protocol()
    (digits, digits_test), (tune, judge) = splits(mnist)
    (clothes, _), _ = splits(fashion)

    def half(data, upper: bool):
        part = np.asarray(data[1]) >= 5
        part = np.flatnonzero(part if upper else ~part)
        part = part[: len(part) // 100 * 100]  # a fixed order has whole batches of 1/100
        return data[0][part], data[1][part] - (5 if upper else 0)

    tasks = {
        "Fashion-MNIST to MNIST": (clothes, (digits, digits_test, tune, judge)),
        "MNIST 0 to 4 to 5 to 9": (
            half(digits, False),
            [half(d, True) for d in (digits, digits_test, tune, judge)],
        ),
    }  # fmt: skip
    methods, rows = (DP_SGD, "balanced b-min-sep"), kept(chosen)
    if chosen not in (None, *tasks):
        raise ValueError(f"task must be among {'; '.join(tasks)}, got {chosen!r}")
    for task, (public, parts) in tasks.items():
        if chosen not in (None, task):
            continue
        base = trained(public)
        conv = jax.jit(jax.vmap(lambda x, base=base: Base.features(base, x)))
        dense = jax.jit(lambda x, base=base: jnp.tanh(lean.dense(base["third"], x)))

        def features(x, conv=conv):
            return jnp.concatenate([conv(x[i : i + 2000]) for i in range(0, len(x), 2000)])

        deep = [(features(x), y) for x, y in parts]
        models = {
            "linear head": (Head, dense),
            f"LoRA of rank {RANK} and head": (lora_on(base["third"]), lambda x: x),
        }
        found = {
            m: adapted(protocol, m, plan_of(protocol, m, EPSILON, Path(plans)), models, deep) for m in methods
        }
        pixels = {}
        for method in methods:
            plan = plan_of(protocol, method, EPSILON, Path(plans))
            pixels[method] = adapted(
                protocol, method, plan, {"softmax regression on pixels": (lean.Linear, lambda x: x)}, parts
            )
        for index, name in itertools.chain(enumerate(models), [(0, "softmax regression on pixels")]):
            source = found if name in models else pixels
            cells = [source[m][index] for m in methods]
            shown = [f"{100 * c[3].mean():.2f} ± {100 * half_width(c[3]):.2f}" for c in cells]
            rows.append([task, name, f"{cells[0][1]:,}", *shown])
            print(rows[-1], file=sys.stderr, flush=True)
    record(
        "fine_tuning_images",
        question="Private fine-tuning of a public network at epsilon 1: linear head, LoRA",
        order=63,
        columns=["public to private task", "method", "trained parameters", *methods],
        rows=rows,
        note=f"(1, 1e-5), 500 steps at p = 1/100, 16 bands where noise is correlated; {SEEDS} runs, 95 % t "
        "intervals, test accuracy in per cent. Learning rate of each cell: the best of three on public "
        "images of the private task. Softmax regression on pixels uses no public network.",
    )
    return 0


if __name__ == "__main__":
    _command.run(
        command, "fine_tuning_images", prog="python -m tests.benchmarks.fine_tuning_images", argv=None
    )
