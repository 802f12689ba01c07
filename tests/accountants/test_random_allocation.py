"""Balls-in-bins with C = I: quadrature, enumeration, Monte Carlo (false alarms: 1e-6 a test), an attack."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from jaxacct import BalancedMinSep, BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Mechanism
from jaxacct.accountants import ACCOUNTANTS
from jaxacct.accountants.allocation import lognormal_lattice, lognormal_sums, random_allocation
from jaxacct.accountants.allocation.lognormal_lattice import Mixture, Phases, lattice_distribution
from jaxacct.accountants.allocation.lognormal_sums import divergence_bound
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.calibration.grid import Problem, smallest_bound
from jaxacct.estimates.estimate import estimate_delta
from tests.draws import trained
from tests.oracles import enumeration
from tests.oracles.settings import slow

IDENTITY = BandedToeplitz.identity()


def call(k, mu):
    """E (X - k)_+ of a lognormal of mean 1, k any numbers."""
    k = np.asarray(k, float)
    positive = np.maximum(k, 1e-300)
    d = (-np.log(positive) - mu * mu / 2) / mu
    return np.where(k > 0, special.ndtr(d + mu) - positive * special.ndtr(d), 1 - k)


def quadrature(mus, unused, epsilon):
    """The divergence by the last X in closed form and up to two others by the trapezoidal rule.

    The integrand is smooth, so the rule converges faster than any power of its step.
    """
    total = len(mus) + unused
    left = np.array([total * math.exp(epsilon) - unused])
    weights = np.ones(1)
    for mu in mus[:-1]:
        z = np.linspace(-12, 12 + mu, 60_000 if len(mus) == 2 else 700)
        x = np.exp(mu * z - mu * mu / 2)
        left = np.subtract.outer(left, x).ravel()
        weights = np.multiply.outer(weights, stats.norm.pdf(z) * (z[1] - z[0])).ravel()
    return float(weights @ call(left, mus[-1])) / total


@pytest.mark.parametrize(
    ("mu", "unused", "epsilon", "log_exact"),
    [slow(6.7156, 0, 245.31, -556.35), (7.3101, 10_000, 265.29, -589.85), (3.2757, 0, 172.21, -1304.80)],
)
def test_a_tail_beyond_float64(mu, unused, epsilon, log_exact):
    """One phase is a Gaussian: ln of its delta by mpmath. No bound is 0."""
    mixture = Mixture((Phases(1, mu),), unused)
    assert divergence_bound(mixture, epsilon) >= max(1e-200, math.exp(log_exact - 1))


@pytest.mark.parametrize(
    ("phases", "unused", "epsilons", "most"),
    [
        ((Phases(2, 0.4),), 0, (0.3, 2.5), 1.01),
        ((Phases(2, 1.1),), 0, (0.3, 2.5), 1.01),
        ((Phases(1, 1.4), Phases(1, 1.0)), 0, (0.3, 2.5), 1.01),
        ((Phases(2, 0.9),), 3, (0.3, 2.5), 1.01),
        ((Phases(1, 1.5),), 1, (0.3, 2.5), 1.01),
        ((Phases(2, 0.9), Phases(1, 0.7)), 0, (1.0,), 1.005),
        # At 0 it is the total variation: the number behind a plan for an advantage.
        ((Phases(1, 0.02),), 0, (0.0,), 1.01),
        ((Phases(1, 6.0),), 3, (0.0,), 1.01),
        ((Phases(1, 1.5), Phases(1, 1.2)), 0, (0.0,), 1.01),
    ],
)
def test_few_phases_against_quadrature(phases, unused, epsilons, most):
    mus = [part.mu for part in phases for _ in range(part.number)]
    for epsilon in epsilons:
        exact, bound = quadrature(mus, unused, epsilon), divergence_bound(Mixture(phases, unused), epsilon)
        assert bound >= exact * (1 - (1e-6 if epsilon else 1e-9))
        assert exact <= 1e-9 or bound <= most * exact


def test_far_tails_of_two_kinds_of_phases():
    """One X makes the divergence there; it is least where the others are at their means, 9 (Jensen)."""
    mixture = Mixture((Phases(5, 1.0), Phases(5, 2**0.5)))
    for epsilon in (9.0, 10.0, 11.0, 12.0):
        rest = 10 * math.exp(epsilon) - 9
        z = (np.log(rest) + 1) / 2**0.5
        about = 5 * (special.ndtr(2**0.5 - z) - rest * special.ndtr(-z)) / 10
        assert about <= divergence_bound(mixture, epsilon) <= 1.02 * about


def test_the_normal_distribution_function_is_as_accurate_as_is_booked():
    mpmath = pytest.importorskip("mpmath")
    for z in np.concatenate([-np.linspace(0, 24.5, 400), [1.0, 5.0, 24.0]]):
        exact = mpmath.erfc(-mpmath.mpf(float(z)) / mpmath.sqrt(2)) / 2
        assert abs(special.ndtr(z) / exact - 1) < lognormal_lattice._NDTR_ERROR / 4


def lattice(low, step, cells, points=2**12, terms=3):
    return lognormal_lattice.Lattice(low, step, cells, points, terms)


@pytest.mark.parametrize("step", [0.03, 0.5, 4.0])
@pytest.mark.parametrize("mu", [0.05, 0.7, 2.0])
def test_a_lattice_distribution_is_above_for_every_kink(mu, step):
    """Convex functions that rise are mixtures of `(x - k)_+` and 1."""
    places = lattice(0.02, step, 60)
    x, distribution = places.places, lattice_distribution(mu, places)
    for k in np.concatenate([x[:-1], x[:-1] + step / 3, [x[-1]]]):
        # What is beyond the lattice is kept apart.
        mean = distribution.masses @ np.maximum(0.0, x - k) + distribution.max_weighted
        assert mean - k * distribution.min_beyond - call(k, mu) >= -1e-12 * max(1.0, k)
    assert distribution.masses.sum() <= 1 + 1e-12


def test_lattice_distributions_are_close_to_second_order():
    """Half the step, a quarter of the distance to the truth."""
    gaps = []
    for cells in (400, 800, 1600):
        x = lattice(1e-4, 30 / cells, cells)
        gaps.append(lattice_distribution(0.7, x).masses @ np.maximum(0.0, x.places - 2.01) - call(2.01, 0.7))
    assert gaps[1] < 0.35 * gaps[0] and gaps[2] < 0.35 * gaps[1]


@pytest.mark.parametrize("tilt", [0.0, 0.4])
def test_means_of_sums_against_convolution(tilt):
    """Of lattice distributions with two kinds of X; what wraps around the lattice is reserved."""
    generator = np.random.default_rng(3)
    places = lattice(0.1, 0.25, 9, points=32, terms=4)
    mixture = Mixture((Phases(3, 1.0), Phases(1, 1.0)), 2)
    distributions = tuple(
        lognormal_lattice.Distribution(generator.dirichlet(np.ones(10)) * 0.99, 0.01, 0.01, 0.1)
        for _ in range(2)
    )
    sums = lognormal_sums.Sums(mixture, places, distributions)
    thresholds = np.array([1.0, 3.1, 5.0])
    a, b = (distribution.masses for distribution in distributions)
    x = places.places

    def together(*parts):
        return functools.reduce(np.convolve, parts)

    for log, others in zip(sums.log_others(0.7), (together(a, a, b), together(a, a, a)), strict=True):
        assert log == pytest.approx(math.log(others @ np.exp(0.7 * (0.3 + 0.25 * np.arange(others.size)))))
    whole = 3 / 6 * together(a * x, a, a, b) + 1 / 6 * together(b * x, a, a, a)
    weights = np.maximum(0.0, 1 - thresholds[:, None] / places.sums)
    exact, wrapped = weights @ whole[:32], whole[32:].sum()
    found, _ = sums.bounds(thresholds, tilt)
    assert np.all(found >= exact)
    assert wrapped <= math.exp(sums.log_wrapped(2.0)) * (1 + 1e-9)
    assert np.all(found <= exact + wrapped * math.exp(tilt * 8) + 1e-12)


def test_against_draws_of_the_mechanism(key):
    """Intervals of the estimator, which are wrong with probability 1e-6, meet the two bounds."""
    mechanism = Mechanism(BallsInBins(10, 4), IDENTITY, 1.1)
    drawn = estimate_delta(mechanism, 0.6, num_samples=40_000, proposal="plain", key=key, confidence=1 - 1e-6)
    bound = ACCOUNTANTS["random-allocation"].delta(mechanism, 0.6)
    assert 0.5 * bound < drawn.low <= bound <= 1.01 * drawn.high


def attack(scheme, sigma, epsilon, runs=200_000):
    """A lower bound on H(P, Q), wrong with probability 1e-6, from the batches that training would draw.

    Outputs of the example's gradient 1 and of 0, in NumPy alone; the event is "the mean over phases of
    likelihood ratios is above e^epsilon".
    """
    generator, hits = np.random.default_rng(11), []
    x = trained(scheme, runs, 12).astype(float)  # every example is a run of its own
    for signal in (x, 0 * x):
        y = signal + sigma * generator.standard_normal(x.shape)
        ratios = [
            np.exp(np.sum(y[:, phase :: scheme.cycle_length] - 0.5, axis=1) / sigma**2)
            for phase in range(scheme.cycle_length)
        ]
        hits.append(int(np.sum(np.mean(ratios, axis=0) > math.exp(epsilon))))
    low = stats.beta.ppf(5e-7, hits[0], runs - hits[0] + 1)
    return low - math.exp(epsilon) * stats.beta.isf(5e-7, hits[1] + 1, runs - hits[1])


def test_an_attack_on_the_sampler_stays_below_and_beats_bins_drawn_anew():
    """Were the bin drawn anew in every cycle, cycles would be independent, and delta smaller than it is."""
    scheme, sigma, epsilon = BallsInBins(12, 3), 1.5, 1.0
    shown = attack(scheme, sigma, epsilon)
    assert shown <= ACCOUNTANTS["random-allocation"].delta(Mechanism(scheme, IDENTITY, sigma), epsilon)
    z = np.random.default_rng(5).standard_normal((400_000, 4, 3)) / sigma
    z[:, :, 0] += 1 / sigma**2
    anew = np.prod(np.mean(np.exp(z - 0.5 / sigma**2), axis=2), axis=1)
    wrong = np.mean(np.maximum(0, 1 - math.exp(epsilon) / anew))
    assert wrong < 0.85 * shown


def test_the_mixture_of_a_mechanism():
    def of(*numbers):
        return random_allocation.mixture_of(Mechanism(BallsInBins(*numbers), IDENTITY, 2.0))

    assert of(10, 4) == Mixture((Phases(2, 3**0.5 / 2), Phases(2, 2**0.5 / 2)))
    assert of(8, 4) == Mixture((Phases(4, 2**0.5 / 2),))
    assert of(3, 5) == Mixture((Phases(3, 0.5),), 2)
    assert BallsInBins(10, 4).phase_participations.tolist() == [3, 3, 2, 2]
    certain = CyclicPoisson(10, 4, 1.0).phase_participations
    assert certain is not None and certain.tolist() == [3, 3, 2, 2]
    assert CyclicPoisson(10, 4, 0.5).phase_participations is None


def test_a_model_of_sums_has_a_node_of_every_phase():
    """Where a sum ends below all of one phase's lognormal."""
    model = lognormal_lattice.Rough.of(Mixture((Phases(1, 0.5), Phases(1, 1e-3))), 0.5)
    assert all(places.size for _, places, _ in model.parts) and math.isfinite(model.tilt_to(0.6))


