"""Proposal with everything its test needs: budget items, margin, threshold, and terms of its samples.

The mean term must stay below delta_v in the proposal's units, less every budget item.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base
from jaxacct.proposals.base import Proposal
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import finite_margin
from jaxacct.statistics.lines import BudgetLine, Item, total


def budget_lines(proposal: Proposal, delta_v: float) -> tuple[BudgetLine, ...]:
    """Return all reserves for the samples of a proposal, by its arguments alone."""
    mechanism, m = proposal.mechanism, proposal.replicas
    if proposal.rounding_lines is not None:
        lines = proposal.rounding_lines(delta_v)
    else:
        if mechanism.is_replace_one:
            from jaxacct.proposals.families.mirrored import loss_lines
        else:
            loss_lines = rounding.loss_lines
        lines = loss_lines(mechanism, delta_v, max(1, m))
        if m > 1:
            lowest = proposal.lowest + (total(lines, "epsilon") if proposal.lowest else 0.0)
            lines += (weight_line(mechanism, delta_v, m, proposal.log_normalizer, lowest),)
    source = rounding.SOURCE + "6"
    return (
        *lines,
        *end_lines(proposal.left_out, _LEFT_OUT[proposal.mechanism.is_replace_one]),
        BudgetLine(Item.DISTRIBUTION, "relative", proposal.relative_error, source),
        BudgetLine(Item.DISTRIBUTION, "total variation", proposal.total_variation, source),
    )


def weight_line(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float, lowest: float = 0.0
) -> BudgetLine:
    """Return the budget item for float32 weights `ln w = ln Z + (1 - m) L` of positive terms.

    Losses are at least `-lowest`; `delta_v` is that of `loss_lines`, which exclude the same outputs.
    """
    size = rounding.bounded(
        mechanism, replicas, lambda share: rounding.sizes(mechanism, delta_v, replicas, share)
    ).size
    parts = abs(log_normalizer) + (replicas - 1) * max(size.largest, lowest)
    return rounding.relative_line(Item.WEIGHTS, 3 * rounding.UNIT * parts, rounding.SOURCE + "3")


_LEFT_OUT = (
    (Item.PROFILE_END, "proofs/composition.md, section 2"),
    (Item.UNBOUNDED_WEIGHTS, "proofs/adjacency.md, section 3"),
)


def end_lines(left_out: float, what: tuple[Item, str] = _LEFT_OUT[0]) -> tuple[BudgetLine, ...]:
    """Return the reserve for the part of the divergence that terms leave out; empty for 0."""
    item, source = what
    return (BudgetLine(item, "delta", left_out, source),) if left_out > 0 else ()


def threshold(proposal: Proposal, delta_v: float) -> float:
    """Return the upper limit of the mean term: `delta_v` in the proposal's units, less all `budget_lines`."""
    # min and max below would drop a NaN, and e^100 certifies anything.
    if math.isnan(proposal.log_scale):
        raise ValueError(f"{proposal.name}: the scale must be a number, got nan")
    lines = budget_lines(proposal, delta_v)
    left = delta_v - total(lines, "delta")
    if not left > 0:
        return 0.0
    # Beyond 1 all thresholds mean the same, so a scale too small for float64 need not overflow.
    intended = math.exp(min(100.0, math.log(left) - proposal.log_scale)) / (1 + total(lines, "relative"))
    return intended - total(lines, "total variation")


@dataclass(frozen=True, eq=False)
class Resolved:
    """Proposal for one direction of a target, resolved to its threshold, the upper limit of the mean term.

    The threshold is at least 1 where no samples are needed; `profile` is that of the target.
    """

    proposal: Proposal
    epsilon: float
    profile: Callable[[np.ndarray], np.ndarray]
    items: tuple[BudgetLine, ...]
    threshold: float

    @property
    def drawn_profile(self) -> Callable[[np.ndarray], np.ndarray]:
        """Function g of the terms `w g(t)` of samples."""
        return self.profile if self.proposal.profile is None else self.proposal.profile

    def unit(self, margin: float) -> float:
        """Return the factor of weighted terms: 1 / M, with the error of weights; infinite beyond float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.proposal.weight_error(margin) - self.proposal.log_scale))

    @property
    def needs_samples(self) -> bool:
        """Whether the bound on terms alone does not certify: a mean of terms in [0, 1] is at most 1."""
        return not self.threshold >= 1

    @property
    def margin(self) -> float:
        """Reserve in epsilon for float32 losses, in nats."""
        return finite_margin(total(self.items, "epsilon"))

    def terms(self, draws, margin: float) -> np.ndarray:
        """Return terms in [0, 1] of samples at `epsilon - margin`, rounded up."""
        epsilon, direction = self.epsilon - margin, self.proposal.direction
        weighted = hockey_stick.weighted_terms(draws, direction, epsilon, self.drawn_profile)
        positive = weighted[weighted > 0]
        found = np.zeros_like(weighted)
        found[weighted > 0] = np.minimum(1.0, positive * self.unit(margin))
        return found

    def count(self, stream, first: int, last: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Return histograms (terms, losses) of the blocks first..last-1 of a stream, int64."""
        terms = np.zeros(len(bounds.TERM_EDGES), np.int64)
        losses = np.zeros(len(hockey_stick.loss_bounds(self.proposal.direction)), np.int64)
        for draws in base.draw_in_batches(self.proposal, stream, first, last - first):
            terms += bounds.bin_terms(self.terms(draws, margin))
            losses += hockey_stick.bin_losses(draws.loss)
        return terms, losses


def resolved(proposal: Proposal, epsilon: float, delta_v: float, profile: Callable) -> Resolved:
    """Return the proposal with its threshold for a target; ValueError for too small a delta."""
    theta = threshold(proposal, delta_v)
    if not theta > 0:
        raise ValueError(f"proposal {proposal.name} does not resolve delta_v {delta_v:g}")
    return Resolved(proposal, epsilon, profile, budget_lines(proposal, delta_v), theta)
