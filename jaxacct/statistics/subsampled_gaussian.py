"""Poisson-subsampled Gaussian pair of one step: its curves and its privacy-loss distribution on a grid.

`P = q N(1, s^2) + (1-q) N(0, s^2)`, `Q = N(0, s^2)`: P is the distribution with the example (remove is P
against Q, add is Q against P). The loss `L(t) = ln(1 - q + q e^{(2t-1)/(2 s^2)})` increases with t, so all
distributions of L are normal tails. Lemma 8 of arXiv 2209.15596 prints the removal pair with P and Q
exchanged in the mixture; appendix D.3 has it right. The module also estimates delta of many steps.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import fft, special

from jaxacct.common import validate as _validate
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.loss_curves import unsampled

_UNIT = 2.0**-52


class GridDistribution(NamedTuple):
    """Privacy-loss distribution on an equidistant grid that dominates the original one."""

    masses: np.ndarray
    """(n,) float64, of the first distribution of the pair."""
    infinite: float
    """Mass at an infinite loss."""
    error: float
    """Upper bound on the effect of rounding on delta of one step."""


def subsampled_gaussian_delta(
    sampling_probability: float, sigma: float, epsilon, direction: str
) -> np.ndarray:
    """Return delta of one step at any real epsilon, float64; `sigma` is relative to the example's share."""
    q = _validate.probability("sampling_probability", sampling_probability)
    sigma = _validate.noise_multiplier("sigma", sigma)
    direction = Direction.of(direction)
    epsilon = np.asarray(epsilon, float)
    if np.isnan(epsilon).any():
        raise ValueError("epsilon must not be NaN")
    if direction == Direction.REMOVE:
        place = _place(epsilon, q, sigma)
        # In logarithms: e^epsilon may exceed float64 where the other factor underflows.
        delta = _above(place, q, sigma) - np.exp(epsilon + special.log_ndtr(-place / sigma))
    else:
        place = _place(-epsilon, q, sigma)
        with np.errstate(divide="ignore"):
            log_below = np.log(_below(place, q, sigma))
        # At most Q's mass there, so the difference is at least 0.
        delta = special.ndtr(place / sigma) - np.exp(np.minimum(0.0, epsilon + log_below))
    return np.maximum(0.0, delta)


def _place(loss, q: float, sigma: float) -> np.ndarray:
    """Return the t with L(t) = loss; -inf where the loss is never so small."""
    return sigma**2 * unsampled(np.asarray(loss, float), q) + 0.5


def _above(place, q: float, sigma: float) -> np.ndarray:
    """Return P(t > place) under P."""
    return q * special.ndtr((1 - place) / sigma) + (1 - q) * special.ndtr(-place / sigma)


def _below(place, q: float, sigma: float) -> np.ndarray:
    """Return P(t <= place) under P."""
    return q * special.ndtr((place - 1) / sigma) + (1 - q) * special.ndtr(place / sigma)


def _cell_masses(below: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return masses between neighbouring edges, from the smaller tail, and their rounding errors."""
    upper = above[:-1] < below[:-1]
    masses = np.where(upper, above[:-1] - above[1:], below[1:] - below[:-1])
    # ndtr has a relative error of a few units.
    return np.maximum(masses, 0.0), 8 * _UNIT * np.where(upper, above[:-1], below[1:])


def grid_distribution(q: float, sigma: float, grid: np.ndarray, direction: str) -> GridDistribution:
    """Split the mass of each cell of the one-step loss between its ends, such that P- and Q-mass are kept.

    A pair that keeps both masses of every cell and moves them to the ends is a less noisy experiment: the
    original pair is a randomisation of it. So deltas, of compositions too, are upper bounds
    (proofs/individual.md). Mass above the equidistant `grid` becomes an infinite loss, mass below it the
    lowest loss.
    """
    if sigma == np.inf:
        masses = np.zeros(grid.size)
        masses[np.searchsorted(grid, 0.0)] = 1.0
        return GridDistribution(masses, 0.0, 0.0)
    if direction == Direction.REMOVE:
        place = _place(grid, q, sigma)
        first = _cell_masses(_below(place, q, sigma), _above(place, q, sigma))
        second = _cell_masses(special.ndtr(place / sigma), special.ndtr(-place / sigma))
        lowest, infinite = float(_below(place[0], q, sigma)), float(_above(place[-1], q, sigma))
    else:
        # The loss is -L(t): large where t is small.
        place = _place(-grid, q, sigma)
        first = _cell_masses(special.ndtr(-place / sigma), special.ndtr(place / sigma))
        second = _cell_masses(_above(place, q, sigma), _below(place, q, sigma))
        lowest, infinite = float(special.ndtr(-place[0] / sigma)), float(special.ndtr(place[-1] / sigma))
    (p, p_error), (m, m_error) = first, second
    step = grid[1] - grid[0]
    upper = np.exp(grid[1:])
    lower_share = np.clip((m * upper - p) / np.expm1(step), 0.0, p)
    masses = np.zeros(grid.size)
    masses[:-1] += lower_share
    masses[1:] += p - lower_share
    masses[0] += lowest
    # An error e of a share moves mass e by one cell: e (1 - exp(-step)) of delta; e is the error over
    # expm1(step).
    error = float(np.sum(np.where(p > 0, m_error * upper, 0.0) + 2 * p_error))
    return GridDistribution(masses, infinite, error + 8 * _UNIT * infinite)


# Limits of `composed_subsampled_gaussian`: nats below delta of what it leaves out; its maximum number of grid
# points, and the largest absolute loss.
_BELOW, _MAX_POINTS, _FARTHEST = 7.0, 2**20, 1e4


def composed_subsampled_gaussian(
    q: float, sigma: float, steps: int, epsilon: float, *, delta: float, interval: float
) -> float:
    """Estimate delta(epsilon) of `steps` steps, remove direction, near a given `delta`.

    Losses on the grid of `grid_distribution` are composed by a Fourier transform whose rounding error is not
    bounded here (`individual.fourier` bounds it). A thousandth of `delta`, which determines the range of
    losses, may wrap around. The grid is coarser than `interval` where there would be too many points; inf
    where the range is too large.
    """
    with np.errstate(over="ignore"):
        log_second = steps * float(np.log1p(q**2 * np.expm1(sigma**-2.0)))
    # Under P the sum S of the losses has P(S > s) <= E_Q (P/Q)^2 e^-s and P(S < -s) <= e^-s.
    lowest = _BELOW - math.log(delta)
    width = 2 * lowest + max(log_second, abs(epsilon))
    if not width < _FARTHEST:
        return math.inf
    points = fft.next_fast_len(math.ceil(min(_MAX_POINTS, width / interval)), real=True)
    step = width / points
    zero = math.ceil(lowest / step)
    losses = step * (np.arange(points) - zero)
    distribution = grid_distribution(q, sigma, losses, Direction.REMOVE)
    spectrum = fft.rfft(np.roll(distribution.masses, -zero))
    composed = np.roll(fft.irfft(spectrum**steps, points), zero)
    infinite = -math.expm1(steps * math.log1p(-distribution.infinite))
    return float(composed @ -np.expm1(np.minimum(epsilon - losses, 0.0))) + infinite
