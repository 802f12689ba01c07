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
from jaxacct.kernels.randomness import bernoulli, bernoulli_error
from jaxacct.kernels.recurrence import softplus, tree_sum
from jaxacct.schemes.balanced_min_sep import draw_subsets
from jaxacct.schemes.base import ExampleScheme, SparsePositions, Sums, counts_at, log_probabilities
from jaxacct.schemes.batches import Batches, ByStep, subsets
from jaxacct.schemes.numbers import Numbers, participation_rate
from jaxacct.schemes.replicas import balanced_min_sep as balanced_replicas
from jaxacct.schemes.replicas import nested_allocation as nested_replicas


@dataclass(frozen=True)
class NestedAllocation(ExampleScheme):
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

    @classmethod
    def from_batch_size(
        cls, *, dataset_size: int, batch_size: float, iterations: int, min_separation: int
    ) -> "NestedAllocation":
        """Return the scheme of expected batch size `batch_size`: k = n B / |D|.

        Args:
          dataset_size: number of examples |D|.
          batch_size: B, expected batch size.
          iterations: number of steps n.
          min_separation: as of the class.

        Raises:
          ValueError: a batch size that the scheme cannot have.
        """
        n = validate.positive_integer("iterations", iterations)
        return cls(n, min_separation, round(n * participation_rate(dataset_size, batch_size), 12))

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "NestedAllocation":
        """Return the scheme of plain numbers, by both sizes.

        Raises:
          ValueError: in one line, for a number that is missing, out of range or would be ignored.
        """
        return cls.from_batch_size(min_separation=numbers.separation, **numbers.only_sizes(cls))

    @property
    def max_participations(self) -> int:
        return math.ceil(self.participations)

    @property
    def keep_probability(self) -> float:
        """Probability with which each of `max_participations` is kept."""
        return self.participations / self.max_participations

    @property
    def num_turns(self) -> np.ndarray:
        """(min_separation,) int64: number of steps of each class."""
        return -(-(self.iterations - np.arange(self.min_separation)) // self.min_separation)

    @property
    def num_long(self) -> int:
        """Number of classes with the most steps: the first ones. All others have one step less."""
        return self.iterations - self.min_separation * (self._most_turns - 1)

    @property
    def _most_turns(self) -> int:
        return -(-self.iterations // self.min_separation)

    @property
    def participation_rate(self) -> float:
        """Long-run rate of participations."""
        return self.participations / self.iterations

    def participation_probabilities(self) -> np.ndarray:
        return np.full(self.iterations, self.participation_rate)

    def log_probability_of_none(self) -> float:
        return self.max_participations * log_probabilities(self.keep_probability)[1]

    @property
    def sums(self) -> Sums:
        k, b, turns = self.max_participations, self.min_separation, self._most_turns
        none = self.log_probability_of_none()
        chains = float(fixed_counts.log_choose(turns, min(k, turns // 2)))
        error = functools.partial(fixed_counts.rounding_bound, k, b, chains, none)
        return Sums(1.0, none, self.iterations, b, fixed_count=k, error=error)

    @property
    def replicas(self) -> ModuleType:
        return nested_replicas if self.max_participations > 1 else balanced_replicas

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        n, b, k = self.iterations, self.min_separation, self.max_participations
        phases = generator.integers(n, size=dataset_size) % b
        turns = np.empty((dataset_size, k), np.int64)
        for is_long in (True, False):
            of_it = (phases < self.num_long) == is_long
            turns[of_it] = subsets(generator, self._most_turns - (not is_long), k, int(of_it.sum()))
        steps = phases[:, None] + b * turns
        if self.keep_probability < 1:
            steps = np.where(generator.random(steps.shape) < self.keep_probability, steps, n)
        return ByStep(steps, n)

    def draw_error(self) -> float:
        """Bound the relative error of the density that `draw_participation` draws from.

        The class and every participation are uniform integers from 64 bits; thinning is by coins.
        """
        k = self.max_participations
        log_error = (k + 1) * math.log1p(threefry.integers_error(self.iterations))
        if self.keep_probability < 1:
            log_error += math.log1p(bernoulli_error(self.keep_probability, k))
        return math.expm1(log_error)

    def draw_participation(self, key, num_samples: int):
        return counts_at(self.draw_positions(key, num_samples), 1, self.iterations)

    @property
    def sparse_positions(self) -> SparsePositions:
        return SparsePositions(self.draw_positions, self.participation_rate)

    def draw_positions(self, key, num_samples: int):
        """Draw (num_samples, max_participations) int32: the steps participated in, ascending; n is none."""
        n, b, k = self.iterations, self.min_separation, self.max_participations
        phase_key, long_key, short_key, keep_key = threefry.split(key, 4)
        phase = threefry.integers(phase_key, (num_samples, 1), n) % b
        turns = draw_subsets(long_key, self._most_turns, k, num_samples)
        if self.num_long < b:
            short = draw_subsets(short_key, self._most_turns - 1, k, num_samples)
            turns = jnp.where(phase < self.num_long, turns, short)
        steps = phase + b * turns
        if self.keep_probability < 1:
            steps = jnp.where(bernoulli(keep_key, self.keep_probability, steps.shape), steps, n)
        return jnp.sort(steps, axis=1)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute ln of the mean over patterns of the product of `1 - q + q e^r`, q `keep_probability`."""
        if log_ratios.ndim == 1:
            return self.log_likelihood_ratios(log_ratios[None])[0]
        (samples, n), b, k, turns = (
            log_ratios.shape,
            self.min_separation,
            self.max_participations,
            self._most_turns,
        )
        ratios = log_ratios.T
        if self.keep_probability < 1:
            log_p, log_q = log_probabilities(self.keep_probability)
            ratios = log_q + softplus(ratios + (log_p - log_q))
        ratios = jnp.pad(ratios, ((0, turns * b - n), (0, 0))).reshape(turns, b, samples)
        long, classes = self.num_long, []
        for rows, of_it in ((turns, slice(None, long)), (turns - 1, slice(long, None))):
            some = ratios[:rows, of_it]
            if some.shape[1]:
                total = fixed_counts.log_sum_of_patterns(some.reshape(rows, -1), k, 1)
                each = math.log(rows / n) - float(fixed_counts.log_choose(rows, k))
                classes.append(total.reshape(-1, samples) + each)
        values = jnp.concatenate(classes)
        top = lax.stop_gradient(values.max(axis=0))
        return top + jnp.log(tree_sum(jnp.exp(values - top[None]), axis=0))
