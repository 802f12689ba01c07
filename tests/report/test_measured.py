"""What a page measures: bands that hold the truth as often as they say, and numbers that do not jump.

The truth is dp-accounting's for Poisson sampling, 60 steps. Each test states its false-alarm probability.
"""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, Poisson, calibrate
from jaxacct.accountants.tradeoff import EpsilonDelta
from jaxacct.report import html, risk
from tests.schemes.test_sampling import pld_distribution

FALSE_ALARM = 1e-6
N, P = 60, 0.1
PLD_ERROR = 5e-3  # relative, of dp-accounting's grid


@functools.cache
def plan_of_poisson():
    """A plan whose replicas at the end of the page's grid have a scale above 1 at small epsilons."""
    return calibrate(Poisson(N, P), BandedToeplitz.identity(), epsilon=8.0, delta=1e-5)


@functools.cache
def truth(direction: str) -> np.ndarray:
    plan = plan_of_poisson()
    grid = np.linspace(0, 1.5 * plan.epsilon, 31)
    return np.array(pld_distribution(plan.noise_multiplier, P, N, direction).get_delta_for_epsilon(grid))


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Samples are drawn though an accountant is exact, which is the truth here."""
    plan_of_poisson()
    monkeypatch.setattr("jaxacct.accountants.analytic.exact", lambda *_, **__: None)


def missed(bands) -> tuple[bool, bool]:
    """Whether any lower and any upper end of any direction misses the truth."""
    below = above = False
    for direction in ("remove", "add"):
        lower, _, upper = bands.directions[direction]
        exact = truth(direction)
        below |= bool(np.any(lower > exact * (1 + PLD_ERROR) + 1e-12))
        above |= bool(np.any(upper < exact * (1 - PLD_ERROR) - 1e-12))
    return below, above


def misses(runs: int, draws: int, confidence: float, monkeypatch) -> np.ndarray:
    monkeypatch.setattr(html, "CONFIDENCE", confidence)
    found = np.zeros(2, int)
    for run in range(runs):
        bands = html.measure(plan_of_poisson(), draws, jax.random.key(run))
        assert bands.confidence == confidence
        assert np.all(bands.upper <= EpsilonDelta(8.0, 1e-5).delta(bands.epsilons))
        found += missed(bands)
    return found


def test_bands_of_reports_hold_the_truth(monkeypatch):
    """5 reports at confidence 0.95; either end alone fails in Binomial(5, <= 0.05); false alarm 1e-6."""
    found = misses(5, 512, 0.95, monkeypatch)
    assert np.all(found <= stats.binom.isf(FALSE_ALARM, 5, 0.05)), found


def test_no_band_is_above_what_the_certified_point_implies():
    """With few draws bands are wide: at 64 every point is at the bound that follows from the certificate."""
    plan = plan_of_poisson()
    bands = html.measure(plan, 64, jax.random.key(0))
    implied = EpsilonDelta(plan.epsilon, plan.delta).delta(bands.epsilons)
    for values in (bands.lower, bands.estimate, bands.upper, *bands.directions.values()):
        assert np.all(values <= implied)
    assert np.any(bands.upper == implied)
    # At epsilon 0 that is the bound on the advantage, and from the certified epsilon on its delta.
    assert implied[0] == pytest.approx(risk.advantage(plan.epsilon, plan.delta), rel=1e-9)
    beyond = bands.epsilons >= plan.epsilon
    np.testing.assert_allclose(implied[beyond], plan.delta, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.5, html.CONFIDENCE])
def test_bands_of_200_reports_hold_the_truth(confidence, monkeypatch):
    """Binomial(200, <= 1 - confidence) reports miss, at either end; false alarm 1e-6."""
    found = misses(200, 2048, confidence, monkeypatch)
    assert np.all(found <= stats.binom.isf(FALSE_ALARM, 200, 1 - confidence)), found
