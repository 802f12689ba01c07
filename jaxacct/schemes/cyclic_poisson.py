"""Cyclic Poisson sampling: each example draws one of b groups, which take turns (Choquette-Choo et al.)."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels.recurrence import log_mean_over_phases
from jaxacct.schemes.protocol.numbers import participation_rate, turns_of_phases
from jaxacct.schemes.protocol.scheme import ExampleScheme, check_fields
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import SamplingTable


class RandomPhase(ExampleScheme, abstract=True):
    """Scheme in which an example is eligible at the steps of one uniform phase, a cycle apart."""

    supports_truncation = True
    sparse_rate = None
    cycle_length: int
    sampling_probability: float

    @property
    def min_separation(self) -> int:
        return self.cycle_length

    @property
    def phase_participations(self) -> np.ndarray | None:
        if self.sampling_probability < 1:
            return None
        return turns_of_phases(self.iterations, self.cycle_length)

    @property
    def sums(self) -> Sums:
        rounds, none = self.max_participations, self.log_probability_of_none()
        return Sums(self.sampling_probability, none, rounds, self.cycle_length, phases=self.cycle_length > 1)

    @functools.cached_property
    def table(self) -> SamplingTable:
        n, b = self.iterations, self.cycle_length
        start = np.full(min(n, b), 1 / b)
        return SamplingTable.constant(n, self.sampling_probability, b, turns=True, start=start)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute `ln (1/b) sum_phase prod_k (1 - p + p e^r)`."""
        return log_mean_over_phases(log_ratios.T, self.sampling_probability, self.cycle_length)


@dataclass(frozen=True)
class CyclicPoisson(RandomPhase):
    """Cyclic Poisson sampling with a random phase.

    Each example picks one of `cycle_length` phases uniformly and independently, and joins each batch of
    its phase (steps phase, phase + b, ...) with `sampling_probability`. The phase is hidden from the
    adversary, which gives more privacy than the usual analysis, in which it is public.

    Attributes:
      iterations: number of steps n.
      cycle_length: b >= 1, number of phases.
      sampling_probability: p in (0, 1] for each batch of the phase.
    """

    iterations: int
    cycle_length: int
    sampling_probability: float
    name: ClassVar[str] = "cyclic-poisson"
    has_prefixes = True
    options: ClassVar = {"separation": "cycle_length"}

    def __post_init__(self):
        check_fields(self, "iterations", "cycle_length")

    @classmethod
    def from_batch_size(
        cls, *, dataset_size: int, batch_size: float, iterations: int, cycle_length: int
    ) -> "CyclicPoisson":
        """Return the scheme of expected batch size `batch_size`: p = b B / |D|, at most 1."""
        cycle_length = _validate.positive_integer("cycle_length", cycle_length)
        rate = participation_rate(dataset_size, batch_size, separation=cycle_length)
        return cls(iterations, cycle_length, min(1.0, rate * cycle_length))

    @property
    def independent_rounds(self) -> tuple[float, int]:
        """Poisson rounds with the phase revealed."""
        return self.sampling_probability, self.max_participations
