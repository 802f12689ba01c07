"""Shares of the failure probability q of the candidates of one calibration.

Candidates are noise multipliers on a grid, all fixed before any sample of a verification. The first candidate
is the smallest one that the pilots predict to suffice; it receives 0.9 q and is released where it is
certified. Otherwise the next one receives 0.05 q. Otherwise a few larger ones are verified from the largest
down with 0.05 q each, and the smallest one is released that was certified with all before it: a private
mechanism with more noise is private, too, so a false release requires a false verdict on the first of these
that is not private, an event of probability at most 0.05 q regardless of the others. In total a false release
has probability q at most (arXiv 2602.09338, theorem A.1, whose algorithm 5 this replaces).
"""

from collections.abc import Callable
from typing import TypeVar

FIRST_SHARES = (0.9, 0.05)  # of the first candidates, one grid step apart
LADDER = (5, 2)  # grid steps above the first candidate, in this order, where no first one was certified
LADDER_SHARE = 1 - sum(FIRST_SHARES)  # of each of these steps: only one can be the first that is not private
RANKED_SHARES = (0.9, 0.04, 0.03, 0.03)
"""Shares of ranked calibrations, of which the results decide how many are made and which plan is released."""

T = TypeVar("T")


def release(verified: Callable[[int, float, bool], T | None], num_steps: int) -> T | None:
    """Return the certified candidate to release, or None.

    Args:
      verified: (grid steps above the first candidate, share of q, whether it may stop early) -> the candidate
        where a verification with that share certifies it, else None.
      num_steps: grid steps from the first candidate to the analytic one, which needs no samples.
    """
    for step, share in enumerate(FIRST_SHARES):
        candidate = verified(step, share, True) if step < num_steps else None
        if candidate is not None:
            return candidate
    released = None
    for step in LADDER:
        if step < num_steps:
            candidate = verified(step, LADDER_SHARE, False)
            if candidate is None:
                break
            released = candidate
    return released
