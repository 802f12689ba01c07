"""Replicas of one example, for a unit whose counts are a sum of k independent draws (remove direction).

With f_1 the likelihood ratio of one example, `f <= f_1^k` (proofs/shared_examples.md, theorem 4). So for M
> k draw from the distribution R with density `Q f_1^M / Z_M`, which is that of M replicas of one example: the
weight of a draw is `Z_M f / f_1^M <= Z_M f^{1 - M/k}`, and the weighted term never exceeds

    Z_M (1 / (rho - 1)) ((rho - 1) / rho)^rho e^{(1 - rho) epsilon},   rho = M / k.

Where f itself is bounded by f_1^k, that bound replaces it and all of it holds.
"""

import functools
import math

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.replicas import (
    around_the_smallest_scale,
    checked_replicas,
    drawer_of_another,
    drawn_sizes,
    lines_of_two,
    log_scale,
)
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item


def build(setting: Setting, m: int) -> Proposal:
    """Return m replicas of one example, m above the number of examples, for a setting.

    ValueError where there are no tables for this m, or Z_m overflows.
    """
    mechanism = setting.mechanism
    one, number = _one(mechanism)
    drawn = checked_replicas(one, m, number + 1)
    log_z = drawn.log_normalizer
    return Proposal(
        spec=ProposalSpec("example-replicas", (m,)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=log_scale(log_z, m / number, setting.epsilon),
        draw_block=drawer_of_another(drawn.module, _one_example),
        tables=drawn.tables,
        relative_error=drawn.relative_error,
        total_variation=drawn.total_variation,
        replicas=-(-m // number),
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=lambda other: log_scale(log_z, m / number, other),
        rounding_lines=lambda delta_v: example_replica_lines(mechanism, float(delta_v), m, log_z),
        log_normalizer=log_z,
    )


@functools.lru_cache(maxsize=512)
def example_replica_lines(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z + L - replicas L_1`, L_1 the loss of one example."""
    one, number = _one(mechanism)
    rare = rounding.DELTA_SHARE * delta_v

    def size_of(share):
        # E_P f_1 <= Z_2 at sigma / sqrt m, and E_P F_{>k} <= (P(> k) Z_2')^{1/2}, Z_2' at sigma / sqrt(2 m).
        rarest = -math.inf
        if share > 0:
            rarest = 2 * (math.log(rare) + math.log(share) + one.scheme.sums.log_none)
            rarest -= rounding.log_coincidence(mechanism, 2 * number)
        largest = rounding.log_coincidence(mechanism, number) - math.log(rare)
        return drawn_sizes(one, replicas, rare, rarest, largest)

    drawn = rounding.bounded(one, replicas, size_of)
    as_units = -(-replicas // number)
    return lines_of_two(
        mechanism, delta_v, replicas, log_normalizer, drawn, as_units, "7", Item.WEIGHTS_OF_ONE
    )


def _one(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """Return the mechanism of one example, and the number of examples of a unit."""
    if mechanism.scheme.parts is None:
        raise ValueError(f"scheme must be of independent examples, got {mechanism.scheme.name}")
    one, number = mechanism.scheme.parts
    return Mechanism(one, mechanism.strategy, mechanism.noise_multiplier), number


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposals worth considering, as for `replicas`; none for units of one example."""
    if setting.mechanism.scheme.parts is None:
        return []
    one, number = _one(setting.mechanism)
    return around_the_smallest_scale(one, number + 1, functools.partial(build, setting), samples_needed)


def _one_example(scheme):
    return scheme.parts[0]
