"""Distributions of participation against enumeration, printed claims that fail, and draws of the sampler."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct.accountants import tradeoff
from jaxacct.accountants.tradeoff import gdp_epsilon, mixture_delta, mixture_tradeoff, participation_pmf
from jaxacct.accountants.tradeoff.generalized_dpsgd import sampled_participation
from tests.oracles.chi_square import chi_square_p_value
from tests.refusals import refused


def hits(n, m, s, g):
    """{hit terms of each round: probability}, shuffled and independent, by all places of g records."""
    shuffled, one, share = Counter(), Counter(), Fraction(1, math.comb(n, g))
    for places in itertools.combinations(range(n), g):
        per_round = Counter(term // m for term in {place // s for place in places})
        shuffled[tuple(per_round[b] for b in range(n // (m * s)))] += share
        one[(per_round[0],)] += share
    return shuffled, one


def squares(distribution):
    """The distribution of c^2."""
    found = Counter()
    for terms, chance in distribution.items():
        found[sum(k * k for k in terms)] += chance
    return dict(sorted(found.items()))


def composed(one, rounds):
    """The distribution of the sum of independent rounds."""
    distribution = {0: Fraction(1)}
    for _ in range(rounds):
        after = Counter()
        for (y, p), (z, q) in itertools.product(distribution.items(), one.items()):
            after[y + z] += p * q
        distribution = dict(after)
    return dict(sorted(distribution.items()))


def assert_distribution(pmf, expected):
    assert list(pmf.squared_sensitivity) == list(expected)
    np.testing.assert_allclose(pmf.prob, [float(p) for p in expected.values()], rtol=1e-12)
    assert pmf.truncated_mass == 0


def test_both_kinds_by_enumeration():
    """One shuffled epoch, and some of independent rounds."""
    for n, m, s, g, epochs in [
        (12, 3, 2, 4, 1),
        (12, 1, 3, 3, 2),
        (12, 3, 1, 3, 1),
        (4, 1, 2, 2, 3),
        (6, 1, 6, 4, 2),
        (6, 6, 1, 6, 1),
        (8, 2, 2, 1, 2),
        (8, 1, 1, 8, 1),
    ]:
        shuffled, one = hits(n, m, s, g)
        assert_distribution(participation_pmf(n, m, s, 1, g, "shuffling"), squares(shuffled))
        expected = composed(squares(one), epochs * n // (m * s))
        assert_distribution(participation_pmf(n, m, s, epochs, g, "subsampling"), expected)


def test_printed_occupancy_distribution_fails():
    """Theorem F.1's q_j counts multisets as equally likely; it overstates privacy (errata)."""
    n, s, g = 4, 2, 2
    batches = n // s
    printed = {
        j: math.comb(batches, j) * math.comb(g - 1, j - 1) / math.comb(batches - 1 + g, g) for j in (1, 2)
    }
    assert printed == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert squares(hits(n, 1, s, g)[0]) == {1: Fraction(1, 3), 2: Fraction(2, 3)}
    # At N = 1000, s = 100, g = 4, sigma 2: delta(1) is .10233, the printed distribution says .08642.
    wrong = {j: math.comb(10, j) * math.comb(3, j - 1) / math.comb(13, 4) for j in range(1, 5)}
    distribution = tradeoff.ParticipationPMF(np.array(list(wrong)), np.array(list(wrong.values())))
    assert mixture_delta(1.0, distribution, 2.0) == pytest.approx(0.08642, abs=1e-5)
    true = mixture_delta(1.0, participation_pmf(1000, 1, 100, 1, 4, "shuffling"), 2.0)
    assert true == pytest.approx(0.1023300451, rel=1e-8)


