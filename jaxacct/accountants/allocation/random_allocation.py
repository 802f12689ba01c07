"""Balls-in-bins without correlation (C = I): delta up to a grid, without samples.

A unit participates in one uniform phase, the same in every cycle. Its turns in a phase add up to one Gaussian
shift of length `sqrt(turns)`, and phases do not overlap, so `f = P/Q` is the mean of as many independent
lognormals as there are phases, however many cycles there are (proofs/random_allocation.md).
"""

import numpy as np

from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Phases
from jaxacct.accountants.allocation.lognormal_sums import divergence_bound
from jaxacct.accountants.base import Accountant, why_not_identity
from jaxacct.mechanisms.mechanism import Mechanism


class RandomAllocation(Accountant):
    """Bound on the mixture over the phases, without side information."""

    name = "random-allocation"
    adjacencies = ("zero-out",)
    reveals_all_coins = False

    def why_not_covered(self, mechanism: Mechanism) -> str | None:
        if mechanism.scheme.phase_participations is None:
            return "its participations are not one phase, drawn once"
        return why_not_identity(mechanism)

    def is_close(self, mechanism: Mechanism, delta: float | None, compose_with=None) -> bool:
        del mechanism, delta
        return compose_with is None

    def bound(self, mechanism: Mechanism, epsilon: float, compose_with) -> float:
        del compose_with
        return divergence_bound(mixture_of(mechanism), epsilon)


def mixture_of(mechanism: Mechanism) -> Mixture:
    """Return the distribution of `f` of a mechanism that is covered."""
    turns = mechanism.scheme.phase_participations
    assert turns is not None
    values, numbers = np.unique(turns, return_counts=True)
    parts = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    unused = parts.pop(0, 0)
    return Mixture(
        tuple(Phases(number, turns**0.5 / mechanism.noise_multiplier) for turns, number in parts.items()),
        unused,
    )
