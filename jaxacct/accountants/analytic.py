"""The best deterministic bound of `ACCOUNTANTS`: the fallback candidate that needs no samples."""

import functools
import math

from jaxacct.accountants import ACCOUNTANTS, Accountant
from jaxacct.accountants.pld import PrivacyLossDistribution, is_exact
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism, check_composition, checked
from jaxacct.statistics.composed_losses import min_epsilon


def delta_by(accountant: str, mechanism: Mechanism, epsilon: float, compose_with=None) -> float:
    """Return the upper bound on delta(epsilon) by the accountant of that name; see `Accountant.bound_at`."""
    _validate.one_of("accountant", accountant, tuple(ACCOUNTANTS))
    return ACCOUNTANTS[accountant].bound_at(mechanism, epsilon, compose_with)


def best_accountant(mechanism: Mechanism, epsilon: float, compose_with=None) -> tuple[str, float]:
    """Return (name, bound) of the accountant with the smallest bound; see `Accountant.bound_at`."""
    check_composition(checked(mechanism), compose_with)
    members = [member for member in ACCOUNTANTS.values() if member.supports(mechanism, compose_with)]
    if compose_with is not None:
        outdone = frozenset().union(*(member.outdoes_composed for member in members))
        members = [member for member in members if member.name not in outdone]
    found = [(member.bound_at(mechanism, epsilon, compose_with), member.name) for member in members]
    bound, name = min(found)
    return name, bound


def epsilon_at(
    mechanism: Mechanism, delta: float, compose_with=None, most: float = _validate.MAX_EPSILON
) -> tuple[float, str | None]:
    """Return (upper bound on epsilon at `delta`, its accountant); infinity and None without one up to `most`.

    The best accountant's, rounded up.
    """

    @functools.cache
    def best(epsilon: float) -> tuple[str, float]:
        return best_accountant(mechanism, epsilon, compose_with)

    end = min_epsilon(lambda epsilon: best(epsilon)[1], delta, most)
    return end, None if end == math.inf else best(end)[0]


def bound_by(
    accountant: str | None, mechanism: Mechanism, epsilon: float, compose_with=None
) -> tuple[str, float]:
    """Return (name, bound) of the accountant of that name as `delta_by`, or of the best if None."""
    arguments = (mechanism, epsilon, compose_with)
    if accountant is None:
        return best_accountant(*arguments)
    return accountant, delta_by(accountant, *arguments)


def exact(mechanism: Mechanism, delta: float | None = None, compose_with=None) -> Accountant | None:
    """Return the accountant whose bound is the mechanism's delta up to its grid, if there is one.

    Close at this delta, at any where none is given, or the privacy loss distribution of Poisson sampling with
    C = I, whose rounds are the steps themselves.
    """
    found = close(mechanism, delta, compose_with)
    if found is not None:
        return found
    pld = ACCOUNTANTS[PrivacyLossDistribution.name]
    return pld if is_exact(mechanism) and pld.supports(mechanism, compose_with) else None


def close(mechanism: Mechanism, delta: float | None = None, compose_with=None) -> Accountant | None:
    """Return an accountant whose bound on a delta of this size, or of any, is close, or None."""
    checked(mechanism)
    for member in ACCOUNTANTS.values():
        if member.supports(mechanism, compose_with) and member.is_close(mechanism, delta, compose_with):
            return member
    return None
