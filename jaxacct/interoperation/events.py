"""Mechanisms as `DpEvent`s of dp-accounting: exact where one exists, else a dominating one."""

from typing import Any, NamedTuple

from jaxacct.accountants.pld import PrivacyLossDistribution
from jaxacct.accountants.unamplified import sensitivity
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.statistics.gaussian_mixtures import binomial


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
    from dp_accounting import dp_event

    scheme = checked(mechanism).scheme
    rounds = scheme.independent_rounds
    is_covered = PrivacyLossDistribution().why_not_covered(mechanism) is None
    if rounds is None or not is_covered or mechanism.is_replace_one:
        event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier / sensitivity(mechanism))
        return DominatingEvent(event, False, "the participation pattern is revealed")
    if scheme.examples_per_unit > 1:
        counts, weights = binomial(scheme.examples_per_unit, rounds[0])
        step = dp_event.MixtureOfGaussiansDpEvent(mechanism.noise_multiplier, counts, weights)
    else:
        gaussian = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
        step = dp_accounting.PoissonSampledDpEvent(rounds[0], gaussian)
    event = dp_accounting.SelfComposedDpEvent(step, rounds[1])
    if scheme.min_separation == 1:
        return DominatingEvent(event, True, "nothing")
    return DominatingEvent(event, False, "the phase of each example is revealed")
