"""Poisson sampling: every example joins every batch independently."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from jaxacct.schemes.cyclic_poisson import RandomPhase
from jaxacct.schemes.protocol.numbers import participation_rate
from jaxacct.schemes.protocol.scheme import check_fields
from jaxacct.schemes.table import SamplingTable


@dataclass(frozen=True)
class Poisson(RandomPhase):
    """Poisson sampling over `iterations` steps, each with `sampling_probability` in (0, 1].

    Example:
      >>> Poisson.from_batch_size(dataset_size=1000, batch_size=10, iterations=5)
      Poisson(iterations=5, sampling_probability=0.01)
    """

    iterations: int
    sampling_probability: float
    name: ClassVar[str] = "poisson"
    has_prefixes = True
    cycle_length: ClassVar[int] = 1  # pyrefly: ignore[bad-override]
    phase_participations = None

    def __post_init__(self):
        check_fields(self, "iterations")

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, batch_size: float, iterations: int) -> "Poisson":
        """Return Poisson sampling with expected batch size `batch_size`: p = B / |D|."""
        return cls(iterations, participation_rate(dataset_size, batch_size))

    @property
    def independent_rounds(self) -> tuple[float, int]:
        return self.sampling_probability, self.iterations

    @functools.cached_property
    def table(self) -> SamplingTable:
        return SamplingTable.constant(self.iterations, self.sampling_probability, 1)
