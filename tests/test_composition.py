"""Composition with a dp-accounting event."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxacct import BandedToeplitz, Mechanism, Poisson, estimate_delta
from jaxacct.accountants import composition
from jaxacct.accountants.composition import composed_delta, event_from_json, event_profile, event_to_json
from jaxacct.accountants.gaussian import gaussian_delta

Z = stats.norm.isf(1e-6 / 2)


def test_profile_of_a_gaussian_is_an_upper_bound_and_tight():
    profile = event_profile(dp.GaussianDpEvent(2.0))
    t = np.linspace(-3, 3, 501)
    exact = np.array([gaussian_delta(x, 2.0, 1.0) for x in t])
    assert np.all(profile(t) >= exact)
    np.testing.assert_allclose(profile(t), exact, atol=2e-4)
    assert profile(np.array([-1000.0]))[0] == 1.0


def test_the_table_is_not_below_one_value_at_a_time():
    """Running sums lose digits where the tail is long and delta small, here in a loss that hardly varies."""
    for event in (dp.GaussianDpEvent(500.0), dp.LaplaceDpEvent(3.0)):
        accountant = PLDAccountant().compose(event)
        t = composition._GRID[::40]
        one_by_one = np.array([min(1.0, accountant.get_delta(float(at))) for at in t])
        table = event_profile(event)(t)
        assert np.all(table >= one_by_one)
        np.testing.assert_allclose(table, one_by_one, rtol=1e-5, atol=1e-20)


def test_a_delta_that_rounds_below_zero_is_still_a_bound():
    """dp-accounting says -1.1e-16 and -5.4e-16 here, and one band at epsilon 8 could not be calibrated."""
    for sigma in (1.01**282, 1.01**266):
        sampled = dp.PoissonSampledDpEvent(0.004, dp.GaussianDpEvent(sigma))
        assert 0 < composed_delta([dp.SelfComposedDpEvent(sampled, 1000)], 8.0, 2e-3) <= 1e-12


@pytest.mark.parametrize("draws", [40_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_composing_equals_the_accountant(draws, key):
    """Poisson sampled Gaussians composed with a Gaussian, both by dp-accounting and by sampling."""
    sampled = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), 20)
    other = dp.GaussianDpEvent(3.0)
    accountant = PLDAccountant(value_discretization_interval=5e-4).compose(sampled).compose(other)
    mechanism = Mechanism(Poisson(20, 0.1), BandedToeplitz((1.0,)), 1.0)
    found = estimate_delta(mechanism, 1.0, num_samples=draws, key=key, compose_with=other)
    error = np.sqrt(found.value / found.num_samples)  # terms are in [0, 1]: variance <= mean
    assert abs(found.value - accountant.get_delta(1.0)) < Z * error + 2e-4
    alone = estimate_delta(mechanism, 1.0, num_samples=draws, key=key)
    assert found.value > alone.value + Z * error


@pytest.mark.parametrize(
    "event",
    [
        None,
        dp.GaussianDpEvent(2.0),
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), 20),
        dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), dp.LaplaceDpEvent(2.0)]),
    ],
)
def test_json_round_trip(event):
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize("data", [{"kind": "os"}, {"kind": "GaussianDpEvent", "nope": 1}, {"kind": 3}])
def test_bad_json(data):
    with pytest.raises(ValueError, match="compose_with"):
        event_from_json(data)


def test_unsupported_event():
    with pytest.raises(ValueError, match="compose_with must be an event"):
        event_profile(dp.UnsupportedDpEvent())


def test_an_event_with_impossible_numbers_is_refused_in_one_line():
    for event in (
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(5.0), 2.5),
        dp.GaussianDpEvent(-1.0),
        dp.PoissonSampledDpEvent(math.nan, dp.GaussianDpEvent(1.0)),
    ):
        for use in (event_profile, lambda event: composed_delta([event], 1.0, 1e-2)):
            with pytest.raises(ValueError, match="compose_with must be") as caught:
                use(event)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "found"), [(1 + 2e-9, 1.0), (1.0, 1.0), (-1e-17, 1e-12), (0.3, 0.3), (1.5, 1.5)]
)
def test_a_sum_next_to_a_probability_is_one(given, found, monkeypatch):
    """With hardly any noise dp-accounting's delta is 1 + 2.8e-8; what is far from 1 is left to be refused."""
    import dp_accounting

    monkeypatch.setattr(dp_accounting.pld.PLDAccountant, "get_delta", lambda self, epsilon: given)
    events = [dp_accounting.GaussianDpEvent(1.0 + given)]  # another each time: deltas are cached
    assert composed_delta(events, 1.0, 0.1) == found
