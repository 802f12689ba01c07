"""The draws of stored evidence made again from its key."""

import math
from dataclasses import dataclass

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.progress import Progress
from jaxacct.proposals.base import DIRECTIONS
from jaxacct.verification.certificates import of_direction
from jaxacct.verification.run import Evidence
from jaxacct.verification.target import Target


@dataclass(frozen=True)
class Replayed:
    """One direction's draws, made again from the stored key.

    Attributes:
      drawn: draws in the stored histograms.
      moved: how many of them the fresh histograms have in another bin; 0 is bit for bit the same.
      accepted: whether the fresh histograms support the verdict.
    """

    direction: str
    drawn: int
    moved: int
    accepted: bool

    @property
    def close(self) -> bool:
        """Whether no more draws moved than rounding on a machine of another kind could explain.

        An error of 1e-3 in a loss, which is far above any seen, moves 3 % of the draws across a bin of 1/32.
        """
        return self.moved <= 0.05 * self.drawn


def replay(
    evidence: Evidence, mechanism: Mechanism, target: Target, progress: Progress | None = None
) -> tuple[Replayed, ...]:
    """Draw again what the stored keys name, both directions; `verify` draws with fresh keys instead.

    On the kind of machine that drew first, histograms agree bit for bit. On another, float32 rounding may
    move a few draws to the next bin; the fresh histograms then still have to support the verdict.
    """
    found = []
    for direction in DIRECTIONS:
        stored = of_direction(getattr(evidence, direction), evidence.rule)
        seen = stored.seen
        if seen.num_samples:
            made = of_direction(stored.drawn_again(mechanism, target, progress), evidence.rule)
            accepted = made.rebuilt(mechanism, target).accepted
            moved = sum(map(_moved, stored.histograms, made.histograms))
            found.append(Replayed(direction, seen.num_samples, moved, accepted))
        else:
            found.append(Replayed(direction, 0, 0, seen.accepted))
    return tuple(found)


def _moved(stored, fresh) -> int:
    one, two = dict(stored), dict(fresh)
    return math.ceil(sum(abs(one.get(i, 0) - two.get(i, 0)) for i in {*one, *two}) / 2)
