"""Correlated noise `C^{-1} z` in whole numbers, streamed: the last bands - 1 vectors are all that is kept.

With C Toeplitz, `w = C^{-1} z` obeys `c_0 w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}`. Here every `w_t`
is rounded to an integer, and the earlier integers are what the next ones are made from:

    W_t = round((levels z_t - c_1 W_{t-1} - .. - c_{b-1} W_{t-b+1}) / c_0).

Added to integer sums g_t this releases `r_t = round((u_t - c_1 r_{t-1} - ..) / c_0)` of `u = C g + levels z`,
so it is a function of what was accounted for (arXiv 2602.09338, section 2) and of nothing else; the proof
is in proofs/released_numbers.md. One band is plain DP-SGD. Where the inverse h is banded, vectors z on a grid
are kept instead: `W_t = floor(levels (h_0 z_t + .. + h_{b-1} z_{t-b+1}) + 1/2)`. Where c is a sum of
exponentials running sums of the W are, two copies each, however many bands.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import signal

from jaxacct.strategies import BufferedRecursion, NoiseRecursion, Strategy

from .normals import LARGEST, fresh_key, key_of_run, normals_of, pairs_of, standard_normals

_FRACTION = 2.0**7  # kept z are integers in units of 1/128 grid unit
_FINE = 2.0**-31  # of the unit of a running sum
_AT_A_TIME = 16  # kept vectors that one pass over memory adds up


class NoiseState(NamedTuple):
    """What is kept between steps; secret."""

    step: Any
    """() int32: vectors drawn so far."""
    recent: Any
    """Pytree like the parameters with a leading axis, int32: the last `W` (or `z`), or running sums."""
    key: Any
    """(8,) uint32: the draws of a step depend on it and the step alone."""


class Fresh(NamedTuple):
    """Noise of one step, computed before it; secret."""

    step: Any
    """() int32."""
    key: Any
    """(8,) uint32."""
    made: list[tuple[Any, ...]]
    """`solve` of the step."""

    def are_of(self, state: NoiseState) -> jax.Array:
        """Return () bool: whether it is this state's."""
        return (state.step == self.step) & (state.key == self.key).all()


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
        return jnp.zeros(shape, jnp.int32)

    recent = jax.tree.map(zeros, params)
    return NoiseState(jnp.zeros((), jnp.int32), recent, key_of_run(key, params))


def max_levels(strategy: Strategy, iterations: int) -> float:
    """Return the largest `levels` at which no integer of `iterations` steps exceeds 32 bits, for any key."""
    # Every rounding is an input of at most c_0 / 2 more: from 2^8 levels on less than one part in a thousand,
    # which the 1.001 covers.
    return float((2**31 - 1) / (1.001 * _stream_of(strategy).reach(iterations) * LARGEST))


def draw(
    strategy: Strategy, levels: float, state: NoiseState, params, *, fresh: Fresh | None = None, normals=None
) -> tuple[Any, NoiseState]:
    """Return `W_t`, a pytree like `params` in int32, and the next state; jittable, exact for any x64 flag.

    Args:
      strategy: C.
      levels: standard deviation of `z` in grid units, from 2^8 to `max_levels`.
      state: from `init` or the call before.
      params: pytree of arrays; only shapes matter.
      fresh: the noise of this step, where it is computed already; it must be `fresh.are_of(state)`. What the
        next state keeps is then computed by a separate call of `store`.
      normals: `z`, float64, one array for each parameter; by default it is drawn here.
    """
    structure = jax.tree.structure(params)
    if fresh is not None:
        made, recent = fresh.made, state.recent
    else:
        if normals is None:
            normals = normals_of(state.key, state.step, [jnp.shape(leaf) for leaf in jax.tree.leaves(params)])
        made = in_memory(lambda: solve(strategy, levels, state, normals), state.step >= 0)
        recent = store(strategy, levels, state, made)
    after = NoiseState(state.step + 1, recent, state.key)
    return jax.tree.unflatten(structure, [drawn for drawn, *_ in made]), after


