"""Certify a mixture over a participation distribution by samples: Monte Carlo variant of `mixture_delta`.

With the batches revealed a run has `delta(eps) = E delta_{G_{c/sigma}}(eps)`, a mean of numbers between 0 and
that of the largest c. Samples of c^2 test that it is at most delta_v by the anytime rule of
`statistics.bounds`, with bets fixed beforehand; a distribution with a larger mean is accepted with a
probability of at most q, and `delta_v + q (1 - delta_v)` is the guarantee (arXiv 2602.09338, theorem A.1).
Only counts of c^2 are stored: everything else is recomputed.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import SampledDistribution
from jaxacct.common import validate as _validate
from jaxacct.common.files import to_json
from jaxacct.common.progress import Progress
from jaxacct.kernels import randomness
from jaxacct.statistics import bounds, roots
from jaxacct.statistics.bounds import Budget

BLOCK = 4096
_PILOT, _DRAWS = 0, 1


@dataclass(frozen=True)
class MixtureEvidence:
    """Samples of a participation distribution.

    Attributes:
      target: digest of the distribution, sigma, epsilon and delta that they were drawn for.
      key: two 32-bit words; block i has the key `fold_in(key, i)`.
      counts: (c^2, number of samples with it), ascending.
    """

    target: str
    key: tuple[int, ...]
    counts: tuple[tuple[int, int], ...]

    def __post_init__(self):
        object.__setattr__(self, "key", tuple(self.key))
        object.__setattr__(self, "counts", tuple(tuple(pair) for pair in self.counts))
        good = all(
            len(pair) == 2 and all(type(n) is int for n in pair) and pair[0] >= 0 and pair[1] > 0
            for pair in self.counts
        )
        values = [pair[0] for pair in self.counts] if good else []
        if not (good and values and all(a < b for a, b in itertools.pairwise(values))):
            raise ValueError("evidence must have counts (c^2, draws) of integers, ascending")
        if len(self.key) != 2 or not all(type(word) is int and 0 <= word < 2**32 for word in self.key):
            raise ValueError("evidence must have a key of two 32-bit words")
        if type(self.target) is not str:
            raise ValueError("evidence must have the digest of its target")

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return sum(number for _, number in self.counts)


def digest(distribution: SampledDistribution, sigma: float, epsilon: float, delta: float) -> str:
    """Return the SHA-256 of the claim of the samples."""
    described = {"law": distribution.describe(), "sigma": sigma, "epsilon": epsilon, "delta": delta}
    return hashlib.sha256(to_json(described, sort_keys=True).encode()).hexdigest()


def flaws(
    evidence: MixtureEvidence, distribution: SampledDistribution, sigma: float, epsilon: float, delta: float
) -> list:
    """Return why the samples do not show (epsilon, delta) at this noise; empty if they do."""
    if evidence.target != digest(distribution, sigma, epsilon, delta):
        return ["it is about another distribution, noise, epsilon or delta"]
    if evidence.counts[-1][0] > distribution.most():
        return [f"a draw has c^2 {evidence.counts[-1][0]}, above the largest possible {distribution.most()}"]
    good = accepts(evidence.counts, distribution, sigma, epsilon, delta)
    return [] if good else ["the draws do not show delta"]


def accepts(counts, distribution: SampledDistribution, sigma: float, epsilon: float, delta: float) -> bool:
    """Return whether samples `(c^2, number)` prove `delta(epsilon) <= delta`, with failure probability."""
    return _Test(distribution, sigma, epsilon, delta).accepts(counts)


class _Test:
    """Test of `mean of delta_{G_{c/sigma}}(epsilon) <= delta_v`, in units of the largest term."""

    def __init__(self, distribution: SampledDistribution, sigma: float, epsilon: float, delta: float):
        self._sigma, self._epsilon, self._budget = sigma, epsilon, Budget.split(delta)
        self._scale = max(float(gdp_delta(epsilon, math.sqrt(distribution.most()) / sigma)), 1e-300)
        self._theta = self._budget.delta_v / (self._scale * (1 + distribution.draw_error()))

    def accepts(self, counts) -> bool:
        if self._theta >= 1:
            return True
        bets, weights = bounds.default_bets()
        q = self._budget.failure_probability
        return bounds.accepts(self._terms(counts), self._theta, q, bets, weights)

    def hopeless(self, counts) -> bool:
        return bounds.hopeless(self._terms(counts), self._theta)

    def _terms(self, counts) -> np.ndarray:
        """Return the histogram of terms, each rounded up, over `bounds.TERM_EDGES`."""
        values = np.array([value for value, _ in counts], float)
        deltas = gdp_delta(self._epsilon, np.sqrt(values) / self._sigma)
        found = np.zeros(len(bounds.TERM_EDGES), np.int64)
        for one, (_, number) in zip(deltas, counts, strict=True):
            found += number * bounds.bin_terms([min(1.0, one / self._scale * (1 + 1e-9))])
        return found


def certify_mixture(
    distribution: SampledDistribution,
    sigma: float,
    epsilon: float,
    delta: float,
    *,
    num_samples: int = 2**18,
    key=None,
    progress: Progress | None = None,
) -> MixtureEvidence:
    """Draw samples of a distribution that show `delta(epsilon) <= delta` at noise sigma (relative to 2 C).

    At most `num_samples`, in whole blocks of 4096, with a JAX key from the operating system by default; delta
    includes the failure probability. `progress` is called with ("participations", samples, maximum).

    Raises:
      ValueError: bad arguments, or samples that do not show the guarantee.
    """
    _validate.scale("sigma", sigma)
    _validate.target(epsilon, delta)
    blocks = -(-_validate.positive_integer("num_samples", num_samples) // BLOCK)
    stream = randomness.stream_key(randomness.checked_key(key), _DRAWS)
    drawn, look = np.zeros(0, np.int64), 1
    for done in range(1, blocks + 1):
        drawn = np.concatenate([drawn, _block(distribution, stream, done - 1)])
        if progress:
            progress("participations", len(drawn), blocks * BLOCK)
        if done < min(look, blocks):
            continue
        look = done + max(1, done // 8)  # the rule allows a test at any time
        counts = _counts(drawn)
        test = _Test(distribution, sigma, epsilon, delta)
        if test.accepts(counts):
            key_words = tuple(randomness.key_words(stream))
            return MixtureEvidence(digest(distribution, sigma, epsilon, delta), key_words, counts)
        if test.hopeless(counts):
            break
    raise ValueError(
        f"sigma {sigma:g} could not be certified for epsilon {epsilon:g}, delta {delta:g} by {len(drawn)} "
        "draws"
    )


def calibrate_mixture(
    distribution: SampledDistribution, epsilon: float, delta: float, *, num_samples: int = 2**18, key=None
) -> float:
    """Return an estimate, from a pilot run, of the smallest sigma that `num_samples` samples certify."""
    _validate.target(epsilon, delta)
    _validate.positive_integer("num_samples", num_samples)
    stream = randomness.stream_key(randomness.checked_key(key), _PILOT)
    blocks = max(1, min(16, num_samples // BLOCK))
    pilot = np.concatenate([_block(distribution, stream, block) for block in range(blocks)])
    pairs = _counts(pilot)
    values, numbers = np.array(pairs, float).T
    # As if there were as many samples as there will be.
    scaled = tuple((value, math.ceil(number * num_samples / len(pilot))) for value, number in pairs)

    def is_enough(log_sigma: float) -> bool:
        sigma = math.exp(log_sigma)
        terms = gdp_delta(epsilon, np.sqrt(values) / sigma)
        deviation = math.sqrt(np.cov(terms, fweights=numbers.astype(int)))
        # The mean of later samples differs from the pilot's by chance: five standard errors are reserved.
        left = delta - 5 * deviation * math.sqrt(1 / len(pilot) + 1 / num_samples)
        return left > 0 and accepts(scaled, distribution, sigma, epsilon, left)

    _, high = roots.turn(is_enough, 0.0, 1.0, -50.0, 50.0, absolute=1e-4)
    if high == math.inf:
        raise ValueError(f"num_samples must be more than {num_samples} to show delta {delta:g}")
    return math.exp(high)


def replayed(evidence: MixtureEvidence, distribution: SampledDistribution) -> bool:
    """Return whether the stored key draws the stored counts: integers, the same on any machine."""
    stream = randomness.key_from_words(list(evidence.key))
    blocks, rest = divmod(evidence.num_samples, BLOCK)
    left = dict(evidence.counts)
    for block in range(0 if rest else blocks):
        for value, number in _counts(_block(distribution, stream, block)):
            left[value] = left.get(value, 0) - number
            if left[value] < 0:  # more than stored: the others need not be drawn
                return False
    return not any(left.values())


def _block(distribution: SampledDistribution, stream, block: int) -> np.ndarray:
    return np.asarray(distribution.draw(jax.random.fold_in(stream, block), BLOCK), np.int64)


def _counts(drawn: np.ndarray) -> tuple[tuple[int, int], ...]:
    values, numbers = np.unique(drawn, return_counts=True)
    return tuple((int(value), int(number)) for value, number in zip(values, numbers, strict=True))
