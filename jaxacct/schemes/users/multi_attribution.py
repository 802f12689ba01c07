"""Multi-attribution b-min-sep sampling (arXiv 2602.09338, section 6): users with several examples.

At each step every example is sampled with probability p, and a sampled one joins the batch unless an example
of the same user was sampled in one of the last b - 1 steps (algorithm 3, `train.batches.attribution`). The
accounted pair is the dominating one of theorem 6.1: the counts x of one user, where x_i = 0 if any of
x_{i-b+1} .. x_{i-1} is above 0, and x_i ~ Binomial(k_u, p) otherwise.

**Every example has one owner here.** Where examples are shared theorem 6.1 is false:
proofs/shared_examples.md has the counterexample, what holds (theorem 1) and the warm start, which the paper
leaves open. The trainer accepts a shared graph where no example causes a lockout of others (b = 1 or k_u =
1), or where the bound reveals all participations.

The argument is for a user with exactly k_u examples; fewer cause fewer lockouts. So
`train.batches.attribution` adds phantom examples up to k_u, which cause lockouts and never join a batch.
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
from jax import lax
from scipy import special

from jaxacct.common import validate as _validate
from jaxacct.kernels.recurrence import log_add_exp
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.protocol.batches import Batches
from jaxacct.schemes.protocol.scheme import Scheme, TableScheme, check_fields, disjoint_participations
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.table import CountsTable


@dataclass(frozen=True)
class UserScheme(Scheme, abstract=True):
    """Scheme for users with several examples; attributes as `MultiAttribution` has them."""

    iterations: int
    min_separation: int
    sampling_probability: float
    examples_per_user: int
    warm_start: bool = True
    unit: ClassVar[str] = "user"
    adjacencies = ("zero-out",)
    others_are_independent = False
    options: ClassVar = {
        "separation": "min_separation",
        "examples_per_user": "examples_per_user",
        "warm_start": "warm_start",
    }

    def __post_init__(self):
        check_fields(self, "iterations", "min_separation", "examples_per_user")

    @property
    def examples_per_unit(self) -> int:
        return self.examples_per_user

    @property
    def independent_rounds(self) -> tuple[float, int] | None:
        """Without lockouts every example joins every step by its own coin."""
        return (self.sampling_probability, self.iterations) if self.min_separation == 1 else None


@dataclass(frozen=True)
class MultiAttribution(UserScheme, TableScheme):
    """Sampling of a user with `examples_per_user` examples, any number of which participate together.

    Attributes:
      iterations: number of steps n.
      min_separation: b >= 1; a user participates at most once in any b consecutive steps.
      sampling_probability: p in (0, 1] for each example at each step.
      examples_per_user: k_u >= 1, maximum number of examples of a user (after contribution bounding).
      warm_start: the first batch comes after b - 1 steps of sampling without training, so that the expected
        batch size is the same at every step.

    `examples_per_user` = 1 is the distribution of `BMinSep` with the same other fields.

    The dominating pair is for graphs in which every example has one owner; see `holds_for_shared_examples`.

    Source: arXiv 2602.09338, theorem 6.1, as far as it holds; the stationary warm start is derived above.
    """

    name: ClassVar[str] = "multi-attribution"

    @classmethod
    def from_batch_size(
        cls,
        *,
        dataset_size: int,
        batch_size: float,
        iterations: int,
        min_separation: int,
        examples_per_user: int,
        neighborhood_size: int | None = None,
        warm_start: bool = True,
    ) -> "MultiAttribution":
        """Return the smallest p whose expected batch size under algorithm 3 is `batch_size`.

        Every example shares a user with `neighborhood_size` examples, itself included (default: one user an
        example, k_u examples a user), so B = |D| p (1-p)^((b-1) N), which is largest at
        p = 1 / (1 + (b-1) N). For any other graph: `train.batches.attribution.find_sampling_probability`.
        """
        size = _validate.positive_integer("dataset_size", dataset_size)
        batch = _validate.positive_number("batch_size", batch_size)
        b = _validate.positive_integer("min_separation", min_separation)
        k_u = _validate.positive_integer("examples_per_user", examples_per_user)
        number = k_u if neighborhood_size is None else neighborhood_size
        lockouts = (b - 1) * _validate.positive_integer("neighborhood_size", number)
        best = 1 / (1 + lockouts)

        def expected(p):
            return size * p * (math.exp(lockouts * math.log1p(-p)) if lockouts else 1.0)

        if batch > expected(best):
            raise ValueError(
                f"batch_size must be at most {expected(best):g}, reached at sampling_probability {best:g}, "
                f"got {batch_size!r}"
            )
        root = scipy.optimize.brentq(lambda p: expected(p) - batch, 0.0, best, xtol=1e-300, rtol=1e-14)
        return cls(iterations, b, min(1.0, float(root)), k_u, warm_start)

    @property
    def timing(self) -> BMinSep:
        """Steps at which the user participates with any example: b-min-sep at 1 - (1-p)^k_u."""
        p = self.sampling_probability
        if self.examples_per_user > 1:
            p = -math.expm1(self.examples_per_user * math.log1p(-p)) if p < 1 else 1.0
        return BMinSep(self.iterations, self.min_separation, p, self.warm_start)

    @functools.cached_property
    def table(self) -> CountsTable:
        """Timing, with the counts as kinds of participations."""
        of, kinds = self.timing.table, tuple(enumerate(self.count_weights(), 1))
        return CountsTable(of.join, of.lockout, of.turns, of.start, kinds=kinds)

    @functools.cached_property
    def sums(self) -> Sums:
        rarest = float(np.maximum(self.count_weights(), 1e-300).min())
        return dataclasses.replace(self.timing.sums, log_weights=-math.log(rarest))

    def squared_sensitivity(self, cross: float) -> float:
        return disjoint_participations(self.max_participations, self.examples_per_user, cross)

    @property
    def max_rate(self) -> float:
        """Sampling probability: a lockout only removes sampled examples."""
        return self.sampling_probability

    @property
    def holds_for_shared_examples(self) -> bool:
        """Whether a user's sampling never causes a lockout of another's examples."""
        return self.min_separation == 1 or self.examples_per_user == 1

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """Return (iterations,) float64, for users with k_u examples of their own and a warm start."""
        p, lockouts = self.sampling_probability, (self.min_separation - 1) * self.examples_per_user
        return np.full(self.iterations, dataset_size * p * (1 - p) ** lockouts)

    def count_weights(self) -> np.ndarray:
        """Return (k_u,) float64: the probabilities of the counts 1 .. k_u at a participation."""
        counts = np.arange(1, self.examples_per_user + 1)
        k, p = self.examples_per_user, self.sampling_probability
        log_weights = special.xlogy(counts, p) + special.xlog1py(k - counts, -p)
        log_weights -= special.gammaln(counts + 1) + special.gammaln(k - counts + 1)
        weights = np.exp(log_weights - log_weights.max())
        return weights / weights.sum()

    @property
    def revealed_counts(self) -> tuple[BMinSep, np.ndarray]:
        """Timing and counts on every graph: sharing affects only the proof for hidden participations."""
        return self.timing, self.count_weights()

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        if graph is None:
            raise ValueError("graph must be given for multi-attribution")
        return graph.lockout_batches(self, generator)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        """Compute ln P/Q, exact up to rounding; jittable.

        j examples have the log-ratio `(j s_i - j^2 ||c_i||^2 / 2) / sigma^2 = j r_i - j (j-1) h_i`: b-min-sep
        at 1 - (1-p)^k_u with the mixture over the counts 1 .. k_u in place of the ratio of one participation.
        `half_square_norms` may be None where k_u = 1.

        Source: arXiv 2602.09338, theorem 6.1 and the recursion before it.
        """
        return self.timing.log_likelihood_ratios(self._any_count(log_ratios, half_square_norms))

    def _any_count(self, log_ratios, half_square_norms):
        """Return (..., iterations) log-likelihood ratio of a count at each step, given that it is not 0."""
        if self.examples_per_user == 1:
            return log_ratios
        if half_square_norms is None:
            raise ValueError(
                "half_square_norms must be ||c_i||^2 / (2 sigma^2) for examples_per_user above 1, got None"
            )
        h = lax.broadcast_to_rank(jnp.asarray(half_square_norms, log_ratios.dtype), log_ratios.ndim)
        weights = self.count_weights()
        counts = np.flatnonzero(weights) + 1  # others are 0 in float64
        terms = np.stack([np.log(weights[counts - 1]), counts, counts * (counts - 1)], axis=1)

        def ratio(term):
            log_weight, count, pairs = term
            return log_weight + count * log_ratios - pairs * h

        def add(total, term):  # a loop, which compiles faster than many terms
            return log_add_exp(total, ratio(term)), None

        terms = jnp.asarray(terms, h.dtype)
        return jax.lax.scan(add, ratio(terms[0]), terms[1:])[0]
