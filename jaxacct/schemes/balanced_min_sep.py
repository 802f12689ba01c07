"""Balanced min-sep sampling: every example participates equally often (arXiv 2605.07072).

The examples that participate most determine the privacy. With a fixed number of participations no example
participates more than the others, so less noise is needed (proofs/fixed_counts.md).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.common import validate
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.schemes.protocol.numbers import participation_rate
from jaxacct.schemes.protocol.scheme import SizedScheme, check_fields
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import SamplingTable

_MAX_ROWS = 2**22


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
    options: ClassVar = {"separation": "min_separation"}

    def __post_init__(self):
        check_fields(self, "iterations", "min_separation", probability=False)
        validate.check_fields(self, participations=validate.positive_number)
        if self.participations <= 1:
            validate.set_fields(self, min_separation=self.iterations)
        n, b = self.iterations, self.min_separation
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
    def phase_participations(self) -> np.ndarray | None:
        return np.ones(self.iterations, int) if self.participations <= 1 else None

    @property
    def phase_probability(self) -> float:
        return self.keep_probability

    @property
    def batch_rates(self) -> np.ndarray:
        return self.participation_probabilities()

    def log_probability_of_none(self) -> float:
        return self.max_participations * log_probabilities(self.keep_probability)[1]

    @functools.cached_property
    def table(self) -> SamplingTable:
        """An eligible example with j participations left has `columns` positions for the first of them."""
        n, k = self.iterations, self.max_participations
        # Nothing follows a single participation: its lockout is as long as tables of two replicas allow.
        b = max(1, min(n, _MAX_ROWS // n)) if k == 1 else self.min_separation
        left = np.arange(k + 1)
        columns = n - np.arange(n)[:, None] - (left - 1) * (b - 1)
        join = np.where(left < columns, left / np.maximum(columns, 1), np.sign(left))
        return SamplingTable(join, b, False, (1.0,), self.keep_probability)

    @property
    def sums(self) -> Sums:
        return dataclasses.replace(super().sums, fixed_count=self.max_participations)
