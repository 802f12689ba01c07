"""The one type: double conjugate, mixtures, subsampling, groups and composition."""

import math
from statistics import NormalDist

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld

from jaxacct.accountants import tradeoff
from jaxacct.accountants.tradeoff import Best, EpsilonDelta, Gaussian, GaussianMixture, Subsampled, compose
from jaxacct.accountants.tradeoff.curves.curves import Group
from tests.oracles.composed_losses import sampled
from tests.oracles.settings import slow

ALPHAS = np.array([0.0, 1e-6, 0.01, 0.05, 0.3, 0.5, 0.8, 0.95, 1.0])


@pytest.mark.parametrize(
    "curve",
    [
        Gaussian(1.0),
        Subsampled(Gaussian(2.5), 0.25),
        EpsilonDelta(1.0, 0.1),
        GaussianMixture(np.array([0.0, 1.0]), np.array([0.5, 0.5])),
        GaussianMixture(np.array([1.0, 2.0]), np.array([0.5, 0.5])),
    ],
)
def test_duality_and_symmetry(curve):
    """The closed form of f is the conjugate of its profile; both directions have one profile."""
    np.testing.assert_allclose(tradeoff.TradeOff.__call__(curve, ALPHAS), curve(ALPHAS), atol=1e-9)
    inner = np.array([0.02, 0.2, 0.45])
    np.testing.assert_allclose(curve(curve(inner)), inner, atol=1e-9)
    level = np.linspace(0, 1, 4001) ** 2  # the points of a slope below -1 are near 0
    gains = 1 - curve(level)
    for epsilon in (0.0, 0.3, 2.0):
        assert np.max(gains - math.exp(epsilon) * level) == pytest.approx(curve.delta(epsilon), abs=2e-5)
        swapped = math.exp(float(curve.log_delta(-epsilon)))
        assert swapped == pytest.approx(1 - math.exp(-epsilon) * (1 - curve.delta(epsilon)), rel=1e-9)


def test_symmetrisation_by_double_conjugate_is_the_subsampling_operator():
    """C_p(G_mu) = (min{f_p, f_p^-1})**: the larger of both sides' own integrals."""
    closed = Subsampled(Gaussian(1.5), 0.3)
    for epsilon in (0.0, 0.2, 0.7):
        one, other = (float(sampled(epsilon, 0.3, 1 / 1.5, remove)) for remove in (True, False))
        assert max(one, other) == pytest.approx(closed.delta(epsilon), abs=1e-10)
    assert other < one  # not symmetric, so the test is not empty


def test_mixture_is_the_average_of_profiles_not_of_tradeoffs():
    parts = (Gaussian(1.0), Gaussian(2.0))
    distribution = GaussianMixture(np.array([1.0, 2.0]), np.array([0.5, 0.5]))
    assert distribution.delta(1.0) == pytest.approx(0.3183991988, rel=1e-9)
    assert distribution.delta(1.0) == pytest.approx(np.mean([part.delta(1.0) for part in parts]), rel=1e-12)
    for alpha, expected, average in (
        (0.05, 0.5502549912, 0.5508644729),
        (0.1, 0.4221788696, 0.4235483621),
        (0.5, 0.0668072013, 0.0907026929),
    ):
        assert distribution(alpha) == pytest.approx(expected, rel=1e-9)
        assert tradeoff.TradeOff.__call__(distribution, alpha) == pytest.approx(expected, rel=1e-9)
        mean = sum(0.5 * part(alpha) for part in parts)
        assert mean == pytest.approx(average, rel=1e-9) and mean > distribution(alpha)


def test_groups():
    found = tradeoff.group_tradeoff(Gaussian(0.5), 3)(0.05)
    assert found == pytest.approx(0.5575867798, rel=1e-9) == Gaussian(1.5)(0.05)
    pure = EpsilonDelta(0.4, 1e-3).group(3)
    assert pure.delta(1.2) == pytest.approx(1e-3 * math.expm1(1.2) / math.expm1(0.4), rel=1e-9)
    chain = Subsampled(Gaussian(1.0), 0.2).group(2)
    # The profile of the group is never below the conjugate of the exact composition of functions.
    level = np.linspace(0, 1, 2001) ** 2
    for epsilon in (0.0, 0.5, 1.0):
        assert np.max(1 - chain(level) - math.exp(epsilon) * level) <= chain.delta(epsilon) + 1e-12


