"""Clipped sums of models as users of Flax write them: times of both kinds of clipping, and what "auto" takes.

    PYTHONPATH=. python -m tests.benchmarks.flax_models [NAME ...]   # replaces their rows of the record

Times of the processor as in `steps`, as multiples of the gradient of the mean loss.
"""

import functools
import sys

import jax
import jax.numpy as jnp

from tests.benchmarks.results import record, rows_of
from tests.benchmarks.steps import by_turns
from tests.train.flax_models import MODELS, language_model, wide_resnet
from train.clipping.ghost import choose
from train.clipping.grid import Grid
from train.clipping.rows_apart import OneAtATimeError
from train.procedures.step import CLIPPINGS

NAME, GRID = "flax_models", Grid(1.0, 20)
SIZES = dict(layers=4, tokens=8192, width=256, length=128, number=16)
LARGER = {
    "wide ResNet 10-1, 32 x 32": lambda: wide_resnet(1, (16, 32, 64), 32),
    "wide ResNet 16-1, 32 x 32": lambda: wide_resnet(2, (16, 32, 64), 32),
    "wide ResNet 10-2, 32 x 32": lambda: wide_resnet(1, (32, 64, 128), 32),
    "language model of 5.3 million": lambda: language_model(tied=True, **SIZES),
}


def plain(loss, params, rows):
    return jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, rows).mean())(params)


def measured(name: str, make) -> list:
    """Return one row of the table."""
    loss, params = make().functional()
    rows = jax.tree.map(jnp.asarray, make().rows)
    size = len(jax.tree.leaves(rows)[0])
    mask = jnp.ones(size, bool)
    runs = {"plain": jax.jit(plain)}
    for kind, sum_of in CLIPPINGS.items():
        runs[kind] = jax.jit(lambda f, p, r, sum_of=sum_of: sum_of(f, p, r, mask, grid=GRID))
    for kind, run in list(runs.items()):
        try:
            jax.block_until_ready(run(loss, params, rows))
        except OneAtATimeError:
            del runs[kind]
    calls = {kind: functools.partial(run, loss, params, rows) for kind, run in runs.items()}
    taken = {kind: cpu for kind, (cpu, _) in by_turns(calls).items()}
    chosen = choose(loss, params, rows, grid=GRID).clipping
    times = {kind: taken[kind] / taken["plain"] for kind in CLIPPINGS if kind in taken}
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    shown = [f"{times[kind]:.1f}" if kind in times else "refused" for kind in CLIPPINGS]
    ratio = f"{times[chosen] / min(times.values()):.2f}"
    return [name, f"{count:,}", f"{taken['plain']:.1f}", *shown, chosen, ratio]


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS | LARGER:
        row = measured(name, (MODELS | LARGER)[name])
        print("|", " | ".join(row), "|", flush=True)
        table = rows_of(NAME) | {name: row}
        record(
            NAME,
            question="What does clipping cost for models as users of Flax write them?",
            order=65,
            columns=["model", "parameters", "plain, ms", *CLIPPINGS, "default", "default / better"],
            rows=[table[each] for each in MODELS | LARGER if each in table],
            note="Batches of 48 (the language model of 5.3 million: 16); processor times as multiples of the "
            "gradient of the mean loss. Models measured one at a time: the command of the last.",
        )
