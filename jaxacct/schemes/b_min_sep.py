"""b-min-sep sampling (arXiv 2602.09338, algorithms 1 and 2): Poisson sampling with lockouts."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels.recurrence import log_mean_over_phases
from jaxacct.schemes.protocol.numbers import participation_rate, turns_of_phases
from jaxacct.schemes.protocol.scheme import ExampleScheme, check_fields
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.replicas import by_age
from jaxacct.schemes.table import SamplingTable


@dataclass(frozen=True)
class BMinSep(ExampleScheme):
    """b-min-sep sampling.

    Each example that participated in none of the last `min_separation` - 1 batches joins the next one with
    `sampling_probability`, independently.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1; 1 is Poisson sampling.
      sampling_probability: p in (0, 1] for an eligible example; 1 with a warm start is balls-in-bins.
      warm_start: start every example from the stationary distribution (algorithm 2), so that the expected
        batch size is the same at every step; otherwise all are eligible at the first (algorithm 1).
    """

    iterations: int
    min_separation: int
    sampling_probability: float
    warm_start: bool = True
    name: ClassVar[str] = "b-min-sep"
    has_prefixes = True
    supports_truncation = True
    options: ClassVar = {"separation": "min_separation", "warm_start": "warm_start"}

    def __post_init__(self):
        check_fields(self, "iterations", "min_separation")

    @classmethod
    def from_batch_size(
        cls,
        *,
        dataset_size: int,
        batch_size: float,
        iterations: int,
        min_separation: int,
        warm_start: bool = True,
    ) -> "BMinSep":
        """Return the scheme of mean batch size `batch_size`: p = p0 / (1 - p0 (b-1)), p0 = B / |D|."""
        b = _validate.positive_integer("min_separation", min_separation)
        participation_rate(dataset_size, batch_size, separation=b)
        probability = batch_size / (dataset_size - batch_size * (b - 1))
        return cls(iterations, b, min(1.0, probability), warm_start)

    @property
    def participation_rate(self) -> float:
        """Long-run rate of participations."""
        p = self.sampling_probability
        return p / (1 + (self.min_separation - 1) * p)

    @functools.cached_property
    def sums(self) -> Sums:
        b, p = self.min_separation, self.sampling_probability
        steps = -(-self.iterations // b)
        table = self.table if p < 1 and b > 1 else None
        terms = b if self.warm_start else 1
        return Sums(p, self.log_probability_of_none(), steps * b, terms, table=table)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - all proposals of a calibration share the table of the result
    def inflated(self, times: int) -> "tuple[BMinSep, float] | None":
        """Return (inflated scheme, ln of the minimum ratio of pattern probabilities).

        See proofs/proposals.md, section 2.6. A vector of k participations has at most n - k eligible steps
        without one.
        """
        b, p, more = self.min_separation, self.sampling_probability, times * self.sampling_probability
        if more > 0.5:
            return None
        log_ratio = math.log(times) + (self.iterations - 1) * (math.log1p(-more) - math.log1p(-p))
        if self.warm_start:
            log_ratio += math.log1p((b - 1) * p) - math.log1p((b - 1) * more)
        inflated = dataclasses.replace(self, sampling_probability=more)
        return inflated, log_ratio - 1e-12 * (1 + abs(log_ratio) + self.iterations * more)

    @property
    def phase_participations(self) -> np.ndarray | None:
        """Where participations are certain, or at most one, which is as likely at every step."""
        n, b, p = self.iterations, self.min_separation, self.sampling_probability
        if not self.warm_start or (p < 1 and b < n):
            return None
        return np.ones(n, int) if p < 1 else turns_of_phases(n, b)

    @property
    def phase_probability(self) -> float:
        of_run = self.iterations * self.participation_rate * (1 + 1e-12)
        return min(1.0, of_run) if self.sampling_probability < 1 else 1.0

    @property
    def independent_rounds(self) -> tuple[float, int] | None:
        return (self.sampling_probability, self.iterations) if self.min_separation == 1 else None

    def replicas(self, mechanism) -> ModuleType | None:
        overlap = self.sampling_probability < 1 and mechanism.strategy.bands > self.min_separation
        return by_age if overlap and by_age.fits(mechanism) else super().replicas(mechanism)

    @functools.cached_property
    def table(self) -> SamplingTable:
        n, b, p = self.iterations, self.min_separation, self.sampling_probability
        start = np.exp(self.start_log_weights())[:n] if self.warm_start else (1.0,)
        return SamplingTable.constant(n, p, b, start=start)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        b, p = self.min_separation, self.sampling_probability
        if b == 1 or p == 1:  # Poisson sampling, or only the phase is random
            return log_mean_over_phases(log_ratios.T, p, b, self.warm_start)
        return super().log_likelihood_ratios(log_ratios)

    def start_log_weights(self) -> np.ndarray:
        """Return (b,) float64: ln probability that an example becomes eligible at step 1, 2, .., b."""
        weights = np.full(self.min_separation, self.sampling_probability)
        weights[0] = 1.0
        return np.log(weights / weights.sum())
