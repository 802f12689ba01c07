"""Deterministic bounds, without samples: one accountant per file; `base` has their protocol."""

from typing import Literal

from jaxacct.accountants.allocation.random_allocation import RandomAllocation as RandomAllocation
from jaxacct.accountants.allocation.redrawn_bins import RedrawnBins as RedrawnBins
from jaxacct.accountants.base import Accountant as Accountant
from jaxacct.accountants.pld import PrivacyLossDistribution as PrivacyLossDistribution
from jaxacct.accountants.revealed_pattern import RevealedPattern as RevealedPattern
from jaxacct.accountants.unamplified import Unamplified as Unamplified

AccountantName = Literal[
    "analytic", "unamplified", "revealed-pattern", "pld", "random-allocation", "redrawn-bins"
]
"""A name of `ACCOUNTANTS`, or "analytic" for the one with the smallest bound; a test compares them."""
_ALL = (Unamplified(), RevealedPattern(), PrivacyLossDistribution(), RandomAllocation(), RedrawnBins())
ACCOUNTANTS: dict[str, Accountant] = {accountant.name: accountant for accountant in _ALL}

__all__ = ["ACCOUNTANTS", "Accountant", "AccountantName", *(type(each).__name__ for each in _ALL)]
