"""Composition of trade-off functions: closed for Gaussians, numerical through dp-accounting's PLD elsewhere.

Pessimistic: every curve's profile is joined by chords between the points of a grid of losses ("connect the
dots", arXiv 2207.04380), which only raises it. Optimistic: the losses of a grid cell are merged into one (a
post-processing, which only lowers the profile); the merged loss is within O(h^2) of the grid point, so
rounding it down to a slightly shifted grid costs little. Both are composed by dp-accounting, whose FFT error
is reserved on both sides. The truth lies between the two.
"""

import functools
import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import plain

_TAIL = 1e-15  # dp-accounting's truncation, per composition; reserved
_EDGE = 1e-16  # mass of one curve's losses beyond its grid, times its count
_MAX_COUNT = 10**9
_MAX_POINTS = 1 << 23
_MAX_LOSS = 300.0  # nats: larger losses count as infinite in upper bounds, as this in lower bounds
_NEARLY_ONE = 1 - 2.0**-30
_SURELY_INFINITE = 1.5 * _MAX_LOSS  # no grid is larger: `_support` grows by this factor


def delta_bracket(parts, grid: float | None, epsilon, *, both: bool = True):
    """Return `(optimistic, pessimistic)` delta at epsilon of either sign, of `(curve, count)` pairs.

    Args:
      parts: distinct curves with their counts.
      grid: nats; spacing of the losses, chosen from the curves where it is None.
      epsilon: nats, of either sign.
      both: whether the optimistic delta is computed, too; 0 otherwise.
    """
    eps = np.atleast_1d(np.asarray(epsilon, np.float64))
    if counts_as_infinite(parts, _NEARLY_ONE):
        return plain(np.zeros(np.shape(epsilon))), plain(np.ones(np.shape(epsilon)))
    low, high, shift, slack = _distributions(parts, grid)
    size = np.abs(eps)
    over = _deltas(high, size) + slack
    under = _deltas(low, size + shift) - slack if both else 0 * size
    if (eps < 0).any() and not all(part.symmetric for part, _ in parts):
        low, high, shift, slack = _distributions(tuple((p.inverse(), k) for p, k in parts), grid)
        over = np.where(eps < 0, _deltas(high, size) + slack, over)
        under = np.where(eps < 0, _deltas(low, size + shift) - slack, under) if both else under
    over, under = np.minimum(over, 1.0), np.maximum(under, 0.0)
    flip = -np.expm1(-size)
    over = np.where(eps < 0, flip + np.exp(-size) * over, over)
    under = np.where(eps < 0, flip + np.exp(-size) * under, under)
    under = np.minimum(under, over)
    shape = np.shape(epsilon)
    return plain(under.reshape(shape)), plain(over.reshape(shape))


def epsilon_bracket(parts, grid: float | None, delta: float) -> tuple[float, float]:
    """Return `(optimistic, pessimistic)` epsilon at delta, of `(curve, count)` pairs."""
    arrays.open_share("delta", delta)
    if counts_as_infinite(parts, _NEARLY_ONE):
        return 0.0, math.inf
    low, high, shift, slack = _distributions(parts, grid)
    over = high.get_epsilon_for_delta(delta - slack) if delta > slack else math.inf
    under = max(0.0, low.get_epsilon_for_delta(delta + slack) - shift) if delta + slack < 1 else 0.0
    # One step up, for the last rounding of the inversion.
    return min(under, over), float(over * (1 + 1e-12))


def counts_as_infinite(parts, delta: float) -> bool:
    """Return whether losses that count as infinite have more than `delta`: epsilon is then infinite.

    It avoids a composition of seconds.
    """
    log_finite = 0.0
    for part, times in parts:
        beyond = min(1.0, float(part.survival(_SURELY_INFINITE)[0]))
        log_finite += times * math.log1p(-beyond) if beyond < 1 else -math.inf
    return -math.expm1(log_finite) > delta


def tradeoff_from_below(parts, grid: float | None, alpha):
    """Return the largest line over a fixed set of epsilons: any set gives a lower bound on f."""
    eps = np.concatenate([-np.geomspace(60, 1e-4, 1500), [0.0], np.geomspace(1e-4, 60, 1500)])
    delta = delta_bracket(parts, grid, eps, both=False)[1]
    lines = 1 - delta - np.exp(eps) * np.asarray(alpha, np.float64)[..., None]
    return plain(np.maximum(0.0, lines.max(axis=-1)))


