"""Largest `||C x||^2` over the participation patterns of fixed-order batches (proofs/fixed_order.md).

The gradients are vectors of norm at most 1 that an adversary chooses. No entry of C is negative, so they move
the outputs most where all point the same way, and x is then a vector of zeros and ones.
"""

import functools
from typing import NamedTuple

import numpy as np

from jaxacct.strategies.base import Strategy

MAX_ROWS = 2048  # size of a Gram matrix that is made; of longer runs pairs of participations are bounded
MAX_PRODUCTS = 4e8  # products of the dynamic program, about two seconds of one core
_MAX_OVERLAP_PRODUCTS = 2e8  # a second of one core
_UNIT = 2.0**-52


class Patterns(NamedTuple):
    """Participation patterns: at most `participations` steps, any two `min_separation` steps apart or more.

    With `steps_per_epoch` e, at most one at steps 0 .. e - 1, at most one at e .. 2 e - 1, and so on.
    """

    iterations: int
    min_separation: int
    participations: int
    steps_per_epoch: int | None = None

    @property
    def max_participations(self) -> int:
        """Upper bound on the number of participations for which there is room in n steps."""
        n, epoch = self.iterations, self.steps_per_epoch or 1
        return min(self.participations, -(-n // self.min_separation), -(-n // epoch))

    def latest(self, steps: np.ndarray, number: int) -> np.ndarray:
        """Return the latest step of the `number`-th participation before one at `steps`; below 0 is none."""
        latest = steps - number * self.min_separation
        if self.steps_per_epoch is not None:
            e = self.steps_per_epoch
            latest = np.minimum(latest, (steps // e - number + 1) * e - 1)
        return latest

    def min_gap(self, number: int) -> int:
        """Return the smallest distance between a participation and the `number`-th one after it."""
        gap = number * self.min_separation
        return gap if self.steps_per_epoch is None else max(gap, (number - 1) * self.steps_per_epoch + 1)


@functools.lru_cache(maxsize=64)
def squared_sensitivity(strategy: Strategy, patterns: Patterns) -> float:
    """Return an upper bound on the largest `||C x||^2` of the n x n matrix.

    It is attained but for rounding where columns do not overlap, and for a Toeplitz C whose first column
    never rises where epochs do not matter.

    Source: proofs/fixed_order.md, sections 2 and 3.
    """
    n, k = patterns.iterations, patterns.max_participations
    if strategy.bands <= patterns.min_separation:
        upper = _dynamic_program(np.zeros((n, 0)), strategy.square_norms(n), patterns)
    elif n <= MAX_ROWS and k * n * n <= MAX_PRODUCTS:
        columns = strategy.columns(n, np.arange(n))
        gram = columns.T @ columns
        upper = _dynamic_program(gram, np.diag(gram), patterns)
    else:
        upper = _by_pairs(strategy, patterns)
    # All terms of all sums are nonnegative: relative errors add up.
    return upper * (1 + 4 * (n + k * k + 16) * _UNIT)


def _dynamic_program(gram: np.ndarray, norms: np.ndarray, p: Patterns) -> float:
    """Return the bound.

    F_m(i) bounds the square of the first m + 1 participations where the last of them is at i. What the last
    shares with the one before it is exact; with earlier ones it is the largest that their places allow.
    `gram` is `C^T C`, (n, 0) where no columns overlap, `norms` its diagonal.
    """
    n = norms.size
    steps = np.arange(n)
    before = p.latest(steps, 1)
    shared = 2 * gram if gram.size else np.zeros((1, n))
    allowed = np.where(np.arange(n)[None] <= before[:, None], shared, -np.inf) if gram.size else None
    farther = np.maximum.accumulate(gram, axis=1) if gram.size else gram
    best, own, top = norms, norms, float(norms.max())
    for m in range(1, p.max_participations):
        if gram.size and m > 1:
            place = p.latest(steps, m)
            own = own + np.where(place >= 0, 2 * farther[steps, np.maximum(place, 0)], 0.0)
        if allowed is None:
            reached = np.where(before >= 0, np.maximum.accumulate(best)[np.maximum(before, 0)], -np.inf)
        else:
            reached = (allowed + best[None]).max(axis=1)
        best = own + reached
        top = max(top, float(best.max()))
    return top


def _by_pairs(strategy: Strategy, p: Patterns) -> float:
    """Return the bound in which every pair of participations shares as much as its distance allows."""
    n, b, k = p.iterations, p.min_separation, p.max_participations
    if p.steps_per_epoch is None or not strategy.is_toeplitz:
        return strategy.squared_sensitivity(n, b, k)
    farther = np.append(strategy.farther_products(n), 0.0)
    two = p.min_gap(2)  # from a participation to the next but one
    gaps = np.arange(b, max(two, b) + 1)
    both = farther[np.minimum(gaps, n)] + farther[np.clip(two - gaps, b, n)]
    neighbours = (k - 1) // 2 * float(both.max()) + (k - 1) % 2 * float(farther[min(b, n)])
    others = sum((k - d) * float(farther[min(p.min_gap(d), n)]) for d in range(2, k))
    return k + 2 * (neighbours + others)


@functools.lru_cache(maxsize=64)
def overlapping_sensitivity(
    strategy: Strategy, iterations: int, min_separation: int, participations: int
) -> float | None:
    """Return an upper bound on `||C x||^2` of a Toeplitz matrix for separated participations at any steps.

    The fallback of proofs/non_banded.md, for columns that overlap.

    The columns j - d and j overlap by `g(j, d) = sum_{t < n - j} c_t c_{t+d}`. The m-th participation is at
    step m b or later and at least (m - l) b steps after the l-th, so the two overlap by at most the largest
    `g(m b, d)` with `d >= (m - l) b`. Where c is non-increasing that is the first of them, and the sum is met
    by participations at 0, b, 2 b, .. (as in theorem 2 of arXiv 2405.13763). None where it would take too
    long.
    """
    n, b = iterations, min_separation
    c = strategy.columns(n, np.zeros(1, np.int64))[:, 0]
    rises = bool((np.diff(c) > 0).any())
    k = min(participations, -(-n // b))
    if (n if rises else k) * n > _MAX_OVERLAP_PRODUCTS and k > 1:
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
