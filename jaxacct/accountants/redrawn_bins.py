"""Redrawn bins (C = I): one participation an epoch, at a fresh uniform step of each epoch, without samples.

Within an epoch `f = P/Q` is the mean of independent lognormals (`lognormal_sums`). A lattice distribution
larger larger in convex order bounds both divergences of one epoch at a table of epsilons; the largest convex
functions below these bounds are the divergences of a pair that dominates the epoch, and epochs are
independent, so that pairs compose (proofs/random_allocation.md, section 7).
"""

import functools
import math

import numpy as np

from jaxacct.accountants import lognormal_sums
from jaxacct.accountants.lognormal_lattice import Mixture, Phases
from jaxacct.common import validate as _validate
from jaxacct.statistics import roots
from jaxacct.statistics.composed_losses import Part, divergence_bound
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.statistics.loss_curves import ChordCurve, dominating_curves

# Spacing of a table's epsilons over the deviation of the loss; chords add its square / 6 to the variance.
_SPACING = 1 / 24
_MAX_POINTS = 3000
_LARGEST_EPSILON = 60.0


def redrawn_bins_delta(steps: int, epochs: int, noise_multiplier: float, epsilon: float) -> float:
    """Return an upper bound on delta(epsilon), both directions, every error included.

    Args:
      steps: M of an epoch, in one of which the unit participates, uniform and independent of other epochs.
      epochs: E.
      noise_multiplier: sigma, in [1/15, 1e9].
      epsilon: natural log, at least 0.

    Returns:
      The bound, in [0, 1]. It does not fall below about 1e-8 E.

    Raises:
      ValueError: bad arguments.
    """
    M, E = _validate.positive_integer("steps", steps), _validate.positive_integer("epochs", epochs)
    sigma = _validate.noise_multiplier("noise_multiplier", noise_multiplier)
    epsilon = _validate.nonnegative_number("epsilon", epsilon)
    if E == 1:
        mixture = Mixture((Phases(M, 1 / sigma),))
        return max(
            lognormal_sums.divergence_bound(mixture, epsilon, direction, 1) for direction in DIRECTIONS
        )
    if sigma < 1 / 15:
        raise ValueError(f"noise_multiplier must be at least 1/15 to be composed, was {sigma!r}")
    return max(divergence_bound([Part(curve, E)], epsilon) for curve in epoch_curves(M, sigma))


def redrawn_bins_noise_multiplier(
    steps: int, epochs: int, epsilon: float, delta: float, *, tolerance: float = 1e-3
) -> float:
    """Return the smallest noise multiplier, to a relative `tolerance`, that certifies (epsilon, delta)."""
    _validate.open_probability("delta", delta)

    def is_enough(log_sigma: float) -> bool:
        return redrawn_bins_delta(steps, epochs, math.exp(log_sigma), epsilon) <= delta

    low, high = roots.bracket(is_enough, 0.0, 0.25, lowest=-2.7, highest=20.0)
    if not math.isfinite(low + high):
        raise ValueError(f"delta must be one that a noise multiplier in [0.07, 1e8] reaches, was {delta!r}")
    return math.exp(roots.bisect(is_enough, low, high, absolute=tolerance, relative=0.0)[1])


@functools.lru_cache(maxsize=4)
def epoch_curves(steps: int, noise_multiplier: float) -> tuple[ChordCurve, ChordCurve]:
    """Return the (remove, add) curves of a pair that dominates one epoch."""
    mixture = Mixture((Phases(steps, 1 / noise_multiplier),))
    deviation = math.sqrt(math.log1p(math.expm1(noise_multiplier**-2) / steps))
    spacing = max(_SPACING * deviation, _LARGEST_EPSILON * _SPACING / _MAX_POINTS)
    most = min(spacing * _MAX_POINTS, _LARGEST_EPSILON)
    epsilons = spacing * np.arange(math.ceil(most / spacing) + 1)
    tables = {}
    for direction in DIRECTIONS:
        found = np.minimum.accumulate(lognormal_sums.divergence_table(mixture, epsilons, direction))
        # Beyond its last decrease a table is flat: its chords would put mass at losses that do not occur.
        end = max(2, 1 + int(np.searchsorted(-found, -1.1 * found[-1])))
        tables[direction] = epsilons[:end], found[:end]
    return dominating_curves(tables[Direction.REMOVE], tables[Direction.ADD])
