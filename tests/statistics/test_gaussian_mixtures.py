"""Divergences of mixtures of Gaussians: their definition in 60 digits (composed_losses.md, section 2)."""

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

from jaxacct import BandedToeplitz, IndependentAttribution, Mechanism, MultiAttribution, calibrate
from jaxacct.accountants import analytic
from jaxacct.core.evidence import Bound
from jaxacct.interoperation import dominating_event
from jaxacct.statistics import gaussian_mixtures
from jaxacct.statistics.composed_losses import Part, divergence_bound
from jaxacct.statistics.tilted_sums import UNIT
from tests.oracles.composed_losses import USERS
from tests.refusals import refused

# (sigma, examples, probability): rare and certain participation, far and near means, counts that are joined.
SETTINGS = [
    (4.48, 16, 0.00512),
    (0.9, 1, 0.3),
    (0.3, 3, 1e-4),
    (0.05, 4, 0.5),
    (2.0, 5, 1.0),
    (30.0, 60, 0.02),
    (1e3, 7, 0.9),
    (1.0, 2, 2.0**-32),
]


def exact(mixture: gaussian_mixtures.Mixture, x: float, remove: bool):
    """(divergence, probability of larger losses) by the definition, in 60 digits; None far out.

    The loss is convex, so that Newton's method ends from anywhere but where it is flat.
    """
    side, goal = (1, mp.mpf(x)) if remove else (-1, -mp.mpf(x))
    shifts, weights = map(mp.mpf, mixture.shifts), map(mp.mpf, mixture.weights)
    parts = list(zip(shifts, weights, strict=True))
    places = np.linspace(-38, 38 + mixture.shifts[-1], 20_001)
    z = mp.mpf(float(np.interp(float(goal), mixture.log_density(places)[0], places)))
    for _ in range(40):
        terms = [(w * mp.exp(m * z - m * m / 2), m) for m, w in parts]
        total = mp.fsum(term for term, _ in terms)
        step = (mp.log(total) - goal) * total / mp.fsum(term * m for term, m in terms)
        if not abs(z - step) < 1e5:
            return None
        z -= step
        if abs(step) < mp.mpf("1e-40"):
            break
    else:
        return None
    mixed, own = mp.fsum(w * mp.ncdf(side * (m - z)) for m, w in parts), mp.ncdf(-side * z)
    first, second = (mixed, own) if remove else (own, mixed)
    return first - mp.exp(mp.mpf(x)) * second, first


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_curves_are_above_60_digits_and_corners_just_above(setting):
    sigma, count, probability = setting
    means, weights = gaussian_mixtures.binomial(count, probability)
    mixture = gaussian_mixtures.Mixture(tuple(mean / sigma for mean in means), weights)
    for remove, curve in zip((True, False), gaussian_mixtures.binomial_curves(*setting), strict=True):
        some, seen = curve.losses[:: curve.losses.size // 12], 0
        for is_corner, losses in ((True, some), (False, some[:-1] + np.diff(some) / 3)):
            for x, delta in zip(losses, curve.at(losses).deltas, strict=True):
                with mp.workdps(60):
                    found = exact(mixture, float(x), remove)
                if found is None or found[1] < 1e-250:
                    continue
                error = 24 * UNIT * (1 + abs(x)) * found[1]  # of `ChordCurve.at`
                assert delta >= found[0] - error
                assert not is_corner or delta - found[0] <= 1e-8 * found[1]
                seen += bool(found[0] > 1e-40)
        assert seen > 4


@pytest.mark.parametrize("q", [1e-3, 0.3, 1.0])
def test_one_example_is_a_sampled_gaussian(q):
    losses = np.linspace(-3.0, 6.0, 301)
    for mixture, sampled in zip(
        gaussian_mixtures.binomial_curves(0.8, 1, q), gaussian_mixtures.sampled_gaussian(0.8, q), strict=True
    ):
        first, second = mixture.at(losses).deltas, sampled.at(losses).deltas
        np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-200)


@pytest.mark.parametrize("reference", USERS, ids=str)
def test_users_are_above_60_digit_references_and_near(reference):
    curves = gaussian_mixtures.binomial_curves(reference.sigma, reference.examples, reference.q)
    part = Part(curves[not reference.remove], reference.steps)
    exact = float(reference.delta)
    assert exact * (1 - 1e-11) <= divergence_bound([part], reference.epsilon) <= 1.02 * exact


def test_one_example_less_is_refuted_by_the_references():
    """The attack: a user whose last example is not counted has too small a delta."""
    for reference in USERS:
        curves = gaussian_mixtures.binomial_curves(reference.sigma, reference.examples - 1, reference.q)
        part = Part(curves[not reference.remove], reference.steps)
        assert divergence_bound([part], reference.epsilon) < 0.99 * float(reference.delta)


