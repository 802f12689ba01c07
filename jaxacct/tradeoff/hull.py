"""Shifted interpolation with the best shifts: a taut string (arXiv 2403.00278, theorem C.3).

Two runs of `X_k = Proj(phi_k(X_{k-1}) + Z_k)` whose maps are c_k-Lipschitz and at most s_k apart satisfy
`T(X_t, X'_t) >= G(sqrt(sum (a_k / z_k)^2))` for all shifts a_k >= 0 whose gaps stay at least 0 and end at
0. With `w_k = prod_{i>k} c_i` the scaled sum of shifts is a path that must stay below the scaled sum of
sensitivities and meet it at the end; the least energy is that of the taut string below these points, their
lower convex hull (proofs/shifted_interpolation.md).
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxacct.tradeoff import _arrays as arrays


class Shifts(NamedTuple):
    """The best shifts and their bound."""

    mu: float
    """The run is mu-GDP."""
    shifts: np.ndarray
    """a_k, k = 1..t."""
    gaps: np.ndarray
    """z_k, k = 0..t, from the initial gap down to 0."""
    lambdas: np.ndarray
    """lambda_k = a_k / (a_k + z_k), 0 where both are 0; the last one is 1 (or there was no gap)."""


def shifted_interpolation_gdp(contractions, sensitivities, noise_stds, initial_gap: float = 0.0) -> Shifts:
    """The least mu that shifted interpolation gives, for maps that may change from step to step.

    Args:
      contractions: (t,) Lipschitz constants c_k, above 0.
      sensitivities: (t,) largest distances s_k between the two maps of a step, at least 0.
      noise_stds: (t,) deviations of the noise per coordinate, above 0; or one number.
      initial_gap: largest distance of the two runs before the first step.
    """
    c = np.atleast_1d(np.asarray(contractions, np.float64))
    t = len(c)
    s = np.broadcast_to(np.asarray(sensitivities, np.float64), (t,))
    noise = np.broadcast_to(np.asarray(noise_stds, np.float64), (t,))
    arrays.check("contractions", c, "finite and above 0", lambda x: np.isfinite(x) & (x > 0))
    arrays.check("sensitivities", s, "finite and at least 0", lambda x: np.isfinite(x) & (x >= 0))
    arrays.check("noise_stds", noise, "finite and above 0", lambda x: np.isfinite(x) & (x > 0))
    arrays.check("initial_gap", initial_gap, "finite and at least 0", lambda x: np.isfinite(x) & (x >= 0))
    # log w_k = sum of log c_i over i > k; k = 0..t.
    log_w = np.concatenate([np.cumsum(np.log(c)[::-1])[::-1], [0.0]])
    if log_w.max() - log_w.min() > 600:
        # Steps so long ago that their weight underflows are merged into the start: their gap, carried on.
        return _late(c, s, noise, float(initial_gap))
    w = np.exp(log_w)
    x = np.concatenate([[0.0], np.cumsum((w[1:] * noise) ** 2)])
    height = w[0] * initial_gap + np.concatenate([[0.0], np.cumsum(w[1:] * s)])
    height[0] = 0.0  # the path starts at 0: nothing has been shifted
    hull = [0]
    for k in range(1, t + 1):
        while len(hull) > 1 and _above(x, height, hull[-2], hull[-1], k):
            hull.pop()
        hull.append(k)
    path = np.interp(x, x[hull], height[hull])
    energy = sum((height[j] - height[i]) ** 2 / (x[j] - x[i]) for i, j in itertools.pairwise(hull))
    shifts = np.diff(path) / w[1:]
    gaps = np.maximum(0.0, np.concatenate([[w[0] * initial_gap], (height - path)[1:]]) / w)
    total = shifts + gaps[1:]
    lambdas = np.divide(shifts, total, out=np.zeros(t), where=total > 0)
    return Shifts(math.sqrt(energy), shifts, gaps, lambdas)


def _above(x, y, a, b, c) -> bool:
    """Whether point b lies on or above the line from a to c, so that the lower hull does without it."""
    return (y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a])


def _late(c, s, noise, gap: float) -> Shifts:
    """A valid bound that starts after the steps whose weight underflows: no shift before, the whole gap
    carried."""
    drops = np.cumsum(np.log(c)[::-1])[::-1]
    start = int(np.flatnonzero(np.abs(drops - 0.0) <= 500)[0]) if (np.abs(drops) <= 500).any() else len(c) - 1
    for k in range(start):
        gap = c[k] * gap + s[k]
    found = shifted_interpolation_gdp(c[start:], s[start:], noise[start:], gap)
    gaps = [0.0]
    for k in range(start):
        gaps.append(c[k] * gaps[-1] + s[k])
    gaps = np.concatenate([gaps[:-1], found.gaps])
    zeros = np.zeros(start)
    return Shifts(
        found.mu, np.concatenate([zeros, found.shifts]), gaps, np.concatenate([zeros, found.lambdas])
    )
