"""Correlated noise `C^{-1} z`, streamed: the last bands - 1 noise vectors are all that is kept.

With C Toeplitz, `w = C^{-1} z` obeys `c_0 w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}`. Adding
`clip_norm sigma w_t` to the sum of clipped gradients of step t releases `C^{-1} (C x + sigma z)`, which is
what was accounted for (arXiv 2602.09338, section 2). One band is plain DP-SGD. Where the inverse h is banded,
the
last vectors z are kept instead: `w_t = h_0 z_t + .. + h_{b-1} z_{t-b+1}`.

The buffer is kept in float32. Rounding it (to bfloat16, say) would make the released noise a rounded
function of itself rather than the Gaussian of the guarantee, so that is not offered.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxacct.strategies import Strategy


class NoiseState(NamedTuple):
    """What is kept between steps; secret."""

    step: jax.Array
    """() int32: vectors drawn so far."""
    recent: Any
    """Pytree like the parameters with a leading axis: the last vectors `w` (or `z`), a ring."""
    key: jax.Array
    """(2, 2) uint32: two threefry keys; the draws of a step depend on them and the step alone."""


def fresh_key() -> np.ndarray:
    """(2, 2) uint32 from the operating system's generator: 128 secret bits."""
    return np.frombuffer(os.urandom(16), np.uint32).reshape(2, 2)


def init(strategy: Strategy, params, key) -> NoiseState:
    """The state before the first step; the buffer is sharded like the parameters.

    Args:
      strategy: C.
      params: pytree of arrays.
      key: (2, 2) uint32.
    """

    def zeros(leaf):
        shape = (strategy.noise_copies, *jnp.shape(leaf))
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
            return jnp.zeros(shape, jnp.float32, device=sharding)
        return jnp.zeros(shape, jnp.float32)

    words = jnp.asarray(key, jnp.uint32).reshape(2, 2)
    return NoiseState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), words)


def draw(strategy: Strategy, state: NoiseState, params) -> tuple[Any, NoiseState]:
    """`w_t` for unit noise, a pytree like `params` in float32, and the state after it. Jittable."""
    c, inverse = strategy.noise_recursion()
    kept = len(c) - 1
    fresh = standard_normals(state.key, state.step, params)
    if kept == 0:
        return fresh, state._replace(step=state.step + 1)
    place = state.step % kept
    # Slot j holds the vector of age 1 + (place - 1 - j) mod (b - 1), and zeros before the first steps.
    ages = 1 + (place - 1 - jnp.arange(kept)) % kept
    weights = jnp.asarray(c, jnp.float32)[ages]

    def solve(z, recent):
        earlier = jnp.tensordot(weights, recent, axes=1)
        first = jnp.float32(c[0])
        return first * z + earlier if inverse else (z - earlier) / first

    drawn = jax.tree.map(solve, fresh, state.recent)
    recent = jax.tree.map(
        lambda ring, w: jax.lax.dynamic_update_index_in_dim(ring, w, place, 0),
        state.recent,
        fresh if inverse else drawn,
    )
    return drawn, NoiseState(state.step + 1, recent, state.key)


def standard_normals(key, step, params):
    """Independent standard normals for one step, a pytree like `params` in float32.

    The sum of two normals of half the variance, one from each threefry key: either key alone, 64 bits, is
    within reach of a search; both together are not.
    """
    leaves, structure = jax.tree.flatten(params)

    def normal(index, leaf):
        parts = []
        for words in key:
            one = jax.random.wrap_key_data(words, impl="threefry2x32")
            one = jax.random.fold_in(jax.random.fold_in(one, step), index)
            parts.append(jax.random.normal(one, jnp.shape(leaf), jnp.float32))
        return (parts[0] + parts[1]) * jnp.float32(np.sqrt(0.5))

    return jax.tree.unflatten(structure, [normal(i, leaf) for i, leaf in enumerate(leaves)])
