"""Noise of the next step, drawn by a thread while the current step is computed.

Normals depend only on key, step and index (`train.noise.normals`), so a resumed run draws the same ones, and
prefetched normals are only in memory. Used on CPUs, where a draw takes one core about as long as the
gradients of a small dense network.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .keystream import Room
from .normals import drawn_on_the_host
from .recursion import Fresh, NoiseState

# Parameters. For fewer the thread costs more than it saves; of more, float64 copies take too much memory.
_FEWEST, _MOST = 2**16, 2**26


class _Coming(NamedTuple):
    """Normals for the state of exactly these arrays, which are immutable."""

    step: Any
    key: Any
    drawn: Future


class Ahead:
    """Draws what the next step will be given; for one thread at a time, as a step is.

    Args:
      iterations: steps that there is noise for; nothing is drawn for later ones.
      deviation: of normals that are rounded at once, as `noise.deviation_alone` gives it.
    """

    def __init__(self, iterations: int, deviation: float | None):
        self._iterations, self._deviation = iterations, deviation
        self._thread: ThreadPoolExecutor | None = None
        self._room = Room()  # of the thread
        self._coming: _Coming | None = None
        self._given: tuple[int, np.ndarray] | None = None  # whose normals were taken last: step and key
        self._before = None

    def take(self, state: NoiseState) -> Fresh | None:
        """Return the normals of this state's step; None where its program is to draw them."""
        # Taken once: what failed, for want of memory perhaps, is drawn anew for who tries again.
        coming, self._coming = self._coming, None
        if coming is not None and coming.step is state.step and coming.key is state.key:
            fresh = coming.drawn.result()
        elif _is_worth_it(state):
            self._before = None
            # A copy: the step is given the state's own memory to write to.
            fresh = self._drawn(np.array(state.key), int(state.step), _size(state), None, None)
        else:
            fresh = None
        self._given = None if fresh is None else (int(fresh.step), fresh.key)
        return fresh

    def begin(self, after: NoiseState, result) -> None:
        """Begin to draw for the state that comes of the step that was given what `take` returned.

        Args:
          after: state before that step.
          result: an array that the step gives beside its state. Drawing waits for that of the step before:
            however far steps are dispatched ahead, the normals of three at most are in memory.
        """
        given, self._coming = self._given, None
        if given is None or given[0] + 1 >= self._iterations:
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "jaxacct-noise")
        # The key as it was given: that of `after` is the result of a step that is not done.
        drawn = self._thread.submit(
            self._drawn, given[1], given[0] + 1, _size(after), self._before, self._room
        )
        self._coming, self._before = _Coming(after.step, after.key, drawn), result

    def _drawn(self, key: np.ndarray, step: int, size: int, before, room: Room | None) -> Fresh:
        jax.block_until_ready(before)
        return Fresh(np.int32(step), key, drawn_on_the_host(key, step, size, self._deviation, room))


def _is_worth_it(state: NoiseState) -> bool:
    """On one CPU, not inside of another program, and neither too few nor too many parameters."""
    # First what takes least: a small network's whole step takes ten times as long as a new array.
    if not _FEWEST <= _size(state) <= _MOST or jax.default_backend() != "cpu":
        return False
    # A new array is traced, too, where the state is a constant of another program: words would be one, then.
    leaves = [*jax.tree.leaves(state), jnp.zeros(())]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    return all(len(leaf.devices()) == 1 for leaf in leaves if isinstance(leaf, jax.Array))


def _size(state: NoiseState) -> int:
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(state.recent))
