"""Upper bound by the privacy loss distribution of independent Poisson-sampled Gaussians.

These are the mechanism itself for Poisson sampling (b = 1), and dominate it where the phase of a cyclic
scheme is revealed.
"""

from jaxacct.accountants.base import Accountant, cross_term, why_not_identity
from jaxacct.accountants.composition import composed_delta
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.composed_losses import Part, divergence_bound, divergence_lower_bound
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.statistics.loss_curves import GaussianPair, LossCurve, SampledAntipodal, both_directions


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
        return "columns of the strategy matrix overlap" if cross_term(mechanism) else None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        return composed_delta((_step(mechanism),), epsilon, compose_with)

    def one_sided(self, mechanism: Mechanism, epsilon: float, direction: str, side: int) -> float:
        """Return the upper (`side` 1) or lower (-1) bound on a direction; 0 where none is proven."""
        if side < 0 and not is_exact(mechanism):
            return 0.0
        curves, count = _step(mechanism)
        bound = divergence_bound if side > 0 else divergence_lower_bound
        return bound([Part(curves[DIRECTIONS.index(direction)], count)], epsilon)


def is_exact(mechanism: Mechanism) -> bool:
    """Return whether the pair is the mechanism itself: its steps are independent and equally noisy."""
    rounds = mechanism.scheme.independent_rounds
    is_of_steps = rounds is not None and rounds[1] == mechanism.scheme.iterations
    return is_of_steps and why_not_identity(mechanism) is None


def _step(mechanism: Mechanism) -> tuple[tuple[LossCurve, LossCurve], int]:
    rounds = mechanism.scheme.independent_rounds
    assert rounds is not None
    probability, count = rounds
    if mechanism.is_replace_one:
        return (SampledAntipodal(mechanism.noise_multiplier, probability),) * 2, count
    return both_directions(GaussianPair(mechanism.noise_multiplier), probability), count
