"""Hockey-stick divergences of a mixture of orthogonal Gaussian shifts, between two bounds, without draws.

Where all that is random of a unit's participations is one uniform phase of b, and columns share no output,
`f = P/Q = (1/b) sum_j X_j` with independent lognormals `X_j = e^{mu_j z_j - mu_j^2 / 2}` under Q. So

    H(P, Q) = E_Q (S - alpha b)_+ / b,    H(Q, P) = (alpha / b) E_Q (b / alpha - S)_+,    S = sum_j X_j:

means of convex functions of a sum. Each X_j is moved to a lattice such that these means can only grow, or
only shrink, to second order of its step; the law of the sum is one product of Fourier transforms, tilted to
where the mean comes from. What is cut off, what wraps around and every rounding is booked
(proofs/random_allocation.md).
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import scipy

from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.tilted_sums import UNIT, Factor, log_sum, rounding_error, sums, tilted

# Of scipy's normal distribution function, relative; `_tails` adds what its rounded argument does.
_NDTR_ERROR = 1e-12
# Standard deviations of ln X within which X is told apart.
_REACH = 9.5
_FEWEST_POINTS, _MOST_POINTS = 2**14, 2**21
# Of the lattice for each X: bounds from above converge sooner.
_POINTS_A_TERM = {1: 256, -1: 2048}
# Beyond it, epsilon counts as this; and with a larger mu nothing is known but the chance of taking part.
_LARGEST_EPSILON, _LARGEST_MU = 300.0, 15.0
# What may be booked for cut tails, as a part of what the divergence is guessed to be.
_BOOKED = 1e-4
_ATTEMPTS = 6
_FURTHEST = 64.0  # times alpha b


@dataclass(frozen=True)
class Phases:
    """So many phases in which the unit's pattern has the same norm: `mu` is that norm over sigma, above 0."""

    number: int
    mu: float


@dataclass(frozen=True)
class Mixture:
    """One uniform phase; in `unused` of them the unit takes no part at all."""

    phases: tuple[Phases, ...]
    unused: int = 0

    @property
    def terms(self) -> int:
        """Phases in which the unit takes part."""
        return sum(part.number for part in self.phases)

    @property
    def total(self) -> int:
        """b."""
        return self.terms + self.unused


@functools.lru_cache(maxsize=64)
def divergence_bound(
    mixture: Mixture, epsilon: float, direction: str, side: int, points: int | None = None
) -> float:
    """The upper (`side` 1) or lower (-1) bound on one direction's divergence, in [0, 1].

    Args:
      mixture: what `f` is.
      epsilon: natural log, at least 0.
      direction: "remove" or "add".
      points: of the lattice of sums, a power of two; by default as the number of phases needs.
    """
    direction = Direction.of(direction)
    extreme = any(part.mu > _LARGEST_MU for part in mixture.phases)
    if not mixture.phases or (side < 0 and (extreme or epsilon > _LARGEST_EPSILON)):
        return 0.0
    most = mixture.terms / mixture.total * (1 + 2.0**-50)  # the unit takes no part otherwise
    if extreme:
        return min(1.0, most)
    epsilon = min(epsilon, _LARGEST_EPSILON)
    of = _remove if direction == Direction.REMOVE else _add
    found = of(mixture, epsilon, side, points or _points(mixture, side))
    # Not a number says nothing.
    found = float(found) if 0 <= found <= 1 else float(side > 0)
    return min(found, most)


def _points(mixture: Mixture, side: int) -> int:
    wanted = min(max(_POINTS_A_TERM[side] * mixture.terms, _FEWEST_POINTS), _MOST_POINTS)
    return 1 << math.ceil(math.log2(wanted))


# -- One X on a lattice ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Lattice:
    """X at `low + step i`, i = 0 .. cells; sums of `terms` of them at `points` places."""

    low: float
    step: float
    cells: int
    points: int
    terms: int

    @functools.cached_property
    def places(self) -> np.ndarray:
        """(cells + 1,) of one X."""
        return self.low + self.step * np.arange(self.cells + 1)

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """(points,)"""
        return self.terms * self.low + self.step * np.arange(self.points)

    @property
    def end(self) -> float:
        """The first sum that is not told apart from a smaller one."""
        return self.terms * self.low + self.step * self.points

    @property
    def wraps(self) -> bool:
        return self.cells * self.terms >= self.points


