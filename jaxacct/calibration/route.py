"""The route of every calibration: a bound first, samples where pilots predict better, then a release.

Candidates are on a grid: noise multipliers, or epsilons or deltas of a mechanism whose noise is given. Pilots
with randomness of their own select the first of them, and `core.shares.release` verifies it and a few larger
ones with fresh samples that nothing was selected by. A wrong release has probability at most q, the failure
probability of the smallest candidate that holds; where q falls from candidate to candidate, as reserves grow
with epsilon, shares are of the last one's. With e a released epsilon, all sets S of (e, output) have
`P(S) <= E[e^e Q(S at e)] + delta_v + q (1 - delta_v)`: a wrong e counts as delta 1. Where delta is found, the
smallest candidate that holds has `delta_v + q (1 - delta_v) <= delta`, and all others that hold are larger.
"""

import bisect
import dataclasses
import math
from typing import Any

from jaxacct.accountants import analytic
from jaxacct.calibration.grid import DELTA_STEPS, LIMITS, Grid, Problem, smallest_bound
from jaxacct.calibration.options import CalibrationOptions
from jaxacct.calibration.pilots import OutOfTimeError, Pilots
from jaxacct.common.files import Checkpoint
from jaxacct.core import shares
from jaxacct.core.check import Verdict
from jaxacct.core.claim import Claim
from jaxacct.core.evidence import Bound
from jaxacct.core.plan import Plan
from jaxacct.core.text import outcome_in_words
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.kernels import randomness
from jaxacct.kernels.programs import check_arithmetic
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import roots

LESS_NOISE = 0.97  # fraction of the bound below which a noise multiplier or an epsilon is worth samples
PILOT_TIME = 0.5  # fraction of the seconds after which no pilots begin where one has found a candidate
PATIENCE = 0.5
"""A verification is given up where its samples predict that it takes more than this fraction of the limit on
samples further: the next candidate takes half or less, for a hundredth more noise."""


