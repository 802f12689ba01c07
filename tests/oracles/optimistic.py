"""Lower bounds on the delta and epsilon of composed trade-off functions: how wide are the upper ones?

The losses of a grid cell are merged into one (a post-processing, which only lowers the profile); the merged
loss is within O(h^2) of the grid point, so rounding it down to a slightly shifted grid costs little. Composed
by dp-accounting; the usual size of its FFT error is subtracted.
"""

import functools
import math

import numpy as np
from dp_accounting.pld import pld_pmf
from scipy import special

from jaxacct.accountants.tradeoff import EpsilonDelta, Gaussian, GaussianMixture, Subsampled
from jaxacct.accountants.tradeoff.curves.subsampling import amplified_epsilon

TAIL = 1e-15  # dp-accounting's truncation, per composition
_EDGE = 1e-16  # mass of one curve's losses beyond its grid, times its count
_MAX_LOSS = 300.0  # nats: larger losses count as this


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


def survival(part, epsilon):
    """Return `(Q(L > eps), P(L > eps))` of the loss `L = log dQ/dP` of a curve; infinite losses count."""
    epsilon = np.asarray(epsilon, np.float64)
    match part:
        case Gaussian(mu):
            if mu == 0:
                return 1.0 * (epsilon < 0), 1.0 * (epsilon < 0)
            return special.ndtr(mu / 2 - epsilon / mu), special.ndtr(-mu / 2 - epsilon / mu)
        case EpsilonDelta(eps, mass):
            up, down = 1 / (1 + math.exp(-eps)), 1 / (1 + math.exp(eps))
            likely, other = np.greater(eps, epsilon), np.greater(-eps, epsilon)
            q = mass + (1 - mass) * (up * likely + down * other)
            return q, (1 - mass) * (down * likely + up * other)
        case GaussianMixture(mus, weights, lost):
            pairs = [survival(Gaussian(float(mu)), epsilon) for mu in mus]
            q, p = (sum(w * pair[side] for w, pair in zip(weights, pairs, strict=True)) for side in (0, 1))
            return q + lost, p
        case Subsampled(inner, p):
            up, down = survival(inner, amplified_epsilon(np.abs(epsilon), p))
            # Beyond epsilon >= 0: Q = p Q' + (1-p) P', P = P'. Below it the two are exchanged.
            above = p * up + (1 - p) * down
            return np.where(epsilon < 0, 1 - down, above), np.where(epsilon < 0, 1 - above, down)
    raise NotImplementedError(type(part))


@functools.lru_cache(maxsize=16)
def _distribution(parts):
    """Return `(optimistic PMF, its shift, slack in delta)` on the grid of the pessimistic one."""
    count, step = sum(times for _, times in parts), _spacing(parts)
    found, shift, points = None, 0.0, 0
    for part, times in parts:
        one, bend = _optimistic(part, step, _cells_of(part, step, count), times)
        shift += times * bend
        one = one.self_compose(times, tail_mass_truncation=TAIL)
        found = one if found is None else found.compose(one, tail_mass_truncation=TAIL)
        points = max(points, one.size, found.size)
    # The usual size of the rounding errors of n-fold powers, and what is truncated.
    slack = 4 * count * 2.0**-53 * math.log2(points + 2) + 4 * len(parts) * TAIL + _EDGE
    return found, shift, slack


def _cells_of(part, step: float, count: int) -> int:
    """Return how many cells of a grid are needed on either side of 0 for one of `count` curves."""
    low, high = _support(part, _EDGE / count)
    cells = math.ceil((max(abs(low), abs(high)) + step) / step)
    return cells


def _spacing(parts) -> float:
    """Return a thirtieth of the smallest deviation of one loss, in [1e-6, 1e-3], or more for a short grid."""
    steps, span, variance = [1e3], 0.0, 0.0
    for part, times in parts:
        low, high = _support(part, 1e-16)
        grid = np.linspace(low, high, 4001)
        above = np.asarray(survival(part, grid)[0])
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


def _support(part, mass: float) -> tuple[float, float]:
    """Return losses beyond which at most `mass` of Q lies on either side, without very large ones."""
    infinite = float(survival(part, 1e6)[0])

    def beyond(eps):
        return float(survival(part, eps)[0]) - infinite > mass

    def below(eps):
        return 1 - float(survival(part, eps)[0]) > max(mass, 1e-16)

    high, low = 1e-3, -1e-3
    while high <= _MAX_LOSS and beyond(high):
        high *= 1.5
    while low >= -_MAX_LOSS and below(low):
        low *= 1.5
    return low, high


def _optimistic(part, step: float, cells: int, times: int):
    """Return a PMF of merged cells, and how far below its grid point a merged loss may lie."""
    edges = (np.arange(-cells - 1, cells + 1) + 0.5) * step
    above_q, above_p = (np.asarray(side, np.float64) for side in survival(part, edges))
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
