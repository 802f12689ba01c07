"""Participation at every two steps, of accountants' samples and real batches, against exact distributions.

False alarm 1e-6 a test: exact binomial tails of every count at every pair of steps, Bonferroni. A probability
of a pair that has an error of 3 % (200,000 samples, probability 0.01) is noticed.
"""

import itertools

import jax
import numpy as np
import pytest

import jaxacct as ja
from tests.draws import drawn_by
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.enumeration import pattern_distribution
from tests.oracles.pair_distributions import batch_size_distributions, min_p_value, pair_distributions
from tests.oracles.settings import slow, slow_but
from tests.schemes.test_truncated_b_min_sep import truncated_sums
from train.batches.graph import from_edges
from train.batches.sampler import Sampler

N = 24
# Runs of many times the separation, warm and cold.
SCHEMES = [
    ja.BMinSep(N, 5, 0.2),
    ja.Poisson(N, 0.15),
    ja.CyclicPoisson(N, 5, 0.6),
    ja.BallsInBins(N, 5),
    ja.BMinSep(N, 5, 0.2, False),
    ja.MultiAttribution(N, 4, 0.1, 3),
    ja.MultiAttribution(N, 4, 0.1, 3, False),
    ja.IndependentAttribution(N, 4, 0.15, 2),
    ja.TruncatedBMinSep(N, 5, 0.2, 12, 60),
]


def exact(scheme):
    return pair_distributions(getattr(scheme, "untruncated", scheme))


@pytest.mark.parametrize("scheme", slow_but({0}, SCHEMES), ids=str)
def test_pairs_of_the_accountants_samples(scheme, key):
    drawn = np.asarray(jax.jit(lambda key: scheme.draw_participation(key, 200_000))(key))
    assert min_p_value(drawn, exact(scheme)) > FALSE_ALARM


def test_a_wrong_distribution_of_pairs_is_noticed(key):
    """Another probability by 3 %, and a cold start for a warm one."""
    drawn = np.asarray(jax.jit(lambda key: SCHEMES[0].draw_participation(key, 200_000))(key))
    for wrong in (
        ja.BMinSep(N, 5, 0.206),
        SCHEMES[4],
        ja.CyclicPoisson(N, 5, SCHEMES[0].participation_rate * 5),
    ):
        assert min_p_value(drawn, pair_distributions(wrong)) < FALSE_ALARM


@pytest.mark.parametrize("scheme", [SCHEMES[i] for i in (0, 2, 4, 5, 7)], ids=str)
def test_pairs_of_real_batches(scheme):
    """20,000 units in ten runs; users have examples of their own. Coins of ineligible users count, too."""
    units, each = 2000, scheme.examples_per_unit
    graph = None
    if scheme.unit == "user":
        owners = np.repeat(np.arange(units), each)
        graph = from_edges(owners, np.arange(each * units), dataset_size=each * units)
    drawn = []
    for run in range(10):
        size = units * each
        joined = drawn_by(Sampler(scheme, size, size, (run, 7, 7, 7), graph=graph), size)
        assert joined.max() <= 1
        drawn.append(joined.reshape(units, each, -1).sum(axis=1))
    distributions = pair_distributions(scheme, restarting=scheme.name == "multi-attribution")
    assert min_p_value(np.concatenate(drawn), distributions) > FALSE_ALARM


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        (ja.TruncatedBMinSep(3, 2, 0.5, 1, 3), 1),
        (ja.BMinSep(3, 2, 0.6), 2),
        slow(ja.Poisson(3, 0.5), 1),
        slow(ja.CyclicPoisson(3, 2, 0.7), 1),
    ],
    ids=str,
)
def test_truncated_batches_follow_the_distribution_of_all_subsets(scheme, most):
    """By the scheme itself, or by a plan that books what truncation costs; 3,000 runs of three examples."""
    codes = np.array([1, 2, 4])  # whose sum says which examples are in a batch
    distribution = truncated_sums(
        getattr(scheme, "untruncated", scheme), most, [[code] * 3 for code in codes]
    )
    samplers = (Sampler(scheme, 3, most, (run, 9, 9, 9), truncate=True) for run in range(3000))
    drawn = [codes @ drawn_by(sampler, 3) for sampler in samplers]
    assert chi_square_p_value(np.array(drawn), distribution) > FALSE_ALARM


@pytest.mark.parametrize(
    "scheme",
    [ja.BMinSep(5, 3, 0.3), ja.MultiAttribution(4, 2, 0.3, 2), ja.IndependentAttribution(4, 3, 0.4, 2)],
    ids=str,
)
def test_two_ways_to_the_exact_distribution_agree(scheme):
    """Chains against enumeration of all vectors."""
    distributions = pair_distributions(scheme)
    found = np.zeros_like(distributions)
    for vector, weight in pattern_distribution(scheme).items():
        for s, t in itertools.combinations(range(len(vector)), 2):
            found[s, t, vector[s], vector[t]] += weight
    np.testing.assert_allclose(distributions, found, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_pairs_of_batch_sizes(warm, key):
    """What the adversary sees of batches that are truncated: sizes at two steps, 14 others."""
    scheme = ja.TruncatedBMinSep(12, 4, 0.3, 6, 15, warm)
    drawn = np.asarray(jax.jit(lambda key: scheme.side_information.draw(key, 200_000))(key))
    assert min_p_value(drawn, batch_size_distributions(scheme.untruncated, 14)) > FALSE_ALARM
