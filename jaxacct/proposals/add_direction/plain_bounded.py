"""Add direction: samples of Q with terms of at most `1 - e^epsilon P(x = 0)`, or exactly zero divergence.

With P0 = P(x = 0) and f = P/Q >= P0 everywhere, no term `(1 - e^epsilon f)_+` exceeds

    M_0 = 1 - e^epsilon P0,

so the divergence is exactly zero as soon as M_0 <= 0 (proofs/add_direction.md). With a composed mechanism of
privacy profile g, no term exceeds g(epsilon + ln P0) (proofs/composition.md).
"""

import dataclasses
import math

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.statistics.hockey_stick import Direction

SPEC = ProposalSpec("plain-bounded", ())


def add_is_zero(mechanism: Mechanism, epsilon: float) -> bool:
    """Return whether H(Q, P) = 0: exactly when epsilon >= -ln P(x = 0), up to 1e-12 on the safe side."""
    log_none = mechanism.scheme.log_probability_of_none()
    return epsilon >= -log_none + 1e-12 * (1 + abs(log_none))


def log_remainder_scale(mechanism: Mechanism, epsilon: float) -> float:
    """Return ln M_0 = ln(1 - e^epsilon P(x = 0)), rounded up by 1e-12; -inf where H(Q, P) is zero."""
    if add_is_zero(mechanism, epsilon):
        return -math.inf
    log_none = mechanism.scheme.log_probability_of_none()
    exponent = (
        min(epsilon + log_none - 1e-12 * (1 + abs(log_none)), -1e-15) if log_none > -math.inf else log_none
    )
    return math.log(-math.expm1(exponent))


def min_exponent(mechanism: Mechanism, epsilon: float) -> float:
    """Return a lower bound on `t = epsilon + L` over all outputs, natural log."""
    none = mechanism.scheme.log_probability_of_none()
    return epsilon + none - 1e-12 * (1 + abs(none))


def build(setting: Setting) -> Proposal:
    """Return plain sampling with its weight bound for a setting; `log_scale` is -inf for an exact zero.

    ValueError where the adversary sees side information: Q is no Gaussian, and f has no such bound.
    """
    mechanism, epsilon = setting.mechanism, setting.epsilon
    if mechanism.scheme.side_information is not None:
        raise ValueError(f"{SPEC} does not cover side information, as of {mechanism.scheme.name}")
    if setting.composed is None:
        log_scale = log_remainder_scale(mechanism, epsilon)
    else:
        log_scale = setting.composed.log_at(min_exponent(mechanism, epsilon))
    return dataclasses.replace(plain(mechanism, Direction.ADD), spec=SPEC, log_scale=log_scale)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposal where its bound is below that of plain sampling."""
    del samples_needed
    if setting.mechanism.scheme.side_information is not None:
        return []
    found = build(setting)
    return [found] if found.log_scale < -1e-3 else []
