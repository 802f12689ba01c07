"""The add direction certified by extrapolation: draws from both laws until the line through two means is low
enough (`jaxacct.proposals.extrapolation`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.extrapolation import (
    PLANNED_SAMPLES,
    Extrapolation,
    at_distances,
    count_terms,
    margin_of_line,
    plan_extrapolations,
    supports,
)
from jaxacct.statistics import bounds
from jaxacct.verification.histogram import add_counts, dense_counts, draw_histograms, sparse_counts
from jaxacct.verification.target import Target


@dataclass(frozen=True)
class LineEvidence:
    """What two samplings say about H(Q, P).

    Attributes:
      bound: at least H(Q, P), unless an event of probability at most q happened.
      q: failure probability spent, both confidence bounds together; valid at any stopping time.
      near_distance, far_distance: where the two laws stood.
      near_counts, far_counts: (index, count) of terms in the bins of `bounds.TERM_EDGES`.
      near_upper, far_lower: confidence bounds on the two means of X.
      num_samples: draws, both laws together.
      log_scale: ln M_0.
      margin: put aside for float32 losses, natural log.
      unseen: probability put aside at either distance.
    """

    bound: float
    q: float
    log_scale: float
    near_distance: float
    far_distance: float
    near_counts: tuple[tuple[int, int], ...]
    far_counts: tuple[tuple[int, int], ...]
    near_upper: float
    far_lower: float
    num_samples: int
    margin: float
    unseen: float


def cheaper_extrapolation(
    mechanism: Mechanism, target: Target, samples_otherwise: float, key
) -> Extrapolation | None:
    """An extrapolation where it is expected to certify the target from fewer samples than otherwise.

    The choice rests on pilot draws of `key` alone, so it is independent of the draws that certify.
    """
    numbers = tuple(samples for samples in PLANNED_SAMPLES if 2 * samples < samples_otherwise)
    if not numbers or not supports(mechanism):
        return None
    for planned in plan_extrapolations(mechanism, target.epsilon, key, target.composition, numbers):
        if planned.log_expected < math.log(target.budget.delta_v):
            return planned
    return None


def certify(
    extrapolation: Extrapolation,
    delta_v: float,
    q: float,
    key,
    max_samples: int = 2_000_000,
    *,
    share: float = 1.0,
    kept: dict | None = None,
    keep: Callable[[dict], None] = lambda state: None,
) -> LineEvidence:
    """Draw from both laws until H(Q, P) <= delta_v is certified, or `max_samples` in all are drawn.

    If H(Q, P) > delta_v, then `bound <= delta_v` has probability at most q: one of two confidence bounds,
    each valid at all times with probability 1 - q / 2, would have to be wrong.

    Args:
      delta_v: what H(Q, P) has to stay below.
      q: failure probability.
      key: JAX key of its own, independent of the one the distances were planned with.
      share: end early only where `share * q` would have done, the rest of q being for other attempts.
      kept: what `keep` was last called with, to go on from there.
      keep: called with the state after every batch, plain JSON values.
    """
    margin = margin_of_line(extrapolation)
    state = kept or {"blocks": 0, "near": [], "far": []}
    limit = max(1, max_samples // (2 * randomness.BLOCK_SIZE))

    def settled(done: int, counts) -> LineEvidence | None:
        found = bound_from_counts(extrapolation, share * q, margin, *counts)
        if not (found.bound <= delta_v or done >= limit):
            return None
        # What is accepted at a part of q is accepted at q, and the evidence is of all of q.
        return bound_from_counts(extrapolation, q, margin, *counts) if found.bound <= delta_v else found

    def keep_counts(done: int, counts) -> None:
        near, far = map(sparse_counts, counts)
        keep({"blocks": done, "near": near, "far": far})

    return draw_histograms(
        lambda first, last: count_terms(extrapolation, key, margin, first, last),
        settled,
        lambda done: min(limit, done + max(32, done // 2)),
        add=add_counts,
        done=state["blocks"],
        counts=tuple(dense_counts(state[law], len(bounds.TERM_EDGES)) for law in ("near", "far")),
        keep=keep_counts,
    )


def bound_from_counts(extrapolation: Extrapolation, q: float, margin: float, near, far) -> LineEvidence:
    """What two dense histograms say about H(Q, P); the bound is infinite before anything was drawn."""
    bound, near_upper, far_lower = math.inf, 1.0, 0.0
    if near.sum() and far.sum():
        near_upper = bounds.upper_confidence_bound(near, q / 2)
        far_lower = bounds.lower_confidence_bound(far, q / 2)
        bound = extrapolation.bound(near_upper, far_lower)
    return LineEvidence(
        bound=bound,
        q=q,
        log_scale=extrapolation.log_scale,
        near_distance=extrapolation.near_distance,
        far_distance=extrapolation.far_distance,
        near_counts=sparse_counts(near),
        far_counts=sparse_counts(far),
        near_upper=near_upper,
        far_lower=far_lower,
        num_samples=int(near.sum() + far.sum()),
        margin=margin,
        unseen=extrapolation.unseen,
    )


__all__ = [
    "PLANNED_SAMPLES",
    "Extrapolation",
    "LineEvidence",
    "at_distances",
    "bound_from_counts",
    "certify",
    "cheaper_extrapolation",
    "count_terms",
    "margin_of_line",
    "plan_extrapolations",
    "supports",
]
