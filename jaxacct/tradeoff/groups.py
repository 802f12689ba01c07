"""Generic rules for groups of g records, from guarantees for one."""

import math
from collections.abc import Callable

from jaxacct import _validate


def group_tradeoff(f: Callable, g: int) -> Callable:
    """`1 - (1 - f)^(o g)`: the trade-off function for groups of g of any f-DP mechanism (arXiv 1905.02383,
    2.14)."""
    _validate.positive_integer("g", g)

    def grouped(alpha):
        value = alpha
        for _ in range(g):
            value = 1 - f(value)
        return 1 - value

    return grouped


def group_dp(epsilon: float, delta: float, g: int) -> tuple[float, float]:
    """(epsilon, delta) for groups: `(g eps, delta (e^(g eps) - 1)/(e^eps - 1))`.

    arXiv 2212.05796 prints `g e^(g-1) delta`, too small once epsilon is above 1 (proofs/errata.md).
    """
    _validate.positive_integer("g", g)
    _validate.nonnegative_number("epsilon", epsilon)
    chain = float(g) if epsilon == 0 else math.expm1(g * epsilon) / math.expm1(epsilon)
    return g * epsilon, min(1.0, delta * chain)


def group_zcdp(rho: float, g: int) -> float:
    """zCDP for groups: `g^2 rho` (arXiv 1605.02065, proposition 1.9)."""
    return _validate.positive_integer("g", g) ** 2 * _validate.nonnegative_number("rho", rho)
