"""Choose a proposal for a direction by its predicted number of samples.

The choice affects time or samples, never the guarantee: every proposal is valid.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import registry
from jaxacct.proposals.base import Proposal, SamplesNeeded, Setting
from jaxacct.proposals.threshold import threshold
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import Direction

# Number of samples below which one more replica is not considered.
FEW_SAMPLES = 60_000


@dataclass(frozen=True, eq=False)
class Candidate:
    """Proposal and its predicted number of samples, before any are drawn."""

    proposal: Proposal
    predicted_samples: float


def candidates(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    budget: bounds.Budget,
    *,
    composed: Composed | None = None,
) -> list[Candidate]:
    """Return every proposal for one direction, fastest first.

    The prediction models terms as coin flips: an overestimate, the same for all, so that only the scales
    decide.

    Args:
      mechanism: the mechanism.
      epsilon: nats.
      direction: "remove" or "add".
      budget: of the verification.
      composed: the composed mechanism, or None.
    """

    @functools.cache
    def samples(proposal: Proposal) -> float:
        theta = threshold(proposal, budget.delta_v)
        return predicted_samples(theta, budget.failure_probability) if theta > 0 else math.inf

    def samples_needed(proposal: Proposal) -> float:
        return samples(proposal) if samples(proposal) > FEW_SAMPLES else 0.0

    found = proposals_at(mechanism, epsilon, direction, samples_needed, composed=composed)
    priced = [Candidate(each, samples(each)) for each in found if samples(each) < math.inf]
    # Of equals the first, simpler one: `sorted` is stable and plain comes first.
    return sorted(priced, key=lambda candidate: candidate.predicted_samples * candidate.proposal.cost)


def proposals_at(
    mechanism: Mechanism,
    epsilon: float,
    direction: str,
    samples_needed: SamplesNeeded = None,
    *,
    composed: Composed | None = None,
) -> list[Proposal]:
    """Return every proposal for one direction, plain sampling first; see `registry.candidates`."""
    setting = Setting(mechanism, epsilon, Direction.of(direction), composed)
    return registry.candidates(setting, samples_needed)


def choose_proposal(
    found: Sequence[Proposal], direction: str, name: str | None = None, best: Proposal | None = None
) -> Proposal:
    """Return the proposal of that name; without a name the `best`, which is the first by default.

    A name applies to the remove direction: where the add direction has none of that name, it takes the first.
    ValueError where the remove direction has none of that name, or there is no proposal.
    """
    if not found:
        raise ValueError(f"delta must be larger: no proposal resolves it in the {direction} direction")
    if name is None:
        return found[0] if best is None else best
    named = [proposal for proposal in found if proposal.name == name]
    if not named and direction == Direction.REMOVE:
        allowed = ", ".join(proposal.name for proposal in found)
        raise ValueError(f"proposal must be one of {allowed}, got {name!r}")
    return (named or found)[0]


def predicted_samples(theta: float, failure_probability: float) -> float:
    """Return the samples until the anytime rule accepts when the mean is half of the threshold `theta`."""
    if theta >= 1:
        return 0.0
    return math.log(1 / failure_probability) / bounds.kl(theta / 2, theta)
