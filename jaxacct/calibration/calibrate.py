"""Estimate, verify, release: the smallest noise multiplier that can be certified (arXiv 2602.09338, algorithm
5)."""

import bisect
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxacct.accountants import ACCOUNTANTS, analytic, truncation, unamplified
from jaxacct.calibration.choice import Choice
from jaxacct.common import validate as _validate
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress
from jaxacct.core import shares
from jaxacct.core.check import Verdict
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import Bound
from jaxacct.core.plan import Plan
from jaxacct.core.text import outcome_in_words
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import SearchStream, Stream
from jaxacct.mechanisms.mechanism import ADJACENCIES, Mechanism, check_pair
from jaxacct.proposals import base
from jaxacct.proposals.base import DIRECTIONS, Proposal
from jaxacct.proposals.candidates import choose_candidate, predicted_samples
from jaxacct.proposals.families.extrapolation import Extrapolation, cheaper_extrapolation
from jaxacct.proposals.threshold import threshold
from jaxacct.schemes import Scheme
from jaxacct.schemes.batch_sizes import check_dataset_size
from jaxacct.statistics import bounds, hockey_stick, roots
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.trend import Pilot, trend
from jaxacct.strategies import Strategy, ending

# Blocks that a search looks at first for each noise multiplier.
SEARCH_BLOCKS = 16
# Grid steps within which a glance at each noise multiplier says where the smallest promising one is.
_NEAR = 4
_NOTHING = 0.5  # a sum of terms up to which a pilot saw next to nothing
# Noise multipliers this near, natural log, have pilots that tell of one another, which may move the choice by
# so many grid steps.
_ALIKE, _MOVED = 0.08, 3
# The limit on samples of a search without `max_samples`: at most so many times what a verification without a
# single hit takes, if that is more than the second number. It is where about a fifth of a grid step is left.
_TIMES_FEWEST, _LEAST_LIMIT = 384, 100_000
# Of the limit on samples, what a candidate may be predicted to take: as its own pilot has it, and as its
# neighbours' have it too, which is known twice as well.
_ALONE, _TOGETHER = 0.5, 0.8
# Of the limit on samples, how many more a candidate must not be predicted to take while it is verified: the
# next one takes half or less of what it takes, for a hundredth more noise.
_PATIENCE = 0.5
# The smallest noise multiplier that a search looks at: targets that hold at any noise would have it go on for
# ever, and a privacy loss distribution of less takes minutes.
LEAST_SEARCHED = 0.05


class NotCertifiedError(Exception):
    """A given noise multiplier was not certified.

    Attributes:
      verdict: what the verification found, or None where an accountant rejected it.
    """

    def __init__(self, message: str, verdict: Verdict | None):
        super().__init__(message)
        self.verdict = verdict


