"""Large arrays piece by piece: what noise is made of is in memory for one piece, not for the whole array.

A normal takes 8 bytes, its words of the key stream as many, and a sum of earlier vectors as many again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .normals import Cut

_MOST = {"cpu": 2**16, "others": 2**20}  # numbers of a piece, which caches of a CPU hold
_LEAST = 2**12  # of a piece that is worth a turn of a loop


class Pieces(NamedTuple):
    """A device's part of an array in equal pieces, each of numbers that are neighbours in the part.

    Attributes:
      cut: the part.
      shape: of a piece.
    """

    cut: Cut
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: tuple[int, ...] | Cut) -> "Pieces":
        """Return pieces of at most `_MOST` numbers, as large as they can be; one where they would be tiny."""
        cut, most = Cut.of(array), _MOST["cpu" if jax.default_backend() == "cpu" else "others"]
        shape = list(cut.shape)
        if math.prod(shape) <= most:
            return cls(cut, cut.shape)
        for axis, size in enumerate(cut.shape):
            rest = math.prod(cut.shape[axis + 1 :])
            fitting = min(size, most // max(1, rest))
            shape[axis] = max((n for n in range(1, fitting + 1) if size % n == 0), default=1)
            if rest <= most:
                break
        return cls(cut, tuple(shape) if math.prod(shape) >= _LEAST else cut.shape)

    @property
    def number(self) -> int:
        """Of pieces."""
        return math.prod(self.cut.shape) // max(1, math.prod(self.shape))

    def at(self, number) -> Cut:
        """Return one of them, by its () integer, perhaps traced."""
        begin: list[Any] = list(self.cut.begin)
        for axis in reversed(range(len(begin))):
            parts = self.cut.shape[axis] // max(1, self.shape[axis])
            begin[axis] = begin[axis] + number % max(1, parts) * self.shape[axis]
            number = number // max(1, parts)
        return Cut(self.cut.whole, self.shape, tuple(begin))


class Group(NamedTuple):
    """Arrays of as many pieces, which one loop draws: a program has one key stream for all of them.

    Attributes:
      pieces: of the arrays of this group, by their numbers.
      turns: of the loop, one piece of each array in each.
    """

    pieces: dict[int, Pieces]
    turns: int

    def among(self, arrays: Sequence[tuple[int, ...] | Cut], turn) -> list[tuple[int, ...] | Cut]:
        """Return all arrays, of which those of the group are the pieces of one turn, a () integer."""
        return [self.pieces[i].at(turn) if i in self.pieces else array for i, array in enumerate(arrays)]


def groups_of(arrays: Sequence[tuple[int, ...] | Cut]) -> tuple[list[int], list[Group]]:
    """Return the numbers of the arrays that are one piece, and the groups of the others."""
    found = {i: Pieces.of(array) for i, array in enumerate(arrays)}
    groups: dict[int, dict[int, Pieces]] = {}
    for i, pieces in found.items():
        groups.setdefault(pieces.number, {})[i] = pieces
    whole = [i for i, pieces in found.items() if pieces.number <= 1]
    return whole, [Group(pieces, turns) for turns, pieces in groups.items() if turns > 1]
