"""Lower bounds on epsilon from coins of one run that an attack guesses (jaxacct/proofs/audits.md).

They assume only (epsilon, delta)-DP.
"""

import bisect
import itertools
import math
from typing import NamedTuple

import numpy as np
import scipy

from jaxacct.statistics import roots

SHARES = (1.0, 2 / 5, 4 / 25, 8 / 125)  # of the canaries whose coins are guessed, largest scores first


class Guessed(NamedTuple):
    """A lower bound on epsilon, and the guesses that gave it.

    Attributes:
      lower: natural log, at least 0.
      accuracy: that the guesses have at least.
      right: how many of them.
    """

    lower: float
    accuracy: float
    guesses: int
    right: int


def lowest_rate(hits, trials: int, level: float) -> np.ndarray:
    """Return rates that the true ones are below with probability at most `level` each (Clopper-Pearson)."""
    hits = np.asarray(hits, np.float64)
    return np.where(hits > 0, scipy.special.betaincinv(np.maximum(hits, 1), trials - hits + 1, level), 0.0)


def one_run_bound(scores: np.ndarray, inside: np.ndarray, delta: float, confidence: float) -> Guessed:
    """Return a lower bound on epsilon at `delta` from the coins of one run.

    It is false with probability 1 - confidence. Of m fair coins the r with the largest |score| are guessed,
    "in" where the score is above 0. Under (epsilon, delta)-DP at least W guesses are right with probability
    at most `refusal(W, r, m, delta, epsilon)`. The bound is the largest epsilon that is refused at an equal
    share of the failure probability by one of the `SHARES`.

    Args:
      scores: (m,) log likelihood ratio of each canary being in, not silent.
      inside: (m,) bool, the coins.
      delta: at which epsilon is bounded.
      confidence: of the bound, in (0, 1).

    Source: arXiv 2305.08846; the proof with this term for delta is in jaxacct/proofs/audits.md.
    """
    m, order = len(scores), np.argsort(-np.abs(scores), kind="stable")
    right = np.cumsum((np.asarray(scores) > 0)[order] == np.asarray(inside)[order])
    level, found = (1 - confidence) / len(SHARES), []
    for share in SHARES:
        r = _guesses(m, share)
        hits = int(right[r - 1])
        lower = _max_refused(hits, r, m, delta, level)
        found.append(Guessed(lower, float(lowest_rate(hits, r, level)), r, hits))
    return max(found, key=lambda each: each.lower)


def refusal(right: int, guesses: int, canaries: int, delta: float, epsilon: float) -> float:
    """Return an upper bound on the probability of so many right guesses under (epsilon, delta)-DP."""
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(scipy.special.betainc(right, guesses - right + 1, q)) if right > 0 else 1.0
    return tail + (price(guesses, canaries, delta, epsilon) if delta > 0 else 0.0)


def price(guesses: int, canaries: int, delta: float, epsilon: float) -> float:
    """Return what delta adds to that probability.

    It is `canaries delta / (1 + e^epsilon)` times the mean over n < guesses of the largest binomial
    probability.
    """
    n, odds = np.arange(guesses), math.exp(-epsilon)  # of a wrong guess; all below holds where it underflows
    log_right = -math.log1p(odds)
    mode = np.minimum(np.floor((n + 1) * math.exp(log_right)), n)
    log_choose = -scipy.special.betaln(n - mode + 1, mode + 1) - np.log(n + 1)
    mode_probability = np.exp(log_choose + mode * log_right + (n - mode) * (log_right - epsilon))
    return canaries * delta * odds / (1 + odds) * float(mode_probability.mean())


def max_canaries(delta: float, confidence: float, epsilon: float) -> int:
    """Return how many canaries let delta cost `one_run_bound` at most half of the failure probability."""
    allowed = (1 - confidence) / len(SHARES) / 2

    def is_dearer(canaries: int) -> bool:
        return price(_guesses(canaries, min(SHARES)), canaries, delta, epsilon) > allowed

    return bisect.bisect_left(range(1, _MOST), True, key=is_dearer)


_MOST = 2**18


def _guesses(canaries: int, share: float) -> int:
    return max(1, round(share * canaries))


def _max_refused(right: int, guesses: int, canaries: int, delta: float, level: float) -> float:
    """Return a lower bound on the largest epsilon refused by so many right guesses at this level; else 0."""
    accuracy = float(lowest_rate(right, guesses, level))
    if accuracy <= 0.5:
        return 0.0

    def refused(epsilon: float) -> bool:
        return refusal(right, guesses, canaries, delta, epsilon) <= level

    # The price falls as epsilon grows, so refused values need not begin at 0.
    steps = np.linspace(math.log(accuracy / (1 - accuracy)), 0, 33)
    for high, low in itertools.pairwise(steps):
        if refused(low):
            width = (high - low) * 2.0**-20
            return float(roots.bisect(lambda epsilon: not refused(epsilon), low, high, absolute=width)[0])
    return 0.0
