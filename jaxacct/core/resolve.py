"""A proposal of a claim with its threshold and margin: what drawing and checking have in common."""

import math
from dataclasses import dataclass

import numpy as np

from jaxacct.core.claim import Claim
from jaxacct.proposals import registry, sampling
from jaxacct.proposals.base import Proposal
from jaxacct.proposals.spec import ProposalSpec, Setting
from jaxacct.proposals.threshold import budget_lines, threshold
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.direction import Direction
from jaxacct.statistics.hockey_stick import finite_margin
from jaxacct.statistics.lines import BudgetLine, total


@dataclass(frozen=True, eq=False)
class Resolved:
    """One direction of a claim with a proposal to draw from.

    Attributes:
      claim: the claim.
      proposal: the proposal distribution.
      items: the budget items of its samples.
      threshold: the mean term to stay below; at least 1 where no samples are needed.
    """

    claim: Claim
    proposal: Proposal
    items: tuple[BudgetLine, ...]
    threshold: float

    @property
    def needs_samples(self) -> bool:
        """Whether the bound on terms alone does not certify: a mean of terms in [0, 1] never exceeds 1."""
        return not self.threshold >= 1

    @property
    def margin(self) -> float:
        """What must be subtracted from epsilon for float32 losses, natural log."""
        return finite_margin(total(self.items, "epsilon"))

    def terms(self, draws, margin: float) -> np.ndarray:
        """Return terms in [0, 1] of samples at `epsilon - margin`, rounded up."""
        target, proposal = self.claim.target, self.proposal
        profile = target.profile if proposal.profile is None else proposal.profile
        weighted = hockey_stick.weighted_terms(draws, proposal.direction, target.epsilon - margin, profile)
        slack = proposal.weight_error(margin)
        return np.minimum(1.0, weighted * math.exp(slack - proposal.log_scale))

    def count(self, stream, first: int, last: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Return histograms (terms, losses) of the blocks first..last-1 of a stream, int64."""
        terms = np.zeros(len(bounds.TERM_EDGES), np.int64)
        losses = np.zeros(len(hockey_stick.loss_bounds(self.proposal.direction)), np.int64)
        for draws in sampling.draw_in_batches(self.proposal, stream, first, last - first):
            terms += bounds.bin_terms(self.terms(draws, margin))
            losses += hockey_stick.bin_losses(draws.loss)
        return terms, losses


def resolved(claim: Claim, proposal: Proposal) -> Resolved:
    """Return the proposal with its threshold for a claim.

    Raises:
      ValueError: where the proposal resolves no such delta.
    """
    delta_v = claim.target.budget.delta_v
    theta = threshold(proposal, delta_v)
    if not theta > 0:
        raise ValueError(f"proposal {proposal.name} does not resolve delta_v {delta_v:g}")
    return Resolved(claim, proposal, budget_lines(proposal, delta_v), theta)


def resolve(claim: Claim, direction: Direction, spec: ProposalSpec) -> Resolved:
    """Return the proposal of a specification with its threshold for a claim.

    Raises:
      ValueError: for a specification that does not cover the claim.
    """
    target = claim.target
    setting = Setting(claim.mechanism, target.epsilon, direction, target.composition)
    return resolved(claim, registry.build(setting, spec))
