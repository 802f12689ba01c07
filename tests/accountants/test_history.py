"""What events have spent, composed or in lists: against enumeration and dp-accounting."""

import dataclasses
import itertools
import math

import attrs
import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

import jaxacct as ja
from jaxacct.accountants import analytic, composition
from jaxacct.accountants import event_pairs as pairs
from jaxacct.accountants.composition import composed_delta, event_from_json, event_profile, event_to_json
from jaxacct.accountants.history import epsilon_of_first_steps
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta
from jaxacct.statistics.loss_curves import ChordCurve
from tests.oracles.enumeration import pattern_distribution
from tests.oracles.settings import slow
from tests.refusals import refused

X = np.linspace(-4.0, 4.0, 161)


def event_of_head(name: str, **fields):
    """An event that only the head of dp-accounting has."""
    return attrs.make_class(name, list(fields), bases=(dp_event.DpEvent,))(**fields)


def hockey_stick(p, q, x=X):
    return np.maximum(p[:, None] - np.exp(x) * q[:, None], 0.0).sum(axis=0)


def upper(curve, x=X):
    """The bound with the error of its evaluation."""
    values = curve.at(x)
    return values.deltas + values.error * np.append(1.0, values.tails[:-1])


def assert_above(curves, p, q, factor, floor=1e-10, x=X):
    """Both directions of a pair are below the curves, and hardly below."""
    for curve, exact in zip(curves, (hockey_stick(p, q, x), hockey_stick(q, p, x)), strict=True):
        assert np.all(upper(curve, x) >= exact * (1 - 1e-13))
        assert np.all(upper(curve, x) <= exact * factor + floor)


def answers(noise, buckets, truth):
    p = np.full(buckets, noise / buckets)
    p[truth] += 1 - noise
    return p


def mixed(q, p, absent):
    return q * p + (1 - q) * absent


@pytest.mark.parametrize(("noise", "buckets"), [(0.5, 2), (0.01, 7), (0.999, 3)])
def test_randomized_response_is_its_two_answers(noise, buckets):
    ((curves, count),) = composition.steps_of(dp_event.RandomizedResponseDpEvent(noise, buckets))
    p, q = answers(noise, buckets, 0), answers(noise, buckets, 1)
    assert_above(curves, p, q, 1 + 1e-9)
    assert np.all(upper(curves[0]) >= hockey_stick(p, np.full(buckets, 1 / buckets))) and count == 1


@pytest.mark.parametrize("rate", [0.5, 0.03, 1e-4])
def test_sampled_chords_are_the_mixture(rate):
    """The attack: with the directions exchanged the add direction would have the losses of removal."""
    p, q = answers(0.3, 4, 0), answers(0.3, 4, 1)
    ((curves, _),) = composition.steps_of(
        dp.PoissonSampledDpEvent(rate, dp_event.RandomizedResponseDpEvent(0.3, 4))
    )
    x, joined = rate * X, mixed(rate, p, q)
    assert_above(curves, joined, q, 1 + 1e-6, floor=1e-11, x=x)
    assert np.any(upper(curves[1], x) < hockey_stick(joined, q, x) - rate / 100)


def test_a_discrete_gaussian_is_its_sum():
    for shift in [1, 2, 5]:
        for sigma in [0.3, 1.0, 12.0]:
            y = np.arange(-600, 601)
            q, p = (np.exp(-0.5 * ((y - at) / sigma) ** 2) for at in (0, shift))
            p, q = p / p.sum(), q / q.sum()
            event = event_of_head(
                "DiscreteGaussianDpEvent", sigma=sigma, sensitivity=shift + 0.5, dimension=1
            )
            ((curves, _),) = composition.steps_of(event)
            assert_above(curves, p, q, 1 + 1e-9)
            several = event_of_head("DiscreteGaussianDpEvent", sigma=sigma, sensitivity=shift, dimension=None)
            ((above, count),) = composition.steps_of(several)
            assert np.all(upper(above[0]) >= hockey_stick(p, q) * (1 - 1e-12)) and count == 1


@pytest.mark.parametrize(("shift", "epsilon"), [(16, 480), (16, 495), (14, 450), (12, 400)])
def test_a_discrete_gaussian_far_out(shift, epsilon):
    """The attack: masses of Q underflow where those of P times e^epsilon do not; sums of 400 digits."""
    with mpmath.workdps(400):
        masses = [mpmath.exp(-(mpmath.mpf(y) ** 2) / 2) for y in range(-60, 61)]
        of = dict(zip(range(-60, 61), (mass / mpmath.fsum(masses) for mass in masses), strict=True))
        rise = mpmath.exp(epsilon)
        truth = mpmath.fsum(
            max(of[y - shift] - rise * of.get(y, 0), 0) for y in range(shift - 60, shift + 61)
        )
    event = event_of_head("DiscreteGaussianDpEvent", sigma=1.0, sensitivity=shift, dimension=1)
    assert ja.delta([event], epsilon=epsilon) >= truth > 0