def test_nan_gives_the_trivial_bound(monkeypatch):
    """NaN, and what is no probability."""
    for wrong in (math.nan, -0.1, 1.1):
        found = np.array([wrong]), np.array([0.0])
        for name in ("_untilted", "_tail"):
            monkeypatch.setattr(lognormal_sums, name, lambda *arguments, found=found: found)
        assert divergence_bound.__wrapped__(Mixture((Phases(2, 0.7),)), 1.0) == 1.0


@pytest.mark.parametrize("points", [2**8, 2**10, 2**15])
def test_bounds_hold_on_any_lattice(points, monkeypatch):
    numbers = dict(_MIN_POINTS=points, _POINTS_A_TERM=1, _TAIL_POINTS=max(points, 512))
    for name, number in numbers.items():
        monkeypatch.setattr(lognormal_sums, name, number)
    for epsilon in (1.0, 4.0):
        exact = quadrature([1.1, 1.1], 0, epsilon)
        assert exact <= divergence_bound.__wrapped__(Mixture((Phases(2, 1.1),)), epsilon)


def test_extreme_numbers_are_bounds_too():
    """Nothing is NaN or negative, delta falls with epsilon, and the exact zeros are zeros."""
    for scheme, sigma in (
        (BallsInBins(5, 3), 1e8),
        (BallsInBins(4, 600), 1e3),
        (BallsInBins(4, 600), 0.05),
        (BallsInBins(5, 3), 1e-3),
    ):
        mechanism = Mechanism(scheme, IDENTITY, sigma)
        least = scheme.log_probability_of_none()
        deltas = [ACCOUNTANTS["random-allocation"].delta(mechanism, e) for e in (1e-3, 1.0, 50.0, 700.0)]
        assert all(0 <= d <= 1 for d in deltas)
        assert all(a >= b * (1 - 1e-3) - 1e-12 for a, b in itertools.pairwise(deltas))
        for d, e in zip(deltas[:3], (1e-3, 1.0, 50.0), strict=True):
            revealed = gdp_delta(e, math.sqrt(scheme.max_participations) / sigma)
            assert d <= 1.01 * min(revealed, -math.expm1(least)) + 1e-12


