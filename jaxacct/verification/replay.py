"""Draw the samples of stored evidence again from its keys, and compare histograms."""

import math
from dataclasses import dataclass

from msgspec import structs

from jaxacct.common.progress import Progress
from jaxacct.core.check import check_direction, resolve
from jaxacct.core.evidence import Counts, Mean, Sampled
from jaxacct.core.plan import Plan
from jaxacct.kernels import randomness
from jaxacct.statistics.hockey_stick import Direction, add_counts, sparse_counts

# Share of samples that rounding on another kind of machine may move to another bin. An error of 1e-3 in a
# loss, far above any observed, moves 3 % of the samples across an edge of bins of 1/32.
_CLOSE = 0.05


@dataclass(frozen=True)
class Replayed:
    """Samples of one direction, drawn again from the stored key.

    `moved` of the `drawn` samples have another bin in the fresh histograms (0 reproduces the same bits), and
    `accepted` is whether these prove the claim.
    """

    direction: str
    drawn: int
    moved: int
    accepted: bool

    @property
    def close(self) -> bool:
        """Whether the number of moved samples is explained by rounding on another kind of machine."""
        return self.moved <= _CLOSE * self.drawn


def replay(plan: Plan, progress: Progress | None = None) -> tuple[Replayed, ...]:
    """Draw the samples of the stored keys again, both directions; `Plan.verify` uses fresh keys instead.

    On the original kind of machine histograms agree bit for bit. On another kind, float32 rounding may move a
    few samples to the next bin; the fresh histograms must still prove the claim. ValueError for a plan that
    is not certified, or certified without samples.
    """
    if not isinstance(plan.evidence, Sampled):
        raise ValueError("plan is certified by an analytic accountant: there are no samples to draw again")
    if plan.flaws:
        raise ValueError(f"plan evidence does not add up: {plan.flaws[0]}")
    return tuple(
        _replayed(plan, plan.evidence, direction, progress) for direction in plan.mechanism.directions
    )


def _replayed(plan: Plan, evidence: Sampled, direction: Direction, progress: Progress | None) -> Replayed:
    side = getattr(evidence, direction)
    if not isinstance(side, Mean):
        return Replayed(direction, 0, 0, True)
    of, key = resolve(plan.claim, direction, side.proposal), randomness.key_from_words(list(side.key))
    blocks, fresh = side.num_samples // randomness.BLOCK_SIZE, None
    stretch = max(64, blocks // 64)
    for first in range(0, blocks, stretch):
        last = min(blocks, first + stretch)
        fresh = add_counts(fresh, of.count(key, first, last, side.margin))
        if progress:
            progress(f"replay {direction}", last * randomness.BLOCK_SIZE, side.num_samples)
    terms, losses = map(sparse_counts, fresh or ())
    again = structs.replace(side, term_counts=terms, loss_counts=losses)
    verdict = check_direction(plan.claim, direction, again, evidence)
    moved = _moved(side.term_counts, terms) + _moved(side.loss_counts, losses)
    return Replayed(direction, side.num_samples, moved, verdict.certified)


def _moved(stored: Counts, fresh: Counts) -> int:
    one, two = dict(stored), dict(fresh)
    return math.ceil(sum(abs(one.get(i, 0) - two.get(i, 0)) for i in {*one, *two}) / 2)
