"""Epochwise allocation: likelihoods, samplers and batches against enumeration of all patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxacct import BallsInBins, BMinSep, EpochwiseAllocation
from tests.oracles import enumeration
from tests.schemes.test_schemes import FALSE_ALARM, chi_square_p_value

# n is a multiple of nothing; b = 1; b = M - 1; one participation.
DISTRIBUTIONS = [
    EpochwiseAllocation(8, 3, 2),
    EpochwiseAllocation(8, 4, 3),
    EpochwiseAllocation(7, 3, 1),
    EpochwiseAllocation(8, 3, 3),
    EpochwiseAllocation(5, 7),
]


def small(steps):
    """Every separation and every length of an epoch."""
    for n in steps:
        for M in range(1, n + 2):
            yield from (EpochwiseAllocation(n, M, b) for b in range(1, M + 1))


@pytest.mark.parametrize("steps", [(1, 3), pytest.param((2, *range(4, 9)), marks=pytest.mark.slow)])
def test_likelihoods_of_all_patterns(steps, x64):
    rng, schemes = np.random.default_rng(0), list(small(steps))
    ratios = [rng.normal(0, 5, (2, scheme.iterations)) for scheme in schemes]

    @jax.jit  # one program for all
    def run(ratios):
        return [scheme.log_likelihood_ratios(r) for scheme, r in zip(schemes, ratios, strict=True)]

    for ours, r, scheme in zip(run(ratios), ratios, schemes, strict=True):
        distribution = enumeration.pattern_distribution(scheme)
        patterns, weights = np.array(list(distribution), float), np.array(list(distribution.values()))
        np.testing.assert_allclose(weights @ patterns, scheme.participation_rate, rtol=1e-12)
        np.testing.assert_allclose(ours, np.log(np.exp(r @ patterns.T) @ weights), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scheme", DISTRIBUTIONS[1::3], ids=str)
def test_drawn_patterns_and_batches(scheme, key):
    """All patterns, hence all marginals and pairs: what the accountant draws, and what a trainer does."""
    distribution = enumeration.pattern_distribution(scheme)
    drawn = np.array(jax.jit(lambda k: scheme.draw_participation(k, 40_000))(key))
    assert chi_square_p_value(drawn, distribution) > FALSE_ALARM
    generator = np.random.default_rng(0)
    batches = scheme.batches(40_000, generator)
    for step in range(scheme.iterations):
        drawn[:, step] = np.bincount(batches.draw(step, generator), minlength=len(drawn))
    assert chi_square_p_value(drawn, distribution) > FALSE_ALARM
    if scheme.max_participations > 1:
        wrong = enumeration.pattern_distribution(BMinSep(scheme.iterations, 1, scheme.participation_rate))
        assert chi_square_p_value(drawn, wrong) < FALSE_ALARM


def test_a_kernel_with_another_hazard_is_rejected(key):
    """The next place uniform among the eligible ones: marginals are then not uniform."""
    M, b = 4, 3
    drawn = np.asarray(jax.jit(lambda k: EpochwiseAllocation(8, M, b).draw_positions(k, 40_000))(key))
    pairs = np.zeros((M, M))
    np.add.at(pairs, (drawn[:, 0], drawn[:, 1] - M), 1)
    eligible = np.add.outer(-np.arange(M), np.arange(M)) >= b - M
    uniform = eligible / eligible.sum(axis=1, keepdims=True) / M * len(drawn)
    statistic = (np.square(pairs - uniform)[eligible] / uniform[eligible]).sum()
    assert pairs[~eligible].sum() == 0
    assert stats.chi2.sf(statistic, eligible.sum() - 1) < FALSE_ALARM


def test_marginals_of_a_long_run(key):
    """Every step has the same probability; steps of one example exclude each other, so counts vary less."""
    scheme, num = EpochwiseAllocation(1000, 240, 64), 100_000
    steps = np.asarray(jax.jit(lambda k: scheme.draw_positions(k, num))(key))
    gaps = np.diff(steps)
    assert steps.min() >= 0 and gaps[steps[:, 1:] < 1000].min() >= 64
    observed = np.bincount(np.minimum(steps, 1000).ravel(), minlength=1001)[:1000]
    expected = num * scheme.participation_probabilities()
    assert stats.chi2.sf(np.square(observed - expected) @ (1 / expected), 999) > FALSE_ALARM
    assert (steps // 240 == np.arange(5)).all()


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [
        (EpochwiseAllocation(8, 3, 3), BallsInBins(8, 3)),
        (EpochwiseAllocation(5, 8, 2), BallsInBins(5, 8)),
    ],
)
def test_limits(scheme, limit):
    found = enumeration.pattern_distribution(scheme)
    assert found == pytest.approx(enumeration.pattern_distribution(limit), abs=1e-12)
    r = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, scheme.iterations)), jnp.float32)
    ours, theirs = jax.jit(lambda r: (scheme.log_likelihood_ratios(r), limit.log_likelihood_ratios(r)))(r)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bad_input():
    for make, message in (
        (lambda: EpochwiseAllocation(8, 3, 4), "min_separation must be at most epoch_steps 3"),
        (lambda: EpochwiseAllocation(8, 0), "epoch_steps must be"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    sizes = dict(dataset_size=100, batch_size=25, iterations=8)
    assert EpochwiseAllocation.from_batch_size(**sizes, min_separation=2) == EpochwiseAllocation(8, 4, 2)
    assert EpochwiseAllocation.from_batch_size(**sizes | {"batch_size": 30}).epoch_steps == 4
    assert EpochwiseAllocation(9, 12, 2).min_separation == 12
