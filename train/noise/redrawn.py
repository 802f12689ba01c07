"""Noise of a banded inverse that is kept nowhere: earlier vectors are drawn again from the key.

`W_t = floor(levels (h_0 z_t + .. + h_{b-1} z_{t-b+1}) + 1/2)` is made of the last b vectors z on their grid
(`train.noise.recursion`), and each is a function of the key and its step. So b draws a step take the place of
b - 1 copies of the parameters, in memory and in checkpoints. One loop draws all ages: a vector is the same
integers in each of the b steps that it is part of, as rounding is that of one compiled loop.
"""

import jax
import jax.numpy as jnp

from jaxacct.strategies import NoiseRecursion, Strategy

from .normals import Cut, key_of_run, normals_of
from .pieces import groups_of
from .recursion import FRACTION, LastVectors, NoiseState

KEEP, RECOMPUTE = "keep", "recompute"


def check(strategy: Strategy) -> NoiseRecursion:
    """Return the recursion; ValueError for a matrix whose noise is no sum of a few fresh vectors."""
    recursion = strategy.noise_recursion()
    if not (isinstance(recursion, NoiseRecursion) and recursion.of_inverse):
        raise ValueError(
            f"noise_memory must be 'keep' for {strategy.describe()}, whose inverse is not banded; calibrate "
            "with --memory-copies 0, which selects an inverse of up to 8 bands by its error"
        )
    return recursion


def init(params, key) -> NoiseState:
    """Return the state before the first step; arguments as of `train.noise.recursion.init`."""
    nothing = jax.tree.map(lambda leaf: jnp.zeros((0, *jnp.shape(leaf)), jnp.int32), params)
    return NoiseState(jnp.zeros((), jnp.int32), nothing, key_of_run(key, params))


def draw(strategy: Strategy, levels: float, state: NoiseState, params, *, cuts=None) -> tuple:
    """Return `train.noise.recursion.draw`: the same integers, of vectors that are all drawn here.

    ValueError for a state that keeps vectors: those would be of earlier steps wherever it is used again.
    """
    if any(leaf.shape[0] for leaf in jax.tree.leaves(state.recent)):
        raise ValueError("noise_memory must be 'keep' for this state, which keeps earlier vectors")
    leaves, structure = jax.tree.flatten(params)
    arrays = [jnp.shape(leaf) for leaf in leaves] if cuts is None else list(cuts)
    with jax.enable_x64(True):
        stream = LastVectors(check(strategy))
        _, ages, weights = stream.slots(state.step)
        ages = jnp.append(ages, jnp.zeros(1, ages.dtype))
        weights = jnp.append(weights, 1 / FRACTION)

        def drawn(arrays, only) -> list[jax.Array]:
            """Return the noise of arrays, by their numbers."""

            def add(totals, each):
                age, weight = each
                drawn = normals_of(state.key, jnp.maximum(state.step - age, 0), arrays, only)
                vectors = [jnp.where(age <= state.step, stream.fresh(levels, z), 0) for z in drawn]
                pairs = zip(totals, vectors, strict=True)
                return [total + weight * vector.astype(jnp.float64) for total, vector in pairs], None

            zeros = [jnp.zeros(Cut.of(arrays[i]).shape, jnp.float64) for i in only]
            totals, _ = jax.lax.scan(add, zeros, (ages, weights))
            return [jnp.floor(total + 0.5).astype(jnp.int32) for total in totals]

        small, groups = groups_of(arrays)
        found = dict(zip(small, drawn(arrays, small) if small else (), strict=True))
        for group in groups:
            own = list(group.pieces)
            of_pieces = jax.lax.map(
                lambda number, group=group, own=own: drawn(group.among(arrays, number), own),
                jnp.arange(group.turns),
            )
            for i, noise in zip(own, of_pieces, strict=True):
                found[i] = noise.reshape(group.pieces[i].cut.shape)
    noise = jax.tree.unflatten(structure, [found[i] for i in range(len(arrays))])
    return noise, state._replace(step=state.step + 1)
