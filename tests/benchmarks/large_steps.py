"""Steps of a transformer of 109 million parameters, its layers in a scan and one by one.

    python -m tests.benchmarks.large_steps [LAYERS WIDTH WORDS]

Plain training, the private step and jax-privacy's, each in turn; 6 GB of memory.
"""

import functools
import math
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.benchmarks.results import recorded
from tests.benchmarks.sharded_memory import (
    ADAM,
    BANDS,
    BATCH,
    POSITIONS,
    asked,
    loss,
    mesh_of,
    note_of,
    private_step,
    sharded,
)
from tests.benchmarks.steps import peer_of
from train.noise import recursion
from train.procedures.step import PrivateStep

TURNS = 4
COLUMNS = ["layers", "step", "CPU s a step", "over plain", "CPU s to compile"]
COLUMNS += ["memory beyond the state, copies"]


@functools.partial(jax.jit, donate_argnums=0)
def plain(state, batch):
    """Return the state after a step of Adam by the mean gradient."""
    params, moments = state
    gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, batch).mean())(params)
    updates, moments = ADAM.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments


def parameters(shapes, scanned: bool) -> dict:
    """Return parameters, small random numbers."""
    generator = np.random.default_rng(0)
    params = {
        name: jnp.asarray(0.02 * generator.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }
    if scanned:
        return params
    table = params.pop("table")
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(shapes["qkv"][0])]
    return {"table": table, "layers": layers}


def batch_of(shapes, rows: int = BATCH) -> dict[str, np.ndarray]:
    """Return rows of random words."""
    words = np.random.default_rng(0).integers(0, shapes["table"][0], (rows, POSITIONS + 1)).astype(np.int32)
    return {"words": words[:, :-1], "next": words[:, 1:]}


def kinds(shapes) -> dict[str, tuple]:
    """Return (first state of parameters, step, what else it is given) of each kind, by name."""
    batch, step, (begin, peer) = batch_of(shapes), private_step("keep"), peer_of(loss, BANDS, 2, ADAM)
    return {
        "plain": (lambda params: (params, ADAM.init(params)), plain, (batch,)),
        "private": (step.init, step, (batch, np.ones(BATCH, bool))),
        "jax-privacy": (begin, jax.jit(peer, donate_argnums=0), (batch,)),
    }


def noise_alone() -> tuple:
    """Return (first state of parameters, step, ()): the noise of a step, which the private one adds."""
    private = private_step("keep").private
    strategy = private.mechanism.strategy

    @functools.partial(jax.jit, donate_argnums=0)
    def run(held):
        return recursion.draw(strategy, private.levels, held[1], held[0])

    def begin(params):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), params), private.init(params)

    return begin, run, ()


def all_kinds(shapes) -> dict[str, tuple]:
    """Return `kinds`, with noise that is kept nowhere, and over a mesh of all devices; most memory last."""
    mesh, found = mesh_of((1, -1)), kinds(shapes)
    again, over, given = private_step("recompute"), private_step("keep", mesh), found["private"][2]

    return {
        "plain": found.pop("plain"),
        "private, recomputed noise": (again.init, again, given),
        f"private, sharded over {mesh.size}": (lambda params: over.init(sharded(params, mesh)), over, given),
        **found,
    }


def after(run, given, state) -> tuple:
    """Return what a step gives, and the state after it."""
    found = run(state, *given)
    return found, found[0] if isinstance(run, PrivateStep) else found


def measured(shapes) -> Iterator[list[str]]:
    """Yield the rows of the record."""
    size = sum(map(math.prod, shapes.values()))
    for scanned in (True, False):
        least: dict[str, float] = {}
        for name, (first, run, given) in (kinds(shapes) | {"noise alone": noise_alone()}).items():
            state, taken = first(parameters(shapes, scanned)), []
            begun = time.process_time()
            temporary = run.trace(state, *given).lower().compile().memory_analysis().temp_size_in_bytes
            compiled = time.process_time() - begun
            for _ in range(TURNS):
                begun = time.process_time()
                _, state = jax.block_until_ready(after(run, given, state))
                taken.append(time.process_time() - begun)
            least[name] = min(taken[1:])
            numbers = (least[name], least[name] / least["plain"], compiled, temporary / (4 * size))
            yield ["a scan" if scanned else "one by one", name, *(f"{number:.2f}" for number in numbers)]


if __name__ == "__main__":
    shapes = asked()
    recorded(
        "large_steps",
        question="Steps of 109 million parameters, layers in a scan of `jax.checkpoint` or one by one",
        order=66,
        columns=COLUMNS,
        rows=measured(shapes),
        note=f"{note_of(shapes)}, batch {BATCH}; least of {TURNS - 1} steps after the first. Compile: trace, "
        "lower and compile. jax-privacy: gradients of two examples at a time, its own streamed noise of as "
        "many bands. Noise alone: key stream, normals, sum and storing, as the private step has it.",
    )
