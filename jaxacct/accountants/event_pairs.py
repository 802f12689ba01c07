"""Dominating pairs of single events of dp-accounting, as curves of chords (proofs/events.md).

Events are known by the names of their classes, as releases of dp-accounting have different ones. Every pair
is for neighbours of which one lacks a record (zero-out or add-or-remove-one), as the event is stated for
them.
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.statistics.loss_curves import ChordCurve, dominating_curves
from jaxacct.statistics.tilted_sums import UNIT

Curves: TypeAlias = tuple[ChordCurve, ChordCurve]  # of the remove and the add direction
_MAX_LOSS = 500.0  # nats: its exponential is finite
_TINY_LOSS = 1e-12  # smaller ones are rounded up to it
_POINTS, _MAX_CORNERS = 801, 6400
_MAX_SIGMA = 1e5  # of a discrete Gaussian that is summed
REVEALED = ChordCurve(np.array([0.0]), np.array([1.0]))  # curve of a step that may reveal everything


def steps_of(event, count: int) -> list[tuple[Curves, int]]:
    """Return (curves, times) of an event of one of `_READERS` that occurs `count` times.

    Raises:
      ValueError: another event, or impossible numbers.
    """
    kind = type(event).__name__
    if kind not in _READERS:
        raise ValueError(_REASONS.get(kind, "no dominating pair of such an event is known here"))
    found = _READERS[kind](event)
    if isinstance(found, _Concentrated):  # the sum has the sums of both numbers
        found, count = zero_concentrated(count * found.rho, count * found.xi), 1
    return [] if found is None else [(found, count)]


class _Concentrated(NamedTuple):
    """Numbers of `zero_concentrated`."""

    rho: float
    xi: float


def pure(epsilon: float, delta: float = 0.0) -> Curves:
    """Return the pair that dominates every mechanism with `(epsilon, delta)`-DP."""
    if epsilon > _MAX_LOSS or delta >= 1:
        return REVEALED, REVEALED
    return _symmetric([0.0, max(_TINY_LOSS, epsilon * (1 + 4 * UNIT))], [1.0, delta])


def zero_concentrated(rho: float, xi: float = 0.0) -> Curves:
    """Return a pair above every mechanism with Renyi divergences of at most `xi + rho a`, a > 1."""
    if rho == 0:  # no Renyi divergence is above xi, so no loss
        return pure(xi)
    rho = max(rho, 1e-18)
    end = xi + rho + 2 * math.sqrt(700 * rho)  # where delta is about e^-700
    x = np.linspace(0.0, min(_MAX_LOSS, end), _POINTS)
    order = 1 + 1e-6 + np.maximum((x - xi) / (2 * rho) - 0.5, 0.0)  # any order above 1 gives a bound
    log_delta = (order - 1) * (xi + rho * order - x + np.log1p(-1 / order)) - np.log(order)
    rounding = 32 * UNIT * (order * (xi + rho * order + x + 1) + 1)
    return _symmetric(x, np.exp(np.minimum(0.0, log_delta + rounding)))


def discrete_gaussian(sigma: float, sensitivity: float) -> Curves:
    """Return the pair of `e^{-(y - shift)^2 / 2 sigma^2}` and `e^{-y^2 / 2 sigma^2}` over integers y."""
    shift = math.floor(sensitivity)
    if max(sigma, shift) > _MAX_SIGMA:
        return zero_concentrated((shift / sigma) ** 2 / 2)
    end = math.ceil(38 * sigma) + shift + 2
    y = np.arange(-end, end + shift + 1)
    beyond_p, beyond_q = (_tails(np.exp(-0.5 * ((y - at) / sigma) ** 2)) for at in (shift, 0))
    losses = (2 * y - shift) * (shift / (2 * sigma**2))
    before = int(np.searchsorted(2 * y, shift, side="right")) - 1  # the last loss of at most 0
    last = int(np.searchsorted(losses, _MAX_LOSS, side="right")) - 1
    # Where Q underflows, P beyond the last loss bounds the rest.
    last = min(last, before + int(np.count_nonzero(beyond_q[before:] > 1e-290)))
    x = np.append(0.0, losses[before + 1 : last + 1])
    # H falls by the Q-mass of larger losses, for each unit of e^x.
    gaps = np.full(x.size - 1, shift / sigma**2)
    gaps[:1] = x[1:2]
    falls = np.exp(x[:-1]) * np.expm1(gaps) * beyond_q[before:last]
    heights = np.cumsum(np.append(falls, beyond_p[last])[::-1])[::-1]
    raised = heights * (1 + 16 * (y.size + 1000) * UNIT) + 1e-290
    kept = np.union1d(np.arange(0, x.size, -(-x.size // _MAX_CORNERS)), x.size - 1)
    return _symmetric(x[kept] * (1 + 8 * UNIT), raised[kept])


def _tails(weights: np.ndarray) -> np.ndarray:
    """Return the share of the later weights, for each."""
    sums = np.cumsum(weights[::-1])[::-1]
    return np.append(sums[1:], 0.0) / sums[0]


def laplace(scale: float) -> Curves:
    """Return the pair of Laplace(0, scale) and Laplace(1, scale)."""
    largest = 1 / scale
    x = np.linspace(-largest, largest, _MAX_CORNERS)
    heights = -np.expm1((x - largest) / 2) * (1 + 16 * UNIT)
    return (ChordCurve(x + 8 * UNIT * largest, np.minimum(heights, 1.0)),) * 2


def discrete_laplace(a: float, shift: int) -> Curves:
    """Return the pair of `e^{-a |y|}` and `e^{-a |y - shift|}` over integers y."""
    steps = np.arange(-shift, shift + 1, 2 * (1 + shift // _MAX_CORNERS))
    steps = np.union1d(steps, shift)
    share = 1 / (1 + math.exp(-a))
    # P(loss > x) and e^x Q(loss > x), x = a steps: y is below (shift - steps) / 2.
    last = np.ceil((shift - steps) / 2) - 1
    tails, others = 1 - share * np.exp(-a * (last + 1)), share * np.exp(-a * (shift - last - steps))
    heights = np.maximum(tails - others, 0.0) + 64 * (1 + a * shift) * UNIT
    heights = np.where(steps < shift, np.minimum(heights, 1.0), 0.0)
    return (ChordCurve(a * steps + 8 * UNIT * a * shift, heights),) * 2


def bounded_range(epsilon: float) -> Curves:
    """Return the pair above every mechanism whose losses lie in an interval of length `epsilon`."""
    if not 1e-9 < epsilon <= _MAX_LOSS:
        return pure(epsilon)
    x = np.linspace(0.0, epsilon, _POINTS)
    heights = np.exp(x) * np.expm1((epsilon - x) / 2) ** 2 / math.expm1(epsilon)
    return _symmetric(x * (1 + 4 * UNIT), heights * (1 + 64 * (1 + epsilon) * UNIT))


def randomized_response(noise: float, buckets: int) -> Curves:
    """Return the pair of two answers; another answer stays the same one with probability 1 - noise."""
    largest = math.log1p((1 - noise) * buckets / noise)
    if largest > _MAX_LOSS:
        return REVEALED, REVEALED
    return _symmetric([0.0, max(_TINY_LOSS, largest * (1 + 8 * UNIT))], [1 - noise, 0.0])


def _symmetric(epsilons, bounds) -> Curves:
    one = np.asarray(epsilons, np.float64), np.asarray(bounds, np.float64)
    return (dominating_curves(one, one)[0],) * 2


# -- Fields of events, checked ----------------------------------------------------------------------------


def _epsilon_delta(event) -> Curves:
    epsilon = _validate.nonnegative_number("epsilon", event.epsilon)
    delta = _validate.nonnegative_number("delta", event.delta)
    if delta > 1:
        raise ValueError(f"delta must be in [0, 1], got {event.delta!r}")
    return pure(epsilon, delta)


def _discrete_gaussian(event) -> Curves | _Concentrated | None:
    sigma = _validate.nonnegative_number("sigma", event.sigma)
    sensitivity = _validate.nonnegative_number("sensitivity", event.sensitivity)
    if sigma == 0:
        return REVEALED, REVEALED
    if event.dimension == 1:
        return discrete_gaussian(sigma, sensitivity) if sensitivity >= 1 else None
    return _Concentrated((sensitivity / sigma) ** 2 / 2, 0.0)


def _randomized_response(event) -> Curves | None:
    noise = _validate.nonnegative_number("noise_parameter", event.noise_parameter)
    buckets = _validate.positive_integer("num_buckets", event.num_buckets)
    if noise > 1:
        raise ValueError(f"noise_parameter must be in [0, 1], got {noise!r}")
    if buckets == 1 or noise == 1:
        return None
    return randomized_response(noise, buckets) if noise else (REVEALED, REVEALED)


_READERS = {
    "EpsilonDeltaDpEvent": _epsilon_delta,
    "ZCDpEvent": lambda event: _Concentrated(
        _validate.nonnegative_number("rho", event.rho), _validate.nonnegative_number("xi", event.xi)
    ),
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "RandomizedResponseDpEvent": _randomized_response,
    "ExponentialMechanismDpEvent": lambda event: bounded_range(
        _validate.nonnegative_number("epsilon", event.epsilon)
    ),
    "PermuteAndFlipDpEvent": lambda event: pure(_validate.nonnegative_number("epsilon", event.epsilon)),
}
_FIXED_SIZE = "samples of a fixed size depend on the other records, and only Poisson sampling has a pair here"
_REASONS = {
    "UnsupportedDpEvent": "it describes no mechanism",
    "SampledWithReplacementDpEvent": _FIXED_SIZE,
    "SampledWithoutReplacementDpEvent": _FIXED_SIZE,
}
