"""Confidence intervals of a divergence from a proposal's samples, and of the epsilon at a given delta.

All intervals include the rounding of float32 losses and errors of the drawn distribution
(proofs/derivations.md section 5).

A proposal that is good at one epsilon is valid at all larger ones: its weighted terms
`w (1 - e^{epsilon - L})_+` (add direction: `epsilon + L`) decrease in epsilon, so its scale still bounds
them, and it covers their support. At smaller epsilons its terms, truncated at the scale, have too small a
mean, so a lower bound stays one.
"""

import math

import numpy as np

from jaxacct.proposals.base import Draws, Proposal
from jaxacct.proposals.threshold import budget_lines, threshold
from jaxacct.statistics import bounds, hockey_stick, roots
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import total

# A thousandth of this is the probability of outputs whose loss error may exceed the reserve.
_DELTA = 1e-12


def side_counts(
    chosen: Proposal,
    draws: Draws,
    epsilon: float,
    log_scale: float,
    margin: float,
    side: int,
    profile=hockey_stick.hockey_stick,
) -> np.ndarray:
    """Return the histogram of the terms over their scale, rounded up (`side` 1) or down (-1).

    `margin` bounds the error of the losses, nats; `profile` is the hockey stick or a composed profile.
    """
    shift = side * chosen.weight_error(margin) - log_scale
    scaled = draws._replace(log_weight=draws.log_weight + shift)
    terms = hockey_stick.weighted_terms(scaled, chosen.direction, epsilon - side * margin, profile)
    return bounds.bin_terms(np.minimum(1.0, terms))


def bands(
    chosen: Proposal, grid: np.ndarray, draws: Draws, q: float, profile=hockey_stick.hockey_stick
) -> np.ndarray:
    """Return (3, points): lower, estimate, upper divergence; each interval is wrong with probability <= q.

    The proposal's scale must hold at every point of the ascending grid: replicas, plain draws, or a proposal
    made for the first point. `draws` are its samples.
    """
    log_scales = np.full(len(grid), chosen.log_scale)
    if chosen.scale_at is not None:
        log_scales = np.array([chosen.scale_at(e) for e in grid])
    profile = chosen.profile or profile
    margin, relative, variation = _reserved(chosen)
    totals = [math.fsum(hockey_stick.weighted_terms(draws, chosen.direction, e, profile)) for e in grid]
    points = list(zip(grid, log_scales, strict=True))
    high, low = (
        [side_counts(chosen, draws, *at, margin, side, profile) for at in points] for side in (1, -1)
    )
    scales = np.exp(log_scales)
    upper = np.array([bounds.upper_confidence_bound(counts, q / 2) for counts in high])
    lower = np.array([bounds.lower_confidence_bound(counts, q / 2) for counts in low])
    upper = np.minimum(1.0, scales * (1 + relative) * (upper + variation) + chosen.left_out)
    lower = scales * np.maximum(0.0, lower - variation) / (1 + relative)
    return np.stack(
        [np.minimum(lower, upper), np.clip(np.array(totals) / draws.loss.size, lower, upper), upper]
    )


def for_lower_ends(chosen: Proposal) -> Proposal | None:
    """Return the proposal whose samples give lower ends; None where losses are only bounded from above."""
    if chosen.of_a_bound or chosen.mechanism.is_upper_bound:
        return None
    return chosen.rounded_down or chosen


def bands_of_both(chosen: Proposal, grid: np.ndarray, draw, q: float) -> np.ndarray:
    """Return `bands` with the lower ends of `for_lower_ends`; 0 where that is None.

    Each end is wrong with probability at most q / 2, so together with q, for any dependence. `draw` is:
    proposal -> its samples.
    """
    above, lower = bands(chosen, grid, draw(chosen), q), for_lower_ends(chosen)
    if lower is None:
        above[0] = 0.0
    elif lower is not chosen:
        above[0] = np.minimum(bands(lower, grid, draw(lower), q)[0], above[1])
    return above


