"""Divergences of a mixture of orthogonal Gaussian shifts at many epsilons, from above, for compositions.

The sums are those of `lognormal_sums`; one lattice serves many epsilons (proofs/random_allocation.md, section
7).
"""

import math

import numpy as np

from jaxacct.accountants.allocation.lognormal_lattice import (
    Mixture,
    Rough,
    highest,
    lattice_distribution,
    lowest,
    tails_of,
)
from jaxacct.accountants.allocation.lognormal_sums import (
    MAX_POINTS,
    Cut,
    Sums,
    beyond_lattice,
    lattice_of,
    threshold_of,
)
from jaxacct.statistics.composed_losses import SMALLEST
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.tilted_sums import UNIT, Factor, rounding_error, sums

# Truncated probability over the divergence, and the step over the standard deviation of X.
_CUT, _STEP, _MIN_POINTS = 1e-9, 0.02, 2**16
# Error over the bound from which the next lattice serves, and the bound from which a table is flat.
_MAX_ERROR, _FLOOR = 1e-3, 1e-18
# Of the remove direction's tail: places of the sum, and of the chords; the reserve over the divergence.
_TAIL_POINTS, _TAIL_NODES, _TWO_LARGE = 2**16, 512, 1e-5
_THRESHOLDS = 256  # of one lattice but the first


def divergence_table(mixture: Mixture, epsilons: np.ndarray, direction: str) -> np.ndarray:
    """Return upper bounds on one direction's divergence at many epsilons, each lattice for some of them.

    A lattice is cut and tilted for the first epsilon at which the lattice before it has too large an error.
    Bounds fall to about 1e-18, after which the table is flat (proofs/random_allocation.md, section
    7). The mixture is of mu up to 15; the epsilons ascend from 0.
    """
    direction = Direction.of(direction)
    thresholds = np.array([threshold_of(mixture, direction, float(epsilon), 1) for epsilon in epsilons])
    # No sum is below a threshold of 0; all are beyond it.
    of, otherwise = (_remove_table, 1.0) if direction == Direction.REMOVE else (_add_table, 0.0)
    found = np.full(epsilons.size, otherwise)
    used = np.flatnonzero(thresholds > 0)
    height = 1.0
    while used.size:
        bounds, errors = of(mixture, thresholds[used[: None if height == 1 else _THRESHOLDS]], height)
        # NaN is no bound. A lattice whose first error is too large is the last one.
        bounds = np.where(np.isfinite(bounds), np.minimum(1.0, bounds), 1.0)
        good = np.append(errors <= _MAX_ERROR * bounds, False)
        end = int(np.argmin(good)) or bounds.size
        found[used[:end]] = np.minimum(height, bounds[:end])
        height = float(found[used[:end]].min())
        used = used[end:]
        if height <= _FLOOR:
            found[used] = height
            break
    return np.maximum(found, SMALLEST)


def _table_points(mixture: Mixture, span: float) -> int:
    num_points = min(max(span / _table_step(mixture), _MIN_POINTS), MAX_POINTS)
    return 1 << math.ceil(math.log2(num_points))


def _table_step(mixture: Mixture) -> float:
    return _STEP * min(math.sqrt(math.expm1(part.mu**2)) for part in mixture.phases)


def _remove_table(mixture: Mixture, thresholds: np.ndarray, height: float) -> tuple[np.ndarray, np.ndarray]:
    if height < 1:
        return _remove_tail(mixture, thresholds, height)
    furthest = 0.4 * MAX_POINTS * _table_step(mixture)
    cut = Cut.at(mixture, float(thresholds[0]), _CUT, furthest)
    span = cut.top + cut.rest
    lattice = lattice_of(mixture, span, cut.top, _table_points(mixture, span))
    dists = tuple(lattice_distribution(part.mu, lattice, Direction.REMOVE, 1) for part in mixture.phases)
    found = Sums(mixture, lattice, dists, tuple(dist.masses for dist in dists))
    bounds, errors = found.one_sided(thresholds, 0.0, Direction.REMOVE)
    beyond, others = beyond_lattice(found, thresholds)
    reserve = others + math.exp(min(0.0, found.log_wrapped(0.0, cut.steep))) * (1 + 1e-9)
    # A threshold near the top leaves no room for the sum of the others.
    coarse = np.where(1.05 * thresholds > lattice.places[-1], beyond, 0.0)
    return bounds + beyond + reserve, errors + reserve + coarse


