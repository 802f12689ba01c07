"""Items of the error budget: errors of arithmetic and of sampling, and the quantity that pays for each.

A term is evaluated at `epsilon - (sum of "epsilon" items)`, and a mean of terms has to stay below

    (delta_v - sum of "delta" items) / (M prod(1 + "relative" items)) - sum of "total variation" items

(proofs/rounding.md, section 1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
      name: source of the error.
      kind: "epsilon" (nats off epsilon), "relative" (of the threshold), "total variation" (off the threshold)
        or "delta" (off delta_v).
      amount: at least 0.
      source: where the bound is proven.
    """

    name: str
    kind: str
    amount: float
    source: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.amount >= 0:  # false for nan as well
            raise ValueError(f"amount of {self.name!r} must be at least 0, got {self.amount!r}")

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
