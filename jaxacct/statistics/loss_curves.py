"""Hockey-stick divergences of one step as functions of epsilon, each with the error of its evaluation.

A curve is `H(x) = sup over events of P - e^x Q` of one direction of a pair, for losses x of either sign
(natural log). It is all that composition needs of a step (proofs/composed_losses.md, sections 1 and 2).
"""

import abc
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct.statistics.tilted_sums import UNIT

TINY = 1e-290  # bound on what underflow may remove from one value of a curve
_CORNER_GAP = 1e-12  # nats, between the corners of a sampled curve
_ROUNDINGS = 1e-12  # bounds are raised by this, far more than the float64 rounding error


class Values(NamedTuple):
    """A curve at ascending losses.

    The exact value is within `error * tails` of `deltas`, where `tails` is that of the loss before (1 before
    the first).

    Attributes:
      tails: upper bounds on P(loss > x).
    """

    deltas: np.ndarray
    tails: np.ndarray
    error: np.ndarray


class LossCurve(abc.ABC):
    """Divergence curve of one direction of one step."""

    @property
    def total(self) -> float:
        """Upper bound on the probability under P of all losses."""
        return 1.0

    @abc.abstractmethod
    def at(self, losses: np.ndarray) -> Values:
        """Evaluate at ascending losses."""

    @abc.abstractmethod
    def nodes(self) -> np.ndarray:
        """Return ascending losses between which the curve is nearly straight.

        The last one is the largest loss where there is one; the others affect only the width of bounds.
        """


def dominating_curves(remove, add) -> tuple["ChordCurve", "ChordCurve"]:
    """Return the (remove, add) curves of a pair that dominates all pairs with divergences below these bounds.

    `H(P, Q)(-e) = 1 - alpha^-1 (1 - H(Q, P)(e))`, so each direction, (epsilons ascending from 0, upper
    bounds), is bounded on the whole line. A bound that is NaN counts as 1.
    """
    falling = [(epsilons, _falling(bounds)) for epsilons, bounds in (remove, add)]
    # One number, the total variation distance, bounded twice.
    falling[0][1][0] = falling[1][1][0] = min(falling[0][1][0], falling[1][1][0])
    return _on_the_line(*falling), _on_the_line(*falling[::-1])


def _falling(bounds) -> np.ndarray:
    """Return the bounds as non-increasing numbers in [0, 1]."""
    found = np.asarray(bounds, np.float64)
    found = np.where(np.isfinite(found) & (found >= 0), found * (1 + _ROUNDINGS), 1.0)
    return np.minimum.accumulate(np.minimum(found, 1.0))


def _on_the_line(forward, backward) -> "ChordCurve":
    negative = -backward[0][:0:-1]
    mirrored = 1 - np.exp(negative) * (1 - backward[1][:0:-1])
    # No divergence is below 1 - e^epsilon, nor above 1.
    bounds = np.concatenate([np.minimum(1.0, mirrored * (1 + _ROUNDINGS)), forward[1]])
    return ChordCurve.below(np.concatenate([negative, forward[0]]), np.minimum.accumulate(bounds))


