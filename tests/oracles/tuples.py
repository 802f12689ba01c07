"""Enumeration over tuples of participation vectors, and exact deltas, in float64 NumPy; no kernel of ours."""

import math

import numpy as np
from scipy import stats

from tests.oracles.enumeration import arrays, strategy_matrix, vectors


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


def divergence(p, q, sigma: float, epsilon, direction: str = "remove", *, dense=None, points: int = 1200):
    """Return H(p, q) at e^epsilon, or H(q, p) in the add direction, of mixtures of normals, on a grid.

    By the rectangle rule along each axis, which converges fast but for the kink: its error is of the order
    of the squared spacing.

    Args:
      p: {mean: probability} or (means, probabilities), as q; standard deviations are all `sigma`.
      epsilon: a number, or an array.
      dense: (rows, n): means are `dense @ mean`.
      points: of each axis.
    """
    parts = [part if isinstance(part, tuple) else arrays(part) for part in (p, q)]
    means = np.concatenate([np.reshape(part, (len(weights), -1)) for part, weights in parts])
    means = means if dense is None else means @ dense.T
    axis, spacing = np.linspace(means.min() - 8 * sigma, means.max() + 8 * sigma, points, retstep=True)
    *others, last = (stats.norm.pdf(axis, row[:, None], sigma) * spacing for row in means.T)
    # A density is a product of matrices, here in slices: all axes but the last one by the last one.
    left = np.ones((len(means), 1))
    for factor in others:
        left = (left[:, :, None] * factor[:, None, :]).reshape(len(means), -1)
    sides = slice(None, len(parts[0][1])), slice(len(parts[0][1]), None)
    total = np.zeros(np.size(epsilon))
    for part in np.array_split(left, 1 + left.shape[1] // 256, axis=1):
        masses = [(w[:, None] * part[at]).T @ last[at] for (_, w), at in zip(parts, sides, strict=True)]
        first, second = masses if direction == "remove" else masses[::-1]
        total += [np.maximum(0, first - math.exp(e) * second).sum() for e in np.ravel(epsilon)]
    return total.reshape(np.shape(epsilon))


def two_step_delta(
    scheme, coefficients, sigma: float, epsilon, direction: str, rows: int | None = None, points: int = 1200
):
    """delta(epsilon) of a mechanism of few steps and bands; rows as for `count_distribution`."""
    n = scheme.iterations
    rows = n + len(coefficients) - 1 if rows is None else rows
    none, dense = np.zeros((1, n)), strategy_matrix(coefficients, rows, n)
    points = points if rows == 2 else 260
    return divergence(
        vectors(scheme), (none, np.ones(1)), sigma, epsilon, direction, dense=dense, points=points
    )
