"""Privacy profile delta(epsilon) with simultaneous confidence bands, both directions."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.common import validate as _validate
from jaxacct.common.progress import Progress
from jaxacct.estimates.estimate import bands_at, best_proposal
from jaxacct.mechanisms.mechanism import Mechanism, check_composition, checked
from jaxacct.proposals import base as proposals
from jaxacct.proposals.base import Proposal
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import Direction


@dataclass(frozen=True, eq=False)
class Profile:
    """Values of delta(epsilon) on a grid. With probability `confidence` all bands hold at once.

    Since delta decreases in epsilon, between two points of the grid `upper` of the left one and `lower` of
    the right one hold, too.

    Attributes:
      epsilons: (points,) float64, ascending, natural logs.
      lower: (points,) float64, of the larger of both directions; 0 where only an upper bound is drawn
        (`interval.for_lower_ends`).
      estimate: as `lower`.
      upper: as `lower`.
      directions: for "remove" and "add", the (3, points) of each: lower, estimate, upper.
      confidence: of both directions and all points together.
      num_samples: per direction; 0 where an accountant gives the upper ends; `proposals` then names it.
      proposals: the proposal distribution of each direction.
    """

    epsilons: np.ndarray
    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    directions: Mapping[Direction, np.ndarray]
    confidence: float
    num_samples: int
    proposals: dict[str, str]


def privacy_profile(
    mechanism: Mechanism,
    epsilons,
    *,
    num_samples: int | None = None,
    confidence: float = 0.95,
    compose_with=None,
    key=None,
    progress: Progress | None = None,
) -> Profile:
    """Compute the profile on a grid of epsilon from fresh samples.

    Rounding of float32 losses and errors of the drawn distributions are in the bands (proofs/derivations.md
    section 5). They are confidence bounds on delta, not a plan: `calibrate` includes its failure probability
    in delta.

    The remove direction uses replicas, which resolve small deltas, and plain draws at the small epsilons
    where the scale of replicas is above 1. The add direction's divergence is at most that of the remove
    direction, whose upper band it has; for truncated batches, where this is not proven, it is drawn from a
    proposal of `calibrate`, made for the first point.

    Balls-in-bins and Poisson sampling with one band (C = I) need no samples: an accountant gives the upper
    ends, which are exact up to its grid; the lower ones are 0.

    Args:
      mechanism: the mechanism.
      epsilons: at least one, each at least 0, ascending.
      num_samples: of each proposal; 100,000 by default, or none where an accountant is exact up to its grid.
      confidence: in (0, 1), of all bands together.
      compose_with: a dp-accounting `DpEvent`, for the profile of both together. There is no lower bound then,
        as its own profile is an upper bound.
      key: JAX key; from the operating system by default.
      progress: called with (what, samples done, samples expected).

    Returns:
      The profile with simultaneous confidence bands; not a guarantee.

    Raises:
      ValueError: bad arguments.
    """
    check_composition(checked(mechanism), compose_with)
    grid = np.atleast_1d(np.asarray(epsilons, object))  # also rows of different lengths, which are refused
    grid = arrays.checked("epsilons", grid, "ascending, finite and at least 0", _is_grid)
    if num_samples is not None:
        _validate.positive_integer("num_samples", num_samples)
    options: dict[str, Any] = dict(num_samples=num_samples, confidence=confidence, compose_with=compose_with)
    options |= dict(key=key, progress=progress)
    distributions = functools.partial(_distributions, mechanism, grid)
    bands, names, num_samples = bands_at(mechanism, grid, distributions, **options)
    if Direction.ADD not in bands:
        below, *others = bands[Direction.REMOVE]
        if not mechanism.is_replace_one:  # not symmetric: by the best event at epsilon 0, of P at most 1 - H
            below = np.maximum(0.0, 1 - np.exp(grid) * (1 - below.max()))
        bands[Direction.ADD] = np.stack([below, *others])
    lower, estimate, upper = np.maximum(bands[Direction.REMOVE], bands[Direction.ADD])
    return Profile(grid, lower, estimate, upper, bands, confidence, num_samples, names)


def _is_grid(epsilons: np.ndarray) -> np.ndarray:
    """Return which numbers, in one row, are finite, at least 0 and above the one before."""
    return np.isfinite(epsilons) & (np.diff(epsilons, prepend=-1e-300) > 0) & (epsilons.ndim == 1)


def _distributions(
    mechanism: Mechanism, grid: np.ndarray, direction: str, composed: Composed | None
) -> list[tuple[Proposal, np.ndarray]]:
    """Return proposals, each with the points it serves: replicas and plain draws, or made for their first."""
    if direction == Direction.ADD and composed is not None:
        return [(proposals.plain(mechanism, direction), grid)]
    if direction == Direction.REMOVE:
        chosen = best_proposal(mechanism, float(grid[-1]), direction, None, composed)
        if chosen.scale_at is None:
            return [(chosen, grid)]
        # Terms of plain draws are at most 1: few large weights would decide where the scale is above.
        is_wide = np.array([chosen.scale_at(float(epsilon)) >= 0 for epsilon in grid])
        plain = proposals.plain(mechanism, direction)
        if composed is not None:
            # A proposal that resolves the last point suffices: the composed profile decreases slowly.
            return [(plain if chosen.scale_at(float(grid[0])) > 0 else chosen, grid)]
        parts = [(plain, grid[is_wide]), (chosen, grid[~is_wide])]
        return [(proposal, points) for proposal, points in parts if points.size]
    return [(best_proposal(mechanism, float(grid[0]), direction, None, None), grid)]
