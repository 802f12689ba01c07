"""Several processes of `jax.distributed` train one model over one mesh: what they share, what each may see.

All processes must draw the same batches and the same noise. With keys of its own each would release a sum of
the same data with noise of its own, and averaging would remove noise that the plan counts on. So keys come
from process 0, and whatever decides what is computed is compared before the first step.

Every process holds the noise key (each device draws the noise of its parameters) and the sampling key (to
find its own rows): each alone can remove the noise. So all of them, and the network between them, which
carries both keys unencrypted, are inside the boundary of trust. A process reads only the rows that its own
devices compute (all rows once for the fingerprint); of other rows it receives sums, which are as private as
rows. Files are written by process 0 alone.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxacct.common.validate import in_one_line

from ..noise.normals import key_of_run


def several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes the files."""
    return jax.process_index() == 0


def check(options, batches) -> None:
    """ValueError, on all processes, for what several processes cannot train together on one of them."""
    if not several():
        return
    flaw = _flaw(options, batches)
    everyone = np.asarray(multihost_utils.process_allgather(np.array([flaw is not None]))).ravel()
    if flaw is None and everyone.any():
        flaw = f"options must be valid on all processes, were not on {np.flatnonzero(everyone).tolist()}"
    if flaw is not None:
        raise ValueError(flaw)


def _flaw(options, batches) -> str | None:
    number, mesh = jax.process_count(), options.mesh
    if mesh is None:
        return (
            f"mesh must be given with {number} processes: without it each would train by itself, with noise "
            "of its own"
        )
    found = {device.process_index for device in mesh.devices.flat}
    if found != set(range(number)):
        return f"mesh must have devices of all {number} processes, had those of {sorted(found)}"
    if batches is not None:
        return "batches must not be given with several processes: each would read its own"
    return None


def first(function: Callable[[], Any]):
    """Return what `function()`, JSON values, is on process 0; its error is raised on all."""
    if not several():
        return function()
    answer, error = {}, None
    if is_first():
        try:
            answer = {"value": function()}
            json.dumps(answer)
        except Exception as failure:
            answer, error = {"error": in_one_line(failure)}, failure
    answer = json.loads(_sent(json.dumps(answer).encode()))
    if error is not None:
        raise error
    if "error" in answer:
        raise ValueError(f"process 0 stopped: {answer['error']}")
    return answer["value"]


def keys(given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return (sampler key, noise key) of process 0, with a fresh noise key where it is None."""
    if not several():
        return given
    sampler, noise = first(
        lambda: [[int(word) for word in each] for each in (given[0], key_of_run(given[1], ()))]
    )
    return tuple(sampler), np.array(noise, np.uint32)


def agree(**values) -> None:
    """ValueError, on all processes, where one has another value, by the name of the first that differs."""
    if not several():
        return
    texts = [json.dumps(value, sort_keys=True, default=str).encode() for value in values.values()]
    own = np.stack(
        [np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint8) for text in texts]
    )
    everyone = np.asarray(multihost_utils.process_allgather(own))
    for place, name in enumerate(values):
        if (everyone[:, place] != everyone[0, place]).any():
            raise ValueError(f"{name} must be the same on all processes, was different on some")


def on(mesh: jax.sharding.Mesh, leaf, spec: jax.sharding.PartitionSpec):
    """Return an array over the mesh; with several processes of the same numbers on each."""
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if not several() or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = on(mesh, jax.random.key_data(leaf), spec)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def rows_on(mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec, take, indices, size: int):
    """Return a batch of `size` rows over the mesh, of which each process reads those of its own devices.

    `take` is (indices, number) -> pytree of arrays (number, ...), padded.
    """
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if not several():
        return jax.device_put(take(indices, size), sharding)
    local_places: Any = sharding.addressable_devices_indices_map((size,))
    own = {places[0].indices(size)[:2] for places in local_places.values()}
    parts = {(begin, end): take(indices[begin:end], end - begin) for begin, end in sorted(own)}

    def placed(*leaves):
        read = dict(zip(parts, leaves, strict=True))
        shape = (size, *leaves[0].shape[1:])

        def rows_at(places: Any):
            return read[places[0].indices(size)[:2]]

        return jax.make_array_from_callback(shape, sharding, rows_at)

    return jax.tree.map(placed, *parts.values())


def local(tree):
    """Return a pytree of arrays over several processes as arrays of this one, NumPy's where sharded.

    All processes must call it together where `is_cut`.
    """
    if not several():
        return tree

    def of_this(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        if not leaf.is_fully_replicated:
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return jnp.asarray(np.asarray(leaf))

    return jax.tree.map(of_this, tree)


def is_cut(tree) -> bool:
    """Return whether parts of an array are with other processes alone."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return several() and not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in arrays)


def on_host(tree):
    """Return a pytree that `local` returned as arrays of NumPy, which one process can write."""
    return jax.tree.map(np.asarray, tree) if several() else tree


def spread(mesh: jax.sharding.Mesh | None, tree, specs):
    """Return the pytree of process 0 over the mesh, each leaf by its spec; itself where there is one process.

    The arrays of others, which must have the same shapes, are not read.
    """
    if mesh is None or not several():
        return tree

    def sent(leaf, spec):
        content = np.asarray(leaf).tobytes() if is_first() else b""
        array = np.frombuffer(_sent(content), leaf.dtype).reshape(leaf.shape)
        return on(mesh, array, spec)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [sent(*each) for each in zip(leaves, specs, strict=True)])


def orbax_options() -> ocp.options.MultiprocessingOptions:
    """Return options with which process 0 writes by itself."""
    if not several():
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxacct"
    )


def _sent(content: bytes) -> bytes:
    """Return the bytes of process 0, sent as integers: sums of floats with zeros lose the sign of -0."""
    length = int(multihost_utils.broadcast_one_to_all(np.uint32(len(content))))
    own = np.frombuffer(content, np.uint8) if is_first() else np.zeros(length, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own), np.uint8).tobytes()
