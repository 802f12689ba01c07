"""Generic rules for groups of g records, from guarantees for one."""

import math
from collections.abc import Callable

from jaxacct.common import validate as _validate

_ROUNDING = 2.0**-40
_MAX_GROUP = 1000


def group_tradeoff(f: Callable, g: int) -> Callable:
    """`1 - (1 - f)^(o g)`: the trade-off function for groups of g of any f-DP mechanism (arXiv 1905.02383,
    2.14)."""
    g = checked_group(g, "g")
    return lambda alpha: iterated(f, g, alpha)


def checked_group(size, name: str = "size") -> int:
    """Return `size` as an int in [1, 1000], or raise ValueError: the generic rule takes a step a record."""
    count = _validate.positive_integer(name, size)
    if count > _MAX_GROUP:
        raise ValueError(f"{name} must be at most {_MAX_GROUP}, was {count}")
    return count


def iterated(f: Callable, g: int, alpha):
    """`1 - (1 - f)^(o g)` at alpha."""
    value = alpha
    for _ in range(g):
        value = 1 - f(value)
    return 1 - value


def group_dp(epsilon: float, delta: float, g: int) -> tuple[float, float]:
    """(epsilon, delta) for groups: `(g eps, delta (e^(g eps) - 1)/(e^eps - 1))`.

    arXiv 2212.05796 prints `g e^(g-1) delta`, too small once epsilon is above 1 (proofs/errata.md).
    """
    _validate.positive_integer("g", g)
    _validate.nonnegative_number("epsilon", epsilon)
    if not 0 <= _validate.nonnegative_number("delta", delta) <= 1:
        raise ValueError(f"delta must be in [0, 1], was {delta!r}")
    if delta == 0:
        return g * epsilon, 0.0
    log = math.log(delta) + log_chain(epsilon, g)
    return g * epsilon, min(1.0, math.exp(min(0.0, log)) * (1 + _ROUNDING * (1 + abs(log))))


def log_chain(epsilon: float, g: int) -> float:
    """`ln (1 + e^eps + .. + e^((g - 1) eps)) = ln (e^(g eps) - 1) / (e^eps - 1)`, without overflow."""
    if epsilon == 0:
        return math.log(g)
    if g * epsilon > 700:  # e^-700 next to 1 is nothing, and it only lowers the sum
        return (g - 1) * epsilon - math.log(-math.expm1(-epsilon))
    return math.log(math.expm1(g * epsilon)) - math.log(math.expm1(epsilon))


def group_zcdp(rho: float, g: int) -> float:
    """zCDP for groups: `g^2 rho` (arXiv 1605.02065, proposition 1.9)."""
    return _validate.positive_integer("g", g) ** 2 * _validate.nonnegative_number("rho", rho)
