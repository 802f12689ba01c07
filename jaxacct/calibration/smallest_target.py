"""Find and certify the smallest epsilon, or the smallest delta, of a mechanism whose noise is given.

Candidates are targets on a grid. Pilots with randomness of their own select the first of them, and
`core.shares.release` verifies it and a few larger ones with fresh samples that nothing was selected by. A
wrong release has probability at most q, the failure probability of the smallest candidate that holds. With e
the released epsilon, all sets S of (e, output) have `P(S) <= E[e^e Q(S at e)] + delta_v + q (1 - delta_v)`: a
wrong e counts as delta 1. Where delta is found, the smallest candidate that holds has
`delta_v + q (1 - delta_v) <= delta`, and all others that hold are larger.
"""

import dataclasses
import math
from concurrent.futures import Executor
from typing import Any

from jaxacct.accountants import analytic
from jaxacct.calibration.problem import Problem, smallest_where
from jaxacct.calibration.search import (
    MAX_RATIO_TO_FEWEST,
    MAX_SHARE_OWN_PILOT,
    MIN_LIMIT,
    Search,
    released,
    searched,
)
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import RuleName
from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import Mechanism

MIN_EPSILON, MAX_EPSILON = 1e-3, 100.0
MIN_DELTA, MAX_DELTA = 1e-15, 0.5
DELTA_STEPS = 5
"""Steps of epsilon's grid that one of delta's has: about as many samples tell two neighbours apart."""
MAX_LIMIT = 500_000


@dataclasses.dataclass(frozen=True, eq=False)
class SmallestTarget:
    """The search for one mechanism.

    Attributes:
      problem, mechanism: what is certified.
      epsilon, delta: the one that is given; the other is None.
      ratio: of neighbouring epsilons.
      failure_fraction, compose_with, rule, proposal: as of `calibrate`.
      key: of the pilots.
      progress: called with (what, 0, 0), and with samples by the verification.
    """

    problem: Problem
    mechanism: Mechanism
    epsilon: float | None
    delta: float | None
    ratio: float
    failure_fraction: float
    compose_with: object
    rule: RuleName
    proposal: str | None
    key: object
    progress: Progress | None

    @property
    def ends(self) -> tuple[int, int]:
        """Smallest and largest exponent of the grid."""
        least, most = (MIN_EPSILON, MAX_EPSILON) if self.epsilon is None else (MIN_DELTA, MAX_DELTA)
        return math.ceil(math.log(least, self._step)), math.floor(math.log(most, self._step))

    @property
    def limits(self) -> str:
        """What no candidate could be certified for, in words."""
        if self.epsilon is None:
            return f"any epsilon up to {MAX_EPSILON:g} at delta {self.delta:g}"
        return f"any delta up to {MAX_DELTA:g} at epsilon {self.epsilon:g}"

    @property
    def _step(self) -> float:
        return self.ratio if self.epsilon is None else self.ratio**DELTA_STEPS

    def target(self, exponent: int) -> Target:
        """Return the candidate of that exponent; ValueError where batch sizes leave no delta."""
        found = self._step**exponent
        epsilon, delta = (found, self.delta) if self.epsilon is None else (self.epsilon, found)
        assert epsilon is not None and delta is not None
        return self.problem.target(epsilon, delta, self.failure_fraction, self.compose_with)

    def search(self, exponent: int) -> Search:
        """Return the estimates for that candidate; all share their keys, as they share the mechanism."""
        return Search(self.problem, self.target(exponent), self.rule, self.proposal, self.key, None)

    def _say(self, exponent: int) -> None:
        if self.progress:
            name = "epsilon" if self.epsilon is None else "delta"
            self.progress(f"trying {name} {self._step**exponent:.4g}", 0, 0)

    def _has_room(self, exponent: int) -> bool:
        try:
            self.target(exponent)
        except ValueError:  # reserves for batch sizes take more than half of so small a delta
            return False
        return True

    def analytic_exponent(self, accountant: str | None) -> int | None:
        """Return the smallest exponent whose budget an accountant's bound meets; None where there is none."""
        least, most = self.ends

        def bounded(exponent: int) -> bool:
            if not least <= exponent <= most or not self._has_room(exponent):
                return False
            self._say(exponent)
            target, at = self.target(exponent), (self.mechanism, self.target(exponent).epsilon)
            return analytic.bound_by(accountant, *at, self.compose_with)[1] <= target.budget.delta

        return smallest_where(bounded, (least + most) // 2, most) if bounded(most) else None

    def sampled_exponent(self, fallback: int, max_samples: int | None) -> tuple[int, int]:
        """Return the smallest exponent whose predicted cost fits, `fallback` for none, and the limit."""
        least, noise = self.ends[0], self.mechanism.noise_multiplier

        def fewest(exponent: int) -> float:
            return self.search(exponent).best_case(self.mechanism)

        def fits(exponent: int) -> bool:
            if exponent >= fallback:
                return True
            if exponent < least or not self._has_room(exponent):
                return False
            self._say(exponent)
            limit = max_samples or MAX_LIMIT
            allowed = MAX_SHARE_OWN_PILOT * limit
            return self.search(exponent).cost(noise, limit, allowed) <= allowed

        found = smallest_where(fits, (least + min(fallback, self.ends[1])) // 2, fallback)
        assert found is not None  # it holds at the fallback
        if max_samples is not None or found == fallback:
            return found, max_samples or MAX_LIMIT
        return found, math.ceil(min(MAX_LIMIT, max(MIN_LIMIT, MAX_RATIO_TO_FEWEST * fewest(found))))

    def plan(
        self,
        accountant: str | None,
        max_samples: int | None,
        checkpoint: Checkpoint | None,
        key,
        executor: Executor | None = None,
    ) -> Plan | None:
        """Return the plan of the smallest certified candidate; None where none is.

        It is certified by samples where `accountant`, a name or "analytic" for the best bound, is None. The
        `key` is that of the verifications, from the operating system by default.
        """
        named = None if accountant == "analytic" else accountant
        fallback = self.analytic_exponent(named)
        if accountant is None:
            top = self.ends[1] + 1 if fallback is None else fallback
            about = repr((dataclasses.replace(self, key=None, progress=None), top, max_samples))
            first, limit = searched(checkpoint, about, lambda: self.sampled_exponent(top, max_samples))
            options: dict[str, Any] = dict(proposal=self.proposal, executor=executor)
            options |= dict(checkpoint=checkpoint, progress=self.progress)

            def claim_at(exponent: int) -> Claim:
                return self.search(exponent).claim(self.mechanism)

            found = released(claim_at, first, top, self.rule, limit, key, **options)
            if found is not None:
                return found
        return None if fallback is None else self.search(fallback).analytic_plan(self.mechanism, named)
