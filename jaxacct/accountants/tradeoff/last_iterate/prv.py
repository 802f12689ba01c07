"""Estimate a composition's epsilon by privacy-loss random variables (arXiv 2403.00278, D.5). No bound.

Losses are rounded to the nearest point of a grid and the means' errors are added back, so that errors of the
grid cancel to second order; `composition` gives certified values on both sides.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.curves import TradeOff
from jaxacct.common import validate as _validate


@dataclass(frozen=True)
class PRVEstimate:
    """Losses on a grid with their probabilities; estimates only."""

    losses: np.ndarray
    probs: np.ndarray
    kind: str = "approximation"

    def delta(self, epsilon: float) -> float:
        """Return `E[(1 - e^(epsilon - L))_+]`; a round-off error of about 1e-14 remains."""
        gap = self.losses - epsilon
        return float(np.sum(np.where(gap > 0, self.probs * -np.expm1(-np.maximum(gap, 0.0)), 0.0)))

    def epsilon(self, delta: float) -> float:
        """Return the epsilon >= 0 at delta."""
        arrays.open_share("delta", delta)
        if self.delta(0.0) <= delta:
            return 0.0
        if self.delta(float(self.losses[-1])) > delta:
            return math.inf
        return float(optimize.brentq(lambda eps: self.delta(eps) - delta, 0.0, float(self.losses[-1])))


def prv_compose(components, *, grid: float = 1e-4, size: int = 1 << 20) -> PRVEstimate:
    """Estimate the losses of a composition.

    Args:
      components: `(curve, count)` pairs, without infinite losses.
      grid: h, natural log.
      size: N points; the half-width N h / 2 must hold the total losses.

    Raises:
      ValueError: the grid is too short for the losses, which would wrap around.
    """
    _validate.positive_number("grid", grid)
    _validate.positive_integer("size", size, minimum=8)
    half = size // 2
    spectrum, shift = np.ones(half + 1, complex), 0.0
    mean, square = 0.0, 0.0
    for part, count in components:
        if not isinstance(part, TradeOff):
            raise ValueError(f"components must be (curve, count) pairs, got {type(part).__name__}")
        _validate.positive_integer("count", count)
        points = np.arange(-half, half) * grid
        edges = (np.arange(-half, half + 1) - 0.5) * grid
        above = np.asarray(part.survival(edges)[0], np.float64)
        if above[-1] > 1e-12 or 1 - above[0] > 1e-12:
            raise ValueError(
                f"size x grid must be larger: a loss is beyond {half * grid:g} with more than 1e-12"
            )
        probs = -np.diff(above)
        probs /= probs.sum()
        # E[L] = integral of Q(L > u) - Q(L <= -u) over u > 0, by Simpson's rule between the edges.
        exact = _mean(part, half * grid)
        rounded = float(probs @ points)
        shift += count * (exact - rounded)
        mean += count * exact
        square += count * max(0.0, float(probs @ points**2) - rounded**2)
        spectrum *= np.fft.rfft(np.fft.ifftshift(probs)) ** count
    if abs(mean) + 10 * math.sqrt(square) > half * grid:
        raise ValueError(
            f"size x grid must be larger: losses reach {abs(mean) + 10 * math.sqrt(square):.3g}, the grid "
            f"{half * grid:.3g}"
        )
    total = np.fft.fftshift(np.fft.irfft(spectrum, size))
    return PRVEstimate(np.arange(-half, half) * grid + shift, total)


def _mean(part: TradeOff, reach: float) -> float:
    nodes, weights = np.polynomial.legendre.leggauss(16)
    edges = np.concatenate([[0.0], np.geomspace(1e-7, reach, 400)])
    u = (edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * (nodes + 1) / 2).ravel()
    w = ((edges[1:] - edges[:-1])[:, None] * weights / 2).ravel()
    up, down = np.asarray(part.survival(u)[0]), 1 - np.asarray(part.survival(-u)[0])
    return float(w @ (up - down))