def calibrate(
    scheme: Scheme,
    strategy: Strategy,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    noise_multiplier: float | None = None,
    grid_ratio: float = 1.01,
    failure_fraction: float = 0.01,
    rule: str = "anytime",
    max_samples: int | None = None,
    proposal: str | None = None,
    accountant: str | None = None,
    compose_with=None,
    adjacency: str = ADJACENCIES[0],
    checkpoint_dir=None,
    choice: Choice | None = None,
    estimate: float | None = None,
    progress: Progress | None = None,
    key=None,
) -> Plan:
    """Find and certify a noise multiplier for an (epsilon, delta) target.

    A cheap estimate with randomness of its own picks the smallest promising candidate on the grid, which is
    verified with 0.9 q of the failure probability q and released when it is accepted. Otherwise the next
    larger one is, with 0.05 q. Otherwise a few still larger ones are verified from the largest down with
    0.05 q, and the smallest one for which it and those above were accepted is released. When none is, an
    analytic candidate is. A verification is given up where its draws predict that it takes long, which costs
    nothing but its part of q. So what is released was accepted wrongly with probability at most q, and by
    theorem A.1 of arXiv 2602.09338 the whole procedure, calibration and training together, is
    (epsilon, delta_v + q (1 - delta_v))-DP, which is (epsilon, delta).

    Args:
      scheme, strategy: who takes part when, and how noise is correlated. A `BandedToeplitz` with at least a
        twentieth as many bands as there are steps is certified as the n x n matrix that it is in training, a
        `FiniteToeplitz`, with less noise (proofs/finite_horizon.md).
      epsilon: target, natural log, above 0.
      delta: target, in (0, 1).
      advantage: in place of both, in (0, 1): no test whether an example took part has a true positive rate
        that is more than this above its false positive rate. It is the target (0, advantage).
      dataset_size: number of examples, for the plan's batch sizes.
      max_batch_size: cut larger batches to this, and account for it (`jaxacct.accountants.truncation`); by
        default batches are never cut, and the plan states a size that none exceeds.
      noise_multiplier: certify this value only.
      grid_ratio: candidates are powers of this, above 1.
      failure_fraction: share of delta spent on the verifier's failure probability q.
      rule: "anytime" or "fixed" (see `verify`).
      max_samples: draws a direction and candidate; by default a few hundred times what the target needs at
        least, from a hundred thousand to half a million, or more where any noise needs more.
      proposal: insist on this proposal ("plain"); by default the cheapest.
      accountant: certify by this bound and draw nothing: "unamplified", "revealed-pattern", "pld" or
        "random-allocation" (`accountants.analytic`), or "analytic" for the best of them. The first two hold
        for `MultiAttribution` on graphs in which examples have several owners. Where an accountant knows
        delta from both sides (balls-in-bins with C = I), it is taken unless rule, max_samples or proposal
        ask for draws.
      compose_with: a dp-accounting `DpEvent` that the guarantee shall cover too.
      adjacency: "zero-out" or "add-or-remove-one", which have the same dominating pair where examples are
        sampled independently (proofs/adjacency.md); other mechanisms refuse the second.
      checkpoint_dir: keeps finished batches; the same call then resumes.
      choice: `Recommendation.choice`, for the plan to say how scheme and strategy were chosen.
      estimate: a noise multiplier to look at first, such as `Recommended.noise_multiplier`: a search ends
        sooner near what it looks for, and nothing else depends on it.
      progress: called with (what, samples done, samples expected).
      key: JAX key, from the operating system by default. Only tests should fix it.

    Returns:
      A certified `Plan`.

    Raises:
      ValueError: bad arguments, or too few samples for the target.
      NotCertifiedError: a given `noise_multiplier` could not be certified.
    """
    check_pair(scheme, strategy)
    strategy = ending(strategy, scheme)
    epsilon, delta = _validate.target(epsilon, delta, advantage)
    if not _validate.positive_number("grid_ratio", grid_ratio) > 1:
        raise ValueError(f"grid_ratio must be above 1, was {grid_ratio!r}")
    if max_samples is not None:
        _validate.positive_integer("max_samples", max_samples)
    if estimate is not None:
        _validate.positive_number("estimate", estimate)
    if dataset_size is not None:
        check_dataset_size(scheme, _validate.positive_integer("dataset_size", dataset_size))
    if choice is not None:
        _validate.instance("choice", choice, Choice, "a jaxacct.calibration.choice.Choice")
        other = choice.flaws(scheme, strategy, epsilon, delta, dataset_size)
        if other:
            raise ValueError(other[0])
    _validate.one_of("rule", rule, ("anytime", "fixed"))
    _validate.one_of("adjacency", adjacency, ADJACENCIES)
    if accountant is not None:
        _validate.one_of("accountant", accountant, ("analytic", *ACCOUNTANTS))
        of_draws = dict(max_samples=max_samples, proposal=proposal, checkpoint_dir=checkpoint_dir, key=key)
        of_draws |= dict(rule=None if rule == "anytime" else rule)
        for name, value in of_draws.items():
            if value is not None:
                raise ValueError(f"{name} must not be given together with accountant: nothing is drawn")
    problem = _Problem(scheme, strategy, adjacency, dataset_size, max_batch_size)
    target = problem.target(epsilon, delta, failure_fraction, compose_with)
    run_key = randomness.fresh_key() if key is None else key
    target.profile  # noqa: B018 - an event that cannot be composed is refused before anything is searched
    search = _Search(problem, target, rule, proposal, run_key, progress)
    if accountant is None and rule == "anytime" and max_samples is None and proposal is None:
        known = analytic.two_sided(search.at(noise_multiplier or 1.0), compose_with)
        accountant = known.name if known is not None else None
    if accountant is not None:
        named = None if accountant == "analytic" else accountant
        return _chosen(_compute(search, named, grid_ratio, noise_multiplier), choice)
    checkpoint = Checkpoint(checkpoint_dir) if checkpoint_dir else None
    try:
        options = dict(proposal=proposal, checkpoint=checkpoint, progress=progress)
        if noise_multiplier is not None:
            found = _certify(search, noise_multiplier, max_samples, options, key)
        else:
            found = _release(search, grid_ratio, max_samples, estimate, options, key)
        return _chosen(found, choice)
    finally:
        if checkpoint:
            checkpoint.close()


