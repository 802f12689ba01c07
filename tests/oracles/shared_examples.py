"""The counterexample to theorem 6.1 of arXiv 2602.09338, exactly: one dimension of quadrature, no kernel of
ours.

Two steps, separation 2, C = I, cold start. Example 0 belongs to the user u and to v_1 .. v_m, example j to
v_j. The gradient of example 0 is e_A, that of all others e_B. Example 0 sampled at step 1 locks out every
other one at step 2, under both D and D', so the second batch shows u's coin. Algorithms 3 and 4 agree on
it: at step 1 no example is locked out, so sampled examples and participants are the same.
"""

import numpy as np
from scipy import stats


def edges(m: int) -> tuple[list[int], list[int]]:
    """(users, rows) of the graph: u is user 0, v_j is user j."""
    return [0, *range(1, m + 1), *range(1, m + 1)], [0] + [0] * m + list(range(1, m + 1))


def second_batch(m: int, p: float) -> np.ndarray:
    """(m + 1,) the distribution of others in the second batch when example 0 was not sampled at step 1."""
    return stats.binom.pmf(np.arange(m + 1), m, p * (1 - p))


def exact_delta(m: int, p: float, sigma: float, epsilon: float, direction: str) -> float:
    """delta of (first release along e_A, second along e_B): at most that of the whole run.

    Given the second number b, example 0 was sampled at step 1 with probability `pi(b)`, and the first
    number is one sampled Gaussian with that rate, whose hockey-stick divergence has a closed form.
    """
    distribution = second_batch(m, p)
    counts = np.flatnonzero(distribution > 1e-18)
    grid = np.linspace(-9 * sigma, counts.max() + 9 * sigma, 200 * (counts.max() + 20))
    absent = stats.norm.pdf(grid[:, None], counts, sigma) @ distribution[counts]
    empty = stats.norm.pdf(grid, 0, sigma)
    density = p * empty + (1 - p) * absent
    rate = np.divide(p * empty, density, out=np.zeros_like(density), where=density > 0)
    return float(np.trapezoid(density * _sampled_gaussian(rate, sigma, epsilon, direction), grid))


def _sampled_gaussian(rate, sigma: float, epsilon: float, direction: str):
    """H(rate N(1) + (1 - rate) N(0), N(0)) at e^epsilon ("remove"), or with the two exchanged ("add")."""
    alpha = np.exp(epsilon)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        odds = (alpha - 1 + rate) / rate if direction == "remove" else (1 / alpha - 1 + rate) / rate
        edge = sigma**2 * np.log(odds) + 0.5
    if direction == "remove":
        value = rate * stats.norm.sf((edge - 1) / sigma) - (alpha - 1 + rate) * stats.norm.sf(edge / sigma)
        return np.where(rate > 0, value, 0.0)
    value = (1 - alpha * (1 - rate)) * stats.norm.cdf(edge / sigma)
    value = value - alpha * rate * stats.norm.cdf((edge - 1) / sigma)
    return np.where(1 / alpha - 1 + rate > 0, value, 0.0)
