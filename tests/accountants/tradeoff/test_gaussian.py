"""Closed forms of Gaussian differential privacy against numbers, arbitrary precision and each other."""

import mpmath
import numpy as np
import pytest

from jaxacct.accountants import tradeoff
from tests.oracles.composed_losses import gaussian
from tests.refusals import refused


def near(found, expected, relative=1e-6):
    np.testing.assert_allclose(found, expected, rtol=relative, atol=0)


def exact(epsilon, mu):
    return gaussian(epsilon, mu, 60 if epsilon else 340)


def test_tails_against_arbitrary_precision():
    for epsilon, mu in [
        (0, 1),
        (0, 1e-8),
        (1, 0.05),
        (1, 0.03),
        (0.5, 1e-3),
        (35, 1),
        (10, 0.3),
        (5, 0.49),
        (2, 0.51),
        (700, 30),
        (5000, 100),
    ]:
        found, true = tradeoff.gdp_log_delta(epsilon, mu), exact(epsilon, mu)
        with mpmath.workdps(60):
            # The quotient eps / mu is rounded to the side of a larger delta, by 2^-52 of itself.
            up = 3e-11 + 2**-51 * (epsilon / mu) ** 2
            assert 0 < mpmath.exp(mpmath.mpf(found)) / true - 1 < up


def test_epsilon_inverts_delta_from_above():
    for mu in [1e-3, 0.3, 1.0, 20.0]:
        for delta in [1e-300, 1e-150, 1e-20, 1e-5, 0.3]:
            epsilon = tradeoff.gdp_epsilon(delta, mu)
            if epsilon == 0:
                assert tradeoff.gdp_delta(0.0, mu) <= delta
                continue
            assert exact(epsilon, mu) <= delta
            assert exact(epsilon * (1 - 1e-9), mu) > delta


def test_mu_inverts_delta_from_below():
    for epsilon in [0.0, 1e-3, 1.0, 50.0]:
        for delta in [1e-300, 1e-9, 0.5]:
            mu = tradeoff.gdp_mu(epsilon, delta)
            assert exact(epsilon, mu) <= delta
            assert exact(epsilon, mu * (1 + 1e-9)) > delta * (1 - 1e-6)


def test_edges():
    assert tradeoff.gdp_delta(0.0, 0.0) == 0 and tradeoff.gdp_delta(5.0, np.inf) == 1
    assert tradeoff.gdp_delta(np.inf, 1.0) == 0 and tradeoff.gdp_log_delta(-np.inf, 1.0) == 0
    near(tradeoff.gdp_log_delta(-1.0, 0.0), np.log(1 - np.exp(-1)))
    near(np.exp(tradeoff.gdp_log_delta(-3.0, [0.5, 3.0])), [float(exact(-3, mu)) for mu in (0.5, 3)], 1e-9)
    assert tradeoff.gdp_epsilon(1e-5, 0.0) == 0 and tradeoff.gdp_epsilon(1e-5, np.inf) == np.inf
    assert tradeoff.gdp_tradeoff(0.0, 3.0) == 1 and tradeoff.gdp_tradeoff(1.0, 3.0) == 0
    assert tradeoff.gdp_tradeoff(0.3, 0.0) == pytest.approx(0.7, rel=1e-15)
    assert tradeoff.gdp_tradeoff(0.3, np.inf) == 0
    assert tradeoff.compose_gdp([0.6, 0.8]) == pytest.approx(1.0) and tradeoff.group_gdp(0.5, 4) == 2
    assert tradeoff.gdp_to_zcdp(5 / 2**0.5) == pytest.approx(6.25)
    assert tradeoff.gdp_to_rdp(2.0, 3.0) == 6


def test_bad_input_is_one_line():
    for call, word in [
        (lambda: tradeoff.gdp_tradeoff(1.5, 1.0), "alpha"),
        (lambda: tradeoff.gdp_tradeoff(float("nan"), 1.0), "alpha"),
        (lambda: tradeoff.gdp_tradeoff(0.5, -1.0), "mu"),
        (lambda: tradeoff.gdp_delta(-1.0, 1.0), "epsilon"),
        (lambda: tradeoff.gdp_delta(float("nan"), 1.0), "epsilon"),
        (lambda: tradeoff.gdp_epsilon(0.0, 1.0), "delta"),
        (lambda: tradeoff.gdp_epsilon(1.0, 1.0), "delta"),
        (lambda: tradeoff.gdp_mu(float("inf"), 1e-5), "epsilon"),
        (lambda: tradeoff.gdp_to_rdp(1.0, 1.0), "order"),
        (lambda: tradeoff.group_gdp(1.0, 0), "g "),
        (lambda: tradeoff.gdp_tradeoff("x", 1.0), "alpha"),
        (lambda: tradeoff.gdp_tradeoff(True, 1.0), "alpha"),
        (lambda: tradeoff.Gaussian(-1.0), "mu"),
        (lambda: tradeoff.Subsampled(tradeoff.Gaussian(1.0), 1.1), "sampling_prob"),
        (lambda: tradeoff.EpsilonDelta(1.0, 2.0), "delta"),
        (lambda: tradeoff.dp_tradeoff(0.1, -1.0, 0.1), "epsilon"),
    ]:
        refused(word, call)


def test_printed_minimum_in_f_eps_delta_is_no_tradeoff():
    """arXiv 2212.05796, section 4: `min{0, ..}` is never above 0 (errata)."""
    alpha, epsilon, delta = 0.1, 1.0, 0.1
    printed = min(0.0, 1 - delta - np.exp(epsilon) * alpha, np.exp(-epsilon) * (1 - delta - alpha))
    assert printed <= 0 < tradeoff.dp_tradeoff(alpha, epsilon, delta)


def test_acceptance_numbers():
    near(tradeoff.gdp_tradeoff(0.05, 1.0), 0.7404889772)
    near(tradeoff.gdp_tradeoff(0.1, 0.5), 0.7827609196)
    near(tradeoff.gdp_tradeoff(0.05, 2.0), 0.3612399687)
    near(tradeoff.gdp_tradeoff(0.5, 1.0), 0.1586552539)
    near(tradeoff.gdp_tradeoff(tradeoff.gdp_tradeoff(0.3, 1.0), 1.0), 0.3, 1e-12)
    near(tradeoff.gdp_delta([0.0, 1.0, 2.0], 1.0), [0.3829249225, 0.1269367375, 0.0209236358])
    near(tradeoff.gdp_delta(3.0, 2.0), 0.1838130766)
    near(tradeoff.gdp_delta(1.0, 0.5), 0.0068295950)
    near(tradeoff.dp_tradeoff([0.1, 0.5], 1.0, 0.1), [0.6281718172, 0.1471517765])
    near(tradeoff.gdp_epsilon(1e-5, [0.5, 1.0, 2.0]), [1.99309140, 4.37717810, 9.99725615])
    near(tradeoff.gdp_mu(8.0, 1e-5), 1.66603060)
    near(tradeoff.gdp_mu(1.0, 1e-5), 0.26805112)
