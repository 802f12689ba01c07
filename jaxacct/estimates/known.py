"""Estimates that need no samples: both ends by an accountant that is exact up to its grid."""

import math

import numpy as np

from jaxacct.accountants import Accountant, analytic, unamplified
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import roots
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction

_NUM_SAMPLES = 100_000
_MIN_NOISE_OF_ACCOUNTANTS = 0.05  # privacy loss distributions take minutes below this noise multiplier


def known_or_samples(
    mechanism: Mechanism, num_samples: int | None, compose_with=None
) -> tuple[Accountant | None, int]:
    """Return the accountant in place of samples, if there is one, and the number of samples."""
    if num_samples is None:
        is_quick = mechanism.noise_multiplier >= _MIN_NOISE_OF_ACCOUNTANTS
        return analytic.exact(mechanism, None, compose_with) if is_quick else None, _NUM_SAMPLES
    return analytic.close(mechanism, compose_with=compose_with), _validate.positive_integer(
        "num_samples", num_samples
    )


def known_bands(
    known: Accountant, mechanism: Mechanism, grid: np.ndarray, compose_with=None
) -> dict[Direction, np.ndarray]:
    """Return (3, points) of each direction from an accountant: both ends, and the estimate between them.

    The estimate is the upper end where the lower one is 0. Of a composed mechanism the upper end is the
    larger one of both directions, and the lower one 0.
    """
    if compose_with is None:
        ends = [known.divergences(mechanism, epsilon) for epsilon in grid.tolist()]
    else:
        uppers = [known.bound_at(mechanism, epsilon, compose_with) for epsilon in grid.tolist()]
        ends = [dict.fromkeys(DIRECTIONS, (0.0, upper)) for upper in uppers]
    bands = {}
    for direction in DIRECTIONS:
        lower, upper = np.array([both[direction] for both in ends]).T
        # The divergence decreases in epsilon.
        lower, upper = np.maximum.accumulate(lower[::-1])[::-1], np.minimum.accumulate(upper)
        bands[direction] = _between(lower, upper)
    return bands


def _between(lower, upper) -> np.ndarray:
    return np.stack([lower, np.where(lower > 0, (lower + upper) / 2, upper), upper])


def known_epsilons(
    known: Accountant, mechanism: Mechanism, delta: float, compose_with=None
) -> dict[Direction, np.ndarray]:
    """Return (3,) of each direction: the ends of epsilon at `delta`, each rounded outwards, and between.

    Of a composed mechanism the upper end is the best accountant's, of both directions, and the lower one 0.
    """
    if compose_with is not None:
        upper = analytic.epsilon_at(mechanism, delta, compose_with)[0]
        return dict.fromkeys(DIRECTIONS, _between(0.0, upper))
    most = unamplified.epsilon_at(mechanism, delta)
    both = {}
    for direction in DIRECTIONS:
        ends = [_crossing(known, mechanism, delta, direction, side, most) for side in (-1, 1)]
        both[direction] = _between(*np.array(ends))
    return both


def _crossing(
    known: Accountant, mechanism: Mechanism, delta: float, direction: str, side: int, max_epsilon: float
):
    """Return where one direction's upper (`side` 1) or lower (-1) bound is `delta`, rounded to that side."""

    def excess(epsilon):
        return -math.log(max(known.one_sided(mechanism, epsilon, direction, side), 1e-300) / delta)

    if excess(0.0) >= 0:
        return 0.0
    if not (max_epsilon < math.inf and excess(max_epsilon) > 0):
        return max_epsilon if side > 0 else 0.0
    ends = roots.root(excess, 1e-9 * max_epsilon, max_epsilon, max_epsilon / 2, relative=1e-4)
    return ends[1] if side > 0 else ends[0]