def solve(strategy: Strategy, levels: float, state: NoiseState, normals) -> list[tuple[jax.Array, ...]]:
    """Return `W_t` for each parameter, int32, and beside it what is kept where that is something else.

    Args:
      strategy: as of `draw`.
      levels: as of `draw`.
      state: as of `draw`.
      normals: `z`, float64, one array for each parameter.

    Raises:
      ValueError: for normals that are no longer float64, as JAX makes float32 of NumPy's arrays.
    """
    for z in normals:
        if z.dtype != np.float64:
            raise ValueError(f"normals must be float64, got {z.dtype}")
    with jax.enable_x64(True):
        of_one, _ = _stream_of(strategy).at(levels, state.step)
        rings = jax.tree.leaves(state.recent)
        return [of_one([z], ring, lambda a: [a])[0] for z, ring in zip(normals, rings, strict=True)]


def solve_words(strategy: Strategy, levels: float, state: NoiseState, words) -> list[tuple[jax.Array, ...]]:
    """Return `solve` of the normals that words make, int64 with two numbers each (`unpacked`).

    One loop over memory reads the words of a pair and what is kept, and writes both integers: normals are
    never in memory.

    Args:
      strategy: as of `draw`.
      levels: as of `draw`.
      state: as of `draw`.
      words: of `train.noise.normals.words_on_the_host`.
    """

    def halves(array):
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, array.shape[-1] % 2)])
        return [array[..., 0::2], array[..., 1::2]]

    def of_pairs(each, ring):
        pair = pairs_of(each)
        if stream.writes_two:
            pair = in_memory(lambda: jax.lax.complex(*pair), state.step >= 0)
            pair = pair.real, pair.imag
        found = of_one(pair, ring.reshape(len(ring), math.prod(ring.shape[1:])), halves)
        return tuple(_packed(*each) for each in zip(*found, strict=True))

    with jax.enable_x64(True):
        stream = _stream_of(strategy)
        of_one, _ = stream.at(levels, state.step)
        return [of_pairs(*each) for each in zip(words, jax.tree.leaves(state.recent), strict=True)]


def unpacked(made: list[tuple[jax.Array, ...]], shapes) -> list[tuple[np.ndarray, ...]]:
    """Return `solve` of `solve_words`: the same memory, where processors store low halves first."""
    return [
        tuple(
            np.asarray(one).astype("<i8", copy=False).view("<i4")[: math.prod(shape)].reshape(shape)
            for one in each
        )
        for each, shape in zip(made, shapes, strict=True)
    ]


def store(strategy: Strategy, levels: float, state: NoiseState, made: list[tuple[jax.Array, ...]]):
    """Return what is kept after the step of `state`, a pytree like `state.recent`, of `solve`'s result."""
    rings, structure = jax.tree.flatten(state.recent)
    with jax.enable_x64(True):
        _, of_one = _stream_of(strategy).at(levels, state.step)
        rings = [of_one(ring, *each) for ring, each in zip(rings, made, strict=True)]
    return jax.tree.unflatten(structure, rings)


def in_memory(function: Callable[[], Any], true: jax.Array):
    """Return `function()`, a pytree of arrays, stored before anything reads it.

    Compilers compute again what two readers need, and may round it otherwise; where one of them writes to
    what was read, they copy that first or give up vector instructions. What a branch returns is in memory.

    Args:
      function: without arguments.
      true: () bool that is True, not a constant of the program.
    """
    shapes = jax.eval_shape(function)
    return jax.lax.cond(true, function, lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))


def _packed(low, high) -> jax.Array:
    """Return two whole numbers of 32 bits as one of 64: XLA computes several results one number at a time."""
    low, high = (number.astype(jnp.int32).astype(jnp.int64) for number in (low, high))
    return (low & (2**32 - 1)) | (high << 32)


