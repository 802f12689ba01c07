"""Composition of trade-off functions without a closed form, by `statistics.composed_losses`: upper bounds.

Every profile is replaced by its chords in `e^epsilon` between the points of a grid of losses, which only
raises it; all errors of the composition are in its bound (proofs/tradeoff.md, proofs/composed_losses.md).
"""

import functools

import numpy as np

from jaxacct.accountants.tradeoff.curves.arrays import plain
from jaxacct.statistics import roots
from jaxacct.statistics.composed_losses import Part, divergence_bound, divergence_table, min_epsilon
from jaxacct.statistics.loss_curves import LossCurve, dominating_curves

_MAX_COUNT = 10**9
_MAX_LOSS = 650.0  # nats: larger losses of one step count as infinite
_MAX_EPSILON = 1e6  # of a composition
_RAISED = 1e-11  # of a profile: more than its relative error (proofs/tradeoff.md)
_SMALLEST = -690.0  # ln of the smallest delta of a profile, so that none underflows
_POINTS, _NEAREST = 6000, 1e-9  # of a grid of losses, and its first over its last


def delta_bound(parts, epsilon):
    """Return an upper bound on delta at epsilon, nats of either sign, of `(curve, count)` pairs."""
    eps, steps = np.asarray(epsilon, np.float64), _steps(parts)
    size = np.abs(eps)
    points = np.unique(size)
    if points.size == 1:
        found = np.array([divergence_bound(steps, float(points[0]))])
    else:
        found = divergence_table(steps, points)
    over = found[np.searchsorted(points, size)]
    return plain(np.where(eps < 0, -np.expm1(-size) + np.exp(-size) * over, over))


def epsilon_bound(parts, delta: float) -> float:
    """Return an upper bound on epsilon at delta, of `(curve, count)` pairs; infinity where none is found."""
    steps = _steps(parts)
    return min_epsilon(lambda epsilon: divergence_bound(steps, epsilon), delta, _MAX_EPSILON)


def tradeoff_from_below(parts, alpha):
    """Return the largest line over a fixed set of epsilons: any set gives a lower bound on f."""
    eps = np.concatenate([-np.geomspace(60, 1e-4, 1500), [0.0], np.geomspace(1e-4, 60, 1500)])
    lines = 1 - delta_bound(parts, eps) - np.exp(eps) * np.asarray(alpha, np.float64)[..., None]
    return plain(np.maximum(0.0, lines.max(axis=-1)))


@functools.lru_cache(maxsize=16)
def _steps(parts) -> list[Part]:
    count = sum(times for _, times in parts)
    if count > _MAX_COUNT:
        raise ValueError(f"count must be at most {_MAX_COUNT} to be composed numerically, got {count}")
    return [Part(part.loss_curve(), times) for part, times in parts]


def chords(log_delta, corners=()) -> LossCurve:
    """Return losses whose profile is at least a symmetric one: its chords, also at `corners`, rounded up."""
    _, reach = roots.bisect(
        lambda loss: log_delta(loss) <= max(_SMALLEST, log_delta(_MAX_LOSS) + 1e-6),
        1e-12,
        _MAX_LOSS,
        relative=1e-3,
    )
    losses = np.union1d(np.geomspace(_NEAREST * reach, reach, _POINTS), [0.0, *corners])
    deltas = np.exp(np.maximum(log_delta(losses), _SMALLEST)) * (1 + _RAISED)
    return dominating_curves((losses, deltas), (losses, deltas))[0]
