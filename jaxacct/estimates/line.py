"""Upper bounds on the add direction where its samples have no positive term: the line through two events.

Estimates and verification share the theorem and the distributions
(`jaxacct.proposals.add_direction.extrapolation`, proofs/add_direction.md, section 4).
"""

import math

import numpy as np

from jaxacct.common.progress import Progress
from jaxacct.core.check import bound_of_line
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import BLOCK_SIZE, Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base
from jaxacct.proposals.add_direction.extrapolation import (
    Extrapolation,
    at_distances,
    margin_of_line,
    plan_extrapolations,
    supports,
)
from jaxacct.proposals.add_direction.plain_bounded import min_exponent
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed

_MANY = 5  # number of points from which on two pairs of distances are used


def line_bounds(
    mechanism: Mechanism,
    epsilons: np.ndarray,
    num_samples: int,
    q: float,
    key,
    composed: Composed | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return (points,) float64: upper bounds on H(Q, P) at each of `epsilons`; 1 where no line exists.

    Each is wrong with probability at most q: the samples serve all points, each with confidence bounds of its
    own. The distances are chosen for one of the first points, which need the most samples, and with many
    points for a later one, too, from another stream. Epsilons ascend; without a composed mechanism none may
    be one at which H(Q, P) is exactly zero. `num_samples` is of all distributions together.
    """
    best, open_ = np.ones(len(epsilons)), np.ones(len(epsilons), bool)
    if not supports(mechanism):
        return best
    if composed is not None:
        # No term exceeds the profile at the smallest exponent, and beyond its end a line does not help.
        least = [min_exponent(mechanism, float(epsilon)) for epsilon in epsilons]
        best = np.array([math.exp(composed.log_at(t)) for t in least])
        open_ = np.array([t < composed.end < math.inf for t in least])
    if not open_.any():
        return best
    epsilons = epsilons[open_]
    anchors = [len(epsilons) // 32] if len(epsilons) < _MANY else [len(epsilons) // 32, len(epsilons) // 4]
    blocks = max(1, num_samples // (2 * len(anchors) * BLOCK_SIZE))
    for anchor in anchors:
        pilot = randomness.stream_key(key, Stream.EXTRAPOLATION_PILOT)
        drawn = (blocks * BLOCK_SIZE,)
        for planned in plan_extrapolations(mechanism, float(epsilons[anchor]), pilot, composed, drawn):
            distances = planned.near_distance, planned.far_distance
            lines = [at_distances(mechanism, float(epsilon), *distances, composed) for epsilon in epsilons]
            best[open_] = np.minimum(best[open_], _bounds(lines, blocks, q / len(anchors), key, progress))
    return best


def _bounds(lines: list[Extrapolation], blocks: int, q: float, key, progress: Progress | None) -> np.ndarray:
    """Return the bounds of lines of the same two distributions, which are drawn once."""
    first, stream = lines[0], randomness.stream_key(key, Stream.EXTRAPOLATION)
    margin = margin_of_line(first)
    counts = np.zeros((2, len(lines), len(bounds.TERM_EDGES)), np.int64)
    for place, (drawn_from, rounded) in enumerate(((first.near, margin), (first.far, -margin))):
        for draws in base.draw_in_batches(drawn_from, randomness.stream_key(stream, place), 0, blocks):
            counts[place] += [bounds.bin_terms(line.terms(draws, rounded)) for line in lines]
            if progress:
                progress("estimate add (extrapolated)", int(counts[:, 0].sum()), 2 * blocks * BLOCK_SIZE)
    upper = [bound_of_line(line, q, *both) for line, *both in zip(lines, *counts, strict=True)]
    return np.minimum(1.0, upper)
