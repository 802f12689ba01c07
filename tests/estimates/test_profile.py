"""Privacy profiles with simultaneous bands against quadrature and the PLD accountant."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from jaxacct import BandedToeplitz, Mechanism, Poisson, privacy_profile
from tests.schemes.test_sampling import pld_delta

FALSE_ALARM = 1e-6


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
