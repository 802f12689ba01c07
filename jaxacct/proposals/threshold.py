"""The mean term to stay below: delta_v in a proposal's units, less every budget item."""

import math

from jaxacct.likelihood import rounding
from jaxacct.proposals.base import Proposal
from jaxacct.statistics.direction import Direction
from jaxacct.statistics.lines import BudgetLine, total


def budget_lines(proposal: Proposal, delta_v: float) -> tuple[BudgetLine, ...]:
    """Everything that is booked for the draws of a proposal; a function of its arguments alone.

    Nothing for a divergence that is exactly zero.
    """
    if proposal.log_scale == -math.inf:
        return ()
    mechanism, m = proposal.mechanism, proposal.replicas
    if proposal.rounding_lines is not None:
        lines = proposal.rounding_lines(delta_v)
    else:
        lines = rounding.loss_lines(mechanism, delta_v, proposal.direction, max(1, m), proposal.push)
        if proposal.direction == Direction.REMOVE and m > 1:
            lowest = proposal.lowest + (total(lines, "epsilon") if proposal.lowest else 0.0)
            lines += (rounding.weight_line(mechanism, delta_v, m, proposal.log_normalizer, lowest),)
    law = "law of the draws"
    return (
        *lines,
        *end_lines(proposal.left_out),
        BudgetLine(law, "relative", proposal.relative_error, "proofs/rounding.md, section 6"),
        BudgetLine(law, "total variation", proposal.total_variation, "proofs/rounding.md, section 6"),
    )


def end_lines(left_out: float) -> tuple[BudgetLine, ...]:
    """What is booked for the part of a composed profile that terms leave out; nothing for nothing."""
    name, source = "end of the composed profile", "proofs/composition.md, section 2"
    return (BudgetLine(name, "delta", left_out, source),) if left_out > 0 else ()


def threshold(proposal: Proposal, delta_v: float) -> float:
    """The mean of terms to stay below: `delta_v` in the proposal's units, all `budget_lines` spent."""
    if proposal.log_scale == -math.inf:
        return math.inf
    # min and max below would swallow a NaN, and e^100 certifies anything.
    if math.isnan(proposal.log_scale):
        raise ValueError(f"{proposal.name}: the scale must be a number, was nan")
    lines = budget_lines(proposal, delta_v)
    left = delta_v - total(lines, "delta")
    if not left > 0:
        return 0.0
    # Beyond 1 all thresholds mean the same, so a scale too small for float64 need not overflow.
    intended = math.exp(min(100.0, math.log(left) - proposal.log_scale)) / (1 + total(lines, "relative"))
    return intended - total(lines, "total variation")
