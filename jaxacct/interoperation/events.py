"""Mechanisms as `DpEvent`s of dp-accounting: exact where one exists, else a dominating one."""

from typing import Any, NamedTuple

from jaxacct.accountants.base import cross_term
from jaxacct.accountants.unamplified import sensitivity
from jaxacct.mechanisms.mechanism import Mechanism, checked


class DominatingEvent(NamedTuple):
    """Event for dp-accounting's accountants, with zero-out neighbours (`REPLACE_SPECIAL`).

    Attributes:
      event: `dp_accounting.DpEvent`.
      exact: whether it is the mechanism itself; otherwise it is at most as private.
      why: explanation of what it reveals, as text.
    """

    event: Any
    exact: bool
    why: str


def dominating_event(mechanism: Mechanism) -> DominatingEvent:
    """Return Poisson-sampled Gaussians where rounds are independent given the phase, else one Gaussian.

    With several steps between participations the event of a correlated mechanism is much less private than
    what sampling certifies: for that, see `dominating_pld`.
    """
    import dp_accounting

    scheme = checked(mechanism).scheme
    rounds = scheme.independent_rounds
    if rounds is None or cross_term(mechanism) or mechanism.is_replace_one:
        event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier / sensitivity(mechanism))
        return DominatingEvent(event, False, "the participation pattern is revealed")
    gaussian = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(rounds[0], gaussian)
    event = dp_accounting.SelfComposedDpEvent(sampled, rounds[1])
    if scheme.min_separation == 1:
        return DominatingEvent(event, True, "nothing")
    return DominatingEvent(event, False, "the phase of each example is revealed")
