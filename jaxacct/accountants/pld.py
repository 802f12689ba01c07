"""Upper bound by the privacy loss distribution of independent rounds of Poisson sampling.

These are the mechanism itself at separation 1, for one example or for a user with several, of whom a
binomial number participates in each round; they dominate it where the phase of a cyclic scheme is revealed.
"""

from jaxacct.accountants.base import Accountant, why_not_identity
from jaxacct.accountants.composition import composed_delta
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.gaussian_mixtures import binomial_curves, sampled_antipodal, sampled_gaussian
from jaxacct.statistics.loss_curves import ChordCurve


class PrivacyLossDistribution(Accountant):
    """Privacy loss distribution of the scheme's `independent_rounds`."""

    name = "pld"
    adjacencies = ("zero-out", "replace-one")
    reveals_all_coins = False
    composes = True
    # Hiding a revealed pattern is post-processing, and both are composed on the same grid.
    outdoes_composed = frozenset({"unamplified"})

    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        if mechanism.scheme.independent_rounds is None:
            return "its rounds are not independent"
        scheme = mechanism.scheme
        # Not `Mechanism.cross_terms`, which leave out what a likelihood of several examples counts itself.
        overlap = mechanism.strategy.cross_terms(scheme.iterations, scheme.min_separation).max()
        return "columns of the strategy matrix overlap" if overlap else None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        return composed_delta((_step(mechanism),), epsilon, compose_with)


def is_exact(mechanism: Mechanism) -> bool:
    """Return whether the pair is the mechanism itself: its steps are independent and equally noisy."""
    rounds = mechanism.scheme.independent_rounds
    is_of_steps = rounds is not None and rounds[1] == mechanism.scheme.iterations
    return is_of_steps and why_not_identity(mechanism) is None


def _step(mechanism: Mechanism) -> tuple[tuple[ChordCurve, ChordCurve], int]:
    rounds = mechanism.scheme.independent_rounds
    assert rounds is not None
    probability, count = rounds
    if mechanism.is_replace_one:
        return (sampled_antipodal(mechanism.noise_multiplier, probability),) * 2, count
    examples = mechanism.scheme.examples_per_unit
    if examples > 1:
        return binomial_curves(mechanism.noise_multiplier, examples, probability), count
    return sampled_gaussian(mechanism.noise_multiplier, probability), count
