"""Hockey-stick divergences of a mixture of orthogonal Gaussian shifts, between two bounds, without samples.

With `f = (1/b) sum_j X_j` as in `lognormal_lattice`, S the sum and `alpha = e^epsilon`,

    H(P, Q) = E_Q (S - alpha b)_+ / b,    H(Q, P) = (alpha / b) E_Q (b / alpha - S)_+:

means of convex functions of a sum. Each X_j is moved to a lattice such that these means can only increase, or
only decrease, to second order of its step; the distribution of the sum is one product of Fourier transforms,
tilted to where the mean comes from. Bounds include every rounding (proofs/random_allocation.md).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.accountants.allocation.lognormal_lattice import (
    Distribution,
    Lattice,
    Mixture,
    Rough,
    above,
    highest,
    lattice_distribution,
    lowest,
    tails_of,
)
from jaxacct.statistics import roots
from jaxacct.statistics.composed_losses import SMALLEST
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.tilted_sums import UNIT, Factor, log_sum, rounding_error, sums, tilted

_MIN_POINTS, MAX_POINTS = 2**14, 2**21
_POINTS_A_TERM = {1: 256, -1: 2048}  # upper bounds converge faster
# A larger epsilon counts as this; with a larger mu only the probability of participation is used.
_MAX_EPSILON, _MAX_MU = 300.0, 15.0
_RESERVED = 1e-4  # reserve for cut tails, relative to a rough value of the divergence
_ATTEMPTS = 6
_FURTHEST = 64.0  # times alpha b


@functools.lru_cache(maxsize=64)
def divergence_bound(
    mixture: Mixture, epsilon: float, direction: str, side: int, points: int | None = None
) -> float:
    """Return the upper (`side` 1) or lower (-1) bound on one direction's divergence, in [0, 1].

    The lattice of sums has `points` points, a power of two; by default depending on the number of phases.
    """
    direction = Direction.of(direction)
    extreme = any(part.mu > _MAX_MU for part in mixture.phases)
    if not mixture.phases or (side < 0 and (extreme or epsilon > _MAX_EPSILON)):
        return 0.0
    participation = mixture.terms / mixture.total * (1 + 2.0**-50)  # the unit does not participate otherwise
    if extreme:
        return min(1.0, participation)
    epsilon = min(epsilon, _MAX_EPSILON)
    of = _remove if direction == Direction.REMOVE else _add
    found = of(mixture, epsilon, side, points or _points(mixture, side))
    # NaN, and what is no probability, gives the trivial bound.
    found = float(found) if 0 <= found <= 1 else float(side > 0)
    return min(found, participation)


def _points(mixture: Mixture, side: int) -> int:
    num_points = min(max(_POINTS_A_TERM[side] * mixture.terms, _MIN_POINTS), MAX_POINTS)
    return 1 << math.ceil(math.log2(num_points))


# -- Sums -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sums:
    """Means of weights of sums of independent X; in the remove direction one of them is size-biased.

    With `biased`, the mean is `sum_t (number_t / b) E[X_t; weight(S)]`, which is that under P.
    """

    mixture: Mixture
    lattice: Lattice
    dists: tuple[Distribution, ...]
    firsts: tuple[np.ndarray, ...] | None
    """Unweighted masses of the X that is size-biased; None where none is."""

    def log_masses(self, tilt: float) -> list[float]:
        """Return ln sum e^{tilt x} mass(x) of each distribution."""
        return [log_sum(tilt * self.lattice.places, dist.masses) for dist in self.dists]

    def log_first(self, tilt: float) -> float:
        """Return ln sum_t (number_t / b) E[X_t e^{tilt X_t}], or 0 where none is size-biased."""
        if self.firsts is None:
            return 0.0
        x, total = self.lattice.places, self.mixture.total
        logs = [
            math.log(part.number / total) + log_sum(tilt * x, first * x)
            for part, first in zip(self.mixture.phases, self.firsts, strict=True)
        ]
        return float(np.logaddexp.reduce(logs))

    def log_others(self, tilt: float) -> float:
        """Return an upper bound on ln E e^{tilt S} of all X, or of all but the size-biased one."""
        logs = self.log_masses(tilt)
        log = sum(part.number * one for part, one in zip(self.mixture.phases, logs, strict=True))
        # Without the smallest: an upper bound for any other choice.
        return log - (min(logs) if self.firsts is not None else 0.0)

    def log_wrapped(self, tilt: float, steep: float) -> float:
        """Return an upper bound on ln of E e^{tilt S} from sums beyond the end: Chernoff by the tilt `steep`.

        The size-biased X is at most the last place, so that the others are beyond the rest.
        """
        if not self.lattice.wraps:
            return -math.inf
        steep = max(steep, tilt)
        rest = self.lattice.end - (self.lattice.places[-1] if self.firsts is not None else 0.0)
        return self.log_first(tilt) + self.log_others(steep) - (steep - tilt) * rest + 1e-9

    def one_sided(
        self, thresholds: np.ndarray, tilt: float, direction: Direction
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return upper bounds on E (1 - K/S)_+ (remove) or E (1 - S/K)_+ (add) on the lattice, and errors.

        For every threshold K, by running sums from the end where the weights are 1. Errors are what rounding
        adds to the bounds.
        """
        falls = direction == Direction.ADD
        order = slice(None, None, 1 if falls else -1)
        places, start = self.lattice.sums, np.searchsorted(self.lattice.sums, thresholds)
        counts = start if falls else self.lattice.points - start

        def running(values: np.ndarray) -> np.ndarray:
            return np.append(0.0, np.cumsum(values[order]))[counts]

        plain = _Tilted.by(self, np.ones(self.lattice.points), tilt, tilt)
        with np.errstate(over="ignore", invalid="ignore"):  # at the other end, which no threshold reaches
            masses = plain.terms()
            means = running(masses * places) / thresholds if falls else running(masses / places) * thresholds
            counted = np.maximum(0.0, running(masses) - means)
            errors = plain.rounding_of_unit * np.sqrt(running(plain.weights**2))
            errors = errors + 4 * self.lattice.points * UNIT * running(np.abs(masses))
        return (counted + errors) * (1 + plain.relative), errors

    def mean(self, weights: np.ndarray, tilts: tuple[float, ...], steep: float) -> tuple[float, float]:
        """Return (lower, upper) bounds on the mean of weights in [0, 1] over sums up to the end."""
        tilted = [_Tilted.by(self, weights, tilt, steep) for tilt in tilts]
        best = min(tilted, key=lambda one: one.rounding + one.wrapped)
        value, off = float(np.sum(best.terms())), best.relative  # a pairwise sum
        # NumPy's maximum keeps a NaN, for which `divergence_bound` is trivial.
        high = np.maximum(0.0, value) + best.rounding
        low = np.maximum(0.0, value - best.rounding) * max(0.0, 1 - off)  # both factors may be negative
        return float(np.maximum(0.0, low - best.wrapped)), float(high * (1 + off))


