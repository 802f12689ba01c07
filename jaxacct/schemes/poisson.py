"""Poisson sampling: every example joins every batch independently."""

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels.linear_scale import Counts, log_growth_of_sums
from jaxacct.kernels.programs import number
from jaxacct.kernels.randomness import bernoulli, bernoulli_error
from jaxacct.kernels.recurrence import phase_totals, softplus, tree_sum, weighted_sums
from jaxacct.schemes._batch_size import participation_rate
from jaxacct.schemes.base import Scheme, Sums, disjoint_participations, log_probabilities
from jaxacct.schemes.batches import Batches, EveryStep
from jaxacct.schemes.replicas import poisson as poisson_replicas


@dataclass(frozen=True)
class Poisson(Scheme):
    """Poisson sampling over `iterations` steps, each with `sampling_probability` in (0, 1].

    Example:
      >>> Poisson.from_batch_size(dataset_size=1000, batch_size=10, iterations=5)
      Poisson(iterations=5, sampling_probability=0.01)
    """

    iterations: int
    sampling_probability: float
    name: ClassVar[str] = "poisson"
    unit: ClassVar[str] = "example"

    def __post_init__(self):
        set_ = object.__setattr__
        set_(self, "iterations", _validate.positive_integer("iterations", self.iterations))
        p = _validate.probability("sampling_probability", self.sampling_probability)
        set_(self, "sampling_probability", p)

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, batch_size: float, iterations: int) -> "Poisson":
        """Poisson sampling with expected batch size `batch_size`: p = B / |D|."""
        return cls(iterations, participation_rate(dataset_size, batch_size))

    @property
    def min_separation(self) -> int:
        return 1

    @property
    def max_participations(self) -> int:
        return self.iterations

    @property
    def participation_rate(self) -> float:
        return self.sampling_probability

    def participation_probabilities(self) -> np.ndarray:
        """(iterations,) float64: the probability of taking part at each step."""
        return np.full(self.iterations, self.sampling_probability)

    @property
    def examples_per_unit(self) -> int:
        return 1

    @property
    def sums(self) -> Sums:
        return Sums(self.sampling_probability, self.log_probability_of_none(), self.iterations)

    @property
    def holds_for_shared_examples(self) -> bool:
        return False

    @property
    def examples_overlap(self) -> bool:
        return False

    @property
    def others_are_independent(self) -> bool:
        return True

    @property
    def side_information(self) -> None:
        return None

    @property
    def why_not_cut(self) -> None:
        return None

    def squared_sensitivity(self, cross: float) -> float:
        return disjoint_participations(self.max_participations, 1, cross)

    def log_probability_of_none(self) -> float:
        return self.iterations * log_probabilities(self.sampling_probability)[1]

    def independent_rounds(self) -> tuple[float, int]:
        return self.sampling_probability, self.iterations

    @property
    def replicas(self) -> ModuleType:
        return poisson_replicas

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return EveryStep(self.sampling_probability, dataset_size)

    def draw_error(self) -> float:
        """Bound on the relative error of the density that `draw_participation` draws from."""
        return bernoulli_error(self.sampling_probability, self.iterations)

    def draw_participation(self, key, num_samples: int):
        """(num_samples, iterations) float32 of 0 and 1."""
        shape = (num_samples, self.iterations)
        return bernoulli(key, self.sampling_probability, shape).astype(jnp.float32)

    def log_likelihood_ratio(self, log_ratios, half_square_norms=None):
        """`sum_i ln(1 - p + p e^{r_i})`, the recurrence of b-min-sep at b = 1."""
        return log_bernoulli_product(log_ratios, self.sampling_probability)

    @property
    def takes_sums(self) -> bool:
        return True

    def log_likelihood_ratios_of_sums(self, arrays, factors, norms=None):
        return log_bernoulli_product_of_sums(arrays, factors, self.sampling_probability)


def log_bernoulli_product(log_ratios, probability: float):
    """`sum_i ln(1 - p + p e^{r_i})` over the last axis."""
    growth, each = log_bernoulli_growth(log_ratios, probability)
    return tree_sum(growth, axis=-1) + number(log_ratios.shape[-1] * each, growth.dtype)


def log_bernoulli_product_of_sums(arrays, factors, probability: float, counts: Counts | None = None):
    """(count, num_samples): `log_bernoulli_product` of `weighted_sums(arrays, factors)` over the steps."""
    growth, each = phase_growth_of_sums(arrays, factors, probability, 1, counts)
    return growth[0] + number(arrays[0].shape[0] * each)


def phase_growth_of_sums(
    arrays, factors, probability: float, cycle_length: int, counts: Counts | None = None
):
    """(cycle_length, count, num_samples) and a number: `log_bernoulli_growth` added up over each phase."""
    log_p, log_q = log_probabilities(probability)
    if log_q == -np.inf:
        return weighted_sums([phase_totals(array, cycle_length) for array in arrays], factors), 0.0
    growth = log_growth_of_sums(
        arrays, factors, log_odds=log_p - log_q, cycle_length=cycle_length, counts=counts
    )
    return growth, log_q


def log_bernoulli_growth(log_ratios, probability: float):
    """`ln(1 - p + p e^r)` elementwise: `ln(1 + p/(1-p) e^r)` as an array, and `ln(1-p)` to add to each.

    Summands of one sign lose nothing to each other (proofs/rounding.md, section 3). At p = 1 `r` and 0.
    """
    log_p, log_q = log_probabilities(probability)
    if log_q == -np.inf:
        return log_ratios, 0.0
    return softplus(log_ratios + number(log_p - log_q, log_ratios.dtype)), log_q
