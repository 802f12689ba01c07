"""Memory of a private step by device, where parameters are whole and where they are sharded.

`python -m tests.benchmarks.sharded_memory [LAYERS WIDTH WORDS]` compiles a step of a transformer (a scan of
checkpointed layers) for eight virtual devices, without its arrays: what the compiler says, and no run.
"""

import os
import sys

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import BMinSep
from jaxacct.strategies import BandedInverse
from tests.benchmarks.results import recorded
from tests.benchmarks.steps import peer_of
from train.noise.recursion import NoiseState
from train.optimizers import privatize
from train.procedures.step import PrivateStep, TrainState, make_step

POSITIONS, BATCH, BANDS = 32, 16, 4
LAYOUTS: dict[str, tuple[int, int] | None] = {
    "one device": None,
    "8 devices, whole": (8, 1),
    "2 x 4": (2, 4),
    "1 x 8": (1, 8),
}
P, ADAM = PartitionSpec, optax.adam(1e-3)
WHOLE = P()


def shapes_of(layers: int, width: int, words: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a transformer's parameters, without scales."""
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    each = {name: (width * rows, width * columns) for name, (rows, columns) in sizes.items()}
    return {"table": (words, width)} | {name: (layers, *shape) for name, shape in each.items()}


def asked() -> dict[str, tuple[int, ...]]:
    """Return the shapes for the command line's LAYERS WIDTH WORDS."""
    return shapes_of(*map(int, sys.argv[1:] or (8, 1024, 8192)))


def note_of(shapes) -> str:
    """Return the beginning of a note."""
    model = f"A transformer of {sum(map(math.prod, shapes.values())):,} parameters, Adam, inverse of {BANDS}"
    return f"{model} bands, rows of {POSITIONS} words, ghost clipping two rows at a time"


def loss(params, example):
    """Return the cross-entropy of the next words of one example; layers in a list are taken one by one."""

    @jax.checkpoint
    def layer(x, w):
        query, key, value = jnp.split(x @ w["qkv"], 3, -1)
        x = x + jax.nn.softmax(query @ key.T / math.sqrt(x.shape[-1])) @ value @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = params["table"][example["words"]]
    for each in params.get("layers", ()):
        x, _ = layer(x, each)
    if "layers" not in params:
        x, _ = jax.lax.scan(layer, x, {name: leaf for name, leaf in params.items() if name != "table"})
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, example["next"]).mean()


def mesh_of(layout: tuple[int, int] | None) -> Mesh | None:
    """Return a mesh of all devices; None for None."""
    return None if layout is None else Mesh(np.array(jax.devices()).reshape(layout), ("data", "model"))


def spec_of(axes: int) -> PartitionSpec:
    """Return the layout of an array whose last axis is cut."""
    return P(*(None,) * (axes - 1), "model")


def sharded(params: dict[str, jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    """Return parameters with the last axis of each cut."""
    return {n: jax.device_put(leaf, NamedSharding(mesh, spec_of(leaf.ndim))) for n, leaf in params.items()}


def private_step(noise_memory: str, mesh: Mesh | None = None) -> PrivateStep:
    """Return the step of Adam by ghost clipping of two rows at a time."""
    mechanism = Mechanism(BMinSep(100, BANDS, 0.1), BandedInverse.bisr(iterations=100, bands=BANDS), 1.0)
    private = privatize(
        mechanism, clip_norm=1.0, expected_batch_size=8, key=np.zeros(8, np.uint32), noise_memory=noise_memory
    )
    return make_step(loss, private, ADAM, clipping="ghost", mesh=mesh, microbatch_size=2)


def memory(shapes, layout: tuple[int, int] | None, noise_memory: str, number: int = BATCH) -> Any:
    """Return what the compiler says of the memory of a step of so many rows on one device."""
    mesh = mesh_of(layout)

    def array(shape, dtype, spec: PartitionSpec = WHOLE):
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    specs = {name: spec_of(len(shape)) for name, shape in shapes.items()}
    step = private_step(noise_memory, mesh)
    copies = 0 if step.private.redraws else step.private.mechanism.strategy.noise_copies
    params = {name: array(shape, jnp.float32, specs[name]) for name, shape in shapes.items()}
    kept = {n: array((copies, *shape), jnp.int32, P(None, *specs[n])) for n, shape in shapes.items()}
    noise = NoiseState(array((), jnp.int32), kept, array((8,), jnp.uint32))
    first, *others = jax.eval_shape(ADAM.init, params)
    first = first._replace(count=array((), jnp.int32), mu=params, nu=params)
    rows = WHOLE if mesh is None else P(mesh.axis_names)
    words = array((number, POSITIONS), jnp.int32, rows)
    state = TrainState(params, noise, (first, *others))
    traced = step.trace(state, {"words": words, "next": words}, array((number,), bool, rows))
    return traced.lower().compile().memory_analysis()


def peer(shapes, layout: tuple[int, int] | None, number: int = BATCH) -> Any:
    """Return the same of jax-privacy's step under `jit`, with as many copies of kept noise.

    Every array with as many axes as a parameter, or one more, has its last axis over the model axis.
    """
    mesh = mesh_of(layout)

    def placed(leaf, spec: PartitionSpec | None = None):
        spec = spec_of(leaf.ndim) if spec is None and leaf.ndim > 1 else spec or WHOLE
        return leaf if mesh is None else leaf.update(sharding=NamedSharding(mesh, spec))

    first, step = peer_of(loss, BANDS, 2, ADAM)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.tree.map(placed, jax.eval_shape(first, params))
    words = placed(jax.ShapeDtypeStruct((number, POSITIONS), jnp.int32), P("data"))
    lowered = jax.jit(step, donate_argnums=0).trace(state, {"words": words, "next": words}).lower()
    return lowered.compile().memory_analysis()


def measured(shapes) -> Iterator[list[str]]:
    """Yield the rows of the record."""
    size = sum(map(math.prod, shapes.values()))
    for name, layout in LAYOUTS.items():
        for rows in (BATCH, 4 * BATCH) if layout == (1, 8) else (BATCH,):
            for noise_memory in ("keep", "recompute") if layout in (None, (1, 8)) else ("keep",):
                yield [name, rows, noise_memory, *copies_of(memory(shapes, layout, noise_memory, rows), size)]
            yield [name, rows, "jax-privacy", *copies_of(peer(shapes, layout, rows), size)]


def copies_of(found, size: int) -> list[str]:
    """Return the memory of a step's arguments and beyond them, in copies of `size` float32 parameters."""
    return [f"{each / (4 * size):.2f}" for each in (found.argument_size_in_bytes, found.temp_size_in_bytes)]


if __name__ == "__main__":
    shapes = asked()
    recorded(
        "sharded_memory",
        question="Memory of a device with sharded parameters, in copies of the parameters",
        order=66,
        columns=["layout", "rows", "noise", "state, copies", "beyond it, copies"],
        rows=measured(shapes),
        note=f"{note_of(shapes)}; by the compiler (`memory_analysis`), for 8 virtual devices. A parameter is "
        "gathered where a layer uses it, and again in the backward pass; its sum is made and scattered a "
        "layer at a time, where its axis of layers is scanned and not cut. Each example's gradient of the "
        "tied table is written down, and summed in float64. The sum of a batch, exact in any order, takes 2 "
        "copies over all devices together.",
    )
