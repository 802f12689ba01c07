"""Concentration bounds: from terms in [0, 1] to a certified hockey-stick divergence.

The certified quantity is `H = scale * mean`, the mean of independent terms X in [0, 1]. A test of
"H > delta_v" that accepts wrongly with probability at most q makes estimate-verify-release
(eps, delta_v + q (1 - delta_v))-DP (arXiv 2602.09338, Theorem A.1). Everywhere `theta = delta_v / scale` is
the mean to be excluded; `theta >= 1` needs no samples, since H never exceeds `scale`.

The evidence is an exact integer histogram of terms rounded *up*, so an upper bound of the histogram's mean is
one of the terms' mean. Lower bounds use the lower ends of the same bins.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.statistics import roots

RESOLUTION = 128  # bins an octave: rounding up costs less than 2^(1/128) - 1 = 0.543 %
OCTAVES = 40  # the smallest positive edge is 2^-40
TERM_EDGES = np.concatenate([[0.0], np.exp2(-np.arange(OCTAVES * RESOLUTION, -1, -1) / RESOLUTION)])
TERM_EDGES.setflags(write=False)
_LOWER_EDGES = np.concatenate([[0.0], TERM_EDGES[:-1]])
_ROUNDING = 2.0**-40  # allowance for float64 in the wealth, times 1 + the sum of absolute logs


def bin_terms(terms) -> np.ndarray:
    """Return int64 counts of terms by bin, `TERM_EDGES[k-1] < term <= TERM_EDGES[k]`; zeros in bin 0.

    ValueError for a term that is not a number in [0, 1].
    """
    terms = np.asarray(terms).ravel()
    counts = np.zeros(len(TERM_EDGES), np.int64)
    if terms.size == 0:
        return counts
    if not (terms.min() >= 0 and terms.max() <= 1):  # false for NaN, too
        raise ValueError(f"terms must be in [0, 1], got [{terms.min()}, {terms.max()}]")
    positive = terms[terms > 0].astype(np.float64)
    counts += np.bincount(bins_of(positive), minlength=len(TERM_EDGES))
    counts[0] = terms.size - positive.size
    return counts


def bins_of(positive: np.ndarray) -> np.ndarray:
    """Return the bin k with `TERM_EDGES[k-1] < term <= TERM_EDGES[k]` of each float64 term in (0, 1]."""
    index = np.log2(positive)
    index *= RESOLUTION
    index = np.maximum(np.ceil(index, out=index).astype(np.int32) + (len(TERM_EDGES) - 1), 1)
    index += TERM_EDGES[index] < positive  # log2 may have a rounding error, hence an error of one bin
    index -= _LOWER_EDGES[index] >= positive
    return index


def mean_upper(counts) -> float:
    """Return the mean of the rounded-up terms: at least their mean, and at most 0.55 % above it."""
    values, counts = _occupied(counts, TERM_EDGES)
    if not counts.size:
        raise ValueError("counts must hold at least one term, got empty")
    return min(math.fsum(values * counts) / math.fsum(counts), 1.0)


def kl(a: float, b: float) -> float:
    """Return KL(Bernoulli(a) || Bernoulli(b)) in nats, without cancellation."""
    if not (0 <= a <= 1 and 0 <= b <= 1):
        raise ValueError(f"a and b must be in [0, 1], got {a!r} and {b!r}")
    if a == b:
        return 0.0
    if b in (0, 1):
        return math.inf
    if a == 0:
        return -math.log1p(-b)
    if a == 1:
        return -math.log(b)
    return a * _excess((b - a) / a) + (1 - a) * _excess((a - b) / (1 - a))


# --- The budget and the fixed-sample rule ---


@dataclass(frozen=True)
class Budget:
    """Split of delta: `delta_v + failure_probability * (1 - delta_v) <= delta`, all in (0, 1).

    Each direction is verified against `delta_v`. A mechanism whose divergence exceeds `delta_v` is accepted
    with probability at most `failure_probability`.

    Attributes:
      delta: delta of the guarantee.
      delta_v: divergence to be excluded by the verifier.
      failure_probability: q of the verifier, both directions and all candidates together.
    """

    delta: float
    delta_v: float
    failure_probability: float

    def __post_init__(self):
        for name in ("delta", "delta_v", "failure_probability"):
            _validate.open_probability(name, getattr(self, name))
        if self.total > self.delta:
            raise ValueError(f"delta must be at least {self.total!r}, got {self.delta!r}")

    @property
    def total(self) -> float:
        """Guaranteed delta."""
        return self.delta_v + self.failure_probability * (1 - self.delta_v)

    @classmethod
    def split(cls, delta: float, failure_fraction: float = 0.01) -> "Budget":
        """Reserve `failure_fraction * delta` for false acceptance and the rest for `delta_v`."""
        delta = _validate.open_probability("delta", delta)
        q = delta * _validate.open_probability("failure_fraction", failure_fraction)
        delta_v = (delta - q) / (1 - q)
        while delta_v + q * (1 - delta_v) > delta:
            delta_v = math.nextafter(delta_v, 0)
        return cls(delta, delta_v, q)


def failure_probability(*, theta, mean, samples) -> float:
    """Bound `exp(-samples KL(mean || theta))` on wrong acceptance (Chernoff).

    The rule accepts when so many terms have this mean or a smaller one; accepting is wrong when their
    expectation exceeds theta. 0 where theta >= 1, 1 where mean >= theta. The number of samples is fixed
    beforehand. Source: arXiv 2602.09338, appendix A (Fact 4.2 of arXiv 2412.16802).
    """
    mean, theta = _validate.nonnegative_number("mean", mean), _validate.nonnegative_number("theta", theta)
    samples = _validate.positive_integer("samples", samples, minimum=0)
    if theta >= 1:
        return 0.0
    return 1.0 if mean >= theta else math.exp(-samples * kl(mean, theta))


# --- The anytime-valid rule ---


def default_bets(theta=None, pilot_counts=None) -> tuple[np.ndarray, np.ndarray]:
    """Return bets and weights for `log_wealth`: a log grid, half replaced by one tuned bet given a pilot.

    A bet is a fraction f in [0, 1] of the largest lambda allowed, `lambda = f / (1 - theta)`; the
    last is all-in (`f = 1`, lost at the first term of 1). The tuned bet comes first: it maximises
    the log growth on the pilot plus 1/theta imaginary coin tosses of mean theta/2, which keeps it below 1.

    Bets must be fixed before the data: `pilot_counts` must be **independent** of the tested counts, drawn
    with a key of its own. A poor pilot costs power, never validity.
    """
    odds = np.exp2(np.arange(-20, 15) / 2)
    bets = np.append(odds / (1 + odds), 1.0)
    weights = np.full(bets.size, 1 / bets.size)
    if pilot_counts is None:
        return bets, weights
    theta = _validate.positive_number("theta", theta)
    if theta >= 1:
        return bets, weights
    values, counts = _occupied(pilot_counts, TERM_EDGES)
    values, counts = np.append(values, [0.0, 1.0]), np.append(counts, [1 / theta - 0.5, 0.5])
    tuned = _best_bet(values, counts, theta)
    return np.insert(bets, 0, tuned), np.insert(weights / 2, 0, 0.5)


def log_wealth(counts, theta, bets, weights) -> float:
    """Return the log of the wealth `sum_j w_j prod_i (1 + f_j (theta - X_i) / (1 - theta))`, rounded down.

    If the mean is at least theta, each factor is >= 0 with expectation <= 1, so each product is a
    non-negative supermartingale, and so is a mixture with fixed weights: by Ville's inequality it
    *ever* reaches 1/q with probability at most q. Non-decreasing in theta, as a factor's derivative
    is `f (1 - X) / (1 - theta)^2`. `inf` for theta >= 1; 0 without terms, for weights of sum 1.
    """
    theta = _validate.nonnegative_number("theta", theta)
    bets, weights = np.asarray(bets, float), np.asarray(weights, float)
    if not np.all((bets >= 0) & (bets <= 1)):
        raise ValueError(f"bets must be in [0, 1], got {bets.tolist()}")
    if bets.shape != weights.shape or not (np.all(weights >= 0) and weights.sum() <= 1 + 1e-12):
        raise ValueError(f"weights must be >= 0, one a bet, of sum at most 1, got {weights.tolist()}")
    values, counts = _occupied(counts, TERM_EDGES)
    if theta >= 1:
        return math.inf
    return _log_mixture((theta - values) / (1 - theta), counts, bets, weights)


def accepts(counts, theta, q, bets, weights) -> bool:
    """Return whether the terms prove `mean < theta`; wrong with probability <= q at any stopping time."""
    return log_wealth(counts, theta, bets, weights) >= _log_inverse("q", q)


def hopeless(counts, theta, q=1e-3) -> bool:
    """Return whether the terms prove `mean > theta` at level q; to stop then is always valid."""
    return _log_wealth_above(counts, theta) >= _log_inverse("q", q)


def upper_confidence_bound(counts, q) -> float:
    """Return an upper bound on the mean, at all times at once with probability 1 - q; 1 without evidence.

    It is the smallest theta that `accepts`, rounded up: for fixed fractions the wealth is monotone in theta.
    """
    bets, weights = default_bets()
    needed = _log_inverse("q", q)

    def excess(theta):
        return math.inf if theta >= 1 else log_wealth(counts, theta, bets, weights) - needed

    return roots.root(excess, 1e-300, 1.0, _mean_of(counts, TERM_EDGES))[1]


def lower_confidence_bound(counts, q) -> float:
    """Return a lower bound on the mean, at all times at once with probability 1 - q; 0 without evidence."""
    needed = _log_inverse("q", q)

    def excess(theta):
        return needed - _log_wealth_above(counts, theta)

    if excess(1e-300) > 0:
        return 0.0
    # The bound is at most the mean of the terms, so the search starts there.
    return roots.root(excess, 1e-300, 1.0, _mean_of(counts, _LOWER_EDGES))[0]


def predicted_samples(theta, pilot_counts, q) -> float:
    """Return how many terms the anytime rule needs if the truth equals the pilot.

    It is `ln(2/q) / best log growth`; the 2 is the weight of the tuned bet. 0 for theta >= 1, inf for a mean
    of theta or more.
    """
    theta, q = _validate.positive_number("theta", theta), _validate.open_probability("q", q)
    if theta >= 1:
        return 0.0
    growth = _growth(pilot_counts, theta)
    return math.log(2 / q) / growth if growth > 0 else math.inf


def samples_left(counts, theta, q, bets, weights) -> float:
    """Estimate how many more terms `accepts` needs if the truth equals these counts.

    inf for a mean of theta or more. Stopping early on such a prediction costs power, never validity.
    """
    theta = _validate.positive_number("theta", theta)
    short = _log_inverse("q", q) - log_wealth(counts, theta, bets, weights)
    growth = 0.0 if short <= 0 else _growth(counts, theta)
    return 0.0 if short <= 0 else short / growth if growth > 0 else math.inf


def _growth(counts, theta: float) -> float:
    """Return the log growth per term of the best bet for these counts, theta below 1."""
    values, counts = _occupied(counts, TERM_EDGES)
    payoffs, bet = (theta - values) / (1 - theta), _best_bet(values, counts, theta)
    return float(counts @ np.log1p(bet * payoffs)) / max(counts.sum(), 1)


def _log_wealth_above(counts, theta):
    """Return `log_wealth` against "mean <= theta": factors `1 + lambda (X - theta)`, X rounded down.

    `lambda = min(2^j, 1/theta)`; where capped a factor is X/theta, so none increases with theta.
    """
    theta = _validate.nonnegative_number("theta", theta)
    values, counts = _occupied(counts, _LOWER_EDGES)
    if theta >= 1 or not counts.size:
        return -math.inf if theta >= 1 else 0.0
    rates = np.exp2(np.arange(-10, 25))
    rates = np.minimum(rates, 1 / theta if theta > 0 else math.inf)
    return _log_mixture(values - theta, counts, rates, np.full(rates.size, 1 / rates.size))


def _log_mixture(payoffs, counts, bets, weights):
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log1p(np.maximum(np.outer(bets, payoffs), -1.0))
        wealth = logs @ counts - _ROUNDING * (1 + np.abs(logs) @ counts) + np.log(weights)
    # SciPy's logsumexp takes twice as long as all the rest for a few dozen bets.
    return float(np.logaddexp.reduce(np.where(np.isnan(wealth), -math.inf, wealth)))


def _best_bet(values, counts, theta):
    """Return the f in [0, 1] that maximises the concave `sum counts log(1 + f payoffs)`."""
    payoffs = (theta - values) / (1 - theta)
    if payoffs @ counts <= 0:
        return 0.0

    def past(bet):
        with np.errstate(divide="ignore"):
            return counts @ (payoffs / np.maximum(1 + bet * payoffs, 0.0)) < 0

    return roots.bisect(past, 0.0, 1.0)[0] if past(1.0) else 1.0


def _occupied(counts, edges):
    counts = np.asarray(counts)
    integers = counts.shape == edges.shape and np.issubdtype(counts.dtype, np.integer)
    if not integers or counts.min() < 0:
        raise ValueError(f"counts must be {len(edges)} non-negative integers")
    held = counts > 0
    return edges[held], counts[held].astype(np.float64)


def _excess(u):
    """Return `u - log(1 + u)`, by its series where the two nearly cancel."""
    if abs(u) > 0.01:
        return u - math.log1p(u)
    return sum((-u) ** n / n for n in range(8, 1, -1))


def _mean_of(counts, edges) -> float:
    """Return the mean of the terms at `edges` of their bins, 0 without terms."""
    values, counts = _occupied(counts, edges)
    return float(values @ counts / counts.sum()) if counts.size else 0.0


def _log_inverse(name, q):
    return -math.log(_validate.open_probability(name, q))
