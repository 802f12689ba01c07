"""Analytic guarantees: the fallback candidate that needs no sampling.

Two mechanisms bound ours from above. With the participation pattern revealed, at most k disjoint columns of
norm 1 are hit, each by at most k_u examples: a Gaussian mechanism of sensitivity k_u sqrt(k), or a mean of
such (`revealed_pattern`). Where columns overlap (C not banded) each participation adds at most 2 `cross` to
the square of that, k_u = 1. And when the pattern is Poisson (b = 1) or the phase of a cyclic scheme is
revealed, the outputs are independent Poisson-sampled Gaussians, for which dp-accounting's privacy loss
distribution is an upper bound.
"""

import functools
import json
import math

import scipy

from jaxacct import _validate
from jaxacct.accountants import revealed_pattern
from jaxacct.accountants.composition import event_from_json, event_to_json
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.schemes import Scheme


def independent_event(scheme: Scheme, noise_multiplier: float, cross: float = 0.0):
    """The Poisson-sampled event that dominates the scheme, or None where there is none."""
    independent = scheme.independent_rounds()
    if cross or independent is None:
        return None
    import dp_accounting

    probability, rounds = independent
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, rounds)


def unamplified_sensitivity(scheme: Scheme, cross: float = 0.0) -> float:
    """Of the mechanism with the participation pattern revealed."""
    return math.sqrt(scheme.squared_sensitivity(cross))


def unamplified_event(scheme: Scheme, noise_multiplier: float, cross: float = 0.0):
    """The Gaussian event with the participation pattern revealed."""
    import dp_accounting

    return dp_accounting.GaussianDpEvent(noise_multiplier / unamplified_sensitivity(scheme, cross))


ACCOUNTANTS = ("unamplified", "revealed-pattern", "pld")

# Those that hold with all coins shown, and so however examples are shared (proofs/shared_examples.md, 4).
WITH_COINS_REVEALED = ("unamplified", "revealed-pattern")


def delta_by(
    accountant: str,
    scheme: Scheme,
    noise_multiplier: float,
    epsilon: float,
    compose_with=None,
    cross: float = 0.0,
    interval: float = 1e-4,
) -> float:
    """The upper bound on delta(epsilon) by one of `ACCOUNTANTS`; natural log epsilon.

    "unamplified" is the Gaussian mechanism with the worst participation pattern revealed, "revealed-pattern"
    the mixture over the patterns of a scheme that has their law, "pld" the privacy loss
    distribution of independent Poisson-sampled Gaussians. Both are composed by dp-accounting.

    Args:
      compose_with: a `DpEvent` to compose with, or None.
      cross, interval: as for `analytic_delta`.

    Raises:
      ValueError: for an accountant that is not known or does not cover the scheme, or bad arguments.
    """
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    _validate.positive_number("epsilon", epsilon)
    event = independent_event(scheme, noise_multiplier, cross)
    if accountant == "revealed-pattern":
        if compose_with is not None or cross or scheme.revealed_counts is None:
            raise ValueError(f"accountant revealed-pattern does not cover {scheme.name} here")
        bound = float(revealed_pattern.delta(scheme, noise_multiplier, epsilon))
    elif accountant == "unamplified" and compose_with is None:
        bound = gaussian_delta(epsilon, noise_multiplier, unamplified_sensitivity(scheme, cross))
    else:
        if accountant == "unamplified":
            event = unamplified_event(scheme, noise_multiplier, cross)
        if event is None:
            raise ValueError(f"accountant pld does not cover {scheme.name} with this strategy")
        events = [event] if compose_with is None else [event, compose_with]
        bound = _composed(json.dumps([event_to_json(part) for part in events]), epsilon, interval)
    if not 0 <= bound <= 1:
        raise ValueError(f"accountant {accountant} gave {bound!r}, which is no probability")
    return bound


@functools.lru_cache(maxsize=64)
def _composed(events: str, epsilon: float, interval: float) -> float:
    """delta(epsilon) of events in JSON by dp-accounting; cached, as a plan computes its bound again."""
    accountant = _pld_accountant(interval)
    for event in json.loads(events):
        accountant.compose(event_from_json(event))
    return float(accountant.get_delta(epsilon))


def best_accountant(
    scheme: Scheme,
    noise_multiplier: float,
    epsilon: float,
    compose_with=None,
    cross: float = 0.0,
    interval: float = 1e-4,
) -> tuple[str, float]:
    """(name, bound) of the accountant with the smallest bound on delta(epsilon); see `analytic_delta`."""
    known = independent_event(scheme, noise_multiplier, cross) is not None
    names = ["unamplified", *(["pld"] if known else [])]
    if compose_with is None and scheme.revealed_counts is not None and not cross:
        names.append("revealed-pattern")
    if compose_with is not None and known:
        names = ["pld"]  # never the worse one, and a composition takes seconds
    found = [
        (delta_by(name, scheme, noise_multiplier, epsilon, compose_with, cross, interval), name)
        for name in names
    ]
    bound, name = min(found)
    return name, bound


def bound_by(
    accountant: str | None,
    scheme: Scheme,
    noise_multiplier: float,
    epsilon: float,
    compose_with=None,
    cross: float = 0.0,
    interval: float = 1e-4,
) -> tuple[str, float]:
    """(name, bound) of one of `ACCOUNTANTS` as by `delta_by`, or of the best where none is named."""
    arguments = (scheme, noise_multiplier, epsilon, compose_with, cross, interval)
    if accountant is None:
        return best_accountant(*arguments)
    return accountant, delta_by(accountant, *arguments)


def analytic_delta(
    scheme: Scheme,
    noise_multiplier: float,
    epsilon: float,
    compose_with=None,
    cross: float = 0.0,
    interval: float = 1e-4,
) -> float:
    """The best analytic upper bound on delta(epsilon); natural log epsilon.

    Args:
      compose_with: a `DpEvent` to compose with, or None.
      cross: the largest of `Mechanism.cross_terms`.
      interval: natural log; the grid of losses where dp-accounting makes a privacy loss distribution. Its
        distributions are pessimistic on any grid, so the bound holds for any; its time goes as one over it.
    """
    return best_accountant(scheme, noise_multiplier, epsilon, compose_with, cross, interval)[1]


def _pld_accountant(interval: float):
    from dp_accounting import pld

    return pld.PLDAccountant(value_discretization_interval=interval)


def unamplified_noise_multiplier(scheme: Scheme, epsilon: float, delta: float, cross: float = 0.0) -> float:
    """The noise multiplier at which the pattern may be revealed: an upper end for any search."""
    sensitivity = unamplified_sensitivity(scheme, cross)

    def excess(log_sigma):
        return gaussian_delta(epsilon, math.exp(log_sigma), sensitivity) - delta

    low, high = math.log(1e-3), math.log(1e-3)
    while excess(high) > 0:
        high += 1.0
    return math.exp(scipy.optimize.brentq(excess, low, high)) if high > low else math.exp(low)


def unamplified_epsilon(scheme: Scheme, noise_multiplier: float, delta: float, cross: float = 0.0) -> float:
    """The epsilon at `delta` with the participation pattern revealed, rounded up; inf beyond float64."""
    sensitivity = unamplified_sensitivity(scheme, cross)

    def excess(epsilon):
        return gaussian_delta(epsilon, noise_multiplier, sensitivity) - delta

    high = 1.0
    while not excess(high) <= 0:  # not a number counts as too much
        high *= 2
        if high > 1e300:
            return math.inf
    if excess(0.0) <= 0:
        return 0.0
    return float(scipy.optimize.brentq(excess, 0.0, high, rtol=1e-12)) * (1 + 1e-9)
