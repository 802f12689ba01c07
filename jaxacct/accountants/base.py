"""What every deterministic accountant says of itself. A new one is a file and a line in `ACCOUNTANTS`."""

import abc
from typing import ClassVar

from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.statistics.composed_losses import SMALLEST
from jaxacct.statistics.hockey_stick import DIRECTIONS


class Accountant(abc.ABC):
    """An upper bound on the delta of a mechanism, without draws.

    What it covers and what it bounds are abstract: a mechanism that an accountant has not been told of is
    refused, never bounded by a formula that is for another.
    """

    name: ClassVar[str]
    """On the command line and in plans."""
    adjacency: ClassVar[str]
    """The neighbouring relation that its bound is for."""
    reveals_all_coins: ClassVar[bool]
    """Whether it holds for an adversary who sees all participations, and so however users share examples
    (proofs/shared_examples.md, section 4)."""
    outdoes_composed: ClassVar[frozenset[str]] = frozenset()
    """Accountants whose bound is never below this one's when another mechanism is composed in. Where this one
    serves they are then not asked, as a composition takes seconds."""

    is_two_sided: ClassVar[bool] = False
    """Whether `divergences` bounds both directions from below too, so closely that draws add nothing."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        for said in ("name", "adjacency", "reveals_all_coins"):
            if not hasattr(cls, said):
                raise TypeError(f"accountant {cls.__name__} must state its {said}")

    @abc.abstractmethod
    def why_not_covered(self, mechanism: Mechanism, compose_with=None) -> str | None:
        """Why no bound is known for the mechanism, a clause for people; None where one is."""

    @abc.abstractmethod
    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        """As `delta`, for what is covered and checked."""

    def one_sided(self, mechanism: Mechanism, epsilon: float, direction: str, side: int) -> float:
        """Where `is_two_sided`, of what is covered: the upper (`side` 1) or lower (-1) bound.

        Args:
          epsilon: natural log, at least 0.
        """
        raise NotImplementedError

    def divergences(self, mechanism: Mechanism, epsilon: float) -> dict[str, tuple[float, float]]:
        """Where `is_two_sided`: (lower, upper) of both directions."""
        return {
            direction: (
                self.one_sided(mechanism, epsilon, direction, -1),
                self.one_sided(mechanism, epsilon, direction, 1),
            )
            for direction in DIRECTIONS
        }

    def why_not(self, mechanism: Mechanism, compose_with=None) -> str | None:
        """As `why_not_covered`, and its adjacency."""
        if mechanism.pair_adjacency != self.adjacency:
            return f"it is for {self.adjacency} adjacency, not for {mechanism.adjacency}"
        return self.why_not_covered(mechanism, compose_with)

    def supports(self, mechanism: Mechanism, compose_with=None) -> bool:
        """Whether `delta` has a bound for the mechanism; `why_not` says why it has none."""
        return self.why_not(mechanism, compose_with) is None

    def delta(self, mechanism: Mechanism, epsilon: float, compose_with=None) -> float:
        """An upper bound on delta(epsilon), in [`SMALLEST`, 1], both directions at once.

        Args:
          mechanism: what is bounded.
          epsilon: natural log, at least 0.
          compose_with: a dp-accounting `DpEvent` that is composed in, or None.

        Raises:
          ValueError: for a mechanism that is not covered, bad arguments, or a bound that is no probability.
        """
        checked(mechanism)
        _validate.nonnegative_number("epsilon", epsilon)
        reason = self.why_not(mechanism, compose_with)
        if reason is not None:
            raise ValueError(f"accountant {self.name} does not cover {mechanism.scheme.name} here: {reason}")
        bound = self.bound(mechanism, epsilon, compose_with)
        if not 0 <= bound <= 1:  # false for NaN as well
            raise ValueError(f"accountant {self.name} gave {bound!r}, which is no probability")
        return max(bound, SMALLEST)


def cross_term(mechanism: Mechanism) -> float:
    """The largest of `Mechanism.cross_terms`: 0 where no two participations of a unit share an output."""
    return float(mechanism.cross_terms.max())
