"""Truncated and padded b-min-sep sampling (arXiv 2602.09338, section 7.4 and appendix D).

Batches are drawn by b-min-sep; one of more than B_max examples is truncated to a uniformly random subset of
B_max, a smaller one is padded with zeros. A sampled example that was dropped stays locked out as if it had
participated.

Given the numbers r_i of *other* examples sampled at step i, which the adversary sees, the pair is
`P = N(C x, sigma^2 I)`, `Q = N(C y, sigma^2 I)` with (x_i, y_i) = (1, 0) without truncation, (2, -1) where
the example is kept in a truncated batch and (0, 0) otherwise. Why it dominates: proofs/truncated_batches.md,
theorem 1.

Where the maximum is several deviations above the mean batch, `core.truncation` costs almost nothing
and keeps the proposals of the scheme without truncation; the pair here covers any maximum. Few samples
certify it where an example participates in few batches, by a pair that dominates it
(`schemes.truncation.independent_truncation`).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import multiply_high
from jaxacct.kernels.table import counts_at
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.protocol.scheme import ExampleScheme, check_fields, disjoint_participations
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import SamplingTable
from jaxacct.schemes.truncation.independent_truncation import (
    IndependentTruncation,
    log_likelihoods_given,
    time_first,
)
from jaxacct.schemes.truncation.truncated_batch_sizes import BatchSizes
from jaxacct.statistics.hockey_stick import Direction


@dataclass(frozen=True)
class TruncatedBMinSep(ExampleScheme):
    """b-min-sep sampling whose batches are truncated to `max_batch_size`, smaller ones padded with zeros.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1; 1 is truncated Poisson sampling.
      sampling_probability: p in (0, 1] for an eligible example.
      max_batch_size: B_max, at least the largest expected batch before truncation; from `dataset_size` on no
        batch is ever truncated and this is `BMinSep`.
      dataset_size: number of examples |D|, the sensitive one included; below 2^31.
      warm_start: as for `BMinSep`, for all examples.

    Source: arXiv 2602.09338, appendix D.
    """

    iterations: int
    min_separation: int
    sampling_probability: float
    max_batch_size: int
    dataset_size: int
    warm_start: bool = True
    name: ClassVar[str] = "truncated-b-min-sep"
    others_are_independent = False
    adjacencies = ("zero-out",)
    arrays_kept = 5  # words of the batch sizes, two a step, these, and the scores twice
    options: ClassVar = {
        "separation": "min_separation",
        "truncate_to": "max_batch_size",
        "dataset_size": "dataset_size",
        "warm_start": "warm_start",
    }

    def __post_init__(self):
        check_fields(self, "iterations", "min_separation", "max_batch_size", "dataset_size")
        max_size, size = self.max_batch_size, self.dataset_size
        if size >= 2**31:
            raise ValueError(f"dataset_size must be below 2^31 = {2**31}, got {size}")
        mean = size * float(self.untruncated.participation_probabilities().max())
        if max_size < mean * (1 - 1e-12):
            raise ValueError(
                f"max_batch_size (truncate_to) must be at least the largest expected batch size {mean:.6g}, "
                f"got {max_size}"
            )

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, max_batch_size: int, **sizes) -> "TruncatedBMinSep":
        """Return the scheme of expected batch size `batch_size` before truncation, as `BMinSep` does."""
        untruncated = BMinSep.from_batch_size(dataset_size=dataset_size, **sizes)
        start = untruncated.iterations, untruncated.min_separation, untruncated.sampling_probability
        return cls(*start, max_batch_size, dataset_size, untruncated.warm_start)

    @functools.cached_property
    def untruncated(self) -> BMinSep:
        """Same sampling without a maximum, which truncation does not change."""
        return BMinSep(self.iterations, self.min_separation, self.sampling_probability, self.warm_start)

    @property
    def table(self) -> SamplingTable:
        """Table of the sampling before truncation."""
        return self.untruncated.table

    sparse_rate = None

    def replicas(self, mechanism) -> None:
        return None

    @property
    def can_truncate(self) -> bool:
        """Whether any batch can exceed the maximum."""
        return self.max_batch_size < self.dataset_size

    @property
    def sums(self) -> Sums:
        return dataclasses.replace(self.untruncated.sums, max_sampled=self.dataset_size)

    @property
    def side_information(self) -> BatchSizes:
        return BatchSizes(self.untruncated, self.dataset_size)

    def squared_sensitivity(self, cross: float) -> float:
        # An example may take another one's place in the batch.
        return disjoint_participations(self.max_participations, 2 if self.can_truncate else 1, cross)

    def log_probability_of_none(self) -> float:
        """Return -inf: Q is a mixture, too, so P/Q has no lower bound."""
        return -math.inf

    @functools.cached_property
    def independent_truncation(self) -> IndependentTruncation:
        return IndependentTruncation.of(self.untruncated, self.max_batch_size, self.dataset_size)

    @property
    def batch_size_cap(self) -> int:
        return self.max_batch_size

    @property
    def required_dataset_size(self) -> int:
        return self.dataset_size

    # -- Drawing ------------------------------------------------------------------------------------------

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """Return (iterations,) float64: the mean size of the truncated batches, without padding."""
        rates, most = self.participation_probabilities(), np.arange(self.max_batch_size)
        # E min(R, B) = sum_{k < B} P(R > k), R ~ Binomial(|D|, rate) as examples are independent.
        values, where = np.unique(rates, return_inverse=True)
        return np.array([scipy.stats.binom.sf(most, dataset_size, rate).sum() for rate in values])[where]

    def draw_counts(self, key, num_samples: int, direction: str, side=None):
        """Draw participation counts of the dominating pair, given the others' batch sizes r.

        "remove" draws x (0, 1 and 2; the distribution P), "add" draws y (0 and -1; the distribution Q).

        Source: arXiv 2602.09338, corollary D.2.
        """
        batch_sizes, n = _required(side), self.iterations
        most = min(self.max_batch_size, self.dataset_size)  # of the same effect, in 32 bits
        sampled_key, kept_key = jax.random.split(key)
        positions = self.draw_positions(sampled_key, num_samples)
        # Only at the few steps at which the example is sampled.
        here = jnp.minimum(positions, n - 1)
        first = n * jnp.arange(num_samples, dtype=jnp.int32)[:, None]
        bits = threefry.bits_32_at(kept_key, num_samples * n, here + first)
        sizes = jnp.take_along_axis(batch_sizes, here, axis=1, mode="promise_in_bounds")
        # Kept when a uniform place among the r + 1 sampled is one of the first B_max.
        place = multiply_high(bits, sizes.astype(jnp.uint32) + 1)
        kept = (place < most).astype(jnp.float32)
        drawn_from_p = Direction.of(direction) is Direction.REMOVE
        when_truncated, when_whole = (2 * kept, 1.0) if drawn_from_p else (-kept, 0.0)
        return counts_at(positions, jnp.where(sizes >= most, when_truncated, when_whole), n)

    @property
    def draw_errors(self) -> tuple[float, float]:
        """Errors of the density of `draw_counts` given the batch sizes."""
        relative, variation = super().draw_errors
        if self.can_truncate:
            # Error 2^-32 relative to B / (r+1) >= B / |D|, and to 1 - B / (r+1) >= 1 / (B+1).
            rarest = max(self.dataset_size / self.max_batch_size, self.max_batch_size + 1)
            relative = math.expm1(math.log1p(relative) + self.max_participations * 2.0**-32 * rarest)
        return relative, variation

    # -- Likelihoods --------------------------------------------------------------------------------------

    def log_likelihoods(self, log_ratios, half_square_norms, batch_sizes):
        """Return `(ln P/R, ln Q/R)`, (...), given the others' batch sizes, R the centred Gaussian.

        `log_ratios` are (..., iterations), `(s_i - ||c_i||^2 / 2) / sigma^2`, as for `BMinSep`, and
        `half_square_norms` () or (iterations,), `||c_i||^2 / (2 sigma^2)`. The second is 0 exactly where no
        r_i reaches the maximum, and the first is then that of `BMinSep`.

        Source: arXiv 2602.09338, appendix D, the recurrences after corollary D.2. Exact up to rounding.
        """
        if not self.can_truncate:
            return self.untruncated.log_likelihood_ratios(log_ratios), jnp.zeros_like(log_ratios[..., 0])
        # Time first, as in the recurrence and in the drawn batch sizes: one order for all.
        ratios, sizes, half_norms = log_ratios.T, batch_sizes.T, time_first(half_square_norms, log_ratios)
        dtype, max_size = ratios.dtype, self.max_batch_size
        is_truncated = sizes >= max_size
        sampled = jnp.where(is_truncated, sizes, max_size) + 1
        log_sampled = jnp.log(sampled.astype(dtype))
        log_kept = jnp.asarray(math.log(max_size), dtype) - log_sampled
        keeping = log_kept, jnp.log((sampled - max_size).astype(dtype)) - log_sampled
        log_p, log_q = log_likelihoods_given(self.untruncated, ratios, half_norms, is_truncated, *keeping)
        return log_p, jnp.where(sizes.max(axis=0) >= max_size, log_q, jnp.zeros_like(log_q))

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute `ln P/Q` given the others' batch sizes; see `log_likelihoods`."""
        log_p, log_q = self.log_likelihoods(log_ratios, half_square_norms, _required(side))
        return log_p - log_q


def _required(batch_sizes):
    if batch_sizes is None:
        raise ValueError("batch_sizes must be given for truncated-b-min-sep")
    return batch_sizes