def test_printed_group_rule_for_approximate_dp_fails():
    """arXiv 2212.05796 prints (g eps, g e^(g-1) delta): false at epsilon 3 for two chained worst cases."""
    epsilon, delta, g = 3.0, 1e-4, 2
    # P_0 -> P_1 -> P_2 on {a, b, c}: P_i grows by e^eps and delta at each step.
    first = 1e-6
    second = math.exp(epsilon) * first + delta
    third = math.exp(epsilon) * second + delta
    exceeds = third - math.exp(g * epsilon) * first  # H_{e^(g eps)}(P_2, P_0) on the event "a"
    assert exceeds > g * math.exp(g - 1) * delta
    assert exceeds == pytest.approx(delta * math.expm1(g * epsilon) / math.expm1(epsilon))
    # Each step is (eps, delta)-DP in both directions: the other outcomes give what the first takes.
    for below, above in ((first, second), (second, third)):
        assert above - math.exp(epsilon) * below <= delta * (1 + 1e-12)
        assert (1 - below) - math.exp(epsilon) * (1 - above) <= delta


def test_numerical_composition_of_pure_mechanisms_is_exact_by_binomials():
    """10 randomised responses: the losses are 0.1 times a binomial count, in closed form."""
    count, eps = 10, 0.1
    up = 1 / (1 + math.exp(-eps))
    found = compose([(EpsilonDelta(eps), count)]).delta(0.5)
    chances = [math.comb(count, k) * up**k * (1 - up) ** (count - k) for k in range(count + 1)]
    exact = sum(p * max(0.0, 1 - math.exp(0.5 - eps * (2 * k - count))) for k, p in enumerate(chances))
    assert exact <= found < exact + 1e-6
    # At the largest finite loss only the infinite ones are left, each of them known exactly.
    assert EpsilonDelta(eps, 1e-6).power(count).delta(1.0) == pytest.approx(1e-5, rel=1e-5)


def test_one_step_composed_is_just_above_the_closed_form():
    part = Subsampled(Gaussian(2 / 3), 0.025)
    exact = part.epsilon(1e-5)
    assert exact == pytest.approx(0.165164, abs=1e-6)
    assert exact * (1 - 1e-12) <= tradeoff.Composed(((part, 1),)).epsilon(1e-5) <= exact * (1 + 1e-4)


def test_best_of_several():
    best = Best((Gaussian(1.0), EpsilonDelta(2.0, 1e-3)))
    assert best.delta(2.0) == pytest.approx(1e-3) and best.delta(0.0) == Gaussian(1.0).delta(0.0)
    assert best.epsilon(1e-3) == pytest.approx(2.0)


@pytest.mark.slow
def test_8000_compositions_are_near_the_printed_estimates():
    """The numbers of table 4 at delta 1e-5."""
    for steps, printed in ((2000, 4.43814), (4000, 6.65381), (8000, 10.11313)):
        found = compose([(Subsampled(Gaussian(2 / 3), 0.025), steps)]).epsilon(1e-5)
        assert printed - 2e-5 <= found < printed + 3e-3


@pytest.mark.parametrize(
    ("parts", "mu", "smallest"),
    [
        (((0.6, 1), (0.8, 1)), 1.0, 1e-8),
        (((0.1, 1000),), 10**0.5, 1e-15),
        slow(((0.005, 10**5),), 2.5**0.5, 1e-15),
    ],
)
def test_numerical_composition_around_the_closed_form(parts, mu, smallest):
    """Of Gaussians the squares of mu add up, down to deltas of 1e-15."""
    numerical, exact = tradeoff.Composed(tuple((Gaussian(one), count) for one, count in parts)), Gaussian(mu)
    for delta in (1e-2, 1e-3, 1e-5, 1e-8, 1e-9, 1e-12, 1e-13, 1e-14, 1e-15):
        if delta >= smallest:
            epsilon = float(exact.epsilon(delta))
            assert exact.delta(epsilon) <= numerical.delta(epsilon) <= exact.delta(epsilon) * 1.005
            assert epsilon * (1 - 1e-12) <= numerical.epsilon(delta) <= epsilon * 1.001


@pytest.mark.parametrize(("alpha", "mu"), [(0.5, 10.0), (0.3, 6.0), (0.9, 6.0), (1e-9, 3.0)])
def test_a_trade_off_value_collects_no_rounding(alpha, mu):
    """The largest of many lines, each rounded, would be above the exact value."""
    quantile = NormalDist().inv_cdf(alpha)
    assert (
        0
        <= tradeoff.subsampled_gdp_tradeoff(alpha, mu, 1.0)
        <= NormalDist().cdf(-quantile - mu) * (1 + 1e-12)
    )


