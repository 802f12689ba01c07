"""Estimate how a divergence decreases with the noise, from pilots at several noise multipliers.

A pilot at one noise multiplier has 10 to 30 nonzero terms and estimates its divergence to 20 to 30 %. The log
of the divergence is nearly linear in the log of the noise, so pilots at nearby noise multipliers add
information.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxacct.statistics import bounds

# Prior mean and standard deviation of the slope; the slope is within three deviations of the mean.
_SLOPE, _DOUBT = -30.0, 15.0
# Minimum sum of terms over all pilots, in terms of the usual size.
_MIN_SEEN = 3.0
# Number of terms that represent the distribution of a trend.
_WRITTEN_OUT = 10**9


@dataclass(frozen=True)
class Pilot:
    """Counts of terms (`bounds.bin_terms`) at one noise multiplier, whose mean has to stay below `theta`."""

    log_noise: float
    theta: float
    counts: np.ndarray

    @property
    def total(self) -> float:
        """Sum of the terms, rounded up."""
        return float(self.counts @ bounds.TERM_EDGES)


@dataclass(frozen=True)
class Trend:
    """`ln(mean / theta) = level + slope (ln noise - about)`, terms of a common shape."""

    level: float
    slope: float
    about: float
    shape: np.ndarray

    def ratio(self, log_noise: float) -> float:
        """Return the divergence over its threshold."""
        return math.exp(self.level + self.slope * (log_noise - self.about))

    def samples(self, log_noise: float, theta: float, q: float) -> float:
        """Return `bounds.predicted_samples` of terms of this trend."""
        size = float(self.shape @ bounds.TERM_EDGES)  # of a term above 0
        share = min(1.0, self.ratio(log_noise) * theta / size)
        counts = np.round(_WRITTEN_OUT * share * self.shape).astype(np.int64)
        counts[0] = max(0, _WRITTEN_OUT - int(counts.sum()))
        return bounds.predicted_samples(theta, counts, q)


def trend(pilots: Sequence[Pilot]) -> Trend | None:
    """Fit the likeliest trend; None where the pilots have too few terms.

    Sums of terms are modelled as Poisson numbers of terms of one size, `E X^2 / E X`.
    """
    counts = sum(pilot.counts for pilot in pilots) + np.zeros(len(bounds.TERM_EDGES), np.int64)
    counts[0] = 0
    if not counts.any():
        return None
    unit = float(counts @ bounds.TERM_EDGES**2) / float(counts @ bounds.TERM_EDGES)
    seen = np.array([pilot.total for pilot in pilots]) / unit
    if seen.sum() < _MIN_SEEN:
        return None
    expected = np.array([pilot.theta * float(pilot.counts.sum()) for pilot in pilots]) / unit
    places = np.array([pilot.log_noise for pilot in pilots])
    about = float(np.average(places, weights=seen))
    level, slope = _likeliest(places - about, expected, seen)
    return Trend(level, slope, about, counts / counts.sum())


def _likeliest(places: np.ndarray, expected: np.ndarray, seen: np.ndarray) -> tuple[float, float]:
    """Return (level, slope) of Poisson means `expected e^(level + slope places)`, by Newton's method."""
    slope = _SLOPE
    level = math.log(float(seen.sum()) / float(expected @ np.exp(slope * places)))
    for _ in range(50):
        means = expected * np.exp(level + slope * places)
        off, moment = seen - means, means @ places
        gradient = [off.sum(), off @ places - (slope - _SLOPE) / _DOUBT**2]
        bend = [[means.sum(), moment], [moment, means @ places**2 + _DOUBT**-2]]
        steps = np.clip(np.linalg.solve(bend, gradient), (-1, -10), (1, 10))
        level, slope = level + float(steps[0]), slope + float(steps[1])
        if np.abs(steps).max() < 1e-9:
            break
    return level, min(slope, 0.0)
