"""Cyclic Poisson sampling: the data set is split into b parts that take turns (Choquette-Choo et al.)."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from jaxacct.common import validate as _validate
from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import bernoulli, bernoulli_error
from jaxacct.kernels.recurrence import log_mean_of_phases, phase_log_mean
from jaxacct.schemes._batch_size import participation_rate
from jaxacct.schemes.base import Scheme, Sums, disjoint_participations, times_log
from jaxacct.schemes.batches import Batches, ByPhase
from jaxacct.schemes.poisson import log_bernoulli_growth, log_probabilities, phase_growth_of_sums
from jaxacct.schemes.replicas import cyclic as cyclic_replicas


@dataclass(frozen=True)
class CyclicPoisson(Scheme):
    """Cyclic Poisson sampling with a random phase.

    Each example picks one of `cycle_length` phases uniformly and independently, and joins each batch of
    its phase (steps phase, phase + b, ...) with `sampling_probability`. The adversary does not see the
    phase: that is more private than the usual analysis, which reveals it.
    """

    iterations: int
    cycle_length: int
    sampling_probability: float
    name: ClassVar[str] = "cyclic-poisson"
    unit: ClassVar[str] = "example"
    options: ClassVar = {"separation": "cycle_length"}

    def __post_init__(self):
        set_ = object.__setattr__
        set_(self, "iterations", _validate.positive_integer("iterations", self.iterations))
        set_(self, "cycle_length", _validate.positive_integer("cycle_length", self.cycle_length))
        p = _validate.probability("sampling_probability", self.sampling_probability)
        set_(self, "sampling_probability", p)

    @classmethod
    def from_batch_size(
        cls, *, dataset_size: int, batch_size: float, iterations: int, cycle_length: int
    ) -> "CyclicPoisson":
        """Expected batch size `batch_size` from parts of |D| / b examples: p = b B / |D|."""
        cycle_length = _validate.positive_integer("cycle_length", cycle_length)
        rate = participation_rate(dataset_size, batch_size, separation=cycle_length)
        return cls(iterations, cycle_length, min(1.0, rate * cycle_length))

    @property
    def min_separation(self) -> int:
        return self.cycle_length

    @property
    def max_participations(self) -> int:
        return -(-self.iterations // self.cycle_length)

    @property
    def participation_rate(self) -> float:
        return self.sampling_probability / self.cycle_length

    def participation_probabilities(self) -> np.ndarray:
        """(iterations,) float64: the probability of taking part at each step."""
        return np.full(self.iterations, self.participation_rate)

    @property
    def examples_per_unit(self) -> int:
        return 1

    @property
    def sums(self) -> Sums:
        rounds, none = self.max_participations, self.log_probability_of_none()
        return Sums(self.sampling_probability, none, rounds, self.cycle_length, phases=True)

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
        return log_probability_of_no_turn(self.iterations, self.cycle_length, self.sampling_probability)

    def independent_rounds(self) -> tuple[float, int]:
        """With the phase revealed."""
        return self.sampling_probability, self.max_participations

    @property
    def phase_participations(self) -> np.ndarray | None:
        """Where nobody skips a batch of the phase."""
        certain = self.sampling_probability == 1
        return turns_of_phases(self.iterations, self.cycle_length) if certain else None

    @property
    def replicas(self) -> ModuleType:
        return cyclic_replicas

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return ByPhase(self.cycle_length, self.sampling_probability, dataset_size, generator)

    def draw_error(self) -> float:
        """Bound on the relative error of the density that `draw_participation` draws from."""
        coins = bernoulli_error(self.sampling_probability, self.max_participations)
        return (1 + coins) * (1 + threefry.integers_error(self.cycle_length)) - 1

    def draw_participation(self, key, num_samples: int):
        """(num_samples, iterations) float32 of 0 and 1."""
        phase_key, join_key = threefry.split(key)
        rounds = self.max_participations
        mine = draw_phase(phase_key, num_samples, self.cycle_length)
        joins = bernoulli(join_key, self.sampling_probability, (num_samples, rounds))
        return repeat_phase(mine, joins, self.iterations)

    def log_likelihood_ratio(self, log_ratios, half_square_norms=None):
        """`ln (1/b) sum_phase prod_k (1 - p + p e^r)`."""
        growth, each = log_bernoulli_growth(log_ratios, self.sampling_probability)
        return phase_log_mean(growth, each, cycle_length=self.cycle_length)

    @property
    def takes_sums(self) -> bool:
        return True

    def log_likelihood_ratios_of_sums(self, arrays, factors, norms=None):
        growth, each = phase_growth_of_sums(arrays, factors, self.sampling_probability, self.cycle_length)
        return log_mean_of_phases(growth, each, iterations=self.iterations)


def turns_of_phases(iterations: int, cycle_length: int) -> np.ndarray:
    """(cycle_length,) int64: the batches of each phase."""
    return -(-np.maximum(iterations - np.arange(cycle_length), 0) // cycle_length)


def log_probability_of_no_turn(iterations: int, cycle_length: int, probability: float) -> float:
    """ln probability that an example of a uniform phase joins none of the batches of its phase."""
    turns = turns_of_phases(iterations, cycle_length)
    log_none = times_log(turns, log_probabilities(probability)[1])
    return float(logsumexp(log_none) - math.log(cycle_length))


def draw_phase(key, num_samples: int, cycle_length: int):
    """(num_samples, cycle_length) bool, one true entry a row: a uniform phase."""
    phase = threefry.integers(key, (num_samples, 1), cycle_length)
    return phase == jnp.arange(cycle_length, dtype=jnp.int32)[None]


def repeat_phase(mine, joins, iterations: int):
    """Lay (num, b) phases and (num, rounds) round indicators out as (num, iterations) float32."""
    return (
        (joins[:, :, None] & mine[:, None, :]).reshape(mine.shape[0], -1)[:, :iterations].astype(jnp.float32)
    )
