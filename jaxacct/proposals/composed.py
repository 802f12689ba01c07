"""Bounded weights where another mechanism is composed in (proofs/composition.md).

With g the privacy profile of the other mechanism, both divergences of the two together are `E_target[g(t)]`,
t as ever. g never ends, so against the weight `Z_m f^{1-m}` of m replicas it has no bound; but for its last
part phi it has,

    w g(t) <= phi w + Z_m e^{(1-m) epsilon} sup_t e^{(m-1) t} (g(t) - phi)_+ ,

and `E_R[phi w] = phi` is booked. The supremum is of the table of g, exactly. In the add direction
`f >= P(x = 0)` and every tangent of ln(f - P0) bound t from below, hence g(t) from above, and nothing has to
be left out.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np
from scipy.special import log_ndtr, logsumexp

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Proposal, plain
from jaxacct.proposals.half_space import (
    CELLS,
    Minorant,
    best_minorant,
    jensen,
    least_exponent,
    place_cells,
    proposal_along,
)
from jaxacct.proposals.replicas import around_the_smallest_scale, replica_proposal
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.direction import Direction

_TAIL = 2.0**-41  # probability, relative to the scale, at either end of the table of t
_PLACES = np.linspace(-38.0, 38.0, 1521)  # of t, for the guide to where the table should be
_SHARES = (0.4, 0.7)  # of the loss, below 0, that terms of 1 would need: where tangents are looked for


def composed_replicas(mechanism: Mechanism, m: int, epsilon: float, composed: Composed) -> Proposal:
    """m replicas, their terms `w (g(t) - phi)_+`, with the scale at `epsilon`.

    Raises:
      ValueError: as `replica_proposal`.
    """
    alone = replica_proposal(mechanism, m, epsilon)
    largest = composed.log_largest(m - 1)

    def scale_at(other: float) -> float:
        return alone.log_normalizer + (1 - m) * other + largest

    return dataclasses.replace(
        alone,
        log_scale=scale_at(epsilon),
        scale_at=scale_at,
        profile=composed.above_floor,
        left_out=composed.left_out,
        # Terms are positive where t = epsilon - L is below the end.
        lowest=max(0.0, composed.end),
    )


def composed_replica_candidates(
    mechanism: Mechanism,
    epsilon: float,
    composed: Composed,
    samples_needed: Callable[[Proposal], float] | None = None,
) -> list[Proposal]:
    """Those worth considering; none where the profile has no end that is small enough to be left out."""
    if composed.left_out == math.inf:
        return []
    return around_the_smallest_scale(
        mechanism, 2, lambda m: composed_replicas(mechanism, m, epsilon, composed), samples_needed
    )


def composed_replicas_called(
    mechanism: Mechanism, epsilon: float, composed: Composed, name: str
) -> Proposal | None:
    """The one of that name, None for a name of another kind."""
    order = re.fullmatch(r"([0-9]{1,3}) replicas", name)
    if order is None or composed.left_out == math.inf:
        return None
    return composed_replicas(mechanism, int(order[1]), epsilon, composed)


def composed_add_candidates(
    mechanism: Mechanism,
    epsilon: float,
    composed: Composed,
    samples_needed: Callable[[Proposal], float] | None = None,
) -> list[Proposal]:
    """Plain draws with what `f >= P0` says of their terms, and the half-space with the smallest scale."""
    if mechanism.scheme.side_information is not None:  # Q is no Gaussian, and f has no such bounds
        return []
    found = []
    log_scale = composed.log_at(least_exponent(mechanism, epsilon))
    if log_scale < -1e-3:
        base = plain(mechanism, Direction.ADD)
        found.append(dataclasses.replace(base, name="plain, less none", log_scale=log_scale))
    if not mechanism.strategy.is_toeplitz:  # no tangents: its columns have cross terms of their own
        return found
    if samples_needed is not None and any(samples_needed(proposal) <= 0 for proposal in found):
        return found
    half_space = _best_half_space(mechanism, epsilon, composed)
    if half_space is not None and half_space.log_scale < min(log_scale, 0.0) - 1e-3:
        found.append(half_space)
    return found


def composed_add_called(
    mechanism: Mechanism, epsilon: float, composed: Composed, name: str
) -> Proposal | None:
    """The one of `composed_add_candidates` of that name, None where there is none."""
    found = composed_add_candidates(mechanism, epsilon, composed)
    return next((proposal for proposal in found if proposal.name == name), None)


@functools.lru_cache(maxsize=32)
def _tangents(mechanism: Mechanism, epsilon: float) -> tuple[Minorant, ...]:
    """Tangents that may serve: Jensen's, and the best ones of losses that the composed terms come from."""
    none = -mechanism.scheme.log_probability_of_none()
    losses = sorted({share * min(none, epsilon) for share in _SHARES})
    found = [jensen(mechanism), *(best_minorant(mechanism, loss) for loss in losses)]
    return tuple(minorant for minorant in found if minorant is not None)


def _best_half_space(mechanism: Mechanism, epsilon: float, composed: Composed) -> Proposal | None:
    found = [
        proposal_along(mechanism, minorant, *composed_table(mechanism, epsilon, composed, minorant))
        for minorant in _tangents(mechanism, epsilon)
    ]
    return min(found, key=lambda proposal: proposal.log_scale, default=None)


def composed_table(
    mechanism: Mechanism, epsilon: float, composed: Composed, minorant: Minorant
) -> tuple[float, float, dict]:
    """A piecewise constant law r of the coordinate t of a tangent with `phi(t) h(t) / r(t) <= scale`.

    h(t) = g(epsilon + ln(P0 + e^{constant + slope t})) bounds the terms and falls in t. Returns what
    `coordinate_table` does.
    """
    slope = minorant.norm / mechanism.noise_multiplier
    least = least_exponent(mechanism, epsilon)

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
