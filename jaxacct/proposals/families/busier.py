"""Replicas of an example that takes part more often (remove direction, small probabilities and epsilon).

Where an example hardly ever takes part, f = P/Q is next to 1 and nearly all replicas take no part at all: the
law with density `Q f^m / Z_m` is next to Q. Let g be the likelihood ratio of the same scheme at several times
the sampling probability, P0 and P0' the probabilities of no participation, and c at most the ratio of the
probabilities of any other participation vector. Then `g >= P0' + c (f - P0)`, and a draw of the law R with
density `Q g^m / Z'_m`, which is that of m replicas of the busier example, has the weight `Z'_m f / g^m` and a
term of at most

    Z'_m (1 / (c (m - 1))) ((m - 1) / m)^m A^{1 - m},   A = P0' + c (e^epsilon - P0)

(proofs/proposals.md, section 2.6).
"""

import functools
import math
from collections.abc import Callable

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.replicas import around_the_smallest_scale, checked_replicas, drawer_of_another
from jaxacct.proposals.families.replicas import candidates as replica_candidates
from jaxacct.statistics.hockey_stick import Direction

# The busier example takes no part with probability e to minus this, about; and how much busier it may be.
_WANTED, _MOST_TIMES = 0.5, 32
_LOWERED = 1e-9  # relative, of A and c; far above float64 rounding


def busier_proposal(mechanism: Mechanism, m: int, times: int, epsilon: float) -> Proposal:
    """m replicas at `times` the sampling probability, with the scale at `epsilon`.

    Raises:
      ValueError: where there are no such replicas, or Z'_m overflows.
    """
    found = _busier(mechanism, times)
    if found is None:
        raise ValueError(
            f"scheme must be known at {times} times its probability, was {mechanism.scheme.name}"
        )
    busier, log_ratio = found
    drawn = checked_replicas(busier, m)
    log_z = drawn.log_normalizer
    none, busier_none = (math.exp(one.scheme.log_probability_of_none()) for one in (mechanism, busier))

    def scale_at(other: float) -> float:
        return _log_scale(log_z, m, log_ratio, none, busier_none, other)

    least = min(
        log_ratio, busier.scheme.log_probability_of_none() - mechanism.scheme.log_probability_of_none()
    )
    return Proposal(
        spec=ProposalSpec("inflated-replicas", (m, times)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(epsilon),
        draw_block=drawer_of_another(drawn.module, _more_often(times)),
        tables=drawn.tables,
        relative_error=drawn.relative_error,
        total_variation=drawn.total_variation,
        replicas=m,
        push=0.0,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=lambda delta_v: rounding.busier_lines(
            mechanism, busier, float(delta_v), m, log_z, least - 1e-9
        ),
        log_normalizer=log_z,
    )


def _log_scale(
    log_z: float, m: int, log_ratio: float, none: float, busier_none: float, epsilon: float
) -> float:
    ratio = math.exp(log_ratio) * (1 - _LOWERED)
    least = (busier_none + ratio * (math.exp(min(epsilon, 700.0)) - none)) * (1 - _LOWERED)
    return log_z - math.log(ratio * (m - 1)) + m * math.log((m - 1) / m) + (1 - m) * math.log(least)


def _busier(mechanism: Mechanism, times: int) -> tuple[Mechanism, float] | None:
    found = mechanism.scheme.more_often(times) if mechanism.is_stationary else None
    if found is None:
        return None
    return Mechanism(found[0], mechanism.strategy, mechanism.noise_multiplier), found[1]


def build(setting: Setting, m: int, times: int) -> Proposal:
    """Return `busier_proposal` for a setting; ValueError as there, and for `times` out of 2..32."""
    if not 2 <= times <= _MOST_TIMES:
        raise ValueError(f"times must be in 2..{_MOST_TIMES}, was {times}")
    return busier_proposal(setting.mechanism, m, times, setting.epsilon)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return those of one inflation factor, where ordinary replicas are not cheap already."""
    mechanism = setting.mechanism
    none = -mechanism.scheme.log_probability_of_none()
    if not 0 < none <= _WANTED / 2:
        return []
    times = min(round(_WANTED / none), _MOST_TIMES)
    found = _busier(mechanism, times)
    if found is None:
        return []
    if samples_needed is not None:
        ordinary = replica_candidates(setting, samples_needed)
        if any(samples_needed(proposal) <= 0 for proposal in ordinary):
            return []
    return around_the_smallest_scale(found[0], 2, lambda m: build(setting, m, times), samples_needed)


@functools.cache  # one function of each, so that nothing compiles twice
def _more_often(times: int) -> Callable:
    return lambda scheme: scheme.more_often(times)[0]
