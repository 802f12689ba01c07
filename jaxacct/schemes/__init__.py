"""Sampling schemes: when each privacy unit participates. A new scheme is one new file and one line in `_ALL`.

The protocol is `jaxacct.schemes.protocol.scheme.Scheme`.
"""

from jaxacct.common import validate as _validate
from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.balanced_min_sep import BalancedMinSep
from jaxacct.schemes.balls_in_bins import BallsInBins
from jaxacct.schemes.custom import CustomScheme
from jaxacct.schemes.cyclic_poisson import CyclicPoisson
from jaxacct.schemes.epochwise_allocation import EpochwiseAllocation
from jaxacct.schemes.fixed_order import FixedOrder
from jaxacct.schemes.poisson import Poisson
from jaxacct.schemes.protocol.scheme import Scheme, scheme_from_fields, scheme_to_json
from jaxacct.schemes.truncation.truncated_b_min_sep import TruncatedBMinSep
from jaxacct.schemes.users.independent_attribution import IndependentAttribution
from jaxacct.schemes.users.multi_attribution import MultiAttribution

_ALL = (
    Poisson,
    CyclicPoisson,
    BallsInBins,
    BMinSep,
    BalancedMinSep,
    EpochwiseAllocation,
    CustomScheme,
    MultiAttribution,
    IndependentAttribution,
    TruncatedBMinSep,
    FixedOrder,
)
SCHEMES: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in _ALL}


def scheme_from_json(data: dict) -> Scheme:
    """Return the scheme that `scheme_to_json` wrote; ValueError for an unknown scheme or field."""
    name = _validate.one_of("scheme", data.get("name"), tuple(SCHEMES))
    return scheme_from_fields(SCHEMES[name], data)


__all__ = [
    "SCHEMES",
    "BMinSep",
    "BalancedMinSep",
    "BallsInBins",
    "CustomScheme",
    "CyclicPoisson",
    "EpochwiseAllocation",
    "FixedOrder",
    "IndependentAttribution",
    "MultiAttribution",
    "Poisson",
    "Scheme",
    "TruncatedBMinSep",
    "scheme_from_json",
    "scheme_to_json",
]
