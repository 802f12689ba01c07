"""Independent truncation: a pair that dominates that of truncated b-min-sep.

The sizes r of the others' batches are dependent, and drawing them is most of the work of a plain draw of
`TruncatedBMinSep`. But given the past, a batch reaches the maximum with probability at most `rho_i`, as long
as at most `h_i` of the others are eligible; and the pair only gets worse with more truncated steps and when
every sampled example is kept. So except with a reserved probability the pair is dominated by one with
independent truncation of probability `rho_i`, whose sampled example is always kept: x_i = 2 and y_i = -1 at a
truncated step, x_i = 1 and y_i = 0 at another (proofs/truncated_batches.md, section 3).
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxacct.kernels import threefry
from jaxacct.kernels.recurrence import log_add_exp
from jaxacct.kernels.table import counts_at
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.replicas.table import draw_outcomes
from jaxacct.schemes.table import CountsTable

# Probability that more examples are ever eligible than assumed; reserved as delta.
_RARE = 2.0**-50
_ABOVE = 1e-9  # relative, for float64 binomial tails


@dataclass(frozen=True)
class IndependentTruncation:
    """Pair with independent truncation.

    Attributes:
      untruncated: sampling scheme.
      chances: (iterations,) probability that a step is truncated, given all others.
      beyond: probability that the sizes of the others' batches are not covered; to be added to delta.
      counts: of a participation at a step that is not truncated, and at one that is, in two replicas: those
        of P, or (0, 1), those of Q up to the sign.
    """

    untruncated: BMinSep
    chances: tuple[float, ...]
    beyond: float
    counts: tuple[int, int] = (1, 2)
    examples_per_unit: ClassVar[int] = 1

    @classmethod
    def of(cls, untruncated: BMinSep, max_batch_size: int, dataset_size: int) -> "IndependentTruncation":
        """Return the pair of batches of `dataset_size` examples, the sensitive one included."""
        n, p, others = untruncated.iterations, untruncated.sampling_probability, dataset_size - 1
        # The others are independent: the number of eligible ones at a step is binomial.
        eligible, where = np.unique(
            np.minimum(untruncated.participation_probabilities() / p, 1), return_inverse=True
        )
        highest = binomial_quantile(others, eligible, _RARE / n)
        exceeded = scipy.stats.binom.sf(highest, others, eligible) * (1 + _ABOVE)
        chances = scipy.stats.binom.sf(max_batch_size - 1, highest, p) * (1 + _ABOVE)
        found = np.minimum(chances, 1.0)[where]
        return cls(untruncated, tuple(found.tolist()), float(exceeded[where].sum()))

    @property
    def iterations(self) -> int:
        return self.untruncated.iterations

    @property
    def min_separation(self) -> int:
        return self.untruncated.min_separation

    @functools.cached_property
    def table(self) -> CountsTable:
        """Sampling of two replicas, which share the truncation of a step."""
        of, chances = self.untruncated.table, np.array(self.chances)
        kinds = tuple(zip(self.counts, (1 - chances, chances), strict=True))
        return CountsTable(of.join, of.lockout, of.turns, of.start, kinds=kinds, is_shared=True)

    def draw(self, key, arrays, num_samples: int):
        """Draw which steps are truncated, bool, and the two replicas' total counts, float32.

        Both are (num_samples, iterations). `arrays` are those of the replicas of `table`, and `chances`,
        (iterations,) uint32: `chances` of this in units of 2^-32.
        """
        pairs_key, truncation_key = jax.random.split(key)
        steps, kinds = draw_outcomes(pairs_key, self.table, arrays["pairs"], num_samples)
        # Separately: XLA would compute these words again for both likelihoods.
        words = threefry.bits_32(truncation_key, (num_samples, self.iterations))
        is_truncated = words < arrays["chances"][None]
        rows = jnp.arange(num_samples)[:, None]
        is_truncated = is_truncated.at[rows, steps.T].set(kinds.max(axis=0).T == 2, mode="drop")
        counts = jnp.asarray([0, *self.counts], jnp.float32)[kinds].sum(axis=0)
        return is_truncated, counts_at(steps.T, counts.T, self.iterations)

    def log_likelihoods(self, log_ratios, half_square_norms, is_truncated):
        """Return `(ln P/R, ln Q/R)`, (num_samples,), given which steps are truncated, R the centred Gaussian.

        Other arguments as of `TruncatedBMinSep.log_likelihoods`; exact up to rounding.
        """
        half_norms = time_first(half_square_norms, log_ratios)
        return log_likelihoods_given(self.untruncated, log_ratios.T, half_norms, is_truncated.T)


def log_likelihoods_given(scheme: BMinSep, ratios, half_norms, is_truncated, log_kept=0.0, log_left_out=None):
    """Return `(ln P/R, ln Q/R)`, (num_samples,), given which steps are truncated; all arrays time first.

    Time comes first as in the recurrence, and in what is drawn. An example is kept with ln of the probability
    `log_kept` at a truncated step; `log_left_out` is ln of the rest of it, None where that is 0.
    """

    def of_count(count, otherwise):
        # A count k has k s - k^2 ||c||^2 / 2 = k (s - ||c||^2 / 2) - (k^2 - k) ||c||^2 / 2.
        kept = log_kept + count * ratios - (count**2 - count) * half_norms
        joined = kept if log_left_out is None else log_add_exp(kept, log_left_out)
        return scheme.log_likelihood_ratios(jnp.where(is_truncated, joined, otherwise).T)

    return of_count(2, ratios), of_count(-1, jnp.zeros_like(ratios))


def time_first(half_square_norms, log_ratios):
    """Return () or (iterations,) numbers such that they broadcast with `log_ratios.T`."""
    norms = jnp.asarray(half_square_norms)
    return norms.reshape(-1, *[1] * (log_ratios.ndim - 1)) if norms.ndim else norms


def binomial_quantile(number: int, probabilities: np.ndarray, above: float) -> np.ndarray:
    """Return the smallest k with `P(Binomial(number, p) > k) <= above`; `isf` of SciPy rounds 1 - above."""
    low, high = np.full(probabilities.shape, -1.0), np.full(probabilities.shape, float(number))
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        enough = scipy.stats.binom.sf(middle, number, probabilities) <= above
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high