@pytest.mark.parametrize(("count", "probability"), [(16, 0.00512), (1000, 0.5), (300, 0.001), (3, 1.0)])
def test_joined_counts_are_stochastically_larger_and_hardly(count, probability):
    means, weights = gaussian_mixtures.binomial(count, probability)
    p = Fraction(probability)
    law = [math.comb(count, j) * p**j * (1 - p) ** (count - j) for j in range(count + 1)]
    found = dict(zip(means, map(Fraction, weights), strict=True))
    tail, theirs = Fraction(0), Fraction(0)
    for j in range(count, -1, -1):
        tail, theirs = tail + found.get(j, 0), theirs + law[j]
        assert tail >= theirs * (1 - Fraction(UNIT)) and tail - theirs <= Fraction(UNIT) + Fraction(1, 10**39)
    assert weights[0] == float(sum(law[: int(means[0]) + 1]))  # with what it stands for
    assert len(means) < 450 and abs(tail - 1) < UNIT * len(means)


def test_the_logarithm_of_the_normal_distribution_is_as_good_as_assumed():
    """(4 + 4 |ln|) u of the probability in `Mixture.log_beyond`; measured."""
    places = np.concatenate([-np.geomspace(1e-3, 2e4, 300), np.linspace(-40, 8, 300)])
    with mp.workdps(60):
        for z, value in zip(places, special.log_ndtr(places), strict=True):
            exact = mp.log(mp.erfc(-mp.mpf(float(z)) / mp.sqrt(2)) / 2)
            assert abs(mp.mpf(float(value)) - exact) <= (4 + 4 * abs(value)) * UNIT


def test_given_mixtures_are_checked():
    found = gaussian_mixtures.both_directions_of_mixture(2.0, (1.0, 0.0, 1.0), (0.25, 0.5, 0.25))
    for one, other in zip(found, gaussian_mixtures.sampled_gaussian(2.0, 0.5), strict=True):
        # Next to the largest loss, where less than 1e-58 is left, the rounding of a loss is much of it.
        np.testing.assert_allclose(one.heights, other.heights, rtol=1e-9, atol=1e-66)
    for means, weights, reason in (
        ([-1.0, 0.0], [0.5, 0.5], "at least 0"),
        ([math.inf, 0.0], [0.5, 0.5], "at least 0"),
        ([0.0, 1.0], [0.5, math.nan], "in \\[0, 1\\]"),
        ([0.0, 1.0], [0.5, 0.4], "add up to 1"),
    ):
        refused(reason, gaussian_mixtures.both_directions_of_mixture, 1.0, tuple(means), tuple(weights))


def test_a_user_with_16_examples_is_calibrated_by_the_mixture():
    """The bound that calibrate finds by itself; the revealed pattern needs 243 and samples do not end."""
    sizes = dict(dataset_size=100_000, batch_size=512, iterations=2000)
    scheme = MultiAttribution.from_batch_size(**sizes, min_separation=1, examples_per_user=16)
    plan = calibrate(scheme, BandedToeplitz.identity(), epsilon=4, delta=1e-6)
    assert 4.475 < plan.noise_multiplier < 4.48 and plan.evidence == Bound("pld") and plan.certified


@pytest.mark.parametrize(
    ("q", "sigma", "off"), [(1e-8, 1e3, 9e-10), (1e-4, 1e6, 9e-10), (1e-7, 1e6, 1e-12), (0.5, 1e6, 9e-10)]
)
def test_weights_that_miss_one_are_no_certificate(q, sigma, off):
    """The attack: weights up to 1e-9 short of 1 are accepted, and move every loss.

    Where that is more than the losses themselves, the event at a loss that is too small misses the best one.
    """
    remove, add = gaussian_mixtures.both_directions_of_mixture(sigma, (0.0, 1.0), (1 - q - off, q))
    with mp.workdps(40):
        weight, mu = mp.mpf(q) / (1 - mp.mpf(off)), 1 / mp.mpf(sigma)
        z = mu / 2  # at epsilon 0 both directions are the distance in total variation
        truth = weight * (mp.ncdf(mu - z) - mp.ncdf(-z))
    for curve in (remove, add):
        assert divergence_bound([Part(curve, 1)], 0.0) >= float(truth) * (1 - 1e-12)


def test_dp_accounting_is_above_and_its_optimistic_estimate_below():
    mechanism = Mechanism(IndependentAttribution(10, 1, 0.1, 3), BandedToeplitz.identity(), 3.0)
    found = dominating_event(mechanism)
    assert found.exact and isinstance(found.event.event, dp_event.MixtureOfGaussiansDpEvent)
    mixed = found.event.event
    sizes = mixed.standard_deviation, mixed.sensitivities, mixed.sampling_probs
    ends = []
    for pessimistic in (False, True):
        one = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            *sizes, pessimistic_estimate=pessimistic, value_discretization_interval=1e-2
        )
        ends.append(one.self_compose(10).get_delta_for_epsilon(0.5))
    assert ends[0] <= analytic.delta_by("pld", mechanism, 0.5) <= ends[1] * (1 + 1e-3)