@dataclass(frozen=True, eq=False)
class _Tilted:
    """The same mean with masses times e^{tilt x} and weights times e^{-tilt s}."""

    sums: Sums
    masses: list[np.ndarray]
    firsts: list[np.ndarray]
    """Size-biased masses, with the share of their phases."""
    weights: np.ndarray
    wrapped: float
    relative: float

    @classmethod
    def by(cls, sums_of: Sums, weights: np.ndarray, tilt: float, steep: float) -> "_Tilted":
        lattice, phases = sums_of.lattice, sums_of.mixture.phases
        x, terms = lattice.places, lattice.terms
        logs = sums_of.log_masses(tilt)
        masses = [tilted(dist.masses, tilt * x - log) for dist, log in zip(sums_of.dists, logs, strict=True)]
        firsts = []
        if sums_of.firsts is not None:
            for part, first, log in zip(phases, sums_of.firsts, logs, strict=True):
                firsts.append(tilted(part.number / sums_of.mixture.total * first * x, tilt * x - log))
        log_scale = sum(part.number * log for part, log in zip(phases, logs, strict=True))
        with np.errstate(divide="ignore", over="ignore"):
            log_weights = np.where(weights > 0, np.log(weights) - tilt * lattice.sums, -np.inf)
            scaled = np.exp(log_weights + log_scale)
            log_wrapped = log_weights.max() + sums_of.log_wrapped(tilt, steep)
            wrapped = math.exp(min(100.0, log_wrapped))
        # Every factor of a positive sum is rounded: exponents, and as many masses as there are terms.
        exponents = abs(tilt) * (terms * x[-1] + lattice.sums[-1]) + sum(map(abs, logs)) * terms
        relative = 8 * UNIT * (exponents + 128 * terms + 128)
        return cls(sums_of, masses, firsts, scaled, wrapped, relative)

    @functools.cached_property
    def rounding_of_unit(self) -> float:
        """Rounding error of a mean of weights of 2-norm 1."""
        return sum(rounding_error(product, 1.0, self.sums.lattice.points) for product in self.products())

    @functools.cached_property
    def rounding(self) -> float:
        """Rounding error of the mean."""
        return self.rounding_of_unit * float(np.linalg.norm(self.weights))

    def products(self) -> list[list[Factor]]:
        """Return the factors of each term of the sum: the size-biased X of one kind, then all others."""
        phases = self.sums.mixture.phases
        if not self.firsts:
            return [[Factor(one, part.number) for one, part in zip(self.masses, phases, strict=True)]]
        return [
            [Factor(first, 1)]
            + [
                Factor(one, part.number - (i == j))
                for j, (one, part) in enumerate(zip(self.masses, phases, strict=True))
            ]
            for i, first in enumerate(self.firsts)
        ]

    def terms(self) -> np.ndarray:
        """Return (points,) weighted masses of the sum."""
        return sums(self.products(), self.sums.lattice.points) * self.weights


