"""Privacy profiles with simultaneous bands against quadrature and the PLD accountant."""

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxacct import BandedToeplitz, Mechanism, Poisson, privacy_profile
from tests.oracles import tuples

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


def test_bad_grids():
    for grid in [[], [1.0, 1.0], [2.0, 1.0], [-1.0], [np.nan], [[1.0]]]:
        with pytest.raises(ValueError, match="epsilons must be"):
            privacy_profile(ONE, grid)


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