def _remove_tail(mixture: Mixture, thresholds: np.ndarray, height: float) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of far thresholds and their errors: no X above a top, one of them, or two and more.

    Sums of X below the top are tilted; lognormals themselves have no moments to tilt by.
    """
    first, terms = float(thresholds[0]), mixture.terms
    top = first * max(0.25, 1.2 / terms)
    while top < first and _two_large(mixture, top) > _TWO_LARGE * height:
        top *= 1.1
    top = min(top, highest(mixture, 1))
    rough = Rough.of(mixture, top)
    tilt, end = max(0.0, rough.tilt_to(first)), 1.2 * first
    log_cut = math.log(_CUT) + rough.log_moment(tilt)[0]
    while end < terms * top and rough.log_chernoff(end) + tilt * end > log_cut:
        end *= 1.1
    lattice = lattice_of(mixture, end + 1.01 * top, top, _TAIL_POINTS)
    dists = tuple(lattice_distribution(part.mu, lattice, Direction.REMOVE, 1) for part in mixture.phases)
    found = Sums(mixture, lattice, dists, tuple(dist.masses for dist in dists))
    steep = max(rough.tilt_to(end), 1 / end)
    bounds, errors = found.one_sided(thresholds, tilt, Direction.REMOVE)
    reserve = math.exp(min(0.0, found.log_wrapped(0.0, steep))) + _two_large(
        mixture, float(lattice.places[-1])
    )
    for i in range(len(dists)):
        one, error = _one_large(found, i, thresholds, steep)
        bounds, errors = bounds + one, errors + error
    return (bounds + reserve) * (1 + 1e-9), errors + reserve


def _two_large(mixture: Mixture, top: float) -> float:
    """Return a bound on `E[S; two X or more above the top] / b`."""
    num, sizes = 0.0, 0.0
    for part in mixture.phases:
        tail, weighted, error = tails_of(part.mu, np.array([top]), -1.0)
        num += part.number * float(tail[0]) * (1 + error)
        sizes += part.number * float(weighted[0]) * (1 + error)
    # One of the two, or another X, whose mean is 1.
    return (sizes * num + mixture.terms * num**2 / 2) / mixture.total * (1 + 1e-9)


def _one_large(
    sums_of: Sums, place: int, thresholds: np.ndarray, steep: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds on `sum_j E[(X_j + S' - K)_+; X_j above the top] / b` for phases of one kind, and errors.

    S' is the sum of the others, all at most the top: `E (X - y)_+` of X above the top is convex in
    `y = K - S'`, so that chords between few places of S' bound it.
    """
    mixture, lattice, part = sums_of.mixture, sums_of.lattice, sums_of.mixture.phases[place]
    factors = [
        Factor(dist.masses, one.number - (i == place))
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
    tail, weighted, error = tails_of(part.mu, np.maximum(y, top), -1.0)
    means = weighted - y * tail + (error + 8 * UNIT) * (weighted + np.abs(y) * tail)
    unit = rounding_error(factors, 1.0, lattice.points) if mixture.terms > 1 else 0.0
    # Rounding of the transform, of the running of chords, and sums beyond the end, which wrap.
    errors = unit * np.sqrt(each * (means**2).sum(axis=1)) + 4 * lattice.points * UNIT * (
        means @ np.abs(nodes)
    )
    lost = math.exp(min(0.0, sums_of.log_others(steep) - steep * lattice.end + steep * top))
    last = float(tails_of(part.mu, np.array([top]), -1.0)[1][0]) * (1 + error)
    errors = errors + lost * last * (1 + lattice.end / top)
    share_of = part.number / mixture.total * (1 + 1024 * UNIT * (mixture.terms + 1))  # rounded masses
    return share_of * (np.maximum(0.0, means @ nodes) + errors), share_of * errors


def _add_table(mixture: Mixture, thresholds: np.ndarray, height: float) -> tuple[np.ndarray, np.ndarray]:
    most, terms = float(thresholds[0]), mixture.terms
    if most <= terms * lowest(mixture) * (1 + 0.01 * min(1.0, *(part.mu for part in mixture.phases))):
        return np.full(thresholds.size, height), np.zeros(thresholds.size)
    rough, end = Rough.of(mixture, most), 1.1 * most
    tilt = min(0.0, rough.tilt_to(most))
    # Tilted sums beyond the end wrap to low places, where the bound only increases.
    log_cut = math.log(_CUT) + rough.log_moment(tilt)[0]
    while end < 0.7 * terms * most and rough.log_chernoff(end) + tilt * end > log_cut:
        end *= 1.15
    # Near the largest sum the rough model has no nodes.
    end = 1.02 * terms * most if end >= 0.7 * terms * most else end
    lattice = lattice_of(mixture, end, min(highest(mixture, -1), most), _table_points(mixture, end))
    dists = tuple(lattice_distribution(part.mu, lattice, Direction.ADD, 1) for part in mixture.phases)
    bounds, errors = Sums(mixture, lattice, dists, None).one_sided(thresholds, tilt, Direction.ADD)
    beyond = sum(part.number * dist.max_beyond for part, dist in zip(mixture.phases, dists, strict=True))
    wrapped = math.exp(min(0.0, rough.log_chernoff(end) + tilt * end))
    coarse = np.where(thresholds < most / 50, bounds, 0.0)  # the step is large beside these
    return bounds + beyond * (1 + 1e-9), errors + beyond + wrapped + coarse
