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
import scipy

from jaxacct.statistics.tilted_sums import UNIT

# Standard deviations beyond which a Gaussian tail is about 0 in float64.
_REACH = 38.0
_NODES = 1521
TINY = 1e-290
"""Bound on what underflow may remove from one value of a curve."""
_CORNER_GAP = 1e-12  # nats, between the corners of a sampled curve
_ROUNDINGS = 1e-12  # bounds are raised by this, far more than the float64 rounding error


class Values(NamedTuple):
    """A curve at ascending losses.

    The exact value is within `error * tails` of `deltas`, where `tails` is that of the loss before (1 before
    the first).
    """

    deltas: np.ndarray
    tails: np.ndarray
    """Upper bounds on P(loss > x)."""
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


class Tails(NamedTuple):
    """Probabilities of events under both distributions of a pair."""

    p: np.ndarray
    q: np.ndarray
    error: np.ndarray
    """Relative error of each, float64."""


@dataclass(frozen=True)
class GaussianPair:
    """P = N(1, sigma^2), Q = N(0, sigma^2)."""

    sigma: float

    def events(self, losses: np.ndarray, above: bool) -> Tails:
        """Return the probabilities that the loss of the pair is above (or below) these."""
        sign = -1.0 if above else 1.0
        place = losses * self.sigma + 0.5 / self.sigma
        nearer = place - 1 / self.sigma
        # SciPy's normal distribution function, measured: tests/statistics/test_composed_losses.py.
        far = np.minimum(np.maximum(np.abs(place), np.abs(nearer)), _REACH)
        error = (3 + 2 * (far + 1 / self.sigma) * (1 + far)) * UNIT
        return Tails(scipy.special.ndtr(sign * nearer), scipy.special.ndtr(sign * place), error)

    def nodes(self) -> np.ndarray:
        z = np.linspace(-_REACH, _REACH, _NODES)
        place = np.union1d(z, z + 1 / self.sigma)
        return (place - 0.5 / self.sigma) / self.sigma


@dataclass(frozen=True)
class LaplacePair:
    """P = Laplace(0, scale), Q = Laplace(1, scale)."""

    scale: float

    def events(self, losses: np.ndarray, above: bool) -> Tails:
        most = 1 / self.scale
        half = (most - losses) / 2  # the place over the scale
        p_far, q_far = np.exp(-np.abs(half)) / 2, np.exp(-np.abs(half - most)) / 2
        return _tails_within(most, losses, p_far, q_far, above)

    def nodes(self) -> np.ndarray:
        most = 1 / self.scale
        return np.linspace(-most, most, _NODES)


