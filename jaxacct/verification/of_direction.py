"""Certificates of one direction: evidence built anew from the mechanism and the draws, and draws made again.

A verdict is a function of (mechanism, epsilon, budget, direction, proposal) and of what was drawn: counts,
the key they came from, bets and distances fixed by a pilot. `rebuilt` keeps only the second and computes the
rest as `verify` does, so nothing else in a file is believed. That the counts are those of the key, and that
bets and distances were fixed before, only drawing can show: `drawn_again` draws the stored key, `verify` a
fresh one.
"""

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.progress import Progress
from jaxacct.proposals.base import DIRECTIONS
from jaxacct.proposals.candidates import proposal_by_name, threshold
from jaxacct.records import differences
from jaxacct.verification.certificate import Certificate
from jaxacct.verification.histogram import add_counts, draw_histograms, sparse_counts
from jaxacct.verification.run import RULES, DirectionEvidence, Run
from jaxacct.verification.target import Target


@dataclass(frozen=True)
class OfDirection(Certificate):
    """What one direction's draws prove, by the rule they were made by."""

    drawn = True
    laws: ClassVar[int]
    """How many laws were drawn from, equally often."""
    seen: DirectionEvidence
    rule: str

    @property
    @abc.abstractmethod
    def proposal_name(self) -> str:
        """Of the proposal that its scale and predictions are taken from."""

    @property
    @abc.abstractmethod
    def histograms(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The stored counts, (index, count) each."""

    @abc.abstractmethod
    def with_histograms(self, first, second) -> DirectionEvidence:
        """The evidence with other counts in their place."""

    @abc.abstractmethod
    def counter(self, mechanism: Mechanism, target: Target) -> Callable[[int, int], Any]:
        """(first, last) -> the histograms that the stored key draws in the blocks first..last-1."""

    @abc.abstractmethod
    def rebuilt(self, mechanism: Mechanism, target: Target) -> DirectionEvidence:
        """The evidence that `verify` would have written about the same draws.

        A margin larger than needed is kept: terms counted at a smaller epsilon are larger.

        Raises:
          ValueError: for draws that no verification of this target makes.
        """

    def run(self, mechanism: Mechanism, target: Target) -> Run:
        """As `verify` made it; only the predictions, which prove nothing, are those of the file."""
        seen, name = self.seen, self.proposal_name
        if seen.direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, was {seen.direction!r}")
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, was {self.rule!r}")
        composed = target.composition
        proposal = proposal_by_name(mechanism, target.epsilon, seen.direction, name, composed=composed)
        if not threshold(proposal, target.budget.delta_v) > 0:
            raise ValueError(f"proposal {name!r} resolves nothing here")
        return Run(proposal, target, self.rule, seen.num_samples, seen.predicted_samples, "")

    def key(self):
        """The JAX key of the stored words; ValueError for what is none."""
        words = self.seen.key
        if len(words) != 2 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
            raise ValueError(f"the key must be two words of 32 bits, was {words!r}")
        return randomness.key_from_words(list(words))

    def recheck(self, mechanism: Mechanism, target: Target) -> list[str]:
        name = self.seen.direction
        try:
            fresh = self.rebuilt(mechanism, target)
        except (ValueError, ArithmeticError) as error:
            return [f"{name}: {error}"]
        short = margin_flaw(self.seen, fresh)
        found = [short] if short else differences(self.seen, fresh, name)
        if not fresh.accepted:
            found.append(f"{name}: the histogram does not support the verdict")
        return found

    def drawn_again(
        self, mechanism: Mechanism, target: Target, progress: Progress | None = None
    ) -> DirectionEvidence:
        """The evidence with the counts that its stored key draws."""
        blocks = self.seen.num_samples // (self.laws * randomness.BLOCK_SIZE)

        def keep(done, counts):
            if progress:
                drawn = self.laws * done * randomness.BLOCK_SIZE
                progress(f"replay {self.seen.direction}", drawn, self.seen.num_samples)

        counts = draw_histograms(
            self.counter(mechanism, target),
            lambda done, counts: counts if done >= blocks else None,
            lambda done: min(blocks, done + max(64, blocks // 64)),
            add=add_counts,
            keep=keep,
        )
        return self.with_histograms(*map(sparse_counts, counts))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self.seen)

    def lines(self, target: Target) -> list[str]:
        del target
        seen = self.seen
        said = [
            f"{self._verdict}; {seen.proposal}, {seen.num_samples:,} samples, "
            f"scale {seen.scale:.3g}, estimate {seen.estimate:.3g}, rounding margin {seen.margin:.2g}"
        ]
        if seen.num_samples:
            prices = ", ".join(f"{name} {count:,.0f}" for name, count in seen.predicted_samples.items())
            said.append(f"{'':<22}predicted samples before drawing: {prices}")
        return said + [f"{'':<22}{line.in_words}" for line in seen.lines if line.amount > 0]

    def verdicts(self, target: Target) -> list[str]:
        del target
        return [self._verdict + (f", {self.seen.num_samples:,} samples" if self.seen.num_samples else "")]

    @property
    def _verdict(self) -> str:
        verdict = "accepted" if self.seen.accepted else "not accepted"
        return f"{self.seen.direction:<22}{verdict}: {self.seen.reason}"


def margin_flaw(seen: DirectionEvidence, fresh: DirectionEvidence) -> str | None:
    """What is wrong where less was put aside for rounding than is today, as by an earlier version."""
    if not seen.margin < fresh.margin or not differences(seen.margin, fresh.margin):
        return None
    return (
        f"{seen.direction}: {seen.margin:.3g} of epsilon was put aside for rounding where {fresh.margin:.3g} "
        "is needed today: certify the mechanism again with `jaxacct calibrate`"
    )
