"""Balanced min-sep sampling: likelihoods, samplers and batches against enumeration of all patterns."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from jaxacct.likelihood import rounding
from jaxacct.schemes import BalancedMinSep, BMinSep
from jaxacct.schemes.protocol.batch_sizes import batch_sizes, max_batch_size
from tests.oracles import enumeration
from tests.schemes.test_schemes import FALSE_ALARM, chi_square_p_value

# n is a multiple of nothing; b = 1; all room taken.
DISTRIBUTIONS = [
    BalancedMinSep(8, 3, 2),
    BalancedMinSep(8, 3, 2.5),
    BalancedMinSep(8, 2, 3.3),
    BalancedMinSep(8, 4, 2),
    BalancedMinSep(7, 3, 3),
    BalancedMinSep(7, 1, 3),
    BalancedMinSep(6, 1, 5.5),
    BalancedMinSep(8, 8, 1),
    BalancedMinSep(5, 2, 0.3),
    BalancedMinSep(1, 1, 1),
]


def small_distributions(steps):
    """Every separation and number of participations."""
    for n in steps:
        for b in range(1, n + 1):
            for k in range(1, -(-n // b) + 1):
                yield n, b, k


@pytest.mark.parametrize("steps", [range(1, 5), pytest.param(range(5, 9), marks=pytest.mark.slow)])
def test_likelihoods_of_all_patterns(steps, x64):
    """Every distribution of so many steps."""
    rng, settings = np.random.default_rng(0), list(small_distributions(steps))
    ratios = [rng.normal(0, 5, (n, 3)) for n, *_ in settings]

    @jax.jit  # one program for all
    def run(ratios):
        return [
            BalancedMinSep(*setting).table.log_likelihood_ratios(r)
            for r, setting in zip(ratios, settings, strict=True)
        ]

    for ours, r, (n, b, k) in zip(run(ratios), ratios, settings, strict=True):
        patterns = np.array(list(enumeration.pattern_distribution(BalancedMinSep(n, b, k))), float)
        assert math.comb(n - (k - 1) * (b - 1), k) == len(patterns)
        products = np.exp(patterns @ r)
        np.testing.assert_allclose(ours, np.log(products.mean(axis=0)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scheme", [BalancedMinSep(1000, 64, 4), BalancedMinSep(200, 16, 9)], ids=str)
def test_every_pattern_of_a_long_run_is_counted(scheme):
    """At log-ratios of 0 the mean is 1; its derivatives are the shares of patterns with each step."""
    mean, shares = jax.jit(jax.value_and_grad(scheme.log_likelihood_ratios))(jnp.zeros(scheme.iterations))
    assert abs(mean) < 1e-3
    np.testing.assert_allclose(shares, scheme.participation_probabilities(), rtol=1e-3)


@pytest.mark.parametrize("scheme", DISTRIBUTIONS[2:5:2], ids=str)
def test_drawn_patterns_and_batches(scheme, key):
    """The joint distribution, hence all marginals and pairs: the accountant's draws and the trainer's."""
    distribution = enumeration.pattern_distribution(scheme)
    drawn = np.array(jax.jit(lambda k: scheme.draw_participation(k, 40_000))(key))
    assert chi_square_p_value(drawn, distribution) > FALSE_ALARM
    generator = np.random.default_rng(0)
    batches = scheme.batches(40_000, generator)
    for step in range(scheme.iterations):
        drawn[:, step] = np.bincount(batches.draw(step, generator), minlength=len(drawn))
    assert chi_square_p_value(drawn, distribution) > FALSE_ALARM
    wrong = enumeration.pattern_distribution(BMinSep(scheme.iterations, scheme.min_separation, 0.3, False))
    assert chi_square_p_value(drawn, wrong) < FALSE_ALARM


def test_marginals_and_pairs_of_a_long_run(key):
    """Of 1,000 steps; four waits at 4.9 standard deviations have a false alarm of 1e-6 each."""
    scheme, num = BalancedMinSep(1000, 64, 4), 200_000
    steps = np.asarray(jax.jit(lambda k: scheme.draw_positions(k, num))(key))
    assert steps.min() >= 0 and steps.max() < 1000 and np.diff(steps).min() >= 64
    expected = num * scheme.participation_probabilities()
    observed = np.bincount(steps.ravel(), minlength=1000)
    # Steps of one example exclude each other, so counts vary less than those of independent ones.
    assert stats.chi2.sf(np.square(observed - expected) @ (1 / expected), 999) > FALSE_ALARM
    # The first gap beyond b - 1 is that of uniform subsets: P(gap > g) = C(m - g, k) / C(m, k) from the left.
    m = 1000 - 3 * 63
    first = steps[:, 0]
    for at in (50, 200, 400):
        chance = math.comb(m - at, 4) / math.comb(m, 4)
        assert abs((first >= at).mean() - chance) < 4.9 * math.sqrt(chance * (1 - chance) / num)
        both = (steps[:, 1] - first - 64 >= at).mean()
        assert abs(both - chance) < 4.9 * math.sqrt(chance * (1 - chance) / num)


def test_batch_sizes_follow_the_step():
    """By exact integers: p_i is largest at the ends, n / m of the mean, and the largest batch holds there.

    The mean rate of README's job would allow too small a batch, the largest one too large a one.
    """
    for n, b, k in ((1000, 16, 4), (40, 5, 6)):
        scheme, m = BalancedMinSep(n, b, k), n - (k - 1) * (b - 1)
        rates = scheme.participation_probabilities()
        ways = [
            sum(
                math.comb(i - j * (b - 1), j) * math.comb(m - 1 - i + j * (b - 1), k - 1 - j)
                for j in range(k)
                if 0 <= i - j * (b - 1) < m
            )
            for i in range(n)
        ]
        np.testing.assert_allclose(rates, np.array(ways, float) / math.comb(m, k), rtol=1e-12)
        np.testing.assert_allclose(rates, rates[::-1], rtol=1e-12)
        assert rates[0] == pytest.approx(k / m) and rates.mean() == pytest.approx(k / n)
    scheme, size = BalancedMinSep(1000, 16, 4), 50_000
    expected, largest = batch_sizes(scheme, size)
    rates = scheme.participation_probabilities()
    assert expected == pytest.approx(200)
    assert stats.binom.sf(largest, size, rates).sum() <= 1e-9 < stats.binom.sf(largest - 2, size, rates).sum()
    assert max_batch_size(size, 4 / 1000, 1000) < largest < max_batch_size(size, rates.max(), 1000)
    assert BalancedMinSep(400, 20, 20).participation_probabilities().min() < 2e-11, "no divisor of a step"


def test_bad_input():
    for make, message in (
        (lambda: BalancedMinSep(8, 3, 3.5), "participations must be at most 3"),
        (lambda: BalancedMinSep(8, 3, 0), "participations must be"),
        (lambda: BalancedMinSep(8, 3, math.nan), "participations must be"),
        (
            lambda: BalancedMinSep.from_batch_size(
                dataset_size=100, batch_size=30, iterations=8, min_separation=4
            ),
            "participations must be at most 2",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    made = BalancedMinSep.from_batch_size(dataset_size=100, batch_size=25, iterations=8, min_separation=4)
    assert made == BalancedMinSep(8, 4, 2) and made.expected_batch_sizes(100).mean() == 25.0
    assert BalancedMinSep(9, 2, 0.5) == BalancedMinSep(9, 9, 0.5), "one participation has no distance"


def test_logarithms_of_binomials_that_bounds_depend_on():
    """Of exact integers, and rounded up by what gammaln may lose."""
    for n, k in ((10, 3), (2000, 1000), (2**20, 9)):
        with mpmath.workdps(40):
            exact = mpmath.log(math.comb(n, k))
            above = rounding._log_choose(n, k) - exact
            parts = sum(mpmath.loggamma(size + 1) for size in (n, k, n - k))
            assert 0.5 < above / (2.0**-49 * parts) < 1.5
