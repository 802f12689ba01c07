"""Correlated noise `C^{-1} z` in whole numbers, streamed: the last bands - 1 vectors are all that is kept.

With C Toeplitz, `w = C^{-1} z` obeys `c_0 w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}`. Here every `w_t`
is rounded to an integer, and the earlier integers are what the next ones are made from:

    W_t = round((levels z_t - c_1 W_{t-1} - .. - c_{b-1} W_{t-b+1}) / c_0).

Added to integer sums g_t this releases `r_t = round((u_t - c_1 r_{t-1} - ..) / c_0)` of `u = C g + levels z`,
so it is a function of what was accounted for (arXiv 2602.09338, section 2) and of nothing else; the proof
is in proofs/released_numbers.md. One band is plain DP-SGD. Where the inverse h is banded, vectors z on a grid
are kept instead: `W_t = round(levels (h_0 z_t + .. + h_{b-1} z_{t-b+1}))`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import signal

from jaxacct.strategies import Strategy

from .normals import LARGEST, fresh_key, standard_normals

_FRACTION = 2.0**7  # kept z are integers in units of 1/128 grid unit
_AT_A_TIME = 8  # kept vectors that one pass over memory adds up


class NoiseState(NamedTuple):
    """What is kept between steps; secret."""

    step: jax.Array
    """() int32: vectors drawn so far."""
    recent: Any
    """Pytree like the parameters with a leading axis, int32: the last vectors `W` (or `z`), a ring."""
    key: jax.Array
    """(8,) uint32: the draws of a step depend on it and the step alone."""


def init(strategy: Strategy, params, key) -> NoiseState:
    """The state before the first step; the buffer is sharded like the parameters.

    Args:
      strategy: C.
      params: pytree of arrays.
      key: (8,) uint32.
    """

    def zeros(leaf):
        shape = (strategy.noise_copies, *jnp.shape(leaf))
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
            return jnp.zeros(shape, jnp.int32, device=sharding)
        return jnp.zeros(shape, jnp.int32)

    words = jnp.asarray(key, jnp.uint32)
    if words.shape != (8,):
        raise ValueError(f"key must be 8 words of 32 bits, had shape {words.shape}")
    return NoiseState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), words)


def largest_levels(strategy: Strategy, iterations: int) -> float:
    """The most `levels` at which no integer of `iterations` steps can leave 32 bits, whatever the key."""
    c, inverse = strategy.noise_recursion()
    if inverse:
        # The kept z are finer than the grid; the noise itself is their sum.
        gain = max(_FRACTION * c[0], np.abs(c).sum())
    else:
        impulse = np.zeros(iterations)
        impulse[0] = 1.0
        gain = np.abs(signal.lfilter([1.0], c, impulse)).sum()
        # Every rounding is an input of at most c_0 / 2 more: from 2^8 levels on less than one part in a
        # thousand, which the 1.001 covers.
    return float((2**31 - 1) / (1.001 * gain * LARGEST))


def draw(strategy: Strategy, levels: float, state: NoiseState, params) -> tuple[Any, NoiseState]:
    """`W_t`, a pytree like `params` in int32, and the state after it. Jittable, exact whatever the x64 flag.

    Args:
      strategy: C.
      levels: standard deviation of `z` in grid units, from 2^8 to `largest_levels`.
      state: from `init` or the call before.
      params: pytree of arrays; only shapes matter.
    """
    c, inverse = strategy.noise_recursion()
    kept = len(c) - 1
    leaves, structure = jax.tree.flatten(params)
    sizes = [int(np.prod(jnp.shape(leaf))) for leaf in leaves]
    fresh = jax.lax.split(standard_normals(state.key, state.step, sum(sizes)), sizes)
    place = state.step % max(1, kept)
    with jax.enable_x64(True):
        deviation = jnp.float64(levels * c[0] if inverse else levels / c[0])
        # Slot j holds the vector of age 1 + (place - 1 - j) mod (b - 1), and zeros before the first steps.
        ages = 1 + (place - 1 - jnp.arange(kept, dtype=jnp.int32)) % max(1, kept)
        weights = jnp.asarray(c / (c[0] * _FRACTION) if inverse else -c / c[0], jnp.float64)[ages]

        def solve(z, ring):
            shape = ring.shape[1:]
            z = deviation * z.reshape(shape)
            if inverse:
                units = jnp.round(_FRACTION * z)
                drawn = jnp.round(units / _FRACTION + _weighted_sum(weights, ring)).astype(jnp.int32)
                return drawn, units.astype(jnp.int32)
            drawn = jnp.round(z + _weighted_sum(weights, ring)).astype(jnp.int32)
            return drawn, drawn

        rings = jax.tree.leaves(state.recent)
        both = [solve(z, ring) for z, ring in zip(fresh, rings, strict=True)]
    if kept:
        rings = [
            jax.lax.dynamic_update_index_in_dim(ring, keep, place, 0)
            for ring, (_, keep) in zip(rings, both, strict=True)
        ]
    drawn = jax.tree.unflatten(structure, [drawn for drawn, _ in both])
    return drawn, NoiseState(state.step + 1, jax.tree.unflatten(structure, rings), state.key)


def _weighted_sum(weights, ring):
    """Sum over the first axis, in float64 and without a float64 copy of the ring."""
    groups, rest = divmod(ring.shape[0], _AT_A_TIME)

    def add(first, number, total):
        for i in range(number):
            total = total + weights[first + i] * ring[first + i].astype(jnp.float64)
        return total

    total = jnp.zeros(ring.shape[1:], jnp.float64)
    if groups:
        total = jax.lax.fori_loop(0, groups, lambda g, t: add(g * _AT_A_TIME, _AT_A_TIME, t), total)
    return add(groups * _AT_A_TIME, rest, total)


__all__ = ["NoiseState", "draw", "fresh_key", "init", "largest_levels", "standard_normals"]
