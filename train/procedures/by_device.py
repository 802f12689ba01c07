"""Each device of a mesh computes its own rows of a batch, and sums are added across devices once.

Parameters may be sharded over any axes of the mesh: all that is kept then is, with the noise (each device
draws that of its own numbers) and the totals of a batch. For its rows a device gathers the parameters.

`jax.shard_map` fixes which device computes what: XLA's automatic partitioner returns zeros for kernel
gradients of convolutions on all devices but the first (proofs/errata.md).
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxacct.common import validate as _validate

from ..noise.normals import Cut


def rows_of_each(size: int, mesh: jax.sharding.Mesh | None) -> int:
    """Return how many of `size` rows a device computes; ValueError for an uneven share or a bad mesh."""
    if mesh is None:
        return size
    _validate.instance("mesh", mesh, jax.sharding.Mesh, "a jax.sharding.Mesh")
    if size % mesh.size:
        raise ValueError(f"batch must have a multiple of {mesh.size} rows, one share a device, got {size}")
    return size // mesh.size


def automatic(mesh: Any) -> jax.sharding.Mesh:
    """Return the mesh with all axes left to the compiler: losses and optimizers do not see them."""
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def apart() -> contextlib.AbstractContextManager:
    """Return a context without the mesh that the caller has set, if any (`jax.set_mesh`).

    A program that is being traced keeps the mesh that it has.
    """
    if jax.sharding.get_abstract_mesh().empty or isinstance(jnp.zeros(()), jax.core.Tracer):
        return contextlib.nullcontext()
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def axes_as_in(mesh: jax.sharding.Mesh | None, tree):
    """Return a pytree whose arrays over the same devices have axes of the kind that `mesh` has.

    No number moves: an array over explicit axes and one over automatic axes differ in their types alone.
    """
    if mesh is None:
        return tree
    own = automatic(mesh)

    def typed(leaf):
        given: Any = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if not isinstance(given, jax.sharding.NamedSharding) or given.mesh == mesh:
            return leaf
        to = jax.sharding.NamedSharding(mesh, given.spec)
        return jax.device_put(leaf, to) if automatic(given.mesh) == own else leaf

    return jax.tree.map(typed, tree)


def spec_of_rows(mesh: jax.sharding.Mesh) -> PartitionSpec:
    """Return the layout of a batch: its first axis over all axes of the mesh."""
    return PartitionSpec(mesh.axis_names)


class Across(NamedTuple):
    """Sums over the devices of a mesh, within `jax.shard_map`, and the part of each that a device keeps.

    Attributes:
      specs: how each array of a sum is sharded.
      unit: what is added up is a multiple of it, so that sums are exact in any order.
    """

    axes: tuple[str, ...]
    specs: tuple[PartitionSpec, ...]
    unit: float

    def added(self, number: int, array, skipped: int = 0) -> jax.Array:
        """Return a device's part of the sum over all devices of one array of a sum, by its number there.

        It is rounded to `unit` first; without its `skipped` first axes, which are not cut, it is one row.
        """
        spec = PartitionSpec(*self.specs[number][skipped:])
        array = jnp.round(array.astype(jnp.float64) / self.unit) * self.unit
        for at, axes in cut_axes(spec):
            array = jax.lax.psum_scatter(array, axes, scatter_dimension=at, tiled=True)
        over = {axis for _, axes in cut_axes(spec) for axis in axes}
        rest = tuple(axis for axis in self.axes if axis not in over)
        return jax.lax.psum(array, rest) if rest else array

    def all(self, sound) -> jax.Array:
        """Return () bool: whether it holds on all devices."""
        return jax.lax.pmin(jnp.asarray(sound, jnp.int32), self.axes) > 0


def cut_axes(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """Return each axis of an array that is cut, and the axes of the mesh that cut it."""
    found = [(at, part if isinstance(part, tuple) else (part,)) for at, part in enumerate(spec)]
    return [(at, axes) for at, axes in found if axes not in ((None,), ())]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["cuts"])
@dataclass(frozen=True)
class Shard:
    """A device's part of a parameter, within `jax.shard_map`; a scan over its first axes has those of a pass.

    Attributes:
      array: the part.
      cuts: axes that are cut, counted from the last (-1), and the axes of the mesh that cut them.
    """

    array: Any
    cuts: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def of(cls, array, spec: PartitionSpec) -> Any:
        """Return the part with how it is cut; the array where it is whole."""
        cuts = tuple((at - array.ndim, axes) for at, axes in cut_axes(spec))
        return cls(array, cuts) if cuts else array

    def is_whole_along(self, first: int) -> bool:
        """Return whether none of the first axes is cut."""
        return all(at + self.array.ndim >= first for at, _ in self.cuts)


def is_shard(leaf) -> bool:
    """Return whether it is a `Shard`."""
    return isinstance(leaf, Shard)


def whole(tree):
    """Return a pytree with every `Shard` gathered."""

    def gathered(leaf):
        if not is_shard(leaf):
            return leaf
        array = leaf.array
        for at, axes in leaf.cuts:
            array = jax.lax.all_gather(array, axes, axis=at + array.ndim, tiled=True)
        return array

    return jax.tree.map(gathered, tree, is_leaf=is_shard)


def own_cut(shape: tuple[int, ...], spec: PartitionSpec, mesh: jax.sharding.Mesh) -> Cut:
    """Return which part of an array of this shape a device has, within `jax.shard_map`."""
    part: list[int] = list(shape)
    begin: list[Any] = [0] * len(shape)
    for at, axes in cut_axes(spec):
        part[at] //= math.prod(mesh.shape[axis] for axis in axes)
        begin[at] = jax.lax.axis_index(axes) * part[at]
    return Cut(shape, tuple(part), tuple(begin))


def over_rows(
    function: Callable[..., tuple[Any, Any]],
    add: Callable[[Any, Across | None], Any],
    sum_of: Callable[[Any], Any],
    mesh: jax.sharding.Mesh | None,
    specs: tuple[PartitionSpec, ...],
    unit: float,
) -> Callable[..., tuple[Any, Any]]:
    """Return `run(loss, params, *rows)` of a whole batch, each device computing its own rows.

    `function` is `((loss, params), Across, *pytrees of arrays with a row an example) -> (sum over these
    rows, pytree of arrays of rows)`; its parameters are `Shard`s where they are cut, and all else is whole.
    `add` is `(sum over some rows, Across) -> sum over all`, exact in any order. `Across` has `unit`, and is
    None without a mesh. Parameters, and the parts of the sum, are sharded by `specs`, not at all where it is
    empty; `sum_of` is (pytree like the parameters) -> the sum of these parts.
    """
    if mesh is None:

        def on_one(loss, params, *rows):
            total, found = function((loss, params), None, *rows)
            return add(total, None), found

        return on_one
    mesh = automatic(mesh)
    along, same = spec_of_rows(mesh), PartitionSpec()

    def on_all(loss, params, *rows):
        leaves, structure = jax.tree.flatten(loss)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)}
        numbers, like = jax.tree.flatten(params)
        over = Across(mesh.axis_names, specs or (same,) * len(numbers), unit)

        def on_each(arrays, parts, rows):
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            shards = [Shard.of(*each) for each in zip(parts, over.specs, strict=True)]
            both = jax.tree.unflatten(structure, given), jax.tree.unflatten(like, shards)
            total, found = function(both, over, *rows)
            return add(total, over), found

        sharded = list(over.specs)
        total = sum_of(jax.tree.unflatten(like, sharded))
        # `check_vma` would require losses to state what varies by device, and add their gradients itself.
        laid_out: dict[str, Any] = dict(in_specs=(same, sharded, along), out_specs=(total, along))
        return jax.shard_map(on_each, mesh=mesh, check_vma=False, **laid_out)(arrays, numbers, rows)

    return on_all


def specs_of(mesh: jax.sharding.Mesh | None, tree) -> tuple[PartitionSpec, ...]:
    """Return how each leaf is sharded over the mesh; unsharded and traced leaves count as whole.

    Raises:
      ValueError: for one that is sharded over another mesh.
    """
    return () if mesh is None else tuple(spec_on(mesh, leaf) for leaf in jax.tree.leaves(tree))


def spec_on(mesh: jax.sharding.Mesh, leaf, named=None) -> PartitionSpec:
    """Return how an array is, or by `named` (a `PartitionSpec`) is to be, sharded over the mesh.

    Raises:
      ValueError: for a sharding over another mesh, or one whose axes the mesh does not have or that do not
        divide the array.
    """
    given = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if isinstance(given, jax.sharding.NamedSharding) and cut_axes(given.spec):
        if automatic(mesh) != automatic(given.mesh):
            raise ValueError(
                f"model must be sharded over mesh {_shown(mesh)} or not at all, got {given.spec} over "
                f"another mesh, {_shown(given.mesh)}"
            )
        named = given.spec
    if named is None:
        return PartitionSpec()
    for at, axes in cut_axes(named):
        if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
            raise ValueError(f"model must be sharded over axes of mesh {_shown(mesh)}, got {unknown[0]!r}")
        number = math.prod(mesh.shape[axis] for axis in axes)
        if at >= np.ndim(leaf) or np.shape(leaf)[at] % number:
            raise ValueError(
                f"model must have arrays that the axes of mesh divide: {named} cuts axis {at} of shape "
                f"{np.shape(leaf)} into {number} parts"
            )
    each = [axis for _, axes in cut_axes(named) for axis in axes]
    if len(set(each)) < len(each):
        raise ValueError(f"model must be cut by each axis of mesh once, got {named}")
    # As programs return it: another spec of the same parts would be compiled again.
    parts: list[Any] = [None] * np.ndim(leaf)
    for at, axes in cut_axes(named):
        cutting = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        parts[at] = cutting if len(cutting) > 1 else next(iter(cutting), None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def layout(mesh: jax.sharding.Mesh | None, params) -> str | None:
    """Return a text on the axes of a mesh, with a digest of how parameters are sharded; None without one."""
    if mesh is None:
        return None
    specs = repr([cut_axes(spec) for spec in specs_of(mesh, params)])
    return f"{_shown(mesh)}, sharding {hashlib.sha256(specs.encode()).hexdigest()[:8]}"


def _shown(mesh) -> str:
    return str(dict(mesh.shape))


def over(mesh: jax.sharding.Mesh | None, specs: tuple[PartitionSpec, ...], tree, place=jax.device_put):
    """Return a pytree with each leaf sharded by its spec; without a mesh the pytree itself.

    In a program `place` is `jax.lax.with_sharding_constraint`.
    """
    if mesh is None:
        return tree
    mesh = automatic(mesh)
    leaves, structure = jax.tree.flatten(tree)
    placed = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    return jax.tree.unflatten(structure, place(leaves, placed))


def refuse_explicit_axes(**named) -> None:
    """ValueError for arrays, or tracers, over explicit axes, as operations of ours do not state types."""
    explicit = jax.sharding.AxisType.Explicit
    for name, tree in named.items():
        for leaf in jax.tree.leaves(tree):
            mesh = getattr(getattr(getattr(leaf, "aval", None), "sharding", None), "mesh", None)
            if mesh is not None and explicit in mesh.axis_types:
                raise ValueError(
                    f"{name} must be over automatic axes, jax.sharding.Mesh(mesh.devices, mesh.axis_names), "
                    "got explicit ones, which fit and make_step take outside of jax.jit"
                )


def refuse_several_devices(mesh: jax.sharding.Mesh | None = None, /, **named) -> None:
    """ValueError for arrays, or tracers, on several devices without a mesh; over one, of explicit axes."""
    if mesh is not None:
        refuse_explicit_axes(**named)
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
