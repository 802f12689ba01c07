"""Poisson sampling: every example joins every batch independently."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.kernels.programs import number
from jaxacct.kernels.recurrence import log_probabilities, softplus, tree_sum
from jaxacct.schemes.protocol.numbers import participation_rate
from jaxacct.schemes.protocol.scheme import ExampleScheme, check_fields
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import SamplingTable


@dataclass(frozen=True)
class Poisson(ExampleScheme):
    """Poisson sampling over `iterations` steps, each with `sampling_probability` in (0, 1].

    Example:
      >>> Poisson.from_batch_size(dataset_size=1000, batch_size=10, iterations=5)
      Poisson(iterations=5, sampling_probability=0.01)
    """

    iterations: int
    sampling_probability: float
    name: ClassVar[str] = "poisson"
    has_prefixes = True
    supports_truncation = True

    def __post_init__(self):
        check_fields(self, "iterations")

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, batch_size: float, iterations: int) -> "Poisson":
        """Return Poisson sampling with expected batch size `batch_size`: p = B / |D|."""
        return cls(iterations, participation_rate(dataset_size, batch_size))

    @property
    def min_separation(self) -> int:
        return 1

    @property
    def sums(self) -> Sums:
        return Sums(self.sampling_probability, self.log_probability_of_none(), self.iterations)

    @property
    def independent_rounds(self) -> tuple[float, int]:
        return self.sampling_probability, self.iterations

    @functools.cached_property
    def table(self) -> SamplingTable:
        return SamplingTable.constant(self.iterations, self.sampling_probability, 1)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute `sum_i ln(1 - p + p e^{r_i})`, the recurrence of b-min-sep at b = 1."""
        return log_bernoulli_product(log_ratios, self.sampling_probability)


def log_bernoulli_product(log_ratios, probability: float):
    """Return `sum_i ln(1 - p + p e^{r_i})` over the last axis."""
    growth, each = log_bernoulli_growth(log_ratios, probability)
    return tree_sum(growth, axis=-1) + number(log_ratios.shape[-1] * each, growth.dtype)


def log_bernoulli_growth(log_ratios, probability: float):
    """Return `ln(1 - p + p e^r)` elementwise: `ln(1 + p/(1-p) e^r)` as an array, and `ln(1-p)` for each.

    Summands of one sign do not cancel (proofs/rounding.md, section 3). At p = 1 it is `r` and 0.
    """
    log_p, log_q = log_probabilities(probability)
    if log_q == -np.inf:
        return log_ratios, 0.0
    return softplus(log_ratios + number(log_p - log_q, log_ratios.dtype)), log_q