def _chosen(plan: Plan, choice: Choice | None) -> Plan:
    return plan if choice is None else dataclasses.replace(plan, choice=choice.to_json())


def _certify(search, noise_multiplier, max_samples, options, key) -> Plan:
    mechanism, target = search.at(noise_multiplier), search.target
    if not search.covered(mechanism):
        raise ValueError(f"max_batch_size cannot be accounted for at noise multiplier {noise_multiplier:g}")
    cost = search.best_case(mechanism)
    limit = max(500_000, math.ceil(8 * cost)) if max_samples is None else max_samples
    if limit < cost:
        raise ValueError(f"max_samples must be at least {math.ceil(cost)} for this target, was {max_samples}")
    stop = Stop(search.rule, limit)
    verdict = verify_claim(search.claim(mechanism), stop, key=_candidate_key(key, 0), **options)
    if not verdict.certified:
        bad = verdict.directions[-1] if verdict.remove and verdict.remove.certified else verdict.remove
        seen = "; ".join(verdict.flaws[:1])
        if bad is not None:
            found = outcome_in_words(bad).removeprefix("not certified: ")
            seen = (
                f"{bad.direction} direction: {found}; delta there is about {bad.estimate:.3g} (an estimate)"
            )
        raise NotCertifiedError(
            f"noise multiplier {noise_multiplier:g} could not be certified at epsilon {target.epsilon:g}, "
            f"delta {target.delta:g}: {seen}",
            verdict,
        )
    return Plan(verdict.claim, verdict.evidence)


def _compute(search, accountant: str | None, ratio, noise_multiplier: float | None) -> Plan:
    """The plan of an analytic bound: of the smallest noise on the grid, or of the one given."""
    if noise_multiplier is None:
        noise_multiplier = ratio ** analytic_exponent(search.at(1.0), search.target, ratio, accountant)
    mechanism, target = search.at(noise_multiplier), search.target
    if not search.covered(mechanism):
        raise ValueError("max_batch_size cannot be accounted for: the likelihood ratio has too large a tail")
    found = search.analytic_plan(mechanism, accountant)
    if found.flaws:
        raise NotCertifiedError(
            f"noise multiplier {noise_multiplier:g} could not be certified at epsilon {target.epsilon:g}, "
            f"delta {target.delta:g}: {found.flaws[0]}",
            None,
        )
    return found


def _release(search, ratio, max_samples, estimate, options, key) -> Plan:
    target = search.target
    fallback = analytic_exponent(search.at(1.0), target, ratio)
    state = options["checkpoint"].load("search") if options["checkpoint"] else None
    if state is None or state.get("target") != search.describe(ratio, max_samples):
        smallest, limit = search.smallest_exponent(fallback, ratio, max_samples, estimate)
        state = {
            "target": search.describe(ratio, max_samples),
            "smallest": smallest,
            "limit": limit,
        }
        if options["checkpoint"]:
            options["checkpoint"].save("search", state)

    def verified(step: int, share: float, may_give_up: bool) -> Plan | None:
        exponent, limit = state["smallest"] + step, state["limit"]
        mechanism = search.at(ratio**exponent)
        if not search.covered(mechanism):
            return None
        stop = Stop(search.rule, limit, share, _PATIENCE * limit if may_give_up else math.inf)
        verdict = verify_claim(search.claim(mechanism), stop, key=_candidate_key(key, exponent), **options)
        return Plan(verdict.claim, verdict.evidence) if verdict.certified else None

    released = shares.release(verified, fallback - state["smallest"])
    if released is not None:
        return released
    mechanism = search.at(ratio**fallback)
    if not search.covered(mechanism):
        raise ValueError("max_batch_size cannot be accounted for: the likelihood ratio has too large a tail")
    return search.analytic_plan(mechanism, None)


