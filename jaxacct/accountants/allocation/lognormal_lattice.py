"""Lognormals on a lattice, in convex order above, and a rough model of their sums.

A unit has one uniform phase of b and columns do not overlap, so that `f = P/Q = (1/b) sum_j X_j` with
independent lognormals `X_j = e^{mu_j z_j - mu_j^2 / 2}` under Q (proofs/random_allocation.md, sections 1, 2).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import scipy

from jaxacct.statistics import roots
from jaxacct.statistics.tilted_sums import UNIT

# Relative error of SciPy's normal distribution function; `tails_of` adds the error of its rounded argument.
_NDTR_ERROR = 1e-12
_TINY = 1e-305  # bound on what underflow may remove from a tail
# Standard deviations of ln X that the lattice covers.
REACH = 9.5


@dataclass(frozen=True)
class Phases:
    """Phases (`number` of them) in which the unit's pattern has norm `mu` times sigma, above 0."""

    number: int
    mu: float


@dataclass(frozen=True)
class Mixture:
    """One uniform phase; in `unused` phases, perhaps no whole number, the unit does not participate."""

    phases: tuple[Phases, ...]
    unused: float = 0

    @property
    def terms(self) -> int:
        """Phases in which the unit participates."""
        return sum(part.number for part in self.phases)

    @property
    def total(self) -> float:
        """Number of phases b."""
        return self.terms + self.unused


# -- One X on a lattice ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lattice:
    """X at `low + step i`, i = 0 .. cells; sums of `terms` of them at `points` places."""

    low: float
    step: float
    cells: int
    points: int
    terms: int

    @functools.cached_property
    def places(self) -> np.ndarray:
        """(cells + 1,) of one X."""
        return self.low + self.step * np.arange(self.cells + 1)

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """(points,) places of the sums."""
        return self.terms * self.low + self.step * np.arange(self.points)

    @property
    def end(self) -> float:
        """First sum that is not resolved."""
        return self.terms * self.low + self.step * self.points


@dataclass(frozen=True, eq=False)
class Distribution:
    """Distribution of X on a lattice; `masses` exclude X beyond it.

    Attributes:
      min_beyond: lower bound on P(X beyond); `max_beyond` is the upper one.
      max_weighted: upper bound on E[X; X beyond].
    """

    masses: np.ndarray
    min_beyond: float
    max_beyond: float
    max_weighted: float


def tails_of(mu: float, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (P(X > x), E[X; X > x], relative error of both)."""
    logs = np.log(x)
    z = (logs + mu * mu / 2) / mu
    # x, ln x, the sum and z are rounded, and the slope of ln ndtr at z is at most |z| + 1.
    rounded = 8 * UNIT * (2 + np.abs(logs).max() + mu * mu) / mu
    error = _NDTR_ERROR + rounded * (np.abs(z).max() + mu + 1)
    return scipy.special.ndtr(-z), scipy.special.ndtr(mu - z), error


def lattice_distribution(mu: float, lattice: Lattice) -> Distribution:
    """Return a distribution of X on the lattice: means of increasing convex functions are at least X's own.

    By the tail T(x) = P(X >= x) and its mean over each cell.
    """
    x = lattice.places
    tail, weighted, error = tails_of(mu, x)
    parts = x * tail
    # By parts, the integral of T over a cell; of numbers that may be close to each other.
    mean = (np.diff(parts) - np.diff(weighted)) / lattice.step
    slack = (error + 4 * UNIT) * (parts[1:] + parts[:-1] + weighted[1:] + weighted[:-1]) / lattice.step
    high = np.minimum(1.0, tail * (1 + error) + _TINY)
    min_beyond = max(0.0, float(tail[-1]) * (1 - error) - _TINY)
    # Split between both ends of its cell X keeps its mean: P(X^ beyond a place) is the mean of T over the
    # next cell. Mass before the first place is moved up to it.
    beyond = np.minimum(mean + slack, high[:-1])
    beyond = np.maximum.accumulate(beyond[::-1])[::-1]
    masses = np.maximum(0.0, np.append(1.0, beyond) - np.append(beyond, min_beyond))
    return Distribution(masses, min_beyond, float(high[-1]), float(weighted[-1] * (1 + error) + _TINY))


# -- Where a lattice should be: a rough model, which affects only the width of the bounds ---------------


@dataclass(frozen=True, eq=False)
class Rough:
    """Quadrature nodes of each X up to `most`.

    Attributes:
      parts: (number, places, ln of their weights) of each kind of phases.
    """

    parts: tuple[tuple[int, np.ndarray, np.ndarray], ...]

    @classmethod
    def of(cls, mixture: Mixture, most: float) -> "Rough":
        parts = []
        for part in mixture.phases:
            nodes = int(min(max(20 * part.mu * (2 * REACH + part.mu), 400), 6000))
            z = np.linspace(-REACH, REACH + part.mu, nodes)
            x = np.exp(part.mu * z - part.mu**2 / 2)
            log_weights = math.log(z[1] - z[0]) - z * z / 2 - math.log(2 * math.pi) / 2
            # The lowest node stays: all of one phase's nodes can be above `most`, which another's set.
            kept = max(1, int(np.searchsorted(x, most, side="right")))
            parts.append((part.number, x[:kept], log_weights[:kept]))
        return cls(tuple(parts))

    def log_moment(self, tilt: float) -> tuple[float, float]:
        """Return (ln E e^{tilt S}, mean of S under that tilt)."""
        log, mean = 0.0, 0.0
        for number, x, log_weights in self.parts:
            exponents = tilt * x + log_weights
            top = exponents.max()
            tilted = np.exp(exponents - top)
            mass = tilted.sum()
            log += number * (top + math.log(mass))
            mean += number * float(tilted @ x) / mass
        return log, mean

    def tilt_to(self, target: float) -> float:
        """Return the tilt whose mean is approximately `target`, or near the largest sum if that is less."""
        # The mean without a tilt is about 1 for each X.
        target = min(target, sum(number * (0.1 + 0.9 * float(x[-1])) for number, x, _ in self.parts))

        def is_past(tilt):
            return self.log_moment(tilt)[1] >= target

        low, high = roots.bracket(
            is_past, 0.0, 1 / target, lowest=-(2.0**60) / target, highest=2.0**60 / target
        )
        if not math.isfinite(low + high):
            return high if low == -math.inf else low
        ends = roots.bisect(is_past, low, high, absolute=2.0**-12 * (high - low), relative=0.0)
        return ends[1] if high > 0 else ends[0]

    def log_chernoff(self, target: float) -> float:
        tilt = self.tilt_to(target)
        return self.log_moment(tilt)[0] - tilt * target


def lowest(mixture: Mixture) -> float:
    """Return the first place of a lattice."""
    return min(math.exp(-REACH * part.mu - part.mu**2 / 2) for part in mixture.phases)


def highest(mixture: Mixture) -> float:
    """Return approximately where the tail of the size-biased X ends."""
    return max(math.exp(REACH * part.mu + part.mu**2 / 2) for part in mixture.phases)


def above(mixture: Mixture, x: float) -> float:
    """Return approximately P(X > x) of all X together."""
    return sum(part.number * float(tails_of(part.mu, np.array([x]))[0][0]) for part in mixture.phases)
