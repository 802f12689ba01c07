"""Independent Poisson-sampled Gaussians by dp-accounting's privacy loss distribution, an upper bound.

They are the mechanism itself where the pattern is Poisson (b = 1), and dominate it where the phase of a
cyclic scheme is revealed.
"""

from jaxacct.accountants.base import Accountant, cross_term
from jaxacct.accountants.composition import composed_delta
from jaxacct.mechanisms.mechanism import Mechanism


class PrivacyLossDistribution(Accountant):
    """The privacy loss distribution of the scheme's `independent_rounds`."""

    name = "pld"
    adjacency = "zero-out"
    reveals_all_coins = False
    # Hiding a pattern that was revealed is post-processing, and both are composed on the same grid.
    outdoes_composed = frozenset({"unamplified"})

    def why_not_covered(self, mechanism: Mechanism, compose_with=None) -> str | None:
        del compose_with
        if mechanism.scheme.independent_rounds() is None:
            return "its rounds are not independent"
        return "columns of the strategy matrix overlap" if cross_term(mechanism) else None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with, interval: float) -> float:
        import dp_accounting

        rounds = mechanism.scheme.independent_rounds()
        assert rounds is not None
        gaussian = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(rounds[0], gaussian)
        events = [dp_accounting.SelfComposedDpEvent(sampled, rounds[1])]
        return composed_delta(events if compose_with is None else [*events, compose_with], epsilon, interval)
