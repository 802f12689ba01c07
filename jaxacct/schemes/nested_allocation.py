"""Nested allocation: k steps of one residue class, between balls-in-bins and k-out-of-n sampling.

All participations of an example are in one class modulo the separation, so that any number of bands up to it
is exact (proofs/fixed_counts.md, section 10).
"""

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.common import validate
from jaxacct.kernels import fixed_counts, threefry
from jaxacct.kernels.recurrence import tree_sum
from jaxacct.schemes.balanced_min_sep import FixedCount, draw_subsets
from jaxacct.schemes.base import Sums
from jaxacct.schemes.batches import subsets
from jaxacct.schemes.replicas import balanced_min_sep as balanced_replicas
from jaxacct.schemes.replicas import nested_allocation as nested_replicas


@dataclass(frozen=True)
class NestedAllocation(FixedCount):
    """k uniform steps of the residue class, modulo `min_separation`, of one uniform step.

    A class with more steps is chosen with a larger probability, so that every step has the probability k / n
    however n is divided. All steps of a class (k = n / b) is balls-in-bins; `min_separation` 1 is k-out-of-n;
    k below n / b with ceil(k) = n / b is cyclic Poisson sampling.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1. With at most one participation it has no effect and is n.
      participations: k in (0, n // b], expected number of participations. Where it is no integer, each of
        ceil(k) participations is kept with probability k / ceil(k), independently.
    """

    iterations: int
    min_separation: int
    participations: float
    name: ClassVar[str] = "nested-allocation"
    options: ClassVar = {"separation": "min_separation"}

    def __post_init__(self):
        n = validate.positive_integer("iterations", self.iterations)
        b = validate.positive_integer("min_separation", self.min_separation)
        k = validate.positive_number("participations", self.participations)
        b = n if k <= 1 else b
        if k > n // b:
            raise ValueError(
                f"participations must be at most {n // b}, as {n} steps have no more in every class "
                f"modulo {b}, got {k!r}"
            )
        for name, value in (("iterations", n), ("min_separation", b), ("participations", k)):
            object.__setattr__(self, name, value)

    @property
    def num_turns(self) -> np.ndarray:
        """(min_separation,) int64: number of steps of each class."""
        return -(-(self.iterations - np.arange(self.min_separation)) // self.min_separation)

    @property
    def num_long(self) -> int:
        """Number of classes with the most steps: the first ones. All others have one step less."""
        return self.iterations - self.min_separation * (self._max_turns - 1)

    @property
    def _max_turns(self) -> int:
        return -(-self.iterations // self.min_separation)

    def participation_probabilities(self) -> np.ndarray:
        return np.full(self.iterations, self.participation_rate)

    @property
    def sums(self) -> Sums:
        k, b, turns = self.max_participations, self.min_separation, self._max_turns
        none = self.log_probability_of_none()
        chains = fixed_counts.log_choose(turns, min(k, turns // 2))
        error = functools.partial(fixed_counts.rounding_bound, k, b, chains, none)
        return Sums(1.0, none, self.iterations, b, fixed_count=k, error=error)

    @property
    def replicas(self) -> ModuleType:
        return nested_replicas if self.max_participations > 1 else balanced_replicas

    def _steps(self, dataset_size, generator):
        n, b, k = self.iterations, self.min_separation, self.max_participations
        phases = generator.integers(n, size=dataset_size) % b
        turns = np.empty((dataset_size, k), np.int64)
        for is_long in (True, False):
            of_it = (phases < self.num_long) == is_long
            turns[of_it] = subsets(generator, self._max_turns - (not is_long), k, int(of_it.sum()))
        return phases[:, None] + b * turns

    def draw_positions(self, key, num_samples: int):
        n, b, k = self.iterations, self.min_separation, self.max_participations
        phase_key, long_key, short_key, keep_key = threefry.split(key, 4)
        phase = threefry.integers(phase_key, (num_samples, 1), n) % b
        turns = draw_subsets(long_key, self._max_turns, k, num_samples)
        if self.num_long < b:
            short = draw_subsets(short_key, self._max_turns - 1, k, num_samples)
            turns = jnp.where(phase < self.num_long, turns, short)
        return self.thinned(keep_key, phase + b * turns)

    def _log_mean_over_patterns(self, log_ratios):
        (n, samples), b, k, turns = (
            log_ratios.shape,
            self.min_separation,
            self.max_participations,
            self._max_turns,
        )
        ratios = jnp.pad(log_ratios, ((0, turns * b - n), (0, 0))).reshape(turns, b, samples)
        long, classes = self.num_long, []
        for rows, of_it in ((turns, slice(None, long)), (turns - 1, slice(long, None))):
            some = ratios[:rows, of_it]
            if some.shape[1]:
                total = fixed_counts.log_sum_of_patterns(some.reshape(rows, -1), k, 1)
                each = math.log(rows / n) - fixed_counts.log_choose(rows, k)
                classes.append(total.reshape(-1, samples) + each)
        values = jnp.concatenate(classes)
        top = lax.stop_gradient(values.max(axis=0))
        return top + jnp.log(tree_sum(jnp.exp(values - top[None]), axis=0))
