"""Lower bounds on epsilon from what attacks got right, each at a stated confidence.

Both rest on (epsilon, delta)-DP alone and on no approximation. `epsilon_lower_bound` is of independent
trials; `one_run_bound` of coins that one run was to hide, with its theorem and proof.
"""

import math

import numpy as np
import scipy

# Guesses of one run: of so many of the canaries, on both sides or of the highest scores alone.
SHARES = (1.0, 1 / 4, 1 / 16, 1 / 64)
_THRESHOLDS = np.linspace(0.02, 0.98, 97)


def epsilon_lower_bound(
    present: np.ndarray, absent: np.ndarray, delta: float, confidence: float
) -> tuple[float, dict[str, tuple[float, float]], dict[str, int]]:
    """At most the true epsilon at `delta`, but with probability 1 - confidence, of independent trials.

    An event has probability `a <= e^epsilon b + delta` under neighbouring data sets, so epsilon is at least
    `log((a - delta) / b)`. The event, a score above or not above a threshold, is chosen on the first half of
    the trials; on the second the Clopper-Pearson bounds on a and b fail with probability
    `(1 - confidence) / 2` each.

    Args:
      present, absent: (trials,) scores with the canary and without.

    Returns:
      the bound (natural log, at least 0), the bounds on both rates as intervals, and what they are of.
    """
    half = len(present) // 2
    level = (1 - confidence) / 2
    first, second = (present[:half], absent[:half]), (present[half:], absent[half:])

    def rates(threshold, above, sides):
        """Hits and false alarms of events, and the bounds on their rates."""
        p, q = (np.sort(side) for side in (sides if above else sides[::-1]))
        hits, false = (np.searchsorted(side, threshold, side="right") for side in (p, q))
        hits, false = (len(p) - hits, len(q) - false) if above else (hits, false)
        low, high = clopper_pearson(hits, len(p), level)[0], clopper_pearson(false, len(q), level)[1]
        return hits, false, low, high, np.log(np.maximum(low - delta, 1e-300) / high)

    thresholds = np.quantile(np.concatenate(first), _THRESHOLDS)
    found = {above: rates(thresholds, above, first)[-1] for above in (True, False)}
    above = bool(found[True].max() >= found[False].max())
    hits, false, low, high, lower = rates(thresholds[found[above].argmax()], above, second)
    intervals = {"true positive rate": (float(low), 1.0), "false positive rate": (0.0, float(high))}
    counts = {"true positives": int(hits), "false positives": int(false), "trials each": len(second[0])}
    return max(0.0, float(lower)), intervals, counts


def clopper_pearson(hits, trials: int, level: float):
    """(low, high) of which each misses the true rate with probability at most `level`; arrays of `hits`."""
    hits = np.asarray(hits, np.float64)
    low = scipy.special.betaincinv(np.maximum(hits, 1), trials - hits + 1, level)
    high = 1 - scipy.special.betaincinv(np.maximum(trials - hits, 1), hits + 1, level)
    return np.where(hits > 0, low, 0.0), np.where(hits < trials, high, 1.0)


def one_run_bound(
    scores: np.ndarray, inside: np.ndarray, delta: float, confidence: float
) -> tuple[float, dict[str, tuple[float, float]], dict[str, int]]:
    """At most the true epsilon at `delta`, but with probability 1 - confidence, from the coins of one run.

    **Theorem.** Let `S` be m fair coins and `Y = M(S)`, where M is (epsilon, delta)-DP for the change of one
    coin. From `Y` alone some r coins are chosen and guessed, W of them rightly, and with
    `q = 1 / (1 + e^-epsilon)` let `p = P(Bin(r, q) >= W)`. Then `P(p <= b) <= b + m delta / 2`.

    **Proof.** Fix i and the coins before it, and let `p1`, `p0` be the laws of Y with coin i at 1 and 0, over
    the coins after it: (epsilon, delta)-close, being mixtures of such pairs with the same weights. Given Y
    the coin is 1 with probability `p1 / (p0 + p1) <= q + F`, `F = (p1 - e^epsilon p0)+ / ((1 + e^epsilon)
    (p0 + p1))`, and Y has the density `(p0 + p1) / 2`, so `E F <= delta / (2 (1 + e^epsilon)) <= delta / 4`;
    the same for 0. So a guess of coin i is right with probability at most `q + F_i` given Y and the coins
    before, `E F_i <= delta / 2`. Given Y, let w be the least W with `p <= b`, and V_i the probability of w
    right guesses in all if those after coin i were right with probability q independently. V_0 <= b, and V
    rises by at most F_i a coin on average, as one more right guess raises it by at most 1. So w are reached
    with probability at most `b + sum E F_i`. QED. (Theorem 5.2 of arXiv 2305.08846 has another term for
    delta; for delta 0 both are its theorem.)

    The least epsilon that p does not refuse is the logit of the Clopper-Pearson lower bound on the accuracy.
    Guesses are of the highest scores ("in"), and of as many of the lowest ("out"), for four numbers of them;
    the best bound of these eight is taken, each at an eighth of the failure probability.

    Args:
      scores: (m,) higher where a canary seems to be in.
      inside: (m,) bool, the coins.

    Returns:
      the bound (natural log, at least 0), the accuracy of its guesses as an interval, and the counts.
    """
    m, order = len(scores), np.argsort(scores, kind="stable")
    tests = []
    for share in SHARES:
        r = max(1, round(share * m))
        tests += [(order[m - r // 2 :], order[: r - r // 2]), (order[m - r :], order[:0])]
    level = (1 - confidence) / len(tests) - m * delta / 2
    best = (0.0, {"accuracy of guesses": (0.0, 1.0)}, {"guesses": 0, "right": 0})
    for guessed_in, guessed_out in tests if level > 0 else []:
        r = len(guessed_in) + len(guessed_out)
        right = int(inside[guessed_in].sum() + (~inside[guessed_out]).sum())
        low = float(clopper_pearson(right, r, level)[0])
        lower = math.log(low / (1 - low)) if low > 0 else 0.0
        if lower > best[0] or not best[2]["guesses"]:
            best = (
                max(0.0, lower),
                {"accuracy of guesses": (low, 1.0)},
                {"guesses": r, "right": right},
            )
    return best


def most_canaries(delta: float, confidence: float) -> int:
    """With which delta costs `one_run_bound` at most half of the failure probability."""
    return int((1 - confidence) / (2 * len(SHARES)) / delta)


__all__ = ["SHARES", "clopper_pearson", "epsilon_lower_bound", "most_canaries", "one_run_bound"]
