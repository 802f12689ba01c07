"""Bounds on the hockey-stick divergence of composed steps, with a relative error at any delta.

Each step's loss is moved to a lattice by chords in `e^x`, which dominates it; its masses are tilted to the
region that determines delta; their transforms are multiplied. Everything that is cut off, wraps around or is
rounded is added to the bound. The choice of tilt and lattice affects only the width of the bound, never its
validity (proofs/composed_losses.md).
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxacct.statistics import roots
from jaxacct.statistics.loss_curves import TINY, LossCurve, Restricted, chord_masses
from jaxacct.statistics.rough_losses import CUT, SMALLEST, Part, Rough
from jaxacct.statistics.tilted_sums import UNIT, Factors, Variable, log_sum, rounding_error, sums, tilted

# Natural log of the largest factor of tilted weights, and what underflow may then remove from their sum.
_MAX_SCALE, _UNDERFLOW = 200.0, 1e-210
_MAX_RELATIVE = 0.1  # up to which `1 + 2 relative` covers `e^relative`
# Share of delta of the lattices.
_LATTICE = 1e-3
# Fraction of the best tilt that is used: far fewer sums wrap around, and rounding hardly grows.
_TILT_SHARE = 0.85
_MIN_POINTS, _MAX_POINTS = 2**15, 2**22
_MAX_EPSILON = 1e6
_TIGHT = 1e-9  # relative width of the interval around an epsilon
_MAX_PLACE = 2**52  # in steps of a lattice
_MIN_WIDTH = 1e-9  # of lattices, where all losses are one
# Tables end where delta is this small. Within one lattice ln delta falls by about this much.
_TABLE_FLOOR, _TABLE_FALL = 1e-60, 4.0
# Share of a bound that errors may be before large losses are treated apart, and cuts that are tried.
_MAX_ERRORS, _CUTS = 1e-2, np.geomspace(0.05, 0.8, 7)


def divergence_bound(parts: list[Part], epsilon: float) -> float:
    """Return an upper bound on H(epsilon) of all parts, one direction of each step, in [SMALLEST, 1]."""
    parts = [part for part in parts if part.count]
    if not parts:
        return SMALLEST
    epsilon = min(epsilon, _MAX_EPSILON)
    by_parts = float(_sum_of_deltas(parts, np.array([epsilon]))[0])
    rough = Rough.of(parts)
    whole = Sums.of(rough, epsilon)
    found = min(bounded(whole.bound(epsilon)), bounded(by_parts))
    is_finite = min(float(part.losses[0]) for part in rough.parts) > -_MAX_EPSILON
    is_finite &= whole.log_scale > -math.inf
    errors = whole.reserved + whole.bound(epsilon, errors_alone=True)
    if epsilon > 0 and is_finite and errors > _MAX_ERRORS * found > SMALLEST:
        found = min(found, bounded(_by_largest_losses(parts, epsilon)))
    return float(found)


def min_epsilon(bound: Callable[[float], float], delta: float, most: float) -> float:
    """Return an epsilon with `bound(epsilon) <= delta`, nearly the smallest; infinity for none up to `most`.

    `bound` is a function that decreases; the result is 0 or has been evaluated.
    """
    if not delta > 0:
        return math.inf

    @functools.cache
    def excess(epsilon: float) -> float:
        found = bound(epsilon)
        if not found > 0:
            return math.inf if found == 0 else -math.inf
        gap = math.log(delta) - math.log(found)
        return gap if (gap >= 0) == (found <= delta) else delta - found  # logarithms are rounded

    if excess(0.0) >= 0:
        return 0.0
    low, high = 1e-12, 1.0
    while excess(high) < 0:
        if high >= most:
            return math.inf
        low, high = high, min(4 * high, most)
    return roots.root(excess, low, high, math.sqrt(low * high), relative=_TIGHT)[1]


def _by_largest_losses(parts: list[Part], epsilon: float) -> float:
    """Return an upper bound on H(epsilon) that treats large losses, at most one, apart from all others.

    Where delta comes from one large loss no tilt makes it probable that would not make many of them so, and
    the rounding of a transform grows with the steps. With no large loss the tilt can be as large as the cut
    allows; with one there are as many terms as steps of its part; two or more are as improbable as they are
    (proofs/composed_losses.md, section 6).
    """

    def split(cut: float) -> tuple[list[Part], list[Part], float]:
        small = [Part(Restricted(part.curve, cut, above=False), part.count) for part in parts]
        large = [Part(Restricted(part.curve, cut, above=True), part.count) for part in parts]
        mean = math.fsum(part.count * part.curve.total for part in large)
        return small, large, mean * mean / 2 * (1 + 1e-9)

    def about(cut: float) -> float:
        small, _, twice = split(cut)
        rough = Rough.of(small)
        tilt = rough.tilt_for(epsilon)
        log = float(rough.log_moments(np.array([tilt]))[0]) - tilt * epsilon
        return twice + math.exp(min(log - math.log(tilt) - math.log1p(tilt), 0.0))

    cut = min((float(cut) for cut in epsilon * _CUTS), key=about)
    small, large, found = split(cut)
    found += Sums.of(Rough.of(small), epsilon).bound(epsilon)
    for place, one in enumerate(large):
        others = [part._replace(count=part.count - (i == place)) for i, part in enumerate(small)]
        both = [part for part in [*others, one._replace(count=1)] if part.count]
        found += one.count * Sums.of(Rough.of(both), epsilon).bound(epsilon)
    return found


def divergence_table(parts: list[Part], epsilons: np.ndarray) -> np.ndarray:
    """Return `divergence_bound` at ascending epsilons, of at least 0: few lattices serve many epsilons."""
    parts = [part for part in parts if part.count]
    found = np.full(epsilons.size, 1.0 if parts else SMALLEST)
    at = 0
    rough = Rough.of(parts) if parts else None
    while rough is not None and at < epsilons.size:
        lattice = Sums.of(rough, float(epsilons[at]))
        end = int(np.searchsorted(epsilons, lattice.usable, side="right"))
        end = min(max(at + 1, end), epsilons.size)
        found[at:end] = [lattice.bound(float(epsilon)) for epsilon in epsilons[at:end]]
        if found[end - 1] <= _TABLE_FLOOR:
            found[end:] = found[end - 1]
            break
        at = end
    if parts:
        found = np.minimum(bounded(found), bounded(_sum_of_deltas(parts, epsilons)))
    return np.minimum.accumulate(found)


def _sum_of_deltas(parts: list[Part], epsilons: np.ndarray) -> np.ndarray:
    """Return upper bounds by basic composition, `sum of count H(x)` for x with `sum of count x <= epsilon`.

    From the largest loss of all parts on this is the rounding error alone, where a lattice, whose losses are
    rounded up, has none (proofs/composed_losses.md, section 5).
    """
    largest = [max(0.0, float(part.curve.nodes()[-1])) for part in parts]
    total = math.fsum(part.count * loss for part, loss in zip(parts, largest, strict=True))
    shares = epsilons * (1 - 8 * UNIT) / total if total > 0 else np.zeros(epsilons.size)
    found = np.zeros(epsilons.size)
    for (curve, count), loss in zip(parts, largest, strict=True):
        x = shares * loss
        values, before = curve.at(x), curve.at(x - 8 * UNIT * (1 + x))
        found += count * (values.deltas + values.error * before.tails + TINY)
    return found * (1 + 1e-9)


def bounded(bounds):
    """Clip to [SMALLEST, 1]; NaN, and what is no probability, becomes 1."""
    return np.where(np.asarray(bounds) >= 0, np.clip(bounds, SMALLEST, 1.0), 1.0)[()]


# -- Sums on a lattice ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Step:
    """Losses `(first + i) step`, i = 0 .., of one curve on the lattice.

    Attributes:
      first: place of the smallest loss.
      variable: tilted masses, of total 1.
      infinite: mass of the infinite losses.
      log: ln of the moment of the masses at the tilt, `log_steep` at the steep one.
    """

    first: int
    variable: Variable
    infinite: float
    log: float
    log_steep: float

    @classmethod
    def of(
        cls, curve: LossCurve, step: float, first: int, last: int, tilts: tuple[float, float], points: int
    ) -> "_Step":
        masses, infinite = np.zeros(1), curve.total
        if max(abs(first), abs(last)) > _MAX_PLACE:  # no such numbers of steps: all losses are infinite
            first = 0
        else:
            values = curve.at(step * np.arange(first, last + 1))
            before = np.append(curve.total, values.tails[:-1])
            beyond = chord_masses(values.deltas, values.error * before + TINY, step)
            beyond = np.minimum(beyond, curve.total)
            masses, infinite = np.append(curve.total, beyond[:-1]) - beyond, float(beyond[-1])
        losses = step * (first + np.arange(masses.size))
        log, log_steep = (log_sum(tilt * losses, masses) for tilt in tilts)
        ones = tilted(masses, tilts[0] * losses - log) if log > -math.inf else masses
        return cls(first, Variable(ones, points), infinite, log, log_steep)

    def exponents(self, tilt: float, step: float) -> float:
        """Return an upper bound on all exponents of one tilted mass, 64 for their other operations."""
        largest = max(abs(self.first), abs(self.first + self.variable.masses.size)) * step
        return 4 * abs(tilt) * largest + 750 + 64


@dataclass(frozen=True, eq=False)
class Sums:
    """Tilted masses of the sum of all steps' losses at `(first + j) step`, j = 0 .. points - 1.

    H(epsilon) is at most `e^{log_scale - tilt epsilon}` times the mean of tilted weights, plus `reserved`.

    Attributes:
      step, first, points: the lattice.
      tilt, steep: of the masses, and of the bound on sums beyond the lattice.
      usable: largest epsilon, approximately, for which the tilt is adequate.
      steps: of each curve.
      counts: how many there are of each; any counts have a bound on any lattice (`dataclasses.replace`).
    """

    step: float
    first: int
    points: int
    tilt: float
    steep: float
    usable: float
    steps: list[_Step]
    counts: list[int]

    @classmethod
    def of(cls, rough: Rough, epsilon: float) -> "Sums":
        """Return the lattice of bounds near epsilon."""
        saddle = rough.tilt_for(epsilon)
        variance, deviations = rough.variance(saddle)
        curvature = variance + saddle**-2 + (1 + saddle) ** -2
        log_moment = float(rough.log_moments(np.array([saddle]))[0])
        log_guess = log_moment - saddle * epsilon - math.log(saddle) - math.log1p(saddle)
        log_guess = min(0.0, max(log_guess - math.log(2 * math.pi * curvature) / 2, rough.log_floor))
        log_cut = math.log(CUT) + log_guess
        tilt = _TILT_SHARE * saddle
        # Chernoff bounds on the sum beyond the end, on the tilted sum before the start and far beyond it.
        steep, lower = tilt * np.geomspace(1.01, 100, 40), tilt * (1 - np.geomspace(0.01, 100, 40))
        log_moments = rough.log_moments(steep)
        ends = (log_moments - log_cut) / steep
        far_ends = (log_moments - log_cut - tilt * epsilon) / (steep - tilt)
        end, steep_tilt = float(ends.min()), float(steep[int(np.argmin(ends))])
        starts = (log_cut + tilt * epsilon - rough.log_moments(lower)) / (tilt - lower)
        start = float(starts.max())
        spans = []
        for part in rough.parts:
            count = max(1, part.count)  # of none, it has a step for other counts
            small = np.flatnonzero(count * part.deltas <= math.exp(log_cut) / len(rough.parts))
            top = part.losses[small[0]] if small.size else part.losses[-1]
            exponents = tilt * part.losses + part.log_masses
            log_part = exponents.max() + math.log(np.exp(exponents - exponents.max()).sum())
            moved = tilt * part.losses + np.log(np.cumsum(np.exp(part.log_masses)) + TINY) - log_part
            least = max(0, int(np.searchsorted(moved, math.log(CUT / count))) - 1)
            spans.append((min(float(part.losses[least]), float(top)), float(top)))
        far = float(far_ends.min())
        width = max(end - start, end - epsilon, far - epsilon, *(top - low for low, top in spans), _MIN_WIDTH)
        # The lattice adds steps tilt (tilt + 1) step^2 / 12 to ln delta; rounding of curves, magnified by
        # 1 / step, about 40 UNIT tilt deviations / step.
        steps = sum(part.count for part in rough.parts)
        bend = steps * saddle * (1 + saddle) / 12
        step = min(math.sqrt(_LATTICE / bend), width / (_MIN_POINTS - 16))
        step = max(step, (40 * UNIT * saddle * deviations / bend) ** (1 / 3), width / (_MAX_POINTS - 16))
        fraction, exponent = math.frexp(step)
        step = math.ldexp(math.ceil(fraction * 2**20), exponent - 20)  # so that its multiples are exact
        points = 1 << math.ceil(math.log2(width / step + 12))
        places = [(math.floor(low / step) - 1, math.ceil(top / step) + 1) for low, top in spans]
        found = [
            _Step.of(part.curve, step, *ends, (tilt, steep_tilt), points)
            for part, ends in zip(rough.parts, places, strict=True)
        ]
        first = max(math.floor(end / step) + 4 - points, math.floor(epsilon / step) - points // 2)
        usable = epsilon + min(math.sqrt(curvature), _TABLE_FALL / saddle)
        counts = [part.count for part in rough.parts]
        return cls(step, first, points, tilt, steep_tilt, usable, found, counts)

    def _total(self, values: Iterable[float]) -> float:
        """Return the sum of a value of each step."""
        return math.fsum(count * value for count, value in zip(self.counts, values, strict=True) if count)

    @functools.cached_property
    def log_scale(self) -> float:
        return self._total(one.log for one in self.steps)

    @functools.cached_property
    def reserved(self) -> float:
        """Mass of infinite losses, and a Chernoff bound on sums beyond the lattice."""
        after = self.step * (self.first + self.points)
        sizes = self._total(one.exponents(self.steep, self.step) for one in self.steps)
        rounded = 4 * UNIT * (sizes + abs(self.steep * after))
        moment = self._total(one.log_steep for one in self.steps)
        wrapped = math.exp(min(700.0, moment - self.steep * after + rounded))
        return (self._total(one.infinite for one in self.steps) + wrapped) * (1 + 1e-9) + _UNDERFLOW

    @functools.cached_property
    def _masses(self) -> np.ndarray:
        """(points,) tilted masses of the sum, ordered by place, with rounding errors of either sign."""
        found = sums([self._factors], self.points)
        offset = sum(count * one.first for one, count in zip(self.steps, self.counts, strict=True))
        return np.roll(found, (offset - self.first) % self.points)

    @property
    def _factors(self) -> Factors:
        return [(one.variable, count) for one, count in zip(self.steps, self.counts, strict=True)]

    @functools.cached_property
    def _rounding(self) -> float:
        """Rounding error of a mean of weights per 2-norm of the weights, for at most `points` additions."""
        summed = self.points * UNIT * float(np.linalg.norm(self._masses))
        return rounding_error(self._factors, 1.0, self.points) + summed

    @functools.cached_property
    def _relative(self) -> float:
        """Relative error of every term, without the part that depends on epsilon."""
        each = self._total(one.exponents(self.tilt, self.step) for one in self.steps)
        return 4 * UNIT * (each + abs(self.log_scale) + self.tilt * self.step * self.points)

    def _bound(self, epsilon: float, value: float, weights_norm: float) -> float:
        if math.floor(epsilon / self.step) < self.first:
            return math.inf  # sums between epsilon and the first place would be missed
        relative = self._relative + 8 * UNIT * self.tilt * abs(epsilon)
        exponent = self.log_scale - self.tilt * epsilon
        if not (exponent <= _MAX_SCALE and relative <= _MAX_RELATIVE):
            return math.inf  # weights of relevant size may underflow, or all terms be rounding alone
        scale = math.exp(exponent)
        counted = float(np.maximum(0.0, value))  # keeps NaN, for which `_bounded` returns 1
        return (counted + self._rounding * weights_norm) * scale * (1 + 2 * relative) + self.reserved

    def bound(self, epsilon: float, errors_alone: bool = False) -> float:
        """Return an upper bound on H(epsilon), or what cuts and rounding add to it."""
        if self.log_scale == -math.inf:
            return self.reserved  # all losses are infinite
        epsilon -= 8 * UNIT * (1 + epsilon)
        start = max(0, math.floor(epsilon / self.step) - self.first)
        past = np.maximum(self.step * (self.first + np.arange(start, self.points)) - epsilon, 0.0)
        weights = -np.exp(-self.tilt * past) * np.expm1(-past)
        value = 0.0 if errors_alone else float(np.sum(self._masses[start:] * weights))
        return self._bound(epsilon, value, math.sqrt(float(np.sum(weights * weights))))