@pytest.mark.parametrize("sizes", [(3, 2), slow((5, 3))])
def test_phases_of_unequal_size_at_every_noise(sizes):
    """Where n is no multiple of b, the lattice of one phase may end below all of another's lognormal.

    Epsilon 4 at noise 3.37 had no bound for n = 3, b = 2; two phases also against quadrature.
    """
    scheme = BallsInBins(*sizes)
    for sigma, epsilon in itertools.product((0.5, 1.0, 3.37, 20.0, 1e4), (0.0, 2.0, 4.0, 10.0)):
        bound = ACCOUNTANTS["random-allocation"].delta(Mechanism(scheme, IDENTITY, sigma), epsilon)
        assert 0 <= bound <= 1
        if scheme.cycle_length == 2:
            exact = quadrature([turns**0.5 / sigma for turns in scheme.phase_participations], 0, epsilon)
            assert bound >= exact * (1 - 3e-5) - 1e-13


@pytest.mark.parametrize(
    "scheme",
    [
        BallsInBins(5, 2),
        BallsInBins(2, 5),
        BMinSep(4, 4, 0.3),
        BMinSep(3, 5, 0.2),
        BMinSep(5, 2, 1.0),
        BMinSep(2, 3, 1.0),
        BalancedMinSep(4, 1, 0.7),
        BalancedMinSep(3, 2, 1.0),
    ],
)
def test_a_uniform_phase_is_the_whole_distribution(scheme):
    turns, probability = scheme.phase_participations, scheme.phase_probability
    assert np.all(np.diff(turns) <= 0)
    expected = {(0,) * scheme.iterations: 1 - probability}
    for phase, number in enumerate(turns):
        at = [float(i % len(turns) == phase) for i in range(scheme.iterations)]
        assert sum(at) == number
        expected[tuple(at)] = expected.get(tuple(at), 0.0) + probability / len(turns)
    found = enumeration.pattern_distribution(scheme)
    assert sum(found.values()) == pytest.approx(1)
    for vector, chance in found.items():
        assert chance == pytest.approx(expected[tuple(vector)], abs=1e-10)


