"""What shuffling is worth: bounds on either side, against quadrature and published figures."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from tests.benchmarks import shuffled_bounds as shuffled
from tests.refusals import refused


@pytest.mark.parametrize(
    ("steps", "sigma", "expected"),
    [
        pytest.param(1000, 0.5, (10.0, 10.0, 3.13), marks=pytest.mark.slow),
        (1000, 0.7, (6.65, 6.53, 0.58)),
        pytest.param(1000, 1.0, (4.38, 2.88, 0.14), marks=pytest.mark.slow),
    ],
)
def test_epsilons_of_three_samplers(steps, sigma, expected):
    """Of a computation that shares no code with this one; the order of the three always holds."""
    found = shuffled.compare_epsilons(steps, 1, sigma, 1e-5)
    values = found.unamplified, found.shuffled_at_least, found.redrawn_at_most
    assert values == pytest.approx(expected, abs=6e-3)
    assert found.redrawn_at_most < found.shuffled_at_least <= found.unamplified


def test_the_lower_bound_is_below_quadrature():
    """Two steps in the plane: mixtures of two Gaussians each, by the rectangle rule."""
    sigma, line = 0.8, np.linspace(-7, 9, 1601)
    x, y = np.meshgrid(line, line, indexing="ij")

    def density(mean):
        squares = ((one - mean) ** 2 + other**2 for one, other in ((x, y), (y, x)))
        return sum(np.exp(-square / (2 * sigma**2)) for square in squares) / (4 * np.pi * sigma**2)

    for epsilon in (0.5, 1.5):
        terms = np.maximum(density(2.0) - np.exp(epsilon) * density(1.0), 0)
        exact = float(terms.sum() * (line[1] - line[0]) ** 2)
        assert 0.7 * exact < shuffled.shuffled_delta_lower(2, sigma, epsilon) <= exact * (1 + 1e-6)


def test_noise_and_epsilons_agree():
    noise = shuffled.compare_noise_multipliers(200, 1, 4.0, 1e-5)
    assert noise.redrawn_at_most < noise.shuffled_at_least < noise.unamplified
    at_least = shuffled.compare_epsilons(200, 1, noise.shuffled_at_least, 1e-5)
    assert at_least.shuffled_at_least == pytest.approx(4.0, rel=2e-3)
    at_most = shuffled.compare_epsilons(200, 1, noise.redrawn_at_most, 1e-5)
    assert at_most.redrawn_at_most <= 4.0 * (1 + 1e-3)


@pytest.mark.parametrize(("own", "epsilon"), [(34.0, 33.9), (36.5, 36.0), (1e-9, 0.0), (0.5, 0.4999999)])
def test_the_pair_of_the_upper_bound_where_its_weights_cancel(own, epsilon):
    """One example beside it, by 60 digits: bounds within 1e-8 of the truth and never below it."""
    with mpmath.workdps(60):
        c = mpmath.mpf("0.25")
        w, e = 1 / (1 + mpmath.exp(-mpmath.mpf(own))), mpmath.exp(mpmath.mpf(epsilon))
        # C is shown: the divergence is the mean of both.
        alone = max(0, w - e * (1 - w))
        masses = [((1 - w) / 2, w / 2), (mpmath.mpf(1) / 2, mpmath.mpf(1) / 2), (w / 2, (1 - w) / 2)]
        other = sum(max(0, a - e * b) for a, b in masses)
        exact = (1 - c) * alone + c * other
        found = shuffled._clones_delta(2, 0.25, own, epsilon)
        assert exact <= found <= exact * (1 + 1e-8)


@pytest.mark.parametrize(("n", "probability", "own"), [(1, 0.3, 0.7), (7, 0.4, 1.2), (12, 0.9, 2.5)])
def test_the_pair_of_the_upper_bound_against_enumeration(n, probability, own):
    """All (C, A, B); the two directions agree."""
    w = 1 / (1 + math.exp(-own))
    p, q = np.zeros((n, n + 1)), np.zeros((n, n + 1))
    for c, a, b in itertools.product(range(n), range(n), (0, 1)):
        weight = scipy.stats.binom.pmf(c, n - 1, probability) * scipy.stats.binom.pmf(a, c, 0.5)
        weight *= w if b else 1 - w
        p[c, a + b] += weight
        q[c, a + 1 - b] += weight
    assert p.sum() == pytest.approx(1) == q.sum()
    for epsilon in (0.0, 0.3, 0.9 * own):
        exact = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        assert np.maximum(q - math.exp(epsilon) * p, 0).sum() == pytest.approx(exact, rel=1e-9)
        found = shuffled._clones_delta(n, probability, own, epsilon)
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6) + 1e-15


def drawn(n, sigma, epsilon, other, rng, number=4000):
    """Mean and error of the divergence of a shuffle, both directions: gradient 1, and `other` of all others.

    Up to a constant the example's batch has 1 - other with its gradient and -other without.
    """
    found = []
    for with_example in (True, False):
        y = sigma * rng.normal(size=(number, n))
        y[np.arange(number), rng.integers(n, size=number)] += with_example - other
        log_ratios = [(m * y - m * m / 2) / sigma**2 for m in (1.0 - other, -other)]
        remove = np.subtract(*(np.logaddexp.reduce(each, axis=1) for each in log_ratios))
        loss = remove if with_example else -remove
        hockey_stick = np.maximum(-np.expm1(epsilon - loss), 0)
        found.append((hockey_stick.mean(), hockey_stick.std() / math.sqrt(number)))
    return found


@pytest.mark.parametrize("other", [-1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0))])
def test_no_shuffle_is_above_the_upper_bound(other):
    """Attack: both directions; where the bound is far below that of a known order, too."""
    rng = np.random.default_rng(5)
    for n, sigma, epsilon in ((100, 1.0, 1.0), (300, 3.0, 0.1), (300, 5.0, 0.02), (30, 10.0, 0.01)):
        bound = shuffled.shuffled_delta_upper(n, sigma, epsilon)
        for mean, error in drawn(n, sigma, epsilon, other, rng):
            assert mean <= bound + 6 * error
    assert shuffled.shuffled_delta_upper(300, 5.0, 0.02) < 0.5 * gdp_delta(0.02, 1.0 / 5.0)


@pytest.mark.parametrize("sigma", [0.7, *(pytest.param(x, marks=pytest.mark.slow) for x in (2.0, 8.0))])
def test_a_shuffle_of_one_batch_hides_nothing(sigma):
    """The upper bound is the Gaussian mechanism's delta, on both sides of every loss that it cuts off."""
    for near in shuffled._QUANTILES:
        own = 0.5 / sigma**2 + near / sigma
        for epsilon in (own - 1e-3, own, own + 1e-3):
            expected = gdp_delta(epsilon, 1.0 / sigma)
            assert shuffled.shuffled_delta_upper(1, sigma, epsilon) == pytest.approx(expected, rel=1e-6)


