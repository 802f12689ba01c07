"""Batch sizes of the other examples under b-min-sep: side information of truncated b-min-sep.

The recurrence is over counts, exact up to the stated error (arXiv 2602.09338, appendix D).
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import threefry
from jaxacct.kernels.binomial import Tables, binomial_of_words, binomial_tables
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.truncation.independent_truncation import binomial_quantile

# Steps whose random words are drawn together, so that they fit a cache.
_STEPS_AT_ONCE = 256
# Probability that a pool is ever outside the window of the tables; part of the total variation.
_OUTSIDE = 2.0**-64


@dataclass(frozen=True)
class BatchSizes:
    """Number of other examples sampled at each step, before truncation: what the adversary sees.

    Attributes:
      untruncated: the sampling.
      dataset_size: number of examples |D|, the sensitive one included.
    """

    untruncated: BMinSep
    dataset_size: int
    name: ClassVar[str] = "batch_sizes"
    words: ClassVar[int] = 2  # changes whenever the same key draws other values

    def tables(self) -> Any:
        """Return the pytree of arrays that `draw` looks up, made once per process, 8 bytes a cell."""
        return tuple(None if tables is None else tables.arrays for tables in self._tables)

    @property
    def _tables(self) -> tuple[Tables | None, Tables | None]:
        """Tables of the draws from the pool; and, under a warm start, at the first b - 1 steps."""
        p, b = self.untruncated.sampling_probability, self.untruncated.min_separation
        joining = binomial_tables((self._pool_window,), (p,)) if p < 1 else None
        if not self.untruncated.warm_start or b == 1:
            return joining, None
        return joining, binomial_tables(self._first_windows, self._first_probabilities)

    @functools.cached_property
    def _pool_window(self) -> tuple[int, int]:
        """Range of the pool size at every step, except with probability `_OUTSIDE`."""
        # The others are independent, so the number of eligible ones is binomial.
        of = self.untruncated
        eligible = np.minimum(of.participation_probabilities() / of.sampling_probability, 1)
        low, high = _windows(
            self.dataset_size - 1, np.unique(eligible), _OUTSIDE / (8 * self.untruncated.iterations)
        )
        return int(low.min()), int(high.max())

    @functools.cached_property
    def _first_windows(self) -> tuple[tuple[int, int], ...]:
        """Ranges of those not sampled before the first steps t = 0 .. b - 2, under a warm start."""
        left = 1 - np.arange(self.untruncated.min_separation - 1) * self.untruncated.participation_rate
        low, high = _windows(self.dataset_size - 1, left, _OUTSIDE / (8 * self.untruncated.min_separation))
        return tuple(zip(low.astype(int).tolist(), high.astype(int).tolist(), strict=True))

    @property
    def _first_probabilities(self) -> tuple[float, ...]:
        """Probability of being sampled at step t = 0 .. b-2, given not before, under a warm start.

        The stationary distribution has p / (1 + (b-1) p) for each of these steps, at most one of which
        samples an example, so given none of t it is `p / (1 + (b-1-t) p)`.
        """
        p, b = self.untruncated.sampling_probability, self.untruncated.min_separation
        return tuple(p / (1 + (b - 1 - t) * p) for t in range(b - 1))

    def draw(self, key, num_samples: int, tables=None):
        """Draw the batch sizes of the other `dataset_size` - 1 examples before truncation.

        Exact recurrence over counts: the pool at step i is all that were not sampled at steps i-b+1 .. i-1,
        and each member is sampled with probability p. Under a warm start the sizes of the first b - 1 steps
        are one multinomial of the stationary distribution (proofs/truncated_batches.md, section 6). `tables`
        may be passed through a jit boundary; by default they are built in.

        Source: arXiv 2602.09338, appendix D and algorithm 2. Error: `error`.
        """
        joining, first = self.tables() if tables is None else tables
        n, b, others = self.untruncated.iterations, self.untruncated.min_separation, self.dataset_size - 1
        first_key, key = jax.random.split(key)
        pool = jnp.full((num_samples,), others, jnp.int32)
        recent, sizes = jnp.zeros((b - 1, num_samples), jnp.int32), []  # of the b - 1 steps before
        if first is not None:
            places = jnp.arange(min(n, b - 1), dtype=jnp.int32)
            starts = range(0, len(places), _STEPS_AT_ONCE)
            keys = jax.random.split(first_key, 2 * len(starts)).reshape(-1, 2)
            for number, start in enumerate(starts):
                at = places[start : start + _STEPS_AT_ONCE]
                pool, some = _block(keys[number], pool, first, at, 0 * at)
                sizes.append(some)
            recent = jnp.concatenate(sizes)
        if (left := n - (len(recent) if sizes else 0)) > 0:
            blocks = -(-left // min(left, _STEPS_AT_ONCE, b - 1 if b > 1 else left))
            each = -(-left // blocks)

            def block(carry, keys):
                pool, recent = carry
                back = recent[:each] if b > 1 else None
                pool, some = _block(keys, pool, joining, each, back)
                return (pool, jnp.concatenate([recent, some])[each:] if b > 1 else recent), some

            keys = jax.random.split(key, 2 * blocks).reshape(blocks, 2)
            _, later = lax.scan(block, (pool, recent), keys)
            sizes.append(later.reshape(-1, num_samples))
        # Otherwise XLA concatenates them once for each use.
        return lax.optimization_barrier(jnp.concatenate(sizes)[:n]).T

    def error(self) -> tuple[float, float]:
        """Bound the (relative error, total variation) of the distribution of `draw`.

        It is within that total variation of a distribution whose density is within that relative error. The
        first is float64 rounding in the tables, the second their 62-bit grid, truncated tails and pools
        outside their windows.
        """
        n, b, (joining, first) = self.untruncated.iterations, self.untruncated.min_separation, self._tables
        starting = 0 if first is None else min(n, b - 1)
        relative, variation = 0.0, _OUTSIDE
        for tables, steps in ((joining, n - starting), (first, starting)):
            if tables is not None:
                relative, variation = relative + steps * tables.relative, variation + steps * tables.variation
        return float(np.expm1(relative)), float(variation)


def _windows(number: int, probabilities: np.ndarray, outside: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of Binomial(number, probabilities), each end exceeded with probability `outside`."""
    return number - binomial_quantile(number, 1 - probabilities, outside), binomial_quantile(
        number, probabilities, outside
    )


