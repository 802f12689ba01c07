"""Replicas of one example, for a unit whose counts are a sum of k independent draws (remove direction).

With f_1 the likelihood ratio of one example, `f <= f_1^k` (proofs/shared_examples.md, theorem 4). So for M
> k draw from the law R with density `Q f_1^M / Z_M`, which is that of M replicas of one example: the weight
of a draw is `Z_M f / f_1^M <= Z_M f^{1 - M/k}`, and the weighted term never exceeds

    Z_M (1 / (rho - 1)) ((rho - 1) / rho)^rho e^{(1 - rho) epsilon},   rho = M / k.

Where f itself is bounded by f_1^k, that bound takes its place and all of it holds; one from below may, too.
"""

import dataclasses
import functools
import math

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.mean_overlaps import loss_from_below, with_the_law_of_means
from jaxacct.proposals.families.replicas import (
    around_the_smallest_scale,
    checked_replicas,
    drawer_of_another,
    log_scale,
)
from jaxacct.statistics.hockey_stick import Direction


def power_proposal(mechanism: Mechanism, m: int, epsilon: float) -> Proposal:
    """M = m replicas of one example, m above the number of examples, with the scale at `epsilon`.

    Raises:
      ValueError: for an m that there are no tables for, or whose Z_M overflows.
    """
    one, number = _one(mechanism)
    drawn = checked_replicas(one, m, number + 1)
    log_z = drawn.log_normalizer
    found = Proposal(
        spec=ProposalSpec("example-replicas", (m,)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=log_scale(log_z, m / number, epsilon),
        draw_block=drawer_of_another(drawn.module, _one_example),
        tables=drawn.tables,
        relative_error=drawn.relative_error,
        total_variation=drawn.total_variation,
        replicas=-(-m // number),
        push=0.0,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=lambda other: log_scale(log_z, m / number, other),
        rounding_lines=lambda delta_v: rounding.power_lines(mechanism, float(delta_v), m, log_z),
        log_normalizer=log_z,
    )
    if not mechanism.is_upper_bound:
        return found

    def below() -> Proposal:
        drawer = drawer_of_another(drawn.module, _one_example, loss_from_below)
        return dataclasses.replace(found, draw_block=drawer, rounding_lines=lines_from_below, below=None)

    def lines_from_below(delta_v):
        lines = rounding.power_lines(mechanism, float(delta_v), m, log_z)
        *_, means = more = with_the_law_of_means(mechanism, lines)
        # Weights have the loss as well.
        return *more, dataclasses.replace(means, kind="relative", amount=math.expm1(min(means.amount, 600.0)))

    return dataclasses.replace(found, below=below)


def _one(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """The mechanism of one example, and how many examples a unit has."""
    if mechanism.scheme.parts is None:
        raise ValueError(f"scheme must be of independent examples, was {mechanism.scheme.name}")
    one, number = mechanism.scheme.parts
    return Mechanism(one, mechanism.strategy, mechanism.noise_multiplier), number


def build(setting: Setting, m: int) -> Proposal:
    """Return `power_proposal` for a setting; ValueError as there."""
    return power_proposal(setting.mechanism, m, setting.epsilon)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposals worth considering, as for `replicas`; none for units of one example."""
    if setting.mechanism.scheme.parts is None:
        return []
    one, number = _one(setting.mechanism)
    return around_the_smallest_scale(one, number + 1, functools.partial(build, setting), samples_needed)


def _one_example(scheme):
    return scheme.parts[0]
