"""Redrawn bins against quadrature, Gaussian mechanisms and the targets of the literature."""

import dataclasses
import math

import numpy as np
import pytest
import scipy

import jaxacct as ja
from jaxacct.accountants import analytic
from jaxacct.accountants.allocation import lognormal_sums
from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Phases
from jaxacct.accountants.allocation.redrawn_bins import RedrawnBins, epoch_curve
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.statistics.hockey_stick import DIRECTIONS
from tests.accountants.test_random_allocation import quadrature
from tests.oracles import enumeration, tuples
from tests.oracles.settings import slow

IDENTITY = ja.BandedToeplitz.identity()
NODES = {1: 700, 2: 700, 3: 110}


def redrawn_bins_delta(steps, epochs, sigma, epsilon):
    """The accountant's bound for whole epochs; of one epoch alone without a table."""
    if epochs == 1:
        return lognormal_sums.divergence_bound(Mixture((Phases(steps, 1 / sigma),)), epsilon)
    scheme = ja.EpochwiseAllocation(steps * epochs, steps)
    return RedrawnBins().delta(ja.Mechanism(scheme, IDENTITY, sigma), epsilon)


def one_epoch(steps, sigma):
    """(f, Q-mass) of one epoch by the trapezoidal rule over all z, ascending in f."""
    mu = 1 / sigma
    z = np.linspace(-8.0, 8.0 + mu, NODES[steps])
    weights = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    ratio = np.exp(mu * z - mu * mu / 2)
    f, mass = np.zeros(1), np.ones(1)
    for _ in range(steps):
        f, mass = np.add.outer(f, ratio / steps).ravel(), np.multiply.outer(mass, weights).ravel()
    order = np.argsort(f)
    return f[order], mass[order]


def two_epochs(steps, sigma, epsilon):
    """(H(P, Q), H(Q, P)) of two epochs: the second's divergence averaged over the first."""
    f, q = one_epoch(steps, sigma)
    p = f * q
    above_p, above_q = (np.append(np.cumsum(one[::-1])[::-1], 0.0) for one in (p, q))
    below_p, below_q = (np.append(0.0, np.cumsum(one)) for one in (p, q))
    alpha = math.exp(epsilon)
    place = np.searchsorted(f, alpha / f)  # f1 f2 > alpha
    remove = float(p @ (above_p[place] - alpha / f * above_q[place]))
    place = np.searchsorted(f, 1 / (alpha * f))  # f1 f2 < 1 / alpha
    return remove, float(q @ (below_q[place] - alpha * f * below_p[place]))


@pytest.mark.parametrize(("steps", "sigma"), [(2, 1.0), (2, 0.6), (3, 0.8)])
def test_two_epochs_against_quadrature(steps, sigma):
    """Above the exact divergence of every event, which no adversary exceeds, and at most 0.2 % above."""
    error = 2e-5 if steps == 2 else 4e-4  # of the quadrature: its steps' square, measured by halving them
    for epsilon in (0.0, 0.5, 2.0):
        exact = max(two_epochs(steps, sigma, epsilon))
        assert exact * (1 - error) <= redrawn_bins_delta(steps, 2, sigma, epsilon) <= exact * (1.002 + error)


def test_an_epoch_that_ends_early_against_quadrature():
    """Two steps, then the first of two: its participation is there with probability 1/2.

    A loss that ends at -ln 2 costs 2 % of delta when it is composed.
    """
    sigma, accountant = 0.8, RedrawnBins()
    mechanism = ja.Mechanism(ja.EpochwiseAllocation(3, 2), ja.BandedToeplitz.identity(), sigma)
    (f, q), (g, mass) = one_epoch(2, sigma), one_epoch(1, sigma)
    exact, alpha = 0.0, math.exp(0.5)
    for ratio, weight in zip((1 + g) / 2, mass, strict=True):
        both = q @ np.maximum(f * ratio - alpha, 0), q @ np.maximum(1 - alpha * f * ratio, 0)
        exact += weight * np.array(both)
    assert max(exact) * (1 - 2e-5) <= accountant.delta(mechanism, 0.5) <= max(exact) * 1.025
    whole = accountant.delta(dataclasses.replace(mechanism, scheme=ja.EpochwiseAllocation(4, 2)), 0.5)
    assert whole > accountant.delta(mechanism, 0.5)


