"""Confidence intervals of a divergence from a proposal's samples, and of the epsilon at a given delta.

All intervals include the rounding of float32 losses and errors of the drawn distribution
(proofs/derivations.md section 5).

A proposal that is good at one epsilon is valid at all larger ones: its weighted terms
`w (1 - e^{epsilon - L})_+` (add direction: `epsilon + L`) decrease in epsilon, so its scale still bounds
them, and it covers their support. At smaller epsilons its terms, truncated at the scale, have too small a
mean, so a lower bound stays one.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.proposals.base import Draws, Proposal
from jaxacct.proposals.threshold import budget_lines, threshold
from jaxacct.statistics import bounds, hockey_stick, roots
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import total

# A thousandth of this is the probability of outputs whose loss error may exceed the reserve.
_DELTA = 1e-12


@dataclass(frozen=True, eq=False)
class Drawn:
    """Samples of a proposal, and the terms that they have at any epsilon.

    Attributes:
      chosen: the proposal.
      draws: its samples.
      composed: the composed mechanism, whose profile is the function g of the terms `w g(t)`, or None for the
        hockey stick; a proposal may have another one.
    """

    chosen: Proposal
    draws: Draws
    composed: Composed | None = None

    @functools.cached_property
    def reserved(self) -> tuple[float, float, float]:
        """(nats, relative error, total variation) of arithmetic and of the drawn distribution."""
        lines = budget_lines(self.chosen, _DELTA)
        return total(lines, "epsilon"), total(lines, "relative"), total(lines, "total variation")

    def terms(self, epsilon: float, log_factor: float = 0.0) -> np.ndarray:
        """Return the weighted terms times e^log_factor, (draws,) float64."""
        scaled = self.draws._replace(log_weight=self.draws.log_weight + log_factor)
        of_target = hockey_stick.hockey_stick if self.composed is None else self.composed.profile
        profile = self.chosen.profile or of_target
        return hockey_stick.weighted_terms(scaled, self.chosen.direction, epsilon, profile)

    def counts(self, epsilon: float, side: int, log_scale: float | None = None) -> np.ndarray:
        """Return the histogram of the terms over their scale, rounded up (`side` 1) or down (-1)."""
        margin, log_scale = self.reserved[0], self.chosen.log_scale if log_scale is None else log_scale
        terms = self.terms(epsilon - side * margin, side * self.chosen.weight_error(margin) - log_scale)
        return bounds.bin_terms(np.minimum(1.0, terms))

    @property
    def furthest(self) -> float:
        """An epsilon, at least 0, from which on the terms of all samples are 0, or a profile's last value."""
        losses = self.draws.loss if self.chosen.direction == Direction.REMOVE else -self.draws.loss
        end = 0.0 if self.composed is None else float(self.composed.profile.logs[-1])
        return max(0.0, float(losses.max()) + end)


def bands(drawn: Drawn, grid: np.ndarray, q: float) -> np.ndarray:
    """Return (3, points): lower, estimate, upper divergence; each interval is wrong with probability <= q.

    The proposal's scale must hold at every point of the ascending grid: replicas, plain draws, or a proposal
    made for the first point.
    """
    chosen, (_, relative, variation) = drawn.chosen, drawn.reserved
    log_scales = np.full(len(grid), chosen.log_scale)
    if chosen.scale_at is not None:
        log_scales = np.array([chosen.scale_at(e) for e in grid])
    means = np.array([math.fsum(drawn.terms(e)) for e in grid]) / drawn.draws.loss.size
    points, scales = list(zip(grid, log_scales, strict=True)), np.exp(log_scales)
    upper = np.array([bounds.upper_confidence_bound(drawn.counts(e, 1, s), q / 2) for e, s in points])
    lower = np.array([bounds.lower_confidence_bound(drawn.counts(e, -1, s), q / 2) for e, s in points])
    upper = np.minimum(1.0, scales * (1 + relative) * (upper + variation) + chosen.left_out)
    lower = scales * np.maximum(0.0, lower - variation) / (1 + relative)
    return np.stack([np.minimum(lower, upper), np.clip(means, lower, upper), upper])


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
    above, lower = bands(Drawn(chosen, draw(chosen)), grid, q), for_lower_ends(chosen)
    if lower is None:
        above[0] = 0.0
    elif lower is not chosen:
        above[0] = np.minimum(bands(Drawn(lower, draw(lower)), grid, q)[0], above[1])
    return above


def crossing(drawn: Drawn, anchor: float, delta: float, q: float, lower: Drawn | None) -> tuple[float, float]:
    """Return (low, high) around the epsilon whose divergence is `delta`, wrong with probability at most q.

    The proposal is made for the epsilon `anchor`; `lower` has samples of the proposal of `for_lower_ends`,
    None without a lower bound, as with a composed profile.
    """
    low = 0.0 if lower is None else _crossing_from_below(lower, delta, q / 2)
    return low, max(low, _crossing_from_above(drawn, anchor, delta, q / 2))


def _crossing_from_above(drawn: Drawn, anchor: float, delta: float, q: float) -> float:
    """Return an upper bound on the epsilon whose divergence is `delta`, false with probability at most q.

    It inverts a pointwise bound on the divergence, which must hold at that one epsilon only, since it
    decreases in epsilon: so one set of samples serves all epsilons. Infinite where the samples give no bound.
    The proposal was made for `anchor`, independently of the samples.
    """
    furthest = drawn.furthest + 2 * drawn.reserved[0]
    bets, weights = bounds.default_bets()
    below = threshold(drawn.chosen, delta)

    def is_below(epsilon):
        if below >= 1:
            return True
        return below > 0 and bounds.accepts(drawn.counts(epsilon, 1), below, q, bets, weights)

    if is_below(anchor):
        return anchor
    if furthest <= anchor or not is_below(furthest):
        return math.inf
    return last_true(lambda epsilon: not is_below(epsilon), anchor, furthest)[1]


def _crossing_from_below(drawn: Drawn, delta: float, q: float) -> float:
    """Return a lower bound on the epsilon of `_crossing_from_above`; 0 where the samples give no bound."""
    margin, relative, variation = drawn.reserved
    above = delta * math.exp(-drawn.chosen.log_scale) * (1 + relative) + variation

    def is_above(epsilon):
        return bounds.hopeless(drawn.counts(epsilon, -1), above, q)

    return last_true(is_above, 0.0, drawn.furthest + 2 * margin)[0] if is_above(0.0) else 0.0


def mean_crossing(drawn: Drawn, delta: float) -> float:
    """Return the epsilon at which the mean weighted term falls below `delta`; 0 if it is below at 0."""

    def is_above(epsilon):
        return float(np.mean(drawn.terms(epsilon))) > delta

    return last_true(is_above, 0.0, drawn.furthest)[0] if is_above(0.0) else 0.0


def last_true(holds, low: float, high: float, precision: float = 1e-6) -> tuple[float, float]:
    """Return a short interval around the end of a property that is true at `low` and not beyond `high`."""
    return roots.bisect(lambda x: not holds(x), low, high, absolute=1e-3 * precision, relative=precision)
