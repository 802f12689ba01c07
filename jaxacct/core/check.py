"""The only function that turns evidence into a guarantee.

`check` is pure: it draws nothing and trusts only counts. From the claim it computes scale, budget items,
margin, threshold and the verdict of the test on the stored counts. Only drawing again can show that the
counts are those of the stored key, and that key and bets were fixed beforehand (`core.verify`,
`verification.replay`).
"""

import enum
import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.core import evidence as data
from jaxacct.core.claim import Claim
from jaxacct.core.evidence import Evidence, Side
from jaxacct.kernels import randomness
from jaxacct.proposals import registry
from jaxacct.proposals.base import Proposal, ProposalSpec, Setting
from jaxacct.proposals.threshold import Resolved, resolved
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction, checked_counts
from jaxacct.statistics.lines import BudgetLine


class Outcome(enum.StrEnum):
    """Result of the check of one direction."""

    WEIGHT_BOUND = "weight-bound"
    MEAN_BELOW = "mean-below-threshold"
    DOMINATED = "dominated"
    MEAN_ABOVE = "mean-not-below-threshold"
    UNDECIDED = "undecided"
    NOT_RUN = "not-run"


_CERTIFIED = (Outcome.WEIGHT_BOUND, Outcome.MEAN_BELOW, Outcome.DOMINATED)


@dataclass(frozen=True)
class DirectionVerdict:
    """One direction: its evidence and what follows from it.

    Attributes:
      direction: "remove" or "add".
      side: the evidence.
      outcome: what the check found.
      proposal: the specification as text; "none" without a run.
      scale: M; the divergence is M times the mean term.
      replicas: order of the proposal; samples have weights proportional to e^{(1 - replicas) L} (remove).
      items: the budget items; all other numbers depend on their sums alone.
      margin: subtracted from epsilon, natural log.
      threshold: upper limit of the mean term.
      estimate: M times the mean term, rounded up. An estimate, not a bound.
    """

    direction: Direction
    side: Side
    outcome: Outcome
    proposal: str = "none"
    scale: float = math.nan
    replicas: int = 0
    items: tuple[BudgetLine, ...] = ()
    margin: float = math.nan
    threshold: float = math.nan
    estimate: float = math.nan

    @property
    def certified(self) -> bool:
        """Whether the divergence of this direction is at most delta_v, up to the failure probability."""
        return self.outcome in _CERTIFIED

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.side.num_samples


@dataclass(frozen=True)
class Verdict:
    """Claim, its evidence, and whether the evidence proves the claim.

    Attributes:
      claim: the checked claim.
      evidence: the checked evidence.
      flaws: why the claim is not certified, one line each; empty where it is.
      remove: verdict of the remove direction; None for an accountant, or after an earlier flaw.
      add: verdict of the add direction, as `remove`.
      bound: the accountant's upper bound on delta; None for samples.
    """

    claim: Claim
    evidence: Evidence
    flaws: tuple[str, ...]
    remove: DirectionVerdict | None
    add: DirectionVerdict | None
    bound: float | None

    @property
    def certified(self) -> bool:
        """Whether the evidence proves the claim."""
        return not self.flaws

    @property
    def num_samples(self) -> int:
        """Number of samples of both directions."""
        return self.evidence.num_samples

    @property
    def directions(self) -> tuple[DirectionVerdict, ...]:
        """Verdicts of the directions that were checked, remove first."""
        return tuple(each for each in (self.remove, self.add) if each is not None)

    @property
    def reveals_all_participations(self) -> bool:
        """Whether the guarantee holds against an adversary who sees all participations."""
        if not isinstance(self.evidence, data.Bound):
            return False
        from jaxacct.accountants import ACCOUNTANTS

        accountant = ACCOUNTANTS.get(self.evidence.accountant)
        return accountant is not None and accountant.reveals_all_coins


def check(claim: Claim, evidence: Evidence) -> Verdict:
    """Return whether the evidence proves the claim, with every number that follows from the two.

    The failure probability of the samples is in the claim's budget: if the mechanism is not
    (epsilon, delta_v)-DP, evidence that `core.verify` makes is certified with probability at most q.
    """
    try:
        if isinstance(evidence, data.Sampled) and evidence.claim != claim.digest:  # before anything costly
            raise ValueError("the samples are for another mechanism, target or data set")
        claim.check_reserves()
        if isinstance(evidence, data.Bound):
            return _of_accountant(claim, evidence)
        if isinstance(evidence, data.Sampled):
            return _of_samples(claim, evidence)
        raise ValueError(f"evidence must be samples or an accountant, got {type(evidence).__name__}")
    except (ValueError, ArithmeticError) as error:
        return Verdict(claim, evidence, (str(error),), None, None, None)