@pytest.mark.parametrize("scheme", [ja.BalancedMinSep(3, 1, 2), ja.BalancedMinSep(3, 1, 1.4)], ids=str)
def test_k_of_n_steps_against_enumeration(scheme):
    """Above both divergences and below composition; with an epoch too few it would not be."""
    mechanism = ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 0.8)
    for epsilon in (0.0, 0.5, 2.0):
        pair = enumeration.pattern_distribution(scheme), {(0, 0, 0): 1.0}
        exact = max(tuples.divergence(*pair, 0.8, epsilon, side, points=NODES[3]) for side in DIRECTIONS)
        found = RedrawnBins().delta(mechanism, epsilon)
        assert exact * (1 - 4e-4) <= found < 0.97 * gdp_delta(epsilon, math.sqrt(2) / 0.8)
        assert redrawn_bins_delta(2, 1, 0.8, epsilon) < exact
    assert analytic.close(mechanism, 0.1) is None, "an upper bound: samples may certify less noise"


def test_k_of_n_steps_of_a_run():
    """Groups of 250, or of 250 and 251; separations above 1 have no bound. 50 of 1,000 steps at (2, 1e-5)."""
    often = ja.Mechanism(ja.BalancedMinSep(1000, 1, 50), IDENTITY, 3.2291)  # by 50 groups of 20 steps
    assert RedrawnBins().delta(often, 2.0) <= 1e-5
    mechanism = ja.Mechanism(ja.BalancedMinSep(1000, 1, 4), ja.BandedToeplitz.identity(), 0.5)
    found = RedrawnBins().delta(mechanism, 2.0)
    assert found == redrawn_bins_delta(250, 4, 0.5, 2.0) < 0.2 * gdp_delta(2.0, 2.0 / 0.5)
    longer = dataclasses.replace(mechanism, scheme=ja.BalancedMinSep(1002, 1, 4))
    assert longer.scheme.independent_epochs == ((2, 250, 0), (2, 251, 0))
    assert redrawn_bins_delta(251, 4, 0.5, 2.0) < RedrawnBins().delta(longer, 2.0) < found
    apart = dataclasses.replace(mechanism, scheme=ja.BalancedMinSep(1000, 2, 4))
    assert not RedrawnBins().supports(apart)
    many = dataclasses.replace(mechanism, scheme=ja.BalancedMinSep(10_000, 1, 205))  # pairs have no tables
    for scheme, taken in ((mechanism, None), (apart, None), (many, "redrawn-bins")):
        assert getattr(analytic.close(scheme, 1e-5), "name", None) == taken


@pytest.mark.parametrize(("sigma", "end"), [(0.5, 16.0), (0.8, 10.0), (2.0, 4.0), (10.0, 0.8)])
def test_tails_of_an_epoch_against_quadrature(sigma, end):
    """Above the exact divergence down to 1e-16, by at most 1 % until it is 1e-11."""
    epsilons = np.linspace(0.0, end, 250)
    found = lognormal_sums.divergence_table(Mixture((Phases(2, 1 / sigma),)), epsilons)
    some = slice(None, None, 12)
    exact, found = np.array([quadrature((1 / sigma,) * 2, 0, e) for e in epsilons[some]]), found[some]
    used = exact > 1e-16
    assert exact.min() < 1e-12
    assert np.all(found[used] >= exact[used] * (1 - 1e-6))
    used &= exact > 1e-11
    assert np.all(found[used] <= 1.01 * exact[used])


FAR = [(2.0, 2.5), (2.0, 3.0), (1.0, 5.0), (1.0, 6.0), (0.5, 12.0), (0.25, 40.0)]


