"""Intervals of estimates hold the truth as often as they say, from delta 1e-3 to 1e-12.

The truth is dp-accounting's for Poisson sampling. Runs in which an interval at confidence c misses are
Binomial(runs, <= 1 - c); tests fail beyond its quantile of `FALSE_ALARM`. Ends of intervals are those of
rounded terms with every reserve, recomputed from their definition.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

import jaxacct as ja
from jaxacct.accountants import unamplified
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.estimates import estimate, interval
from jaxacct.estimates.estimate import proven_epsilon
from jaxacct.proposals import base, threshold
from jaxacct.proposals.base import Draws, ProposalSpec, plain
from jaxacct.statistics import bounds
from jaxacct.statistics.lines import BudgetLine, Item
from tests.oracles.composed_losses import sampled
from tests.oracles.enumeration import strategy_matrix
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.schemes.test_sampling import _pld, pld_delta

FALSE_ALARM = 1e-6
N, P, SIGMA = 20, 0.01, 1.0
MECHANISM = ja.Mechanism(ja.Poisson(N, P), ja.BandedToeplitz.identity(), SIGMA)
DELTAS = (1e-3, 1e-5, 1e-7, 1e-9, 1e-12)
# Of dp-accounting's epsilons, which are within 1e-4 of those on a grid five times as fine.
PLD_ERROR = 2e-3


@pytest.fixture(autouse=True)
def few_blocks_at_once(monkeypatch):
    """As many as most tests here ask for: a call draws all of its blocks, also those that are not used."""
    monkeypatch.setattr(base, "blocks_at_once", lambda *_: 4)


def few(runs, miss):
    return stats.binom.isf(FALSE_ALARM, runs, miss)


@functools.lru_cache
def pld_epsilon(delta):
    return _pld(SIGMA, P, N).get_epsilon_for_delta(delta)


def cover(delta, runs, num_samples, confidence=0.95):
    """Misses of `estimate_epsilon` at delta and of `estimate_delta` at its epsilon, and mean widths."""
    epsilon, misses, widths = pld_epsilon(delta), np.zeros(2), []
    options: dict[str, Any] = dict(num_samples=num_samples, confidence=confidence)
    for run in range(runs):
        found = ja.estimate_epsilon(MECHANISM, delta, key=jax.random.key(run), **options)
        assert found.low <= found.value <= found.high
        misses[0] += not found.low - PLD_ERROR <= epsilon <= found.high + PLD_ERROR
        widths.append(found.high - found.low)
        seen = ja.estimate_delta(MECHANISM, epsilon, key=jax.random.key(run), **options)
        misses[1] += not seen.low * 0.98 <= delta <= seen.high * 1.02
    return misses, np.mean(widths)


def test_epsilon_and_delta_are_covered():
    """12 runs: the first version missed in two of three at 1e-9."""
    misses, _ = cover(1e-9, 12, 1024)
    assert np.all(misses <= few(12, 0.05)), misses


@pytest.mark.parametrize(("runs", "draws", "confidence"), [(10, 512, 0.9), slow(300, 2048, 0.95)])
def test_the_profile_is_covered(runs, draws, confidence):
    grid, truth, misses = np.array([pld_epsilon(delta) for delta in DELTAS]), np.array(DELTAS), 0
    options: dict[str, Any] = dict(num_samples=draws, confidence=confidence)
    for run in range(runs):
        found = ja.privacy_profile(MECHANISM, grid, key=jax.random.key(run), **options)
        misses += bool(np.any((truth < found.lower * 0.98) | (truth * 0.98 > found.upper)))
    assert misses <= few(runs, 1 - confidence)


def test_epsilon_falls_as_delta_grows(key):
    found = [ja.estimate_epsilon(MECHANISM, delta, num_samples=1024, key=key) for delta in (1e-9, 1e-7, 0.5)]
    assert np.all(np.diff([f.value for f in found]) < 0)
    assert found[-1].value == found[-1].low == found[-1].high == 0
    # That of the least noise that a mechanism takes is finite.
    assert 1e17 < unamplified.epsilon_at(dataclasses.replace(MECHANISM, noise_multiplier=1e-9), 1e-9) < 1e21


def test_poisson_sampling_with_independent_noise_needs_no_samples():
    """By default; a number of samples asks for an interval from both sides, which is around it."""
    for delta in (1e-3, 1e-7):
        found = ja.estimate_epsilon(MECHANISM, delta)
        assert found.num_samples == 0 and found.low == 0 and found.value == found.high
        assert set(found.proposals.values()) == {"pld"}
        assert abs(found.value - pld_epsilon(delta)) <= PLD_ERROR
        back = ja.estimate_delta(MECHANISM, found.value)
        assert back.num_samples == 0 and 0.99 * delta <= back.value <= delta * 1.001
    assert found.directions["add"] == found.directions["remove"] == found.value
    drawn = ja.estimate_epsilon(MECHANISM, 1e-3, num_samples=2000, key=jax.random.key(1))
    assert drawn.num_samples == 2000 and drawn.low > 0


def test_bounds_that_are_not_exact_do_not_replace_samples():
    """An accountant that reveals phases is above the value; that of the steps themselves is not."""
    other = ja.Mechanism(ja.BMinSep(N, 2, P), ja.BandedToeplitz.identity(), SIGMA)
    assert estimate.known_or_samples(other, None)[0] is None
    replaced = ja.Mechanism(ja.Poisson(N, P), ja.BandedToeplitz.identity(), SIGMA, "replace-one")
    found = ja.estimate_delta(replaced, 1.0)
    assert found.num_samples == 0 and found.directions["remove"] == found.directions["add"] == found.value
    assert found.value > ja.estimate_delta(MECHANISM, 1.0).value


EVENT = dp_accounting.GaussianDpEvent(4.0)


def composed_epsilon(delta):
    accountant = PLDAccountant().compose(EVENT)
    sampled = dp_accounting.PoissonSampledDpEvent(P, dp_accounting.GaussianDpEvent(SIGMA))
    return accountant.compose(sampled, N).get_epsilon(delta)


def test_a_composed_epsilon_of_samples(monkeypatch):
    """The interval holds dp-accounting's value at confidence 1 - 1e-6, without the accountants' bound."""
    monkeypatch.setattr(estimate.analytic, "epsilon_at", lambda *_: (math.inf, None))
    crossing, profiles = estimate.interval.crossing, []
    monkeypatch.setattr(
        estimate.interval, "crossing", lambda *given: profiles.append(given[0].composed) or crossing(*given)
    )
    options = dict(num_samples=8192, confidence=1 - FALSE_ALARM, key=jax.random.key(5))
    found, exact = ja.estimate_epsilon(MECHANISM, 1e-5, compose_with=EVENT, **options), composed_epsilon(1e-5)
    assert pld_epsilon(1e-5) < 0.8 * exact  # the attack: an interval of the mechanism without the event
    assert found.low == 0 and exact * (1 - 1e-4) <= found.high < 1.2 * exact
    assert found.value == pytest.approx(exact, rel=0.02)
    assert [one.profile for one in profiles] == [estimate.composition_of(EVENT).profile]
    # What samples do not show, an accountant may.
    monkeypatch.setattr(estimate.analytic, "epsilon_at", lambda *_: (1.01 * exact, "pld"))
    assert ja.estimate_epsilon(MECHANISM, 1e-5, compose_with=EVENT, **options).high <= 1.01 * exact


def test_a_proven_epsilon_includes_what_a_proposal_leaves_out(monkeypatch):
    """A scale of e^-epsilon and half of delta left out, as 2^-60 is for replace-one."""

    def chosen(_, epsilon, *__):
        return SimpleNamespace(log_scale=-epsilon, left_out=5e-7)

    monkeypatch.setattr(estimate, "_distribution_at", chosen)
    monkeypatch.setattr(estimate.unamplified, "epsilon_at", lambda *_: 1e4)
    found = proven_epsilon.__wrapped__(
        ja.Mechanism(ja.Poisson(2, 0.3), ja.BandedToeplitz.identity(), 2.0), "remove", 1e-6
    )
    assert math.exp(-found) + 5e-7 <= 1e-6 and found == pytest.approx(math.log(2e6), rel=0.05)


ONE = ja.Mechanism(ja.Poisson(1, 0.3), ja.BandedToeplitz((1.0,)), 0.8)
GRID = np.array([0.05, 0.3, 1.0, 2.0, 4.0])


def exact(direction):
    return np.array([float(sampled(e, 0.3, 0.8, direction == "remove")) for e in GRID])


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_bands_hold_the_exact_profile(direction, key):
    found = ja.privacy_profile(ONE, GRID, num_samples=40_000, confidence=1 - FALSE_ALARM, key=key)
    lower, estimate, upper = found.directions[direction]
    truth = exact(direction)
    assert np.all(lower <= truth + 1e-12)
    assert np.all(truth <= upper + 1e-12)
    assert np.all((lower <= estimate) & (estimate <= upper))
    assert np.all(np.diff(upper) <= 1e-12)
    if direction == "add":  # at most the other one, of which it has the upper band
        assert lower[0] > 0 and np.array_equal(upper, found.upper)
        return
    # Not vacuous: within a third of the truth where it is not tiny.
    seen = truth > 1e-3
    assert np.all(upper[seen] < 1.35 * truth[seen])
    assert np.all(lower[seen] > 0.65 * truth[seen])


def test_coverage_is_simultaneous():
    """At confidence 0.8, runs in which any of six bands fails are Binomial(24, <= 0.2); false alarm 1e-6."""
    few = slice(None, None, 2)
    truth = {direction: exact(direction)[few] for direction in ("remove", "add")}
    wrong = 0
    for run in range(24):
        found = ja.privacy_profile(ONE, GRID[few], num_samples=1000, confidence=0.8, key=jax.random.key(run))
        bands = [(found.directions[d], truth[d]) for d in truth]
        wrong += any(np.any((t < b[0] - 1e-12) | (t > b[2] + 1e-12)) for b, t in bands)
    assert wrong <= stats.binom.isf(FALSE_ALARM, 24, 0.2)


def test_bad_grids():
    for grid in [[], [1.0, 1.0], [2.0, 1.0], [-1.0], [np.nan], [[1.0]]]:
        refused("epsilons must be", ja.privacy_profile, ONE, grid)


@pytest.mark.slow
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_and_delta_are_covered_in_300_runs(delta):
    misses, width = cover(delta, 300, 8192)
    assert np.all(misses <= few(300, 0.05)), misses
    assert width < 0.4 * pld_epsilon(delta)


@pytest.mark.slow
def test_profiles_of_many_steps_hold_the_truth(key):
    mechanism = ja.Mechanism(ja.Poisson(60, 0.1), ja.BandedToeplitz((1.0,)), 1.0)
    grid = np.array([2.0, 4.0, 6.0, 8.0])
    found = ja.privacy_profile(mechanism, grid, num_samples=40_000, confidence=1 - FALSE_ALARM, key=key)
    for direction in ("remove", "add"):
        lower, _, upper = found.directions[direction]
        truth = np.array([pld_delta(1.0, 0.1, 60, e, direction) for e in grid])
        assert np.all(lower <= truth * 1.005 + 1e-9)
        assert np.all(truth * 0.995 - 1e-9 <= upper)
    # Replicas resolve what plain sampling of so few draws does not.
    assert found.directions["remove"][2][-1] < 20 / 40_000


@pytest.mark.parametrize("other", [None, EVENT], ids=str)
def test_poisson_sampling_has_a_profile_without_a_draw(other, monkeypatch):
    """C = I: upper ends by the accountant at every point, against dp-accounting."""
    monkeypatch.setattr(estimate, "draw_samples", None)
    mechanism, grid = (
        ja.Mechanism(ja.Poisson(50, 0.05), ja.BandedToeplitz.identity(), 1.5),
        np.linspace(0, 2, 18),
    )
    found = ja.privacy_profile(mechanism, grid, compose_with=other)
    step = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
    events = PLDAccountant().compose(step, 50)
    if other is not None:
        events.compose(other)
    for epsilon, lower, upper in zip(grid, found.lower, found.upper, strict=True):
        exact = events.get_delta(float(epsilon))
        assert lower == 0 and 0.998 * exact <= upper <= 1.005 * exact, epsilon
    assert found.num_samples == 0 and set(found.proposals.values()) == {"pld"}


def test_what_no_draw_resolves_is_what_holds_without_a_draw(key):
    """128 plain draws at 1e-9: the pattern revealed. Of bounds nothing is known from below."""
    mechanism = ja.Mechanism(ja.BMinSep(4, 2, 0.3), ja.BandedInverse.bisr(iterations=4, bands=2), 1.0)
    found = ja.estimate_epsilon(mechanism, 1e-9, num_samples=128, key=key)
    rows = strategy_matrix(mechanism.strategy.array, 4, 4)
    length = max(
        np.linalg.norm(rows[:, [first, later]].sum(axis=1)) for first, later in [(0, 2), (0, 3), (1, 3)]
    )
    assert found.value == found.high == proven_epsilon(mechanism, "remove", 1e-9)
    assert 0.999e-9 < gdp_delta(found.high, length) <= 1e-9
    assert found.low == 0


def test_scales_beyond_float64_are_compared_in_logs(monkeypatch):
    """With little noise a scale is beyond e^709: no traceback; the proposal that resolves delta is chosen."""
    low = dataclasses.replace(plain(MECHANISM, "remove"), spec=ProposalSpec("low", ()), log_scale=-1.0)
    high = dataclasses.replace(low, spec=ProposalSpec("high", ()), log_scale=5e4, total_variation=1e-300)
    for total_variation, taken in ((1e-8, "low"), (0.0, "low"), (1e-3, "high")):
        found = [high, dataclasses.replace(low, total_variation=total_variation)]
        monkeypatch.setattr(estimate, "proposals_at", lambda *_, composed, found=found: found)
        assert estimate._distribution_at(MECHANISM, 1.0, "remove", 1e-6).name == taken


Q, LEFT_OUT = 1e-3, 2e-3
MARGINS, RELATIVE, VARIATIONS = (0.02, 0.03), (0.04, 0.01), (0.001, 0.002)
MARGIN, VARIATION = sum(MARGINS), sum(VARIATIONS)
FACTOR = math.prod(1 + one for one in RELATIVE)
SIGN = {"remove": 1, "add": -1}
POINTS = np.array([0.2, 0.7, 1.1])
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
        log_scales = -0.3 - POINTS / 10
    lower, value, upper = interval.bands(interval.Drawn(chosen, draws_of(direction)), POINTS, Q)
    for i, (epsilon, log_scale) in enumerate(zip(POINTS, log_scales, strict=True)):
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
