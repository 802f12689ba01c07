"""Find and certify the smallest epsilon, or the smallest delta, of a mechanism whose noise is given.

Candidates are targets on a grid. Pilots with randomness of their own select the first of them, and
`core.shares.release` verifies it and a few larger ones with fresh samples that nothing was selected by. A
wrong release has probability at most q, the failure probability of the smallest candidate that holds. With e
the released epsilon, all sets S of (e, output) have `P(S) <= E[e^e Q(S at e)] + delta_v + q (1 - delta_v)`: a
wrong e counts as delta 1. Where delta is found, the smallest candidate that holds has
`delta_v + q (1 - delta_v) <= delta`, and all others that hold are larger.
"""

import contextlib
import dataclasses
import math

from jaxacct.accountants import analytic
from jaxacct.calibration.problem import smallest_where
from jaxacct.calibration.route import NotCertifiedError, Route
from jaxacct.calibration.search import LESS_NOISE, OutOfTimeError, Search, released, searched
from jaxacct.common.validate import MAX_EPSILON
from jaxacct.core.claim import Claim, Target
from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import Mechanism

MIN_EPSILON = 1e-3
MIN_DELTA, MAX_DELTA = 1e-15, 0.5
DELTA_STEPS = 5
"""Steps of epsilon's grid that one of delta's has: about as many samples tell two neighbours apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class SmallestTarget:
    """The search for one mechanism.

    Attributes:
      route: how it is certified; the target of its search does not matter.
      mechanism: what is certified.
      epsilon, delta: the one that is given; the other is None.
      failure_fraction, compose_with: as of `calibrate`.
    """

    route: Route
    mechanism: Mechanism
    epsilon: float | None
    delta: float | None
    failure_fraction: float
    compose_with: object

    @property
    def limits(self) -> str:
        """What no candidate could be certified for, in words."""
        if self.epsilon is None:
            return f"any epsilon up to {MAX_EPSILON:g} at delta {self.delta:g}"
        return f"any delta up to {MAX_DELTA:g} at epsilon {self.epsilon:g}"

    def step(self, ratio: float) -> float:
        """Return the ratio of neighbouring candidates, of a grid of epsilons with this ratio."""
        return ratio if self.epsilon is None else ratio**DELTA_STEPS

    def ends(self, step: float) -> tuple[int, int]:
        """Return the smallest and the largest exponent of a grid."""
        least, most = (MIN_EPSILON, MAX_EPSILON) if self.epsilon is None else (MIN_DELTA, MAX_DELTA)
        return math.ceil(math.log(least, step)), math.floor(math.log(most, step))

    def target(self, found: float) -> Target:
        """Return the target with this epsilon or delta; ValueError where batch sizes leave no delta."""
        epsilon, delta = (found, self.delta) if self.epsilon is None else (self.epsilon, found)
        assert epsilon is not None and delta is not None
        problem = self.route.search.problem
        return problem.target(epsilon, delta, self.failure_fraction, self.compose_with)

    def search(self, found: float) -> Search:
        """Return the pilots for that candidate; all share their keys, as they share the mechanism."""
        return dataclasses.replace(self.route.search, target=self.target(found))

    def _say(self, found: float) -> None:
        name = "epsilon" if self.epsilon is None else "delta"
        self.route.search.clock(f"trying {name} {found:.4g}", 0, 0)

    def _has_room(self, found: float) -> bool:
        try:
            self.target(found)
        except ValueError:  # reserves for batch sizes take more than half of so small a delta
            return False
        return True

    def bound(self) -> float | None:
        """Return the smallest candidate whose budget an accountant's bound meets, or None."""
        step = self.step(self.route.grids[0])
        least, most = self.ends(step)

        def bounded(exponent: int) -> bool:
            if not least <= exponent <= most or not self._has_room(step**exponent):
                return False
            target = self.target(step**exponent)
            at = self.mechanism, target.epsilon
            return analytic.bound_by(self.route.named, *at, self.compose_with)[1] <= target.budget.delta

        found = smallest_where(bounded, (least + most) // 2, most) if bounded(most) else None
        return None if found is None else step**found

    def smallest_exponent(self, top: int, step: float) -> tuple[int, int]:
        """Return as `Search.smallest_exponent`, for the grid of candidates."""
        least, limits = self.ends(step)[0], {}

        def fits(exponent: int) -> bool:
            if exponent < least or not self._has_room(step**exponent):
                return False
            self._say(step**exponent)
            search = self.search(step**exponent)
            holds = search.fits(self.mechanism)
            limits[exponent] = search.limits[self.mechanism.noise_multiplier]
            return holds

        found = smallest_where(fits, (least + top) // 2, top) if top >= least else None
        return (top + 1, 0) if found is None else (found, math.ceil(limits[found]))

    def plan(self) -> Plan:
        """Return the plan of the smallest certified candidate; NotCertifiedError where none is."""
        route, bound = self.route, self.bound()
        refined = None
        if bound is not None:
            name = "epsilon" if self.epsilon is None else "delta"
            route.search.clock.say(f"certified without samples: {name} {bound:.5g}")
        if route.samples_help(self.mechanism, self.delta, self.compose_with):
            with contextlib.suppress(OutOfTimeError):
                refined = self._refined(bound)
        if refined is not None:
            return refined
        if bound is None:
            noise = f"noise multiplier {self.mechanism.noise_multiplier:g}"
            raise NotCertifiedError(f"{noise} is too small for {self.limits}", None)
        return dataclasses.replace(route, search=self.search(bound)).bound(self.mechanism)

    def _refined(self, bound: float | None) -> Plan | None:
        """Return the plan of the smallest candidate below the bound that samples certify, if any."""
        route, step = self.route, self.step(self.route.grids[1])
        less = LESS_NOISE if self.epsilon is None else LESS_NOISE**DELTA_STEPS
        end = self.ends(step)[1] + 1 if bound is None else math.ceil(math.log(bound, step))
        top = end - 1 if bound is None else math.floor(math.log(less * bound, step))
        about = repr((self.mechanism, self.epsilon, self.delta, self.failure_fraction, self.compose_with))
        about = route.search.describe(about, step, top)
        first, limit = searched(route.checkpoint, about, lambda: self.smallest_exponent(top, step))
        if first > top:
            return None

        def claim_at(exponent: int) -> Claim:
            return self.search(step**exponent).claim(self.mechanism)

        return released(claim_at, first, end, route.search.rule, limit, route.key, **route.options)