def _block(keys, pool, arrays, steps, back):
    """Return `(pool after, (steps, num_samples) sizes)` of some steps from a pool, (num_samples,) int32.

    `arrays` are of `binomial_tables`, None where the whole pool joins; `steps` is a number, or for each step
    the index of its probability in `arrays`; `back`, (steps, ...) int32, returns to the pool after each step
    (None: all that joined).
    """
    at, length = (None, steps) if isinstance(steps, int) else (steps, len(steps))
    shape = (length, *pool.shape)
    if arrays is None:  # the whole pool; the returning ones are the next pool
        sizes = jnp.broadcast_to(pool, shape) if back is None else jnp.concatenate([pool[None], back[:-1]])
        return (pool if back is None else back[-1]), sizes

    words = [_words(key, len(arrays.levels), shape) for key in keys]
    if back is None:
        return pool, binomial_of_words(words, jnp.broadcast_to(pool, shape), arrays)

    # One array a step, the pool: further outputs make XLA compute all of it again. The sizes follow.
    def step(pool, given):
        words, at, back = given
        pool = pool - binomial_of_words(words, pool, arrays, 0 if at is None else at) + back
        return pool, pool

    _, pools = lax.scan(step, pool, (words, at, back), length=length)
    before = jnp.concatenate([pool[None], pools[:-1]])
    return pools[-1], before + jnp.reshape(back, (length, -1)) - pools


def _words(key, number: int, shape) -> list:
    """Return `number` arrays of `shape` of words."""
    pairs = threefry.two_words(key, (-(-number // 2), *shape))
    # A barrier as for normals (`randomness.normal_pairs`).
    pairs = lax.optimization_barrier(pairs) if jax.default_backend() == "cpu" else pairs
    return [word for pair in zip(*pairs, strict=True) for word in pair][:number]
