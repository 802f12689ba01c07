"""Privacy profile of a composed mechanism, as a table, and the part of it that samples estimate.

With g the profile as a function of t (nats) and alpha = e^t, g is convex and decreasing in alpha, so between
two points of a table it lies below their chord: the table is an upper bound (proofs/composition.md, section
1).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.statistics.loss_curves import ChordCurve

_LEFT_OUT = 1e-3  # maximum fraction of delta that the left-out part of the profile may have
_RAISED = 1e-9  # relative; far above the float64 rounding error of the table between its points


@dataclass(frozen=True, eq=False)
class TabulatedProfile:
    """Upper bound on delta(t) of another mechanism; compared by identity, as caches are kept by event.

    Attributes:
      logs: (points,) float64, ascending, nats.
      values: (points,) in [0, 1], not increasing. Before the first point the value is 1, after the last its
        own.
      of_gaussians: whether it is that of a mixture of Gaussians of one width against one of them.
    """

    logs: np.ndarray
    values: np.ndarray
    of_gaussians: bool = False

    @functools.cached_property
    def _alphas(self) -> np.ndarray:
        return np.exp(self.logs)

    @functools.cached_property
    def hull(self) -> ChordCurve:
        """Largest convex function of e^t below the table: the profile of a pair that dominates, too."""
        return ChordCurve.below(self.logs, self.values)

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

    def above_floor(self, t) -> np.ndarray:
        """Return `(g(t) - phi)_+`, which is 0 from `end` on."""
        return np.maximum(self.profile(t) - self._floor, 0.0)

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

    def exchanged(self, epsilon: float, scheme) -> float:
        """Return by how much the add direction of `scheme`'s mechanism may exceed the remove direction.

        The probability of participation times `e^epsilon` times that of a loss above epsilon of a pair that
        dominates the composed mechanism; 0 for Gaussians, and where both directions are drawn
        (proofs/composition.md, theorem 2).
        """
        if self.profile.of_gaussians or scheme.side_information is not None:
            return 0.0
        hull, below = self.profile.hull, epsilon * (1 - 1e-12) - 1e-12
        place = int(np.searchsorted(hull.losses, below, side="right"))
        if place == hull.losses.size:
            return 0.0
        alphas, heights = np.append(0.0, np.exp(hull.losses)), np.append(1.0, hull.heights)
        fall = (heights[place] - heights[place + 1]) / (alphas[place + 1] - alphas[place])
        participation = -math.expm1(min(0.0, scheme.log_probability_of_none()))
        return participation * math.exp(epsilon) * float(fall) * (1 + _RAISED)
