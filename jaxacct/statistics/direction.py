"""The two directions of a neighbouring pair; a guarantee needs both."""

import enum
from typing import Self

from jaxacct import _validate


class Direction(enum.StrEnum):
    """Which hockey-stick divergence is meant, and with it which law is drawn from.

    Members are their names in evidence and JSON.
    """

    REMOVE = "remove"
    """H(P, Q), draws from P: the unit takes part."""
    ADD = "add"
    """H(Q, P), draws from Q: its gradients are zero."""

    @classmethod
    def of(cls, direction: str) -> Self:
        """The member of that name; ValueError for another."""
        _validate.one_of("direction", direction, tuple(member.value for member in cls))
        return cls(direction)

    @property
    def sign(self) -> int:
        """1 or -1: the divergence is the mean of `(1 - e^t)_+` with `t = epsilon - sign L`."""
        return 1 if self is Direction.REMOVE else -1

    @property
    def place(self) -> int:
        """0 or 1: its place among streams and tables of both."""
        return DIRECTIONS.index(self)


DIRECTIONS = tuple(Direction)