def test_subsampled_gaussian_numbers():
    curve = Subsampled(Gaussian(2.5), 0.25)
    expected = [0.85026736, 0.76155876, 0.50282489, 0.02726983]
    np.testing.assert_allclose(curve([0.01, 0.05, 0.3, 0.8]), expected, atol=6e-9)
    # At .95 by the definition: alpha = f_p(f(alpha)), on the part where f is the inverse of f_p.
    value = curve(0.95)
    assert 0.25 * tradeoff.gdp_tradeoff(value, 2.5) + 0.75 * (1 - value) == pytest.approx(0.95, abs=1e-12)
    assert value == pytest.approx(4.0990e-4, rel=1e-5)
    np.testing.assert_allclose([curve.delta(0.0), curve.delta(1.0)], [0.19717511, 0.12876132], atol=6e-9)
    thin = Subsampled(Gaussian(2 / 3), 0.025)
    np.testing.assert_allclose([thin.delta(0.01), thin.delta(0.2)], [3.75391495e-3, 3.80747942e-6], rtol=1e-8)
    found = tradeoff.subsampled_gdp_tradeoff([0.1, 0.4, 0.5, 0.9], 1.0, 0.25)
    np.testing.assert_allclose(found, [0.8277140771, 0.5042687694, 0.4042687694, 0.0484574535], rtol=1e-8)


def test_subsampling_limits():
    certain = tradeoff.subsampled_gdp_tradeoff(ALPHAS, 1.3, 1.0)
    np.testing.assert_allclose(certain, tradeoff.gdp_tradeoff(ALPHAS, 1.3), atol=1e-12)
    for p, mu in ((0.0, 2.0), (0.3, 0.0)):
        np.testing.assert_allclose(tradeoff.subsampled_gdp_tradeoff(ALPHAS, mu, p), 1 - ALPHAS, atol=1e-12)
    assert Subsampled(Gaussian(1.0), 0.0).delta(0.0) == 0
    assert Subsampled(Gaussian(1.0), 1.0).delta(0.7) == pytest.approx(tradeoff.gdp_delta(0.7, 1.0), rel=1e-12)


def test_composition_of_gaussians_is_closed_and_identity_is_neutral():
    identity, thin = Gaussian(0.0), Subsampled(Gaussian(1.0), 0.2)
    assert compose([(Gaussian(0.6), 1), (Gaussian(0.8), 1)]) == Gaussian(1.0)
    assert compose([(Gaussian(0.5), 1), (identity, 1)]).mu == 0.5 and Gaussian(0.5).power(4).mu == 1.0
    assert compose([(thin, 1), (identity, 3)]) == thin
    assert compose([(compose([(thin, 2)]), 1), (thin, 1)]) == compose([(thin, 3)])


def test_a_composed_mixture_is_just_above_its_expansion():
    """(G_1 + G_2)/2 composed three times is a mixture over binomial counts."""
    part = GaussianMixture(np.array([1.0, 2.0]), np.array([0.5, 0.5]))
    mus = np.array([math.sqrt(k + 4 * (3 - k)) for k in range(4)])
    exact = GaussianMixture(mus, np.array([math.comb(3, k) / 8 for k in range(4)]))
    above = compose([(part, 3)]).delta([0.0, 1.0, 5.0]) - exact.delta([0.0, 1.0, 5.0])
    assert (above >= 0).all() and (above < 1e-3).all()


def test_against_dp_accounting_for_sampling_of_one_side():
    """With the sampled side alone (Poisson), dp-accounting's delta is at most ours: C_p dominates."""
    accountant = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 20))
    ours = compose([(Subsampled(Gaussian(1.0), 0.1), 20)])
    assert ours.delta(1.0) >= accountant.get_delta(1.0) * (1 - 1e-3)


def test_several_guarantees_and_groups_compose():
    """Ten times `Best` is below ten times each; a group of two Gaussians is a Gaussian of twice the mu."""
    both = (Gaussian(0.3), EpsilonDelta(0.5, 1e-4))
    best, *each = (float(curve.power(10).delta(2.0)) for curve in (Best(both), *both))
    assert 0.1 * min(each) < best <= min(each) * (1 + 1e-3)
    pair = compose([(Group(Subsampled(Gaussian(0.2), 1.0), 2), 5)])
    assert pair.delta(0.5) >= Gaussian(0.4 * 5**0.5).delta(0.5) * (1 - 1e-9)