# -- The two directions ---------------------------------------------------------------------------------


def threshold_of(mixture: Mixture, direction: Direction, epsilon: float, side: int) -> float:
    """Return the sum beyond which (remove) or below which (add) a weight is above 0, rounded to the side."""
    sign = direction.sign
    factor = math.exp(sign * epsilon)
    found = mixture.total * factor - mixture.unused
    return found - sign * side * 2.0**-46 * mixture.total * (1 + factor)


def _remove(mixture: Mixture, epsilon: float, side: int, points: int) -> float:
    """Return `E_P (1 - K / S)_+`, K = alpha b less the unused phases: one X is size-biased, `E[X; .]`."""
    threshold = threshold_of(mixture, Direction.REMOVE, epsilon, side)
    # The truncation reserve follows from a rough lattice's result, until it no longer matters.
    allowed = _RESERVED
    for _ in range(_ATTEMPTS):
        cut = Cut.at(mixture, threshold, allowed)
        counted, reserved = _remove_up_to(mixture, threshold, cut, 1, _MIN_POINTS)
        if reserved <= 20 * _RESERVED * counted or cut.top >= _FURTHEST * threshold:
            break
        allowed = min(allowed / 10, _RESERVED * counted)
    # pyrefly: ignore[unbound-name]
    counted, reserved = _remove_up_to(mixture, threshold, cut, side, points)
    return float(np.maximum(counted + reserved, SMALLEST if side > 0 else 0.0))


def _remove_up_to(
    mixture: Mixture, threshold: float, cut: "Cut", side: int, points: int
) -> tuple[float, float]:
    """Return (part on the lattice or in closed form, reserve); their sum is the bound."""
    lattice = lattice_of(mixture, cut.top + cut.rest, cut.top, points)
    dists = tuple(lattice_distribution(part.mu, lattice, Direction.REMOVE, side) for part in mixture.phases)
    firsts = tuple(dist.masses for dist in dists)
    shares = [part.number / mixture.total for part in mixture.phases]
    weights = np.maximum(0.0, lattice.sums - threshold) / lattice.sums
    tilts = (0.0, cut.tilt) if cut.tilt > 0 else (0.0,)
    if side < 0:
        # Where the size-biased X is beyond the lattice, 1 - K / S is at least 1 - K / X; others are omitted.
        low, _ = Sums(mixture, lattice, dists, firsts).mean(weights, tilts, cut.steep)
        tails = [dist.min_weighted - threshold * dist.max_beyond for dist in dists]
        beyond = sum(share * max(0.0, tail) for share, tail in zip(shares, tails, strict=True))
        return low + beyond * (1 - 1e-12), 0.0
    sums = Sums(mixture, lattice, dists, firsts)
    _, high = sums.mean(weights, tilts, cut.steep)
    beyond, reserved = beyond_lattice(sums, np.array([threshold]))
    wrapped = math.exp(min(0.0, sums.log_wrapped(0.0, cut.steep)))
    return high + float(beyond[0]), reserved + wrapped * (1 + 1e-9)


