"""Replicas at an inflated sampling probability (remove direction, small probabilities and epsilon).

Where a unit rarely participates, f = P/Q is close to 1 and nearly all replicas have no participation: the
distribution with density `Q f^m / Z_m` is close to Q. Let g be the likelihood ratio of the same scheme at
several times the sampling probability, P0 and P0' the probabilities of no participation, and c a lower bound
on the ratio of the probabilities of any other participation vector. Then `g >= P0' + c (f - P0)`. A sample of
the distribution R with density `Q g^m / Z'_m`, which is that of m replicas at the inflated probability, has
the weight `Z'_m f / g^m` and a term of at most

    Z'_m (1 / (c (m - 1))) ((m - 1) / m)^m A^{1 - m},   A = P0' + c (e^epsilon - P0)

(proofs/proposals.md, section 2.6).
"""

import functools
import math
from collections.abc import Callable

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.replicas import (
    around_the_smallest_scale,
    checked_replicas,
    drawer_of_another,
    drawn_sizes,
    lines_of_two,
)
from jaxacct.proposals.families.replicas import candidates as replica_candidates
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item

# Target of -ln P0' for the inflation factor, and the largest factor.
_TARGET_COUNT, _MAX_TIMES = 0.5, 32
_LOWERED = 1e-9  # relative, of A and c; far above float64 rounding


def build(setting: Setting, m: int, times: int) -> Proposal:
    """Return the proposal of m replicas at `times` the sampling probability, 2 to 32, for a setting.

    ValueError where there are no such replicas, or Z'_m overflows.
    """
    if not 2 <= times <= _MAX_TIMES:
        raise ValueError(f"times must be in 2..{_MAX_TIMES}, got {times}")
    mechanism = setting.mechanism
    found = _inflated(mechanism, times)
    if found is None:
        raise ValueError(
            f"scheme must have a proposal at {times} times its probability, got {mechanism.scheme.name}"
        )
    inflated, log_ratio = found
    drawn = checked_replicas(inflated, m)
    log_z = drawn.log_normalizer
    log_none, inflated_log_none = (one.scheme.log_probability_of_none() for one in (mechanism, inflated))

    def scale_at(other: float) -> float:
        return _log_scale(log_z, m, log_ratio, math.exp(log_none), math.exp(inflated_log_none), other)

    min_log_ratio = min(log_ratio, inflated_log_none - log_none)
    return Proposal(
        spec=ProposalSpec("inflated-replicas", (m, times)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(setting.epsilon),
        draw_block=drawer_of_another(drawn.module, _more_often(times)),
        tables=drawn.tables,
        relative_error=drawn.relative_error,
        total_variation=drawn.total_variation,
        replicas=m,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=lambda delta_v: inflated_lines(
            mechanism, inflated, float(delta_v), m, log_z, min_log_ratio - 1e-9
        ),
        log_normalizer=log_z,
    )


def _log_scale(
    log_z: float, m: int, log_ratio: float, none: float, inflated_none: float, epsilon: float
) -> float:
    ratio = math.exp(log_ratio) * (1 - _LOWERED)
    min_likelihood = (inflated_none + ratio * (math.exp(min(epsilon, 700.0)) - none)) * (1 - _LOWERED)
    return log_z - math.log(ratio * (m - 1)) + m * math.log((m - 1) / m) + (1 - m) * math.log(min_likelihood)


@functools.lru_cache(maxsize=512)
def inflated_lines(
    mechanism: Mechanism,
    inflated: Mechanism,
    delta_v: float,
    replicas: int,
    log_normalizer: float,
    log_min_ratio: float,
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z' + L - replicas L'`, L' at the inflated probability.

    `log_min_ratio` is a lower bound on ln of the ratio of the probabilities of any participation vector.
    """
    drawn = rounding.bounded(
        inflated,
        replicas,
        lambda share: inflated_sizes(inflated, delta_v, replicas, log_min_ratio, share),
    )
    return lines_of_two(
        mechanism, delta_v, replicas, log_normalizer, drawn, replicas, "3a", Item.WEIGHTS_INFLATED
    )


def inflated_sizes(
    inflated: Mechanism, delta_v: float, replicas: int, log_min_ratio: float, share: float
) -> rounding.Size:
    """Return the sizes of the loss at the inflated probability, under the target distribution.

    With `g >= r f`, r the least ratio: `E_P G_{>k} / g <= P'(> k) / r`, and `E_P g <= Z'_2 / r`.
    """
    rare, replicas_of = rounding.DELTA_SHARE * delta_v, inflated.scheme.replicas
    rarest = math.log(rare) + math.log(share) + log_min_ratio if share > 0 else -math.inf
    largest = math.inf
    if replicas_of is not None and replicas_of.max_replicas(inflated) >= 2:
        largest = replicas_of.log_normalizer(inflated, 2) - log_min_ratio - math.log(rare)
    return drawn_sizes(inflated, replicas, rare, rarest, largest)


def _inflated(mechanism: Mechanism, times: int) -> tuple[Mechanism, float] | None:
    found = mechanism.scheme.inflated(times) if mechanism.is_stationary else None
    if found is None:
        return None
    return Mechanism(found[0], mechanism.strategy, mechanism.noise_multiplier), found[1]


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return those of one inflation factor, where ordinary replicas do not need few samples already."""
    mechanism = setting.mechanism
    none = -mechanism.scheme.log_probability_of_none()
    if not 0 < none <= _TARGET_COUNT / 2:
        return []
    times = min(round(_TARGET_COUNT / none), _MAX_TIMES)
    found = _inflated(mechanism, times)
    if found is None:
        return []
    if samples_needed is not None:
        ordinary = replica_candidates(setting, samples_needed)
        if any(samples_needed(proposal) <= 0 for proposal in ordinary):
            return []
    return around_the_smallest_scale(found[0], 2, lambda m: build(setting, m, times), samples_needed)


@functools.cache  # one function for each factor, so that nothing compiles twice
def _more_often(times: int) -> Callable:
    return lambda scheme: scheme.inflated(times)[0]
