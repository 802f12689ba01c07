"""Verify the candidates of one calibration with fresh samples, and release one that is certified."""

import math
from collections.abc import Callable
from typing import Any

from jaxacct.calibration.search import PATIENCE, candidate_key
from jaxacct.common.files import Checkpoint
from jaxacct.core import shares
from jaxacct.core.claim import Claim
from jaxacct.core.evidence import RuleName
from jaxacct.core.plan import Plan
from jaxacct.core.verify import Stop, verify_claim


def searched(
    checkpoint: Checkpoint | None, about: str, search: Callable[[], tuple[int, int]]
) -> tuple[int, int]:
    """Return (first exponent, limit on samples) of a search, or of a checkpoint of the same one."""
    state: Any = checkpoint.load("search") if checkpoint else None
    if state is None or state.get("target") != about:
        first, limit = search()
        state = {"target": about, "smallest": first, "limit": limit}
        if checkpoint:
            checkpoint.save("search", state)
    return state["smallest"], state["limit"]


def released(
    claim_at: Callable[[int], Claim | None], first: int, end: int, rule: RuleName, limit: int, key, **options
) -> Plan | None:
    """Return the plan of the candidate to release (`core.shares`), None where none is certified.

    Args:
      claim_at: exponent -> claim of the candidate, None where it cannot be verified.
      first: exponent of the first candidate.
      end: exponent of the analytic one, which needs no samples.
      rule: of the verifications.
      limit: on the samples of each.
      key: of all, that a test fixed, or None.
      **options: of `verify_claim`.
    """

    def verified(step: int, share: float, may_give_up: bool) -> Plan | None:
        claim = claim_at(first + step)
        if claim is None:
            return None
        stop = Stop(rule, limit, share, PATIENCE * limit if may_give_up else math.inf)
        verdict = verify_claim(claim, stop, key=candidate_key(key, first + step), **options)
        return Plan(verdict.claim, verdict.evidence) if verdict.certified else None

    return shares.release(verified, end - first)
