"""Ends of intervals are those of rounded terms with every reserve, recomputed from their definition."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxacct.estimates import interval
from jaxacct.proposals import threshold
from jaxacct.proposals.base import Draws
from jaxacct.statistics import bounds
from jaxacct.statistics.lines import BudgetLine, Item

Q, LEFT_OUT = 1e-3, 2e-3
MARGINS, RELATIVE, VARIATIONS = (0.02, 0.03), (0.04, 0.01), (0.001, 0.002)
MARGIN, VARIATION = sum(MARGINS), sum(VARIATIONS)
FACTOR = math.prod(1 + one for one in RELATIVE)
SIGN = {"remove": 1, "add": -1}
GRID = np.array([0.2, 0.7, 1.1])
generator = np.random.default_rng(0)
LOSS, LOG_WEIGHT = generator.normal(0.5, 1, 4000), generator.normal(-1, 0.1, 4000)


def proposal(direction: str, log_scale: float, monkeypatch):
    """A proposal whose budget lines are those above, two of each kind."""
    parts = dict(epsilon=MARGINS, relative=RELATIVE) | {"total variation": VARIATIONS, "delta": (LEFT_OUT,)}
    lines = [BudgetLine(Item.RATIO, kind, one, "") for kind, all_ in parts.items() for one in all_]
    for module in (interval, threshold):
        monkeypatch.setattr(module, "budget_lines", lambda *_: lines)
    return SimpleNamespace(
        direction=direction,
        log_scale=log_scale,
        scale_at=None,
        profile=None,
        left_out=LEFT_OUT,
        weight_error=lambda error: 2 * error,
    )


def draws_of(direction: str) -> Draws:
    return Draws(SIGN[direction] * LOSS, LOG_WEIGHT)


def counts_at(epsilon: float, log_scale: float, side: int) -> np.ndarray:
    """The terms `w (1 - e^(epsilon - L)) / M`, with the largest errors of L and ln w on one side."""
    exponent = epsilon - side * MARGIN - LOSS
    terms = np.exp(LOG_WEIGHT + side * 2 * MARGIN - log_scale) * np.maximum(0.0, 1 - np.exp(exponent))
    return bounds.bin_terms(np.minimum(1.0, terms))


@pytest.mark.parametrize("direction", SIGN)
@pytest.mark.parametrize("scaled_by_point", [False, True])
def test_bands_are_those_of_rounded_terms_with_every_reserve(direction, scaled_by_point, monkeypatch):
    chosen = proposal(direction, -0.4, monkeypatch)
    log_scales = np.full(3, -0.4)
    if scaled_by_point:
        chosen.scale_at = lambda epsilon: -0.3 - epsilon / 10
        log_scales = -0.3 - GRID / 10
    lower, value, upper = interval.bands(interval.Drawn(chosen, draws_of(direction)), GRID, Q)
    for i, (epsilon, log_scale) in enumerate(zip(GRID, log_scales, strict=True)):
        scale = math.exp(log_scale)
        above = bounds.upper_confidence_bound(counts_at(epsilon, log_scale, 1), Q / 2)
        below = bounds.lower_confidence_bound(counts_at(epsilon, log_scale, -1), Q / 2)
        assert upper[i] == pytest.approx(scale * FACTOR * (above + VARIATION) + LEFT_OUT, rel=1e-9)
        assert lower[i] == pytest.approx(scale * (below - VARIATION) / FACTOR, rel=1e-9)
        mean = np.mean(np.exp(LOG_WEIGHT) * np.maximum(0.0, 1 - np.exp(epsilon - LOSS)))
        assert value[i] == pytest.approx(mean, rel=1e-9) and 0 < lower[i] < mean < upper[i] < 1


@pytest.mark.parametrize("direction", SIGN)
def test_crossings_are_where_rounded_terms_with_every_reserve_cross(direction, monkeypatch):
    """Each end fails with q / 2; a little inside of it nothing is proven any more."""
    drawn = interval.Drawn(proposal(direction, -0.4, monkeypatch), draws_of(direction))
    delta = 0.06
    bets, weights = bounds.default_bets()
    low, high = interval.crossing(drawn, 0.1, delta, Q, drawn)
    theta = (delta - LEFT_OUT) / math.exp(-0.4) / FACTOR - VARIATION
    above = delta / math.exp(-0.4) * FACTOR + VARIATION

    def is_below(epsilon):
        return bounds.accepts(counts_at(epsilon, -0.4, 1), theta, Q / 2, bets, weights)

    def is_above(epsilon):
        return bounds.hopeless(counts_at(epsilon, -0.4, -1), above, Q / 2)

    assert 0.1 < low < interval.mean_crossing(drawn, delta) < high < 3
    assert is_below(high) and not is_below(high - 1e-4)
    assert is_above(low) and not is_above(low + 1e-4)
