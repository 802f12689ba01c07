"""Shifted interpolation with the best shifts: a taut string (arXiv 2403.00278, theorem C.3).

Two runs of `X_k = Proj(phi_k(X_{k-1}) + Z_k)` whose maps are c_k-Lipschitz and at most s_k apart satisfy
`T(X_t, X'_t) >= G(sqrt(sum (a_k / z_k)^2))` for all shifts a_k >= 0 whose gaps stay at least 0 and end at
0. With `w_k = prod_{i>k} c_i` the scaled sum of shifts is a path that must stay below the scaled sum of
sensitivities and meet it at the end; the smallest energy is that of the taut string below these points, their
lower convex hull (proofs/shifted_interpolation.md).
"""

import math
from typing import NamedTuple

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays

MAX_STEPS = 100_000


class Shifts(NamedTuple):
    """Best shifts and their bound.

    Attributes:
      mu: mu of the run, which is mu-GDP.
      shifts: a_k, k = 1..t.
      gaps: z_k, k = 0..t, from the initial gap down to 0.
      lambdas: lambda_k = a_k / (a_k + z_k), 0 where both are 0; the last one is 1 (or there was no gap).
    """

    mu: float
    shifts: np.ndarray
    gaps: np.ndarray
    lambdas: np.ndarray


def shifted_interpolation_gdp(contractions, sensitivities, noise_stds, initial_gap: float = 0.0) -> Shifts:
    """Return the smallest mu of shifted interpolation, for maps that may vary from step to step.

    Args:
      contractions: (t,) Lipschitz constants c_k, in [1e-30, 1e30]; t at most 100,000.
      sensitivities: (t,) largest distances s_k between the two maps of a step, 0 or in
        [1e-30, 1e30]; or one number.
      noise_stds: (t,) deviations of the noise per coordinate, in [1e-30, 1e30]; or one number.
      initial_gap: largest distance of the two runs before the first step, 0 or in [1e-30, 1e30].
    """
    c = np.atleast_1d(np.asarray(contractions, np.float64))
    t = len(c)
    if c.ndim != 1 or not 1 <= t <= MAX_STEPS:
        raise ValueError(f"contractions must be 1 to {MAX_STEPS} numbers, got shape {c.shape}")
    s = np.broadcast_to(np.asarray(sensitivities, np.float64), (t,))
    noise = np.broadcast_to(np.asarray(noise_stds, np.float64), (t,))
    arrays.scale("contractions", c)
    arrays.scale("sensitivities", s, zero=True)
    arrays.scale("noise_stds", noise)
    arrays.scale("initial_gap", initial_gap, zero=True)
    # ln w_k, k = 1..t. Weights may span any range, so all numbers stay in logarithms, and are sums of
    # positive terms: no digits are lost.
    log_w = np.append(np.cumsum(np.log(c[:0:-1]))[::-1], 0.0)
    log_x = 2 * (log_w + np.log(noise))
    with np.errstate(divide="ignore"):
        log_y = log_w + np.log(s)
        # The path starts at 0, so the bound of the first step includes the initial gap.
        log_y[0] = np.logaddexp(log_y[0], log_w[0] + math.log(c[0]) + np.log(float(initial_gap)))
    blocks = _blocks(log_x.tolist(), log_y.tolist())
    log_energy = [2 * y - x for _, x, y in blocks if y > -math.inf]
    # Roundings of the logarithms, towards a larger mu.
    largest = float(max(np.abs(log_w).max(), np.abs(log_x).max()))
    mu = math.sqrt(math.fsum(map(math.exp, log_energy))) * (1 + 2.0**-51 * (t + largest))
    shifts, gaps = np.zeros(t), np.zeros(t + 1)
    gaps[0] = initial_gap
    for (first, x, y), (end, _, _) in zip(blocks, [*blocks[1:], (t, 0.0, 0.0)], strict=True):
        own = slice(first, end)
        shifts[own] = np.exp(np.minimum(y - x + log_x[own] - log_w[own], 700.0))
        # Gaps end at 0 with each block: from its start where weights increase, from its end where they
        # decrease.
        if log_w[first] <= log_w[end - 1]:
            for k in range(first, end - 1):
                gaps[k + 1] = max(0.0, c[k] * gaps[k] + s[k] - shifts[k])
        else:
            for k in range(end - 1, first, -1):
                gaps[k] = max(0.0, (gaps[k + 1] + shifts[k] - s[k]) / c[k])
    total = shifts + gaps[1:]
    lambdas = np.divide(shifts, total, out=np.zeros(t), where=total > 0)
    return Shifts(mu, shifts, gaps, lambdas)


def _blocks(log_x: list[float], log_y: list[float]) -> list[tuple[int, float, float]]:
    """Return (first step, ln of its length, ln of its rise) of every edge of the lower convex hull.

    The hull of a path is the isotonic regression of its slopes: a neighbour that is not steeper is merged.
    """
    blocks: list[tuple[int, float, float]] = []
    for k, (x, y) in enumerate(zip(log_x, log_y, strict=True)):
        first = k
        while blocks and blocks[-1][2] - blocks[-1][1] >= y - x:
            first, longer, higher = blocks.pop()
            x, y = float(np.logaddexp(longer, x)), float(np.logaddexp(higher, y))
        blocks.append((first, x, y))
    return blocks
