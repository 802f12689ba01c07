"""Which proposals a direction may be verified with, and what each would cost."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base as proposals
from jaxacct.proposals.base import Proposal
from jaxacct.proposals.busier import busier_called, busier_candidates
from jaxacct.proposals.composed import (
    composed_add_called,
    composed_add_candidates,
    composed_replica_candidates,
    composed_replicas_called,
)
from jaxacct.proposals.cuts import cut_called, cut_candidates
from jaxacct.proposals.half_space import half_space_called, half_space_candidates
from jaxacct.proposals.mean_cuts import mean_cut_called, mean_cut_candidates
from jaxacct.proposals.mean_overlaps import mean_overlap_called, mean_overlap_candidates
from jaxacct.proposals.pairs import pair_candidates, pairs_called, plain_called, plain_candidates
from jaxacct.proposals.powers import power_called, power_candidates
from jaxacct.proposals.replicas import replica_called, replica_candidates
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.direction import Direction
from jaxacct.statistics.lines import BudgetLine, total

# Seconds of sampling, below which one more replica is not worth a look.
FEW_SAMPLES = 60_000


@dataclass(frozen=True)
class Family:
    """The proposals of one kind for one direction, besides plain draws. A new kind is a line in `FAMILIES`.

    Attributes:
      offered: (mechanism, epsilon, samples needed by a proposal, or None) -> those worth considering.
      called: (mechanism, epsilon, name) -> the one of that name, None where it is of another family.
    """

    offered: Callable[..., list[Proposal]]
    called: Callable[..., Proposal | None]


def _for(direction: Direction, offered, called) -> Family:
    """Of functions that are told the direction."""
    return Family(
        functools.partial(offered, direction=direction), functools.partial(called, direction=direction)
    )


def _cuts(direction: Direction) -> tuple[Family, Family]:
    with_floor = _for(direction, cut_candidates, cut_called)
    return with_floor, _for(direction, mean_cut_candidates, mean_cut_called)


FAMILIES: dict[Direction, tuple[Family, ...]] = {
    Direction.REMOVE: (
        Family(replica_candidates, replica_called),
        Family(power_candidates, power_called),
        Family(busier_candidates, busier_called),
        Family(pair_candidates, pairs_called),
        Family(plain_candidates, plain_called),
        *_cuts(Direction.REMOVE),
    ),
    Direction.ADD: (
        # Of laws with one scale the first is taken: these have the smaller losses.
        Family(mean_overlap_candidates, mean_overlap_called),
        Family(half_space_candidates, half_space_called),
        *_cuts(Direction.ADD),
    ),
}
# Where another mechanism is composed in; these are told what (`Composed`) as well, after epsilon.
COMPOSED_FAMILIES: dict[Direction, tuple[Family, ...]] = {
    Direction.REMOVE: (Family(composed_replica_candidates, composed_replicas_called),),
    Direction.ADD: (Family(composed_add_candidates, composed_add_called),),
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A proposal and the number of samples predicted before anything is drawn."""

    proposal: Proposal
    predicted_samples: float


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


def candidates(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    budget: bounds.Budget,
    *,
    composed: Composed | None = None,
) -> list[Candidate]:
    """Every proposal for one direction, cheapest first.

    The prediction takes terms for coin flips: an upper guess, the same for all, so that only the scales
    decide.

    Args:
      composed: the other mechanism that is composed in, if one is.
    """

    def samples_needed(proposal):
        theta = threshold(proposal, budget.delta_v)
        needed = predicted_samples(theta, budget.failure_probability) if theta > 0 else math.inf
        return 0.0 if needed <= FEW_SAMPLES else needed

    found = proposals_at(mechanism, epsilon, direction, samples_needed, composed=composed)
    thresholds = [(p, threshold(p, budget.delta_v)) for p in found]
    priced = [
        Candidate(p, predicted_samples(theta, budget.failure_probability))
        for p, theta in thresholds
        if theta > 0
    ]
    # Among equals the earlier, simpler one: `sorted` is stable and plain comes first.
    return sorted(priced, key=lambda candidate: candidate.predicted_samples)


def proposals_at(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    samples_needed: Callable[[Proposal], float] | None = None,
    *,
    composed: Composed | None = None,
) -> list[Proposal]:
    """Every proposal for one direction, plain first; see `candidates` and `replica_candidates`."""
    found = [proposals.plain(mechanism, direction)]
    families, what = _families(direction, composed)
    return found + [
        p for family in families for p in family.offered(mechanism, epsilon, *what, samples_needed)
    ]


def _families(direction: str, composed: Composed | None) -> tuple[tuple[Family, ...], tuple[Composed, ...]]:
    """(families, what they are told besides mechanism and epsilon)."""
    if composed is None:
        return FAMILIES[Direction.of(direction)], ()
    return COMPOSED_FAMILIES[Direction.of(direction)], (composed,)


def choose_candidate(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    budget: bounds.Budget,
    name: str | None = None,
    *,
    composed: Composed | None = None,
) -> tuple[Proposal, dict[str, float]]:
    """(the proposal to verify a direction with, samples predicted for each by name): `choose_proposal`."""
    found = candidates(mechanism, epsilon, direction, budget, composed=composed)
    predicted = {candidate.proposal.name: candidate.predicted_samples for candidate in found}
    return choose_proposal([candidate.proposal for candidate in found], direction, name), predicted


def choose_proposal(
    found: Sequence[Proposal], direction: str, name: str | None = None, best: Proposal | None = None
) -> Proposal:
    """The proposal of that name; without a name the `best`, which is the first by default.

    A name is for the remove direction: where the add direction has none so called, it takes the first.

    Raises:
      ValueError: for a name that the remove direction does not have, or where nothing was found.
    """
    if not found:
        raise ValueError(f"delta must be larger: no proposal resolves it in the {direction} direction")
    if name is None:
        return found[0] if best is None else best
    named = [proposal for proposal in found if proposal.name == name]
    if not named and direction == Direction.REMOVE:
        allowed = ", ".join(proposal.name for proposal in found)
        raise ValueError(f"proposal must be one of {allowed}, was {name!r}")
    return (named or found)[0]


def proposal_by_name(
    mechanism: Mechanism, epsilon: float, direction: str, name: str, *, composed: Composed | None = None
) -> Proposal:
    """The one proposal of that name among `candidates`, without pricing the others.

    Raises:
      ValueError: for a name that `candidates` could not give.
    """
    found = _proposal_by_name(mechanism, epsilon, direction, name, composed)
    if found is None:
        raise ValueError(f"proposal {name!r} is none for the {direction} direction of this mechanism")
    return found


@functools.lru_cache(maxsize=64)
def _proposal_by_name(mechanism, epsilon, direction, name, composed) -> Proposal | None:
    if name == "plain":
        return proposals.plain(mechanism, direction)
    families, what = _families(direction, composed)
    called = (family.called(mechanism, epsilon, *what, name) for family in families)
    return next((proposal for proposal in called if proposal is not None), None)


def predicted_samples(theta: float, failure_probability: float) -> float:
    """Draws until the anytime rule accepts when the truth is half of the threshold `theta`."""
    if theta >= 1:
        return 0.0
    return math.log(1 / failure_probability) / bounds.kl(theta / 2, theta)
