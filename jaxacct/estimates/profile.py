"""The privacy profile delta(epsilon) with simultaneous confidence bands, both directions."""

import math
from dataclasses import dataclass

import numpy as np

from jaxacct import _validate
from jaxacct.estimates.estimate import best_proposal, draw_samples
from jaxacct.kernels import randomness
from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base as proposals
from jaxacct.proposals import replicas
from jaxacct.proposals.base import DIRECTIONS, Proposal
from jaxacct.statistics import bounds, hockey_stick


@dataclass(frozen=True, eq=False)
class Profile:
    """delta(epsilon) on a grid. With probability `confidence` all bands hold at once.

    Since delta falls with epsilon, between two points of the grid `upper` of the left one and `lower` of the
    right one hold as well.

    Attributes:
      epsilons: (points,) float64, ascending, natural logs.
      lower, estimate, upper: (points,) float64, of the larger of both directions; `lower` is 0 where losses
        are upper bounds themselves (`Mechanism.is_upper_bound`).
      directions: for "remove" and "add", the (3, points) of each: lower, estimate, upper.
      confidence: of both directions and all points together.
      num_samples: draws a direction.
      proposals: the law each direction was drawn from.
    """

    epsilons: np.ndarray
    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    directions: dict[str, np.ndarray]
    confidence: float
    num_samples: int
    proposals: dict[str, str]


def privacy_profile(
    mechanism: Mechanism, epsilons, *, num_samples: int = 100_000, confidence: float = 0.95, key=None
) -> Profile:
    """The profile on a grid of epsilon from draws of its own.

    Rounding of float32 losses and errors of the drawn laws are in the bands (proofs/derivations.md section
    5). They are
    confidence bounds on delta, not a plan: `calibrate` books its failure probability in delta.

    The remove direction uses replicas and resolves small deltas; the add direction is drawn plainly, so its
    upper band ends near 10 / num_samples until it is exactly zero.

    Args:
      epsilons: at least one, each at least 0, ascending.
      num_samples: draws a direction.
      confidence: in (0, 1), of all bands together.
      key: JAX key; from the operating system by default.

    Raises:
      ValueError: bad arguments.
    """
    grid = np.atleast_1d(np.asarray(epsilons, np.float64))
    if (
        grid.ndim != 1
        or grid.size == 0
        or not np.isfinite(grid).all()
        or (grid < 0).any()
        or (np.diff(grid) <= 0).any()
    ):
        raise ValueError("epsilons must be ascending, finite and at least 0")
    num_samples = _validate.positive_integer("num_samples", num_samples)
    q = (1 - _validate.open_probability("confidence", confidence)) / (len(grid) * len(DIRECTIONS))
    key = randomness.fresh_key() if key is None else key
    found, names = {}, {}
    for direction in DIRECTIONS:
        chosen = _chosen(mechanism, direction, float(grid[-1]))
        names[direction] = chosen.name
        found[direction] = _bands(chosen, grid, num_samples, q, key)
    if mechanism.is_upper_bound:
        # Losses are bounds themselves there: nothing is known from below (proofs/non_banded.md).
        for bands in found.values():
            bands[0] = 0.0
    lower, estimate, upper = np.maximum(found["remove"], found["add"])
    return Profile(grid, lower, estimate, upper, found, confidence, num_samples, names)


def _chosen(mechanism: Mechanism, direction: str, epsilon: float) -> Proposal:
    """Replicas have a known weight at every epsilon; the add direction's proposals serve only their own."""
    if direction == "add":
        return proposals.plain(mechanism, direction)
    return best_proposal(mechanism, epsilon, direction, None, False)


def _bands(chosen: Proposal, grid: np.ndarray, num_samples: int, q: float, key) -> np.ndarray:
    """(3, points): lower, estimate and upper; each interval wrong with probability q at most."""
    mechanism, m, direction = chosen.mechanism, chosen.replicas, chosen.direction
    log_scales = np.zeros(len(grid))
    if direction == "remove" and m > 1:
        log_z = replicas.log_normalizer(mechanism, m)
        log_scales = np.array([replicas.log_scale(log_z, m, e) for e in grid])
    margin = rounding.loss_margin(mechanism, float(grid[-1]), m)
    slack = chosen.weight_error(margin)
    totals = np.zeros(len(grid))
    high, low = (np.zeros((len(grid), len(bounds.TERM_EDGES)), np.int64) for _ in range(2))
    for draws in draw_samples(chosen, key, num_samples):
        for i, epsilon in enumerate(grid):
            scale = math.exp(-log_scales[i])
            totals[i] += math.fsum(hockey_stick.weighted_terms(draws, direction, epsilon))
            for counts, sign in ((high, 1.0), (low, -1.0)):
                # Upwards the losses are taken as large, downwards as small as rounding allows.
                terms = hockey_stick.weighted_terms(draws, direction, epsilon - sign * margin)
                counts[i] += bounds.bin_terms(np.minimum(1.0, terms * math.exp(sign * slack) * scale))
    scales = np.exp(log_scales)
    upper = np.array([bounds.upper_confidence_bound(counts, q / 2) for counts in high])
    lower = np.array([bounds.lower_confidence_bound(counts, q / 2) for counts in low])
    upper = scales * (1 + chosen.relative_error) * (upper + chosen.total_variation)
    lower = scales * np.maximum(0.0, lower - chosen.total_variation) / (1 + chosen.relative_error)
    estimate = totals / num_samples
    if direction == "add":
        # H(Q, P) is exactly zero there (proofs/add_direction.md, theorem 1), and below 1 - alpha P0 before.
        none = mechanism.scheme.log_probability_of_none()
        upper = np.minimum(upper, np.maximum(0.0, -np.expm1(grid + none)) * (1 + 1e-12))
    upper = np.minimum(1.0, upper)
    return np.stack([np.minimum(lower, upper), np.minimum(estimate, upper), upper])
