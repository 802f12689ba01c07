"""Balanced min-sep sampling: every example participates equally often (arXiv 2605.07072).

The examples that participate most determine the privacy. With a fixed number of participations no example
participates more than the others, so less noise is needed (proofs/fixed_counts.md).
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate
from jaxacct.kernels import fixed_counts, threefry
from jaxacct.kernels.randomness import bernoulli, bernoulli_error
from jaxacct.kernels.recurrence import log_probabilities, softplus
from jaxacct.schemes.base import SizedScheme, Sums
from jaxacct.schemes.batches import Batches, ByStep, subsets
from jaxacct.schemes.numbers import participation_rate
from jaxacct.schemes.replicas import balanced_min_sep as balanced_replicas


@dataclass(frozen=True)
class BalancedMinSep(SizedScheme):
    """Balanced min-sep sampling.

    Each example participates at k steps, any two at least `min_separation` apart, uniformly among all such
    choices. `min_separation` = 1 is k-out-of-n sampling (balanced iteration subsampling). The first and the
    last steps have larger batches than the others where b > 1.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1. With at most one participation it has no effect and is n.
      participations: k > 0, expected number of participations. Where it is no integer, each of ceil(k)
        participations is kept with probability k / ceil(k), independently. k = 0 is refused: such an example
        is in no batch, and needs no plan.
    """

    iterations: int
    min_separation: int
    participations: float
    name: ClassVar[str] = "balanced-min-sep"
    replicas = balanced_replicas
    options: ClassVar = {"separation": "min_separation"}

    def __post_init__(self):
        set_ = object.__setattr__
        n = validate.positive_integer("iterations", self.iterations)
        b = validate.positive_integer("min_separation", self.min_separation)
        set_(self, "iterations", n)
        set_(self, "participations", validate.positive_number("participations", self.participations))
        b = n if self.participations <= 1 else b
        set_(self, "min_separation", b)
        max_count = -(-n // b)
        if self.participations > max_count:
            raise ValueError(
                f"participations must be at most {max_count}, as {n} steps have no more that are {b} "
                f"apart, got {self.participations!r}"
            )

    @classmethod
    def from_batch_size(
        cls, *, dataset_size: int, batch_size: float, iterations: int, min_separation: int
    ) -> "BalancedMinSep":
        """Return the scheme of expected batch size `batch_size`: k = n B / |D|.

        Args:
          dataset_size: number of examples |D|.
          batch_size: B, expected batch size, the mean over the steps.
          iterations: number of steps n.
          min_separation: b >= 1.

        Raises:
          ValueError: more participations than fit into n steps.
        """
        n = validate.positive_integer("iterations", iterations)
        rate = participation_rate(dataset_size, batch_size)
        return cls(n, min_separation, round(n * rate, 12))

    @property
    def max_participations(self) -> int:
        return math.ceil(self.participations)

    @property
    def keep_probability(self) -> float:
        """Probability with which each of `max_participations` is kept."""
        return self.participations / self.max_participations

    @property
    def participation_rate(self) -> float:
        """Long-run rate of participations."""
        return self.participations / self.iterations

    reveals_epochs = True

    @property
    def independent_epochs(self) -> tuple[tuple[int, int, int], ...]:
        """Groups of a random partition of the steps, each with one participation; empty where b > 1.

        A participation that is kept with a probability is in the group with the same probability or more.
        """
        k, kept = self.max_participations, self.keep_probability
        if self.min_separation > 1 and k > 1:
            return ()
        size, longer = divmod(self.iterations, k)
        groups = [(k - longer, size), (longer, size + 1)]
        return tuple((number, steps, math.floor(steps / kept - steps)) for number, steps in groups if number)

    @property
    def batch_rates(self) -> np.ndarray:
        return self.participation_probabilities()

    def log_probability_of_none(self) -> float:
        return self.max_participations * log_probabilities(self.keep_probability)[1]

    draw_variation: ClassVar[float] = 0.0  # pyrefly: ignore[bad-override]

    def draw_error(self) -> float:
        """Bound the relative error of the density of `draw_participation`.

        Every participation is a uniform integer from 64 bits; thinning is by Bernoulli draws.
        """
        k = self.max_participations
        log_error = k * math.log1p(threefry.integers_error(self.iterations))
        if self.keep_probability < 1:
            log_error += math.log1p(bernoulli_error(self.keep_probability, k))
        return math.expm1(log_error)

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        k, b = self.max_participations, self.min_separation
        steps = subsets(generator, self.num_columns, k, dataset_size) + np.arange(k) * (b - 1)
        if self.keep_probability < 1:
            steps = np.where(generator.random(steps.shape) < self.keep_probability, steps, self.iterations)
        return ByStep(steps, self.iterations)

    def thinned(self, key, steps):
        """Return the steps that are kept, ascending, with n for the others."""
        if self.keep_probability < 1:
            steps = jnp.where(bernoulli(key, self.keep_probability, steps.shape), steps, self.iterations)
        return jnp.sort(steps, axis=1)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute ln of the mean over patterns of the product of `1 - q + q e^r`, q `keep_probability`."""
        if log_ratios.ndim == 1:
            return self.log_likelihood_ratios(log_ratios[None])[0]
        log_ratios = log_ratios.T
        if self.keep_probability < 1:
            log_p, log_q = log_probabilities(self.keep_probability)
            log_ratios = log_q + softplus(log_ratios + (log_p - log_q))
        counts = self.max_participations, self.min_separation
        return fixed_counts.log_mean_over_patterns(log_ratios, *counts)

    @property
    def num_columns(self) -> int:
        """Number m of columns: patterns are the subsets of m columns (`kernels.fixed_counts`)."""
        return fixed_counts.num_columns(self.iterations, self.max_participations, self.min_separation)

    def participation_probabilities(self) -> np.ndarray:
        n, k, m = self.iterations, self.max_participations, self.num_columns
        found, v = np.zeros(n), np.arange(m)
        for j in range(k):
            found[j * (self.min_separation - 1) + v] += fixed_counts.column_probabilities(m, k, j)
        return self.keep_probability * found

    @property
    def sums(self) -> Sums:
        columns, k = self.num_columns, self.max_participations
        chains = fixed_counts.log_choose(columns, min(k, columns // 2))
        none = self.log_probability_of_none()
        error = functools.partial(fixed_counts.rounding_bound, k, chains, none)
        return Sums(1.0, none, columns, fixed_count=k, error=error)

    def draw_positions(self, key, num_samples: int):
        k, b = self.max_participations, self.min_separation
        subset_key, keep_key = threefry.split(key)
        lockouts = jnp.arange(k, dtype=jnp.int32)[None] * (b - 1)
        steps = draw_subsets(subset_key, self.num_columns, k, num_samples) + lockouts
        return self.thinned(keep_key, steps)


def draw_subsets(key, columns: int, size: int, num_samples: int):
    """Return (num_samples, size) int32: uniform subsets of 0 .. columns - 1, ascending (Floyd)."""
    tops = columns - size + np.arange(size)
    words = threefry.bits_32(key, (2, size, num_samples))
    candidates = threefry.integers_of(words, (tops + 1)[:, None])
    tops = jnp.asarray(tops, jnp.int32)

    def add(i, drawn):
        taken = (drawn == candidates[i][:, None]).any(axis=1)
        return drawn.at[:, i].set(jnp.where(taken, tops[i], candidates[i]))

    drawn = jnp.full((num_samples, size), columns, jnp.int32)
    return jnp.sort(jax.lax.fori_loop(0, size, add, drawn), axis=1)