def test_printed_hoeffding_tails_fail():
    """Theorem E.1 claims P(c^2 > (1 + 1/sqrt(2E)) E) <= e^-E; it is 0.198 at E = 10 (errata)."""
    pmf = participation_pmf(1000, 100, 1, 10, 1, "subsampling")
    cut = (1 + 1 / math.sqrt(20)) * 10
    assert pmf.tail(cut) == pytest.approx(0.1981788874, rel=1e-8) and pmf.tail(cut) > math.exp(-10)
    assert pmf.head((1 - 1 / math.sqrt(20)) * 10) == pytest.approx(0.20605, abs=1e-5)
    assert pmf.tail(25) == pytest.approx(4.09988e-6, rel=1e-5)
    big = participation_pmf(50000, 500, 1, 50, 1, "subsampling")
    assert big.tail((1 + 1 / 10) * 50) == pytest.approx(0.21447, abs=1e-5)
    printed = gdp_epsilon(1e-5, math.sqrt((1 + 0.1) * 50) / 2)
    assert printed == pytest.approx(22.0268, abs=1e-3)
    true = tradeoff.mixture_epsilon(1e-5, big, 2.0)
    assert true == pytest.approx(22.4524, abs=1e-3) and true > printed
    assert tradeoff.mixture_epsilon(1e-8, big, 2.0) == pytest.approx(28.602, abs=1e-3)


def test_groups_of_four():
    for m, s, sampling, one, ten in [
        (1, 500, "shuffling", 4.36343, 17.71041),
        (500, 1, "shuffling", 4.80945, 18.34597),
        (1, 500, "subsampling", 5.93181, 19.38137),
        (500, 1, "subsampling", 6.46938, 20.24673),
    ]:
        for epochs, expected in ((1, one), (10, ten)):
            run = tradeoff.GeneralDPSGD(50000, m, s, epochs, sampling, 4)
            assert run.epsilon(1e-5, 2.0) == pytest.approx(expected, abs=1e-4)
            assert run.epsilon(1e-5, 2.0) <= gdp_epsilon(1e-5, math.sqrt(run.most()) / 2.0)
            if m > 1:
                assert run.pmf().mean == pytest.approx(epochs * 4.1197623960, rel=1e-9)


def test_headline_numbers():
    for epochs, group, mu, epsilon in (
        (50, 1, 3.5355339059, 20.675508),
        (50, 4, 7.0710678119, 54.376639),
        (10, 1, 5**0.5 / 2**0.5, 7.511276),
    ):
        assert tradeoff.shuffled_batch_clip_mu(epochs, group, 2.0) == pytest.approx(mu, rel=1e-9)
        assert gdp_epsilon(1e-5, mu) == pytest.approx(epsilon, rel=1e-6)
    assert gdp_epsilon(1e-5, 4 * 3.5355339059) == pytest.approx(159.441486, rel=1e-6)
    assert gdp_epsilon(1e-5, 1.0) == pytest.approx(4.37718, abs=1e-4)
    assert gdp_epsilon(1e-5, 2.0) == pytest.approx(9.99726, abs=1e-4)
    assert gdp_epsilon(1e-5, math.sqrt(10)) == pytest.approx(17.85659, abs=1e-4)
    assert gdp_epsilon(1e-5, 2 * math.sqrt(10)) == pytest.approx(46.21121, abs=1e-4)
    sizes = dict(dataset_size=1000, num_microbatches=1, microbatch_size=100, num_epochs=50)
    assert tradeoff.calibrate_sigma(8.0, 1e-5, **sizes) == pytest.approx(4.24426047, rel=1e-8)
    assert tradeoff.calibrate_sigma(1.0, 1e-5, **sizes) == pytest.approx(26.379549, rel=1e-7)


def test_calibrated_sigma_meets_its_target_and_little_less_does_not():
    sizes = dict(dataset_size=1000, num_microbatches=4, microbatch_size=5, num_epochs=3)
    for sampling in ("shuffling", "subsampling"):
        sigma = tradeoff.calibrate_sigma(2.0, 1e-6, **sizes, group_size=3, sampling=sampling)
        pmf = participation_pmf(*sizes.values(), 3, sampling)
        assert mixture_delta(2.0, pmf, sigma) <= 1e-6 < mixture_delta(2.0, pmf, sigma * (1 - 1e-9))


