"""Which proposals a direction may be verified with, and what each would cost."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base as proposals
from jaxacct.proposals.base import Proposal
from jaxacct.proposals.half_space import add_candidates
from jaxacct.proposals.powers import power_candidates
from jaxacct.proposals.replicas import replica_candidates
from jaxacct.statistics import bounds

# Seconds of sampling, below which one more replica is not worth a look.
_FEW_SAMPLES = 60_000


@dataclass(frozen=True, eq=False)
class Candidate:
    """A proposal and the number of samples predicted before anything is drawn."""

    proposal: Proposal
    predicted_samples: float


def threshold(proposal: Proposal, delta_v: float) -> float:
    """The mean of terms to stay below: `delta_v` in the proposal's units, its own error spent."""
    if proposal.log_scale == -math.inf:
        return math.inf
    # Beyond 1 all thresholds mean the same, so a scale too small for float64 need not overflow.
    intended = math.exp(min(100.0, math.log(delta_v) - proposal.log_scale)) / (1 + proposal.relative_error)
    return intended - proposal.total_variation


def candidates(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    budget: bounds.Budget,
    *,
    composed: bool = False,
) -> list[Candidate]:
    """Every proposal for one direction, cheapest first.

    The prediction takes terms for coin flips: an upper guess, the same for all, so that only the scales
    decide.

    Args:
      composed: another mechanism is composed in; only plain sampling has a known scale then.
    """

    def samples_needed(proposal):
        theta = threshold(proposal, budget.delta_v)
        needed = predicted_samples(theta, budget.failure_probability) if theta > 0 else math.inf
        return 0.0 if needed <= _FEW_SAMPLES else needed

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
    composed: bool = False,
) -> list[Proposal]:
    """Every proposal for one direction, plain first; see `candidates` and `replica_candidates`."""
    found = [proposals.plain(mechanism, direction)]
    if composed:
        return found
    if direction == "remove":
        found += replica_candidates(mechanism, epsilon, samples_needed)
        return found + power_candidates(mechanism, epsilon, samples_needed)
    return found + add_candidates(mechanism, epsilon)


def predicted_samples(theta: float, failure_probability: float) -> float:
    """Draws until the anytime rule accepts when the truth is half of the threshold `theta`."""
    if theta >= 1:
        return 0.0
    return math.log(1 / failure_probability) / bounds.kl(theta / 2, theta)
