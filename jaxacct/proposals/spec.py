"""Which proposal distribution samples come from, as data.

A specification is stored in files and named on the command line: `replicas:2` is the family "replicas" with
the parameter 2. `jaxacct.proposals.registry` builds the distribution of a mechanism from it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.direction import Direction


@dataclass(frozen=True)
class ProposalSpec:
    """A proposal distribution by its family and parameters.

    Attributes:
      family: one of `jaxacct.proposals.registry.FAMILIES`.
      parameters: integers that the family's `build` takes, such as the replica order.
    """

    family: str
    parameters: tuple[int, ...]

    def __str__(self) -> str:
        return self.family + (":" + ",".join(map(str, self.parameters)) if self.parameters else "")

    @classmethod
    def parse(cls, text: str) -> "ProposalSpec":
        """Return the specification that `str` writes as `text`.

        Raises:
          ValueError: where `text` has another form.
        """
        if not isinstance(text, str) or not re.fullmatch(r"[a-z-]{1,40}(:[0-9]{1,4}(,[0-9]{1,4})*)?", text):
            raise ValueError(f"proposal must be a family such as plain, or replicas:2, was {text!r:.80}")
        family, _, parameters = text.partition(":")
        return cls(family, tuple(map(int, parameters.split(","))) if parameters else ())


@dataclass(frozen=True)
class Setting:
    """What a proposal distribution is built for.

    Attributes:
      mechanism: the mechanism that is verified.
      epsilon: natural log.
      direction: "remove" or "add".
      composed: the other mechanism that is composed in, or None.
    """

    mechanism: Mechanism
    epsilon: float
    direction: Direction
    composed: Composed | None


SamplesNeeded = Callable[[Any], float] | None
"""Predicted number of samples that a proposal needs; None to consider all proposals."""
