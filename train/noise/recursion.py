"""Correlated noise `C^{-1} z` in whole numbers, streamed: the last bands - 1 vectors are all that is kept.

With C Toeplitz, `w = C^{-1} z` obeys `c_0 w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}`. Here every `w_t`
is rounded to an integer, and the earlier integers are what the next ones are made from:

    W_t = round((levels z_t - c_1 W_{t-1} - .. - c_{b-1} W_{t-b+1}) / c_0).

Added to integer sums g_t this releases `r_t = round((u_t - c_1 r_{t-1} - ..) / c_0)` of `u = C g + levels z`,
so it is a function of what was accounted for (arXiv 2602.09338, section 2) and of nothing else; the proof
is in proofs/released_numbers.md. Where the inverse h is banded, vectors z on a grid are kept instead:
`W_t = floor(levels (h_0 z_t + .. + h_{b-1} z_{t-b+1}) + 1/2)`. Where c is a sum of exponentials, running sums
of the W are, two copies each. One band is plain DP-SGD.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import signal

from jaxacct.strategies import BufferedRecursion, NoiseRecursion, Strategy

from ..clipping.joined import Layout
from ..procedures.stored import stored
from .normals import LARGEST, fresh_key, key_of_run, normals_of, split, standard_normals
from .pieces import groups_of

FRACTION = 2.0**7  # kept z are integers in units of 1/128 grid unit
_FINE = 2.0**-31  # of the unit of a running sum
_AT_A_TIME = 16  # kept vectors that one pass over memory adds up


class NoiseState(NamedTuple):
    """What is kept between steps; secret.

    Attributes:
      step: () int32: vectors drawn so far.
      recent: pytree like the parameters with a leading axis, int32: the last `W` (or `z`), or running sums.
      key: (8,) uint32: the draws of a step depend on it and the step alone.
    """

    step: Any
    recent: Any
    key: Any

    def __repr__(self) -> str:
        """Return the step alone: messages of errors may show a state, as that of a static argument does."""
        return f"NoiseState(step={self.step}, secret)"


def init(strategy: Strategy, params, key) -> NoiseState:
    """Return the state before the first step; the buffer is sharded like the parameters.

    Args:
      strategy: C.
      params: pytree of arrays.
      key: (8,) uint32; None to draw a fresh one.

    Raises:
      ValueError: as `train.noise.normals.key_of_run`.
    """

    def zeros(leaf):
        shape = (strategy.noise_copies, *jnp.shape(leaf))
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
            return jnp.zeros(shape, jnp.int32, device=sharding)
        # `jnp.zeros` compiles a program for every shape; what aliases memory of NumPy's cannot be donated.
        return jax.device_put(np.zeros(shape, np.int32), may_alias=False)

    recent = jax.tree.map(zeros, params)
    return NoiseState(jnp.zeros((), jnp.int32), recent, key_of_run(key, params))


def max_levels(strategy: Strategy, iterations: int) -> float:
    """Return the largest `levels` at which no integer of `iterations` steps exceeds 32 bits, for any key."""
    # Every rounding is an input of at most c_0 / 2 more: from 2^8 levels on less than one part in a thousand,
    # which the 1.001 covers.
    return float((2**31 - 1) / (1.001 * _stream_of(strategy).reach(iterations) * LARGEST))


def draw(
    strategy: Strategy, levels: float, state: NoiseState, params, *, cuts=None, normals=None
) -> tuple[Any, NoiseState]:
    """Return `W_t`, a pytree like `params` in int32, and the next state; jittable, exact for any x64 flag.

    Args:
      strategy: C.
      levels: standard deviation of `z` in grid units, from 2^8 to `max_levels`.
      state: from `init` or the call before.
      params: pytree of arrays; only shapes matter.
      cuts: parts of the parameters that `params` are, a `train.noise.normals.Cut` each; by default all.
      normals: `standard_normals` of this state's key and step where another program drew them.

    Raises:
      ValueError: for normals that are no longer float64, as JAX makes float32 of NumPy's arrays.
    """
    arrays = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)] if cuts is None else list(cuts)
    if normals is None:
        small, groups = groups_of(arrays)
        vectors = normals_of(state.key, state.step, arrays, small)
    else:
        small, groups, vectors = range(len(arrays)), [], split(normals, arrays)
    for z in vectors:
        if z.dtype != np.float64:
            raise ValueError(f"normals must be float64, got {z.dtype}")
    rings, structure = jax.tree.flatten(state.recent)
    drawn = list(rings)
    with jax.enable_x64(True):
        stream = _stream_of(strategy)
        solve, renewed, slot = stream.at(levels, state.step)

        def advanced(vectors, rings, apart=()) -> list[tuple[jax.Array, jax.Array | None]]:
            """Return of each array its noise, and what of its ring is new; None where nothing is kept."""
            layout = Layout.of(vectors, apart)
            fresh = [stream.fresh(levels, z) for z in layout.join(vectors, 0)]
            joined = layout.join(rings)
            made = [solve(*each) for each in zip(fresh, joined, strict=True)]
            made = _stored(made) if strategy.noise_copies else made  # else nothing is read twice
            drawn = layout.split([first for first, *_ in made])
            if not strategy.noise_copies:
                return [(noise, None) for noise in drawn]
            news = layout.where(
                state.step >= 0, lambda ring, each: renewed(ring, *each), 0, joined, made, axes=1
            )
            return list(zip(drawn, news, strict=True))

        found = advanced(vectors, [rings[i] for i in small]) if small else ()
        for i, (noise, new) in zip(small, found, strict=True):
            drawn[i] = noise
            if new is not None:
                rings[i] = jax.lax.dynamic_update_slice_in_dim(rings[i], new, slot, 0)
        for group in groups:
            own = list(group.pieces)

            def turn(kept, number, group=group, own=own):
                vectors = normals_of(state.key, state.step, group.among(arrays, number), own)
                given = [z.reshape(-1) for z in vectors], [_OfPiece(ring, number) for ring in kept]
                found = advanced(*given, apart=range(len(own)))
                at = slot, number, np.int32(0)
                kept = [
                    ring if new is None else jax.lax.dynamic_update_slice(ring, new[:, None], at)
                    for ring, (_, new) in zip(kept, found, strict=True)
                ]
                return kept, [noise for noise, _ in found]

            sizes = [math.prod(pieces.shape) for pieces in group.pieces.values()]
            by_piece = [rings[i].reshape(-1, group.turns, size) for i, size in zip(own, sizes, strict=True)]
            found = jax.lax.scan(turn, by_piece, jnp.arange(group.turns, dtype=jnp.int32))
            for i, ring, noise in zip(own, *found, strict=True):
                drawn[i], rings[i] = noise.reshape(group.pieces[i].cut.shape), ring.reshape(rings[i].shape)
    noise, recent = (jax.tree.unflatten(structure, leaves) for leaves in (drawn, rings))
    return noise, NoiseState(state.step + 1, recent, state.key)


class _OfPiece:
    """One piece of each vector of a ring (copies, pieces, numbers), read where it is used."""

    def __init__(self, ring, number):
        self.ring, self.number, self.shape = ring, number, (len(ring), ring.shape[2])

    def __len__(self) -> int:
        return len(self.ring)

    def __getitem__(self, at):
        return self.ring[at, self.number]


def _stored(integers):
    """Return a pytree of integers that are stored before they are read; none may be the lowest number."""

    def is_sound(state):
        return jnp.stack([(n > jnp.iinfo(n.dtype).min).all() for n in jax.tree.leaves(state)]).all()

    raised = functools.partial(jax.tree.map, lambda n: jnp.maximum(n, jnp.iinfo(n.dtype).min + 1))
    return stored(integers, is_sound, raised)


class LastVectors:
    """The last few `W` (or `z`, where the inverse is banded) in a ring."""

    def __init__(self, recursion: NoiseRecursion):
        self.c, self.of_inverse = recursion
        self.kept = recursion.copies

    def reach(self, iterations: int) -> float:
        """Return the largest 32-bit number per unit of `levels` and of the largest normal."""
        if self.of_inverse:
            # The kept z are finer than the grid; the noise itself is their sum.
            return max(FRACTION * self.c[0], np.abs(self.c).sum())
        impulse = np.zeros(iterations)
        impulse[0] = 1.0
        return np.abs(signal.lfilter([1.0], self.c, impulse)).sum()

    def fresh(self, levels: float, z):
        """Return the part of a step's noise that is new: with a banded inverse the kept integers."""
        if not self.of_inverse:
            return levels / self.c[0] * z
        return jnp.round(FRACTION * (levels * self.c[0] * z)).astype(jnp.int32)

    def slots(self, step):
        """Return the slot to write to, and the age and weight of what each slot holds: zeros at first."""
        c, kept, place = self.c, self.kept, step % max(1, self.kept)
        ages = 1 + (place - 1 - jnp.arange(kept, dtype=jnp.int32)) % max(1, kept)
        weights = jnp.asarray(c / (c[0] * FRACTION) if self.of_inverse else -c / c[0], jnp.float64)[ages]
        # Without a barrier a GPU's compiler makes a kernel of each.
        return place, ages, jax.lax.optimization_barrier(weights)

    def at(self, levels: float, step):
        """Return `solve` and `renewed`, which may have arrays side by side, and where what is new begins.

        `solve`: (`fresh`, ring) -> (W, and what is stored where that is something else);
        `renewed`: (ring, the same) -> what of the ring is new.
        """
        (place, _, weights), inverse = self.slots(step), self.of_inverse

        def solve(fresh, ring):
            earlier = _weighted_sum(weights, ring)
            if not inverse:
                return (jnp.round(fresh + earlier).astype(jnp.int32),)
            # Halves, one value in 128, are rounded up: to even numbers, noise would be even with probability
            # 0.504, and its parity reveal that of the sum.
            drawn = jnp.floor(fresh.astype(jnp.float64) / FRACTION + earlier + 0.5)
            return drawn.astype(jnp.int32), fresh

        def renewed(ring, *made):
            return made[-1][None]

        return solve, renewed, place


