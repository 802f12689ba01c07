"""GDP curves and inversions against printed and computed values; Renyi conversion; the odometer."""

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from jaxacct import individual
from tests.individual.test_filters import adaptive_divergence
from tests.refusals import refused


def test_private_gd_of_the_paper():
    """420 Renyi steps at sigma 100 are 495 GDP steps at the same epsilon (arXiv 2209.15596, section 4)."""
    mu = individual.compose_gdp(np.full(420, 0.01))
    assert individual.gdp_epsilon(1e-5, mu) == pytest.approx(0.7451382, abs=1e-6)
    found = optimize.minimize_scalar(
        lambda order: individual.rdp_to_epsilon([order * mu**2 / 2], [order], 1e-5)[0], (10, 20, 40)
    )
    assert found.x == pytest.approx(21.077, abs=1e-2) and found.fun == pytest.approx(0.8156234, abs=1e-6)
    steps = np.arange(400, 600)
    assert steps[individual.gdp_epsilon(1e-5, np.sqrt(steps) / 100) <= found.fun].max() == 495
    sigma = 10.614652581338738
    epsilons = individual.gdp_epsilon(1e-5, np.sqrt([50, 51, 100]) / sigma)
    np.testing.assert_allclose(epsilons, [2.7510206, 2.7819941, 4.0856579], rtol=1e-7)
    # At epsilon 0.8 exactly: 478 Gaussian steps, 405 Renyi ones; the tabular setting by Renyi.
    steps, orders = np.arange(300, 600), np.linspace(1.5, 60, 4000)
    assert steps[individual.gdp_epsilon(1e-5, np.sqrt(steps) / 100) <= 0.8].max() == 478
    renyi = [individual.rdp_to_epsilon(orders * k / 2e4, orders, 1e-5)[0] for k in (405, 406)]
    assert renyi[0] <= 0.8 < renyi[1]
    found = individual.rdp_to_epsilon(orders * 50 / sigma**2 / 2, orders, 1e-5)[0]
    assert found == pytest.approx(2.98221, abs=1e-5)


def test_subsampled_renyi_against_quadrature():
    q, sigma = 0.2, 1.3
    for order in (2, 5, 16):

        def density(t, order=order):
            ratio = 1 - q + q * np.exp((2 * t - 1) / (2 * sigma**2))
            return stats.norm.pdf(t, 0, sigma) * ratio**order

        moment = integrate.quad(density, -30, 60, epsrel=1e-12, limit=400)[0]
        ours = individual.subsampled_gaussian_rdp(q, sigma, [order])
        np.testing.assert_allclose(ours, [np.log(moment) / (order - 1)], rtol=1e-8)
    np.testing.assert_allclose(
        individual.subsampled_gaussian_rdp(1.0, 2.0, [2, 8]), [2 / 8, 8 / 8], rtol=1e-12
    )
    assert np.all(individual.subsampled_gaussian_rdp(0.1, np.inf) == 0)
    worst = individual.rdp_to_epsilon(
        10_000 * individual.subsampled_gaussian_rdp(0.005, 2.0, range(2, 64)), range(2, 64), 1e-5
    )[0]
    assert worst == pytest.approx(1.098876, rel=1e-3)


def test_an_odometer_against_an_adaptive_adversary():
    """Who asks for more after a lucky output: the exact composition stays below what the odometer says.

    Pieces 0.6 and 0.8; a first step of 0.6, then 0.8 or nothing. One that forgot its first piece would be
    beaten by the same sequence.
    """
    for epsilon in (0.5, 1.0, 2.0):
        exact = adaptive_divergence(epsilon, 0.6, lambda t: 0.8 if t > 0 else 0.0)
        odometer = individual.PrivacyOdometer([0.6, 0.8])
        odometer.charge(0.6)
        odometer.charge(0.8)
        assert exact <= individual.gdp_delta(epsilon, odometer.spent_mu())
        assert exact > individual.gdp_delta(epsilon, 0.8)
    refused("fit in one of the pieces", odometer.charge, 0.01)


def test_odometer():
    odometer = individual.PrivacyOdometer([0.25] * 16)
    assert odometer.spent_mu() == 0
    for _ in range(16):
        odometer.charge(0.25)
    assert odometer.spent_mu() == pytest.approx(1)
    assert odometer.epsilon(1e-5) == pytest.approx(4.377178, rel=1e-6)
    refused("fit in one of the pieces", odometer.charge, 0.1)
    odometer = individual.PrivacyOdometer([0.3, 0.4, 1.2])
    odometer.charge(0.2)
    # Between the ends of pieces the whole piece counts.
    assert odometer.spent_mu() == pytest.approx(0.3)
    odometer.charge(0.35)
    odometer.charge(1.1)
    assert odometer.spent_mu() == pytest.approx(1.3)
    refused("mu", lambda: odometer.charge(float("nan")))


def test_small_costs_are_not_rounded_to_0():
    """Sums of 60 digits: a filter adds up many costs, so each is at least the exact one."""
    for q, sigma in [(2.0**-32, 1e3), (1e-4, 100.0), (0.1, 1e9), (0.999, 50.0), (0.3, 0.7)]:
        for order in [2, 64]:
            with mpmath.workdps(60):
                p, variance = mpmath.mpf(q), mpmath.mpf(sigma) ** 2
                terms = [
                    mpmath.binomial(order, k)
                    * (1 - p) ** (order - k)
                    * p**k
                    * mpmath.exp(k * (k - 1) / (2 * variance))
                    for k in range(order + 1)
                ]
                exact = mpmath.log(mpmath.fsum(terms)) / (order - 1)
            assert exact <= individual.subsampled_gaussian_rdp(q, sigma, [order])[0] <= exact * (1 + 1e-9)


def test_invalid_orders_are_refused():
    for orders in [[np.inf], [2, np.nan], [2.0**21], [1], []]:
        refused("orders must be", individual.subsampled_gaussian_rdp, 0.1, 1.0, orders)
    refused("orders must be finite", individual.rdp_to_epsilon, [1.0], [np.inf], 1e-5)
    refused("orders must be at most", individual.IndividualRDPFilter, np.inf, 1.0)
