"""Privacy profiles with simultaneous bands against quadrature and the PLD accountant."""

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxacct import BallsInBins, BandedToeplitz, Mechanism, Poisson, privacy_profile
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from tests.oracles import tuples
from tests.schemes.test_sampling import pld_delta

FALSE_ALARM = 1e-6
ONE = Mechanism(Poisson(1, 0.3), BandedToeplitz((1.0,)), 0.8)
GRID = np.array([0.05, 0.3, 1.0, 2.0, 4.0])


def exact(direction):
    return np.array([tuples.one_step_delta(0.8, 0.3, e, direction) for e in GRID])


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_bands_hold_the_exact_profile(direction, key):
    found = privacy_profile(ONE, GRID, num_samples=40_000, confidence=1 - FALSE_ALARM, key=key)
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
        found = privacy_profile(ONE, GRID[few], num_samples=1000, confidence=0.8, key=jax.random.key(run))
        bands = [(found.directions[d], truth[d]) for d in truth]
        wrong += any(np.any((t < b[0] - 1e-12) | (t > b[2] + 1e-12)) for b, t in bands)
    assert wrong <= stats.binom.isf(FALSE_ALARM, 24, 0.2)


@pytest.mark.slow
def test_many_steps_against_the_accountant(key):
    mechanism = Mechanism(Poisson(60, 0.1), BandedToeplitz((1.0,)), 1.0)
    grid = np.array([2.0, 4.0, 6.0, 8.0])
    found = privacy_profile(mechanism, grid, num_samples=40_000, confidence=1 - FALSE_ALARM, key=key)
    for direction in ("remove", "add"):
        lower, _, upper = found.directions[direction]
        truth = np.array([pld_delta(1.0, 0.1, 60, e, direction) for e in grid])
        assert np.all(lower <= truth * 1.005 + 1e-9)
        assert np.all(truth * 0.995 - 1e-9 <= upper)
    # Replicas resolve what plain sampling of so few draws does not.
    assert found.directions["remove"][2][-1] < 20 / 40_000


def test_bad_grids():
    for grid in [[], [1.0, 1.0], [2.0, 1.0], [-1.0], [np.nan], [[1.0]]]:
        with pytest.raises(ValueError, match="epsilons must be"):
            privacy_profile(ONE, grid)


def test_without_correlation_nothing_is_drawn(monkeypatch):
    """Balls-in-bins with C = I: upper ends from the accountant. One phase: a Gaussian."""
    monkeypatch.setattr("jaxacct.estimates.estimate.draw_samples", None)
    one = Mechanism(BallsInBins(4, 1), BandedToeplitz((1.0,)), 2.0)
    found = privacy_profile(one, [0.1, 1.0, 2.0])
    truth = [gdp_delta(e, 1.0) for e in found.epsilons]  # four turns at sigma 2
    assert found.num_samples == 0 and set(found.proposals.values()) == {"random-allocation"}
    assert np.all((found.lower == 0) & (truth <= found.upper) & (found.upper < 1.02 * np.array(truth)))
    assert np.all(np.diff(found.upper) <= 0)


@pytest.mark.parametrize("other", [None, dp_accounting.GaussianDpEvent(4.0)], ids=str)
def test_poisson_sampling_has_a_profile_without_a_draw(other, monkeypatch):
    """C = I: upper ends by the accountant at every point, against dp-accounting."""
    monkeypatch.setattr("jaxacct.estimates.estimate.draw_samples", None)
    mechanism, grid = Mechanism(Poisson(50, 0.05), BandedToeplitz.identity(), 1.5), np.linspace(0, 2, 18)
    found = privacy_profile(mechanism, grid, compose_with=other)
    events = PLDAccountant().compose(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5)), 50
    )
    if other is not None:
        events.compose(other)
    for epsilon, lower, upper in zip(grid, found.lower, found.upper, strict=True):
        exact = events.get_delta(float(epsilon))
        assert lower == 0 and 0.998 * exact <= upper <= 1.005 * exact, epsilon
    assert found.num_samples == 0 and set(found.proposals.values()) == {"pld"}
