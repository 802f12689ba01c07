"""Refine a bound by samples: pilots pick the candidates of a calibration, fresh samples verify them.

The pilots are no guarantee: that comes from the verification of `released`.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.calibration.problem import MIN_NOISE_MULTIPLIER, Problem, smallest_where
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress, announce
from jaxacct.core import shares, truncation
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import RuleName
from jaxacct.core.plan import Plan
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import SearchStream, Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base
from jaxacct.proposals.base import Proposal
from jaxacct.proposals.candidates import choose_candidate, predicted_samples
from jaxacct.proposals.families.extrapolation import Extrapolation, cheaper_extrapolation
from jaxacct.proposals.threshold import threshold
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import Direction

LESS_NOISE = 0.97
"""Fraction of the bound's noise multiplier below which a candidate is worth samples."""
NUM_PILOT_BLOCKS = 16
"""Blocks of a pilot between two looks at its terms."""
PILOT_SHARE, ENOUGH_TERMS, FEW_TERMS = 0.125, 30, 10
"""A pilot ends at this fraction of the limit on samples, or where the sum of terms is the first number, or
where the largest mean that is allowed would have given it; where too many samples are predicted, the second
sum is enough."""
MAX_SHARE = 0.5
"""Maximum fraction of the limit on samples that a candidate's predicted sample count may use."""
MAX_RATIO_TO_FEWEST, MIN_LIMIT = 384, 100_000
"""Default limit on samples: this many times those of a verification with all terms zero, and at least the
second number. About a fifth of a grid step is left there."""
PATIENCE = 0.5
"""A verification is given up where its samples predict that it takes more than this fraction of the limit on
samples further: the next candidate takes half or less, for a hundredth more noise."""


class OutOfTimeError(Exception):
    """The time for samples has passed."""


