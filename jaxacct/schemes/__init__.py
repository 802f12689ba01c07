"""Sampling schemes: when each privacy unit participates. A new scheme is one new file and one line in `_ALL`.

The protocol is `jaxacct.schemes.protocol.scheme.Scheme`.
"""

from jaxacct.common import validate as _validate
from jaxacct.schemes.b_min_sep import BMinSep as BMinSep
from jaxacct.schemes.balanced_min_sep import BalancedMinSep as BalancedMinSep
from jaxacct.schemes.balls_in_bins import BallsInBins as BallsInBins
from jaxacct.schemes.custom import CustomScheme as CustomScheme
from jaxacct.schemes.cyclic_poisson import CyclicPoisson as CyclicPoisson
from jaxacct.schemes.epochwise_allocation import EpochwiseAllocation as EpochwiseAllocation
from jaxacct.schemes.fixed_order import FixedOrder as FixedOrder
from jaxacct.schemes.poisson import Poisson as Poisson
from jaxacct.schemes.protocol.scheme import Scheme as Scheme
from jaxacct.schemes.protocol.scheme import scheme_from_fields
from jaxacct.schemes.protocol.scheme import scheme_to_json as scheme_to_json
from jaxacct.schemes.truncation.truncated_b_min_sep import TruncatedBMinSep as TruncatedBMinSep
from jaxacct.schemes.users.independent_attribution import IndependentAttribution as IndependentAttribution
from jaxacct.schemes.users.multi_attribution import MultiAttribution as MultiAttribution

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


__all__ = ["SCHEMES", "Scheme", "scheme_from_json", "scheme_to_json", *(kind.__name__ for kind in _ALL)]
