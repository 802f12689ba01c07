"""Privacy profile of a composed mechanism, as a table, and the part of it that samples estimate.

With g the profile as a function of t (nats) and alpha = e^t, g is convex and decreasing in alpha, so between
two points of a table it lies below their chord: the table is an upper bound (proofs/composition.md, section
1).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

_LEFT_OUT = 1e-3  # maximum fraction of delta that the left-out part of the profile may have
_RAISED = 1e-9  # relative; far above the float64 rounding error of the table between its points


@dataclass(frozen=True, eq=False)
class TabulatedProfile:
    """Upper bound on delta(t) of another mechanism; compared by identity, as caches are kept by event.

    Attributes:
      logs: (points,) float64, ascending, nats.
      values: (points,) in [0, 1], not increasing. Before the first point the value is 1, after the last its
        own.
    """

    logs: np.ndarray
    values: np.ndarray

    @functools.cached_property
    def _alphas(self) -> np.ndarray:
        return np.exp(self.logs)

    def __call__(self, t) -> np.ndarray:
        """Evaluate at float64 t of any shape."""
        first, last = self.logs[0] - 1.0, self.logs[-1]
        return np.interp(np.exp(np.clip(t, first, last)), self._alphas, self.values, left=1.0)


@dataclass(frozen=True)
class Composed:
    """Profile of the composed mechanism and the target delta, of which it may leave out a thousandth."""

    profile: TabulatedProfile
    delta: float

    @functools.cached_property
    def _end(self) -> int | None:
        """First point from which on the profile may be left out."""
        small = np.flatnonzero(self.profile.values <= _LEFT_OUT * self.delta)
        return int(small[0]) if small.size and small[0] > 0 else None

    @property
    def left_out(self) -> float:
        """Upper bound on the floor phi; infinite where the profile has no floor as small."""
        return math.inf if self._end is None else self._floor * (1 + _RAISED)

    @property
    def _floor(self) -> float:
        assert self._end is not None  # read only where the profile has a floor
        return float(self.profile.values[self._end])

    @property
    def end(self) -> float:
        """Point t (nats) from which on the whole profile is left out."""
        return math.inf if self._end is None else float(self.profile.logs[self._end])

    @functools.cached_property
    def above_floor(self) -> Callable[[np.ndarray], np.ndarray]:
        """Function `(g(t) - phi)_+`, which is 0 from `end` on."""
        profile, floor = self.profile, self._floor

        def drawn(t):
            return np.maximum(profile(t) - floor, 0.0)

        return drawn

    def log_max(self, power: float) -> float:
        """Return an upper bound on ln of the largest `e^{power t} (g(t) - phi)_+`, power > 0.

        Between two points the profile is a line in alpha, and the product has at most one maximum inside. The
        bound is infinite without a floor.
        """
        if self._end is None:
            return math.inf
        logs = self.profile.logs[: self._end + 1]
        values = self.profile.values[: self._end + 1] - self._floor
        alphas = np.exp(logs)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = power * logs + np.log(values)
            fall = (values[:-1] - values[1:]) / np.diff(alphas)
            # (a - fall alpha) alpha^power is largest at alpha = power a / (fall (power + 1)).
            height = values[:-1] + fall * alphas[:-1]
            inside = np.clip(power * height / (fall * (power + 1)), alphas[:-1], alphas[1:])
            inside = np.where(np.isfinite(inside), inside, alphas[:-1])
            between = power * np.log(inside) + np.log(height - fall * inside)
        # The profile is 1 before the first point.
        candidates = np.concatenate([ends, between, [power * logs[0]]])
        return float(np.nanmax(candidates)) + _RAISED * (1 + power)

    def concave_terms(self, least: float) -> "ConcaveTerms | None":
        """Return X of exponents t >= `least` (nats) with `g(t) <= left_out + X(t)`, for extrapolation.

        None where the profile has no floor, or t is beyond its end.
        """
        if self._end is None or not least < self.end:
            return None
        cap = 1 - _LEFT_OUT * self.delta
        logs, values = self.profile.logs, self.profile.values
        start = max(least, float(logs[0]) - 1.0)
        first = int(np.searchsorted(logs, start, side="right"))
        at_start = float(self.profile(np.array([start]))[0])
        # Heights decrease, so the height at a point is at least that of the interval up to the next one.
        heights = scipy.special.ndtri(
            np.minimum(np.array([at_start, at_start, *values[first : self._end]]), cap)
        )
        places = np.array([start, *logs[first : self._end + 1]])
        heights += _RAISED * (1 + np.abs(heights))
        corners: list[int] = []
        for j in range(len(places)):
            while len(corners) > 1 and _bends_up(places, heights, corners[-2], corners[-1], j):
                corners.pop()
            corners.append(j)
        left_out = self.left_out + _LEFT_OUT * self.delta
        return ConcaveTerms(places[corners], heights[corners], left_out)

    def log_at(self, t: float) -> float:
        """Return an upper bound on ln g(t) of the whole profile; t in nats."""
        value = float(self.profile(np.array([t]))[0])
        return math.log(value) + _RAISED if value > 0 else -math.inf


def _bends_up(x: np.ndarray, y: np.ndarray, i: int, j: int, k: int) -> bool:
    """Return whether the middle one of three points is not above the line through the others."""
    return bool((y[j] - y[i]) * (x[k] - x[i]) <= (y[k] - y[i]) * (x[j] - x[i]))


@dataclass(frozen=True, eq=False)
class ConcaveTerms:
    """`X(t)` in [0, 1] whose height `Phi^{-1}(X(t))` is concave and decreasing; 0 from the last place on.

    Attributes:
      places: (corners,) float64, ascending, nats; before the first, X has its value there.
      heights: (corners,) float64, of a concave, decreasing function.
      left_out: upper bound on the part of the profile that X does not cover.
    """

    places: np.ndarray
    heights: np.ndarray
    left_out: float

    def __call__(self, t: np.ndarray) -> np.ndarray:
        """Evaluate at float64 t of any shape."""
        return np.where(t < self.places[-1], scipy.special.ndtr(np.interp(t, self.places, self.heights)), 0.0)
