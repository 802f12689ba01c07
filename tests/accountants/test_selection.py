"""The best of K runs against exact enumeration: distributions of K, the bound, and attacks on it."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from jaxacct.accountants import selection
from jaxacct.accountants.selection import (
    DISTRIBUTIONS,
    CertifiedProfile,
    NegativeBinomial,
    PoissonRuns,
    select_best,
    target_of_a_run,
    with_mean,
)

SHAPES = {"half": -0.5, "logarithmic": 0.0, "geometric": 1.0}


def stop_of(shape: float, mean: float) -> float:
    """The parameter gamma of that mean (Papernot and Steinke, definition 1)."""

    def excess(log):
        stop = math.exp(log)
        if shape == 0:
            return (1 / stop - 1) / -log - mean
        return shape * (1 - stop) / (stop * (1 - stop**shape)) - mean

    return math.exp(optimize.brentq(excess, -40, -1e-9, xtol=1e-14))


def generating(name: str, mean: float):
    """The probability generating function of K, in the paper's closed form."""
    if name == "poisson":
        return lambda z: np.exp(mean * (z - 1))
    shape, stop = SHAPES[name], stop_of(SHAPES[name], mean)
    if shape == 0:
        return lambda z: np.log1p(-(1 - stop) * z) / math.log(stop)
    return lambda z: ((1 - (1 - stop) * z) ** -shape - 1) / (stop**-shape - 1)


def masses_of(name: str, mean: float, size: int = 4000) -> np.ndarray:
    """P(K = k) for k below `size`: the series of the generating function, by ratios."""
    k = np.arange(size)
    if name == "poisson":
        return stats.poisson.pmf(k, mean)
    shape, going = SHAPES[name], 1 - stop_of(SHAPES[name], mean)
    first = going / -math.log1p(-going) if shape == 0 else shape * going / ((1 - going) ** -shape - 1)
    ratios = going * (k[1:-1] + shape) / (k[1:-1] + 1)
    return np.concatenate([[0.0, first], first * np.cumprod(ratios)])


def best_of(run: np.ndarray, of) -> np.ndarray:
    """Distribution of the best of K outcomes in ascending order, after that of none at all (K = 0)."""
    totals = np.minimum(np.concatenate([[0.0], np.cumsum(run)]), 1.0)
    return np.concatenate([[of(0.0)], np.diff(of(totals))])


def hockey(first, second, epsilon: float) -> float:
    return float(np.maximum(0.0, first - math.exp(epsilon) * second).sum())


def both(first, second, epsilon: float) -> float:
    return max(hockey(first, second, epsilon), hockey(second, first, epsilon))


