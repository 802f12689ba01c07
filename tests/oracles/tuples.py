"""Enumeration over tuples of participation vectors, and exact deltas, in float64 NumPy; no kernel of ours."""

import functools
import itertools
import math

import numpy as np
from scipy import integrate

from tests.oracles.enumeration import strategy_matrix, vectors


def count_distribution(
    scheme, coefficients, sigma: float, m: int, rows: int | None = None
) -> tuple[float, dict[tuple[int, ...], float]]:
    """(Z_m, distribution of x_1 + .. + x_m under R_m), by summing over all m-tuples.

    Args:
      rows: of C; by default those on which all of its columns are whole.
    """
    patterns, weights = vectors(scheme)
    rows = scheme.iterations + len(coefficients) - 1 if rows is None else rows
    means, num = patterns @ strategy_matrix(coefficients, rows, scheme.iterations).T, len(weights)
    # All m-tuples at once: the weight of each, and its count vector.
    total_weight = np.ones((num,) * m)
    count = np.zeros((num,) * m + (scheme.iterations,))
    shapes = [tuple(num if axis == i else 1 for axis in range(m)) for i in range(m)]
    for i in range(m):
        total_weight = total_weight * weights.reshape(shapes[i])
        count = count + patterns.reshape(*shapes[i], -1)
        for j in range(i):
            pull = np.exp(means @ means.T / sigma**2)
            both = tuple(num if axis in (i, j) else 1 for axis in range(m))
            total_weight = total_weight * pull.reshape(both)
    count = count.reshape(-1, scheme.iterations)
    digits = (1 + int(count.max())) ** np.arange(scheme.iterations)  # a vector as one number: quicker to sort
    _, first, where = np.unique(count @ digits, return_index=True, return_inverse=True)
    keys = count[first]
    sums = np.bincount(where.reshape(-1), weights=total_weight.reshape(-1))
    z = float(total_weight.sum())
    return z, {tuple(int(k) for k in key): s / z for key, s in zip(keys, sums, strict=True)}


@functools.cache
def one_step_delta(sigma: float, p: float, epsilon: float, direction: str) -> float:
    """delta(epsilon) of one Poisson-sampled Gaussian step by quadrature."""

    def normal(y, mean):
        return math.exp(-((y - mean) ** 2) / 2 / sigma**2) / sigma / math.sqrt(2 * math.pi)

    def q_density(y):
        return normal(y, 0)

    def p_density(y):
        return (1 - p) * normal(y, 0) + p * normal(y, 1)

    first, second = (p_density, q_density) if direction == "remove" else (q_density, p_density)

    def integrand(y):
        return max(0.0, first(y) - math.exp(epsilon) * second(y))

    grid = np.linspace(-15 * sigma, 1 + 15 * sigma, 4001)
    return sum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-10, limit=200)[0]
        for a, b in itertools.pairwise(grid[::50])
    )


def two_step_delta(
    scheme, coefficients, sigma: float, epsilon: float, direction: str, rows: int | None = None
) -> float:
    """delta(epsilon) of a two-step mechanism with at most two bands; rows as for `count_distribution`.

    Rows beyond the second carry signal only through the second column, so a grid over all rows is summed
    with the trapezoidal rule, which converges fast for smooth decaying integrands; the kink costs accuracy
    of the order of the squared spacing.
    """
    patterns, weights = vectors(scheme)
    rows = scheme.iterations + len(coefficients) - 1 if rows is None else rows
    means = patterns @ strategy_matrix(coefficients, rows, scheme.iterations).T
    axis = np.linspace(-7 * sigma, 7 * sigma + 1.2, 260 if rows == 3 else 1200)
    spacing = (axis[1] - axis[0]) ** rows

    def along(row):
        return np.exp(-((axis - row[:, None]) ** 2) / 2 / sigma**2) / np.sqrt(2 * np.pi * sigma**2)

    # A factor for each row of C: of every pattern, and of none. P is a product of matrices, in slices.
    factors = [along(np.append(row, 0.0)) for row in means.T]
    left = functools.reduce(lambda a, b: (a[:, :, None] * b[:, None, :]).reshape(len(a), -1), factors[:-1])
    last, total = factors[-1], 0.0
    for part in np.array_split(left, 1 + left.shape[1] // 256, axis=1):
        p_density = (weights[:, None] * part[:-1]).T @ last[:-1]
        q_density = np.outer(part[-1], last[-1])
        first, second = (p_density, q_density) if direction == "remove" else (q_density, p_density)
        total += np.maximum(0, first - np.exp(epsilon) * second).sum()
    return float(total * spacing)
