"""Each device of a mesh computes its own rows of a batch, and sums are added across devices once.

`jax.shard_map` fixes which device computes what: XLA's automatic partitioner returns zeros for kernel
gradients of convolutions on all devices but the first (proofs/errata.md).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_MAX_DEVICES = 2**14  # low parts of so many sums, of 16 bits each, add up in 32 bits


def rows_of_each(size: int, mesh: jax.sharding.Mesh | None) -> int:
    """Return how many of `size` rows a device computes; ValueError for an uneven share or a bad mesh."""
    if mesh is None:
        return size
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.size > _MAX_DEVICES:
        was = f"{mesh.size} devices" if isinstance(mesh, jax.sharding.Mesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a jax.sharding.Mesh of at most {_MAX_DEVICES} devices, got {was}")
    if size % mesh.size:
        raise ValueError(f"batch must have a multiple of {mesh.size} rows, one share a device, got {size}")
    return size // mesh.size


def spec_of_rows(mesh: jax.sharding.Mesh) -> jax.sharding.PartitionSpec:
    """Return the layout of a batch: its first axis over all axes of the mesh."""
    return jax.sharding.PartitionSpec(mesh.axis_names)


def over_rows(
    function: Callable[..., tuple[Any, Any]],
    add: Callable[[Any, Sequence[str]], Any],
    mesh: jax.sharding.Mesh | None,
) -> Callable[..., tuple[Any, Any]]:
    """Return `function` of a whole batch, computed by each device for its own rows.

    It is `(whole, pytrees of arrays with a row an example) -> (sum over these rows, pytree of arrays of
    rows)`; the arrays of `whole`, and those it closes over, are whole on every device. `add` is `(sum over
    some rows, axes of the mesh) -> sum over all`, exact in any order; without a mesh there are no axes.
    """
    if mesh is None:

        def on_one(whole, *rows):
            total, found = function(whole, *rows)
            return add(total, ()), found

        return on_one
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)  # losses do not see its axes
    along, same = spec_of_rows(mesh), jax.sharding.PartitionSpec()

    def on_all(whole, *rows):
        leaves, structure = jax.tree.flatten(whole)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)}

        def on_each(arrays, rows):
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            total, found = function(jax.tree.unflatten(structure, given), *rows)
            return add(total, mesh.axis_names), found

        # `check_vma` would require losses to state what varies by device, and add their gradients itself.
        specs = dict(in_specs=(same, along), out_specs=(same, along))
        return jax.shard_map(on_each, mesh=mesh, check_vma=False, **specs)(arrays, rows)

    return on_all


def specs_of(mesh: jax.sharding.Mesh | None, tree) -> tuple[jax.sharding.PartitionSpec, ...]:
    """Return how each leaf is sharded over the mesh; unsharded and traced leaves count as whole."""
    if mesh is None:
        return ()

    def spec(leaf):
        given = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(given, jax.sharding.NamedSharding) and given.mesh.axis_names == mesh.axis_names:
            return given.spec
        return jax.sharding.PartitionSpec()

    return tuple(spec(leaf) for leaf in jax.tree.leaves(tree))


def refuse_several_devices(mesh: jax.sharding.Mesh | None = None, /, **named) -> None:
    """ValueError for arrays, or tracers, on several devices without a mesh."""
    for name, tree in named.items() if mesh is None else ():
        for leaf in jax.tree.leaves(tree):
            number = _num_devices(leaf)
            if number > 1:
                raise ValueError(f"{name} must be on one device where no mesh is given, got on {number}")


def _num_devices(leaf) -> int:
    """Return the number of devices of an array or a tracer."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return len(leaf.sharding.device_set)
    mesh = getattr(getattr(getattr(leaf, "aval", None), "sharding", None), "mesh", None)
    if mesh is None:
        return 1
    # Within a `jax.shard_map` of the caller each device computes by itself already.
    manual = jax.sharding.AxisType.Manual
    return math.prod(
        size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != manual
    )
