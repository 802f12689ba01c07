"""Divergence curve of a mixture of Gaussians against one: a unit with a random number of examples in a step.

The loss rises with the output, so the best events are half-lines. Newton's method finds their ends, on the
side where they certainly contain the best ones (proofs/composed_losses.md, section 7).
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy import special

from jaxacct.statistics.loss_curves import LossCurve, Values
from jaxacct.statistics.tilted_sums import UNIT

_REACH = 39.0  # standard deviations beyond which a Gaussian has less than 1e-300
_SPACING, _MAX_NODES = 0.05, 20_000
_PLACES = 2**15  # outputs that are evaluated at once
_MAX_TURNS = 20
_MAX_EXCESS = 1e-9  # of the sum of given weights over 1
_FEW = 1e-40


@dataclass(frozen=True)
class GaussianMixture(LossCurve):
    """`sum_j weights_j N(means_j, sigma^2)` against N(0, sigma^2) (remove), or the two exchanged (add).

    Attributes:
      sigma: standard deviation, above 0.
      means: (J,) ascending, at least 0.
      weights: (J,) above 0.
      weight_error: bound on the relative error of each weight.
      remove: whether the mixture is P.
    """

    sigma: float
    means: tuple[float, ...]
    weights: tuple[float, ...]
    weight_error: float = UNIT
    remove: bool = True

    @functools.cached_property
    def _shifts(self) -> np.ndarray:
        return np.array(self.means) / self.sigma

    @functools.cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Outputs over sigma, the losses there, and bounds on the rounding of all losses up to them."""
        end = _REACH + float(self._shifts[-1])
        nodes = min(_MAX_NODES, math.ceil((end + _REACH) / _SPACING))
        places = np.linspace(-_REACH, end, nodes)
        losses, _, rounding = self._losses(places)
        return places, np.maximum.accumulate(losses), np.maximum.accumulate(rounding)

    def nodes(self) -> np.ndarray:
        losses = np.unique(self._grid[1])
        return losses if self.remove else -losses[::-1]

    def at(self, losses: np.ndarray) -> Values:
        places, off = self._ends(losses if self.remove else -losses)
        with np.errstate(divide="ignore"):
            own, mixed = self._own(places), self._mixed(places)
        (tails, _, first_error), (_, log, error) = (mixed, own) if self.remove else (own, mixed)
        deltas = tails - np.exp(np.minimum(losses + log, 0.0))
        sizes = 4 + np.abs(losses) + np.minimum(np.abs(log), 1e9)
        error = first_error + error + sizes * UNIT + np.expm1(np.minimum(off, 700.0))
        return Values(np.clip(deltas, 0.0, 1.0), np.minimum(1.0, tails * (1 + error)), error)

    # -- Probabilities of half-lines ----------------------------------------------------------------------

    def _own(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (probability, its ln, bound on its relative error) of the events under N(0, 1)."""
        log = special.log_ndtr(-places if self.remove else places)
        return np.exp(log), log, (8 + 4 * np.minimum(np.abs(log), 1e9)) * UNIT

    def _mixed(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (probability, its ln, bound on its relative error) of the events under the mixture."""
        total, errors = np.zeros(places.size), np.zeros(places.size)
        logs = np.full(places.size, -np.inf)
        for shift, weight in zip(self._shifts.tolist(), self.weights, strict=True):
            inward = shift - places if self.remove else places - shift
            far = np.clip(-inward, 0.0, _REACH)
            term = weight * special.ndtr(inward)
            total += term
            # Of the normal distribution function, and of its argument.
            errors += term * (3 + far**2 + 2 * (shift + far) * (1 + far))
        with np.errstate(invalid="ignore"):
            errors = np.where(total > 0, errors / total, 0.0)
        logs = np.log(total)
        tiny = total < 1e-280
        if not self.remove and tiny.any():  # e^x of it may be large
            inward = places[tiny, None] - self._shifts
            terms = np.log(self.weights) + special.log_ndtr(inward)
            top = terms.max(axis=1)
            with np.errstate(invalid="ignore"):
                rest = np.log(np.exp(terms - top[:, None]).sum(axis=1))
            logs[tiny] = top + np.where(np.isfinite(top), rest, 0.0)
            sizes = 4 * np.minimum(np.abs(terms), 1e9) + 2 * self._shifts * (1 + np.abs(inward))
            errors[tiny] = np.where(np.isfinite(top), np.minimum(sizes, 1e12).max(axis=1), 0.0)
        return total, logs, (errors + len(self.weights) + 4) * UNIT + self.weight_error

    # -- Ends of half-lines -------------------------------------------------------------------------------

    def _losses(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the losses at finite outputs over sigma, their slopes and bounds on their rounding."""
        shifts, logs = self._shifts[:, None], np.log(self.weights)[:, None]
        sizes = np.concatenate([shifts, 3 * np.abs(logs) + 6 * shifts**2, 6 * shifts], axis=1).T
        found = []
        for start in range(0, places.size, _PLACES):
            z = places[start : start + _PLACES]
            terms = logs + shifts * (z - shifts / 2)
            top = terms.max(axis=0)
            np.exp(terms - top, out=terms)
            total = terms.sum(axis=0)
            slope, fixed, growing = sizes @ terms / total
            loss = top + np.log(total)
            rounding = (fixed + growing * np.abs(z) + shifts.size + 8 + 2 * np.abs(loss)) * UNIT
            found.append(np.stack([loss, slope, rounding + 2 * self.weight_error]))
        return tuple(np.concatenate(found, axis=1))

    def _ends(self, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ends of the events, and bounds on the distance of the losses there from these.

        Every event contains the best one: the loss at its end is at most (remove) or at least (add) this one.
        """
        places, heights, errors = self._grid
        if self.remove:
            outer = np.searchsorted(np.maximum.accumulate(heights + errors), losses, side="right") - 1
        else:
            outer = np.searchsorted(np.minimum.accumulate((heights - errors)[::-1])[::-1], losses)
        at = np.clip(outer, 0, places.size - 1)
        # Beyond the grid is hardly any output.
        ends = np.where(outer == at, places[at], -np.inf if self.remove else np.inf)
        off = 2 * errors[at]
        inner = at + (1 if self.remove else -1)
        between = (outer == at) & (inner >= 0) & (inner < places.size)
        if between.any():
            ends[between], off[between] = self._solved(losses[between], at[between], inner[between])
        return ends, off

    def _solved(self, losses, outer, inner) -> tuple[np.ndarray, np.ndarray]:
        """Return `_ends` between two neighbours of the grid, of which the outer one is such an end."""
        places, heights, errors = self._grid
        side = 1.0 if self.remove else -1.0
        room = np.maximum(errors[outer], errors[inner])
        goal = losses - 3 * side * room
        low, high = np.minimum(outer, inner), np.maximum(outer, inner)
        left, right = places[low], places[high]
        gap = np.maximum(heights[high] - heights[low], 1e-300)
        z = left + (right - left) * np.clip((goal - heights[low]) / gap, 0.0, 1.0)
        loss, _, rounding = np.zeros((3, z.size))
        left_over = np.arange(z.size)
        for _ in range(_MAX_TURNS):
            at = left_over
            loss[at], slope, rounding[at] = self._losses(z[at])
            past = loss[at] - goal[at]
            left[at], right[at] = np.where(past <= 0, z[at], left[at]), np.where(past > 0, z[at], right[at])
            step = z[at] - past / np.maximum(slope, 1e-300)
            step = np.where((step > left[at]) & (step < right[at]), step, (left[at] + right[at]) / 2)
            is_far = np.abs(past) > 1.5 * room[at]
            left_over = at[is_far]
            if not left_over.size:
                break
            z[left_over] = step[is_far]
        # Where the last step has not been evaluated, nothing is known of its loss.
        loss[left_over] = np.where(self.remove, np.inf, -np.inf)
        distance = side * (losses - loss)
        is_outside = distance >= rounding
        wide = np.maximum(side * (losses - heights[outer]), 0.0) + errors[outer]
        return np.where(is_outside, z, places[outer]), np.where(is_outside, distance + rounding, wide)


def both_directions_of_mixture(sigma: float, means, weights) -> tuple[GaussianMixture, GaussianMixture]:
    """Return (remove, add) of `sum_j weights_j N(means_j, sigma^2)` and N(0, sigma^2).

    Raises:
      ValueError: means that are no finite numbers of at least 0, or weights that are no probabilities.
    """
    joined: dict[float, float] = {}
    for mean, weight in zip(map(float, means), map(float, weights), strict=True):
        if not (0 <= mean < math.inf and 0 <= weight <= 1):
            raise ValueError(f"means must be at least 0 and weights in [0, 1], got {mean!r} and {weight!r}")
        if weight:
            joined[mean] = joined.get(mean, 0.0) + weight
    excess = abs(math.fsum(joined.values()) - 1)
    if not excess <= _MAX_EXCESS:
        raise ValueError(f"weights must add up to 1, got a sum that is {excess:.3g} off")
    error = excess + (1 + len(weights)) * UNIT
    fields = sigma, tuple(sorted(joined)), tuple(joined[mean] for mean in sorted(joined)), error
    return GaussianMixture(*fields), GaussianMixture(*fields, remove=False)


def binomial_curves(sigma: float, count: int, probability: float) -> tuple[GaussianMixture, GaussianMixture]:
    """Return (remove, add) of a step in which each of a unit's examples participates with a probability.

    Source: proofs/shared_examples.md, corollary of theorem 2.
    """
    means, weights = binomial(count, probability)
    return GaussianMixture(sigma, means, weights), GaussianMixture(sigma, means, weights, remove=False)


@functools.lru_cache(maxsize=16)
def binomial(count: int, probability: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return values and correctly rounded probabilities of a stochastically larger count.

    Counts of together less than `_FEW` are replaced: below the usual ones by the first of these, above by
    the largest.
    """
    share = Fraction(probability)
    join, idle, whole = share.numerator, share.denominator - share.numerator, share.denominator**count
    means, weights, waiting, above = [], [], 0, whole  # above: of this count or more
    for j in range(count + 1):
        if j < count and above / whole <= _FEW:
            return (*means, float(count)), (*weights, max((waiting + above) / whole, 1e-300))
        one = math.comb(count, j) * join**j * idle ** (count - j)
        mass = waiting + one
        if j == count or mass / whole > _FEW:
            means.append(float(j))
            weights.append(max(mass / whole, 1e-300))
            mass = 0
        waiting, above = mass, above - one
    return tuple(means), tuple(weights)