def test_the_sample_of_a_composition_is_that_of_both_together():
    """Two answers on one sample are not two answers on samples of their own."""
    p, q = answers(0.4, 3, 0), answers(0.4, 3, 1)
    both = [np.outer(one, one).ravel() for one in (p, q)]
    response = dp_event.RandomizedResponseDpEvent(0.4, 3)
    ((curves, _),) = composition.steps_of(dp.PoissonSampledDpEvent(0.1, dp.SelfComposedDpEvent(response, 2)))
    assert_above(curves, mixed(0.1, both[0], both[1]), both[1], 1.02, floor=1e-4)
    apart = np.outer(mixed(0.1, p, q), mixed(0.1, p, q)).ravel()
    assert np.any(upper(curves[0]) > hockey_stick(apart, both[1]) * 1.5)


def test_epsilon_and_delta_is_the_worst_pair():
    p = np.array([0.01, 0.99 * math.e / (1 + math.e), 0.99 / (1 + math.e), 0.0])
    ((curves, _),) = composition.steps_of(event_of_head("EpsilonDeltaDpEvent", epsilon=1.0, delta=0.01))
    assert_above(curves, p, p[::-1], 1 + 1e-9)


def test_losses_within_a_range_are_below_the_exponential_mechanism():
    ((curves, _),) = composition.steps_of(event_of_head("ExponentialMechanismDpEvent", epsilon=1.5))
    span, best = math.exp(1.5), np.zeros(X.size)
    for top in np.linspace(1e-3, 1.5, 300):
        first = (span - math.exp(top)) / (span - 1)
        p = np.array([first, 1 - first])
        q = p * np.exp(-np.array([top, top - 1.5]))
        assert q.sum() == pytest.approx(1, abs=1e-12)
        best = np.maximum(best, hockey_stick(p, q))
        for curve in curves:
            assert np.all(upper(curve) >= np.maximum(hockey_stick(p, q), hockey_stick(q, p)) - 1e-15)
    assert np.all(upper(curves[0]) <= best * 1.01 + 1e-5)
    pure = pairs.pure(1.5)[0]
    assert upper(curves[0], np.zeros(1)) < 0.6 * upper(pure, np.zeros(1))  # what dp-accounting has


@pytest.mark.parametrize("sigma", [0.7, 3.0, 50.0])
def test_concentrated_privacy_is_above_the_gaussian(sigma):
    ((curves, _),) = composition.steps_of(dp_event.ZCDpEvent(0.5 / sigma**2))
    ((exact, _),) = composition.steps_of(dp.GaussianDpEvent(sigma))
    x = np.linspace(-1, 5 / sigma, 50)
    # The Gaussian's curve is raised by its own rounding.
    assert np.all(upper(curves[0], x) >= exact[0].at(x).deltas * (1 - 1e-11))
    # Several are one with the sum of the numbers.
    ((many, count),) = composition.steps_of(dp.SelfComposedDpEvent(dp_event.ZCDpEvent(0.5, 0.1), 4))
    assert count == 1 and np.array_equal(many[0].heights, pairs.zero_concentrated(2.0, 0.4)[0].heights)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_the_best_of_several_runs_is_covered(shape):
    """Enumerated over the number of runs; without the factor the best of many would have one run's losses."""
    noise, mean = 0.5, 4.0
    p, q = answers(noise, 3, 2), answers(noise, 3, 0)
    if shape == math.inf:
        chances = [math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(120)]
    else:  # geometric and logarithmic with a parameter of 0.8
        chances = [0.0] + [
            0.2 * 0.8 ** (k - 1) if shape else -(0.8**k) / k / math.log(0.2) for k in range(1, 400)
        ]

    def best(one):
        below = np.append(0.0, np.cumsum(one))
        found = sum(chance * np.diff(below**k) for k, chance in enumerate(chances) if k)
        return np.append(found, chances[0])

    event = dp_event.RepeatAndSelectDpEvent(dp_event.RandomizedResponseDpEvent(noise, 3), mean, shape)
    ((curves, _),) = composition.steps_of(event)
    for direction in itertools.permutations([best(p), best(q)]):
        assert np.all(upper(curves[0]) >= hockey_stick(*direction) - 1e-12)
    ((single, _),) = composition.steps_of(event.event)
    assert np.any(upper(single[0]) < hockey_stick(best(p), best(q)) - 1e-3)


