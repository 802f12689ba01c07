"""Sensitivity of a Toeplitz matrix whose columns overlap (proofs/non_banded.md, "Fallback")."""

import functools

import numpy as np

_MAX_PRODUCTS = 2e8  # a second of one core


@functools.lru_cache(maxsize=64)
def squared_sensitivity(
    first_column: bytes, iterations: int, min_separation: int, participations: int
) -> float | None:
    """Return an upper bound on `||C x||^2` for every x of 0 and 1 with so many separated participations.

    The columns j - d and j overlap by `g(j, d) = sum_{t < n - j} c_t c_{t+d}`. The m-th participation is at
    step m b or later and at least (m - l) b steps after the l-th, so the two overlap by at most the largest
    `g(m b, d)` with `d >= (m - l) b`. Where c is non-increasing that is the first of them, and the sum is met
    by participations at 0, b, 2 b, .. (as in theorem 2 of arXiv 2405.13763). None where it would take too
    long. `first_column` are the bytes of its float64 numbers.
    """
    n, b = iterations, min_separation
    c = np.zeros(n)
    given = np.frombuffer(first_column)[:n]
    c[: given.size] = given
    rises = bool((np.diff(c) > 0).any())
    k = min(participations, -(-n // b))
    if (n if rises else k) * n > _MAX_PRODUCTS and k > 1:
        return None
    ends = n - b * np.arange(k)  # rows of the column of participation m at its earliest
    total = float(np.cumsum(c * c)[ends - 1].sum())
    shared = np.zeros(k)  # largest overlap of the m-th participation with the one at this distance, so far
    lags = range(n - 1, b - 1, -1) if rises else range((k - 1) * b, 0, -b)
    for d in lags if k > 1 else ():
        sums = np.cumsum(c[: n - d] * c[d:])
        shared = np.maximum(shared, sums[np.minimum(ends, n - d) - 1])
        if d % b == 0 and d // b < k:
            total += 2 * float(shared[d // b :].sum())
    # No number is negative, so relative errors of the sums add up: n in a row of them, 2 k of rows.
    return total * (1 + 4 * (n + 2 * k) * np.finfo(np.float64).eps)