def test_bounds_of_a_shuffle_are_in_order():
    for n, sigma, epsilon in itertools.product((1, 100, 3000), (0.6, 2.0, 6.0), (0.05, 0.5)):
        lower, upper = shuffled.shuffled_delta_lower(n, sigma, epsilon), gdp_delta(epsilon, 1.0 / sigma)
        assert lower <= shuffled.shuffled_delta_upper(n, sigma, epsilon) <= upper
    # Figures of the proof page: epsilon at delta 1e-5 of 1,000 steps at sigma 4.
    assert 0.99e-5 < shuffled.shuffled_delta_upper(1000, 4.0, 0.48) < 1.2e-5
    assert shuffled.shuffled_delta_upper(1000, 4.0, 0.49) < 1e-5 < gdp_delta(0.92, 1.0 / 4.0)
    refused("epsilon must be", shuffled.shuffled_delta_upper, 10, 1.0, -0.1)


@pytest.mark.parametrize(("g", "a"), [(1.0, -1.0), (1.0, 0.3), (0.4, -1.0), (-1.0, 1.0)])
@pytest.mark.parametrize(("sigma", "own", "others"), [(2.0, 0.6, 1.2), (3.0, 0.3, 1.0)])
def test_the_parts_of_the_upper_bound(g, a, sigma, own, others):
    """On a grid: kinds are probabilities, mix to both sides, and hide in r but for kappa.

    Thresholds are low, so that every part is seen: tau and kappa are up to a tenth.
    """
    y = np.linspace(-30, 30, 60_001)
    p, q, r = (scipy.stats.norm.pdf(y, mean, sigma) for mean in (g, 0.0, a))
    cell = y[1] - y[0]
    rate = math.exp(own)
    u, v = np.maximum(p - rate * q, 0) / (1 + rate), np.maximum(q - rate * p, 0) / (1 + rate)
    near, none = p - u + v, q + u - v
    tau = gdp_delta(own, 1.0 / sigma) / (1 + rate)
    assert abs(near - p).sum() * cell / 2 <= tau * (1 + 1e-6) and abs(near.sum() * cell - 1) < 1e-9
    first, second = (rate * near - none) / (rate - 1), (rate * none - near) / (rate - 1)
    assert min(first.min(), second.min()) > -1e-12
    w = 1 / (1 + math.exp(-own))
    np.testing.assert_allclose(w * first + (1 - w) * second, near, atol=1e-12)
    np.testing.assert_allclose((1 - w) * first + w * second, none, atol=1e-12)
    alpha = math.exp(-others) / 2
    kappa = alpha * (gdp_delta(others, 2.0 / sigma) + gdp_delta(others, 1.0 / sigma) + 2 * tau)
    assert np.maximum(alpha * (first + second) - r, 0).sum() * cell <= kappa * (1 + 1e-6)
