"""Estimates that need no samples, by an accountant that is exact up to its grid."""

import numpy as np

from jaxacct.accountants import Accountant, analytic, unamplified
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism
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
    """Return (3, points) of each direction: 0, and the accountant's bound as estimate and upper end."""
    upper = np.array([known.bound_at(mechanism, epsilon, compose_with) for epsilon in grid.tolist()])
    upper = np.minimum.accumulate(upper)  # the divergence decreases in epsilon
    return dict.fromkeys(DIRECTIONS, np.stack([0 * upper, upper, upper]))


def known_epsilons(mechanism: Mechanism, delta: float, compose_with=None) -> dict[Direction, np.ndarray]:
    """Return (3,) of each direction: 0, and the best accountant's epsilon at `delta`, as `known_bands`."""
    most = unamplified.epsilon_at(mechanism, delta) if compose_with is None else _validate.MAX_EPSILON
    upper = min(most, analytic.epsilon_at(mechanism, delta, compose_with, most)[0])
    return dict.fromkeys(DIRECTIONS, np.array([0.0, upper, upper]))
