"""Deterministic bounds, without samples: one accountant per file; `base` has their protocol."""

from typing import Literal

from jaxacct.accountants.allocation.random_allocation import RandomAllocation
from jaxacct.accountants.allocation.redrawn_bins import RedrawnBins
from jaxacct.accountants.base import Accountant
from jaxacct.accountants.pld import PrivacyLossDistribution
from jaxacct.accountants.revealed_pattern import RevealedPattern
from jaxacct.accountants.unamplified import Unamplified

AccountantName = Literal[
    "analytic", "unamplified", "revealed-pattern", "pld", "random-allocation", "redrawn-bins"
]
"""A name of `ACCOUNTANTS`, or "analytic" for the one with the smallest bound; a test compares them."""
_ALL = (Unamplified(), RevealedPattern(), PrivacyLossDistribution(), RandomAllocation(), RedrawnBins())
ACCOUNTANTS: dict[str, Accountant] = {accountant.name: accountant for accountant in _ALL}

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "AccountantName",
    "PrivacyLossDistribution",
    "RandomAllocation",
    "RedrawnBins",
    "RevealedPattern",
    "Unamplified",
]
