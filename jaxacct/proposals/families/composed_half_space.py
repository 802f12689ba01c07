"""Half-spaces with a composed mechanism (add direction; proofs/composition.md).

With g the privacy profile of the composed mechanism, the divergence of the two together is `E_Q[g(t)]`,
`t = epsilon + L`. `f >= P(x = 0)` and every tangent of ln(f - P0) bound t from below, hence g(t) from above,
and no part of g has to be left out.
"""

import functools
import math

import numpy as np
from scipy.special import log_ndtr, logsumexp

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.half_space import (
    CELLS,
    Minorant,
    best_minorant,
    jensen,
    place_cells,
    proposal_along,
)
from jaxacct.proposals.families.plain_bounded import candidates as plain_candidates
from jaxacct.proposals.families.plain_bounded import min_exponent
from jaxacct.statistics.composed import Composed

SPEC = ProposalSpec("composed-half-space", ())
_TAIL = 2.0**-41  # probability, relative to the scale, at either end of the table of t
_PLACES = np.linspace(-38.0, 38.0, 1521)  # of t, to estimate where the table should be
_SHARES = (0.4, 0.7)  # tangent points, as fractions of the (negative) loss that terms of 1 would need


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the half-space where its scale is below that of samples of Q."""
    others = plain_candidates(setting, samples_needed)
    if samples_needed is not None and any(samples_needed(proposal) <= 0 for proposal in others):
        return []
    found = build(setting)
    smallest = min([0.0, *(one.log_scale for one in others)])
    return [] if found is None or not found.log_scale < smallest - 1e-3 else [found]


def build(setting: Setting) -> Proposal | None:
    """Return the half-space with the smallest scale for a setting, if any."""
    mechanism, composed = setting.mechanism, setting.composed
    if (
        composed is None
        or mechanism.scheme.side_information is not None
        or not mechanism.strategy.is_toeplitz
    ):
        return None
    found = [
        proposal_along(
            mechanism, minorant, *composed_table(mechanism, setting.epsilon, composed, minorant), SPEC
        )
        for minorant in _tangents(mechanism, setting.epsilon)
    ]
    return min(found, key=lambda proposal: proposal.log_scale, default=None)


@functools.lru_cache(maxsize=32)
def _tangents(mechanism: Mechanism, epsilon: float) -> tuple[Minorant, ...]:
    """Return candidate tangents: Jensen's, and the best ones at losses that dominate the composed terms."""
    none = -mechanism.scheme.log_probability_of_none()
    losses = sorted({share * min(none, epsilon) for share in _SHARES})
    found = [jensen(mechanism), *(best_minorant(mechanism, loss) for loss in losses)]
    return tuple(minorant for minorant in found if minorant is not None)


def composed_table(
    mechanism: Mechanism, epsilon: float, composed: Composed, minorant: Minorant
) -> tuple[float, float, dict]:
    """Return a piecewise constant density r of a tangent's coordinate t with `phi(t) h(t) / r(t) <= scale`.

    h(t) = g(epsilon + ln(P0 + e^{constant + slope t})) bounds the terms and decreases in t. The result is
    that of `coordinate_table`.
    """
    slope = minorant.norm / mechanism.noise_multiplier
    least = min_exponent(mechanism, epsilon)

    def log_height(t):
        exponent = np.logaddexp(least, epsilon + minorant.constant + slope * t)
        with np.errstate(divide="ignore"):
            return np.log(composed.profile(exponent - 1e-12 * (1 + np.abs(exponent)))) + 1e-9

    most = composed.log_at(least)
    guide = -(_PLACES**2) / 2 - math.log(2 * math.pi) / 2 + log_height(_PLACES)
    allowed = float(logsumexp(guide)) + math.log((_PLACES[1] - _PLACES[0]) * _TAIL)
    below = log_ndtr(_PLACES) + most < allowed
    above = log_ndtr(-_PLACES) + log_height(_PLACES) < allowed
    low = float(_PLACES[max(int(below.sum()) - 1, 0)])
    high = float(_PLACES[min(int(np.argmax(above)) if above.any() else len(_PLACES) - 1, len(_PLACES) - 1)])
    width = max(high - low, 1e-3) / CELLS
    upper = high - width * np.arange(CELLS)
    nearest = np.clip(0.0, upper - width, upper)
    log_peak = -(nearest**2) / 2 - math.log(2 * math.pi) / 2 + log_height(upper - width)
    log_scale, cells = place_cells(upper, width, log_peak)
    end = float(upper[-1] - width)
    left_out = np.logaddexp(log_ndtr(end) + most, log_ndtr(-high) + float(log_height(np.array([high]))[0]))
    return log_scale, math.exp(float(left_out) - log_scale), cells
