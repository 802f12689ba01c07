"""Schemes whose unit is one example: a sampling table defines them."""

import jax
import numpy as np

from jaxacct.kernels.table import counts_at
from jaxacct.schemes.protocol.batches import Batches, FromTable
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.protocol.scheme import Scheme, SparsePositions, Sums, disjoint_participations
from jaxacct.schemes.table import SamplingTable


class ExampleScheme(Scheme, abstract=True):
    """Scheme whose unit is one example, sampled independently of all others."""

    unit = "example"
    adjacencies = ("zero-out", "add-or-remove-one", "replace-one")
    examples_overlap = False
    holds_for_shared_examples = False
    others_are_independent = True
    examples_per_unit = 1
    side_information = None

    table: SamplingTable
    """Table of the sampler."""

    @property
    def max_participations(self) -> int:
        return self.table.max_participations

    def participation_probabilities(self) -> np.ndarray:
        return self.table.participation_probabilities

    def log_probability_of_none(self) -> float:
        return self.table.log_probability_of_none

    def draw_error(self) -> float:
        return self.table.draw_error

    @property
    def draw_variation(self) -> float:
        return self.table.draw_variation

    @property
    def sums(self) -> Sums:
        probability = 1.0 if self.table.num_left > 1 else float(self.table.join.max())
        return Sums(probability, self.log_probability_of_none(), self.iterations, table=self.table)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        if log_ratios.ndim == 1:
            return self.table.log_likelihood_ratios(log_ratios[:, None])[0]
        return self.table.log_likelihood_ratios(log_ratios.T)

    def draw_positions(self, key, num_samples: int) -> jax.Array:
        """Draw (num_samples, slots) int32: steps of participation, ascending; n is none."""
        return self.table.draw_positions(key, num_samples)

    def draw_participation(self, key, num_samples: int):
        return counts_at(self.draw_positions(key, num_samples), 1, self.iterations)

    @property
    def sparse_positions(self) -> SparsePositions | None:
        rate = float(self.participation_probabilities().mean())
        return SparsePositions(self.draw_positions, rate) if self.min_separation > 1 else None

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return FromTable(self.table, dataset_size, generator)

    @property
    def max_rate(self) -> float:
        return float(self.participation_probabilities().max())

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        return dataset_size * self.participation_probabilities()

    def squared_sensitivity(self, cross: float) -> float:
        return disjoint_participations(self.max_participations, 1, cross)


class SizedScheme(ExampleScheme, abstract=True):
    """Scheme that its sizes alone determine: it has no probability."""

    participation_rate: float
    """Long-run rate of participations."""

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "Scheme":
        return cls.from_batch_size(min_separation=numbers.separation, **numbers.only_sizes(cls))
