"""Redrawn bins (C = I): one participation an epoch, at a fresh uniform step of each epoch, without samples.

Within an epoch `f = P/Q` is the mean of independent lognormals (`lognormal_sums`). A lattice distribution
larger in convex order bounds the divergence of one epoch at a table of epsilons; the largest convex
function below these bounds is the divergence of a pair that dominates the epoch, and epochs are independent,
so that pairs compose (proofs/random_allocation.md, section 7). k uniform steps of n are bounded
by the k groups of a random partition (section 8).
"""

import functools
import math

import numpy as np

from jaxacct.accountants.allocation import lognormal_sums
from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Phases
from jaxacct.accountants.base import Accountant, why_not_identity
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.composed_losses import Part, divergence_bound
from jaxacct.statistics.loss_curves import ChordCurve

MIN_NOISE = 1 / 15
# Smallest spacing of a table's epsilons over the deviation of the loss; chords add its square / 6 to the
# variance. After `_UNIFORM` of them it grows to `_MAX_SPACING`: far tails fall as about `e^(-5 epsilon)`.
_SPACING, _UNIFORM, _GROWTH, _MAX_SPACING = 1 / 24, 480, 0.01, 0.02
_MIN_SPACING, _MAX_EPSILON = 1e-5, 60.0
_FLOOR = 1e-16  # of the divergence of an epoch, about


def _composed(epochs: tuple[tuple[int, int, int], ...], noise_multiplier: float, epsilon: float) -> float:
    """Return the bound of epochs: (their number, steps that are run, steps that are not).

    Of the remove direction: the other one is at most that (proofs/add_direction.md, theorem 1).
    """
    curves = [(epoch_curve(steps, noise_multiplier, unused), number) for number, steps, unused in epochs]
    return divergence_bound([Part(*each) for each in curves], epsilon)


class RedrawnBins(Accountant):
    """Composition of independent epochs, from above and close: nothing is certified better by samples."""

    name = "redrawn-bins"
    adjacencies = ("zero-out",)
    reveals_all_coins = False

    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        if not mechanism.scheme.independent_epochs:
            return "its epochs are not independent"
        return why_not_identity(mechanism)

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        if delta is None or compose_with is not None:
            return False
        scheme = mechanism.scheme
        floor = _FLOOR * scheme.max_participations
        if scheme.reveals_epochs and scheme.independent_epochs:
            # k of n steps: samples certify up to 3 % less noise, but take hours where pairs have no tables.
            return delta >= 2 * floor and scheme.replicas(mechanism) is None
        return delta >= 10 * floor

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        if mechanism.noise_multiplier < MIN_NOISE:
            return 1.0
        return _composed(mechanism.scheme.independent_epochs, mechanism.noise_multiplier, epsilon)


@functools.lru_cache(maxsize=4)
def epoch_curve(steps: int, noise_multiplier: float, unused: int = 0) -> ChordCurve:
    """Return the curve of the remove direction of a pair that dominates one epoch.

    The epoch has `steps` steps that are run and `unused` ones that are not.
    """
    mixture = Mixture((Phases(steps, 1 / noise_multiplier),), unused)
    deviation = math.sqrt(math.log1p(math.expm1(noise_multiplier**-2) * steps / (steps + unused) ** 2))
    spacing = max(_SPACING * deviation, _MIN_SPACING)
    growth = 1 + max(0, math.ceil(math.log(max(1.0, _MAX_SPACING / spacing)) / math.log1p(_GROWTH)))
    spacings = np.append(np.full(_UNIFORM, spacing), spacing * (1 + _GROWTH) ** np.arange(growth))
    rest = math.ceil(max(0.0, _MAX_EPSILON - spacings.sum()) / spacings[-1])
    epsilons = np.cumsum(np.concatenate([[0.0], spacings, np.full(rest, spacings[-1])]))
    # At losses below 0 a lattice may be shorter; at low noise it is finer.
    negative, cut = -epsilons[:0:-1], 1e-6 * min(1.0, deviation)
    below = lognormal_sums.divergence_table(mixture, negative, cut, 2**19 if deviation > 0.1 else 2**16)
    above = np.minimum.accumulate(lognormal_sums.divergence_table(mixture, epsilons))
    # Beyond its last decrease a table is flat: its chords would put mass at losses that do not occur.
    end = max(2, 1 + int(np.searchsorted(-above, -1.1 * above[-1])))
    bounds = np.minimum.accumulate(np.append(below, above[:end]))
    return ChordCurve.below(np.append(negative, epsilons[:end]), bounds)