class NotCertifiedError(Exception):
    """A given noise multiplier was not certified.

    Attributes:
      verdict: what the verification found, or None where an accountant rejected it.
    """

    def __init__(self, message: str, verdict: Verdict | None):
        super().__init__(message)
        self.verdict = verdict


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """How one problem is certified.

    Attributes:
      problem: what is calibrated.
      options: what steers the search.
      pilots: pick candidates for samples.
      checkpoint: of the folder of the options.
      key: as of `calibrate`.
    """

    problem: Problem
    options: CalibrationOptions
    pilots: Pilots
    checkpoint: Checkpoint | None
    key: Any

    def plan(self) -> Plan:
        """Return the plan of the numbers that are given, or of the smallest one that is found."""
        return self._given() if self.problem.missing is None else self._smallest()

    def _may_sample(self, mechanism: Mechanism) -> bool:
        """Return whether samples may certify more than a bound does for such a mechanism."""
        if self.options.accountant is not None or self.options.asks_for_samples:
            return self.options.accountant is None
        return analytic.exact(mechanism, self.problem.delta, self.problem.compose_with) is None

    def _bound(self, claim: Claim) -> Plan:
        """Return the plan of the accountant's bound for a claim, certified or not."""
        at = claim.mechanism, claim.target.epsilon, claim.target.compose_with
        return Plan(claim, Bound(analytic.bound_by(self.options.named, *at)[0]))

    def _given(self) -> Plan:
        """Return the plan of a problem with all numbers; NotCertifiedError where there is none."""
        claim, why = self.problem.claim()
        if claim is None:
            raise ValueError(why)
        if not self.options.asks_for_samples:
            bound = self._bound(claim)
            if not bound.flaws:
                return bound
            if not self._may_sample(claim.mechanism):
                raise _not_certified(claim, bound.flaws[0])
        fewest, limit = self.pilots.fewest(claim), self.options.max_samples
        limit = max(500_000, math.ceil(8 * fewest)) if limit is None else limit
        if limit < fewest:
            raise ValueError(f"max_samples must be at least {math.ceil(fewest)} for this target, got {limit}")
        verdict = self._verified(claim, 0, limit)
        if verdict is None:
            raise _not_certified(claim, f"not within {self.options.seconds:g} seconds of samples")
        if not verdict.certified:
            raise _not_certified(claim, _why_not(verdict), verdict)
        return Plan(verdict.claim, verdict.evidence)

    def _smallest(self) -> Plan:
        """Return the plan of the smallest candidate that a bound or samples certify.

        NotCertifiedError for a given noise multiplier without such a candidate, ValueError otherwise.
        """
        problem, (for_bounds, for_samples) = self.problem, self.options.grids
        estimate = None if self.options.accountant is None else self.options.estimate
        value = smallest_bound(problem, self.options.named, for_bounds, estimate)
        claim = None if value is None else problem.claim(value)[0]
        if claim is None and problem.noise_multiplier is None:
            raise ValueError(self._why_none())
        bound = None if claim is None else self._bound(claim)
        if bound is not None and bound.flaws:
            raise _not_certified(bound.claim, bound.flaws[0])
        if bound is not None:
            self._say(f"certified without samples: {self._in_short(bound)}")
        if self._may_sample(
            problem.at(problem.noise_multiplier or 1.0) if bound is None else bound.mechanism
        ):
            refined, why = self._refined(Grid(problem, for_samples), value)
            if refined is not None:
                return refined
            self._say(f"not refined by samples: {why}")
        if bound is None:
            raise NotCertifiedError(self._why_none(), None)
        return bound

    def _refined(self, grid: Grid, bound: float | None) -> tuple[Plan | None, str]:
        """Return the plan of the smallest candidate below the bound that samples certify, or None and why."""
        check_arithmetic()
        step, (least, most) = grid.step, grid.ends
        less = LESS_NOISE ** (DELTA_STEPS if grid.problem.missing == "delta" else 1)
        end = most + 1 if bound is None else math.ceil(math.log(bound, step))
        top = most if bound is None else math.floor(math.log(less * bound, step))
        within = f"within {self.options.seconds:g} seconds"
        if self.options.proposal is not None and (claim := grid.claim(top)) is not None:
            self.pilots.fewest(claim)  # ValueError for a proposal that the mechanism does not have
        try:
            first, limit = self.selected(grid, least, top)
        except OutOfTimeError:
            return None, f"pilots did not end {within}"
        if first > top:
            name = str(grid.problem.missing).removesuffix("_multiplier")
            return None, f"{within} pilot runs predict less than {100 * (1 - less):.0f} % less {name}"

        last = grid.claim(most) if bound is None or end > most else self.problem.claim(bound)[0]
        least = math.inf if last is None else last.target.budget.failure_probability

        def verified(above: int, share: float, may_give_up: bool) -> Plan | None:
            claim = grid.claim(first + above)
            if claim is None:
                return None
            patience = PATIENCE * limit if may_give_up else math.inf
            share *= min(1.0, least / claim.target.budget.failure_probability)
            verdict = self._verified(claim, first + above, limit, share, patience)
            return Plan(verdict.claim, verdict.evidence) if verdict and verdict.certified else None

        plan = shares.release(verified, end - first)
        name = str(self.problem.missing).replace("_", " ")
        return plan, f"{name}s from {step**first:.5g} were not certified {within}"

    def selected(self, grid: Grid, least: int, top: int) -> tuple[int, int]:
        """Return (exponent of the first candidate, limit on its samples), from a checkpoint of this search.

        The exponent is `top + 1` where pilots predict that none up to `top` is certified. OutOfTimeError
        where the time ends before. From an estimate by doubled steps, then by bisection.
        """
        options, limits = self.options, dict[float, float | None]()
        about = repr((grid, options.rule, options.proposal, options.max_samples, options.estimate, top))
        state: Any = self.checkpoint.load("search") if self.checkpoint else None
        if state is not None and state.get("target") == about:
            return state["smallest"], state["limit"]

        def is_promising(exponent: float) -> bool:
            known = [other for other, limit in limits.items() if limit is not None]
            if known and self.pilots.clock.left < PILOT_TIME * options.seconds:
                return exponent >= min(known)  # the rest of the time is that of its verification
            claim = grid.claim(int(exponent))
            limits[exponent] = None if claim is None else self.pilots.limit_for(claim)
            return limits[exponent] is not None

        first = top + 1
        if top >= least:
            start = (least + top) // 2
            if self.problem.noise_multiplier is None:
                start = top if options.estimate is None else round(math.log(options.estimate, grid.step))
            start = min(max(start, least), top)
            low, high = roots.bracket(is_promising, start, 1, lowest=least, highest=top)
            if high < math.inf:
                between = range(least if low == -math.inf else int(low) + 1, int(high))
                first = between.start + bisect.bisect_left(between, True, key=is_promising)
        limit = math.ceil(limits[first] or 0) if first <= top else 0
        if self.checkpoint:
            self.checkpoint.save("search", {"target": about, "smallest": first, "limit": limit})
        return first, limit

    def _verified(
        self, claim: Claim, index: int, limit: int, share: float = 1.0, patience: float = math.inf
    ) -> Verdict | None:
        """Return the verdict of fresh samples; None where the time ends before."""
        stop = Stop(self.options.rule, limit, share * self.options.share, patience)
        # Independent randomness for each candidate, for a key that a test fixed.
        key = None if self.key is None else randomness.stream_key(self.key, Stream.CANDIDATE + index)
        try:
            return verify_claim(
                claim,
                stop,
                proposal=self.options.proposal,
                checkpoint=self.checkpoint,
                executor=self.options.executor,
                progress=self.pilots.clock,
                key=key,
            )
        except OutOfTimeError:
            return None

    def _say(self, text: str) -> None:
        self.pilots.clock.say(text)

    def _in_short(self, plan: Plan) -> str:
        name = str(self.problem.missing)
        accountant = getattr(plan.evidence, "accountant", "samples")
        return f"{name.replace('_', ' ')} {getattr(plan, name):.5g} (accountant {accountant})"

    def _why_none(self) -> str:
        """Return why no candidate has a bound, and for a given noise multiplier none is certified."""
        problem, by = self.problem, self.options.named
        if problem.noise_multiplier is not None:
            name, (_, most) = str(problem.missing), LIMITS[str(problem.missing)]
            other = f"delta {problem.delta:g}" if name == "epsilon" else f"epsilon {problem.epsilon:g}"
            noise = f"noise multiplier {problem.noise_multiplier:g}"
            return f"{noise} is too small for any {name} up to {most:g} at {other}"
        if problem.compose_with is not None:
            return (
                f"compose_with must leave room for the mechanism at epsilon {problem.epsilon:g}, delta "
                f"{problem.delta:g}; it alone exceeds the target"
            )
        which = "any accountant" if by is None else f"accountant {by}"
        return f"delta must be larger for {which}, got {problem.delta:g}"


def _why_not(verdict: Verdict) -> str:
    bad = verdict.directions[-1] if verdict.remove and verdict.remove.certified else verdict.remove
    if bad is None:
        return "; ".join(verdict.flaws[:1])
    outcome = outcome_in_words(bad).removeprefix("not certified: ")
    return f"{bad.direction} direction: {outcome}; delta there is about {bad.estimate:.3g} (an estimate)"


def _not_certified(claim: Claim, why: str, verdict: Verdict | None = None) -> NotCertifiedError:
    at = f"epsilon {claim.target.epsilon:g}, delta {claim.target.delta:g}"
    noise = f"noise multiplier {claim.mechanism.noise_multiplier:g}"
    return NotCertifiedError(f"{noise} could not be certified at {at}: {why}", verdict)