def test_a_tree_is_a_gaussian_of_its_levels():
    (found,) = composition.steps_of(dp_event.SingleEpochTreeAggregationDpEvent(3.0, [5, 9, 8]))
    (expected,) = composition.steps_of(dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 4))
    assert found == expected


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (dp.UnsupportedDpEvent(), "it describes no mechanism"),
        (dp_event.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)), "of a fixed size"),
        (dp_event.RepeatAndSelectDpEvent(dp.GaussianDpEvent(1.0), 2.0, 1.0), "pure"),
        (dp_event.ZCDpEvent(-1.0), "rho must be"),
        ((1.0, 1.2, 10), "probability must be"),
        ((1.0, 0.1), "or .noise multiplier, sampling"),
        (event_of_head("EpsilonDeltaDpEvent", epsilon=1.0, delta=1.5), "delta must be in"),
    ],
)
def test_an_event_that_is_not_covered_is_named(event, reason):
    refused(rf"^events\[1\] must be .*{reason}", ja.delta, [(1.0, 0.1, 10), event], epsilon=1.0)


def marginal(scheme, steps: int) -> dict:
    """Distribution of the participations of the first steps, by enumeration."""
    found: dict = {}
    for pattern, probability in pattern_distribution(scheme).items():
        found[pattern[:steps]] = found.get(pattern[:steps], 0.0) + probability
    return {pattern: probability for pattern, probability in found.items() if probability}


@pytest.mark.parametrize(
    ("scheme", "is_same"),
    [
        (ja.Poisson(5, 0.3), True),
        (ja.CyclicPoisson(5, 2, 0.4), True),
        (ja.BallsInBins(5, 3), True),
        (ja.BMinSep(5, 2, 0.3), True),
        (ja.BMinSep(5, 2, 0.3, False), True),
        (ja.BalancedMinSep(5, 1, 2), False),
        (ja.EpochwiseAllocation(5, 2), True),
    ],
)
def test_first_steps_have_the_distribution_of_a_shorter_run(scheme, is_same):
    """The attack: k of n steps may be the first ones, of which the scheme with fewer steps has no more."""
    for steps in (2, 3, 4):
        shorter = dataclasses.replace(scheme, iterations=steps)
        same = marginal(scheme, steps) == pytest.approx(marginal(shorter, steps), abs=1e-12)
        assert same or not (is_same or scheme.has_prefixes)
    assert not scheme.has_prefixes or is_same


def test_first_steps_of_a_run_have_spent_less():
    mechanism = ja.Mechanism(ja.Poisson(40, 0.1), ja.BandedToeplitz.identity(), 1.0)
    half, accountant = epsilon_of_first_steps(mechanism, 20, delta=1e-3, largest=8.0)
    expected = ja.epsilon([(1.0, 0.1, 20)], delta=1e-3)
    assert accountant == "pld" and expected <= half * (1 + 1e-6) and half <= expected * 1.001
    # No more than the run's epsilon, and without a shorter mechanism that one.
    assert epsilon_of_first_steps(mechanism, 40, delta=1e-3, largest=0.5) == (0.5, None)
    assert epsilon_of_first_steps(mechanism, 20, delta=0.0, largest=8.0) == (8.0, None)
    balanced = ja.Mechanism(ja.BalancedMinSep(4, 1, 2), ja.BandedToeplitz.identity(), 1.0)
    assert epsilon_of_first_steps(balanced, 1, delta=1e-3, largest=8.0) == (8.0, None)
    with pytest.raises(ValueError, match="steps must be at most the run's 40, got 41"):
        epsilon_of_first_steps(mechanism, 41, delta=1e-3, largest=8.0)


@pytest.mark.parametrize("strategy", [ja.FiniteToeplitz((4, 3), 6), ja.BandedToeplitz((4, 3))])
def test_first_rows_of_a_matrix_are_those_of_the_shorter_one(strategy):
    shorter = strategy.of_first_steps()
    assert np.array_equal(strategy.columns(6, np.arange(3))[:3], shorter.columns(3, np.arange(3)))
    assert ja.Dense(np.eye(3)).of_first_steps() is None


