"""Items of the error budget: errors of arithmetic and of sampling, and the quantity that pays for each.

A term is evaluated at `epsilon - (sum of "epsilon" items)`, and a mean of terms has to stay below

    (delta_v - sum of "delta" items) / (M prod(1 + "relative" items)) - sum of "total variation" items

(proofs/rounding.md, section 1).
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Item(enum.StrEnum):
    """Identifiers of items, which code compares, each with a `sentence` for people."""

    sentence: str

    def __new__(cls, identifier: str, sentence: str):
        item = str.__new__(cls, identifier)
        item._value_, item.sentence = identifier, sentence
        return item

    NORMALS = "normals", "rounding of the normals"
    SCORES = "scores", "rounding of the scores"
    RATIO = "ratio", "rounding of the likelihood ratio"
    EXTREME_RADII = "extreme-radii", "two extreme radii in one sample"
    FAR_NOISE = "far-noise", "noise far outside its range"
    RARE_OUTPUTS = "rare-outputs", "outputs of rare participations"
    OWN_RARE_OUTPUTS = "own-rare-outputs", "outputs of rare participations of a user's own"
    RARE_DRAWS = "rare-draws", "draws of rare participations"
    MORE_ELIGIBLE = "more-eligible", "more examples eligible than allowed for"
    WEIGHTS = "weights", "float32 weights"
    WEIGHTS_OF_ONE = "weights-of-one", "float32 weights, with the loss of one example"
    WEIGHTS_INFLATED = "weights-inflated", "float32 weights, with the loss at the inflated probability"
    DISTRIBUTION = "distribution", "sampling distribution"
    PROFILE_END = "profile-end", "end of the composed profile"
    UNBOUNDED_WEIGHTS = "unbounded-weights", "outputs without a bound on their weight"


# Kinds of items, and the quantity that each one reduces.
_OFF = {
    "epsilon": "nats off epsilon",
    "relative": "of itself off the threshold",
    "total variation": "off the threshold",
    "delta": "off delta_v",
}
KINDS = tuple(_OFF)


@dataclass(frozen=True)
class BudgetLine:
    """One item of the error budget.

    Attributes:
      item: identifier of the source of the error.
      kind: "epsilon" (nats off epsilon), "relative" (of the threshold), "total variation" (off the threshold)
        or "delta" (off delta_v).
      amount: at least 0.
      source: where the bound is proven.
    """

    item: Item
    kind: str
    amount: float
    source: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.amount >= 0:  # false for nan as well
            raise ValueError(f"amount of {self.item.name} must be at least 0, got {self.amount!r}")

    @property
    def name(self) -> str:
        """Source of the error, a sentence."""
        return self.item.sentence

    @property
    def in_words(self) -> str:
        """One line of text."""
        return f"{self.amount:.2g} {_OFF[self.kind]}: {self.name}"


def total(lines: Sequence[BudgetLine], kind: str) -> float:
    """Return the sum of one kind, rounded up; "relative" items as factors, less one."""
    amounts = [line.amount for line in lines if line.kind == kind]
    if kind == "relative":
        return math.expm1(math.fsum(map(math.log1p, amounts))) * (1 + 1e-14)
    return math.fsum(amounts) * (1 + 1e-14)
