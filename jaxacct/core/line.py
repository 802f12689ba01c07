"""Evidence by a line: samples at two distances, and the bound on H(Q, P) from their means.

If H(Q, P) exceeds delta_v, the bound is at most delta_v with probability at most q at any stopping time: one
of two confidence bounds, each valid at all times with probability 1 - q / 2, would have to be wrong
(`proposals.extrapolation`).
"""

import math
from collections.abc import Callable

import numpy as np

from jaxacct.core.evidence import Line
from jaxacct.kernels import randomness
from jaxacct.proposals.families.extrapolation import Extrapolation, count_terms, margin_of_line
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import add_counts, dense_counts, draw_histograms, sparse_counts


def bound_from_counts(line: Extrapolation, q: float, near: np.ndarray, far: np.ndarray) -> float:
    """Return the upper bound on H(Q, P) from dense histograms; infinite without samples."""
    if not (near.sum() and far.sum()):
        return math.inf
    near_upper = bounds.upper_confidence_bound(near, q / 2)
    far_lower = bounds.lower_confidence_bound(far, q / 2)
    return line.bound(near_upper, far_lower)


def draw_line(
    line: Extrapolation,
    delta_v: float,
    q: float,
    stream,
    max_samples: int,
    *,
    kept: dict | None = None,
    keep: Callable[[dict], None] = lambda state: None,
) -> Line:
    """Draw at both distances until H(Q, P) <= delta_v is certified, or `max_samples` in all are drawn.

    The key `stream` is independent of the one that planned the distances. `keep` is called with the state
    after every batch, plain JSON values; `kept` is such a state to resume from.
    """
    margin, state = margin_of_line(line), kept or {"blocks": 0, "near": [], "far": []}
    limit = max(1, max_samples // (2 * randomness.BLOCK_SIZE))

    def settled(done: int, counts):
        return counts if done >= limit or bound_from_counts(line, q, *counts) <= delta_v else None

    def keep_counts(done: int, counts) -> None:
        near, far = map(sparse_counts, counts)
        keep({"blocks": done, "near": near, "far": far})

    near, far = draw_histograms(
        lambda first, last: count_terms(line, stream, margin, first, last),
        settled,
        lambda done: min(limit, done + max(32, done // 2)),
        add=add_counts,
        done=state["blocks"],
        counts=tuple(dense_counts(state[name], len(bounds.TERM_EDGES)) for name in ("near", "far")),
        keep=keep_counts,
    )
    words = randomness.key_words(stream)
    key = words[0], words[1]
    return Line(line.near_distance, line.far_distance, margin, key, sparse_counts(near), sparse_counts(far))