def _candidate_key(key, index: int):
    """Independent randomness for every candidate; from the operating system unless a test fixed it."""
    return None if key is None else randomness.stream_key(key, Stream.CANDIDATE + index)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is to be certified, but for the noise multiplier and the target."""

    scheme: Scheme
    strategy: Strategy
    adjacency: str
    dataset_size: int | None
    truncate_to: int | None

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return Mechanism(self.scheme, self.strategy, noise_multiplier, self.adjacency)

    def claim(self, mechanism: Mechanism, target: Target) -> Claim:
        """Return the claim that a mechanism of the problem has a target."""
        return Claim(mechanism, target, self.dataset_size, self.truncate_to)

    def target(self, epsilon: float, delta: float, failure_fraction: float, compose_with) -> Target:
        """Return the target with a budget of all of delta that is not reserved for batch sizes.

        Raises:
          ValueError: where reserves leave less than half of delta, or cannot be computed.
        """
        whole = Target(epsilon, delta, Budget.split(delta, failure_fraction), compose_with)
        claim = self.claim(self.at(1.0), whole)
        truncation_delta = claim.truncation_delta or 0.0
        if not truncation_delta < delta / 2:
            raise ValueError(
                f"max_batch_size must be larger: truncating batches to {self.truncate_to} may cost "
                f"{truncation_delta:.3g} of {delta:g}; the scheme truncated-b-min-sep has likelihoods "
                "that know the truncation"
            )
        return dataclasses.replace(whole, budget=Budget.split(delta - claim.reserved, failure_fraction))


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    """The estimates that pick candidates; nothing here is a guarantee."""

    problem: _Problem
    target: Target
    rule: str
    proposal: str | None
    key: object
    progress: Progress | None
    seen: dict = dataclasses.field(default_factory=dict)
    """(noise multiplier, direction) -> (blocks, counts) of its pilot so far."""
    planned: dict = dataclasses.field(default_factory=dict)
    """noise multiplier -> the extrapolation of its add direction, or None."""
    laws: dict = dataclasses.field(default_factory=dict)
    """(noise multiplier, direction) -> (name of what its pilot drew, the mean to stay below)."""

    def covered(self, mechanism: Mechanism) -> bool:
        """Whether the delta put aside for cut batches suffices for this noise."""
        return self.problem.truncate_to is None or truncation.covers(mechanism, self.target.epsilon)

    def claim(self, mechanism: Mechanism) -> Claim:
        """Return the claim that the mechanism has the target."""
        return self.problem.claim(mechanism, self.target)

    def analytic_plan(self, mechanism: Mechanism, accountant: str | None) -> Plan:
        """Return the plan that an accountant certifies: the named one, or the one with the smallest bound."""
        epsilon, compose_with = self.target.epsilon, self.target.compose_with
        name, _ = analytic.bound_by(accountant, mechanism, epsilon, compose_with)
        return Plan(self.claim(mechanism), Bound(name))

    def describe(self, ratio, max_samples) -> str:
        """What a checkpoint of the search is about."""
        target = self.target
        return repr((self.problem, target.epsilon, target.delta, ratio, max_samples, target.compose_with))

    def smallest_exponent(
        self, fallback: int, ratio: float, max_samples, estimate: float | None = None
    ) -> tuple[int, int]:
        """The smallest grid exponent whose predicted cost fits, and the limit on samples to use.

        Looked for from `estimate`, or from `fallback`.
        """
        # An accountant's bound holds there. Draws only say how many to allow for, and seldom see anything: to
        # be sure of that would take as long as a candidate that is looked at properly.
        cost = self.cost(ratio**fallback, max_samples or 500_000, glance=True)
        if cost == math.inf or self.saw_something(ratio**fallback):
            cost = self.cost(ratio**fallback, max_samples or 500_000)
        limit = max_samples
        if limit is None:
            limit = max(500_000, math.ceil(8 * cost)) if math.isfinite(cost) else 500_000
        elif limit < cost < math.inf and self.best_case(self.at(ratio**fallback)) > limit:
            raise ValueError(
                f"max_samples must be at least {math.ceil(cost)} for this target, was {max_samples}"
            )
        least = math.ceil(math.log(LEAST_SEARCHED) / math.log(ratio))

        def promising(exponent: int, glance: bool = False) -> bool:
            if exponent >= fallback:
                return True
            allowed = _ALONE * limit
            return exponent >= least and self.cost(ratio**exponent, limit, allowed, glance) <= allowed

        # A glance at each says where about it is, so that only those near it are looked at properly.
        if estimate is None:
            high, low = fallback, max(fallback - 64, least - 1)
            while promising(low, glance=True):
                high, low = low, max(low - 64, least - 1)
        else:
            start = min(fallback, max(least, round(math.log(estimate) / math.log(ratio))))

            def promising_from_there(strides: int) -> bool:
                return promising(min(fallback, start + strides * _NEAR), glance=True)

            strides = _smallest_where(promising_from_there, 0, (fallback - start) // _NEAR + 1)
            assert strides is not None  # it holds at the fallback
            high = min(fallback, start + strides * _NEAR)
            low = high - _NEAR
        while high - low > _NEAR:
            middle = (low + high) // 2
            low, high = (low, middle) if promising(middle, glance=True) else (middle, high)
        if max_samples is None and high < fallback:
            most = max(_LEAST_LIMIT, _TIMES_FEWEST * self.best_case(self.at(ratio**high)))
            limit = math.ceil(min(limit, most))
        # Glances together say where to begin.
        between = range(low + 1, high)
        begin = next((e for e in between if self.cost_by_neighbours(ratio**e) <= _ALONE * limit), high)
        alone = _smallest_where(promising, begin, fallback)
        assert alone is not None  # it holds at the fallback
        if alone == fallback or not self.laws:
            return alone, int(limit)

        def cheap(exponent: int) -> bool:
            if not max(least, alone - _MOVED) <= exponent < min(fallback, alone + _MOVED):
                return exponent > alone
            cost = self.cost_by_trend(ratio**exponent)
            return exponent >= alone if cost is None else cost <= _TOGETHER * limit

        found = _smallest_where(cheap, alone, fallback)
        assert found is not None  # as before
        return found, int(limit)

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return self.problem.at(noise_multiplier)

    def best_case(self, mechanism: Mechanism) -> float:
        """Samples that even a verification without a single hit needs, the worse direction."""

        def fewest(direction):
            theta = threshold(self.choose(mechanism, direction), self.target.budget.delta_v)
            if direction == Direction.ADD:
                line = self.extrapolation(mechanism, theta, self.stream(mechanism))
                if line is not None:
                    return float(line.expected_samples)
            return _fewest(theta, self.target.budget)

        return max(map(fewest, DIRECTIONS))

    def stream(self, mechanism: Mechanism):
        """The key of one candidate; a part in a thousand of a grid step keeps them apart."""
        place = round(1e4 * math.log(mechanism.noise_multiplier)) % 400_000
        return randomness.stream_key(self.key, Stream.SEARCH + place)

    def choose(self, mechanism: Mechanism, direction: str) -> Proposal:
        target, name = self.target, self.proposal
        chosen, _ = choose_candidate(
            mechanism, target.epsilon, direction, target.budget, name, composed=target.composition
        )
        return chosen

    def cost(
        self, noise_multiplier: float, limit: float, draws_for: float = math.inf, glance: bool = False
    ) -> float:
        """Predicted samples to certify the costlier direction; infinite when it looks impossible.

        Args:
          limit: samples of a verification; a pilot has a quarter at most.
          draws_for: nothing is drawn where even a verification without a hit takes more.
          glance: from the first blocks of a pilot alone.
        """
        if self.progress:
            self.progress(f"search {noise_multiplier:.4g}", 0, 0)

        def drawn(chosen: Proposal, theta: float) -> float:
            if draws_for < math.inf and not (theta > 0 and _fewest(theta, self.target.budget) <= draws_for):
                return math.inf
            self.laws[noise_multiplier, chosen.direction] = chosen.name, theta
            stream = randomness.stream_key(
                self.stream(chosen.mechanism), SearchStream(Direction(chosen.direction).place)
            )
            counts = self.pilot(chosen, stream, theta, limit, glance)
            return bounds.predicted_samples(theta, counts, self.target.budget.failure_probability)

        cost = self._costlier(noise_multiplier, drawn)
        assert cost is not None
        return cost

    def cost_by_trend(self, noise_multiplier: float) -> float | None:
        """As `cost`, from what all pilots near it say together; None where they say too little.

        Draws nothing that `cost` has not drawn.
        """

        def of_neighbours(chosen: Proposal, theta: float) -> float | None:
            near = self._near(noise_multiplier, chosen.direction)
            return self._samples(
                [pilot for name, pilot in near if name == chosen.name], noise_multiplier, theta
            )

        return self._costlier(noise_multiplier, of_neighbours)

    def cost_by_neighbours(self, noise_multiplier: float) -> float:
        """As `cost_by_trend`, at the threshold of the nearest pilot: no law is chosen, and no table made.

        Infinite where pilots say too little.
        """
        most = 0.0 if self.laws else math.inf
        for direction in dict.fromkeys(direction for _, direction in self.laws):
            near = [pilot for _, pilot in self._near(noise_multiplier, direction)]
            if not near:
                return math.inf
            nearest = min(near, key=lambda pilot: abs(pilot.log_noise - math.log(noise_multiplier)))
            needed = self._samples(near, noise_multiplier, nearest.theta)
            most = max(most, math.inf if needed is None else needed)
        return most

    def _near(self, noise_multiplier: float, direction: str) -> list[tuple[str, Pilot]]:
        """(name of the law drawn from, pilot) of the noise multipliers that are near."""
        log_noise, found = math.log(noise_multiplier), []
        for (noise, of), (name, theta) in self.laws.items():
            if of == direction and abs(math.log(noise) - log_noise) <= _ALIKE and (noise, of) in self.seen:
                found.append((name, Pilot(math.log(noise), theta, self.seen[noise, of][1])))
        return found

    def _samples(self, pilots: list[Pilot], noise_multiplier: float, theta: float) -> float | None:
        """Samples that a verification takes by the trend of the pilots, None where there is none."""
        found = trend(pilots) if theta > 0 else None
        if found is None:
            return None
        return found.samples(math.log(noise_multiplier), theta, self.target.budget.failure_probability)

    def _costlier(
        self, noise_multiplier: float, drawn: Callable[[Proposal, float], float | None]
    ) -> float | None:
        """Samples to certify the costlier direction; None or infinity where one direction has that.

        Args:
          drawn: (what is to be drawn, the mean to stay below) -> samples.
        """
        mechanism, most = self.at(noise_multiplier), 0.0
        if not self.covered(mechanism):
            return math.inf
        for direction in DIRECTIONS:
            chosen = self.choose(mechanism, direction)
            theta = threshold(chosen, self.target.budget.delta_v) if chosen.log_scale > -math.inf else 1.0
            if theta >= 1:
                continue
            stream = self.stream(mechanism)
            line = self.extrapolation(mechanism, theta, stream) if direction == Direction.ADD else None
            needed = drawn(chosen, theta) if line is None else float(line.expected_samples)
            if needed is None or needed == math.inf:
                return needed
            most = max(most, needed)
        return most

    def saw_something(self, noise_multiplier: float) -> bool:
        """Whether terms of its pilots, if there were any, add up to more than next to nothing."""
        pilots = (counts for (noise, _), (_, counts) in self.seen.items() if noise == noise_multiplier)
        return any(_total(counts) > _NOTHING for counts in pilots)

    def extrapolation(self, mechanism: Mechanism, theta: float, stream) -> Extrapolation | None:
        """One like that by which `verify` is expected to certify the add direction, if any."""
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

    def pilot(self, chosen, stream, theta: float, limit: float, glance: bool = False) -> np.ndarray:
        """Terms enough to tell a mean of `theta` from half of it, or to see that it is far above or below;
        those seen before first. A `glance` draws nothing more where some have been seen.
        """
        scale = math.exp(chosen.log_scale)
        name = chosen.mechanism.noise_multiplier, chosen.direction
        nothing = np.zeros(len(bounds.TERM_EDGES), np.int64)
        blocks, counts = self.seen.setdefault(name, (0, nothing))
        while not (blocks if glance else _seen_enough(counts, theta, limit)):
            step = max(SEARCH_BLOCKS, blocks // 2)
            for draws in base.draw_in_batches(chosen, stream, blocks, step):
                profile = chosen.profile or self.target.profile
                weighted = hockey_stick.weighted_terms(draws, chosen.direction, self.target.epsilon, profile)
                counts = counts + bounds.bin_terms(np.minimum(1.0, weighted / scale))
            blocks += step
            self.seen[name] = blocks, counts
        return counts


def _seen_enough(counts: np.ndarray, theta: float, limit: float) -> bool:
    """Whether a pilot may end: a sum of terms of 30, or of 10 where `theta` would have given 2.5; or samples
    for which it would have given 10, or 5 where next to nothing was seen.
    """
    samples = int(counts.sum())
    if not samples:
        return False
    total = _total(counts)
    if total >= 30 or (total >= 10 and total >= 4 * theta * samples):
        return True
    return samples >= min((10 if total > _NOTHING else 5) / theta, limit / 4)


def _total(counts: np.ndarray) -> float:
    """At least the sum of the terms."""
    return bounds.mean_upper(counts) * int(counts.sum())


def _fewest(theta: float, budget: Budget) -> float:
    return 0.0 if theta >= 1 else math.log(1 / budget.failure_probability) / -math.log1p(-theta)


def analytic_exponent(
    mechanism: Mechanism, target: Target, ratio: float, accountant: str | None = None
) -> int:
    """The smallest grid exponent at which an analytic accountant already gives the target's budget.

    Of the noise on the grid, in place of the mechanism's.

    Raises:
      ValueError: when the composed event alone exceeds the target, or for a named `accountant` that does not
        cover the scheme.
    """

    epsilon, delta, compose_with = target.epsilon, target.budget.delta, target.compose_with
    top = unamplified.noise_multiplier_for(mechanism, epsilon, delta)
    start = math.ceil(math.log(top) / math.log(ratio)) + 1
    most = start + math.ceil(math.log(1e4) / math.log(ratio))

    def private(exponent: int) -> bool:
        if not LEAST_SEARCHED <= ratio**exponent <= _validate.MOST_NOISE:
            return False
        noisy = dataclasses.replace(mechanism, noise_multiplier=ratio**exponent)
        return analytic.bound_by(accountant, noisy, epsilon, compose_with)[1] <= delta

    found = _smallest_where(private, start, most)
    if found is None and compose_with is None:
        raise ValueError(f"accountant {accountant} reaches no delta as small as {delta:g}")
    if found is None:
        raise ValueError(
            f"compose_with must leave room for the mechanism at epsilon {epsilon:g}, delta {delta:g}; "
            "it alone exceeds the target"
        )
    return found


def _smallest_where(holds, start: int, most: int) -> int | None:
    """The smallest integer where a monotone property holds, or None above `most`; few steps near `start`."""
    low, high = roots.bracket(holds, start, 1, highest=most)
    if high > most:
        return None
    between = range(int(low) + 1, int(high))
    return between.start + bisect.bisect_left(between, True, key=holds)