def _dense(pmf):
    """Return a dense PMF: dp-accounting does not compose two kinds, and makes sparse ones of few losses."""
    return pmf if isinstance(pmf, pld_pmf.DensePLDPmf) else pmf.to_dense_pmf()


def _deltas(pmf, epsilons: np.ndarray) -> np.ndarray:
    if len(epsilons) == 1:
        return np.array([pmf.get_delta_for_epsilon(float(epsilons[0]))])
    order = np.argsort(epsilons)
    values = np.empty(len(epsilons))
    values[order] = pmf.get_delta_for_epsilon(list(epsilons[order]))
    return values


@functools.lru_cache(maxsize=16)
def _distributions(parts, grid):
    """Return `(optimistic PMF, pessimistic PMF, shift of the optimistic one, slack in delta)`."""
    count = sum(times for _, times in parts)
    if count > _MAX_COUNT:
        raise ValueError(f"count must be at most {_MAX_COUNT} to be composed numerically, got {count}")
    step = grid or _spacing(parts)
    pessimistic: Any = None
    optimistic: Any = None
    shift, points = 0.0, 0
    for part, times in parts:
        low, high = _support(part, _EDGE / count)
        size = max(abs(low), abs(high)) + step
        cells = math.ceil(size / step)
        if 2 * cells + 1 > _MAX_POINTS:
            raise ValueError(f"grid must be coarser: {2 * cells + 1} points at {step:g} exceed {_MAX_POINTS}")
        up = _dense(_pessimistic(part, step, cells))
        down, bend = _optimistic(part, step, cells, times)
        shift += times * bend
        points = max(points, up.size)
        up = up.self_compose(times, tail_mass_truncation=_TAIL)
        down = down.self_compose(times, tail_mass_truncation=_TAIL)
        pessimistic = (
            up if pessimistic is None else _dense(pessimistic).compose(_dense(up), tail_mass_truncation=_TAIL)
        )
        optimistic = down if optimistic is None else optimistic.compose(down, tail_mass_truncation=_TAIL)
        points = max(points, pessimistic.size)
    # A product of n spectra of modulus at most 1, each with an error of a few roundings of 2^-53 per FFT
    # level.
    slack = 4 * count * 2.0**-53 * math.log2(points + 2) + 4 * len(parts) * _TAIL + _EDGE
    return optimistic, pessimistic, shift, slack


def _spacing(parts) -> float:
    """Return a thirtieth of the smallest deviation of one loss, in [1e-6, 1e-3], or more for a short grid."""
    steps, span, variance = [1e3], 0.0, 0.0
    for part, times in parts:
        low, high = _support(part, 1e-16)
        grid = np.linspace(low, high, 4001)
        above = np.asarray(part.survival(grid)[0])
        mass = -np.diff(above)
        middle = (grid[1:] + grid[:-1]) / 2
        mean = (mass * middle).sum()
        deviation = math.sqrt(max(0.0, (mass * (middle - mean) ** 2).sum()))
        if deviation > (high - low) / 4000:  # a loss that does not vary is a point of any grid
            steps.append(max(deviation, 1e-6) / 30)
            variance += times * deviation**2
        span = max(span, high - low, times * abs(mean) + 16 * deviation * math.sqrt(times))
    # Where the total varies by many nats, a part of that is fine enough.
    finest = 1e-4 if max(times for _, times in parts) > 100 else 1e-3
    step = max(min(*steps, max(finest, math.sqrt(variance) / (1 << 15))), 1e-6)
    return max(step, span / (1 << 21))


def _support(part: Any, mass: float) -> tuple[float, float]:
    """Return losses beyond which at most `mass` of Q lies on either side, without very large ones."""
    infinite = float(part.survival(1e6)[0])

    def beyond(eps):
        return float(part.survival(eps)[0]) - infinite > mass

    def below(eps):
        return 1 - float(part.survival(eps)[0]) > max(mass, 1e-16)

    high, low = 1e-3, -1e-3
    while high <= _MAX_LOSS and beyond(high):
        high *= 1.5
    while low >= -_MAX_LOSS and below(low):
        low *= 1.5
    return low, high


def _pessimistic(part: Any, step: float, cells: int):
    grid = np.arange(-cells, cells + 1) * step
    deltas = np.exp(np.asarray(part.log_delta(grid)))
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -cells, cells, deltas)


def _optimistic(part: Any, step: float, cells: int, times: int):
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