@dataclass(frozen=True, eq=False)
class ChordCurve(LossCurve):
    """Chords in `e^x` through 1 at minus infinity and these heights; after the last, its height.

    Attributes:
      losses: (corners,) ascending.
      heights: (corners,) of a convex, decreasing function of `e^x` in [0, 1].
    """

    losses: np.ndarray
    heights: np.ndarray

    @classmethod
    @np.errstate(over="ignore", invalid="ignore")
    def below(cls, losses: np.ndarray, bounds: np.ndarray) -> "ChordCurve":
        """Return the largest convex function of `e^x` that is at most these bounds everywhere, and 1 at 0.

        A divergence is convex in `e^x`, so that function is an upper bound, too.
        """
        alphas, heights = np.append(0.0, np.exp(losses)), np.append(1.0, bounds)  # (0, 1) is the first

        def slope(i: int, j: int) -> float:
            return (heights[j] - heights[i]) / (alphas[j] - alphas[i])

        stack = [0]
        for j in range(1, alphas.size):
            while len(stack) > 1 and slope(stack[-2], stack[-1]) >= slope(stack[-2], j):
                stack.pop()
            stack.append(j)
        return cls(losses[np.array(stack[1:]) - 1], heights[stack[1:]])

    def sampled(self, q: float, remove: bool) -> "ChordCurve":
        """Return the curve of `q P + (1 - q) Q` and Q (remove), or of P and `(1 - q) P + q Q` (add).

        Chords remain chords (proofs/events.md, section 2). Corners are moved right by more than their
        rounding.
        """
        if q == 1:
            return self
        idle, join = math.log1p(-q), math.log(q) + (self.losses if remove else -self.losses)
        mixed = np.logaddexp(idle, join)
        rounding = 32 * UNIT * (1 + np.abs(self.losses) - math.log(q) - idle)
        if remove:
            losses, heights = np.append(idle, mixed), q * np.append(1.0, self.heights)
            room = np.append(rounding[0], rounding)
        else:
            losses, heights = np.append(-mixed, -idle), np.append(self.heights * np.exp(join - mixed), 0.0)
            room = np.append(rounding, rounding[-1])
        losses = np.maximum.accumulate(losses + room)  # a corner further right is higher, too
        heights = np.minimum(1.0, heights * (1 + room))
        apart = np.append(np.diff(losses) > _CORNER_GAP, True)  # without a corner, a chord is higher
        return ChordCurve.below(losses[apart], heights[apart])

    @functools.cached_property
    def _slopes(self) -> np.ndarray:
        """(corners,) Q-mass of the losses beyond each corner, over `e^-corner`."""
        with np.errstate(over="ignore"):
            return np.append((self.heights[:-1] - self.heights[1:]) / np.expm1(np.diff(self.losses)), 0.0)

    def at(self, losses: np.ndarray) -> Values:
        place = np.searchsorted(self.losses, losses, side="right") - 1
        inside = np.maximum(place, 0)
        past = np.minimum(losses - self.losses[inside], 700.0)  # beyond the last corner the slope is 0
        fall = self._slopes[inside] * np.expm1(np.where(place < 0, 0.0, past))
        first = -np.expm1(np.minimum(losses - self.losses[0], 0.0)) * (1 - self.heights[0])
        deltas = self.heights[inside] - fall + np.where(place < 0, first, 0.0)
        # P(loss > x) is the height plus e^x times the slope.
        beyond = np.where(place < 0, 1.0, deltas + self._slopes[inside] * np.exp(past))
        error = (24 + 4 * np.abs(losses) + 4 * np.abs(self.losses[inside])) * UNIT
        return Values(np.clip(deltas, 0.0, 1.0), np.clip(beyond, 0.0, 1.0), error)

    def nodes(self) -> np.ndarray:
        thin = max(1, self.losses.size // 4000)
        return np.union1d(self.losses[::thin], self.losses[-1:])


@dataclass(frozen=True)
class Restricted(LossCurve):
    """A curve of the losses up to a cut alone, or of those above it: measures of total below 1.

    With E the event of losses above the cut, `cap(x) = P(E) - e^x Q(E)` is what E adds to the curve up to
    the cut, and the curve itself is it above (proofs/composed_losses.md, section 6).
    """

    curve: LossCurve
    cut: float
    above: bool

    @functools.cached_property
    def _event(self) -> tuple[float, float, float]:
        """(P(E), its divergence at the cut, relative error of both)."""
        deltas, tails, error = self.curve.at(np.array([self.cut]))
        return float(tails[0]), float(deltas[0]), float(error[0]) + 128 * UNIT * (1 + abs(self.cut))

    @property
    def total(self) -> float:
        """Upper bound on the probability under P of these losses."""
        return self._event[0] * (1 + self._event[2]) + TINY if self.above else self.curve.total

    def at(self, losses: np.ndarray) -> Values:
        tail, delta, error = self._event
        under = losses <= self.cut
        deltas, tails, errors = self.curve.at(np.where(under, losses, np.maximum(losses, self.cut)))
        past = np.minimum(losses - self.cut, 0.0)
        cap = -np.expm1(past) * tail + np.exp(past) * delta
        errors = errors + 2 * error + UNIT * (8 + np.abs(past))
        if self.above:
            return Values(np.where(under, cap, deltas), np.where(under, tail, tails), errors)
        near = losses < self.cut + 1e-9 * (1 + abs(self.cut))  # where the cut itself is inexact
        tails = np.where(under, tails, np.where(near, tail, 0.0))
        return Values(np.where(under, np.maximum(deltas - cap, 0.0), 0.0), tails, errors)

    def nodes(self) -> np.ndarray:
        found = self.curve.nodes()
        kept = found[found > self.cut] if self.above else found[found < self.cut]
        return np.union1d(kept, [self.cut])


def chord_masses(deltas, errors, gaps) -> np.ndarray:
    """Return upper bounds on P(loss > x_i), not increasing, from the chords through a curve's deltas.

    `gaps` are the distances of the ascending x; `errors` bound those of the deltas. The last is the mass of
    infinite losses.
    """
    upper, lower = np.minimum(1.0, deltas + errors), np.maximum(0.0, deltas - errors)
    with np.errstate(over="ignore"):
        beyond = (upper[:-1] + (upper[:-1] - lower[1:]) / np.expm1(gaps)) * (1 + 4 * UNIT)
    beyond = np.append(np.minimum(beyond, 1.0), upper[-1])
    return np.maximum.accumulate(beyond[::-1])[::-1]