def test_a_group_is_a_user_with_as_many_examples():
    """By the accountant of plans, and far above the loss of one record and below that of k composed ones."""
    events = [(1.5, 0.02, 100)]
    for k in (1, 3):
        user = ja.Mechanism(ja.IndependentAttribution(100, 1, 0.02, k), ja.BandedToeplitz.identity(), 1.5)
        found = ja.delta(events, epsilon=2.0, group=k)
        assert found == pytest.approx(analytic.delta_by("pld", user, 2.0), rel=1e-9)
    both = [dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 4), (1.5, 0.02, 100)]
    assert ja.delta(both, epsilon=2.0, group=3) > max(found, ja.delta(both, epsilon=2.0))
    gaussian = ja.delta([dp.GaussianDpEvent(3.0)], epsilon=1.0, group=3)
    assert gaussian == ja.delta([dp.GaussianDpEvent(1.0)], epsilon=1.0)


@pytest.mark.parametrize("group", [0, 1001, 2.5])
def test_a_group_that_is_not_covered_is_refused(group):
    refused("group must be", ja.epsilon, [(1.0, 0.1, 3)], delta=1e-5, group=group)
    for event in (dp.LaplaceDpEvent(1.0), dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(1.0))):
        refused(r"group must be 1 for events\[0\], a .*, got 2", ja.epsilon, [event], delta=1e-5, group=2)


def test_the_discrete_laplace_is_sampled():
    y = np.arange(-200, 201)
    q, p = (np.exp(-0.4 * abs(y - at)) for at in (0, 3))
    p, q = p / p.sum(), q / q.sum()
    ((curves, _),) = composition.steps_of(
        dp.PoissonSampledDpEvent(0.2, dp_event.DiscreteLaplaceDpEvent(0.4, 3))
    )
    assert_above(curves, mixed(0.2, p, q), q, 1 + 1e-9)


def test_a_list_is_below_dp_accounting_and_hardly_above():
    events = [(1.0, 0.02, 60), dp.LaplaceDpEvent(9.0), (1.0, 0.02, 40), (2.0, 1.0, 1)]
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for q, sigma, count in ((0.02, 1.0, 100), (1.0, 2.0, 1)):
        accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count)
    accountant.compose(dp.LaplaceDpEvent(9.0))
    assert ja.delta(events, epsilon=1.0) == pytest.approx(accountant.get_delta(1.0), rel=5e-3)
    assert ja.delta(events[:2], epsilon=1.0) < 0.9 * ja.delta(events, epsilon=1.0)


def test_epsilon_is_where_delta_is_reached():
    events = [(2.0, 1.0, 1), dp.LaplaceDpEvent(9.0)]
    found = ja.epsilon(events, delta=1e-5)
    assert ja.delta(events, epsilon=found) <= 1e-5 < ja.delta(events, epsilon=found * (1 - 2e-6))
    assert ja.epsilon([], delta=1e-5) == 0.0
    assert ja.epsilon([dp.NonPrivateDpEvent()], delta=0.5) == math.inf
    assert ja.delta([dp.PoissonSampledDpEvent(0.1, dp.NonPrivateDpEvent())], epsilon=3.0) == 1.0


def test_extreme_numbers_are_curves():
    """Every curve falls from 1, and no number has a NaN."""
    found = [
        pairs.pure(0.0), pairs.pure(0.0, 0.3), pairs.pure(600.0), pairs.bounded_range(1e-14),
        pairs.bounded_range(400.0), pairs.zero_concentrated(1e-40), pairs.zero_concentrated(1e4, 3.0),
        pairs.zero_concentrated(0.0, 1.0), pairs.discrete_gaussian(0.01, 1), pairs.discrete_gaussian(3e3, 1),
        pairs.discrete_gaussian(1e9, 1), pairs.randomized_response(1e-300, 3),
        pairs.randomized_response(1 - 1e-16, 2),
    ]  # fmt: skip
    for remove, add in found:
        for curve in (remove, add, remove.sampled(1e-9, True), add.sampled(1 - 1e-12, False)):
            values = curve.at(X)
            assert isinstance(curve, ChordCurve) and np.isfinite(values.deltas).all()
            assert np.all(np.diff(values.deltas) <= 1e-15) and np.all(values.deltas >= -np.expm1(X) - 1e-11)


def test_first_steps_of_a_fixed_order_have_fewer_participations():
    mechanism = ja.Mechanism(ja.FixedOrder(40, 10, 4), ja.BandedToeplitz.square_root(4), 2.0)
    for steps, participations in ((7, 1), (14, 2)):
        found, name = epsilon_of_first_steps(mechanism, steps, delta=1e-5, largest=50.0)
        expected = ja.epsilon([(2.0 / math.sqrt(participations), 1.0, 1)], delta=1e-5)
        assert name == "unamplified" and found == pytest.approx(expected, rel=2e-4)
        assert found >= expected * (1 - 1e-6)


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
