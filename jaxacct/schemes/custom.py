"""Sampler of one's own, given as a sampling table."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxacct.common import validate
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.protocol.scheme import ExampleScheme
from jaxacct.schemes.table import SamplingTable


@dataclass(frozen=True)
class CustomScheme(ExampleScheme):
    """Sampling by a table of probabilities: every example follows it, independently of all others.

    An example that is eligible at step i, with j participations left, joins the batch with probability
    `join[i][j]`. It is eligible again `lockout[i]` steps later, with one participation less; an example that
    does not join is eligible at the next step, or, with `turns`, after the lockout as well.

    A Poisson run whose rate warms up over the first four steps, and the batches of eight examples:

    >>> scheme = CustomScheme(join=[0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    >>> scheme.participation_probabilities()
    array([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])

    Attributes:
      join: (n,) or (n, K) numbers in [0, 1]; with K > 1 the participations left are counted, an example
        starts with K - 1 of them, and column 0 is 0.
      lockout: integer of at least 1, or (n,) of them: steps from a participation to the next eligible step.
      turns: whether an example that does not join waits the lockout, too, which is then one number.
      start: numbers that sum to at most 1: probability that step s is the first eligible one. With the rest
        of the probability an example never participates.
      keep: probability in (0, 1] with which a participation is kept, independently.

    Raises:
      ValueError: a field of another shape or outside of its range.

    Proof: proofs/sampling_table.md.
    """

    join: Any
    lockout: Any = 1
    turns: bool = False
    start: Any = (1.0,)
    keep: float = 1.0
    name: ClassVar[str] = "custom"

    def __post_init__(self):
        table = SamplingTable(self.join, self.lockout, self.turns, self.start, self.keep)
        counted = table.num_left > 1
        join = tuple(map(tuple, table.join.tolist())) if counted else tuple(table.join[:, 0].tolist())
        lockout = table.lockout.tolist()
        fields = dict(
            join=join,
            lockout=lockout[0] if len(set(lockout)) == 1 else tuple(lockout),
            start=tuple(table.start.tolist()),
            keep=table.keep,
        )
        validate.set_fields(self, **fields, _hash=hash((*fields.values(), self.turns)))
        if not table.participation_probabilities.any():
            raise ValueError("join and start must give some step a probability of participation above 0")

    def __hash__(self) -> int:
        return self._hash  # pyrefly: ignore[missing-attribute]

    @functools.cached_property
    def table(self) -> SamplingTable:
        return SamplingTable(self.join, self.lockout, self.turns, self.start, self.keep)

    @property
    def iterations(self) -> int:
        return len(self.join)

    @property
    def min_separation(self) -> int:
        return self.table.min_lockout

    @classmethod
    def from_batch_size(cls, **sizes) -> "CustomScheme":
        """ValueError: a table has no batch size to be made from."""
        raise ValueError("scheme custom is made from its table: CustomScheme(join=..)")

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "CustomScheme":
        """ValueError: a table has no plain numbers to be made from."""
        return cls.from_batch_size()
