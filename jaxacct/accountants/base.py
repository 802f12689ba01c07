"""Protocol of the deterministic accountants. A new one is one file and one line in `ACCOUNTANTS`."""

import abc
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.statistics.composed_losses import SMALLEST


class Accountant(abc.ABC):
    """Upper bound on the delta of a mechanism, without samples.

    Attributes:
      name: on the command line and in plans.
      adjacencies: of the pairs (`Mechanism.pair_adjacency`) that it bounds.
      reveals_all_coins: whether it holds against an adversary who sees all participations, and so for any
        sharing of examples between users (proofs/shared_examples.md, section 4).
      outdoes_composed: accountants whose bound is never below this one's for a composed mechanism; they are
        skipped where this one applies, as a composition takes seconds.
      composes: whether another event may be composed with the mechanism.
    """

    name: ClassVar[str]
    adjacencies: ClassVar[tuple[str, ...]]
    reveals_all_coins: ClassVar[bool]
    outdoes_composed: ClassVar[frozenset[str]] = frozenset()
    composes: ClassVar[bool] = False

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        for field in ("name", "adjacencies", "reveals_all_coins"):
            if not hasattr(cls, field):
                raise TypeError(f"accountant {cls.__name__} must state its {field}")

    @abc.abstractmethod
    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        """Return why no bound covers the mechanism, a clause of a message; None where one does."""

    @abc.abstractmethod
    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        """Return `delta` of a mechanism that is covered and checked."""

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        """Return whether the bound on such a `delta`, or on any, is so close that samples add nothing."""
        return False

    def why_not(self, mechanism: Mechanism, compose_with=None) -> str | None:
        """Return why there is no bound, including adjacency; None where there is one."""
        if compose_with is not None and mechanism.is_replace_one:
            return f"compose_with must not be given with {mechanism.adjacency} adjacency"
        if mechanism.pair_adjacency not in self.adjacencies:
            return f"it is for {' and '.join(self.adjacencies)} adjacency, not for {mechanism.adjacency}"
        if compose_with is not None and not self.composes:
            return "nothing is composed with it"
        return self.why_not_covered(mechanism)

    def supports(self, mechanism: Mechanism, compose_with=None) -> bool:
        """Return whether `delta` has a bound for the mechanism; `why_not` says why it has none."""
        return self.why_not(mechanism, compose_with) is None

    def delta(self, mechanism: Mechanism, epsilon: float, compose_with=None) -> float:
        """Return an upper bound on delta at epsilon, in [`SMALLEST`, 1], both directions at once.

        Args:
          mechanism: its scheme, strategy and noise.
          epsilon: natural log, at least 0.
          compose_with: a composed dp-accounting `DpEvent`, or None.

        Raises:
          ValueError: a mechanism that is not covered, bad arguments, or a bound that is not a probability.
        """
        return self.bound_at(
            checked(mechanism), _validate.nonnegative_number("epsilon", epsilon), compose_with
        )

    def bound_at(self, mechanism: Mechanism, epsilon: float, compose_with=None) -> float:
        """Return `delta` of a mechanism and an epsilon that are checked."""
        reason = self.why_not(mechanism, compose_with)
        if reason is not None:
            raise ValueError(f"accountant {self.name} does not cover {mechanism.scheme.name} here: {reason}")
        bound = self.bound(mechanism, epsilon, compose_with)
        if not 0 <= bound <= 1:  # false for NaN, too
            raise ValueError(f"accountant {self.name} gave {bound!r}, which is not a probability")
        return max(bound, SMALLEST)


def cross_term(mechanism: Mechanism) -> float:
    """Return the largest of `Mechanism.cross_terms`, 0 where participations of a unit share no output."""
    return float(mechanism.cross_terms.max())


def why_not_identity(mechanism: Mechanism) -> str | None:
    """Return a clause for a strategy matrix other than the identity, None for that."""
    strategy, n = mechanism.strategy, mechanism.scheme.iterations
    is_identity = strategy.bands == 1 and np.all(strategy.square_norms(n) == 1.0)
    return None if is_identity else "the strategy matrix is not the identity"
