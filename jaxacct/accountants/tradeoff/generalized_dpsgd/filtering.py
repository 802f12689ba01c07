"""Batches whose terms are kept by fair coins (arXiv 2212.05796, appendix D): exact distribution of c^2.

Every term of a round is kept with probability 1/2, and a round with fewer than tau kept terms is skipped. Of
L terms that hold records of the group, Bin(L, 1/2) count. The coins are independent of data, so they may be
revealed first, like the sampling: a run is a mixture over the remaining counts (proofs/tradeoff.md), also
where sums are divided by the number of kept terms. It is a bound against adversaries who do not see the
coins. Halving c itself, which the paper calls "factor 2", is no bound and is not included.

This bound does not require that the number of kept terms, or a skipped round, is hidden; `train` has no such
sampler.
"""

import math
from fractions import Fraction

from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    ParticipationPMF,
    binomial_pmf,
    check_sizes,
    epoch_distribution,
    from_exact,
    round_hits,
    self_compose_pmf,
)
from jaxacct.common import validate as _validate

_MAX_TERMS = 1000


def filtered_participation_pmf(
    dataset_size: int,
    num_microbatches: int,
    microbatch_size: int,
    num_epochs: int,
    group_size: int,
    sampling: str,
    *,
    min_kept: int = 1,
) -> ParticipationPMF:
    """Return the distribution of c^2 over a run whose terms are kept with probability 1/2 each.

    Args:
      dataset_size: as in `participation_pmf`.
      num_microbatches: as in `participation_pmf`.
      microbatch_size: as in `participation_pmf`.
      num_epochs: as in `participation_pmf`.
      group_size: as in `participation_pmf`.
      sampling: as in `participation_pmf`.
      min_kept: tau, minimum number of kept terms for a round to run; 1 .. num_microbatches.
    """
    n, m, s, g = dataset_size, num_microbatches, microbatch_size, group_size
    check_sizes(n, m, s, num_epochs, g, sampling)
    if m > _MAX_TERMS:
        raise ValueError(
            f"num_microbatches must be at most {_MAX_TERMS} where terms are kept by coins, got {m}"
        )
    if _validate.positive_integer("min_kept", min_kept) > m:
        raise ValueError(f"min_kept must be at most num_microbatches {m}, got {min_kept}")

    def counted(hit: int) -> dict[int, Fraction]:
        return kept_of(hit, m, min_kept)

    if sampling == "shuffling":
        return self_compose_pmf(from_exact(epoch_distribution(n, m, s, g, counted)), num_epochs)
    distribution: dict[int, Fraction] = {}
    for hit, chance in enumerate(round_hits(n, m, s, g)):
        for count, share in counted(hit).items():
            distribution[count**2] = distribution.get(count**2, Fraction(0)) + chance * share
    rounds = n // (m * s) * num_epochs
    if set(distribution) <= {0, 1}:
        return binomial_pmf(rounds, distribution.get(1, Fraction(0)))
    return self_compose_pmf(from_exact(distribution), rounds)


def kept_of(hit: int, terms: int, min_kept: int) -> dict[int, Fraction]:
    """Return `{how many of `hit` terms count: probability}`: the kept ones; none in a skipped round."""
    distribution = {0: Fraction(0)}
    for kept in range(hit + 1):
        for others in range(terms - hit + 1):
            ways = math.comb(hit, kept) * math.comb(terms - hit, others)
            count = kept if kept + others >= min_kept else 0
            distribution[count] = distribution.get(count, Fraction(0)) + Fraction(ways, 2**terms)
    return {count: share for count, share in distribution.items() if share}
