"""Truncated and padded b-min-sep sampling (arXiv 2602.09338, section 7.4 and appendix D).

Batches are drawn by b-min-sep; one of more than B_max examples is cut to a uniformly random subset of B_max,
a smaller one is padded with zeros. An example that was sampled and cut stays barred as if it had taken part.

Given the numbers r_i of *other* examples sampled at step i, which the adversary sees, the pair is
`P = N(C x, sigma^2 I)`, `Q = N(C y, sigma^2 I)` with (x_i, y_i) = (1, 0) where nothing is cut, (2, -1) where
the example is kept in a cut batch and (0, 0) otherwise. Why it dominates: proofs/truncated_batches.md,
theorem 1.

Where the maximum is some deviations above the mean batch, `accountants.truncation` costs next to nothing and
keeps the proposals of what is not cut; the pair here serves any maximum. Few samples certify it where an
example takes part in few batches, by a pair that dominates it (`schemes.independent_cuts`).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from jaxacct import _validate
from jaxacct.kernels import threefry
from jaxacct.kernels.binomial import binomial_of_words, binomial_tables
from jaxacct.kernels.recurrence import log_add_exp
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.base import Scheme, SideInformation, Sums, counts_at, disjoint_participations
from jaxacct.schemes.batches import Batches
from jaxacct.schemes.independent_cuts import IndependentCuts, time_first
from jaxacct.statistics.direction import Direction

# Steps whose random words are made together, so that they fit a cache.
_STEPS_AT_ONCE = 256


@dataclass(frozen=True)
class TruncatedBMinSep(Scheme):
    """b-min-sep sampling whose batches are cut to `max_batch_size`, smaller ones padded with zeros.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1; 1 is truncated Poisson sampling.
      sampling_probability: p in (0, 1] for an eligible example.
      max_batch_size: B_max, at least the largest expected batch before cutting; from `dataset_size` on
        nothing is ever cut and this is `BMinSep`.
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
    unit: ClassVar[str] = "example"
    options: ClassVar = {
        "separation": "min_separation",
        "truncate_to": "max_batch_size",
        "dataset_size": "dataset_size",
        "warm_start": "warm_start",
    }

    def __post_init__(self):
        plain = BMinSep(self.iterations, self.min_separation, self.sampling_probability, self.warm_start)
        most = _validate.positive_integer("max_batch_size", self.max_batch_size)
        size = _validate.positive_integer("dataset_size", self.dataset_size)
        if size >= 2**31:
            raise ValueError(f"dataset_size must be below 2^31 = {2**31}, was {size}")
        mean = size * float(plain.participation_probabilities().max())
        if most < mean * (1 - 1e-12):
            raise ValueError(
                f"max_batch_size must be at least the largest expected batch size {mean:.6g}, was {most}"
            )
        checked = (plain.iterations, plain.min_separation, plain.sampling_probability, most, size)
        names = "iterations min_separation sampling_probability max_batch_size dataset_size".split()
        for field, value in zip(names, checked, strict=True):
            object.__setattr__(self, field, value)

    @classmethod
    def from_batch_size(
        cls,
        *,
        dataset_size: int,
        batch_size: float,
        iterations: int,
        min_separation: int,
        max_batch_size: int,
        warm_start: bool = True,
    ) -> "TruncatedBMinSep":
        """Long-run expected batch size `batch_size` before cutting."""
        plain = BMinSep.from_batch_size(
            dataset_size=dataset_size,
            batch_size=batch_size,
            iterations=iterations,
            min_separation=min_separation,
            warm_start=warm_start,
        )
        p = plain.sampling_probability
        return cls(iterations, min_separation, p, max_batch_size, dataset_size, warm_start)

    @functools.cached_property
    def uncut(self) -> BMinSep:
        """The same sampling without a maximum: who is sampled when, which cuts do not change."""
        return BMinSep(self.iterations, self.min_separation, self.sampling_probability, self.warm_start)

    @property
    def max_participations(self) -> int:
        return self.uncut.max_participations

    @property
    def participation_rate(self) -> float:
        """The long-run rate of being sampled, before cutting."""
        return self.uncut.participation_rate

    @property
    def can_cut(self) -> bool:
        """Whether any batch can exceed the maximum."""
        return self.max_batch_size < self.dataset_size

    @property
    def examples_per_unit(self) -> int:
        return 1

    @property
    def sums(self) -> Sums:
        return dataclasses.replace(self.uncut.sums, most_sampled=self.dataset_size)

    @property
    def side_information(self) -> "BatchSizes":
        return BatchSizes(self)

    def squared_sensitivity(self, cross: float) -> float:
        # An example may take another one's place in the batch.
        return disjoint_participations(self.max_participations, 2 if self.can_cut else 1, cross)

    def log_probability_of_none(self) -> float:
        """-inf: Q is a mixture too, so nothing is known of P/Q from below."""
        return -math.inf

    @property
    def why_not_cut(self) -> str:
        return "for truncated-b-min-sep, which has its own"

    @functools.cached_property
    def independent_cuts(self) -> IndependentCuts:
        return IndependentCuts.of(self.uncut, self.max_batch_size, self.dataset_size)

    @property
    def cut_to(self) -> int:
        return self.max_batch_size

    def check_dataset_size(self, dataset_size: int) -> None:
        if dataset_size != self.dataset_size:
            raise ValueError(f"dataset_size must be the scheme's {self.dataset_size}, was {dataset_size}")

    @property
    def assumption(self) -> str:
        return (
            f"batches above {self.max_batch_size} are cut to uniformly random subsets of that size, "
            "that no batch size, time of an abort or run time is published, "
        )

    def participation_probabilities(self) -> np.ndarray:
        """(iterations,) float64: the probability of being sampled at each step, before cutting."""
        return self.uncut.participation_probabilities()

    # -- Drawing ------------------------------------------------------------------------------------------

    def batch_size_tables(self) -> Any:
        """The pytree of arrays that `draw_batch_sizes` looks up; made once per process, 8 bytes a cell."""
        p, b, others = self.sampling_probability, self.min_separation, self.dataset_size - 1
        joining = binomial_tables(others, (p,)).arrays if p < 1 else None
        past = None
        if self.warm_start and b > 1:
            past = binomial_tables(others, self._past_probabilities()).arrays
        return joining, past

    def _past_probabilities(self) -> tuple[float, ...]:
        """Of having taken part t - (b-1) steps before the first, given at none before that, t = 0 .. b-2.

        The stationary law has p / (1 + (b-1) p) for each of these steps, so given none of t it is
        `p / (1 + (b-1-t) p)`.
        """
        p, b = self.sampling_probability, self.min_separation
        return tuple(p / (1 + (b - 1 - t) * p) for t in range(b - 1))

    def draw_batch_sizes(self, key, num_samples: int, tables=None):
        """Batch sizes of the other `dataset_size` - 1 examples before cutting.

        Exact recurrence over counts: the pool at step i is everyone who was not sampled at steps
        i-b+1 .. i-1, and each member joins with probability p. A warm start draws the counts of the b - 1
        steps before the first as one multinomial of the stationary law.

        Args:
          key: a JAX key.
          num_samples: independent runs; static.
          tables: what `batch_size_tables` returns, to pass it through a jit boundary; by default built in.

        Returns:
          (num_samples, iterations) int32.

        Source: arXiv 2602.09338, appendix D and algorithm 2. Error: `batch_size_error`.
        """
        joining, past = self.batch_size_tables() if tables is None else tables
        n, b, others = self.iterations, self.min_separation, self.dataset_size - 1
        past_key, key = threefry.split(key)
        recent = jnp.zeros((b - 1, num_samples), jnp.int32)  # of the b - 1 steps before
        pool = jnp.full((num_samples,), others, jnp.int32)
        if past is not None:

            def past_step(pool, at):
                words, places, lowest = at
                size = binomial_of_words(words, pool, past._replace(places=places, lowest=lowest))
                return pool - size, size

            keys = _blocks(past_key, b - 1)
            # The last table serves the steps beyond, which are drawn for nothing.
            spare = [(0, keys.size - (b - 1)), (0, 0), (0, 0)]
            of_steps = [
                jnp.pad(part, spare, mode="edge").reshape(*keys.shape, *part.shape[1:])
                for part in (past.places, past.lowest)
            ]

            def past_block(pool, at):
                keys, *of_steps = at
                return lax.scan(past_step, pool, (_words(keys, past, num_samples), *of_steps))

            _, recent = lax.scan(past_block, pool, (keys, *of_steps))
            recent = recent.reshape(-1, num_samples)[: b - 1]
            pool = pool - recent.sum(axis=0)
        at_joining = None if joining is None else joining.of(0)

        def step(pool, at):
            words, back = at
            size = pool if at_joining is None else binomial_of_words(words, pool, at_joining)
            return (pool if back is None else pool - size + back), size

        def block(carry, keys):
            pool, recent = carry
            back = recent[: len(keys)] if b > 1 else None
            words = None if at_joining is None else _words(keys, at_joining, num_samples)
            pool, sizes = lax.scan(step, pool, (words, back), length=len(keys))
            return (pool, jnp.concatenate([recent, sizes])[len(keys) :] if b > 1 else recent), sizes

        _, sizes = lax.scan(block, (pool, recent), _blocks(key, n, b - 1 if b > 1 else n))
        return sizes.reshape(-1, num_samples)[:n].T

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """(iterations,) float64: the mean size of the cut batches (padding is not counted)."""
        rates, most = self.participation_probabilities(), np.arange(self.max_batch_size)
        # E min(R, B) = sum_{k < B} P(R > k), R ~ Binomial(|D|, rate) as examples are independent.
        values, where = np.unique(rates, return_inverse=True)
        return np.array([scipy.stats.binom.sf(most, dataset_size, rate).sum() for rate in values])[where]

    def draw_participation(self, key, num_samples: int):
        """(num_samples, iterations) float32 of 0 and 1: when the example is sampled, before cutting."""
        return self.uncut.draw_participation(key, num_samples)

    def draw_counts(self, key, num_samples: int, direction: str, side=None):
        """Participation counts of the dominating pair, given the others' batch sizes.

        Args:
          key: a JAX key.
          num_samples: static.
          side: (num_samples, iterations) int32, r.
          direction: "remove" draws x (0, 1 and 2; the law P), "add" draws y (0 and -1; the law Q); static.

        Returns:
          (num_samples, iterations) float32.

        Source: arXiv 2602.09338, corollary D.2.
        """
        drawn_from_p = Direction.of(direction) is Direction.REMOVE
        batch_sizes = _required(side)
        n, b = self.iterations, self.min_separation
        sampled_key, kept_key = threefry.split(key)
        if not self.can_cut:  # the maximum may then be beyond 32 bits
            sampled = self.draw_participation(sampled_key, num_samples)
            return sampled if drawn_from_p else jnp.zeros_like(sampled)

        def counts(bits, sizes):
            # Kept when a uniform place among the r + 1 sampled is one of the first B_max.
            place = _multiply_high(bits, sizes.astype(jnp.uint32) + 1)
            kept = (place < self.max_batch_size).astype(jnp.float32)
            when_cut, when_whole = (2 * kept, 1.0) if drawn_from_p else (-kept, 0.0)
            return jnp.where(sizes >= self.max_batch_size, when_cut, when_whole)

        if b == 1:
            sampled = self.draw_participation(sampled_key, num_samples)
            return sampled * counts(threefry.bits_32(kept_key, batch_sizes.shape), batch_sizes)
        # Only at the few steps at which the example is sampled.
        positions = self.uncut.draw_positions(sampled_key, num_samples)
        here = jnp.minimum(positions, n - 1)
        bits = threefry.bits_32_at(kept_key, num_samples * n, here + n * jnp.arange(num_samples)[:, None])
        sizes = jnp.take_along_axis(batch_sizes, here, axis=1, mode="promise_in_bounds")
        return counts_at(positions, counts(bits, sizes), n)

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return self.uncut.batches(dataset_size, generator)

    def draw_error(self) -> float:
        """Bound on the relative error of the density of `draw_counts` given the batch sizes."""
        kept = 0.0
        if self.can_cut:
            # Off by 2^-32 from B / (r+1) >= B / |D|, and from 1 - B / (r+1) >= 1 / (B+1).
            rarest = max(self.dataset_size / self.max_batch_size, self.max_batch_size + 1)
            kept = self.max_participations * 2.0**-32 * rarest
        return float(np.expm1(np.log1p(self.uncut.draw_error()) + kept))

    def batch_size_error(self) -> tuple[float, float]:
        """How far the law of `draw_batch_sizes` is from the intended one: (relative error, total variation).

        It is within that total variation of a law whose density is within that relative error. The first
        is float64 rounding in the tables, the second their 62-bit grid and cut tails.
        """
        p, b, others = self.sampling_probability, self.min_separation, self.dataset_size - 1
        relative = variation = 0.0
        if p < 1:
            tables = binomial_tables(others, (p,))
            relative, variation = self.iterations * tables.relative, self.iterations * tables.variation
        if self.warm_start and b > 1:
            tables = binomial_tables(others, self._past_probabilities())
            relative, variation = relative + (b - 1) * tables.relative, variation + (b - 1) * tables.variation
        return float(np.expm1(relative)), variation

    # -- Likelihoods --------------------------------------------------------------------------------------

    def log_likelihoods(self, log_ratios, half_square_norms, batch_sizes):
        """`(ln P/R, ln Q/R)` given the others' batch sizes, R the centred Gaussian.

        Args:
          log_ratios: (..., iterations) float32 or float64, of one sample or of an axis of them;
            `(s_i - ||c_i||^2 / 2) / sigma^2`, as for `BMinSep`.
          half_square_norms: () or (iterations,); `||c_i||^2 / (2 sigma^2)`.
          batch_sizes: (..., iterations) int32, r.

        Returns:
          Two arrays, (...), of the dtype of `log_ratios`, natural logs. The second is 0 exactly where no r_i
          reaches the maximum, and the first is then that of `BMinSep`.

        Source: arXiv 2602.09338, appendix D, the recurrences after corollary D.2. Exact up to rounding.
        """
        one = log_ratios.ndim == 1
        of_uncut = self.uncut.log_likelihood_ratio if one else self.uncut.log_likelihood_ratios
        if not self.can_cut:
            return of_uncut(log_ratios), jnp.zeros(log_ratios.shape[:-1], log_ratios.dtype)
        # Time first, as in the recurrence and in the batch sizes that were drawn: one order for all.
        ratios, sizes, halves = log_ratios.T, batch_sizes.T, time_first(half_square_norms, log_ratios)
        dtype, most = ratios.dtype, self.max_batch_size
        cut = sizes >= most
        sampled = jnp.where(cut, sizes, most) + 1
        log_sampled = jnp.log(sampled.astype(dtype))
        log_kept = jnp.asarray(math.log(most), dtype) - log_sampled
        log_left_out = jnp.log((sampled - most).astype(dtype)) - log_sampled

        def when_cut(count):
            # A count k has k s - k^2 ||c||^2 / 2 = k (s - ||c||^2 / 2) - (k^2 - k) ||c||^2 / 2.
            kept = log_kept + count * ratios - (count**2 - count) * halves
            return log_add_exp(kept, log_left_out)

        log_p = of_uncut(jnp.where(cut, when_cut(2), ratios).T)
        log_q = of_uncut(jnp.where(cut, when_cut(-1), jnp.zeros_like(ratios)).T)
        return log_p, jnp.where(cut.any(axis=0), log_q, jnp.zeros_like(log_q))

    def log_likelihood_ratio(self, log_ratios, half_square_norms=None, batch_sizes=None):
        """`ln P/Q` given the others' batch sizes; see `log_likelihoods`."""
        log_p, log_q = self.log_likelihoods(log_ratios, half_square_norms, _required(batch_sizes))
        return log_p - log_q

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        return self.log_likelihood_ratio(log_ratios, half_square_norms, side)


