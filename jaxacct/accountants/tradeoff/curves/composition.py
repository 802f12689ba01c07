"""Composition of trade-off functions: closed for Gaussians, numerical through dp-accounting's PLD elsewhere.

Every curve's profile is joined by chords between the points of a grid of losses ("connect the dots", arXiv
2207.04380), which only raises it, and composed by dp-accounting. The usual size of its rounding is reserved,
which is not proven to be the largest (proofs/tradeoff.md).
"""

import functools
import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf

from jaxacct.accountants.tradeoff.curves.arrays import plain

TAIL = 1e-15  # dp-accounting's truncation, per composition; reserved
_EDGE = 1e-16  # mass of one curve's losses beyond its grid, times its count
_MAX_COUNT = 10**9
_MAX_POINTS = 1 << 23
_MAX_LOSS = 300.0  # nats: larger losses count as infinite in upper bounds, as this in lower bounds
_NEARLY_ONE = 1 - 2.0**-30
_SURELY_INFINITE = 1.5 * _MAX_LOSS  # no grid is larger: `_support` grows by this factor


def delta_bound(parts, epsilon):
    """Return an upper bound on delta at epsilon, nats of either sign, of `(curve, count)` pairs."""
    eps = np.atleast_1d(np.asarray(epsilon, np.float64))
    if counts_as_infinite(parts, _NEARLY_ONE):
        return plain(np.ones(np.shape(epsilon)))
    pmf, slack = _distribution(parts)
    size = np.abs(eps)
    over = np.minimum(_deltas(pmf, size) + slack, 1.0)
    over = np.where(eps < 0, -np.expm1(-size) + np.exp(-size) * over, over)
    return plain(over.reshape(np.shape(epsilon)))


def epsilon_bound(parts, delta: float) -> float:
    """Return an upper bound on epsilon at delta, of `(curve, count)` pairs."""
    if counts_as_infinite(parts, min(delta, _NEARLY_ONE)):
        return math.inf
    pmf, slack = _distribution(parts)
    over = pmf.get_epsilon_for_delta(delta - slack) if delta > slack else math.inf
    # One step up, for the last rounding of the inversion.
    return float(over * (1 + 1e-12))


def counts_as_infinite(parts, delta: float) -> bool:
    """Return whether losses that count as infinite have more than `delta`: epsilon is then infinite.

    It avoids a composition of seconds.
    """
    log_finite = 0.0
    for part, times in parts:
        beyond = min(1.0, float(part.survival(_SURELY_INFINITE)[0]))
        log_finite += times * math.log1p(-beyond) if beyond < 1 else -math.inf
    return -math.expm1(log_finite) > delta


def tradeoff_from_below(parts, alpha):
    """Return the largest line over a fixed set of epsilons: any set gives a lower bound on f."""
    eps = np.concatenate([-np.geomspace(60, 1e-4, 1500), [0.0], np.geomspace(1e-4, 60, 1500)])
    lines = 1 - delta_bound(parts, eps) - np.exp(eps) * np.asarray(alpha, np.float64)[..., None]
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
def _distribution(parts) -> tuple[Any, float]:
    """Return `(pessimistic PMF, slack in delta)`."""
    count = sum(times for _, times in parts)
    if count > _MAX_COUNT:
        raise ValueError(f"count must be at most {_MAX_COUNT} to be composed numerically, got {count}")
    step = _spacing(parts)
    composed: Any = None
    points = 0
    for part, times in parts:
        one = pessimistic(part, step, cells_of(part, step, count))
        points = max(points, one.size)
        one = one.self_compose(times, tail_mass_truncation=TAIL)
        composed = (
            one if composed is None else _dense(composed).compose(_dense(one), tail_mass_truncation=TAIL)
        )
        points = max(points, composed.size)
    # A product of n spectra of modulus at most 1, each with an error of a few roundings of 2^-53 per FFT
    # level.
    slack = 4 * count * 2.0**-53 * math.log2(points + 2) + 4 * len(parts) * TAIL + _EDGE
    return composed, slack


def cells_of(part, step: float, count: int) -> int:
    """Return how many cells of a grid are needed on either side of 0 for one of `count` curves."""
    low, high = _support(part, _EDGE / count)
    cells = math.ceil((max(abs(low), abs(high)) + step) / step)
    if 2 * cells + 1 > _MAX_POINTS:
        raise ValueError(f"curves must be composed with fewer than {_MAX_POINTS} losses {step:g} apart")
    return cells


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


def pessimistic(part: Any, step: float, cells: int):
    """Return a dense PMF of one curve, by chords between the losses `-cells step .. cells step`."""
    grid = np.arange(-cells, cells + 1) * step
    deltas = np.exp(np.asarray(part.log_delta(grid)))
    return _dense(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -cells, cells, deltas))