def pairs(seed: int, count: int):
    """Random pairs of distributions on 2 to 6 outcomes in a random order, near and far, with tiny masses."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size = int(rng.integers(2, 7))
        first = rng.dirichlet(np.full(size, rng.choice([0.2, 1.0, 5.0])))
        second = first * np.exp(rng.normal(0, rng.choice([0.2, 1.0, 3.0]), size))
        yield first, second / second.sum()


GRID = (0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 2.5, 4.0)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("mean", [1.5, 6.0, 30.0])
def test_the_distribution_of_runs_is_the_one_of_the_paper(name, mean):
    """Masses, mean, slopes of the generating function."""
    runs, expected = with_mean(name, mean), masses_of(name, mean)
    found = np.zeros(60)
    for count, mass in runs.masses():
        if count >= len(found):
            break
        found[count] = mass
    np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-6, atol=1e-12)
    at, of = np.array([0.01, 0.2, 0.9, 1.0]), generating(name, mean)
    assert of(1.0) == pytest.approx(1) and of(0.5) == pytest.approx(expected @ 0.5 ** np.arange(4000))
    slopes = [optimize.approx_fprime([z], lambda z: of(z[0]), 1e-7)[0] for z in at - 1e-7]
    np.testing.assert_allclose(
        runs.log_slope_ratio(at[:3], at[1:]), np.diff(np.log(slopes)), rtol=1e-3, atol=1e-3
    )
    assert slopes[-1] == pytest.approx(mean, rel=1e-2)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_have_this_distribution(name):
    """Chi-square over bins with at least 20 expected draws, false alarms 1e-6 a distribution."""
    mean, draws = 4.0, 2000
    runs, expected = with_mean(name, mean), masses_of(name, mean) * draws
    drawn = np.array([runs.draw() for _ in range(draws)])
    edges = [0]
    while expected[edges[-1] :].sum() >= 40:
        stop = edges[-1] + 1
        while expected[edges[-1] : stop].sum() < 20:
            stop += 1
        edges.append(stop)
    edges[-1] = len(expected)
    counts = np.histogram(drawn, [*edges[:-1], max(edges[-1], drawn.max() + 1)])[0]
    means = [expected[low:high].sum() for low, high in itertools.pairwise(edges)]
    statistic = ((counts - means) ** 2 / means).sum()
    assert statistic < stats.chi2.isf(1e-6, len(means) - 1)
    wrong = masses_of(name, 2 * mean) * draws  # which would be seen
    away = [wrong[low:high].sum() for low, high in itertools.pairwise(edges)]
    assert ((np.array(away) - means) ** 2 / means).sum() > stats.chi2.isf(1e-6, len(means) - 1)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_pair_exceeds_the_bound(name):
    """Random pairs, both orders, bounds from one point of the profile and from all."""
    closest = 0.0
    for mean in (1.5, 8.0, 40.0):
        runs, of = with_mean(name, mean), generating(name, mean)
        for first, second in pairs(7, 20):
            best = best_of(first, of), best_of(second, of)
            assert best[0].sum() == pytest.approx(1, abs=1e-9)
            deltas = np.array([both(first, second, epsilon) for epsilon in GRID])
            for chosen in ([4], [6], list(range(len(GRID)))):
                profile = CertifiedProfile(np.array(GRID)[chosen], deltas[chosen])
                for each in (profile.delta(0.8), deltas[chosen].min()):
                    if each * mean >= 1 or each < deltas[chosen].min():
                        continue
                    found = select_best(profile, runs, max(each * mean * (1 + 1e-9), 1e-12))
                    truth = both(*best, found.epsilon)
                    assert truth <= found.delta + 1e-9
                    closest = max(closest, truth / found.delta)
    assert closest > 0.05  # the bound is not far from what some pair attains


def extreme(epsilon: float, top: float, middle: float):
    """A pair whose middle outcome is e^epsilon more likely under the first, the top one e^epsilon less."""
    first = np.array([0.0, middle * math.exp(epsilon), top * math.exp(-epsilon)])
    second = np.array([0.0, middle, top])
    for each in (first, second):
        each[0] = 1 - each.sum()
    return first, second


@pytest.mark.parametrize("name", ["half", "logarithmic", "geometric"])
def test_the_bound_is_attained(name):
    """(shape + 2) epsilon for a pure guarantee and many runs: the middle outcome needs nearly all of it."""
    epsilon, mean = 0.5, 400.0
    first, second = extreme(epsilon, 0.4, 1e-9)
    assert both(first, second, epsilon) < 1e-12
    middle = [best_of(each, generating(name, mean))[2] for each in (first, second)]
    found = select_best(CertifiedProfile([epsilon], [0.0]), with_mean(name, mean), 1e-12)
    needed = math.log(middle[0] / middle[1])
    shape = SHAPES[name]
    assert 0.97 * (shape + 2) * epsilon < needed <= found.epsilon <= (shape + 2) * epsilon + 1e-9


def test_a_fixed_number_of_runs_violates_the_bound_of_every_distribution():
    """All runs came out worst: under a fixed K that is e^(K epsilon) times as likely."""
    epsilon, runs = 1.0, 10
    likely = math.e / (1 + math.e)
    pair = np.array([likely, 1 - likely]), np.array([1 - likely, likely])
    for name in ("half", "logarithmic", "geometric"):
        found = select_best(CertifiedProfile([epsilon], [0.0]), with_mean(name, float(runs)), 1e-6)
        assert both(*(best_of(each, lambda z: z**runs) for each in pair), found.epsilon) > 0.01
        random = generating(name, float(runs))
        assert both(*(best_of(each, random) for each in pair), found.epsilon) <= 1e-6


def test_publishing_the_number_of_runs_violates_the_bound():
    """The pair (K, best): its divergence is the mean of that of the best of k."""
    likely = math.e / (1 + math.e)
    pair = np.array([likely, 1 - likely]), np.array([1 - likely, likely])
    found = select_best(CertifiedProfile([1.0], [0.0]), with_mean("logarithmic", 10.0), 1e-6)
    masses, total = masses_of("logarithmic", 10.0, 400), 0.0
    for count in range(1, 60):
        of = lambda z, power=count: z**power  # noqa: E731
        total += masses[count] * both(*(best_of(each, of) for each in pair), found.epsilon)
    assert total > 1e-3


RIGHT = NegativeBinomial.log_slope_ratio
MISTAKES = {
    "no ranking cost": lambda runs, at, to: 0.0 * to,
    "the slope of another shape": lambda runs, at, to: RIGHT(runs, at, to) * runs.shape / (runs.shape + 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_in_the_ranking_cost_are_seen(mistake, monkeypatch):
    middle = [best_of(each, generating("geometric", 400.0))[2] for each in extreme(0.5, 0.4, 1e-9)]
    monkeypatch.setattr(NegativeBinomial, "log_slope_ratio", MISTAKES[mistake])
    found = select_best(CertifiedProfile([0.5], [0.0]), with_mean("geometric", 400.0), 1e-12)
    assert math.log(middle[0] / middle[1]) > found.epsilon


def test_the_mean_number_of_runs_multiplies_delta():
    """An outcome that reveals the example, and is the best: without the factor the bound is violated."""
    delta, mean = 1e-4, 20.0
    first, second = np.array([1 - delta, delta]), np.array([1.0, 0.0])
    for name in DISTRIBUTIONS:
        found = select_best(CertifiedProfile([1.0], [delta]), with_mean(name, mean))
        truth = both(*(best_of(each, generating(name, mean)) for each in (first, second)), found.epsilon)
        assert 0.9 * mean * delta < truth <= found.delta


def test_a_mixture_of_candidates_has_the_worst_profile():
    """Candidates drawn uniformly: the divergence of the mixture is below the largest of theirs."""
    for (first, second), (other, last) in zip(pairs(1, 30), pairs(1, 30), strict=True):
        profiles = [
            CertifiedProfile(GRID, [both(*pair, epsilon) for epsilon in GRID])
            for pair in ((first, second), (other[::-1], last[::-1]))
        ]
        worst = CertifiedProfile.worst(profiles)
        mixed = (first + other[::-1]) / 2, (second + last[::-1]) / 2
        for epsilon in (0.0, 0.2, 0.9, 2.0):
            assert both(*mixed, epsilon) <= worst.delta(epsilon) + 1e-12


def test_what_points_imply_is_what_the_worst_pair_has():
    """One point: the pair with losses epsilon, -epsilon and infinite ones attains the implied profile."""
    epsilon, delta = 1.2, 0.05
    high, low = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    pair = np.array([delta, high, low, 0.0]), np.array([0.0, low, high, delta])
    profile = CertifiedProfile([epsilon], [delta])
    for other in (0.0, 0.4, 1.1, 1.2):
        assert profile.delta(other) == pytest.approx(both(*pair, other), rel=1e-9)
    assert profile.delta(2.0) == pytest.approx(delta)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_target_of_a_run_gives_the_target_of_the_best(name):
    runs = with_mean(name, 25.0)
    epsilon, delta = target_of_a_run(6.0, 1e-5, runs)
    found = select_best(CertifiedProfile([epsilon], [delta]), runs, 1e-5)
    assert 5.999 < found.epsilon <= 6.0


def test_a_failure_probability_counts_once():
    profile, runs = CertifiedProfile([1.0], [1e-6]), with_mean("logarithmic", 20.0)
    assert select_best(profile, runs, failure_probability=1e-7).delta == pytest.approx(20e-6 + 1e-7)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: with_mean("fixed", 3.0), "distribution must be one of"),
        (lambda: with_mean("logarithmic", 1.0), "mean_runs must be in"),
        (lambda: with_mean("logarithmic", math.nan), "mean_runs must be in"),
        (lambda: with_mean("logarithmic", 1e9), "mean_runs must be in"),
        (lambda: with_mean("poisson", 0.0), "mean_runs must be in"),
        (lambda: with_mean("poisson", True), "mean_runs must be in"),
        (lambda: NegativeBinomial(5.0, -1.0), "shape must be in"),
        (lambda: CertifiedProfile([1.0], [math.nan]), "delta must be in"),
        (lambda: CertifiedProfile([math.inf], [0.1]), "epsilon must be in"),
        (lambda: CertifiedProfile([], []), "at least one"),
        (lambda: CertifiedProfile([1.0, 2.0], [0.1]), "equally many"),
        (lambda: select_best(CertifiedProfile([1.0], [1e-3]), PoissonRuns(5.0), 1e-3), "delta must be at"),
        (lambda: select_best(CertifiedProfile([1.0], [0.3]), PoissonRuns(5.0)), "below 1"),
        (lambda: select_best(CertifiedProfile([90.0], [1e-9]), with_mean("geometric", 1e4)), "at most 100"),
        (lambda: target_of_a_run(1e-9, 1e-5, with_mean("geometric", 9.0)), "epsilon must be larger"),
    ],
)
def test_bad_numbers_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_quantiles_are_of_the_distribution():
    runs = with_mean("poisson", 30.0)
    assert [runs.quantile(share) for share in (0.05, 0.5, 0.95)] == [21, 30, 39]
    assert selection.PoissonRuns(30.0) == runs
