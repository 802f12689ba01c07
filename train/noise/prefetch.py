"""Noise of the next step, computed by a thread while the gradient of the current step is.

Noise depends only on key, step and earlier noise (`train.noise.recursion`), so a resumed run draws the same
one, and prefetched noise is only in memory. Used on CPUs, where noise takes one core about as long as the
gradients of a small dense network.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import compiler_options

from .keystream import Room
from .normals import words_on_the_host
from .recursion import Fresh, NoiseState, integers_of, solve_words, store

if TYPE_CHECKING:
    from ..optimizers import Privatizer

# Parameters. For fewer the thread costs more than it saves; of more, words (two copies) take too much memory.
_FEWEST, _MOST = 2**16, 2**26


class _Coming(NamedTuple):
    """Noise for the state of exactly these arrays, which are immutable."""

    leaves: list[Any]
    made: Future


class Ahead:
    """Computes the noise that the next step will be given; for one thread at a time, as a step is.

    Args:
      private: whose noise. Nothing is drawn for steps after its mechanism's last.
    """

    def __init__(self, private: Privatizer):
        self._iterations = private.mechanism.scheme.iterations
        self._of = private.mechanism.strategy, private.levels
        # XLA computes what one thread asks for in that order: this does not wait for the step before.
        self._store = jax.jit(
            lambda recent, step, made: store(*self._of, NoiseState(step, recent, None), made),
            donate_argnums=0,
        )
        self._thread: ThreadPoolExecutor | None = None
        self._room = Room()  # of the thread
        self._coming: _Coming | None = None
        self._given: Fresh | None = None  # what was taken last
        self._before = None

    @functools.cached_property
    def _solve(self):
        # When it is first needed: the options are those of a device, and devices may be set up after this.
        options = compiler_options()
        return jax.jit(functools.partial(solve_words, *self._of), compiler_options=options)

    def take(self, state: NoiseState) -> Fresh | None:
        """Return the noise of this state's step; None where its program is to draw it."""
        # Taken once: what failed, for want of memory perhaps, is computed anew for who tries again.
        coming, self._coming = self._coming, None
        leaves = jax.tree.leaves(state)
        if coming is not None and all(a is b for a, b in zip(coming.leaves, leaves, strict=True)):
            self._given = coming.made.result()
        elif _is_worth_it(state):
            self._before = None
            # A copy: the step is given the state's own memory to write to.
            self._given = self._computed(np.array(state.key), int(state.step), state.recent, None, None)
        else:
            self._given = None
        return self._given

    def begin(self, before: NoiseState, after: NoiseState, result) -> NoiseState:
        """Begin to compute noise for the step after that which was given what `take` returned.

        Args:
          before: state of that step. What it keeps is written to.
          after: state that the step returned, with nothing that is kept if it was given noise.
          result: an array that the step gives beside its state. Drawing waits for that of the step before:
            however far steps are dispatched ahead, the noise of three at most is in memory.

        Returns:
          The state after the step.
        """
        given, self._given = self._given, None
        if given is None:
            return after
        self._thread = self._thread or ThreadPoolExecutor(1, "jaxacct-noise")
        # The step's number and key as they were given: those of `after` are results that are not there yet.
        recent = self._thread.submit(self._store, before.recent, given.step, given.made).result()
        after = after._replace(recent=recent)
        if given.step + 1 < self._iterations:
            compute = functools.partial(self._computed, given.key, int(given.step) + 1, recent)
            made = self._thread.submit(compute, self._before, self._room)
            self._coming, self._before = _Coming(jax.tree.leaves(after), made), result
        return after

    def _computed(self, key: np.ndarray, step: int, recent, before, room: Room | None) -> Fresh:
        jax.block_until_ready(before)
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(recent)]
        words = words_on_the_host(key, step, shapes, room)
        with jax.enable_x64(True):
            made = self._solve(NoiseState(np.int32(step), recent, key), words)
        # Waits for it, as the words' memory is written to after this.
        integers = [integers_of(*each) for each in zip(made, shapes, strict=True)]
        return Fresh(np.int32(step), key, integers)


def _is_worth_it(state: NoiseState) -> bool:
    """On one CPU, not inside of another program, and neither too few nor too many parameters."""
    # First what takes least: a small network's whole step takes ten times as long as a new array.
    size = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(state.recent))
    if not _FEWEST <= size <= _MOST or jax.default_backend() != "cpu":
        return False
    # A new array is traced, too, where the state is a constant of another program: words would be one, then.
    leaves = [*jax.tree.leaves(state), jnp.zeros(())]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    return all(len(leaf.devices()) == 1 for leaf in leaves if isinstance(leaf, jax.Array))