@pytest.mark.parametrize(
    ("scheme", "bands", "phases", "unused"),
    [
        (BallsInBins(23, 10), 3, {3: 1, 2: 2}, 0),  # 3 of 10 phases have 3 turns: one of a group at most
        (BallsInBins(27, 10), 3, {3: 3}, 0),
        (BallsInBins(4, 10), 3, {1: 2}, 1),  # 4 of 10 phases have a turn: two that are 3 apart at most
        (BallsInBins(20, 10), 10, {2: 1}, 0),
        (BalancedMinSep(20, 1, 0.4), 3, {1: 6}, 9),
        (BalancedMinSep(20, 1, 0.4), 20, {1: 1}, 1.5),
        (BMinSep(20, 20, 0.5), 6, {1: 3}, 3 * 0.05),
        (BMinSep(9, 20, 0.3), 15, {1: 1}, 4 / 2.7),  # fewer steps than bands
    ],
)
def test_phases_of_a_group_do_not_overlap(scheme, bands, phases, unused):
    found = random_allocation.mixture_of(Mechanism(scheme, BandedToeplitz.square_root(bands), 2.0))
    assert {round((2 * part.mu) ** 2, 9): part.number for part in found.phases} == phases
    assert found.unused == pytest.approx(unused, abs=1e-9) and found.unused <= unused


