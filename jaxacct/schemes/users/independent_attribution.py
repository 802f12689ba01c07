"""Independent attribution: privacy for users with several examples, on every graph of users and examples.

Every example follows its own b-min-sep process, and no example causes a lockout of another. The other
examples are then independent of a user's, for any sharing, so the pair

    P = C (x^1 + .. + x^k) + sigma z,    Q = sigma z,

of k = k_u independent b-min-sep vectors dominates; fewer examples are below it (proofs/shared_examples.md,
theorem 2). Its likelihood is that of `kernels.likelihoods`. Where that has too many states,
the likelihood is bounded by those of k examples that do not interact (theorem 4).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.likelihoods.interacting_recurrence import interacting_log_recurrence, numbers_kept
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.protocol.batches import Batches
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.users.multi_attribution import UserScheme

# Maximum numbers per sample of the exact likelihood: 70 MB a block of samples in float32.
MAX_NUMBERS = 140_000


@dataclass(frozen=True)
class IndependentAttribution(UserScheme):
    """b-min-sep sampling of every example by itself, accounted for a user with several.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1, between two participations of one *example*; a user's examples may be closer.
      sampling_probability: p in (0, 1] for an eligible example.
      examples_per_user: k_u >= 1, maximum number of examples of a user (after contribution bounding).
      warm_start: as for `BMinSep`, for all examples.

    The guarantee holds for every public graph with at most k_u examples a user, for any sharing.
    """

    name: ClassVar[str] = "independent-attribution"
    examples_overlap = True
    side_information = None
    holds_for_shared_examples = True

    @classmethod
    def from_batch_size(cls, *, examples_per_user: int, **sizes) -> "IndependentAttribution":
        """Return the scheme of long-run expected batch size `batch_size`, as `BMinSep` does."""
        one = BMinSep.from_batch_size(**sizes)
        start = one.iterations, one.min_separation, one.sampling_probability
        return cls(*start, examples_per_user, one.warm_start)

    @functools.cached_property
    def one(self) -> BMinSep:
        """Process of each example."""
        return BMinSep(self.iterations, self.min_separation, self.sampling_probability, self.warm_start)

    @property
    def parts(self) -> tuple[BMinSep, int]:
        """(scheme, number): a user's counts are the sum of that many independent draws from the scheme."""
        return self.one, self.examples_per_user

    @property
    def is_exact(self) -> bool:
        """Whether the likelihood is exact; otherwise it is bounded."""
        kept = numbers_kept(self.min_separation, self.examples_per_user, self.warm_start)
        return self.examples_per_user == 1 or kept <= MAX_NUMBERS

    # -- Members that the guarantee depends on ------------------------------------------------------------

    @property
    def max_participations(self) -> int:
        """Maximum number of steps at which one *example* participates."""
        return self.one.max_participations

    @property
    def sums(self) -> Sums:
        one, number = self.one.sums, self.examples_per_user
        if number == 1:
            return one
        if not self.is_exact:
            return dataclasses.replace(one, times=number)
        warm = self.warm_start and self.min_separation > 1
        terms = math.comb(self.min_separation + number - 1, number) if warm else 1
        none = self.log_probability_of_none()
        return Sums(self.sampling_probability, none, one.steps, terms, processes=number)

    def participation_probabilities(self) -> np.ndarray:
        """Return (iterations,) float64: the probability that a user participates at each step."""
        none = np.log1p(-np.minimum(self.one.participation_probabilities(), 1 - 2.0**-53))
        return -np.expm1(self.examples_per_user * none)

    def log_probability_of_none(self) -> float:
        return self.examples_per_user * self.one.log_probability_of_none()

    def squared_sensitivity(self, cross: float) -> float:
        """Bound `|C (x^1 + .. + x^k)| <= sum |C x^j| <= k sqrt(max_participations)`, including overlaps."""
        return float(self.examples_per_user**2 * self.max_participations)

    def draw_participation(self, key, num_samples: int):
        """Return (num_samples, iterations) float32 counts 0 .. k_u."""
        keys = jax.random.split(key, self.examples_per_user)

        def add(total, part):
            return total + self.one.draw_participation(part, num_samples), None

        return jax.lax.scan(add, jnp.zeros((num_samples, self.iterations), jnp.float32), keys)[0]

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return self.one.batches(dataset_size, generator)

    @property
    def draw_errors(self) -> tuple[float, float]:
        relative, variation = self.one.draw_errors
        return math.expm1(self.examples_per_user * math.log1p(relative)), self.examples_per_user * variation

    def log_likelihood_ratios(self, log_ratios, norms=None, side=None):
        """Compute ln P/Q from `r_i` and overlaps `<c_i, c_{i-d}> / sigma^2`, or its bound; jittable.

        Where `is_exact` is false, it is `k ln f_1` with the ratio f_1 of one example: at least ln P/Q, and at
        most that of log-ratios lowered by `overlap_bound`.
        """
        if self.examples_per_user == 1 or not self.is_exact:
            return self.examples_per_user * self.one.log_likelihood_ratios(log_ratios)
        if norms is None:
            raise ValueError("norms must be <c_i, c_{i-d}> / sigma^2 for examples_per_user above 1, got None")
        log_p, log_q = log_probabilities(self.sampling_probability)
        return interacting_log_recurrence(
            log_ratios.T,
            norms,
            log_p=log_p,
            log_q=log_q,
            block=self.min_separation,
            processes=self.examples_per_user,
            start_distribution=np.exp(self.one.start_log_weights()) if self.warm_start else None,
        )

    @property
    def two(self) -> "IndependentAttribution":
        """Same draws for a user with two examples."""
        return dataclasses.replace(self, examples_per_user=2)

    @property
    def pair_bound(self) -> "IndependentAttribution | None":
        return self.two if not self.is_exact and self.two.is_exact else None

    def log_likelihood_ratios_by_pairs(self, log_ratios, norms):
        """Compute the bound by pairs with `c` times the overlap (proofs/shared_examples.md, theorem 10)."""
        pairs, left = divmod(self.examples_per_user, 2)
        found = pairs * self.two.log_likelihood_ratios(
            log_ratios, (self.examples_per_user - 1 + left) * norms
        )
        return found + self.one.log_likelihood_ratios(log_ratios) if left else found

    def overlap_bound(self, strategy) -> float:
        """Return kappa, a bound on the overlap of a participation with those of the other examples.

        Each pair counts once. 0 where the likelihood is exact. `(k - 1) / 2` times the maximum overlap of two
        participations of one example, one before and one after: `max a_d + a_d'` over `d + d' >= b`.
        """
        if self.is_exact:
            return 0.0
        b = self.min_separation
        shared = strategy.products_from_end(b + 1)[-1]  # of columns without truncation, the maximum
        # Beyond b there is no overlap, so d' = b - d or the largest later one.
        later = np.maximum.accumulate(shared[::-1])[::-1]
        max_overlap = float((shared + later[b - np.arange(b + 1)]).max())
        return (self.examples_per_user - 1) / 2 * max_overlap * (1 + 1e-12)

    @property
    def max_rate(self) -> float:
        """Largest rate of one example: examples are in a batch independently."""
        return float(self.one.participation_probabilities().max())

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """Return (iterations,) float64: the mean batch size at each step, exact on every graph."""
        return self.one.expected_batch_sizes(dataset_size)
