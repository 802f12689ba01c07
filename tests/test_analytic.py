"""Analytic fallbacks against dp-accounting and against enumeration-free closed forms."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxacct import BallsInBins, BMinSep, CyclicPoisson, Poisson
from jaxacct.accountants import analytic


@pytest.mark.parametrize("sensitivity", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_gaussian_delta(epsilon, sensitivity):
    mu = sensitivity / 2.0
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert analytic.gaussian_delta(epsilon, 2.0, sensitivity) == pytest.approx(exact, rel=1e-9, abs=1e-15)


def test_published_gaussian_delta():
    """Three Gaussians of sigma sqrt(3) at epsilon 1: .126936 (PEERS.md, 3c)."""
    assert analytic.gaussian_delta(1.0, np.sqrt(3), np.sqrt(3)) == pytest.approx(0.126936, abs=1e-6)


def test_the_pattern_revealed_bounds_balls_in_bins():
    scheme = BallsInBins(12, 4)
    assert analytic.analytic_delta(scheme, 2.0, 1.0) == pytest.approx(
        analytic.gaussian_delta(1.0, 2.0, np.sqrt(3)), rel=1e-12
    )


def test_poisson_uses_pld():
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(event, 40)
    for scheme in (Poisson(40, 0.1), BMinSep(40, 1, 0.1), CyclicPoisson(79, 2, 0.1)):
        delta = analytic.analytic_delta(scheme, 1.0, 1.0)
        assert delta == pytest.approx(accountant.get_delta(1.0), rel=1e-9)
        assert delta == pytest.approx(0.0669567, rel=1e-3)  # PEERS.md, 3c


def test_unamplified_noise_multiplier_is_on_the_line():
    for scheme in (BMinSep(100, 10, 0.01), BallsInBins(7, 9)):
        for epsilon, delta in ((0.1, 1e-9), (8.0, 1e-5), (40.0, 0.3)):
            sigma = analytic.unamplified_noise_multiplier(scheme, epsilon, delta)
            k = np.sqrt(scheme.max_participations)
            assert analytic.gaussian_delta(epsilon, sigma, k) == pytest.approx(delta, rel=1e-6)