@pytest.mark.parametrize(
    ("mus", "unused", "epsilon"),
    [((0.7, 0.5), 0, 4.0), ((1.4, 1.0), 1, 8.0), ((1.0, 0.3), 5, 5.0)]
    + [((1 / sigma,) * 2, 0, epsilon) for sigma, epsilon in FAR],
)
def test_one_far_bound_against_quadrature(mus, unused, epsilon):
    """Above by at most 0.1 %, for deltas from 1e-7 to 1e-17; phases of one length or two, or some unused."""
    exact = quadrature(mus, unused, epsilon)
    phases = (Phases(2, mus[0]),) if mus[0] == mus[1] else tuple(Phases(1, mu) for mu in mus)
    found = lognormal_sums.divergence_bound(Mixture(phases, unused), epsilon)
    assert 1e-17 < exact < 1e-7 and exact * (1 - 1e-6) <= found <= 1.001 * exact


@pytest.mark.parametrize("phases", [2, 3, 7])
def test_two_large_ones_are_reserved_for(phases):
    """E[S; two X or more above a top] by how many are above, at most three times."""
    mixture, top = Mixture((Phases(phases, 1.0),)), 6.0
    tail, weighted = scipy.special.ndtr(-math.log(top) - 0.5), scipy.special.ndtr(0.5 - math.log(top))
    exact = 0.0
    for above in range(2, phases + 1):
        sizes = above * weighted / tail + (phases - above) * (1 - weighted) / (1 - tail)
        exact += scipy.stats.binom.pmf(above, phases, tail) * sizes / phases
    assert exact <= lognormal_sums._two_large(mixture, top) <= 3 * exact


@pytest.mark.parametrize(("delta", "sigma"), [(1e-7, 0.7352), (1e-8, 0.7713), (1e-12, 0.907)])
def test_small_deltas_of_twenty_epochs(delta, sigma):
    """A thousand steps an epoch, epsilon 2: at 1e-8 a public accountant needs about 0.78."""
    assert redrawn_bins_delta(1000, 20, sigma, 2.0) <= delta


def test_a_new_bin_every_epoch_needs_less_noise_than_one_for_all():
    """1.4262 for an advantage of 0.1 is published for the former."""
    sigma = 1.003 * 1.4262
    assert redrawn_bins_delta(100, 10, sigma, 0.0) <= 0.1 < redrawn_bins_delta(100, 10, 1.4261, 0.0)
    assert lognormal_sums.divergence_bound(Mixture((Phases(100, math.sqrt(10) / sigma),)), 0.0) > 0.101
    assert redrawn_bins_delta(2, 2, 0.05, 0.0) == 1, "noise below its range has the trivial bound"


def test_a_delta_below_the_floor_is_refused():
    """At once: no noise that a mechanism takes shows it, with the pattern revealed, either."""
    coarse = ja.CalibrationOptions(grid_ratio=2.0)
    with pytest.raises(ValueError, match="delta must be larger for any accountant, got 1e-18"):
        ja.calibrate(
            ja.EpochwiseAllocation(4, 2), IDENTITY, target=ja.Target.advantage(1e-18), options=coarse
        )


def test_the_curve_of_an_epoch_is_above_its_divergence_on_the_line():
    """By quadrature, at losses of either sign."""
    f, q = one_epoch(2, 1.0)
    losses = np.append(np.linspace(-0.4, 0.4, 9), [-3.0, -1.0])
    exact = np.array([float(np.maximum(f * q - math.exp(loss) * q, 0.0).sum()) for loss in losses])
    found = epoch_curve(2, 1.0).at(losses).deltas
    assert np.all(found >= exact * (1 - 2e-5)) and np.all(found <= exact * 1.002)


@pytest.mark.parametrize(
    ("steps", "epochs", "exact"),
    [
        slow(250, 20, 1.3094),
        (500, 20, 1.0260),
        slow(500, 40, 1.3101),
        (100, 40, 2.6105),
        (100, 1, 0.6770),
        (1000, 1, 0.4520),
        slow(10_000, 1, 0.3532),
        slow(100_000, 1, 0.2970),
    ],
)
def test_noise_for_an_advantage_of_a_tenth(steps, epochs, exact):
    """Certified within 0.3 % above the published exact noise, which has four decimal places."""
    assert redrawn_bins_delta(steps, epochs, 1.003 * exact, 0.0) <= 0.1
    assert redrawn_bins_delta(steps, epochs, exact - 1e-3, 0.0) > 0.1
