"""Estimates that pick the candidates of a calibration, by pilot samples; and their verification.

The estimates are no guarantee: that comes from the verification of `released`, by fresh samples.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.accountants import analytic
from jaxacct.calibration.problem import MIN_NOISE_MULTIPLIER, Problem, smallest_where
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress
from jaxacct.core import shares, truncation
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import Bound, RuleName
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
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.trend import Pilot, trend

NUM_PILOT_BLOCKS = 16
"""Blocks of a coarse pilot."""
COARSE_STEPS = 4
"""Grid steps of the bracket that coarse pilots end with."""
NEGLIGIBLE_SUM = 0.5
"""Sum of a pilot's terms up to which its mean is unknown."""
NEARBY, MAX_SHIFT = 0.08, 3
"""Distance of noise multipliers, natural log, whose pilots inform one another, and the grid steps by which
together they may move the exponent."""
MAX_RATIO_TO_FEWEST, MIN_LIMIT = 384, 100_000
"""Default limit on samples: at most this many times those of a verification with all terms zero, if that is
above the second number. About a fifth of a grid step is left there."""
PATIENCE = 0.5
"""A verification is given up where its samples predict that it takes more than this fraction of the limit on
samples further: the next candidate takes half or less, for a hundredth more noise."""
MAX_SHARE_OWN_PILOT, MAX_SHARE_ALL_PILOTS = 0.5, 0.8
"""Maximum fraction of the limit that a candidate's predicted sample count may use, by its own pilot and by
all nearby ones, whose prediction has half the error."""


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """The estimates that pick candidates; nothing here is a guarantee."""

    problem: Problem
    target: Target
    rule: RuleName
    proposal: str | None
    key: object
    progress: Progress | None
    seen: dict = dataclasses.field(default_factory=dict)
    """(noise multiplier, direction) -> (blocks, counts) of its pilot so far."""
    planned: dict = dataclasses.field(default_factory=dict)
    """noise multiplier -> the extrapolation of its add direction, or None."""
    distributions: dict = dataclasses.field(default_factory=dict)
    """(noise multiplier, direction) -> (name of its proposal, threshold of the mean term)."""

    def covered(self, mechanism: Mechanism) -> bool:
        """Return whether the reserve for truncated batches covers this noise multiplier."""
        return self.problem.truncate_to is None or truncation.covers(mechanism, self.target.epsilon)

    def claim(self, mechanism: Mechanism) -> Claim:
        """Return the claim that the mechanism has the target."""
        return self.problem.claim(mechanism, self.target)

    def analytic_plan(self, mechanism: Mechanism, accountant: str | None) -> Plan:
        """Return the plan that an accountant certifies: the named one, or the one with the smallest bound."""
        epsilon, compose_with = self.target.epsilon, self.target.compose_with
        name, _ = analytic.bound_by(accountant, mechanism, epsilon, compose_with)
        return Plan(self.claim(mechanism), Bound(name))

    def describe(self, *others) -> str:
        """Return a text that names the search in a checkpoint, and the `others` that it depends on."""
        return repr((self.problem, self.target, self.rule, self.proposal, *others))

    def smallest_exponent(
        self, fallback: int, ratio: float, max_samples, estimate: float | None = None
    ) -> tuple[int, int]:
        """Return the smallest grid exponent whose predicted cost fits, and the limit on samples to use.

        The search starts from the noise multiplier `estimate`, or from the exponent `fallback`.
        """
        # An accountant's bound holds at the fallback, so a coarse pilot suffices unless it has nonzero terms.
        cost = self.cost(ratio**fallback, max_samples or 500_000, coarse=True)
        if cost == math.inf or self.saw_something(ratio**fallback):
            cost = self.cost(ratio**fallback, max_samples or 500_000)
        limit = max_samples
        if limit is None:
            limit = max(500_000, math.ceil(8 * cost)) if math.isfinite(cost) else 500_000
        elif limit < cost < math.inf and self.best_case(self.at(ratio**fallback)) > limit:
            raise ValueError(
                f"max_samples must be at least {math.ceil(cost)} for this target, got {max_samples}"
            )
        min_exponent = math.ceil(math.log(MIN_NOISE_MULTIPLIER) / math.log(ratio))

        def fits(exponent: int, coarse: bool = False) -> bool:
            if exponent >= fallback:
                return True
            allowed = MAX_SHARE_OWN_PILOT * limit
            return exponent >= min_exponent and self.cost(ratio**exponent, limit, allowed, coarse) <= allowed

        # Coarse pilots bracket the exponent; full pilots run inside the bracket only.
        if estimate is None:
            high, low = fallback, max(fallback - 64, min_exponent - 1)
            while fits(low, coarse=True):
                high, low = low, max(low - 64, min_exponent - 1)
        else:
            start = min(fallback, max(min_exponent, round(math.log(estimate) / math.log(ratio))))

            def fits_after(strides: int) -> bool:
                return fits(min(fallback, start + strides * COARSE_STEPS), coarse=True)

            strides = smallest_where(fits_after, 0, (fallback - start) // COARSE_STEPS + 1)
            assert strides is not None  # it holds at the fallback
            high = min(fallback, start + strides * COARSE_STEPS)
            low = high - COARSE_STEPS
        while high - low > COARSE_STEPS:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle, coarse=True) else (middle, high)
        if max_samples is None and high < fallback:
            most = max(MIN_LIMIT, MAX_RATIO_TO_FEWEST * self.best_case(self.at(ratio**high)))
            limit = math.ceil(min(limit, most))
        # All coarse pilots together choose the start.
        between = range(low + 1, high)
        begin = next(
            (e for e in between if self.cost_by_neighbours(ratio**e) <= MAX_SHARE_OWN_PILOT * limit), high
        )
        alone = smallest_where(fits, begin, fallback)
        assert alone is not None  # it holds at the fallback
        if alone == fallback or not self.distributions:
            return alone, int(limit)

        def fits_by_trend(exponent: int) -> bool:
            if not max(min_exponent, alone - MAX_SHIFT) <= exponent < min(fallback, alone + MAX_SHIFT):
                return exponent > alone
            cost = self.cost_by_trend(ratio**exponent)
            return exponent >= alone if cost is None else cost <= MAX_SHARE_ALL_PILOTS * limit

        found = smallest_where(fits_by_trend, alone, fallback)
        assert found is not None  # as before
        return found, int(limit)

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return self.problem.at(noise_multiplier)

    def best_case(self, mechanism: Mechanism) -> float:
        """Return the samples that a verification needs if all terms are zero, of the costlier direction."""

        def fewest(direction):
            theta = threshold(self.choose(mechanism, direction), self.target.budget.delta_v)
            if direction == Direction.ADD:
                line = self.extrapolation(mechanism, theta, self.stream(mechanism))
                if line is not None:
                    return float(line.expected_samples)
            return _fewest(theta, self.target.budget)

        return max(map(fewest, mechanism.directions))

    def stream(self, mechanism: Mechanism):
        """Return the key of one candidate; a thousandth of a grid step separates two."""
        place = round(1e4 * math.log(mechanism.noise_multiplier)) % 400_000
        return randomness.stream_key(self.key, Stream.SEARCH + place)

    def choose(self, mechanism: Mechanism, direction: str) -> Proposal:
        target, name = self.target, self.proposal
        chosen, _ = choose_candidate(
            mechanism, target.epsilon, direction, target.budget, name, composed=target.composition
        )
        return chosen

    def cost(
        self, noise_multiplier: float, limit: float, draws_for: float = math.inf, coarse: bool = False
    ) -> float:
        """Return the predicted samples to certify the costlier direction; infinite where it looks impossible.

        A pilot has at most a quarter of `limit`, its first blocks if `coarse`; none runs where a verification
        with all terms zero takes more than `draws_for`.
        """
        if self.progress:
            self.progress(f"trying noise multiplier {noise_multiplier:.4g}", 0, 0)

        def drawn(chosen: Proposal, theta: float) -> float:
            if draws_for < math.inf and not (theta > 0 and _fewest(theta, self.target.budget) <= draws_for):
                return math.inf
            self.distributions[noise_multiplier, chosen.direction] = chosen.name, theta
            stream = randomness.stream_key(
                self.stream(chosen.mechanism), SearchStream(Direction(chosen.direction).place)
            )
            counts = self.pilot(chosen, stream, theta, limit, coarse)
            return bounds.predicted_samples(theta, counts, self.target.budget.failure_probability)

        cost = self._costlier(noise_multiplier, drawn)
        assert cost is not None
        return cost

    def cost_by_trend(self, noise_multiplier: float) -> float | None:
        """Return as `cost`, by all nearby pilots, without samples; None where they do not suffice."""

        def of_neighbours(chosen: Proposal, theta: float) -> float | None:
            near = self._near(noise_multiplier, chosen.direction)
            return self._samples(
                [pilot for name, pilot in near if name == chosen.name], noise_multiplier, theta
            )

        return self._costlier(noise_multiplier, of_neighbours)

    def cost_by_neighbours(self, noise_multiplier: float) -> float:
        """Return as `cost_by_trend`, at the threshold of the nearest pilot and without tables of proposals.

        Infinite where the pilots do not suffice.
        """
        max_needed = 0.0 if self.distributions else math.inf
        for direction in dict.fromkeys(direction for _, direction in self.distributions):
            near = [pilot for _, pilot in self._near(noise_multiplier, direction)]
            if not near:
                return math.inf
            nearest = min(near, key=lambda pilot: abs(pilot.log_noise - math.log(noise_multiplier)))
            needed = self._samples(near, noise_multiplier, nearest.theta)
            max_needed = max(max_needed, math.inf if needed is None else needed)
        return max_needed

    def _near(self, noise_multiplier: float, direction: str) -> list[tuple[str, Pilot]]:
        """Return (name of its proposal, pilot) of the nearby noise multipliers."""
        log_noise, found = math.log(noise_multiplier), []
        for (noise, of), (name, theta) in self.distributions.items():
            if of == direction and abs(math.log(noise) - log_noise) <= NEARBY and (noise, of) in self.seen:
                found.append((name, Pilot(math.log(noise), theta, self.seen[noise, of][1])))
        return found

    def _samples(self, pilots: list[Pilot], noise_multiplier: float, theta: float) -> float | None:
        """Return the samples of a verification by the trend of the pilots, None where there is none."""
        found = trend(pilots) if theta > 0 else None
        if found is None:
            return None
        return found.samples(math.log(noise_multiplier), theta, self.target.budget.failure_probability)

    def _costlier(
        self, noise_multiplier: float, drawn: Callable[[Proposal, float], float | None]
    ) -> float | None:
        """Return the samples to certify the costlier direction; None or infinity as `drawn` returns it."""
        mechanism, max_needed = self.at(noise_multiplier), 0.0
        if not self.covered(mechanism):
            return math.inf
        for direction in mechanism.directions:
            chosen = self.choose(mechanism, direction)
            theta = threshold(chosen, self.target.budget.delta_v) if chosen.log_scale > -math.inf else 1.0
            if theta >= 1:
                continue
            stream = self.stream(mechanism)
            line = self.extrapolation(mechanism, theta, stream) if direction == Direction.ADD else None
            needed = drawn(chosen, theta) if line is None else float(line.expected_samples)
            if needed is None or needed == math.inf:
                return needed
            max_needed = max(max_needed, needed)
        return max_needed

    def saw_something(self, noise_multiplier: float) -> bool:
        """Return whether terms of its pilots have more than a negligible sum."""
        pilots = (counts for (noise, _), (_, counts) in self.seen.items() if noise == noise_multiplier)
        return any(_total(counts) > NEGLIGIBLE_SUM for counts in pilots)

    def extrapolation(self, mechanism: Mechanism, theta: float, stream) -> Extrapolation | None:
        """Return the line by which `verify` is expected to certify the add direction, if any."""
        if self.proposal is not None or self.rule != "anytime":
            return None
        noise = mechanism.noise_multiplier
        if noise not in self.planned:
            otherwise = predicted_samples(theta, self.target.budget.failure_probability)
            key = randomness.stream_key(stream, SearchStream.EXTRAPOLATION)
            target = self.target
            self.planned[noise] = cheaper_extrapolation(
                mechanism, target.epsilon, target.budget.delta_v, target.composition, otherwise, key
            )
        return self.planned[noise]

    def pilot(self, chosen, stream, theta: float, limit: float, coarse: bool = False) -> np.ndarray:
        """Return counts of terms that distinguish a mean of `theta` from half of it, or from one far away.

        Earlier samples of this candidate come first. With `coarse` they suffice, where there are any.
        """
        scale = math.exp(chosen.log_scale)
        name = chosen.mechanism.noise_multiplier, chosen.direction
        nothing = np.zeros(len(bounds.TERM_EDGES), np.int64)
        blocks, counts = self.seen.setdefault(name, (0, nothing))
        while not (blocks if coarse else _seen_enough(counts, theta, limit)):
            step = max(NUM_PILOT_BLOCKS, blocks // 2)
            for draws in base.draw_in_batches(chosen, stream, blocks, step):
                profile = chosen.profile or self.target.profile
                weighted = hockey_stick.weighted_terms(draws, chosen.direction, self.target.epsilon, profile)
                counts = counts + bounds.bin_terms(np.minimum(1.0, weighted / scale))
            blocks += step
            self.seen[name] = blocks, counts
        return counts


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
    `first` and `end`; `options` are of `verify_claim`.
    """

    def verified(step: int, share: float, may_give_up: bool) -> Plan | None:
        claim = claim_at(first + step)
        if claim is None:
            return None
        stop = Stop(rule, limit, share, PATIENCE * limit if may_give_up else math.inf)
        verdict = verify_claim(claim, stop, key=candidate_key(key, first + step), **options)
        return Plan(verdict.claim, verdict.evidence) if verdict.certified else None

    return shares.release(verified, end - first)


def _seen_enough(counts: np.ndarray, theta: float, limit: float) -> bool:
    """Return whether a pilot may end.

    It may at a sum of terms of 30, or of 10 where a mean of `theta` would have given 2.5; or at as many
    samples as would have given 10, or 5 where the sum is negligible.
    """
    samples = int(counts.sum())
    if not samples:
        return False
    total = _total(counts)
    if total >= 30 or (total >= 10 and total >= 4 * theta * samples):
        return True
    return samples >= min((10 if total > NEGLIGIBLE_SUM else 5) / theta, limit / 4)


def _total(counts: np.ndarray) -> float:
    """Return at least the sum of the terms."""
    return bounds.mean_upper(counts) * int(counts.sum())


def _fewest(theta: float, budget: Budget) -> float:
    """Return the samples after which terms that are all zero prove a mean below `theta`."""
    return 0.0 if theta >= 1 else math.log(1 / budget.failure_probability) / -math.log1p(-theta)
