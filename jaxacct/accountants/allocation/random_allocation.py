"""One uniform phase, drawn once: delta without samples (proofs/random_allocation.md).

A unit participates in one uniform phase, the same in every cycle, as in balls-in-bins, or at most once. Its
turns in a phase add up to one Gaussian shift of length `sqrt(turns)`. Where phases do not overlap (C = I),
`f = P/Q` is the mean of as many independent lognormals as there are phases, however many cycles there are: a
bound up to a grid. Where C has B bands, phases at least B steps apart do not overlap. A group of them is then
revealed, turned by a uniform number of steps: an upper bound (section 9).
"""

import math

import numpy as np

from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Phases
from jaxacct.accountants.allocation.lognormal_sums import divergence_bound
from jaxacct.accountants.base import Accountant, cross_term, why_not_identity
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.mechanisms.mechanism import Mechanism


class RandomAllocation(Accountant):
    """Bound on the mixture over the phases, without side information."""

    name = "random-allocation"
    adjacencies = ("zero-out",)
    reveals_all_coins = False

    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        if mechanism.scheme.phase_participations is None:
            return "its participations are not one phase, drawn once"
        return "participations of a phase overlap" if cross_term(mechanism) else None

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        is_own = compose_with is None and not mechanism.scheme.independent_epochs  # `redrawn-bins` is faster
        return is_own and why_not_identity(mechanism) is None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        return divergence_bound(mixture_of(mechanism), epsilon)


def mixture_of(mechanism: Mechanism) -> Mixture:
    """Return a distribution of `f` that is that of a covered mechanism, or above it in convex order."""
    scheme = mechanism.scheme
    turns, bands = scheme.phase_participations, mechanism.strategy.bands
    assert turns is not None
    size = max(1, len(turns) // bands)  # of a group
    distance = len(turns) // size  # of its phases, around the cycle: at least as many steps as bands
    values, numbers = np.unique(-turns, return_counts=True)
    # Phases of so many turns or more are neighbours: at most so many of them are in a group.
    at_most = np.minimum(-(-numbers.cumsum() // distance), size)
    of_values = zip((-values).tolist(), np.diff(at_most, prepend=0).tolist(), strict=True)
    phases = {value: number for value, number in of_values if number}
    unused = phases.pop(0, 0) + size * (1 / scheme.phase_probability - 1) * (1 - 1e-12)
    return Mixture(
        tuple(Phases(number, turns**0.5 / mechanism.noise_multiplier) for turns, number in phases.items()),
        unused,
    )


def noise_about(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """Return about the noise multiplier of a covered mechanism: where one X alone is large, the others 1."""
    mixture = mixture_of(mechanism)
    turns = (max(part.mu for part in mixture.phases) * mechanism.noise_multiplier) ** 2
    of_one = min(0.5, delta * mixture.total / mixture.terms)
    return math.sqrt(turns) / gdp_mu(math.log1p(mixture.total * math.expm1(min(epsilon, 300.0))), of_one)
