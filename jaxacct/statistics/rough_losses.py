"""Rough model of composed losses: it says where a lattice should be, and affects only the width of bounds."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct.statistics.loss_curves import LossCurve, chord_masses

SMALLEST = 1e-200  # smallest bound that is returned: a smaller delta cannot be shown
CUT = 1e-5  # share of delta of each of the three cuts of a lattice
_TILTS = np.geomspace(1e-12, 1e12, 97)  # candidates of the search


class Part(NamedTuple):
    """Independent steps of one curve, `count` of them."""

    curve: LossCurve
    count: int


class RoughPart(NamedTuple):
    """Losses of a part at the nodes of its curve, with ln of their masses and the divergences there."""

    curve: LossCurve
    count: int
    losses: np.ndarray
    log_masses: np.ndarray
    deltas: np.ndarray


@dataclass(frozen=True, eq=False)
class Rough:
    """Losses of the steps at the nodes of their curves."""

    parts: list[RoughPart]

    @classmethod
    def of(cls, parts: list[Part]) -> "Rough":
        found = []
        for curve, count in parts:
            losses = curve.nodes()
            losses = losses[np.append(True, np.diff(losses) > 1e-9 * (1e-3 + np.abs(losses[1:])))]
            deltas = curve.at(losses).deltas
            beyond = chord_masses(deltas, 0.0 * deltas, np.diff(losses))
            with np.errstate(divide="ignore"):
                logs = np.log(np.maximum(0.0, np.append(curve.total, beyond[:-1]) - beyond))
            logs[0] = max(logs[0], -1e4)  # so that one mass is positive
            found.append(RoughPart(curve, count, losses, logs, deltas))
        return cls(found)

    def log_moments(self, tilts: np.ndarray) -> np.ndarray:
        """Return ln E e^{tilt S} of all steps together, for (k,) tilts of either sign."""
        total = np.zeros(tilts.size)
        for part in self.parts:
            exponents = np.multiply.outer(tilts, part.losses) + part.log_masses
            top = exponents.max(axis=1)
            total += part.count * (top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))
        return total

    def variance(self, tilt: float) -> tuple[float, float]:
        """Return (variance of the tilted sum, sum of the steps' squared deviations weighted for rounding)."""
        total = rounded = 0.0
        for part in self.parts:
            exponents = tilt * part.losses + part.log_masses
            weights = np.exp(exponents - exponents.max())
            weights /= weights.sum()
            mean = float(weights @ part.losses)
            square = float(weights @ (part.losses - mean) ** 2)
            total += part.count * square
            rounded += part.count * math.sqrt(square)
        return total, rounded

    @functools.cached_property
    def log_floor(self) -> float:
        """Natural log of a delta that is small beside the infinite losses, or beside `SMALLEST`."""
        infinite = math.fsum(part.count * float(part.deltas[-1]) for part in self.parts)
        return math.log(max(SMALLEST, CUT * infinite))

    def tilt_for(self, epsilon: float) -> float:
        """Return the tilt of approximately the smallest Chernoff-like bound on H(epsilon)."""
        tilts = _TILTS
        for _ in range(2):
            found = self.log_moments(tilts) - tilts * epsilon - np.log(tilts) - np.log1p(tilts)
            small = np.flatnonzero(found < self.log_floor)
            best = int(small[0]) if small.size else int(np.argmin(found))
            tilts = np.geomspace(tilts[max(best - 1, 0)], tilts[min(best + 1, tilts.size - 1)], 17)
        return float(tilts[8])