def test_one_participation_that_may_not_be_is_subsampled():
    """A whole run in one group: `q N(mu, 1) + (1 - q) N(0, 1)`."""
    mechanism = Mechanism(BalancedMinSep(7, 1, 0.3), BandedToeplitz.square_root(7), 0.8)
    for epsilon in (0.2, 1.5):
        alpha = math.exp(epsilon)
        exact = 0.3 * float(call(np.array([(alpha - 0.7) / 0.3]), 1 / 0.8)[0])
        assert exact <= ACCOUNTANTS["random-allocation"].delta(mechanism, epsilon) <= 1.001 * exact


def test_an_attack_on_overlapping_phases():
    """Columns of three equal entries: with much noise two phases of six are as good as all of them.

    By the likelihood ratio itself; its bound would be false with one more phase in a group. Hoeffding, false
    alarm 1e-6.
    """
    scheme, epsilon, num = BallsInBins(60, 6), 0.1, 500_000
    mechanism = Mechanism(scheme, BandedToeplitz((1.0, 1.0, 1.0)), 10.0)
    steps = np.arange(60)
    columns = mechanism.strategy.columns(60, steps)
    means = np.stack([columns[:, steps % 6 == phase].sum(axis=1) for phase in range(6)]) / 10.0
    generator = np.random.default_rng(7)
    products = means @ means.T
    scores = generator.normal(size=(num, 6)) @ np.linalg.cholesky(products + 1e-12 * np.eye(6)).T
    scores += products[generator.integers(6, size=num)]
    ratios = np.exp(scores - np.diag(products) / 2).mean(axis=1)
    delta = np.maximum(0.0, 1 - math.exp(epsilon) / ratios).mean()
    error = math.sqrt(math.log(1e6) / (2 * num))
    assert delta - error <= ACCOUNTANTS["random-allocation"].delta(mechanism, epsilon) <= delta + 0.01
    assert delta - error > divergence_bound(Mixture((Phases(3, 10**0.5 / 10.0),)), epsilon)


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e3, 1e4])
def test_a_search_for_noise_at_every_epsilon(epsilon):
    """Over the admitted range, from where one phase alone makes the divergence: within a tenth at 1."""
    scheme, targets = BallsInBins(12, 4), dict(epsilon=epsilon, delta=1e-9)
    found = smallest_bound(Problem(scheme, IDENTITY, "zero-out", **targets), None, 1.0005)
    about = random_allocation.noise_about(Mechanism(scheme, IDENTITY, 1.0), **targets)
    assert found is not None and 0 < about < math.inf
    if epsilon == 1:
        assert found == pytest.approx(about, rel=0.1)
