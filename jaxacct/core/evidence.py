"""Samples as data: everything else follows from the claim (`core.check`).

No field is derived and none is a sentence. A `Mean` names the stream of its samples, so that anybody can draw
them again.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from jaxacct.common import records
from jaxacct.proposals.base import ProposalSpec

Counts = tuple[tuple[int, int], ...]
"""(bin, count) of the bins that are not empty, bins ascending."""

RuleName = Literal["anytime", "fixed"]
RULES = get_args(RuleName)


@dataclass(frozen=True)
class Mean:
    """Samples of one proposal, for a test of the mean of their terms.

    Attributes:
      proposal: the proposal distribution.
      margin: subtracted from epsilon when terms were computed; nats.
      key: two 32-bit words; samples of block i have the key `fold_in(key, i)`.
      term_counts: terms rounded up to `bounds.TERM_EDGES`.
      loss_counts: privacy losses in the bins of `hockey_stick.loss_bounds`.
      bets: of the anytime rule, as fractions of the largest bet `1 / (1 - threshold)`, fixed from an
        independent pilot; empty for the fixed rule.
      bet_weights: one per bet.
    """

    proposal: ProposalSpec
    margin: float
    key: tuple[int, int]
    term_counts: Counts
    loss_counts: Counts
    bets: tuple[float, ...]
    bet_weights: tuple[float, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return sum(count for _, count in self.term_counts)


@dataclass(frozen=True)
class WeightBound:
    """No samples: the bound on a proposal's terms alone is below delta_v."""

    proposal: ProposalSpec

    num_samples: ClassVar[int] = 0


@dataclass(frozen=True)
class NotRun:
    """No samples: the other direction was not certified."""

    num_samples: ClassVar[int] = 0


@dataclass(frozen=True)
class Dominated:
    """No samples: the add direction's divergence is at most that of the remove direction."""

    num_samples: ClassVar[int] = 0


Side = Mean | WeightBound | NotRun | Dominated
"""Evidence of one direction."""


@dataclass(frozen=True)
class Sampled:
    """Evidence of both directions by samples, for the claim of that digest.

    `share` is that of the failure probability q that this verification may use, in (0, 1].
    """

    claim: str
    rule: str
    share: float
    remove: Side
    add: Side

    @property
    def num_samples(self) -> int:
        """Number of samples of both directions."""
        return self.remove.num_samples + self.add.num_samples


@dataclass(frozen=True)
class Bound:
    """Evidence of both directions by an analytic accountant, which needs no samples."""

    accountant: str

    num_samples: ClassVar[int] = 0


Evidence = Sampled | Bound

_SIDES: dict[str, type] = {
    "mean": Mean,
    "weight-bound": WeightBound,
    "not-run": NotRun,
    "dominated": Dominated,
}
_KINDS: dict[str, type] = {"sampled": Sampled, "accountant": Bound}


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return plain JSON values, readable by `evidence_from_json`."""
    fields = _tagged(evidence, _KINDS)
    if isinstance(evidence, Sampled):
        fields |= {name: _tagged(getattr(evidence, name), _SIDES) for name in ("remove", "add")}
    return fields


@dataclass(frozen=True)
class _Written:
    """Fields of `Sampled` as JSON values."""

    claim: str
    rule: str
    share: float
    remove: Any
    add: Any


def evidence_from_json(data) -> Evidence:
    """Return the evidence that `evidence_to_json` wrote; ValueError for other fields."""
    kind, fields = _untagged(data, _KINDS, "plan evidence")
    if kind is Bound:
        return records.read(Bound, fields, "plan evidence")
    read = records.read(_Written, fields, "plan evidence")
    sides = (
        records.read(*_untagged(side, _SIDES, f"plan evidence {name}"), f"plan evidence {name}")
        for name, side in (("remove", read.remove), ("add", read.add))
    )
    return Sampled(read.claim, read.rule, read.share, *sides)


def _tagged(value, kinds: dict[str, type]) -> dict[str, Any]:
    (kind,) = (name for name, of in kinds.items() if type(value) is of)
    return {"kind": kind} | dataclasses.asdict(value)


def _untagged(data, kinds: dict[str, type], name: str) -> tuple[type, dict[str, Any]]:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{name} must have a kind of {', '.join(kinds)}, got {kind!r:.80}")
    return kinds[kind], {field: value for field, value in data.items() if field != "kind"}
