"""Exact distributions of participation at two steps, by Markov chains in float64 NumPy; no kernel of ours."""

import math

import numpy as np
from scipy import stats


def pair_distributions(scheme, restarting: bool = False) -> np.ndarray:
    """(n, n, k + 1, k + 1): P(counts i at s and j at t) for s < t, zero elsewhere.

    Args:
      restarting: whether coins of an ineligible user are tossed, too, and lock out anew: algorithm 3 of arXiv
        2602.09338, which is dominated by the scheme that is accounted for.
    """
    if scheme.name in ("cyclic-poisson", "balls-in-bins"):
        return _by_phase(scheme)
    if scheme.name == "independent-attribution":
        return _of_sums(_renewal(scheme, 1), scheme.examples_per_user)
    return _renewal(scheme, scheme.examples_per_user if scheme.name == "multi-attribution" else 1, restarting)


def _by_phase(scheme) -> np.ndarray:
    n, b = scheme.iterations, scheme.cycle_length
    p = getattr(scheme, "sampling_probability", 1.0)
    coin, never = np.array([1 - p, p]), np.array([1.0, 0.0])
    distributions = np.zeros((n, n, 2, 2))
    for s in range(n):
        for t in range(s + 1, n):
            for phase in range(b):
                first, second = (coin if step % b == phase else never for step in (s, t))
                distributions[s, t] += np.outer(first, second) / b
    return distributions


def _renewal(scheme, examples: int, restarting: bool = False) -> np.ndarray:
    """States are how many steps are left before the next coin; a count above 0 locks out b - 1 steps."""
    n, p = scheme.iterations, scheme.sampling_probability
    b = 1 if scheme.name == "poisson" else scheme.min_separation
    coins = np.array([math.comb(examples, j) * p**j * (1 - p) ** (examples - j) for j in range(examples + 1)])
    # A count's (states before, states after); their sum is the chain.
    moves = np.zeros((examples + 1, b, b))
    for state in range(1, b):
        heads = 1 - coins[0] if restarting else 0.0
        moves[0, state, state - 1] += 1 - heads
        moves[0, state, b - 1] += heads
    for count, chance in enumerate(coins):
        moves[count, 0, b - 1 if count else 0] += chance
    chain = moves.sum(axis=0)
    if getattr(scheme, "warm_start", False):
        # The stationary distribution.
        values, vectors = np.linalg.eig(chain.T)
        state = np.real(vectors[:, np.argmin(np.abs(values - 1))])
        state = state / state.sum()
    else:
        state = np.eye(b)[0]
    joins = moves.sum(axis=2)  # (count, state)
    distributions = np.zeros((n, n, examples + 1, examples + 1))
    for s in range(n):
        after = np.einsum("x,cxy->cy", state, moves)
        for t in range(s + 1, n):
            distributions[s, t] = after @ joins.T
            after = after @ chain
        state = state @ chain
    return distributions


def _of_sums(distributions: np.ndarray, number: int) -> np.ndarray:
    """Of the sum of so many independent units."""
    n, width = len(distributions), distributions.shape[2]
    total = np.zeros((n, n, number * (width - 1) + 1, number * (width - 1) + 1))
    total[:, :, 0, 0] = 1.0
    for _ in range(number):
        more = np.zeros_like(total)
        for i in range(width):
            for j in range(width):
                moved = total[:, :, : total.shape[2] - i, : total.shape[3] - j]
                more[:, :, i:, j:] += distributions[:, :, i, j, None, None] * moved
        total = more
    return np.triu(np.ones((n, n)), 1)[:, :, None, None] * total


def batch_size_distributions(scheme, others: int) -> np.ndarray:
    """(n, n, others + 1, others + 1): sizes of two batches that `others` independent examples join."""
    return _of_sums(_renewal(scheme, 1), others)


def min_p_value(drawn: np.ndarray, distributions: np.ndarray) -> float:
    """Of exact two-sided binomial tails, each count of (samples, n) of each two steps, times their number."""
    samples, width = len(drawn), distributions.shape[2]
    drawn = drawn.astype(int)
    assert drawn.min() >= 0 and drawn.max() < width
    indicators = [(drawn == count).astype(np.float32) for count in range(width)]
    observed = np.zeros(distributions.shape)
    for i in range(width):
        for j in range(width):
            observed[:, :, i, j] = np.round(indicators[i].T @ indicators[j])
    later = np.triu_indices(len(distributions), 1)
    observed, expected = observed[later], np.clip(distributions[later], 0.0, 1.0)
    possible = expected > 1e-14
    if observed[~possible].any():
        return 0.0
    distribution = stats.binom(samples, expected[possible])
    tails = np.minimum(distribution.cdf(observed[possible]), distribution.sf(observed[possible] - 1))
    return float(2 * tails.min() * tails.size)
