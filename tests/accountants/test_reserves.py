"""Every reserve of the accountants, recomputed with 60 digits: bounds with the allowance that is derived.

An allowance of 1e-9 that is left out is not seen by a bound that is compared with the truth from one side.
"""

import math

import mpmath
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, MultiAttribution, Poisson
from jaxacct.accountants import RevealedPattern, revealed_pattern, unamplified
from jaxacct.accountants.allocation import lognormal_lattice, lognormal_sums
from jaxacct.accountants.allocation.lognormal_lattice import Lattice, Mixture, Phases, lattice_distribution
from jaxacct.accountants.dice import _ORDERS, _log_delta, dice_rdp_subsampled
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.core import truncation
from jaxacct.core.truncation import MAX_SECOND_MOMENT, reserve
from jaxacct.individual.rdp import subsampled_gaussian_rdp
from jaxacct.schemes import BMinSep
from jaxacct.statistics import tilted_sums
from jaxacct.strategies import Toeplitz, worst_pattern
from tests.accountants.test_random_allocation import quadrature
from tests.oracles import enumeration
from tests.oracles.composed_losses import gaussian

IDENTITY = BandedToeplitz.identity()
UNIT = 2.0**-52


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def phi(x):
    return mpmath.erfc(-mpmath.mpf(x) / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize(("epsilon", "mu"), [(0.5, 0.3), (3.0, 1.0), (40.0, 2.0), (300.0, 11.0), (90.0, 9.0)])
def test_the_gaussian_mechanism_has_its_rounding(epsilon, mu):
    exact, up = gaussian(epsilon, mu), mpmath.mpf(gdp_delta(epsilon, mu))
    assert exact < up < exact * (1 + 2.0**-35)


@pytest.mark.parametrize(("sigma", "delta"), [(1.0, 1e-5), (0.2, 1e-12), (30.0, 1e-3)])
def test_epsilon_with_the_pattern_revealed_is_raised_by_1e_9(sigma, delta):
    found = unamplified.epsilon_at(Mechanism(Poisson(9, 0.1), IDENTITY, sigma), delta)
    mu = 3 / mpmath.mpf(sigma)
    exact = mpmath.findroot(lambda e: mpmath.log(gaussian(e, mu)) - mpmath.log(delta), found)
    assert float(found / exact - 1) == pytest.approx(1e-9, rel=0.05, abs=0)


def test_revealed_patterns_are_raised_by_1e_9():
    scheme = MultiAttribution(7, 3, 0.2, 2)
    found = RevealedPattern().delta(Mechanism(scheme, IDENTITY, 0.8), 1.0)
    distribution = enumeration.pattern_distribution(scheme)
    exact = mpmath.fsum(
        w * gaussian(1.0, mpmath.sqrt(sum(int(c) ** 2 for c in x)) / mpmath.mpf(0.8))
        for x, w in distribution.items()
        if any(x)
    )
    assert float(found / exact - 1) == pytest.approx(1e-9 + 2.0**-36, rel=0.01, abs=0)


def test_revealed_patterns_of_long_runs_have_the_largest_counts(monkeypatch):
    """Each of j participations is of all k examples: a length of k sqrt(j), not sqrt(k j)."""
    monkeypatch.setattr(revealed_pattern, "_MAX_CELLS", 0)
    scheme = MultiAttribution(60, 2, 0.05, 4)
    found = RevealedPattern().delta(Mechanism(scheme, IDENTITY, 20.0), 0.3)
    tail = revealed_pattern.participation_tail(scheme.timing)
    deltas = [0, *(gaussian(0.3, 4 * mpmath.sqrt(j) / 20) for j in range(1, tail.size + 1))]
    exact = mpmath.fsum((b - a) * p for a, b, p in zip(deltas, deltas[1:], tail, strict=False))
    assert float(found / exact - 1) == pytest.approx(1e-9 + 2.0**-36, rel=0.01, abs=0)


@pytest.mark.parametrize(("terms", "unused", "epsilon"), [(3, 0, 0.5), (100, 7, 4.0), (1000, 0, 40.0)])
def test_thresholds_of_sums_are_rounded_to_the_side_of_the_bound(terms, unused, epsilon):
    mixture = Mixture((Phases(terms, 0.5),), unused)
    factor = mpmath.exp(mpmath.mpf(epsilon))
    allowed = (terms + unused) * factor - unused - mpmath.mpf(lognormal_sums.threshold_of(mixture, epsilon))
    assert float(allowed / ((terms + unused) * (1 + factor))) == pytest.approx(2.0**-46, rel=0.1, abs=0)


@pytest.mark.parametrize("mu", [0.1, 0.7, 3.0])
def test_masses_on_a_lattice_have_the_cancellation_of_cell_means(mu):
    """P(X^ beyond a place) is the mean of the tail over the next cell, by 60 digits, and its rounding."""
    low, step, cells = math.exp(-2.5 * mu - mu * mu / 2), 1e-3 * mu, 400
    lattice = Lattice(low, step, cells, 2**14, 1)
    x, beyond = lattice.places, 1 - np.cumsum(lattice_distribution(mu, lattice).masses)
    error = 1e-12 + 8 * UNIT * (2 + np.abs(np.log(x)).max() + mu * mu) / mu * (
        np.abs((np.log(x) + mu * mu / 2) / mu).max() + mu + 1
    )
    for i in (5, 200, 390):
        tails, weighted = [], []
        for place in x[i : i + 2]:
            z = (mpmath.log(mpmath.mpf(place)) + mpmath.mpf(mu) ** 2 / 2) / mu
            tails.append(place * phi(-z))
            weighted.append(phi(mu - z))
        width = mpmath.mpf(x[i + 1]) - mpmath.mpf(x[i])
        exact = (tails[1] - tails[0] - weighted[1] + weighted[0]) / width
        slack = (error + 4 * UNIT) * float(sum(tails) + sum(weighted)) / step
        assert float(mpmath.mpf(beyond[i]) - exact) == pytest.approx(slack, rel=0.2, abs=0)


@pytest.mark.parametrize("reach", [1.5, 2.5])
def test_what_is_beyond_a_lattice_is_reserved(reach, monkeypatch):
    """As if lattices ended at 1.5 deviations of ln X: without the reserve the truth is above the bound."""
    exact = quadrature([0.5, 0.5, 0.5], 0, 0.5)
    mixture = Mixture((Phases(3, 0.5),))
    monkeypatch.setattr(lognormal_lattice, "REACH", reach)
    lognormal_sums.divergence_bound.cache_clear()
    found = lognormal_sums.divergence_bound(mixture, 0.5)
    lognormal_sums.divergence_bound.cache_clear()
    assert exact <= found <= exact + 3 * 3 * float(phi(0.5 - reach))


@pytest.mark.parametrize("reach", [1.0, 1.5])
def test_a_participation_beyond_the_lattice_counts(reach, monkeypatch):
    """One phase: no other X may be beyond, so that the counted part alone covers the truth."""
    monkeypatch.setattr(lognormal_lattice, "REACH", reach)
    mixture, threshold = Mixture((Phases(1, 0.5),)), math.exp(0.5)
    cut = lognormal_sums.Cut.at(mixture, threshold, 1.0)
    (bound,), _ = lognormal_sums._untilted(mixture, np.array([threshold]), cut, 2**14)
    sums = lognormal_sums.Sums.of(mixture, cut.top + cut.rest, cut.top, 2**14)
    counted = bound - sums.beyond(np.array([threshold]), cut.rough.tilt_to(cut.rest))[1]
    exact = gaussian(mpmath.mpf("0.5"), 0.5)
    assert exact <= counted <= 3 * exact


@pytest.mark.parametrize(("epsilon", "p"), [(9.0, 0.02), (20.0, 0.01), (6.0, 0.002)])
def test_reserve_of_truncated_batches(epsilon, p):
    """proofs/truncation.md by 60 digits, with Markov's bound at e^epsilon P(x = 0), raised by 1e-9."""
    scheme, size, most = BMinSep(60, 4, p), 500, 30
    rates = [mpmath.mpf(float(rate)) for rate in scheme.participation_probabilities()]
    due = [
        1 - mpmath.fsum(mpmath.binomial(size - 1, r) * q**r * (1 - q) ** (size - 1 - r) for r in range(most))
        for q in rates
    ]
    sampled, any_step = mpmath.fsum(q * d for q, d in zip(rates, due, strict=True)), mpmath.fsum(due)
    none = mpmath.exp(scheme.log_probability_of_none())
    markov = min(1, MAX_SECOND_MOMENT / (mpmath.exp(epsilon) * none))
    remove = min(any_step, sampled * (1 + markov / none))
    assert markov < 1 and remove < any_step
    assert truncation.tail_bound(scheme, epsilon) == pytest.approx(float(markov), rel=1e-12, abs=0)
    assert float(reserve(scheme, epsilon, size, most) / remove - 1) == pytest.approx(1e-9, rel=0.1, abs=0)


@pytest.mark.parametrize(("n", "b", "k"), [(12, 3, 4), (30, 1, 9), (40, 5, 8)])
def test_sensitivity_of_overlapping_columns_has_its_rounding(n, b, k):
    strategy = Toeplitz(tuple(0.9 ** np.arange(n)))
    c, found = strategy.array, worst_pattern.overlapping_sensitivity(strategy, n, b, k)
    columns = [[mpmath.mpf(0)] * j + [mpmath.mpf(float(v)) for v in c[: n - j]] for j in range(0, k * b, b)]
    exact = mpmath.fsum(mpmath.fsum(rows) ** 2 for rows in zip(*columns, strict=True))
    assert float(found / exact - 1) == pytest.approx(4 * (n + 2 * k) * UNIT, rel=0.2, abs=0)


@pytest.mark.parametrize(("q", "sigma", "order"), [(0.01, 1.0, 8), (0.3, 0.6, 64), (1e-6, 5.0, 2)])
def test_renyi_divergences_are_rounded_up(q, sigma, order):
    found = subsampled_gaussian_rdp(q, sigma, [order])[0]
    p, s = mpmath.mpf(q), mpmath.mpf(sigma)
    moment = mpmath.fsum(
        mpmath.binomial(order, k) * p**k * (1 - p) ** (order - k) * mpmath.exp((k * k - k) / (2 * s * s))
        for k in range(order + 1)
    )
    exact = mpmath.log(moment) / (order - 1)
    allowed = 8 * UNIT * order * (math.log(order) + 64)
    assert float(found / exact - 1) == pytest.approx(allowed, rel=0.2, abs=0)


def test_delta_of_sampled_dice_is_raised():
    """For its rounding, by e^1e-9 and what float64 loses of exponents."""
    problem = dict(iterations=3, clip_norm=1.0, error_clip_norm=0.1, batch_size=10, noise_std=0.2)
    problem |= dict(sampling_probability=0.1)
    rdp = dice_rdp_subsampled(_ORDERS, **problem)
    found = mpmath.exp(_log_delta(1.0, _ORDERS, (_ORDERS - 1) * rdp))
    logs = [
        (a - 1) * (mpmath.mpf(rho) - 1 + mpmath.log1p(-1 / mpmath.mpf(a))) - mpmath.log(a)
        for a, rho in zip(_ORDERS.tolist(), rdp.tolist(), strict=True)
    ]
    assert float(found / mpmath.exp(min(logs)) - 1) == pytest.approx(1e-9, rel=0.05, abs=0)


@pytest.fixture
def broken(monkeypatch):
    """As if a transform were not a number: nothing that is drawn from it is a bound."""

    def irfft(values, points, **_):
        return np.full(points, np.nan)

    monkeypatch.setattr(tilted_sums.scipy.fft, "irfft", irfft)
    lognormal_sums.divergence_bound.cache_clear()
    yield
    lognormal_sums.divergence_bound.cache_clear()


@pytest.mark.usefixtures("broken")
def test_no_number_becomes_a_bound():
    from jaxacct.statistics.composed_losses import Part, divergence_bound, divergence_table
    from jaxacct.statistics.gaussian_mixtures import sampled_gaussian

    mixture = Mixture((Phases(40, 0.5),))
    assert lognormal_sums.divergence_bound(mixture, 0.5) == 1
    assert (lognormal_sums.divergence_table(mixture, np.linspace(0, 1, 3)) == 1).all()
    parts = [Part(sampled_gaussian(1.0, 0.1)[0], 1000)]
    assert divergence_bound(parts, 0.5) == 1
    assert (divergence_table(parts, np.linspace(0, 1, 3)) == 1).all()


def test_masses_that_are_no_numbers_are_not_left_out():
    assert math.isnan(tilted_sums.log_sum(np.zeros(2), np.array([1.0, math.nan])))
