"""How the failure probability q is shared among the candidates of one calibration.

Candidates are noise multipliers on a grid, all fixed before anything is drawn for a verification. The first
one, the smallest that looks sufficient, is verified with 0.9 q and released where it is certified;
otherwise the next one, with 0.05 q. Otherwise a few larger ones are verified from the largest down with
0.05 q each, and the smallest one is released for which it and all before it were certified: a private
mechanism with more noise is private too, so a wrong release takes a wrong verdict on the first of these
that is not private, an event of probability 0.05 q at most whatever the others. In all a wrong release has
probability q at most (arXiv 2602.09338, theorem A.1, whose algorithm 5 this replaces).
"""

from collections.abc import Callable
from typing import TypeVar

FIRST_SHARES = (0.9, 0.05)
"""Shares of the first candidates, one grid step apart."""
LADDER = (5, 2)
"""Grid steps above the first candidate, verified in this order where none of the first was certified."""
LADDER_SHARE = 1 - sum(FIRST_SHARES)
"""Share of each step of the ladder, of which only one can be the first that is not private."""

T = TypeVar("T")


def release(verified: Callable[[int, float, bool], T | None], num_steps: int) -> T | None:
    """Return the certified candidate to release, None where none was certified.

    Args:
      verified: (grid steps above the first candidate, share of q, whether it may be given up early) -> the
        candidate where a verification with that share certifies it, else None.
      num_steps: number of grid steps from the first candidate to the analytic one, which needs no samples.
    """
    for step, share in enumerate(FIRST_SHARES):
        found = verified(step, share, True) if step < num_steps else None
        if found is not None:
            return found
    released = None
    for step in LADDER:
        if step < num_steps:
            found = verified(step, LADDER_SHARE, False)
            if found is None:
                break
            released = found
    return released
