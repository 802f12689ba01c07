"""Epochwise allocation and balanced min-sep: limits, batch sizes, bad input.

That draws and batches follow the same distribution is in tests/conformance/test_registry.py.
"""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from jaxacct import BalancedMinSep, BallsInBins, EpochwiseAllocation
from jaxacct.likelihood import rounding
from jaxacct.schemes.protocol.batch_sizes import batch_sizes, max_batch_size
from tests.oracles import enumeration
from tests.refusals import refused


def small(n):
    """Every separation, and every length of an epoch or number of participations."""
    for epoch in range(1, n + 2):
        yield from (EpochwiseAllocation(n, epoch, b) for b in range(1, epoch + 1))
    for b in range(1, n + 1):
        yield from (BalancedMinSep(n, b, k) for k in range(1, -(-n // b) + 1))


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [(EpochwiseAllocation(8, 3, 3), BallsInBins(8, 3)), (EpochwiseAllocation(5, 8, 2), BallsInBins(5, 8))],
)
def test_limits(scheme, limit):
    found = enumeration.pattern_distribution(scheme)
    assert found == pytest.approx(enumeration.pattern_distribution(limit), abs=1e-12)
    r = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, scheme.iterations)), jnp.float32)
    ours, theirs = jax.jit(lambda r: (scheme.log_likelihood_ratios(r), limit.log_likelihood_ratios(r)))(r)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


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
    sizes = dict(dataset_size=100, batch_size=25, iterations=8)
    for make, message in (
        (lambda: EpochwiseAllocation(8, 3, 4), "min_separation must be at most epoch_steps 3"),
        (lambda: EpochwiseAllocation(8, 0), "epoch_steps must be"),
        (lambda: BalancedMinSep(8, 3, 3.5), "participations must be at most 3"),
        (lambda: BalancedMinSep(8, 3, 0), "participations must be"),
        (lambda: BalancedMinSep(8, 3, math.nan), "participations must be"),
        (
            lambda: BalancedMinSep.from_batch_size(**sizes | {"batch_size": 30}, min_separation=4),
            "participations must be at most 2",
        ),
    ):
        refused(message, make)
    assert EpochwiseAllocation.from_batch_size(**sizes, min_separation=2) == EpochwiseAllocation(8, 4, 2)
    assert EpochwiseAllocation.from_batch_size(**sizes | {"batch_size": 30}).epoch_steps == 4
    assert EpochwiseAllocation(9, 12, 2).min_separation == 12
    made = BalancedMinSep.from_batch_size(**sizes, min_separation=4)
    assert made == BalancedMinSep(8, 4, 2) and made.expected_batch_sizes(100).mean() == 25.0
    assert BalancedMinSep(9, 2, 0.5) == BalancedMinSep(9, 9, 0.5), "one participation has no distance"


def test_logarithms_of_binomials_that_bounds_depend_on():
    """Of exact integers, and rounded up by what gammaln may lose."""
    for n, k in ((10, 3), (2000, 1000), (2**20, 9)):
        with mpmath.workdps(40):
            above = rounding._log_choose(n, k) - mpmath.log(math.comb(n, k))
            parts = sum(mpmath.loggamma(size + 1) for size in (n, k, n - k))
            assert 0.5 < above / (2.0**-49 * parts) < 1.5
