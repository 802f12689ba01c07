"""b-min-sep sampling (arXiv 2602.09338, algorithms 1 and 2): Poisson sampling with lockouts."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from jaxacct.common import validate as _validate
from jaxacct.kernels import gpu_recurrence, threefry
from jaxacct.kernels.lockouts import counts_at
from jaxacct.kernels.mean_participation import mean_participation
from jaxacct.kernels.programs import number
from jaxacct.kernels.randomness import bernoulli, bernoulli_error, coin_bits, exponential_64
from jaxacct.kernels.recurrence import blocked_log_recurrence, log_probabilities, times_log
from jaxacct.schemes.base import ExampleScheme, SparsePositions, Sums, check_fields
from jaxacct.schemes.numbers import participation_rate
from jaxacct.schemes.poisson import log_bernoulli_product
from jaxacct.schemes.replicas import b_min_sep as b_min_sep_replicas
from jaxacct.schemes.replicas import balls_in_bins as balls_in_bins_replicas
from jaxacct.schemes.replicas import poisson as poisson_replicas
from jaxacct.schemes.table import SamplingTable


def serves_gpu(dtype) -> bool:
    """Return whether the kernel of `kernels.gpu_recurrence` can replace the scan on this machine."""
    return jax.default_backend() == "gpu" and gpu_recurrence.serves(dtype)


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
    def max_participations(self) -> int:
        return -(-self.iterations // self.min_separation)

    @property
    def participation_rate(self) -> float:
        """Long-run rate of participations."""
        p = self.sampling_probability
        return p / (1 + (self.min_separation - 1) * p)

    @property
    def eligible_probability(self) -> float:
        """Stationary probability of being eligible, 1 / (1 + (b-1) p)."""
        return 1 / (1 + (self.min_separation - 1) * self.sampling_probability)

    def participation_probabilities(self) -> np.ndarray:
        """Return (iterations,) float64: the probability of participating at each step, by renewal."""
        if self.warm_start:
            return np.full(self.iterations, self.participation_rate)
        p, b = self.sampling_probability, self.min_separation
        taking_part = np.zeros(self.iterations)
        recent = 0.0  # probability of having participated in one of the last b - 1 steps
        for i in range(self.iterations):
            taking_part[i] = p * (1 - recent)
            recent += taking_part[i] - (taking_part[i - b + 1] if i >= b - 1 else 0.0)
        return taking_part

    @functools.cached_property
    def sums(self) -> Sums:
        b = self.min_separation
        terms = b if self.warm_start else 1
        steps = -(-self.iterations // b) * b
        return Sums(self.sampling_probability, self.log_probability_of_none(), steps, terms)

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

    def log_probability_of_none(self) -> float:
        return self._log_none

    @functools.cached_property
    def _log_none(self) -> float:
        log_q = log_probabilities(self.sampling_probability)[1]
        if not self.warm_start or self.min_separation == 1:
            return self.iterations * log_q
        # Eligible at step 1, 2, .., b: that leaves n, n - 1, .. eligible steps, none past the end.
        chances = np.maximum(self.iterations - np.arange(self.min_separation), 0)
        return float(logsumexp(self.start_log_weights() + times_log(chances, log_q)))

    @property
    def independent_rounds(self) -> tuple[float, int] | None:
        return (self.sampling_probability, self.iterations) if self.min_separation == 1 else None

    @property
    def replicas(self) -> ModuleType:
        if self.min_separation == 1:
            return poisson_replicas
        phases_only = self.sampling_probability == 1 and self.warm_start
        return balls_in_bins_replicas if phases_only else b_min_sep_replicas

    @property
    def sparse_positions(self) -> SparsePositions | None:
        if self.min_separation == 1:
            return None
        return SparsePositions(self.draw_positions, self.participation_rate)

    @functools.cached_property
    def table(self) -> SamplingTable:
        n, b, p = self.iterations, self.min_separation, self.sampling_probability
        start = np.exp(self.start_log_weights())[:n] if self.warm_start else (1.0,)
        return SamplingTable.constant(n, p, b, start=start)

    draw_variation: ClassVar[float] = 0.0  # pyrefly: ignore[bad-override]

    def draw_error(self) -> float:
        """Bound the relative error of the density of `draw_participation`.

        A wait of k steps is a float32 exponential between two neighbouring multiples of -ln(1-p): each end
        has a relative error of at most `10 2^-24`, which changes the probability of the wait by `2 k + 1`
        times that, and the waits of one sample add up to n steps. The start is a Bernoulli draw and a uniform
        integer from 64 bits (proofs/rounding.md, section 6).
        """
        p, n, b = self.sampling_probability, self.iterations, self.min_separation
        coins = bernoulli_error(p, n if b == 1 else 0)  # refuses a probability that cannot be drawn
        if b == 1 or (p == 1 and not self.warm_start):
            return coins
        waits = 0.0 if p == 1 else 10 * 2.0**-24 * (2 * n + self.max_participations + 1)
        start = 0.0
        if self.warm_start:
            start = math.log1p(bernoulli_error(self.eligible_probability, 1))
            start += threefry.integers_error(b)
        return math.expm1(waits + start)

    def draw_participation(self, key, num_samples: int):
        """Return (num_samples, iterations) float32 of 0 and 1, jumping between participations."""
        n = self.iterations
        if self.min_separation == 1:
            shape = (num_samples, n)
            return bernoulli(key, self.sampling_probability, shape).astype(jnp.float32)
        return counts_at(self.draw_positions(key, num_samples), 1, n)

    def draw_positions(self, key, num_samples: int):
        """Return (num_samples, max_participations) int32: steps of participation, ascending; n is none.

        For a separation of at least 2. The same draws as those of `draw_participation`.
        """
        n, b = self.iterations, self.min_separation
        gap_key, start_key = threefry.split(key)
        _, log_q = log_probabilities(self.sampling_probability)
        exponential = exponential_64(gap_key, (num_samples, self.max_participations))
        waiting = jnp.minimum(jnp.floor(exponential / number(-log_q)), n).astype(jnp.int32)
        released = draw_lockouts(start_key, self, num_samples)
        # Every later wait begins b steps after the last participation; past the end it stays there.
        position = released[:, None] + jnp.cumsum(waiting, axis=1)
        return position + b * jnp.arange(self.max_participations, dtype=jnp.int32)[None]

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute `ln f_1`, or for a warm start `ln( (f_1 + p sum_{i=2..b} f_i) / (1 + (b-1) p) )`.

        In float32 on a GPU one kernel computes many samples (`kernels.gpu_recurrence`), equal up to rounding.
        """
        if self.min_separation == 1:
            return log_bernoulli_product(log_ratios, self.sampling_probability)
        if log_ratios.ndim == 1 or not serves_gpu(log_ratios.dtype):
            return self._time_first(log_ratios.T)
        by_kernel = functools.partial(self._time_first, recurrence=gpu_recurrence.first_block)
        # A machine with a GPU may still run this on its CPU.
        return jax.lax.platform_dependent(log_ratios.T, cuda=by_kernel, default=self._time_first)

    def _time_first(self, log_ratios, recurrence=blocked_log_recurrence):
        log_p, log_q = log_probabilities(self.sampling_probability)
        first = recurrence(log_ratios, log_p=log_p, log_q=log_q, block=self.min_separation)
        if not self.warm_start:
            return first[0]
        weights = jnp.asarray(self.start_log_weights(), first.dtype)
        return jax.nn.logsumexp(first + weights.reshape(-1, *[1] * (first.ndim - 1)), axis=0)

    def loss_and_mean_participation(self, log_ratios):
        """Return (ln P/Q; mean participations given outputs) of (num_samples, iterations), for p below 1."""
        log_p, log_q = log_probabilities(self.sampling_probability)
        starts = self.start_log_weights() if self.warm_start else None
        loss, means = mean_participation(
            log_ratios.T, log_p=log_p, log_q=log_q, block=self.min_separation, start_log_weights=starts
        )
        return loss, means.T

    def start_log_weights(self) -> np.ndarray:
        """Return (b,) float64: ln probability that an example becomes eligible at step 1, 2, .., b."""
        weights = np.full(self.min_separation, self.sampling_probability)
        weights[0] = 1.0
        return np.log(weights * self.eligible_probability)


def draw_lockouts(key, scheme: BMinSep, num_samples: int):
    """Return (num_samples,) int32: initial lockout of each sample in steps, 0 under a cold start."""
    b = scheme.min_separation
    if not scheme.warm_start or b == 1:
        return jnp.zeros(num_samples, jnp.int32)
    free_key, which_key = threefry.split(key)
    eligible = scheme.eligible_probability
    sizes = coin_bits(eligible) // 32 * num_samples, num_samples, num_samples
    coins, *which = threefry.bits_32_each((free_key, *threefry.split(which_key)), sizes)
    free = bernoulli(free_key, eligible, (num_samples,), threefry.drawn(coins))
    return jnp.where(free, 0, 1 + threefry.integers_of(which, b - 1))