class Clock:
    """Progress callback that ends a refinement after `seconds`."""

    def __init__(self, progress: Progress | None, seconds: float):
        self.progress, self.seconds, self.end = progress, seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; not above 0 where the time has passed."""
        return self.end - time.monotonic()

    def __call__(self, what: str, done: int, expected: float) -> None:
        """Report progress; OutOfTimeError where the time has passed."""
        if self.left <= 0:
            raise OutOfTimeError
        if self.progress:
            self.progress(what, done, expected)

    def say(self, text: str) -> None:
        """Report a result at once."""
        if self.progress:
            announce(self.progress, text)


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """Pilots that pick the candidates of one target; nothing here is a guarantee.

    Attributes:
      problem, target: what is certified.
      rule, proposal: as of `calibrate`.
      max_samples: limit on samples of a direction, or None for one from `MAX_RATIO_TO_FEWEST`.
      key: of the pilots.
      clock: ends the search.
      limits: noise multiplier -> limit on samples of its verification.
    """

    problem: Problem
    target: Target
    rule: RuleName
    proposal: str | None
    max_samples: int | None
    key: Any
    clock: Clock
    limits: dict[float, float] = dataclasses.field(default_factory=dict)
    speed: list[float] = dataclasses.field(default_factory=list)
    """Samples of a pilot in a second, the largest last."""

    def covered(self, mechanism: Mechanism) -> bool:
        """Return whether the reserve for truncated batches covers this noise multiplier."""
        return self.problem.truncate_to is None or truncation.covers(mechanism, self.target.epsilon)

    def claim(self, mechanism: Mechanism) -> Claim:
        """Return the claim that the mechanism has the target."""
        return self.problem.claim(mechanism, self.target)

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return self.problem.at(noise_multiplier)

    def describe(self, *others) -> str:
        """Return a text that names the search in a checkpoint, and the `others` that it depends on."""
        return repr((self.problem, self.target, self.rule, self.proposal, self.max_samples, *others))

    def smallest_exponent(self, top: int, ratio: float, estimate: float | None = None) -> tuple[int, int]:
        """Return the smallest grid exponent that samples are predicted to certify, and the limit on samples.

        The exponent is `top + 1` where there is none up to `top`. The search starts from the noise multiplier
        `estimate`.
        """
        least = math.ceil(math.log(MIN_NOISE_MULTIPLIER) / math.log(ratio))
        start = top if estimate is None else round(math.log(estimate) / math.log(ratio))

        def fits(exponent: int) -> bool:
            return exponent >= least and self.fits(self.at(ratio**exponent))

        found = smallest_where(fits, min(max(start, least), top), top) if top >= least else None
        return (top + 1, 0) if found is None else (found, math.ceil(self.limits[ratio**found]))

    def stream(self, mechanism: Mechanism):
        """Return the key of one candidate; a thousandth of a grid step separates two."""
        place = round(1e4 * math.log(mechanism.noise_multiplier)) % 400_000
        return randomness.stream_key(self.key, Stream.SEARCH + place)

    def fits(self, mechanism: Mechanism) -> bool:
        """Return whether samples are predicted to certify a mechanism within their limit and the time left.

        False where no proposal resolves the target.
        """
        self.clock(f"trying noise multiplier {mechanism.noise_multiplier:.4g}", 0, 0)
        self.limits[mechanism.noise_multiplier] = 1.0
        if not self.covered(mechanism):
            return False
        try:
            return all(self._fits(mechanism, direction) for direction in mechanism.directions)
        except (ValueError, ArithmeticError):  # no proposal, or none that can be drawn
            return False

    def fewest(self, mechanism: Mechanism) -> float:
        """Return the samples that a verification needs if all terms are zero, of the costlier direction."""
        return max(self._planned(mechanism, direction)[2] for direction in mechanism.directions)

    def limit(self, fewest: float) -> float:
        """Return the limit on samples of a direction: as given, or as an easy target needs, in the time left.

        The time is divided between two directions.
        """
        usual = max(MIN_LIMIT, MAX_RATIO_TO_FEWEST * fewest)
        most = usual if self.max_samples is None else self.max_samples
        return min(most, self.speed[-1] * max(0.0, self.clock.left) / 2) if self.speed else most

    def _planned(self, mechanism: Mechanism, direction) -> tuple[Proposal, Extrapolation | None, float]:
        """Return (proposal, line drawn in its place or None, samples if all terms are zero)."""
        target = self.target
        chosen, _ = choose_candidate(
            mechanism,
            target.epsilon,
            direction,
            target.budget,
            self.proposal,
            composed=target.composition,
        )
        theta = threshold(chosen, target.budget.delta_v) if chosen.log_scale > -math.inf else 1.0
        if theta >= 1:
            return chosen, None, 0.0
        q = target.budget.failure_probability
        if direction == Direction.ADD and self.proposal is None and self.rule == "anytime":
            key = randomness.stream_key(self.stream(mechanism), SearchStream.EXTRAPOLATION)
            line = cheaper_extrapolation(
                mechanism,
                target.epsilon,
                target.budget.delta_v,
                target.composition,
                predicted_samples(theta, q),
                key,
            )
            if line is not None:
                return chosen, line, float(line.expected_samples)
        return chosen, None, math.log(1 / q) / -math.log1p(-theta) if theta > 0 else math.inf

    def _fits(self, mechanism: Mechanism, direction) -> bool:
        chosen, line, fewest = self._planned(mechanism, direction)
        if fewest == 0:
            return True
        limit, noise = self.limit(fewest), mechanism.noise_multiplier
        self.limits[noise] = max(self.limits[noise], limit)
        if fewest > MAX_SHARE * limit:
            return False
        return line is not None or self.predicted(chosen, limit) <= MAX_SHARE * limit

    def predicted(self, chosen: Proposal, limit: float) -> float:
        """Return the predicted samples of a direction by a pilot, infinite where it looks impossible."""
        scale, place = math.exp(chosen.log_scale), SearchStream(Direction(chosen.direction).place)
        stream = randomness.stream_key(self.stream(chosen.mechanism), place)
        theta, q = threshold(chosen, self.target.budget.delta_v), self.target.budget.failure_probability
        blocks, counts = 0, np.zeros(len(bounds.TERM_EDGES), np.int64)
        while True:
            began = time.monotonic()
            for draws in base.draw_in_batches(chosen, stream, blocks, NUM_PILOT_BLOCKS):
                profile = chosen.profile or self.target.profile
                weighted = hockey_stick.weighted_terms(draws, chosen.direction, self.target.epsilon, profile)
                counts = counts + bounds.bin_terms(np.minimum(1.0, weighted / scale))
            blocks += NUM_PILOT_BLOCKS
            samples = int(counts.sum())
            if blocks > NUM_PILOT_BLOCKS:  # the first ones compile
                rate = samples / blocks * NUM_PILOT_BLOCKS / max(1e-9, time.monotonic() - began)
                self.speed.append(max(rate, *self.speed[-1:], 0.0))
            total, needed = (
                bounds.mean_upper(counts) * samples,
                bounds.predicted_samples(theta, counts, q),
            )
            enough = total >= (FEW_TERMS if needed > MAX_SHARE * limit else ENOUGH_TERMS)
            if enough or samples >= min(ENOUGH_TERMS / theta, PILOT_SHARE * limit):
                return needed
            self.clock(f"trying noise multiplier {chosen.mechanism.noise_multiplier:.4g}", 0, 0)


def candidate_key(key, index: int):
    """Return independent randomness for a candidate, for a key that a test fixed; None for None."""
    return None if key is None else randomness.stream_key(key, Stream.CANDIDATE + index)


def searched(checkpoint: Checkpoint | None, about: str, search: Callable[[], tuple[int, int]]):
    """Return (first exponent, limit on samples) of a search, or of a checkpoint of the same one."""
    state: Any = checkpoint.load("search") if checkpoint else None
    if state is None or state.get("target") != about:
        state = dict(zip(("target", "smallest", "limit"), (about, *search()), strict=True))
        if checkpoint:
            checkpoint.save("search", state)
    return state["smallest"], state["limit"]


def released(claim_at, first: int, end: int, rule: RuleName, limit: int, key, **options) -> Plan | None:
    """Return the plan of the candidate to release (`core.shares`), None where none is certified.

    `claim_at` is: exponent -> its claim, or None. The first one and the analytic one have the exponents
    `first` and `end`; `options` are of `verify_claim`. A verification that runs out of time certifies
    nothing.
    """

    def verified(step: int, share: float, may_give_up: bool) -> Plan | None:
        claim = claim_at(first + step)
        if claim is None:
            return None
        stop = Stop(rule, limit, share, PATIENCE * limit if may_give_up else math.inf)
        try:
            verdict = verify_claim(claim, stop, key=candidate_key(key, first + step), **options)
        except OutOfTimeError:
            return None
        return Plan(verdict.claim, verdict.evidence) if verdict.certified else None

    return shares.release(verified, end - first)
