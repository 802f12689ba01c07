"""Composition with a dp-accounting event."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from jaxacct.accountants import composition
from jaxacct.accountants.composition import composed_delta, event_from_json, event_profile, event_to_json
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta
from tests.oracles.settings import slow
from tests.refusals import refused


def test_profile_of_a_gaussian_is_an_upper_bound_and_tight():
    profile = event_profile(dp.GaussianDpEvent(2.0))
    t = np.linspace(-3, 3, 501)
    exact = np.exp(gdp_log_delta(t, 0.5))
    assert np.all(profile(t) >= exact * (1 - 1e-12))  # `gdp_delta` itself is rounded up
    np.testing.assert_allclose(profile(t), exact, atol=2e-4)
    assert profile(np.array([-1000.0]))[0] == 1.0


def reference(event, t, interval=2e-4):
    """dp-accounting on a fine grid: above the truth but for its rounding, which is far below these deltas."""
    accountant = PLDAccountant(value_discretization_interval=interval).compose(event)
    return np.array([min(1.0, accountant.get_delta(float(at))) for at in t])


@pytest.mark.parametrize(
    "event",
    [
        dp.GaussianDpEvent(500.0),
        dp.SelfComposedDpEvent(dp.LaplaceDpEvent(3.0), 20),
        dp.SelfComposedDpEvent(dp_event.DiscreteLaplaceDpEvent(0.3, 2), 3),
        dp.PoissonSampledDpEvent(0.2, dp.LaplaceDpEvent(1.0)),
        slow(
            dp.SelfComposedDpEvent(
                dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.5, 2.0], [0.5, 0.3, 0.2]), 3
            )
        ),
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), 20),
        dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), dp.NoOpDpEvent(), dp.LaplaceDpEvent(2.0)]),
    ],
)
def test_the_table_agrees_with_dp_accounting_where_that_resolves_it(event):
    t = composition._GRID[::40]
    table, theirs = event_profile(event)(t), reference(event, t)
    visible = theirs > 1e-9
    np.testing.assert_allclose(table[visible], theirs[visible], rtol=3e-3)
    assert np.all(table[~visible] <= 2e-9)


def test_steps_by_dp_accounting_are_bounded_in_both_directions_at_once():
    t = np.linspace(0, 3, 7)
    composed = dp.SelfComposedDpEvent(dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 15, 1.0), 3)
    table, theirs = event_profile(composed)(t), reference(composed, t, 2e-3)
    assert np.all(table >= theirs * (1 - 1e-3)) and np.all(table <= theirs * 1.3 + 1e-9)


@pytest.mark.parametrize(
    "one", [dp.LaplaceDpEvent(9.0), dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0))]
)
def test_compositions_in_compositions_multiply_their_counts(one):
    nested = dp.SelfComposedDpEvent(dp.ComposedDpEvent([dp.SelfComposedDpEvent(one, 2)]), 3)
    at = np.linspace(-1, 2, 7)
    assert np.array_equal(event_profile(nested)(at), event_profile(dp.SelfComposedDpEvent(one, 6))(at))
    assert event_profile(nested)(0.0) > 1.2 * event_profile(dp.SelfComposedDpEvent(one, 3))(0.0)


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


def test_what_is_no_event_is_refused():
    for data in [{"kind": "os"}, {"kind": "GaussianDpEvent", "nope": 1}, {"kind": 3}]:
        refused("compose_with", event_from_json, data)
    refused("compose_with must be an event", lambda: event_profile(dp.UnsupportedDpEvent()))
    refused("compose_with must be an event", event_profile, 3.0)
    revealed = dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), dp.GaussianDpEvent(0.0)])
    assert composed_delta((), 1.0, revealed) == 1.0


def test_an_event_with_impossible_numbers_is_refused_in_one_line():
    for event in (
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(5.0), 2.5),
        dp.GaussianDpEvent(-1.0),
        dp.GaussianDpEvent(True),
        dp.PoissonSampledDpEvent(math.nan, dp.GaussianDpEvent(1.0)),
        dp_event.MixtureOfGaussiansDpEvent(1e-5, [0.0, 1.0], [0.5, 0.5]),
        dp_event.MixtureOfGaussiansDpEvent(1e9, [0.0, 1.0], [0.5, 0.5]),
        # The largest of these is 0, or is found to be.
        dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, -5.0], [0.5, 0.5]),
        dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, math.nan], [0.5, 0.5]),
        dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 20, 1e-3),
        dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 2.5, 1.0),
    ):
        for use in (event_profile, lambda event: composed_delta((), 1.0, event)):
            refused("compose_with must be", use, event)


def test_discrete_laplace_noise_of_a_large_sensitivity():
    """As Laplace noise of the same scale in the limit, without an array of the sensitivity's size."""
    t = np.array([0.1, 0.5, 0.9])
    fine = event_profile(dp_event.DiscreteLaplaceDpEvent(1e-12, 10**12))(t)
    np.testing.assert_allclose(fine, -np.expm1((t - 1) / 2), rtol=1e-3)
    with pytest.raises(ValueError, match=r"sensitivity must be at most \d+, got 9007199254740993$"):
        event_profile(dp_event.DiscreteLaplaceDpEvent(1e-12, 2**53 + 1))