def test_truncated_mass_is_delta():
    distribution = tradeoff.ParticipationPMF(np.array([1]), np.array([1 - 1e-6]), 1e-6)
    assert mixture_delta(50.0, distribution, 1.0) == pytest.approx(1e-6, rel=1e-6)
    refused("truncated mass", tradeoff.mixture_epsilon, 1e-7, distribution, 1.0)
    long = participation_pmf(2000, 20, 1, 40, 3, "subsampling")
    assert 0 < long.truncated_mass < 1e-20 and abs(long.prob.sum() - 1) < 1e-9


@pytest.mark.parametrize("sampling", ["shuffling", "subsampling"])
def test_draws_follow_the_distribution(key, sampling):
    """A chi-square test at false alarm 1e-6; the printed distribution of the m = 1 case would fail it."""
    pmf = participation_pmf(12, 3, 2, 1, 4, sampling)
    drawn = np.asarray(tradeoff.sample_participation(key, 12, 3, 2, 1, 4, sampling, 20000))
    law = {(y,): p for y, p in zip(pmf.squared_sensitivity.tolist(), pmf.prob, strict=True)}
    assert chi_square_p_value(drawn[:, None], law) > 1e-6


def test_large_data_sets_are_drawn_without_memory(key):
    drawn = tradeoff.sample_participation(key, 2_000_000_000, 1, 1000, 1, 3, "shuffling", 100)
    assert (np.asarray(drawn) == 3).all() or (np.asarray(drawn) >= 2).all()
    assert jax.device_get(drawn).dtype == np.int32