@dataclass(frozen=True)
class BatchSizes(SideInformation):
    """How many other examples were sampled at each step, before cutting."""

    scheme: TruncatedBMinSep
    name: ClassVar[str] = "batch_sizes"

    def tables(self) -> Any:
        return self.scheme.batch_size_tables()

    def draw(self, key, num_samples: int, tables):
        return self.scheme.draw_batch_sizes(key, num_samples, tables)

    def error(self) -> tuple[float, float]:
        return self.scheme.batch_size_error()


def _blocks(key, steps: int, most: int = _STEPS_AT_ONCE):
    """(blocks, steps of each) keys of all steps, in blocks of `most` steps at most, and some steps beyond."""
    blocks = -(-steps // min(most, _STEPS_AT_ONCE))
    each = -(-steps // blocks)
    keys = jax.vmap(threefry.fold_in, (None, 0))(key, jnp.arange(blocks * each))
    return keys.reshape(blocks, each)


def _words(keys, arrays, num_samples: int):
    """(keys, 2, levels, num_samples) uint32: what `draw_binomial` draws with each of the keys."""
    levels = arrays.places.shape[-2]
    words = threefry.bits_32_of(keys, 2 * levels * num_samples)
    return words.reshape(len(keys), 2, levels, num_samples)


def _required(batch_sizes):
    if batch_sizes is None:
        raise ValueError("batch_sizes must be given for truncated-b-min-sep")
    return batch_sizes


def _multiply_high(a, b):
    """The high 32 bits of the product of uint32 arrays: floor(a b / 2^32)."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + (((middle & 0xFFFF) + a_low * b_high) >> 16)