def beyond_lattice(sums: "Sums", thresholds: np.ndarray) -> tuple[np.ndarray, float]:
    """Return upper bounds on the parts of the remove direction with X, or another, beyond the lattice."""
    mixture, dists, places = sums.mixture, sums.dists, sums.lattice.places
    top = float(places[-1])
    # Beyond K, 1 - K / S is concave in the sum of the others: with their mean it is at most
    # 1 - (K / X) (1 - mean / X).
    each = float(np.max([dist.masses @ places + dist.max_weighted for dist in dists]))
    less = np.where(top > thresholds, thresholds * max(0.0, 1 - mixture.terms * each * (1 + 1e-9) / top), 0.0)
    beyond, others = np.zeros(thresholds.size), 0.0
    for part, dist in zip(mixture.phases, dists, strict=True):
        tail = np.maximum(0.0, dist.max_weighted - less * dist.min_beyond)
        beyond += part.number / mixture.total * tail
        others += part.number * dist.max_beyond
    # A size-biased X on the lattice has the mass E X^, which is 1 up to rounding.
    return beyond * (1 + 1e-9), float(others * np.maximum(1.0, each)) * (1 + 1e-9)


@dataclass(frozen=True)
class Cut:
    """Resolution limits of X (`top`) and of the sum of the others (`rest`); two tilts, `Sums`."""

    top: float
    rest: float
    tilt: float
    steep: float

    @classmethod
    def at(cls, mixture: Mixture, threshold: float, allowed: float, furthest: float = 0.0) -> "Cut":
        """Return the cut beyond which the probability is about `allowed`, or the furthest one."""
        terms, most = mixture.terms, highest(mixture, 1)
        furthest = max(furthest, _FURTHEST * threshold)
        top = 1.2 * threshold
        while top < min(most, furthest) and above(mixture, top, False) > allowed:
            top *= 1.3
        top = min(most, top)
        rough, least, last = Rough.of(mixture, top), terms * 1.01, min(terms * top, furthest)

        def is_beyond(log_rest: float) -> bool:
            return rough.log_chernoff(math.exp(log_rest)) <= math.log(allowed)

        ends = math.log(least), math.log(max(least, last))
        rest = math.exp(min(ends[1], roots.turn(is_beyond, ends[0], 0.14, *ends, absolute=0.07)[1]))
        rest = max(rest, 1.02 * threshold - top)
        return cls(top, rest, rough.tilt_to(threshold), rough.tilt_to(rest))


def lattice_of(mixture: Mixture, span: float, top: float, points: int) -> Lattice:
    """Return a lattice of sums up to about `span`, of X up to about `top`."""
    terms, low = mixture.terms, lowest(mixture)
    step = (span - terms * low) / (points - 4)
    return Lattice(low, step, min(points - 2, math.ceil((top - low) / step)), points, terms)


def _add(mixture: Mixture, epsilon: float, side: int, points: int) -> float:
    """Return `(alpha / b) E_Q (K - S)_+`, K = b / alpha less the unused phases."""
    threshold = threshold_of(mixture, Direction.ADD, epsilon, side)
    if threshold <= 0:
        return 0.0
    terms, low = mixture.terms, lowest(mixture)
    near = low * (1 + 0.1 * min(1.0, *(part.mu for part in mixture.phases)))
    if threshold <= terms * near:
        # One X is below `near` then.
        rest = 0.0
        for part in mixture.phases:
            below, _, error = tails_of(part.mu, np.array([near]), 1.0)
            rest += part.number * float(below[0]) * (1 + error)
        return float(np.maximum(rest * (1 + 1e-9), SMALLEST)) if side > 0 else 0.0
    step = (threshold - terms * low) / (points // 4 - 8)
    top = min(highest(mixture, -1), threshold - (terms - 1) * low)
    lattice = Lattice(low, step, min(points - 2, math.ceil((top - low) / step)), points, terms)
    dists = tuple(lattice_distribution(part.mu, lattice, Direction.ADD, side) for part in mixture.phases)
    rough = Rough.of(mixture, float(lattice.places[-1]))
    tilt, steep = min(0.0, rough.tilt_to(threshold)), rough.tilt_to(lattice.end)
    weights = np.maximum(0.0, threshold - lattice.sums) * (math.exp(epsilon) / mixture.total)
    bounds = Sums(mixture, lattice, dists, None).mean(weights, (0.0, tilt), steep)
    if side < 0:
        return bounds[0]
    beyond = sum(part.number * dist.max_beyond for part, dist in zip(mixture.phases, dists, strict=True))
    return float(np.maximum(bounds[1] + beyond * (1 + 1e-9), SMALLEST))