@dataclass(frozen=True)
class DiscreteLaplacePair:
    """P proportional to `e^{-a |y|}` over integers y, Q to `e^{-a |y - shift|}`."""

    a: float
    shift: int

    def events(self, losses: np.ndarray, above: bool) -> Tails:
        # The loss is a (shift - 2 y) between 0 and the shift; ties have no weight.
        most = self.a * self.shift
        last = np.clip(np.ceil((self.shift - losses / self.a) / 2) - 1, 0, self.shift - 1)
        share = 1 / (1 + math.exp(-self.a))
        p_far, q_far = share * np.exp(-self.a * (last + 1)), share * np.exp(-self.a * (self.shift - last))
        return _tails_within(most, losses, p_far, q_far, above)

    def nodes(self) -> np.ndarray:
        step = 2 * max(1, (self.shift + 1) // 4000)
        return self.a * np.union1d(np.arange(-self.shift, self.shift + 1, step), self.shift)


def _tails_within(most: float, losses: np.ndarray, p_far, q_far, above: bool) -> Tails:
    """Return the events of a pair with losses of at most `most` in size.

    Inside, the loss is below with probability `p_far` under P, and above with probability `q_far` under Q.
    """
    p, q = (1 - p_far, q_far) if above else (p_far, 1 - q_far)
    inside, outside = np.abs(losses) < most, np.where((losses < 0) == above, 1.0, 0.0)
    error = np.full(losses.shape, (8 + 4 * most) * UNIT)
    return Tails(np.where(inside, p, outside), np.where(inside, q, outside), error)


def _values(losses: np.ndarray, tails: Tails) -> Values:
    """Return the divergences whose best events have these probabilities."""
    with np.errstate(divide="ignore"):
        logs = np.log(tails.q)
    deltas = np.maximum(tails.p - np.exp(np.minimum(losses + logs, 0.0)), 0.0)
    error = 2 * tails.error + (4 + np.abs(losses) + np.minimum(np.abs(logs), 750.0)) * UNIT
    return Values(np.minimum(deltas, 1.0), np.minimum(1.0, tails.p), error)


@dataclass(frozen=True)
class SampledAntipodal(LossCurve):
    """N(1, sigma^2) against N(-1, sigma^2) with probability q, both N(0, sigma^2) without: replace-one.

    The loss rises with y, and is x at `y = sigma^2 (x / 2 + asinh((1 - q) / u sinh(x / 2)))`,
    `u = q e^{-1 / (2 sigma^2)}` (proofs/adjacency.md, section 3).
    """

    sigma: float
    q: float

    def at(self, losses: np.ndarray) -> Values:
        q, apart, half = self.q, 1 / self.sigma, np.abs(losses) / 2
        log_odds = math.log1p(-q) - math.log(q) if q < 1 else -math.inf
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_ratio = log_odds + apart**2 / 2 + log_sinh
        # asinh(z) = ln(2 z) but for 1 / (4 z^2).
        grown = np.where(
            log_ratio > 20, log_ratio + math.log(2), np.arcsinh(np.exp(np.minimum(log_ratio, 20)))
        )
        place = np.sign(losses) * self.sigma * (half + grown)
        far = np.minimum(np.abs(place) + apart, _REACH)
        # Of ln z and so of asinh(z), absolute and, as `asinh(z) >= z / sqrt(1 + z^2)`, relative.
        size = 1 + abs(max(log_odds, -750.0)) + apart**2 + half + np.minimum(np.abs(log_sinh), 750.0)
        error = (3 + (1 + far) * (2 * far + 16 * np.minimum(np.abs(place), self.sigma) * size)) * UNIT
        without, above, below = (scipy.special.ndtr(shift - place) for shift in (0.0, apart, -apart))
        tails = Tails((1 - q) * without + q * above, (1 - q) * without + q * below, error)
        return _values(losses, tails)

    def nodes(self) -> np.ndarray:
        z = np.linspace(-_REACH, _REACH, _NODES) + np.array([[-1.0], [0.0], [1.0]]) / self.sigma
        logs = math.log(self.q) + np.stack([z, -z]) / self.sigma - 0.5 / self.sigma**2
        if self.q < 1:
            logs = np.logaddexp(math.log1p(-self.q), logs)
        return np.unique(logs[0] - logs[1])


def unsampled(losses: np.ndarray, q: float) -> np.ndarray:
    """Return the loss of P against Q where that of `q P + (1 - q) Q` is this; -inf where it is larger."""
    if q == 1:
        return losses
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / q, -1.0))
        if q > 0.5:  # 1 - q is exact, and e^loss may be close to it
            gap = np.maximum(np.exp(np.minimum(losses, 0.0)) - (1 - q), 0.0)
            small = np.where(losses < -0.5, np.log(gap / q), small)
        large = losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(losses, 30.0)))
    return np.where(losses < 30, small, large)


@dataclass(frozen=True)
class Sampled(LossCurve):
    """Pair `q P + (1 - q) Q` and Q (remove), or Q and that mixture (add); q = 1 is the pair itself."""

    pair: GaussianPair | LaplacePair | DiscreteLaplacePair
    q: float
    remove: bool = True

    def at(self, losses: np.ndarray) -> Values:
        q, signed = self.q, losses if self.remove else -losses
        tails = self.pair.events(unsampled(signed, q), above=self.remove)
        mixed = (1 - q) * tails.q + q * tails.p  # of positive terms: nothing cancels
        first, second = (mixed, tails.q) if self.remove else (tails.q, mixed)
        return _values(losses, Tails(first, second, tails.error + UNIT))

    def nodes(self) -> np.ndarray:
        inner = self.pair.nodes()
        if self.q < 1:
            inner = np.logaddexp(math.log1p(-self.q), math.log(self.q) + inner)
        return inner if self.remove else -inner[::-1]


def both_directions(
    pair: GaussianPair | LaplacePair | DiscreteLaplacePair, q: float
) -> tuple[LossCurve, LossCurve]:
    """Return (remove, add) of a step that is taken with probability q, in (0, 1]; the pair is symmetric."""
    remove = Sampled(pair, q)
    return remove, (remove if q == 1 else Sampled(pair, q, remove=False))


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