def crossing(
    chosen: Proposal,
    draws: Draws,
    anchor: float,
    delta: float,
    q: float,
    lower: tuple[Proposal, Draws] | None,
    profile=hockey_stick.hockey_stick,
) -> tuple[float, float]:
    """Return (low, high) around the epsilon whose divergence is `delta`, wrong with probability at most q.

    `chosen` is made for the epsilon `anchor`; `lower` is the proposal of `for_lower_ends` with its samples,
    None without a lower bound, as with a composed `profile`.
    """
    low = 0.0 if lower is None else _crossing_from_below(*lower, delta, q / 2)
    return low, max(low, _crossing_from_above(chosen, draws, anchor, delta, q / 2, profile))


def _crossing_from_above(
    chosen: Proposal, draws: Draws, anchor: float, delta: float, q: float, profile
) -> float:
    """Return an upper bound on the epsilon whose divergence is `delta`, false with probability at most q.

    It inverts a pointwise bound on the divergence, which must hold at that one epsilon only, since it
    decreases in epsilon: so one set of samples serves all epsilons. Infinite where the samples give no bound.
    `chosen` was made for `anchor`, independently of the samples.
    """
    margin, _, _ = _reserved(chosen)
    furthest = _furthest(chosen, draws, profile) + 2 * margin
    bets, weights = bounds.default_bets()
    drawn_profile = chosen.profile or profile
    below = threshold(chosen, delta)

    def is_below(epsilon):
        if below >= 1:
            return True
        counts = side_counts(chosen, draws, epsilon, chosen.log_scale, margin, 1, drawn_profile)
        return below > 0 and bounds.accepts(counts, below, q, bets, weights)

    if is_below(anchor):
        return anchor
    if furthest <= anchor or not is_below(furthest):
        return math.inf
    return last_true(lambda epsilon: not is_below(epsilon), anchor, furthest)[1]


def _crossing_from_below(chosen: Proposal, draws: Draws, delta: float, q: float) -> float:
    """Return a lower bound on the epsilon of `_crossing_from_above`; 0 where the samples give no bound."""
    margin, relative, variation = _reserved(chosen)
    furthest = _furthest(chosen, draws, hockey_stick.hockey_stick) + 2 * margin
    above = delta * math.exp(-chosen.log_scale) * (1 + relative) + variation

    def is_above(epsilon):
        return bounds.hopeless(side_counts(chosen, draws, epsilon, chosen.log_scale, margin, -1), above, q)

    return last_true(is_above, 0.0, furthest)[0] if is_above(0.0) else 0.0


def _reserved(chosen: Proposal) -> tuple[float, float, float]:
    """Return (nats, relative error, total variation) of arithmetic and of the drawn distribution."""
    lines = budget_lines(chosen, _DELTA)
    return total(lines, "epsilon"), total(lines, "relative"), total(lines, "total variation")


def mean_crossing(chosen: Proposal, draws: Draws, delta: float, profile=hockey_stick.hockey_stick) -> float:
    """Return the epsilon at which the mean weighted term falls below `delta`; 0 if it is below at 0."""
    drawn_profile = chosen.profile or profile

    def is_above(epsilon):
        terms = hockey_stick.weighted_terms(draws, chosen.direction, epsilon, drawn_profile)
        return float(np.mean(terms)) > delta

    return last_true(is_above, 0.0, _furthest(chosen, draws, profile))[0] if is_above(0.0) else 0.0


def _furthest(chosen: Proposal, draws: Draws, profile) -> float:
    """Return an epsilon, at least 0, from which on the terms of all samples are 0, or a profile's last value.

    `profile` is the hockey stick, or the `TabulatedProfile` of a composed mechanism.
    """
    losses = draws.loss if chosen.direction == Direction.REMOVE else -draws.loss
    end = 0.0 if profile is hockey_stick.hockey_stick else float(profile.logs[-1])
    return max(0.0, float(losses.max()) + end)


def last_true(holds, low: float, high: float, precision: float = 1e-6) -> tuple[float, float]:
    """Return a short interval around the end of a property that is true at `low` and not beyond `high`."""
    return roots.bisect(lambda x: not holds(x), low, high, absolute=1e-3 * precision, relative=precision)
