"""Samples as data: everything else follows from the claim (`core.check`).

No field is derived and none is a sentence. A `Mean` names the stream of its samples, so that anybody can draw
them again.
"""

from typing import Any, ClassVar, Literal, get_args

import msgspec

from jaxacct.common import records
from jaxacct.proposals.base import ProposalSpec

Counts = tuple[tuple[int, int], ...]  # (bin, count) of the bins that are not empty, bins ascending

RuleName = Literal["anytime", "fixed"]
RULES = get_args(RuleName)


class _Kind(msgspec.Struct, frozen=True, tag_field="kind"):
    """Frozen record whose JSON object has its kind beside its fields; without samples unless it says so."""

    num_samples: ClassVar[int] = 0


class Mean(_Kind, frozen=True, tag="mean"):
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


class WeightBound(_Kind, frozen=True, tag="weight-bound"):
    """No samples: the bound on a proposal's terms alone is below delta_v."""

    proposal: ProposalSpec


class NotRun(_Kind, frozen=True, tag="not-run"):
    """No samples: the other direction was not certified."""


class Dominated(_Kind, frozen=True, tag="dominated"):
    """No samples: the add direction's divergence is at most that of the remove direction."""


Side = Mean | WeightBound | NotRun | Dominated  # evidence of one direction


class Sampled(_Kind, frozen=True, tag="sampled"):
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


class Bound(_Kind, frozen=True, tag="accountant"):
    """Evidence of both directions by an analytic accountant, which needs no samples."""

    accountant: str


Evidence = Sampled | Bound


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return plain JSON values, readable by `evidence_from_json`."""
    return msgspec.to_builtins(evidence)


def evidence_from_json(data) -> Evidence:
    """Return the evidence that `evidence_to_json` wrote; ValueError for other fields."""
    return records.read(Evidence, data, "plan evidence")
