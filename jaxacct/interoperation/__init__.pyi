"""Public names of `jaxacct.interoperation`, as type checkers and the package itself read them."""

from jaxacct.interoperation.events import dominating_event as dominating_event
from jaxacct.interoperation.jax_privacy import batch_selection as batch_selection
from jaxacct.interoperation.jax_privacy import scheme_of as scheme_of
from jaxacct.interoperation.jax_privacy import strategy_of as strategy_of
from jaxacct.interoperation.pessimistic_pld import PessimisticPLD as PessimisticPLD
from jaxacct.interoperation.pessimistic_pld import dominating_pld as dominating_pld
from jaxacct.interoperation.pessimistic_pld import pld_of_profile as pld_of_profile

__all__: list[str]
