"""Sampling schemes: who takes part when. One file a scheme, and all that is peculiar to it.

What a scheme says of itself is in `jaxacct.schemes.base.Scheme`. A new one is one new file and one line in
`SCHEMES`.
"""

from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.balanced_min_sep import BalancedMinSep
from jaxacct.schemes.balls_in_bins import BallsInBins
from jaxacct.schemes.base import Scheme, SideInformation
from jaxacct.schemes.cyclic_poisson import CyclicPoisson
from jaxacct.schemes.independent_attribution import IndependentAttribution
from jaxacct.schemes.multi_attribution import MultiAttribution
from jaxacct.schemes.poisson import Poisson
from jaxacct.schemes.truncated_b_min_sep import TruncatedBMinSep

_ALL = (
    Poisson,
    CyclicPoisson,
    BallsInBins,
    BMinSep,
    BalancedMinSep,
    MultiAttribution,
    IndependentAttribution,
    TruncatedBMinSep,
)
SCHEMES: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in _ALL}


def scheme_to_json(scheme: Scheme) -> dict:
    """The scheme's name and fields as plain JSON values."""
    return scheme.to_json()


def scheme_from_json(data: dict) -> Scheme:
    """The inverse of `scheme_to_json`; ValueError for an unknown scheme or other fields than its own."""
    name = data.get("name")
    if name not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, was {name!r}")
    return SCHEMES[name].from_json(data)


__all__ = [
    "SCHEMES",
    "BMinSep",
    "BalancedMinSep",
    "BallsInBins",
    "CyclicPoisson",
    "IndependentAttribution",
    "MultiAttribution",
    "Poisson",
    "Scheme",
    "SideInformation",
    "TruncatedBMinSep",
    "scheme_from_json",
    "scheme_to_json",
]
