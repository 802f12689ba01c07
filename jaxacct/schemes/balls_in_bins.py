"""Balls-in-bins sampling: each example lands in one batch of the epoch and stays there."""

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import threefry
from jaxacct.kernels.recurrence import log_mean_of_phases, phase_log_mean
from jaxacct.schemes._batch_size import participation_rate
from jaxacct.schemes.base import Scheme, Sums, disjoint_participations
from jaxacct.schemes.batches import Batches, ByPhase
from jaxacct.schemes.cyclic_poisson import (
    draw_phase,
    log_probability_of_no_turn,
    repeat_phase,
    turns_of_phases,
)
from jaxacct.schemes.numbers import Numbers
from jaxacct.schemes.poisson import phase_growth_of_sums
from jaxacct.schemes.replicas import balls_in_bins as balls_in_bins_replicas


@dataclass(frozen=True)
class BallsInBins(Scheme):
    """Each example picks one of `cycle_length` batches uniformly and takes part in it every epoch."""

    iterations: int
    cycle_length: int
    name: ClassVar[str] = "balls-in-bins"
    unit: ClassVar[str] = "example"

    def __post_init__(self):
        set_ = object.__setattr__
        set_(self, "iterations", _validate.positive_integer("iterations", self.iterations))
        set_(self, "cycle_length", _validate.positive_integer("cycle_length", self.cycle_length))

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, batch_size: float, iterations: int) -> "BallsInBins":
        """An epoch of ceil(|D| / B) batches: the expected batch size is at most `batch_size`."""
        rate = participation_rate(dataset_size, batch_size)
        return cls(iterations, int(np.ceil(round(1 / rate, 9))))

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "BallsInBins":
        """By the length of its cycle, or by both sizes, which give it."""
        numbers.refuse(cls.name, ("separation",))
        if numbers.sampling_probability is not None:
            raise ValueError(f"sampling_probability does not apply to {cls.name}; give min_separation")
        if (numbers.dataset_size is None) != (numbers.batch_size is None):
            raise ValueError("dataset_size and batch_size must be given together, or min_separation instead")
        if numbers.dataset_size is None:
            return cls(numbers.iterations, numbers.separation)
        if numbers.min_separation is not None:
            raise ValueError(
                f"min_separation must not be given together with dataset_size for {cls.name}: "
                "it is dataset_size / batch_size"
            )
        return cls.from_batch_size(**numbers.sizes())

    @property
    def min_separation(self) -> int:
        return self.cycle_length

    @property
    def sampling_probability(self) -> float:
        """1: an example never skips a batch of its phase."""
        return 1.0

    @property
    def max_participations(self) -> int:
        return -(-self.iterations // self.cycle_length)

    @property
    def participation_rate(self) -> float:
        return 1 / self.cycle_length

    def participation_probabilities(self) -> np.ndarray:
        """(iterations,) float64: the probability of taking part at each step."""
        return np.full(self.iterations, self.participation_rate)

    @property
    def examples_per_unit(self) -> int:
        return 1

    @property
    def sums(self) -> Sums:
        rounds, none = self.max_participations, self.log_probability_of_none()
        return Sums(1.0, none, rounds, self.cycle_length, phases=True)

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
        return log_probability_of_no_turn(self.iterations, self.cycle_length, 1.0)

    @property
    def phase_participations(self) -> np.ndarray:
        return turns_of_phases(self.iterations, self.cycle_length)

    @property
    def replicas(self) -> ModuleType:
        return balls_in_bins_replicas

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return ByPhase(self.cycle_length, self.sampling_probability, dataset_size, generator)

    def draw_error(self) -> float:
        """Bound on the relative error of the drawn phases' law: 64 random bits spread over the phases."""
        return threefry.integers_error(self.cycle_length)

    def draw_participation(self, key, num_samples: int):
        """(num_samples, iterations) float32 of 0 and 1."""
        mine = draw_phase(key, num_samples, self.cycle_length)
        always = jnp.ones((num_samples, self.max_participations), bool)
        return repeat_phase(mine, always, self.iterations)

    def log_likelihood_ratio(self, log_ratios, half_square_norms=None):
        """`ln (1/b) sum_phase exp( sum_k r_{phase + k b} )`, cyclic Poisson at p = 1."""
        return phase_log_mean(log_ratios, cycle_length=self.cycle_length)

    @property
    def takes_sums(self) -> bool:
        return True

    def log_likelihood_ratios_of_sums(self, arrays, factors, norms=None):
        """The sums over a phase are the same for all noise multipliers, but for their factors."""
        totals, each = phase_growth_of_sums(arrays, factors, 1.0, self.cycle_length)
        return log_mean_of_phases(totals, each, iterations=self.iterations)