@dataclass(frozen=True, eq=False)
class _Law:
    """X on a lattice. `masses` are of X there; what is beyond it, on the side that weighs, is not in them."""

    masses: np.ndarray
    least_beyond: float
    """P(X beyond) is between this and `most_beyond`."""
    most_beyond: float
    least_weighted: float
    """E[X; X beyond] is between this and `most_weighted`."""
    most_weighted: float


def _tails(mu: float, x: np.ndarray, sign: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(P(X beyond x), E[X; X beyond x], relative error): above for `sign` -1, below for 1."""
    logs = np.log(x)
    z = (logs + mu * mu / 2) / mu
    # x, ln x, the sum and z are rounded, and the slope of ln ndtr at z is at most |z| + 1.
    rounded = 8 * UNIT * (2 + np.abs(logs).max() + mu * mu) / mu
    error = _NDTR_ERROR + rounded * (np.abs(z).max() + mu + 1)
    return scipy.special.ndtr(sign * z), scipy.special.ndtr(sign * (z - mu)), error


def lattice_law(mu: float, lattice: _Lattice, direction: str, side: int) -> _Law:
    """The law of X on the lattice: means of convex functions that rise ("remove") or fall ("add") in every X
    are at least what they are for X itself (`side` 1), or at most (-1).

    Written for rising ones, by the tail T(x) = P(X >= x) and its mean over each cell; for falling ones it is
    the same with the order turned round and T(x) = P(X <= x).
    """
    rising = direction == Direction.REMOVE
    x = lattice.places
    tail, weighted, error = _tails(mu, x, -1.0 if rising else 1.0)
    parts = x * tail
    # By parts, the integral of T over a cell; of numbers that may be close to each other.
    mean = (np.diff(parts) - np.diff(weighted)) / lattice.step
    slack = (error + 4 * UNIT) * (parts[1:] + parts[:-1] + weighted[1:] + weighted[:-1]) / lattice.step
    if not rising:
        tail, mean, slack = tail[::-1], mean[::-1], slack[::-1]
    last = -1 if rising else 0
    high, low = np.minimum(1.0, tail * (1 + error)), tail * (1 - error)
    if side > 0:
        # Split between both ends of its cell X keeps its mean: P(X^ beyond a place) is the mean of T over the
        # next cell. What is before the first place is moved up to it.
        beyond = np.minimum(mean + slack, high[:-1])
        beyond = np.maximum.accumulate(beyond[::-1])[::-1]
        masses = np.append(1.0, beyond) - np.append(beyond, low[-1])
    else:
        # Half of each cell goes up at most, to where as much comes down to meet it; all else goes down.
        comes_down = np.maximum(0.0, np.append(mean[1:] - slack[1:] - high[2:], 0.0))
        goes_up = high[:-1] - np.maximum(0.0, mean - slack)
        share = (
            np.minimum(1.0, np.divide(comes_down, goes_up, out=np.zeros_like(mean), where=goes_up > 0)) / 2
        )
        beyond = low[1:] + np.maximum(0.0, low[:-1] - high[1:]) * share
        beyond = np.minimum.accumulate(np.append(low[0], beyond))
        masses = beyond - np.append(beyond[1:], high[-1])
    masses = np.maximum(0.0, masses)
    outside = low[-1], high[-1], weighted[last] * (1 - error), weighted[last] * (1 + error)
    return _Law(masses if rising else masses[::-1].copy(), *map(float, outside))


# -- Where a lattice should be: a rough model, on which only the width of the bounds hangs --------------


@dataclass(frozen=True, eq=False)
class _Rough:
    """Quadrature nodes of each X up to `most`."""

    parts: tuple[tuple[int, np.ndarray, np.ndarray], ...]
    """(number, places, ln of their weights)"""

    @classmethod
    def of(cls, mixture: Mixture, most: float) -> "_Rough":
        parts = []
        for part in mixture.phases:
            nodes = int(min(max(20 * part.mu * (2 * _REACH + part.mu), 400), 6000))
            z = np.linspace(-_REACH, _REACH + part.mu, nodes)
            x = np.exp(part.mu * z - part.mu**2 / 2)
            log_weights = math.log(z[1] - z[0]) - z * z / 2 - math.log(2 * math.pi) / 2
            # The lowest node stays: all of one phase's nodes can be above `most`, which another's set.
            kept = max(1, int(np.searchsorted(x, most, side="right")))
            parts.append((part.number, x[:kept], log_weights[:kept]))
        return cls(tuple(parts))

    def log_moment(self, tilt: float) -> tuple[float, float]:
        """(ln E e^{tilt S}, mean of S under that tilt)."""
        log, mean = 0.0, 0.0
        for number, x, log_weights in self.parts:
            exponents = tilt * x + log_weights
            top = exponents.max()
            tilted = np.exp(exponents - top)
            mass = tilted.sum()
            log += number * (top + math.log(mass))
            mean += number * float(tilted @ x) / mass
        return log, mean

    def tilt_to(self, target: float) -> float:
        """The tilt whose mean is `target`, about; 80 doublings at most."""
        sign = 1.0 if self.log_moment(0.0)[1] < target else -1.0

        def passed(tilt):
            return sign * (self.log_moment(tilt)[1] - target) >= 0

        far = sign / target
        for _ in range(60):
            if passed(far):
                break
            far *= 2
        near = 0.0
        for _ in range(24):
            middle = (near + far) / 2
            near, far = (near, middle) if passed(middle) else (middle, far)
        return far

    def log_chernoff(self, target: float) -> float:
        tilt = self.tilt_to(target)
        return self.log_moment(tilt)[0] - tilt * target


# -- Sums -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sums:
    """Means of weights of sums of independent X; in the remove direction one of them is size-biased.

    With `biased`, the mean is `sum_t (number_t / b) E[X_t; weight(S)]`, which is that under P.
    """

    mixture: Mixture
    lattice: _Lattice
    laws: tuple[_Law, ...]
    firsts: tuple[np.ndarray, ...] | None
    """Masses of the X that is size-biased, not weighted yet; None where none is."""

    def log_masses(self, tilt: float) -> list[float]:
        """ln sum e^{tilt x} mass(x) of each law."""
        return [log_sum(tilt * self.lattice.places, law.masses) for law in self.laws]

    def log_first(self, tilt: float) -> float:
        """ln sum_t (number_t / b) E[X_t e^{tilt X_t}], or 0 where none is size-biased."""
        if self.firsts is None:
            return 0.0
        x, total = self.lattice.places, self.mixture.total
        return _log_add(
            [
                math.log(part.number / total) + log_sum(tilt * x, first * x)
                for part, first in zip(self.mixture.phases, self.firsts, strict=True)
            ]
        )

    def log_others(self, tilt: float) -> float:
        """At least ln E e^{tilt S} of all X, or of all but the one that is size-biased."""
        logs = self.log_masses(tilt)
        log = sum(part.number * one for part, one in zip(self.mixture.phases, logs, strict=True))
        # Without the smallest: at least what any other choice leaves.
        return log - (min(logs) if self.firsts is not None else 0.0)

    def log_wrapped(self, tilt: float, steep: float) -> float:
        """At least ln of E e^{tilt S} from sums beyond the end: Chernoff's bound by the tilt `steep`.

        The size-biased X is at most the last place, so that the others are beyond the rest.
        """
        if not self.lattice.wraps:
            return -math.inf
        steep = max(steep, tilt)
        rest = self.lattice.end - (self.lattice.places[-1] if self.firsts is not None else 0.0)
        return self.log_first(tilt) + self.log_others(steep) - (steep - tilt) * rest + 1e-9

    def mean(self, weights: np.ndarray, tilts: tuple[float, ...], steep: float) -> tuple[float, float]:
        """(lower, upper) bounds on the mean of weights in [0, 1] over sums up to the end."""
        tilted = [_Tilted.by(self, weights, tilt, steep) for tilt in tilts]
        best = min(tilted, key=lambda one: one.rounding + one.wrapped)
        value, off = best.value(), best.relative
        high = (max(0.0, value) + best.rounding) * (1 + off)
        return max(0.0, (value - best.rounding) * (1 - off) - best.wrapped), high


@dataclass(frozen=True, eq=False)
class _Tilted:
    """The same mean with masses times e^{tilt x} and weights times e^{-tilt s}."""

    sums: _Sums
    masses: list[np.ndarray]
    firsts: list[np.ndarray]
    """Size-biased, with the share of their phases."""
    weights: np.ndarray
    wrapped: float
    rounding: float
    relative: float

    @classmethod
    def by(cls, sums_of: _Sums, weights: np.ndarray, tilt: float, steep: float) -> "_Tilted":
        lattice, phases = sums_of.lattice, sums_of.mixture.phases
        x, terms = lattice.places, lattice.terms
        logs = sums_of.log_masses(tilt)
        masses = [tilted(law.masses, tilt * x - log) for law, log in zip(sums_of.laws, logs, strict=True)]
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
        found = cls(sums_of, masses, firsts, scaled, wrapped, 0.0, 0.0)
        norm = float(np.linalg.norm(scaled))
        rounding = sum(rounding_error(product, norm, lattice.points) for product in found.products())
        # Every factor of a positive sum is rounded: exponents, and as many masses as there are terms.
        exponents = abs(tilt) * (terms * x[-1] + lattice.sums[-1]) + sum(map(abs, logs)) * terms
        relative = 8 * UNIT * (exponents + 128 * terms + 128)
        return replace(found, rounding=rounding, relative=relative)

    def products(self) -> list[list[Factor]]:
        """Factors of each term of the sum: the size-biased X of one kind, then all others."""
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

    def value(self) -> float:
        # A pairwise sum.
        return float(np.sum(sums(self.products(), self.sums.lattice.points) * self.weights))


def _log_add(logs: list[float]) -> float:
    return float(np.logaddexp.reduce(logs))


# -- The two directions ---------------------------------------------------------------------------------


def _threshold(mixture: Mixture, direction: Direction, epsilon: float, side: int) -> float:
    """The sum beyond which (remove) or below which (add) a weight is above 0, rounded to the side."""
    sign = direction.sign
    factor = math.exp(sign * epsilon)
    found = mixture.total * factor - mixture.unused
    return found - sign * side * 2.0**-46 * mixture.total * (1 + factor)


def _lowest(mixture: Mixture) -> float:
    return min(math.exp(-_REACH * part.mu - part.mu**2 / 2) for part in mixture.phases)


def _highest(mixture: Mixture, sign: int) -> float:
    """Where the tail of X itself (-1) or of the size-biased X (1) ends, about."""
    return max(math.exp(_REACH * part.mu + sign * part.mu**2 / 2) for part in mixture.phases)


def _above(mixture: Mixture, x: float, biased: bool) -> float:
    """About P(X > x) of all X together, or the share of size-biased ones above x."""
    found = 0.0
    for part in mixture.phases:
        z = (math.log(x) - (1 if biased else -1) * part.mu**2 / 2) / part.mu
        found += part.number * float(scipy.special.ndtr(-z))
    return found / mixture.total if biased else found


def _remove(mixture: Mixture, epsilon: float, side: int, points: int) -> float:
    """`E_P (1 - K / S)_+`, K = alpha b less the phases not used: one X is size-biased, `E[X; .]`."""
    threshold = _threshold(mixture, Direction.REMOVE, epsilon, side)
    # What may be booked follows from a rough lattice's result, until it no longer matters.
    allowed = _BOOKED
    for _ in range(_ATTEMPTS):
        cut = _Cut.at(mixture, threshold, allowed)
        counted, booked = _remove_up_to(mixture, threshold, cut, 1, _FEWEST_POINTS)
        if booked <= 20 * _BOOKED * counted or cut.top >= _FURTHEST * threshold:
            break
        allowed = min(allowed / 10, _BOOKED * counted)
    counted, booked = _remove_up_to(mixture, threshold, cut, side, points)
    return min(1.0, counted + booked)


def _remove_up_to(
    mixture: Mixture, threshold: float, cut: "_Cut", side: int, points: int
) -> tuple[float, float]:
    """(counted on the lattice or in closed form, booked besides); their sum is the bound."""
    lattice = cut.lattice(points)
    top, terms = float(lattice.places[-1]), mixture.terms
    laws = tuple(lattice_law(part.mu, lattice, Direction.REMOVE, side) for part in mixture.phases)
    firsts = tuple(law.masses for law in laws)
    shares = [part.number / mixture.total for part in mixture.phases]
    weights = np.maximum(0.0, lattice.sums - threshold) / lattice.sums
    tilts = (0.0, cut.tilt) if cut.tilt > 0 else (0.0,)
    if side < 0:
        # Where the size-biased X is beyond the lattice, 1 - K / S is at least 1 - K / X; others are left out.
        low, _ = _Sums(mixture, lattice, laws, firsts).mean(weights, tilts, cut.steep)
        tails = [law.least_weighted - threshold * law.most_beyond for law in laws]
        beyond = sum(share * max(0.0, tail) for share, tail in zip(shares, tails, strict=True))
        return low + beyond * (1 - 1e-12), 0.0
    sums = _Sums(mixture, lattice, laws, firsts)
    _, high = sums.mean(weights, tilts, cut.steep)
    # Beyond K, 1 - K / S is concave in the sum of the others: with their mean it is at most
    # 1 - (K / X) (1 - mean / X).
    mean = terms * max(float(law.masses @ lattice.places) + law.most_weighted for law in laws)
    less = threshold * max(0.0, 1 - mean * (1 + 1e-9) / top) if top > threshold else 0.0
    tails = [law.most_weighted - less * law.least_beyond for law in laws]
    beyond = sum(share * max(0.0, tail) for share, tail in zip(shares, tails, strict=True))
    others = sum(part.number * law.most_beyond for part, law in zip(mixture.phases, laws, strict=True))
    wrapped = math.exp(min(0.0, sums.log_wrapped(0.0, cut.steep)))
    # A size-biased X on the lattice has the mass E X^, 1 but for rounding.
    booked = (others * max(1.0, mean / terms) + wrapped) * (1 + 1e-9)
    return high + beyond * (1 + 1e-9), booked


@dataclass(frozen=True)
class _Cut:
    """Up to where X (`top`) and the sum of the others (`rest`) are told apart; two tilts, `_Sums`."""

    low: float
    top: float
    rest: float
    terms: int
    tilt: float
    steep: float

    @classmethod
    def at(cls, mixture: Mixture, threshold: float, allowed: float) -> "_Cut":
        """Where what is beyond has a probability of about `allowed`."""
        terms, low, most = mixture.terms, _lowest(mixture), _highest(mixture, 1)
        top = 1.2 * threshold
        while top < min(most, _FURTHEST * threshold) and _above(mixture, top, False) > allowed:
            top *= 1.3
        top = min(most, top)
        rough, rest = _Rough.of(mixture, top), terms * 1.01
        while (
            rest < terms * top
            and rest < _FURTHEST * threshold
            and rough.log_chernoff(rest) > math.log(allowed)
        ):
            rest *= 1.15
        rest = max(rest, 1.02 * threshold - top)
        return cls(low, top, rest, terms, rough.tilt_to(threshold), rough.tilt_to(rest))

    def lattice(self, points: int) -> _Lattice:
        step = (self.top + self.rest - self.terms * self.low) / (points - 4)
        cells = min(points - 2, math.ceil((self.top - self.low) / step))
        return _Lattice(self.low, step, cells, points, self.terms)


def _add(mixture: Mixture, epsilon: float, side: int, points: int) -> float:
    """`(alpha / b) E_Q (K - S)_+`, K = b / alpha less the phases not used."""
    threshold = _threshold(mixture, Direction.ADD, epsilon, side)
    if threshold <= 0:
        return 0.0
    terms, low = mixture.terms, _lowest(mixture)
    near = low * (1 + 0.1 * min(1.0, *(part.mu for part in mixture.phases)))
    if threshold <= terms * near:
        # Some X is below `near` then.
        rest = 0.0
        for part in mixture.phases:
            below, _, error = _tails(part.mu, np.array([near]), 1.0)
            rest += part.number * float(below[0]) * (1 + error)
        return min(1.0, rest * (1 + 1e-9)) if side > 0 else 0.0
    step = (threshold - terms * low) / (points // 4 - 8)
    top = min(_highest(mixture, -1), threshold - (terms - 1) * low)
    lattice = _Lattice(low, step, min(points - 2, math.ceil((top - low) / step)), points, terms)
    laws = tuple(lattice_law(part.mu, lattice, Direction.ADD, side) for part in mixture.phases)
    rough = _Rough.of(mixture, float(lattice.places[-1]))
    tilt, steep = min(0.0, rough.tilt_to(threshold)), rough.tilt_to(lattice.end)
    weights = np.maximum(0.0, threshold - lattice.sums) * (math.exp(epsilon) / mixture.total)
    bounds = _Sums(mixture, lattice, laws, None).mean(weights, (0.0, tilt), steep)
    if side < 0:
        return min(1.0, bounds[0])
    beyond = sum(part.number * law.most_beyond for part, law in zip(mixture.phases, laws, strict=True))
    return min(1.0, bounds[1] + beyond * (1 + 1e-9))