def thinned(distribution, m, least):
    """{(hit terms of each round): probability}, every term of every round kept by a coin."""
    found = Counter()
    for hits, p in distribution.items():
        for kept in itertools.product(*[itertools.product((0, 1), repeat=m) for _ in hits]):
            counts = [
                sum(coins[:k]) if sum(coins) >= least else 0 for coins, k in zip(kept, hits, strict=True)
            ]
            found[sum(k * k for k in counts)] += p * Fraction(1, 2 ** (m * len(hits)))
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("n", "m", "s", "g", "least"), [(4, 1, 2, 2, 1), (8, 2, 2, 3, 1), (8, 2, 2, 3, 2), (6, 3, 1, 3, 2)]
)
def test_filtered_distributions_by_enumeration(n, m, s, g, least):
    """All places of the group and all coins, one epoch shuffled and one of independent rounds."""
    (shuffled, one), sizes = hits(n, m, s, g), (n, m, s, 1, g)
    found = tradeoff.filtered_participation_pmf(*sizes, "shuffling", min_kept=least)
    assert_distribution(found, thinned(shuffled, m, least))
    expected = composed(thinned(one, m, least), n // (m * s))
    assert_distribution(tradeoff.filtered_participation_pmf(*sizes, "subsampling", min_kept=least), expected)
    # Fewer terms count than without coins, and fewer still where rounds are skipped.
    assert found.mean < participation_pmf(*sizes, "shuffling").mean


def test_half_of_mu_is_no_bound_for_filtered_batches():
    """G_{c / (2 sigma)}, the heuristic of appendix D, promises less than one record costs at small delta."""
    pmf, sigma = tradeoff.filtered_participation_pmf(1000, 1, 100, 4, 1, "shuffling"), 1.0
    assert pmf.squared_sensitivity.tolist() == [0, 1, 2, 3, 4] and pmf.mean == 2
    np.testing.assert_allclose(pmf.prob, stats.binom.pmf(np.arange(5), 4, 0.5), rtol=1e-12)
    full, half = 2 / sigma, 1 / sigma
    assert tradeoff.gdp_delta(4.0, half) < mixture_delta(4.0, pmf, sigma) < tradeoff.gdp_delta(4.0, full)


def test_the_largest_is_the_largest_of_the_distribution():
    for n, m, s, g in [(6, 2, 1, 2), (6, 1, 2, 2), (8, 2, 2, 3), (6, 3, 1, 2), (4, 1, 1, 3)]:
        for sampling in ["shuffling", "subsampling"]:
            run = tradeoff.GeneralDPSGD(n, m, s, 2, sampling, g)
            assert run.most() == max(run.pmf().squared_sensitivity)


def test_printed_numbers_of_the_distributions():
    pmf = participation_pmf(12, 3, 2, 1, 4, "shuffling")
    expected = {2: (1, 55), 4: (2, 165), 5: (24, 55), 8: (16, 55), 9: (8, 165), 10: (32, 165)}
    assert_distribution(pmf, {y: Fraction(*p) for y, p in expected.items()})
    from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import round_hits

    assert round_hits(12, 3, 2, 4) == [Fraction(1, 33), Fraction(1, 3), Fraction(17, 33), Fraction(4, 33)]
    q = 1 - float(round_hits(50000, 1, 500, 4)[0])
    assert q == pytest.approx(0.0394051544, rel=1e-8) and 100 * q == pytest.approx(3.9405154413, rel=1e-9)
    assert 100 * (1 - float(round_hits(1000, 1, 10, 5)[0])) == pytest.approx(4.9106294283, rel=1e-6)


def test_mixture_numbers():
    pmf = participation_pmf(1000, 1, 100, 1, 4, "shuffling")
    np.testing.assert_allclose(pmf.prob, [0.000947, 0.061760, 0.430257, 0.507037], atol=6e-7)
    assert pmf.mean == pytest.approx(3.4433833375, rel=1e-9)
    assert mixture_tradeoff(0.1, pmf, 2.0) == pytest.approx(0.6389498589, rel=1e-9)
    alphas = np.linspace(0, 1, 21)
    assert (mixture_tradeoff(alphas, pmf, 2.0) >= tradeoff.Gaussian(1.0)(alphas) - 1e-12).all()
    five = participation_pmf(1000, 1, 100, 5, 4, "shuffling")
    assert five.mean == pytest.approx(17.2169166873, rel=1e-10)
    assert mixture_delta(1.0, five, 2.0) == pytest.approx(0.5347233856, rel=1e-9)
    assert mixture_tradeoff(0.1, five, 2.0) == pytest.approx(0.2148382892, rel=1e-8)
    cap = tradeoff.Gaussian(math.sqrt(20) / 2)
    assert cap.delta(1.0) == pytest.approx(0.5890996662, rel=1e-9)
    assert cap(0.1) == pytest.approx(0.1699111529, rel=1e-9)


def test_zero_atom():
    distribution = tradeoff.ParticipationPMF(np.array([0, 1]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(
        mixture_tradeoff([0.1, 0.2, 0.5, 0.9], distribution, 1.0),
        [0.7185395861, 0.6085375387, 0.3085375387, 0.0163826432],
        rtol=1e-8,
    )
    assert mixture_tradeoff(0.0, distribution, 1.0) == 1 and mixture_tradeoff(1.0, distribution, 1.0) == 0
    assert mixture_delta(0.5, distribution, 1.0) == pytest.approx(
        0.5 * tradeoff.gdp_delta(0.5, 1.0), rel=1e-12
    )


def test_monte_carlo_twin(key, monkeypatch):
    args = (1000, 1, 100, 5, 4, "shuffling")
    pmf = participation_pmf(*args)
    true, deltas = (
        mixture_delta(1.0, pmf, 2.0),
        tradeoff.gdp_delta(1.0, np.sqrt(pmf.squared_sensitivity) / 2.0),
    )
    estimate, upper = tradeoff.mc_mixture_delta(key, 1.0, 2.0, *args, num_samples=20_000)
    assert abs(estimate - true) < 4 * math.sqrt(pmf.prob @ (deltas - true) ** 2 / 20_000) + 1e-12
    assert estimate < upper < true + 0.01 and upper > true
    # The bound includes the relative error of the probabilities of samples.
    monkeypatch.setattr(sampled_participation, "draw_error", lambda run: 0.5)
    assert tradeoff.mc_mixture_delta(key, 1.0, 2.0, *args, num_samples=20_000)[1] == pytest.approx(
        1.5 * upper
    )
