"""Lower bounds on the delta and epsilon of composed trade-off functions: how wide are the upper ones?

The losses of a grid cell are merged into one (a post-processing, which only lowers the profile); the merged
loss is within O(h^2) of the grid point, so rounding it down to a slightly shifted grid costs little. Composed
by dp-accounting, whose FFT error is subtracted.
"""

import functools

import numpy as np
from dp_accounting.pld import pld_pmf

from jaxacct.accountants.tradeoff.curves import composition
from jaxacct.accountants.tradeoff.curves.composition import TAIL


def delta_bracket(curve, epsilon):
    """Return `(optimistic, pessimistic)` delta of a `Composed` at epsilon of either sign."""
    low, shift, slack = _distribution(curve.parts)
    over, eps = np.exp(curve.log_delta(epsilon)), np.asarray(epsilon, float)
    size = np.abs(eps)
    under = np.array([low.get_delta_for_epsilon(float(one) + shift) for one in np.atleast_1d(size)]) - slack
    under = np.maximum(under.reshape(size.shape), 0.0)
    under = np.where(eps < 0, -np.expm1(-size) + np.exp(-size) * under, under)
    return np.minimum(under, over), over


def epsilon_bracket(curve, delta: float) -> tuple[float, float]:
    """Return `(optimistic, pessimistic)` epsilon of a `Composed` at delta."""
    low, shift, slack = _distribution(curve.parts)
    under = max(0.0, low.get_epsilon_for_delta(delta + slack) - shift) if delta + slack < 1 else 0.0
    over = float(curve.epsilon(delta))
    return min(under, over), over


@functools.lru_cache(maxsize=16)
def _distribution(parts):
    """Return `(optimistic PMF, its shift, slack in delta)` on the grid of the pessimistic one."""
    _, slack = composition._distribution(parts)
    count, step = sum(times for _, times in parts), composition._spacing(parts)
    found, shift = None, 0.0
    for part, times in parts:
        one, bend = _optimistic(part, step, composition.cells_of(part, step, count), times)
        shift += times * bend
        one = one.self_compose(times, tail_mass_truncation=TAIL)
        found = one if found is None else found.compose(one, tail_mass_truncation=TAIL)
    return found, shift, slack


def _optimistic(part, step: float, cells: int, times: int):
    """Return a PMF of merged cells, and how far below its grid point a merged loss may lie."""
    edges = (np.arange(-cells - 1, cells + 1) + 0.5) * step
    above_q, above_p = (np.asarray(side, np.float64) for side in part.survival(edges))
    q, p = -np.diff(above_q), -np.diff(above_p)
    points = np.arange(-cells, cells + 1) * step
    # Differences of tails lose digits; their error lowers the merged loss.
    good = (q > 0) & (p > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = 64 * 2.0**-53 * (above_q[:-1] / q + above_p[:-1] / p)
        merged = np.where(
            good & (error < 0.1), np.log(np.where(good, q / np.where(good, p, 1.0), 1.0)) - 2 * error, -np.inf
        )
    bend = np.maximum(points - merged, 0.0)
    # Shift the whole grid slightly; cells that need more move one cell down, or if that is not enough to the
    # lowest loss. All relevant cells, if that is cheap; otherwise where the two costs are similar.
    tail = bend[(above_q[:-1] > 1e-13) & (points > 0)]
    allowed = float(tail.max()) if tail.size else 0.0
    if not times * allowed < 2e-3:
        order = np.argsort(bend)
        lowered = np.cumsum(q[order][::-1])[::-1] * step
        cost = np.where(bend[order] < step / 2, bend[order] + np.append(lowered[1:], 0.0), np.inf)
        allowed = float(bend[order][int(np.argmin(cost))])
    probs = np.zeros(len(q) + 1)  # one grid point more, below
    kept = bend <= allowed
    down = ~kept & (bend <= allowed + step)
    index = np.arange(len(q)) + 1
    np.add.at(probs, index[kept], np.maximum(q[kept], 0.0))
    np.add.at(probs, index[down] - 1, np.maximum(q[down], 0.0))
    # Infinite losses, and losses above the grid, count as the highest loss of the grid.
    probs[-1] += max(0.0, float(above_q[-1]))
    probs[0] += max(0.0, 1.0 - probs.sum())
    return pld_pmf.DensePLDPmf(step, -cells - 1, probs, 0.0, False), allowed
