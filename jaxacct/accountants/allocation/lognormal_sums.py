"""Hockey-stick divergences of a mixture of orthogonal Gaussian shifts, bounded without samples.

With `f = (1/b) sum_j X_j` as in `lognormal_lattice`, S the sum and `alpha = e^epsilon`,

    H(P, Q) = E_Q (S - alpha b)_+ / b,

the mean of a convex function of a sum. Each X_j is moved to a lattice such that such means can only increase,
to second order of its step; the distribution of the sum is one product of Fourier transforms, tilted to where
the mean comes from. Bounds include every rounding (proofs/random_allocation.md).
The add direction is at most this one (proofs/add_direction.md, theorem 1).
"""

import functools
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxacct.accountants.allocation import lognormal_lattice
from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Rough, tails_of
from jaxacct.statistics import roots
from jaxacct.statistics.composed_losses import bounded
from jaxacct.statistics.tilted_sums import UNIT, Factors, Variable, log_sum, rounding_error, sums, tilted

_MIN_POINTS, _MAX_POINTS, _POINTS_A_TERM = 2**14, 2**21, 256
# A larger epsilon counts as this; with a larger mu only the probability of participation is used.
_MAX_EPSILON, _MAX_MU = 300.0, 15.0
_ATTEMPTS = 6  # lattices for one threshold
_FURTHEST = 64.0  # times alpha b
# Truncated probability over the divergence, and, of tables, the step over the standard deviation of X.
_CUT, _STEP = 1e-9, 0.02
# Error over the bound from which the next lattice serves, and the bound from which a table is flat.
_MAX_ERROR, _FLOOR = 1e-3, 1e-18
# Of a bound at one epsilon: truncated probability, and the error over it that no other lattice can improve.
_CUT_OF_ONE, _MAX_ERROR_OF_ONE = 1e-7, 1e-4
# Of far tails: places of the sum, and of the chords; the reserve over the divergence.
_TAIL_POINTS, _TAIL_NODES, _TWO_LARGE = 2**16, 512, 1e-5
_THRESHOLDS = 256  # of one lattice but the first
Bounds: TypeAlias = tuple[np.ndarray, np.ndarray]  # of every threshold, and their errors


@functools.lru_cache(maxsize=64)
def divergence_bound(mixture: Mixture, epsilon: float) -> float:
    """Return an upper bound on the divergence at an epsilon of at least 0, in [0, 1].

    By the lattice of a table, then by those of far tails while they give smaller bounds.
    """
    if not mixture.phases:
        return 0.0
    participation = mixture.terms / mixture.total * (1 + 2.0**-50)  # the unit does not participate otherwise
    if any(part.mu > _MAX_MU for part in mixture.phases):
        return min(1.0, participation)
    thresholds = np.array([threshold_of(mixture, min(epsilon, _MAX_EPSILON))])
    points = min(max(_POINTS_A_TERM * mixture.terms, _MIN_POINTS), _MAX_POINTS)
    bounds, errors = _untilted(
        mixture, thresholds, Cut.at(mixture, float(thresholds[0]), _CUT_OF_ONE), points
    )
    found = 1.0
    for _ in range(_ATTEMPTS):
        before, found = found, min(found, float(bounded(bounds)[0]))
        if errors[0] <= _MAX_ERROR_OF_ONE * found or found > 0.9 * before:
            break
        bounds, errors = _tail(mixture, thresholds, found, max(points, _TAIL_POINTS))
    return min(found, participation)


def divergence_table(
    mixture: Mixture, epsilons: np.ndarray, cut: float = _CUT, points: int = 2**16
) -> np.ndarray:
    """Return upper bounds on the divergence at many ascending epsilons of either sign.

    A lattice is cut and tilted for the first epsilon at which the lattice before it has too large an error.
    Bounds fall to about 1e-18, after which the table is flat (proofs/random_allocation.md, section 7). The
    mixture is of mu up to 15. The first lattice has at least so many `points`, and probability of about `cut`
    beyond it.
    """
    thresholds = np.array([threshold_of(mixture, float(epsilon)) for epsilon in epsilons])
    # f is above every alpha with a threshold below 0, rounded down: the divergence is 1 - alpha.
    below = -np.expm1(np.minimum(epsilons, 0.0)) * (1 + 8 * UNIT) + np.where(epsilons < 0, 2.0**-44, 0.0)
    found = np.where(thresholds > 0, 1.0, below)
    used = np.flatnonzero(thresholds > 0)
    height = 1.0
    while used.size:
        if height == 1:
            step = _STEP * min(math.sqrt(math.expm1(part.mu**2)) for part in mixture.phases)
            first = max(float(thresholds[used[0]]), mixture.terms)
            at = Cut.at(mixture, first, cut, 0.4 * _MAX_POINTS * step)
            size = min(max((at.top + at.rest) / step, points), _MAX_POINTS)
            bounds, errors = _untilted(mixture, thresholds[used], at, size)
        else:
            bounds, errors = _tail(mixture, thresholds[used[:_THRESHOLDS]], height, _TAIL_POINTS)
        # A lattice whose first error is too large is the last one.
        bounds = bounded(bounds)
        good = np.append(errors <= _MAX_ERROR * bounds, False)
        end = int(np.argmin(good)) or bounds.size
        found[used[:end]] = np.minimum(height, bounds[:end])
        height = float(found[used[:end]].min())
        used = used[end:]
        if height <= _FLOOR:
            found[used] = height
            break
    return bounded(found)


