"""Public names of `jaxacct.interoperation`, as type checkers and the package itself read them."""

from jaxacct.interoperation.events import dominating_event
from jaxacct.interoperation.jax_privacy import batch_selection, scheme_of, strategy_of
from jaxacct.interoperation.pessimistic_pld import PessimisticPLD, dominating_pld, pld_of_profile

__all__ = [
    "PessimisticPLD", "batch_selection", "dominating_event", "dominating_pld", "pld_of_profile",
    "scheme_of", "strategy_of",
]  # fmt: skip
