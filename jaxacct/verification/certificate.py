"""What every certificate says of itself: a stored reason to believe a guarantee, to be looked at again.

A new one is one new file and one line in `CERTIFICATES` of `jaxacct.verification.certificates`.
"""

import abc
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.verification.target import Target


class Certificate(abc.ABC):
    """Why a mechanism has a target. What bears on the guarantee is abstract: nothing holds by default."""

    kind: ClassVar[str]
    """For people and tests."""
    drawn: ClassVar[bool] = False
    """Whether it rests on draws, which a verification can make anew."""

    @abc.abstractmethod
    def recheck(self, mechanism: Mechanism, target: Target) -> list[str]:
        """What does not follow from mechanism, target and draws, a line each; empty if it holds."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What it holds in plain JSON values."""

    @abc.abstractmethod
    def lines(self, target: Target) -> list[str]:
        """All that it says, for people."""

    def verdicts(self, target: Target) -> list[str]:
        """The same in short: what was decided, and on how many draws."""
        return self.lines(target)


class PlanCertificate(Certificate):
    """One that carries a whole plan: both directions."""

    @abc.abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of a `Plan` that hold it."""

    @abc.abstractmethod
    def how(self, target: Target) -> str:
        """By what the plan is certified, a clause of its statement."""

    @abc.abstractmethod
    def checked(self) -> list[str]:
        """What loading computed again, and what only drawing can show; lines for people."""

    @abc.abstractmethod
    def spends(self) -> list[tuple[str, float]]:
        """(item, delta) for all that it spends of delta."""

    def is_about(self, mechanism: Mechanism, target: Target) -> list[str]:
        """Flaws that are seen at once, before anything costly."""
        del mechanism, target
        return []

    @property
    def reveals_all_coins(self) -> bool:
        """Whether it bounds what an adversary learns who sees all participations."""
        return False

    def profile(self, mechanism: Mechanism, target: Target, epsilons: np.ndarray) -> np.ndarray:
        """Estimated delta at each of `epsilons`, NaN where nothing stored tells."""
        del mechanism, target
        return np.full(epsilons.shape, np.nan)
