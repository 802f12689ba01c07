"""Exact distribution of a group's participation, `c^2 = sum over rounds of (terms with its records)^2`.

In generalised DP-SGD (arXiv 2212.05796) a round has m separately clipped terms of s records each. If L of
them hold a record of the group, the round is a Gaussian mechanism of sensitivity 2 C L beside noise 2 C
sigma; the sampling is independent of data, so with the sampling revealed a run is G_{c / sigma}. The
distributions are computed in integers (`Fraction`), which alternate without rounding, and then converted to
float64.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.statistics.tilted_sums import repeated

SAMPLING = ("shuffling", "subsampling")
Counted: TypeAlias = Callable[[int], Mapping[int, Any]]
MAX_GROUP, MAX_GROUP_OF_TERMS = 400, 64  # with one term a round, and with several
_MAX_FILTERED = 1000  # terms a round, where they are kept by coins
_MAX_PRODUCTS = 2 * 10**9  # of one convolution: some seconds
_MAX_VALUES = 2**24  # of a binomial distribution
_CUT = 1e-30  # probabilities below this are moved to the truncated mass, never dropped


@dataclass(frozen=True)
class ParticipationPMF:
    """Distribution of c^2.

    Attributes:
      squared_sensitivity: int64, ascending, without repeats; in units of (2C)^2.
      prob: float64 of the same length.
      truncated_mass: probability of larger c^2 that is not listed; counts as delta.
    """

    squared_sensitivity: np.ndarray
    prob: np.ndarray
    truncated_mass: float = 0.0

    def __post_init__(self):
        values, prob = np.asarray(self.squared_sensitivity), np.asarray(self.prob, np.float64)
        if (
            values.ndim != 1
            or values.shape != prob.shape
            or values.size == 0
            or values.dtype.kind not in "iu"
        ):
            raise ValueError(
                f"pmf must be integers with a probability each, got shapes {values.shape}, {prob.shape}"
            )
        if (values < 0).any() or (np.diff(values) <= 0).any():
            raise ValueError("pmf must have ascending squared sensitivities of at least 0")
        if not (prob >= 0).all() or not 0 <= self.truncated_mass <= 1:
            raise ValueError("pmf must have probabilities of at least 0 and a truncated mass in [0, 1]")
        total = math.fsum(prob) + self.truncated_mass
        if abs(total - 1) > 1e-9:
            raise ValueError(f"pmf must sum to 1 with its truncated mass, summed to {total!r}")
        _validate.set_fields(self, squared_sensitivity=values.astype(np.int64), prob=prob)

    @property
    def mean(self) -> float:
        """Mean of c^2, without the truncated mass."""
        return math.fsum(self.squared_sensitivity * self.prob)

    def tail(self, cut: float) -> float:
        """Return `P(c^2 > cut)`, with the truncated mass."""
        return math.fsum(self.prob[self.squared_sensitivity > cut]) + self.truncated_mass

    def head(self, cut: float) -> float:
        """Return `P(c^2 < cut)`."""
        return math.fsum(self.prob[self.squared_sensitivity < cut])


def check_sizes(dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling) -> None:
    """Check the sizes: ValueError for impossible ones; NotImplementedError for Poisson sampling."""
    sizes = dict(dataset_size=dataset_size, num_microbatches=num_microbatches)
    sizes |= dict(microbatch_size=microbatch_size, num_epochs=num_epochs, group_size=group_size)
    for name, value in sizes.items():
        _validate.positive_integer(name, value)
    if sampling == "poisson":
        raise NotImplementedError(
            "sampling must not be poisson (not in arXiv 2212.05796): use jaxacct.Poisson with calibrate"
        )
    _validate.one_of("sampling", sampling, SAMPLING)
    if dataset_size % (num_microbatches * microbatch_size):
        raise ValueError(
            "num_microbatches x microbatch_size must divide dataset_size, got "
            f"{num_microbatches} x {microbatch_size} for {dataset_size}"
        )
    if group_size > dataset_size:
        raise ValueError(f"group_size must be at most dataset_size {dataset_size}, got {group_size}")


def participation_pmf(
    dataset_size: int,
    num_microbatches: int,
    microbatch_size: int,
    num_epochs: int,
    group_size: int,
    sampling: str,
) -> ParticipationPMF:
    """Return the exact distribution of c^2 over a run.

    Args:
      dataset_size: N records.
      num_microbatches: m separately clipped terms a round; 1 is batch clipping.
      microbatch_size: s records a term; 1 is individual clipping. m s divides N.
      num_epochs: E, of N / (m s) rounds each.
      group_size: g records that may be replaced, at most N.
      sampling: "shuffling" (each epoch one fresh permutation cut into batches) or "subsampling" (each round a
        fresh m s-subset, cut at random into m parts).
    """
    check_sizes(dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling)
    sizes = dataset_size, num_microbatches, microbatch_size, group_size
    if sampling == "shuffling":
        return self_compose_pmf(shuffled_epoch(*sizes), num_epochs)
    return _of_rounds(*sizes, num_epochs, lambda hit: {hit: 1})


def _of_rounds(n: int, m: int, s: int, g: int, epochs: int, counted: Counted) -> ParticipationPMF:
    """Return the distribution of a run of independent rounds; `counted` as of `epoch_distribution`."""
    distribution: dict[int, Fraction] = {}
    for hit, chance in enumerate(round_hits(n, m, s, g)):
        for count, share in counted(hit).items():
            distribution[count**2] = distribution.get(count**2, Fraction(0)) + chance * share
    rounds = n // (m * s) * epochs
    if set(distribution) <= {0, 1}:  # at most one term counts: c^2 counts rounds
        return binomial_pmf(rounds, distribution.get(1, Fraction(0)))
    return self_compose_pmf(from_exact(distribution), rounds)


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
    """Return the distribution of c^2 of a run whose terms are kept by fair coins (appendix D).

    A round with fewer than `min_kept` kept terms, 1 to num_microbatches, is skipped. Of L terms that hold
    records of the group, Bin(L, 1/2) count. The coins are independent of data, so they may be revealed first,
    like the sampling: a run is a mixture over the remaining counts (proofs/tradeoff.md), also where sums are
    divided by the number of kept terms. The bound does not require that this number, or a skipped round, is
    hidden. Halving c itself, which the paper calls "factor 2", is no bound and is not included. `train` has
    no such sampler.

    The other arguments are those of `participation_pmf`.
    """
    n, m, s, g = dataset_size, num_microbatches, microbatch_size, group_size
    check_sizes(n, m, s, num_epochs, g, sampling)
    if m > _MAX_FILTERED:
        raise ValueError(
            f"num_microbatches must be at most {_MAX_FILTERED} where terms are kept by coins, got {m}"
        )
    if _validate.positive_integer("min_kept", min_kept) > m:
        raise ValueError(f"min_kept must be at most num_microbatches {m}, got {min_kept}")

    def counted(hit: int) -> dict[int, Fraction]:
        return _kept_of(hit, m, min_kept)

    if sampling == "shuffling":
        return self_compose_pmf(from_exact(epoch_distribution(n, m, s, g, counted)), num_epochs)
    return _of_rounds(n, m, s, g, num_epochs, counted)


def _kept_of(hit: int, terms: int, min_kept: int) -> dict[int, Fraction]:
    """Return `{how many of `hit` terms count: probability}`: the kept ones; none in a skipped round."""
    distribution = {0: Fraction(0)}
    for kept in range(hit + 1):
        for others in range(terms - hit + 1):
            ways = math.comb(hit, kept) * math.comb(terms - hit, others)
            count = kept if kept + others >= min_kept else 0
            distribution[count] = distribution.get(count, Fraction(0)) + Fraction(ways, 2**terms)
    return {count: share for count, share in distribution.items() if share}


def round_hits(
    dataset_size: int, num_microbatches: int, microbatch_size: int, group_size: int
) -> list[Fraction]:
    """Return `P(L = k)`, k = 0.., for one round of subsampling, by inclusion and exclusion."""
    n, m, s, g = dataset_size, num_microbatches, microbatch_size, group_size
    max_hits = min(m, g)
    check_group(g, MAX_GROUP)
    whole = math.comb(n, g)
    # Ways to choose the group where all terms but k given ones are missed.
    within = [math.comb(n - (m - k) * s, g) for k in range(max_hits + 1)]
    return [Fraction(math.comb(m, k) * _all_hit(k, within), whole) for k in range(max_hits + 1)]


def _all_hit(k: int, within: list[int]) -> int:
    """Return how many of the ways `within[j]` for j given terms include all of k: inclusion and exclusion."""
    return sum((-1) ** i * math.comb(k, i) * within[k - i] for i in range(k + 1))


def check_group(group_size: int, max_size: int) -> None:
    """Refuse a group whose exact distribution takes more than about a minute."""
    if group_size > max_size:
        raise ValueError(f"group_size must be at most {max_size} for an exact distribution, got {group_size}")


@functools.lru_cache(maxsize=32)
def shuffled_epoch(
    dataset_size: int, num_microbatches: int, microbatch_size: int, group_size: int
) -> ParticipationPMF:
    """Return the distribution of c^2 of one shuffled epoch.

    `P(c^2 = y) = [x^g t^y] (sum_k t^(k^2) C(m,k) ((1+x)^s - 1)^k)^R / C(N,g)`: x marks records of the
    group, t the squares of the numbers of terms with them. It replaces the printed distribution of
    theorem F.1, which assumes equally likely multisets (proofs/errata.md).
    """
    n, m, s, g = dataset_size, num_microbatches, microbatch_size, group_size
    rounds = n // (m * s)
    if m == 1:
        check_group(g, MAX_GROUP)
        whole = math.comb(n, g)
        within = [math.comb(j * s, g) for j in range(min(g, rounds) + 1)]
        distribution = {
            j: Fraction(math.comb(rounds, j) * _all_hit(j, within), whole) for j in range(1, len(within))
        }
        return from_exact({j: p for j, p in distribution.items() if p})
    return from_exact(epoch_distribution(n, m, s, g, lambda k: {k: 1}))


def epoch_distribution(n: int, m: int, s: int, g: int, counted: Counted):
    """Return `{c^2: probability}` of one shuffled epoch in exact numbers, sizes as in `shuffled_epoch`.

    `counted` is: number of terms with records -> `{how many of them count: probability}`, `{k: 1}` for all.
    """
    check_group(g, MAX_GROUP_OF_TERMS)
    # Polynomials in x up to x^g, each coefficient a dictionary {power of t: count}.
    bump = [0] + [math.comb(s, j) for j in range(1, min(s, g) + 1)]
    one: list[dict[int, Any]] = [{} for _ in range(g + 1)]
    power = [1] + [0] * g
    for k in range(min(m, g) + 1):
        for degree, count in enumerate(power):
            if count:
                for j, share in counted(k).items():
                    one[degree][j * j] = one[degree].get(j * j, 0) + math.comb(m, k) * count * share
        power = [
            sum(power[degree - j] * bump[j] for j in range(1, min(degree, len(bump) - 1) + 1))
            for degree in range(g + 1)
        ]
    result = repeated(one, n // (m * s), lambda a, b: _times(a, b, g))
    return {y: Fraction(count) / math.comb(n, g) for y, count in result[g].items()}


def compose_pmf(a: ParticipationPMF, b: ParticipationPMF) -> ParticipationPMF:
    """Return the distribution of the sum of two independent c^2."""
    low = int(a.squared_sensitivity[0] + b.squared_sensitivity[0])
    prob = _convolve(_dense(a), _dense(b))
    truncated = 1 - (1 - a.truncated_mass) * (1 - b.truncated_mass)
    return _sparse(prob, low, truncated)


def self_compose_pmf(a: ParticipationPMF, num_epochs: int) -> ParticipationPMF:
    """Return the distribution of the sum of `num_epochs` independent copies of c^2."""
    _validate.positive_integer("num_epochs", num_epochs)
    values, prob = a.squared_sensitivity.astype(float), a.prob
    spread = math.sqrt(max(0.0, float(prob @ (values - prob @ values) ** 2)) * num_epochs)
    # About 11 standard deviations on either side have probability above 1e-30.
    _refuse_products(*2 * [min(20 * spread, num_epochs * (values[-1] - values[0]))])
    base = a if num_epochs == 1 else _sparse(_dense(a), int(a.squared_sensitivity[0]), a.truncated_mass)
    return repeated(base, num_epochs, compose_pmf)


def _times(a, b, max_degree):
    product: list[dict[int, Any]] = [{} for _ in range(max_degree + 1)]
    for i, left in enumerate(a):
        for j in range(max_degree + 1 - i):
            right, into = b[j], product[i + j]
            for y, p in left.items():
                for z, q in right.items():
                    into[y + z] = into.get(y + z, 0) + p * q
    return product


def binomial_pmf(trials: int, p: Fraction) -> ParticipationPMF:
    """Return the distribution of a count in float64; tails below 1e-30 are truncated."""
    from scipy import stats

    rate = float(p)
    if trials > 2**53:
        raise ValueError(f"num_epochs must be smaller: {trials:.3g} rounds are more than float64 counts")
    if rate == 0:
        return ParticipationPMF(np.array([0]), np.array([1.0]))
    # By Bernstein's inequality less than e^-600 is beyond; it counts as delta, on either side.
    reach = 40 * math.sqrt(trials * rate * (1 - rate)) + 400
    first, last = max(0, math.floor(trials * rate - reach)), min(trials, math.ceil(trials * rate + reach))
    if last - first > _MAX_VALUES:
        raise ValueError(
            f"num_epochs must be smaller: the distribution of {trials:.3g} rounds has too many values"
        )
    beyond = 0.0 if (first, last) == (0, trials) else 1e-200
    return _sparse(stats.binom.pmf(np.arange(first, last + 1), trials, rate), first, beyond)


def from_exact(distribution: dict[int, Fraction]) -> ParticipationPMF:
    """Return a distribution of exact probabilities that sum to 1."""
    values = sorted(y for y, p in distribution.items() if p)
    assert sum(distribution.values()) == 1
    return ParticipationPMF(np.array(values, np.int64), np.array([float(distribution[y]) for y in values]))


def _dense(a: ParticipationPMF) -> np.ndarray:
    first = int(a.squared_sensitivity[0])
    prob = np.zeros(int(a.squared_sensitivity[-1]) - first + 1)
    prob[a.squared_sensitivity - first] = a.prob
    return prob


def _refuse_products(first: float, second: float) -> None:
    if first * second > _MAX_PRODUCTS:
        raise ValueError(f"num_epochs or group_size must be smaller: c^2 has {first + second:.3g} values")


def _convolve(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _refuse_products(len(a), len(b))
    # Direct sums of positive terms keep every entry's relative precision, tails too; an FFT would not.
    return np.convolve(a, b)


def _sparse(prob: np.ndarray, low: int, truncated: float) -> ParticipationPMF:
    kept = prob > _CUT
    last = np.flatnonzero(kept)[-1]
    # Mass cut above goes to the truncated mass; mass cut in between goes up to the next kept entry.
    beyond = float(prob[last + 1 :].sum())
    places = np.flatnonzero(kept)
    moved = prob[places].copy()
    small = np.flatnonzero(~kept[:last])
    np.add.at(moved, np.searchsorted(places, small), prob[small])
    # Sums of positive terms: every entry has an error of n roundings of 2^-53, so nothing is renormalised.
    return ParticipationPMF(places + low, moved, min(1.0, truncated + beyond))