def _of_accountant(claim: Claim, evidence: data.Bound) -> Verdict:
    from jaxacct.accountants import analytic  # only for evidence of this kind

    target = claim.target
    bound = analytic.delta_by(evidence.accountant, claim.mechanism, target.epsilon, target.compose_with)
    flaws = ()
    if not bound <= target.budget.delta:
        flaws = (f"{evidence.accountant} gives delta {bound:g}, above {target.budget.delta:g}",)
    return Verdict(claim, evidence, flaws, None, None, bound)


def _of_samples(claim: Claim, evidence: data.Sampled) -> Verdict:
    if evidence.rule not in data.RULES:
        raise ValueError(f"rule must be one of {', '.join(data.RULES)}, got {evidence.rule!r:.80}")
    if claim.mechanism.scheme.patterns is not None:
        raise ValueError(f"samples do not apply to {claim.mechanism.scheme.name}, which has no randomness")
    if not 0 < evidence.share <= 1:
        raise ValueError(f"share must be in (0, 1], got {evidence.share!r}")
    keys = [getattr(side, "key", None) for side in (evidence.remove, evidence.add)]
    if keys[0] is not None and keys[0] == keys[1]:
        raise ValueError("both directions have the same key: their samples are of two streams")
    verdicts, flaws = dict.fromkeys(DIRECTIONS), []
    for direction in DIRECTIONS:
        try:
            verdict = check_direction(claim, direction, getattr(evidence, direction), evidence)
        except (ValueError, ArithmeticError) as error:
            flaws.append(f"{direction}: {error}")
            continue
        verdicts[direction] = verdict
        if not verdict.certified:
            flaws.append(f"{direction}: {verdict.outcome}")
    return Verdict(claim, evidence, tuple(flaws), verdicts[Direction.REMOVE], verdicts[Direction.ADD], None)


def resolve(claim: Claim, direction: Direction, spec: ProposalSpec) -> Resolved:
    """Return the proposal of a specification with its threshold for a claim; ValueError where it has none."""
    target = claim.target
    setting = Setting(claim.mechanism, target.epsilon, direction, target.composition)
    return resolve_proposal(claim, registry.build(setting, spec))


def resolve_proposal(claim: Claim, proposal: Proposal) -> Resolved:
    """Return a proposal with its threshold for a claim; ValueError where it does not resolve delta_v."""
    target = claim.target
    return resolved(proposal, target.epsilon, target.budget.delta_v, target.profile)


def check_direction(
    claim: Claim, direction: Direction, side: Side, evidence: data.Sampled
) -> DirectionVerdict:
    """Return the verdict of one direction; ValueError for evidence that no verification makes."""
    q = evidence.share * claim.target.budget.failure_probability
    dominated = direction not in claim.mechanism.directions
    if dominated != isinstance(side, data.Dominated):
        needs = "needs samples" if isinstance(side, data.Dominated) else "is dominated and needs none"
        raise ValueError(f"the {direction} direction of {claim.mechanism.scheme.name} {needs}")
    match side:
        case data.Dominated():
            return DirectionVerdict(direction, side, Outcome.DOMINATED)
        case data.NotRun():
            return DirectionVerdict(direction, side, Outcome.NOT_RUN)
        case data.WeightBound() | data.Mean():
            return _by_proposal(resolve(claim, direction, side.proposal), side, evidence.rule, q)
    raise ValueError(f"evidence of unknown type {type(side).__name__}")


def _by_proposal(of: Resolved, side: data.WeightBound | data.Mean, rule: str, q: float) -> DirectionVerdict:
    name, scale = of.proposal.name, math.exp(of.proposal.log_scale)
    about = dict(proposal=name, scale=scale, replicas=of.proposal.replicas, items=of.items)
    verdict = functools.partial(DirectionVerdict, of.proposal.direction, side, **about)
    if isinstance(side, data.WeightBound):
        if of.needs_samples:
            raise ValueError(f"the bound on terms of {name} is not below delta_v")
        return verdict(outcome=Outcome.WEIGHT_BOUND, margin=0.0, threshold=1.0, estimate=0.0)
    if not of.needs_samples:
        raise ValueError("no samples are needed: the bound on terms is below delta_v")
    terms, losses = _histograms(side, of.proposal.direction)
    if (rule == "anytime") != bool(side.bets):
        raise ValueError("bets must be given for the anytime rule alone")
    check_margin(side.margin, of.margin)
    if not _fit_together(of, side.margin, terms, losses):
        raise ValueError("the terms are not those that the losses have at this epsilon")
    if accepts(terms, of.threshold, rule, q, side.bets, side.bet_weights):
        outcome = Outcome.MEAN_BELOW
    else:
        outcome = Outcome.MEAN_ABOVE if bounds.hopeless(terms, of.threshold) else Outcome.UNDECIDED
    estimate = scale * bounds.mean_upper(terms)
    return verdict(outcome=outcome, margin=side.margin, threshold=of.threshold, estimate=estimate)