class _LastVectors:
    """The last few `W` (or `z`, where the inverse is banded) in a ring."""

    def __init__(self, recursion: NoiseRecursion):
        self.c, self.of_inverse = recursion
        self.kept, self.writes_two = recursion.copies, self.of_inverse

    def reach(self, iterations: int) -> float:
        """Return the largest 32-bit number per unit of `levels` and of the largest normal."""
        if self.of_inverse:
            # The kept z are finer than the grid; the noise itself is their sum.
            return max(_FRACTION * self.c[0], np.abs(self.c).sum())
        impulse = np.zeros(iterations)
        impulse[0] = 1.0
        return np.abs(signal.lfilter([1.0], self.c, impulse)).sum()

    def at(self, levels: float, step):
        """Return `solve` and `store`.

        `solve`: (parts of z, ring, what parts the ring like z) -> for each part (W, stored values);
        `store`: (ring, the same of the whole) -> the next ring.
        """
        c, kept, inverse = self.c, self.kept, self.of_inverse
        place = step % max(1, kept)
        deviation = jnp.float64(levels * c[0] if inverse else levels / c[0])
        # Slot j holds the vector of age 1 + (place - 1 - j) mod (b - 1), and zeros before the first steps.
        ages = 1 + (place - 1 - jnp.arange(kept, dtype=jnp.int32)) % max(1, kept)
        weights = jnp.asarray(c / (c[0] * _FRACTION) if inverse else -c / c[0], jnp.float64)[ages]

        def solve_part(z, earlier):
            z = deviation * z
            if not inverse:
                return (jnp.round(z + earlier).astype(jnp.int32),)
            units = jnp.round(_FRACTION * z)
            # Halves are rounded up: one value in 128 is a half, and rounding them to even numbers makes
            # noise even with probability 0.504, so that its parity reveals that of the sum.
            drawn = jnp.floor(units / _FRACTION + earlier + 0.5)
            return drawn.astype(jnp.int32), units.astype(jnp.int32)

        def solve(parts, ring, split):
            return [
                solve_part(*each) for each in zip(parts, _weighted_sums(weights, ring, split), strict=True)
            ]

        def store(ring, *made):
            return jax.lax.dynamic_update_index_in_dim(ring, made[-1], place, 0) if kept else ring

        return solve, store


class _RunningSums:
    """Sums `s_j = W_{t-1} + decays_j W_{t-2} + ..` in two parts of 32 bits.

    The first is a whole number of units, the second the remainder in 2^-31 of a unit.
    """

    writes_two = False  # kinds of integers a step

    def __init__(self, recursion: BufferedRecursion):
        self.recursion = recursion

    def reach(self, iterations: int) -> float:
        """As above; the sums' unit is as large as they need."""
        return self.recursion.noise_reach

    def at(self, levels: float, step):
        """As above."""
        first, weights, decays, _, reach = self.recursion
        largest = 1.001 * levels * LARGEST * reach
        units = 2.0 ** np.maximum(0, np.ceil(np.log2(largest / 2**30)))
        buffers = range(len(decays))

        def summed(parts, j):
            return of_two(parts[j], parts[j + len(buffers)], j)

        def of_two(whole, fraction, j):
            return (whole.astype(jnp.float64) + fraction.astype(jnp.float64) * _FINE) * units[j]

        def solve_part(z, parts):
            earlier = sum(weights[j] * summed(parts, j) for j in buffers)
            return (jnp.round((levels / first) * z - earlier).astype(jnp.int32),)

        def solve(normals, parts, split):
            return [solve_part(*each) for each in zip(normals, split(parts), strict=True)]

        def store(parts, drawn):
            for j in buffers:
                # Of two rows: a branch that is given all is given a copy, as rows are written afterwards.
                rows = parts[j], parts[j + len(buffers)]

                def together(rows=rows, j=j):
                    units_of = (decays[j] * of_two(rows[0], rows[1], j) + drawn.astype(jnp.float64)) / units[
                        j
                    ]
                    whole = jnp.round(units_of)
                    return _packed(whole, jnp.round((units_of - whole) / _FINE))

                pair = in_memory(together, step >= 0)
                for at, part in ((j, pair), (j + len(buffers), pair >> 32)):
                    parts = jax.lax.dynamic_update_index_in_dim(parts, part.astype(jnp.int32), at, 0)
            return parts

        return solve, store


_STREAMS: dict[type, Callable] = {NoiseRecursion: _LastVectors, BufferedRecursion: _RunningSums}


def _stream_of(strategy: Strategy):
    recursion = strategy.noise_recursion()
    return _STREAMS[type(recursion)](recursion)


def _weighted_sums(weights, ring, split):
    """Return each part's sum over the first axis, in float64 and without a float64 copy of the ring."""
    groups, rest = divmod(ring.shape[0], _AT_A_TIME)

    def add(first, number, total, ring):
        for i in range(number):
            total = total + weights[first + i] * ring[first + i].astype(jnp.float64)
        return total

    total = jnp.zeros(ring.shape[1:], jnp.float64)
    if groups:
        total = jax.lax.fori_loop(0, groups, lambda g, t: add(g * _AT_A_TIME, _AT_A_TIME, t, ring), total)
    both = zip(split(total), split(ring), strict=True)
    return [add(groups * _AT_A_TIME, rest, part, earlier) for part, earlier in both]


__all__ = ["Fresh", "NoiseState", "draw", "fresh_key", "init", "max_levels", "standard_normals"]