class _RunningSums:
    """Sums `s_j = W_{t-1} + decays_j W_{t-2} + ..` in two parts of 32 bits.

    The first is a whole number of units, the second the remainder in 2^-31 of a unit.
    """

    def __init__(self, recursion: BufferedRecursion):
        self.recursion = recursion

    def reach(self, iterations: int) -> float:
        """As above; the sums' unit is as large as they need."""
        return self.recursion.noise_reach

    def fresh(self, levels: float, z):
        """As above, before it is scaled."""
        return z

    def at(self, levels: float, step):
        """As above."""
        first, weights, decays, _, reach = self.recursion
        units = 2.0 ** np.maximum(0, np.ceil(np.log2(1.001 * levels * LARGEST * reach / 2**30)))
        buffers = range(len(decays))

        def summed(parts, j):
            whole, fraction = (parts[i].astype(jnp.float64) for i in (j, j + len(buffers)))
            return (whole + fraction * _FINE) * units[j]

        def solve(z, parts):
            earlier = sum(weights[j] * summed(parts, j) for j in buffers)
            return (jnp.round((levels / first) * z - earlier).astype(jnp.int32),)

        def renewed(parts, drawn):
            wholes, fractions = [], []
            for j in buffers:
                units_of = (decays[j] * summed(parts, j) + drawn.astype(jnp.float64)) / units[j]
                whole = _stored(jnp.round(units_of).astype(jnp.int32))
                wholes.append(whole)
                fractions.append(jnp.round((units_of - whole.astype(jnp.float64)) / _FINE).astype(jnp.int32))
            return jnp.stack([*wholes, *fractions])

        return solve, renewed, np.int32(0)


def _stream_of(strategy: Strategy):
    recursion = strategy.noise_recursion()
    if isinstance(recursion, BufferedRecursion):
        return _RunningSums(recursion)
    return LastVectors(recursion)


def _weighted_sum(weights, ring) -> jax.Array:
    """Return the sum over the first axis, in float64 and without a float64 copy of the ring."""
    groups = len(ring) // _AT_A_TIME

    def add(group, total):
        for i in range(_AT_A_TIME):
            at = group * _AT_A_TIME + i
            total = total + weights[at] * ring[at].astype(jnp.float64)
        return total

    total = jnp.zeros(ring.shape[1:], jnp.float64)
    total = jax.lax.fori_loop(0, groups, add, total) if groups else total
    for i in range(groups * _AT_A_TIME, len(ring)):
        total = total + weights[i] * ring[i].astype(jnp.float64)
    return total


__all__ = ["NoiseState", "draw", "fresh_key", "init", "max_levels", "standard_normals"]