# -- Sums -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of independent X on a lattice; one of them is size-biased, as under P.

    A mean is `sum_t (number_t / b) E[X_t; weight(S)]`.
    """

    mixture: Mixture
    lattice: lognormal_lattice.Lattice
    dists: tuple[lognormal_lattice.Distribution, ...]

    @classmethod
    def of(cls, mixture: Mixture, span: float, top: float, points: int) -> "Sums":
        """Return sums on a lattice up to about `span`, of X up to about `top`."""
        low = lognormal_lattice.lowest(mixture)
        step = (span - mixture.terms * low) / (points - 4)
        cells = min(points - 2, math.ceil((top - low) / step))
        lattice = lognormal_lattice.Lattice(low, step, cells, points, mixture.terms)
        dists = (lognormal_lattice.lattice_distribution(part.mu, lattice) for part in mixture.phases)
        return cls(mixture, lattice, tuple(dists))

    def log_masses(self, tilt: float) -> list[float]:
        """Return ln sum e^{tilt x} mass(x) of each distribution."""
        return [log_sum(tilt * self.lattice.places, dist.masses) for dist in self.dists]

    def log_others(self, tilt: float) -> np.ndarray:
        """Return ln E e^{tilt S} of all X but one, (kinds,) for each kind of that one."""
        logs = np.array(self.log_masses(tilt))
        return np.array([part.number for part in self.mixture.phases]) @ logs - logs

    def log_wrapped(self, steep: float) -> float:
        """Return an upper bound on ln P(sum beyond the end), by Chernoff with a tilt of at least 0.

        The size-biased X is at most the last place, so that the others are beyond the rest.
        """
        lattice, x, steep = self.lattice, self.lattice.places, max(steep, 0.0)
        if lattice.cells * lattice.terms < lattice.points:
            return -math.inf
        logs = [
            math.log(part.number / self.mixture.total) + log_sum(np.zeros(x.size), dist.masses * x)
            for part, dist in zip(self.mixture.phases, self.dists, strict=True)
        ]
        rest = lattice.end - x[-1]
        return float(np.logaddexp.reduce(logs + self.log_others(steep))) - steep * rest + 1e-9

    def bounds(self, thresholds: np.ndarray, tilt: float) -> Bounds:
        """Return upper bounds on E (1 - K/S)_+ on the lattice for every threshold K, and errors.

        By running sums of tilted masses from the far end, where the weights are 1. Errors are what rounding
        adds to the bounds.
        """
        lattice, phases = self.lattice, self.mixture.phases
        x, terms, places = lattice.places, lattice.terms, lattice.sums
        counts = lattice.points - np.searchsorted(places, thresholds)

        def running(values: np.ndarray) -> np.ndarray:
            return np.append(0.0, np.cumsum(values[::-1]))[counts]

        logs = self.log_masses(tilt)
        products = self._products(tilt, logs)
        log_scale = sum(part.number * log for part, log in zip(phases, logs, strict=True))
        # Every factor of a positive sum is rounded: exponents, and as many masses as there are terms.
        exponents = abs(tilt) * (terms * x[-1] + places[-1]) + sum(map(abs, logs)) * terms
        relative = 8 * UNIT * (exponents + 128 * terms + 128)
        with np.errstate(over="ignore", invalid="ignore"):  # at the other end, which no threshold reaches
            weights = np.exp(log_scale - tilt * places)
            masses = sums(products, lattice.points) * weights
            counted = np.maximum(0.0, running(masses) - running(masses / places) * thresholds)
            unit = sum(rounding_error(product, 1.0, lattice.points) for product in products)
            errors = unit * np.sqrt(running(weights**2)) + 4 * lattice.points * UNIT * running(np.abs(masses))
        return (counted + errors) * (1 + relative), errors

    def _products(self, tilt: float, logs: list[float]) -> list[Factors]:
        """Return the tilted factors of each term: the size-biased X of one kind, then all others."""
        x, phases, points = self.lattice.places, self.mixture.phases, self.lattice.points
        ones = [
            Variable(tilted(dist.masses, tilt * x - log), points)
            for dist, log in zip(self.dists, logs, strict=True)
        ]
        found = []
        for i, (part, dist, log) in enumerate(zip(phases, self.dists, logs, strict=True)):
            biased = tilted(part.number / self.mixture.total * dist.masses * x, tilt * x - log)
            others = [
                (one, other.number - (i == j))
                for j, (one, other) in enumerate(zip(ones, phases, strict=True))
            ]
            found.append([(Variable(biased, points), 1), *others])
        return found

    def beyond(self, thresholds: np.ndarray, steep: float) -> tuple[np.ndarray, float]:
        """Return upper bounds on the parts with the size-biased X beyond the lattice, and on all other ones.

        Those are another X, or the sum, beyond the lattice.
        """
        places, terms = self.lattice.places, self.mixture.terms
        top = float(places[-1])
        # Beyond K, 1 - K / S is concave in the sum of the others: with their mean it is at most
        # 1 - (K / X) (1 - mean / X).
        each = float(np.max([dist.masses @ places + dist.max_weighted for dist in self.dists]))
        room = max(0.0, 1 - terms * each * (1 + 1e-9) / top)
        less = np.where(top > thresholds, thresholds * room, 0.0)
        beyond, others = np.zeros(thresholds.size), 0.0
        for part, dist in zip(self.mixture.phases, self.dists, strict=True):
            tail = np.maximum(0.0, dist.max_weighted - less * dist.min_beyond)
            beyond += part.number / self.mixture.total * tail
            others += part.number * dist.max_beyond
        # A size-biased X on the lattice has the mass E X^, which is 1 up to rounding.
        others = float(others * np.maximum(1.0, each)) + math.exp(min(0.0, self.log_wrapped(steep)))
        return beyond * (1 + 1e-9), others * (1 + 1e-9)


def threshold_of(mixture: Mixture, epsilon: float) -> float:
    """Return the sum beyond which a weight is above 0, rounded down."""
    factor = math.exp(epsilon)
    return mixture.total * factor - mixture.unused - 2.0**-46 * mixture.total * (1 + factor)


@dataclass(frozen=True)
class Cut:
    """Resolution limits of X (`top`) and of the sum of the others (`rest`), by a rough model."""

    top: float
    rest: float
    rough: Rough

    @classmethod
    def at(cls, mixture: Mixture, threshold: float, allowed: float, furthest: float = 0.0) -> "Cut":
        """Return the cut beyond which the probability is about `allowed`, or the furthest one."""
        terms, most = mixture.terms, lognormal_lattice.highest(mixture)
        furthest = max(furthest, _FURTHEST * threshold)
        top = 1.2 * threshold
        while top < min(most, furthest) and lognormal_lattice.above(mixture, top) > allowed:
            top *= 1.3
        top = min(most, top)
        rough, least, last = Rough.of(mixture, top), terms * 1.01, min(terms * top, furthest)

        def is_beyond(log_rest: float) -> bool:
            return rough.log_chernoff(math.exp(log_rest)) <= math.log(allowed)

        ends = math.log(least), math.log(max(least, last))
        rest = math.exp(min(ends[1], roots.turn(is_beyond, ends[0], 0.14, *ends, absolute=0.07)[1]))
        return cls(top, max(rest, 1.02 * threshold - top), rough)


# -- Tables ---------------------------------------------------------------------------------------------


def _untilted(mixture: Mixture, thresholds: np.ndarray, cut: Cut, points: float) -> Bounds:
    """Return bounds of all thresholds and their errors, by a lattice of so many points or more."""
    found = Sums.of(mixture, cut.top + cut.rest, cut.top, 1 << math.ceil(math.log2(points)))
    bounds, errors = found.bounds(thresholds, 0.0)
    beyond, reserve = found.beyond(thresholds, cut.rough.tilt_to(cut.rest))
    # A threshold near the top leaves no room for the sum of the others.
    coarse = np.where(1.05 * thresholds > found.lattice.places[-1], beyond, 0.0)
    return bounds + beyond + reserve, errors + reserve + coarse


def _tail(mixture: Mixture, thresholds: np.ndarray, height: float, points: int) -> Bounds:
    """Return bounds of far thresholds and their errors: no X above a top, one of them, or two and more.

    Sums of X below the top are tilted; lognormals themselves have no moments to tilt by. `height` is about
    the bound of the first threshold.
    """
    first, terms = float(thresholds[0]), mixture.terms
    top = first * max(0.25, 1.2 / terms)
    while top < first and _two_large(mixture, top) > _TWO_LARGE * height:
        top *= 1.1
    top = min(top, lognormal_lattice.highest(mixture))
    rough = Rough.of(mixture, top)
    tilt, end = max(0.0, rough.tilt_to(first)), min(1.2 * first, terms * top)
    log_cut = math.log(_CUT) + rough.log_moment(tilt)[0]
    while end < terms * top and rough.log_chernoff(end) + tilt * end > log_cut:
        end *= 1.1
    found = Sums.of(mixture, end + 1.01 * top, top, 1 << math.ceil(math.log2(points)))
    # Any tilt bounds what wraps; that of the model may be too steep, as it ends at its reach.
    steep = min((tilt, rough.tilt_to(end), 1 / end), key=found.log_wrapped)
    bounds, errors = found.bounds(thresholds, tilt)
    reserve = math.exp(min(0.0, found.log_wrapped(steep)))
    reserve += _two_large(mixture, float(found.lattice.places[-1]))
    for i in range(len(found.dists)):
        one, error = _one_large(found, i, thresholds, steep)
        bounds, errors = bounds + one, errors + error
    return (bounds + reserve) * (1 + 1e-9), errors + reserve


def _two_large(mixture: Mixture, top: float) -> float:
    """Return a bound on `E[S; two X or more above the top] / b`."""
    num, sizes = 0.0, 0.0
    for part in mixture.phases:
        tail, weighted, error = tails_of(part.mu, np.array([top]))
        num += part.number * float(tail[0]) * (1 + error)
        sizes += part.number * float(weighted[0]) * (1 + error)
    # One of the two, or another X, whose mean is 1.
    return (sizes * num + mixture.terms * num**2 / 2) / mixture.total * (1 + 1e-9)


def _one_large(sums_of: Sums, place: int, thresholds: np.ndarray, steep: float) -> Bounds:
    """Return bounds on `sum_j E[(X_j + S' - K)_+; X_j above the top] / b` for phases of one kind, and errors.

    S' is the sum of the others, all at most the top: `E (X - y)_+` of X above the top is convex in
    `y = K - S'`, so that chords between few places of S' bound it.
    """
    mixture, lattice, part = sums_of.mixture, sums_of.lattice, sums_of.mixture.phases[place]
    factors = [
        (Variable(dist.masses, lattice.points), one.number - (i == place))
        for i, (dist, one) in enumerate(zip(sums_of.dists, mixture.phases, strict=True))
    ]
    # The others of a mixture of one phase are at 0.
    masses = (
        sums([factors], lattice.points) if mixture.terms > 1 else np.append(1.0, np.zeros(lattice.points - 1))
    )
    each = lattice.points // _TAIL_NODES
    index, share = np.divmod(np.arange(lattice.points) / each, 1.0)
    index = index.astype(int)
    nodes = np.bincount(index, masses * (1 - share), _TAIL_NODES + 1)
    nodes += np.bincount(index + 1, masses * share, _TAIL_NODES + 1)
    places = (mixture.terms - 1) * lattice.low + lattice.step * each * np.arange(_TAIL_NODES + 1)
    y = thresholds[:, None] - places * (1 + 8 * UNIT)
    top = float(lattice.places[-1])
    tail, weighted, error = tails_of(part.mu, np.maximum(y, top))
    means = weighted - y * tail + (error + 8 * UNIT) * (weighted + np.abs(y) * tail)
    unit = rounding_error(factors, 1.0, lattice.points) if mixture.terms > 1 else 0.0
    # Rounding of the transform, of the running of chords, and sums beyond the end, which wrap.
    errors = unit * np.sqrt(each * (means**2).sum(axis=1)) + 4 * lattice.points * UNIT * (
        means @ np.abs(nodes)
    )
    lost = math.exp(min(0.0, sums_of.log_others(steep)[place] - steep * lattice.end + steep * top))
    last = float(tails_of(part.mu, np.array([top]))[1][0]) * (1 + error)
    errors = errors + lost * last * (1 + lattice.end / top)
    share_of = part.number / mixture.total * (1 + 1024 * UNIT * (mixture.terms + 1))  # rounded masses
    return share_of * (np.maximum(0.0, means @ nodes) + errors), share_of * errors
