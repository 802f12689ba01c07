"""Epochwise allocation: one participation an epoch, at a new random step each time.

It is the sampling distribution nearest to a reshuffled loader that has a certificate with amplification
(proofs/fixed_counts.md, section 7).
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.kernels.likelihoods import epochs
from jaxacct.schemes.balls_in_bins import BallsInBins
from jaxacct.schemes.protocol.scheme import SizedScheme, check_fields
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import SamplingTable


@dataclass(frozen=True)
class EpochwiseAllocation(SizedScheme):
    """One participation in each epoch of `epoch_steps` steps, consecutive ones `min_separation` apart.

    In the first epoch the step is uniform. In every later one each eligible step is the participation with
    probability 1 / (M - b + 1), until M - b + 1 steps of the epoch are left, among which it is uniform; M is
    `epoch_steps`, b `min_separation`. So every step of every epoch has the probability 1 / M, and the
    expected batch size is constant. b = 1 draws each epoch independently ("redrawn bins"); b = M keeps the
    first epoch's step (balls-in-bins).

    Attributes:
      iterations: number of steps n. The last epoch may end early, and then has a participation or none.
      epoch_steps: M >= 1.
      min_separation: b in 1 .. M. With one epoch it has no effect and is M.
    """

    iterations: int
    epoch_steps: int
    min_separation: int = 1
    name: ClassVar[str] = "epochwise-allocation"
    options: ClassVar = {"separation": "min_separation"}

    def __post_init__(self):
        check_fields(self, "iterations", "epoch_steps", "min_separation", probability=False)
        if self.min_separation > self.epoch_steps:
            raise ValueError(
                f"min_separation must be at most epoch_steps {self.epoch_steps}, got {self.min_separation}"
            )
        if self.iterations <= self.epoch_steps:
            object.__setattr__(self, "min_separation", self.epoch_steps)

    @classmethod
    def from_batch_size(
        cls, *, dataset_size: int, batch_size: float, iterations: int, min_separation: int = 1
    ) -> "EpochwiseAllocation":
        """Return epochs of ceil(|D| / B) steps: the expected batch size is at most `batch_size`."""
        bins = BallsInBins.from_batch_size(
            dataset_size=dataset_size, batch_size=batch_size, iterations=iterations
        )
        return cls(iterations, bins.cycle_length, min_separation)

    @property
    def fixed_bins(self) -> BallsInBins | None:
        """The same sampling distribution where the step of the first epoch is that of all others."""
        same = self.min_separation == self.epoch_steps
        return BallsInBins(self.iterations, self.epoch_steps) if same else None

    @property
    def phase_participations(self) -> np.ndarray | None:
        return None if self.fixed_bins is None else self.fixed_bins.phase_participations

    @property
    def independent_epochs(self) -> tuple[tuple[int, int, int], ...]:
        """Empty where b > 1."""
        if self.min_separation > 1:
            return ()
        whole, more = divmod(self.iterations, self.epoch_steps)
        unfinished = [(1, more, self.epoch_steps - more)] if more else []
        return ((whole, self.epoch_steps, 0), *unfinished)

    @property
    def sums(self) -> Sums:
        if self.fixed_bins is not None:
            return self.fixed_bins.sums
        sizes = self.max_participations, self.epoch_steps, self.min_separation
        return Sums(
            1.0,
            -math.inf,
            self.iterations,
            fixed_count=self.max_participations,
            error=functools.partial(epochs.rounding_bound, *sizes),
        )

    @functools.cached_property
    def table(self) -> SamplingTable:
        n, M, b = self.iterations, self.epoch_steps, self.min_separation
        steps, place = np.arange(n), np.arange(n) % M
        left = np.where(steps < M, M - place, np.minimum(M - b + 1, M - place))
        return SamplingTable(1 / left, np.maximum(M - place, b), False, (1.0,))

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute ln of the mean over patterns of the product of `e^r`."""
        if self.fixed_bins is not None:
            return self.fixed_bins.log_likelihood_ratios(log_ratios)
        if log_ratios.ndim == 1:
            return self.log_likelihood_ratios(log_ratios[None])[0]
        return epochs.log_mean_over_places(log_ratios.T, self.epoch_steps, self.min_separation)