def accepts(terms: np.ndarray, theta: float, rule: str, q: float, bets, weights) -> bool:
    """Return whether the counts of terms prove a mean below `theta`; false with probability at most q."""
    if rule == "anytime":
        return bounds.accepts(terms, theta, q, np.array(bets), np.array(weights))
    mean = bounds.mean_upper(terms)
    return bounds.failure_probability(theta=theta, mean=mean, samples=int(terms.sum())) <= q


def _histograms(side: data.Mean, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
    """Return the histograms of terms and losses, int64; ValueError for some that no verification makes."""
    checked_key(side.key)
    terms = checked_counts(side.term_counts, len(bounds.TERM_EDGES), "term counts")
    losses = checked_counts(side.loss_counts, len(hockey_stick.loss_bounds(direction)), "loss counts")
    if not terms.sum() or terms.sum() != losses.sum() or terms.sum() % randomness.BLOCK_SIZE:
        raise ValueError("both histograms must hold equally many whole blocks")
    return terms, losses


def check_margin(margin: float, needed: float) -> None:
    """Check that terms were computed with at least the margin that rounding needs; ValueError otherwise.

    A larger one is valid: terms at a smaller epsilon are larger. A relative 1e-9 is allowed for the functions
    of another machine.
    """
    if not (math.isfinite(margin) and margin >= needed * (1 - 1e-9)):
        raise ValueError(
            f"the margin for rounding is {margin:.3g} where {needed:.3g} is needed: certify the mechanism "
            "again with `jaxacct calibrate`"
        )


def checked_key(words) -> None:
    """Check that a stored key is two 32-bit words; ValueError otherwise."""
    if len(words) != 2 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
        raise ValueError(f"the key must be two words of 32 bits, got {words!r}")


def _fit_together(of: Resolved, margin: float, terms: np.ndarray, losses: np.ndarray) -> bool:
    """Return whether samples may have both histograms.

    Each bin of losses has a smallest and a largest term, by the weights of its losses where weights are a
    function of the loss, by any weight above 0 otherwise; the number of terms above any edge must agree with
    the bins. So samples that were counted for one epsilon are rejected for another.
    """
    sign, proposal = of.proposal.direction.sign, of.proposal
    lower, upper = map(hockey_stick.loss_bounds, (Direction.ADD, Direction.REMOVE))
    ends = (lower, upper) if sign > 0 else (upper, lower)
    least, most = (of.drawn_profile(of.epsilon - margin - sign * end) for end in ends)
    if np.isnan((least + most)[losses > 0]).any():
        raise ValueError("the losses must have terms that are numbers")
    if proposal.log_weight_at is None:
        smallest = np.where(least > 0, bounds.TERM_EDGES[1], 0.0)
        largest = np.where(most > 0, 1.0, 0.0)
    else:
        logs = np.stack([proposal.log_weight_at(end) for end in (lower, upper)])
        # Slack for the last digit of another machine's functions, and for float32 weights.
        sizes = np.abs(logs, out=np.zeros_like(logs), where=np.isfinite(logs))
        slack = 1e-9 + 2.0**-20 * (sizes.max(axis=0) + abs(proposal.log_normalizer)) * (proposal.replicas > 1)
        with np.errstate(over="ignore", invalid="ignore"):
            smallest = least * (np.exp(logs.min(axis=0) - slack) * of.unit(margin))
            largest = np.where(most > 0, most * (np.exp(logs.max(axis=0) + slack) * of.unit(margin)), 0.0)

    def above_edges(values):
        values, made = np.clip(values, 0.0, 1.0), np.zeros(terms.size, np.int64)
        positive = values > 0
        np.add.at(made, bounds.bins_of(values[positive]), losses[positive])
        made[0] = losses[~positive].sum()
        return np.cumsum(made[::-1])

    above = np.cumsum(terms[::-1])
    return bool((above_edges(smallest) <= above).all() and (above <= above_edges(largest)).all())
