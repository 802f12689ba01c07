"""The route of every calibration: a bound first, then samples only where pilots predict less noise."""

import contextlib
import dataclasses
import math
from concurrent.futures import Executor
from typing import Any

from jaxacct.accountants import analytic
from jaxacct.calibration.problem import analytic_exponent
from jaxacct.calibration.search import (
    LESS_NOISE,
    OutOfTimeError,
    Search,
    candidate_key,
    released,
    searched,
)
from jaxacct.common.files import Checkpoint
from jaxacct.core.check import Verdict
from jaxacct.core.claim import Claim
from jaxacct.core.evidence import Bound
from jaxacct.core.plan import Plan
from jaxacct.core.text import outcome_in_words
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.mechanisms.mechanism import Mechanism

BOUND_RATIO, SAMPLE_RATIO = 1.0005, 1.01
"""Ratios of neighbouring noise multipliers: of accountants, and of candidates for samples."""


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
    """How one calibration is certified.

    Attributes:
      search: the target, and pilots that pick candidates.
      named: accountant of the bound, or None for the best one.
      may_sample: whether samples may certify less noise than the bound.
      asks_for_samples: whether samples are wanted where a bound is as good.
      grids: ratios of neighbouring candidates of the bound and of samples.
      checkpoint, executor, key: as of `calibrate`.
    """

    search: Search
    named: str | None
    may_sample: bool
    asks_for_samples: bool
    grids: tuple[float, float]
    checkpoint: Checkpoint | None
    executor: Executor | None
    key: Any

    @property
    def options(self) -> dict[str, Any]:
        """Options of `verify_claim`."""
        search = self.search
        return dict(
            proposal=search.proposal,
            checkpoint=self.checkpoint,
            executor=self.executor,
            progress=search.clock,
        )

    def samples_help(self, bound: Mechanism, delta: float | None, compose_with) -> bool:
        """Return whether samples may be drawn for less noise than a mechanism has by a bound."""
        if not self.may_sample or self.asks_for_samples:
            return self.may_sample
        return analytic.exact(bound, delta, compose_with) is None

    def bound(self, mechanism: Mechanism) -> Plan:
        """Return the plan of the accountant's bound at this mechanism, certified or not."""
        target = self.search.target
        name, _ = analytic.bound_by(self.named, mechanism, target.epsilon, target.compose_with)
        return Plan(self.search.claim(mechanism), Bound(name))

    def smallest(self, estimate: float | None) -> Plan:
        """Return the plan of the smallest noise multiplier that a bound or samples certify."""
        search, target = self.search, self.search.target
        start = None if self.may_sample else estimate
        exponent = analytic_exponent(search.at(1.0), target, self.grids[0], self.named, start)
        mechanism = search.at(self.grids[0] ** exponent)
        if not search.covered(mechanism):
            raise ValueError(
                "max_batch_size cannot be accounted for: the likelihood ratio has too large a tail"
            )
        bound = self.bound(mechanism)
        if bound.flaws:
            raise _not_certified(bound.claim, bound.flaws[0], None)
        search.clock.say(f"certified without samples: {_in_short(bound)}")
        if not self.samples_help(mechanism, target.delta, target.compose_with):
            return bound
        found, why = self._refined(mechanism.noise_multiplier, estimate)
        if found is None:
            search.clock.say(f"not refined by samples: {why}")
        return bound if found is None else found

    def given(self, mechanism: Mechanism) -> Plan:
        """Return the plan of a mechanism whose noise is given; NotCertifiedError where there is none."""
        noise, search = mechanism.noise_multiplier, self.search
        if not search.covered(mechanism):
            raise ValueError(f"max_batch_size cannot be accounted for at noise multiplier {noise:g}")
        if not self.asks_for_samples:
            bound, target = self.bound(mechanism), search.target
            if not bound.flaws:
                return bound
            if not self.samples_help(mechanism, target.delta, target.compose_with):
                raise _not_certified(bound.claim, bound.flaws[0], None)
        fewest = search.fewest(mechanism)
        limit = max(500_000, math.ceil(8 * fewest)) if search.max_samples is None else search.max_samples
        if limit < fewest:
            raise ValueError(f"max_samples must be at least {math.ceil(fewest)} for this target, got {limit}")
        verdict, claim = None, search.claim(mechanism)
        with contextlib.suppress(OutOfTimeError):
            stop = Stop(search.rule, limit)
            verdict = verify_claim(claim, stop, key=candidate_key(self.key, 0), **self.options)
        if verdict is None:
            raise _not_certified(claim, f"not within {search.clock.seconds:g} seconds of samples", None)
        if not verdict.certified:
            raise _not_certified(claim, _why_not(verdict), verdict)
        return Plan(verdict.claim, verdict.evidence)

    def _refined(self, bound: float, estimate: float | None) -> tuple[Plan | None, str]:
        """Return the plan that samples certify with less noise than the bound's, or None and why."""
        search, ratio = self.search, self.grids[1]
        top = math.floor(math.log(LESS_NOISE * bound) / math.log(ratio))
        end = math.ceil(math.log(bound) / math.log(ratio))
        seconds = f"{search.clock.seconds:g} seconds"
        try:
            first, limit = searched(
                self.checkpoint,
                search.describe(ratio, top, estimate),
                lambda: search.smallest_exponent(top, ratio, estimate),
            )
        except OutOfTimeError:
            return None, f"pilots did not end within {seconds}"
        if first > top:
            return (
                None,
                f"within {seconds} pilot runs predict less than {100 * (1 - LESS_NOISE):.0f} % less noise",
            )

        def claim_at(exponent: int) -> Claim | None:
            mechanism = search.at(ratio**exponent)
            return search.claim(mechanism) if search.covered(mechanism) else None

        found = released(claim_at, first, end, search.rule, limit, self.key, **self.options)
        return found, f"noise multipliers from {ratio**first:.5g} were not certified within {seconds}"


def _in_short(plan: Plan) -> str:
    name = plan.evidence.accountant if isinstance(plan.evidence, Bound) else "samples"
    return f"noise multiplier {plan.noise_multiplier:.5g} (accountant {name})"


def _why_not(verdict: Verdict) -> str:
    bad = verdict.directions[-1] if verdict.remove and verdict.remove.certified else verdict.remove
    if bad is None:
        return "; ".join(verdict.flaws[:1])
    found = outcome_in_words(bad).removeprefix("not certified: ")
    return f"{bad.direction} direction: {found}; delta there is about {bad.estimate:.3g} (an estimate)"


def _not_certified(claim: Claim, why: str, verdict: Verdict | None) -> NotCertifiedError:
    at = f"epsilon {claim.target.epsilon:g}, delta {claim.target.delta:g}"
    noise = f"noise multiplier {claim.mechanism.noise_multiplier:g}"
    return NotCertifiedError(f"{noise} could not be certified at {at}: {why}", verdict)
