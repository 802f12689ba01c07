"""Concentration bounds: exact checks where possible, else simulations of stated false alarm."""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from jaxacct.statistics import bounds
from jaxacct.statistics.bounds import TERM_EDGES, Budget, bin_terms
from jaxacct.statistics.hockey_stick import checked_counts
from tests.draws import mean_interval
from tests.oracles.settings import slow
from tests.refusals import refused

FALSE_ALARM = 1e-6  # of each simulated check, over the choice of its (fixed) seed


def coins(heads: int, tails: int) -> np.ndarray:
    counts = np.zeros(len(TERM_EDGES), np.int64)
    counts[-1], counts[0] = heads, tails
    return counts


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_terms_are_rounded_up_and_by_little(dtype):
    rng = np.random.default_rng(0)
    terms = np.concatenate([10 ** rng.uniform(-320, 0, 3000), 2.0 ** -rng.uniform(0, 41, 50_000)])
    near = np.concatenate([np.nextafter(TERM_EDGES, 0), TERM_EDGES, np.nextafter(TERM_EDGES, 1)])
    terms = np.concatenate([terms, near, [0.0, -0.0, 1.0, 5e-324]]).astype(dtype)
    exact = np.searchsorted(TERM_EDGES, terms.astype(float), side="left")
    np.testing.assert_array_equal(bin_terms(terms), np.bincount(exact, minlength=len(TERM_EDGES)))
    edges = TERM_EDGES[exact]
    assert np.all(edges >= terms)
    large = terms >= 2.0**-40
    assert np.all(edges[large] <= 1.0055 * terms[large])
    assert np.all(edges[~large & (terms > 0)] == 2.0**-40)
    assert bin_terms(terms).dtype == np.int64


def test_edges():
    assert TERM_EDGES[0] == 0 and TERM_EDGES[1] == 2.0**-40 and TERM_EDGES[-1] == 1
    assert np.all(np.diff(TERM_EDGES) > 0)
    np.testing.assert_array_equal(bin_terms(TERM_EDGES), 1)
    assert bin_terms([]).sum() == 0


def test_mean_upper():
    terms = np.random.default_rng(1).random(1000)
    assert terms.mean() <= bounds.mean_upper(bin_terms(terms)) <= 1.0055 * terms.mean()
    assert bounds.mean_upper(coins(1, 3)) == 0.25
    assert bounds.mean_upper(coins(0, 3)) == 0
    refused("counts must hold", lambda: bounds.mean_upper(coins(0, 0)))


def test_terms_and_counts_are_checked():
    for bad in (-1e-9, 1.0000001, math.nan, math.inf):
        refused(r"terms must be in \[0, 1\]", bin_terms, [0.5, bad])
    for counts in (np.ones(3, int), np.ones(len(TERM_EDGES)), -coins(1, 0)):
        refused("counts must be", bounds.mean_upper, counts)


@pytest.mark.parametrize("b", [1e-12, 1e-6, 0.2, 0.5, 0.999])
def test_kl_against_forty_digits(b):
    for ratio in (0, 1e-3, 0.5, 0.99, 1 - 1e-6, 1, 1 + 1e-9, 1.001):
        a = b * ratio
        with mpmath.workdps(60):
            x, y = mpmath.mpf(a), mpmath.mpf(b)
            exact = (x * mpmath.log(x / y) if x else 0) + (1 - x) * mpmath.log((1 - x) / (1 - y))
        assert bounds.kl(a, b) == pytest.approx(float(exact), rel=1e-9, abs=0), ratio


def test_kl_at_the_ends():
    assert bounds.kl(0, 0) == bounds.kl(1, 1) == 0
    assert bounds.kl(0, 1) == bounds.kl(1, 0) == bounds.kl(0.5, 0) == bounds.kl(0.5, 1) == math.inf
    assert bounds.kl(1, 0.25) == pytest.approx(math.log(4))
    refused("must be in", bounds.kl, -0.1, 0.5)


# (samples, theta / mean, mean, bound): numbers of the peer's tests.
OF_THE_PEER = [(100, 1, 0.5, 1), (3, 2, 1 / 3, 1 / 2), (6, 2, 1 / 3, 1 / 4), (2, 3, 1 / 4, 1 / 3)]
OF_THE_PEER += [(4, 3, 1 / 4, 1 / 9)]


def test_fixed_rule_against_the_exact_binomial():
    """Coins of mean theta are the worst of all terms, and for them wrong acceptance is exact."""
    for theta in [0.9, 0.5, 0.1, 0.01, 1e-4]:
        for samples in [1, 5, 40, 300, 5000]:
            heads = np.arange(samples + 1)
            ours = [bounds.failure_probability(theta=theta, mean=k / samples, samples=samples) for k in heads]
            assert np.all(stats.binom.cdf(heads, samples, theta) <= np.array(ours) * (1 + 1e-9))
    # A threshold at or above the scale needs no samples.
    assert bounds.failure_probability(theta=1.0, mean=1.0, samples=0) == 0
    for samples, tau, mean, bound in OF_THE_PEER:
        ours = bounds.failure_probability(theta=tau * mean, mean=mean, samples=samples)
        assert ours == pytest.approx(bound, rel=1e-12)


def test_budget():
    for fraction in [0.5, 0.01, 1e-6]:
        for delta in [0.3, 1e-5, 1e-8, 1e-15]:
            budget = Budget.split(delta, fraction)
            assert budget.total <= delta
            assert budget.total == pytest.approx(delta, rel=1e-14)
            assert budget.failure_probability == pytest.approx(fraction * delta)
            assert Budget(budget.delta, budget.delta_v, budget.failure_probability) == budget
            refused("delta must be at least", Budget, delta, delta, budget.failure_probability)
            refused("failure_fraction must be in", Budget.split, delta, 1.0)
            refused(r"delta must be in \(0, 1\)", Budget.split, 1.0)


def chance_of_ever_accepting(accepts, mean, horizon, every=1):
    """Exact for coins: the verdict depends on (tosses, heads) alone and is lost with more heads."""
    alive, accepted, limit = np.zeros(horizon + 2), 0.0, -1
    alive[0] = 1.0
    for n in range(1, horizon + 1):
        alive[1:] = alive[1:] * (1 - mean) + alive[:-1] * mean
        alive[0] *= 1 - mean
        if n % every == 0:
            while limit < n and accepts(coins(limit + 1, n - limit - 1)):
                limit += 1
            accepted += alive[: limit + 1].sum()
            alive[: limit + 1] = 0
    return accepted


@pytest.mark.parametrize("theta", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("q", [0.2, 0.05, 0.005])
def test_anytime_rule_by_dynamic_programming(theta, q):
    """P(ever accept within 2000 coins of mean theta), exactly: at most q, at least q/3.

    The lower end is what a rule that forgets log(1/q), or bets against the wrong mean, cannot pass.
    """
    bets, weights = bounds.default_bets(theta, coins(round(300 * theta), 1000 - round(300 * theta)))

    def rule(counts):
        return bounds.accepts(counts, theta, q, bets, weights)

    assert q / 3 <= chance_of_ever_accepting(rule, theta, 2000) <= q


def test_a_stolen_pilot_would_break_it():
    """Bets chosen on the tested terms themselves fail, exactly: hence the independent pilot."""
    theta, q = 0.1, 0.05

    def rule(counts):
        return bounds.accepts(counts, theta, q, bounds.default_bets(theta, counts)[0][:1], np.ones(1))

    assert chance_of_ever_accepting(rule, theta, 4000, every=20) > 1.5 * q


DISTRIBUTIONS = {  # draws of mean theta
    "uniform": lambda rng, theta, shape: (rng.random(shape) < 2 * theta) * rng.random(shape),
    "beta": lambda rng, theta, shape: rng.beta(2, 2 / theta - 2, shape),
    "two values": lambda rng, theta, shape: 0.3 * (rng.random(shape) < theta / 0.3),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("pilot", [True, False])
@pytest.mark.parametrize("runs", [500, slow(2000)])
def test_anytime_rule_on_terms_that_are_not_coins(distribution, pilot, runs):
    """At mean theta, tested five times: wrong runs are Binomial(runs, <= q)."""
    rng, theta, q, wrong = np.random.default_rng(6), 0.1, 0.05, 0
    draws = DISTRIBUTIONS[distribution](rng, 0.8 * theta, 500)
    bets, weights = bounds.default_bets(theta, bin_terms(draws) if pilot else None)
    for _ in range(runs):
        counts = np.zeros(len(TERM_EDGES), np.int64)
        for _ in range(5):
            counts += bin_terms(DISTRIBUTIONS[distribution](rng, theta, 80))
            if bounds.accepts(counts, theta, q, bets, weights):
                wrong += 1
                break
    assert wrong <= stats.binom.isf(FALSE_ALARM, runs, q)
    counts = bin_terms(DISTRIBUTIONS[distribution](rng, theta / 2, 5000))
    assert bounds.accepts(counts, theta, q, bets, weights)


@pytest.mark.parametrize("theta", [0.9, 0.4, 1e-3])
def test_wealth_is_the_product(theta):
    rng = np.random.default_rng(1)
    terms = TERM_EDGES[rng.integers(0, len(TERM_EDGES), 300)]
    bets, weights = np.array([0.3, 0.8, 1.0]), np.array([0.2, 0.3, 0.4])
    products = np.prod(1 + bets[:, None] * (theta - terms) / (1 - theta), axis=1)
    ours = bounds.log_wealth(bin_terms(terms), theta, bets, weights)
    assert ours == pytest.approx(np.log(weights @ products), rel=1e-10)
    raw = terms * rng.uniform(0.99, 1, 300)  # rounding up never raises the wealth
    products = np.prod(1 + bets[:, None] * (theta - raw) / (1 - theta), axis=1)
    assert bounds.log_wealth(bin_terms(raw), theta, bets, weights) <= np.log(weights @ products)


def test_wealth_at_the_edges():
    bets, weights = bounds.default_bets()
    assert weights.sum() == pytest.approx(1) and bets[-1] == 1
    assert bounds.log_wealth(coins(0, 0), 0.1, bets, weights) == pytest.approx(0, abs=1e-12)
    assert bounds.log_wealth(coins(5, 0), 1.0, bets, weights) == math.inf
    assert bounds.accepts(coins(5, 0), 2.5, 1e-9, bets, weights)
    assert bounds.log_wealth(coins(1, 9), 0.1, [1.0], [1.0]) == -math.inf  # all-in, and hit
    assert bounds.log_wealth(coins(0, 99), 0.0, bets, weights) == pytest.approx(0, abs=1e-12)
    assert bounds.log_wealth(coins(0, 99), 0.1, [], []) == -math.inf
    # Nothing is hit: ln(1/q)/theta terms, and what the mixture costs.
    theta, q = 1e-9, 1e-10
    least = math.log(1 / q) / theta
    assert bounds.accepts(coins(0, round(1.18 * least)), theta, q, bets, weights)
    assert not bounds.accepts(coins(0, round(0.99 * least)), theta, q, bets, weights)
    bets, weights = bounds.default_bets(theta, coins(0, 10**11))
    assert bounds.accepts(coins(0, round(1.05 * least)), theta, q, bets, weights)


@pytest.mark.parametrize("heads", [0, 7, 1000])
@pytest.mark.parametrize("theta", [1e-6, 0.01, 0.3])
def test_float_wealth_never_exceeds_the_exact_one(heads, theta):
    bets, weights = bounds.default_bets()
    tails = round(heads / theta * 2) + 1000
    with mpmath.workdps(60):
        x, total = mpmath.mpf(theta), mpmath.mpf(0)
        for f, w in zip(map(mpmath.mpf, bets), map(mpmath.mpf, weights), strict=True):
            total += w * (1 - f) ** heads * (1 + f * x / (1 - x)) ** tails
        exact = float(mpmath.log(total))
    ours = bounds.log_wealth(coins(heads, tails), theta, bets, weights)
    assert exact - 1e-9 * (1 + tails * theta) <= ours <= exact


@pytest.mark.parametrize(
    ("bets", "weights"),
    [([1.1], [1.0]), ([-0.1], [1.0]), ([math.nan], [1.0]), ([0.5], [1.1]), ([0.5], [0.5, 0.5])]
    + [([0.5, 0.5], [1.5, -0.5])],
)
def test_bets_outside_are_refused(bets, weights):
    """Such bets would not be a supermartingale: a tampered record must not pass."""
    with pytest.raises(ValueError):
        bounds.log_wealth(coins(1, 1), 0.1, bets, weights)


def test_predicted_samples():
    pilot, q = coins(50, 9950), 1e-8
    predicted = bounds.predicted_samples(0.01, pilot, q)
    assert predicted == pytest.approx(math.log(2 / q) / bounds.kl(0.005, 0.01), rel=1e-6)
    bets, weights = bounds.default_bets(0.01, pilot)
    for factor, verdict in ((1.05, True), (0.95, False)):
        s = round(factor * predicted / 200) * 200
        assert bounds.accepts(coins(s // 200, s - s // 200), 0.01, q, bets, weights) == verdict
    assert bounds.predicted_samples(0.004, pilot, q) == math.inf
    assert bounds.predicted_samples(0.01, coins(0, 0), q) == math.inf
    assert bounds.predicted_samples(1.0, pilot, q) == 0
    assert bounds.predicted_samples(1e-9, coins(0, 10), q) == pytest.approx(math.log(2 / q) / 1e-9, rel=1e-6)


@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, "coin", "zero"])
def test_confidence_bounds_cover(distribution):
    """400 bounds a side at q = 0.01: misses are Binomial(400, <= 0.01)."""
    rng, mean, q = np.random.default_rng(3), 0.05, 0.01
    draw = DISTRIBUTIONS.get(distribution, lambda rng, theta, shape: rng.random(shape) < theta)
    mean = 0.0 if distribution == "zero" else mean
    high_misses = low_misses = 0
    for i in range(400):
        terms = np.zeros(300) if distribution == "zero" else draw(rng, mean, 300).astype(float)
        counts = bin_terms(terms)
        # By monotonicity the bounds miss exactly when the tests at the true mean reject it.
        high_missed = bounds.accepts(counts, mean, q, *bounds.default_bets())
        low_missed = bounds.hopeless(counts, mean, q)
        high_misses, low_misses = high_misses + high_missed, low_misses + low_missed
        if i < 20:
            low, high = mean_interval(counts, 2 * q)
            assert 0 <= low <= terms.mean() <= high <= 1
            assert high == bounds.upper_confidence_bound(counts, (1 - (1 - 2 * q)) / 2)
            assert (high < mean) == high_missed and (low > mean) == low_missed
    assert max(high_misses, low_misses) <= stats.binom.isf(FALSE_ALARM, 400, q)


@pytest.mark.parametrize("q", [1e-9, 0.05, 0.999])
def test_ends_of_intervals_are_those_of_a_bisection(q, monkeypatch):
    """From the accepted side of each, in few looks: few draws, many, terms of 0 and of 1 alone, rare ones."""
    looks = []
    mixture = bounds._log_mixture
    monkeypatch.setattr(bounds, "_log_mixture", lambda *given: looks.append(1) or mixture(*given))
    mixed = bin_terms(np.random.default_rng(5).random(700) ** 9)
    for counts in (coins(0, 1), coins(10_000, 0), coins(1, 10**12), coins(500, 9500), mixed):
        low, high = bounds.lower_confidence_bound(counts, q), bounds.upper_confidence_bound(counts, q)
        sought, wealth = len(looks), bounds.default_bets()
        assert high == 1 or bounds.accepts(counts, high, q, *wealth)
        assert not bounds.accepts(counts, high * (1 - 2e-14), q, *wealth)
        assert low == 0 or bounds.hopeless(counts, low, q)
        assert not bounds.hopeless(counts, max(low, 1e-300) * (1 + 2e-14), q)
        del looks[sought:]
    assert len(looks) < 200  # for ten ends, where bisection takes 500


@pytest.mark.parametrize("term", [1.0, 0.3, 1e-5, 2.0**-40, 1e-14])
def test_confidence_bounds_allow_for_the_rounding(term):
    """A billion equal terms: the bounds close in on the bin, and never leave the mean outside."""
    edge = TERM_EDGES[np.searchsorted(TERM_EDGES, term)]
    for exact in (term, np.nextafter(TERM_EDGES[TERM_EDGES < edge][-1], 1), edge):
        if exact > 0:
            low, high = mean_interval(bin_terms([exact]) * 10**9)
            assert low <= exact <= high <= 1
            assert term < 1e-4 or high - low <= 0.006 * exact


@pytest.mark.parametrize("theta", [1e-6, 0.01, 0.3, 0.9])
def test_wealth_is_no_more_than_what_was_put_in(theta):
    """After one coin of mean theta its expectation is at most 1, whichever side is bet on."""
    heads, tails = (bin_terms(np.array([value])) for value in (1.0, 0.0))
    fair = (bounds.log_wealth(side, theta, *bounds.default_bets()) for side in (heads, tails))
    other = (bounds._log_wealth_above(side, theta) for side in (heads, tails))
    for of_heads, of_tails in (fair, other):
        mean = theta * math.exp(of_heads) + (1 - theta) * math.exp(of_tails)
        assert 0.1 < mean <= 1 + 1e-9


@pytest.mark.parametrize("total", [1 + 1e-9, 1.005, 1.01])
def test_weights_of_bets_are_a_distribution(total):
    """The attack: a wealth that begins above 1 is accepted more often than q; rounding alone is allowed."""
    counts, bets = coins(0, 10), np.array([0.3, 0.6])
    refused("of sum at most 1", lambda: bounds.log_wealth(counts, 0.1, bets, np.array([0.5, total - 0.5])))
    bounds.log_wealth(counts, 0.1, bets, np.array([0.5, 0.5 + 2.0**-52]))


@pytest.mark.parametrize(
    "pairs",
    [((3, 5), (3, 1)), ((4, 5), (3, 1)), ((9, 1),), ((-1, 1),), ((0, 0),), ((0, 2**62),), ((0, 1.0),)],
)
def test_stored_counts_hide_nothing(pairs):
    """Attack: of an index that is there twice the last count alone would be read."""
    refused("counts must", checked_counts, pairs, 9, "counts")
    assert checked_counts(((3, 5), (8, 1)), 9, "counts").tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 1]


def test_wealth_is_monotone():
    counts = bin_terms(np.random.default_rng(2).beta(0.3, 3, 500))
    bets, weights = bounds.default_bets()
    wealth = [bounds.log_wealth(counts, t, bets, weights) for t in np.geomspace(1e-9, 0.999, 200)]
    assert np.all(np.diff(wealth) >= -1e-9)
    more = counts + coins(0, 1)
    assert bounds.log_wealth(more, 0.2, bets, weights) > bounds.log_wealth(counts, 0.2, bets, weights)
    more = counts + coins(1, 0)
    assert bounds.log_wealth(more, 0.2, bets, weights) < bounds.log_wealth(counts, 0.2, bets, weights)


def test_a_pilot_without_hits_does_not_bet_everything():
    theta = 1e-3
    for pilot in (coins(0, 10), coins(0, 10**4), coins(0, 10**6)):
        bets, weights = bounds.default_bets(theta, pilot)
        assert bets[0] < 1
        assert bounds.accepts(coins(1, 40_000), theta, 1e-8, bets[:1], weights[:1])


def test_confidence_bounds_are_useful():
    low, high = mean_interval(coins(500, 9500), 0.01)
    assert 0.040 < low < 0.05 < high < 0.060
    _, high = mean_interval(coins(0, 10_000), 0.01)
    assert high < 1e-3  # ln(200) / 10,000 is 5.3e-4
    assert mean_interval(coins(0, 0)) == (0.0, pytest.approx(1))
    assert mean_interval(coins(10_000, 0), 0.01)[0] > 0.98
    assert mean_interval(coins(10_000, 0), 0.01)[1] == pytest.approx(1)
    assert mean_interval(bin_terms(np.full(10**4, 1e-6)), 0.01)[1] < 1e-3
    assert 0 < mean_interval(coins(3, 10**10))[0] < 3e-10 < mean_interval(coins(3, 10**10))[1]


def test_hopeless_is_rare_below_the_line_and_common_above():
    """2000 runs at mean theta: false alarms of the rule are Binomial(2000, <= 1e-3)."""
    heads = np.random.default_rng(4).binomial(2000, 0.05, 2000)
    wrong = sum(bounds.hopeless(coins(k, 2000 - k), 0.05) for k in heads)
    assert wrong <= stats.binom.isf(FALSE_ALARM, 2000, 1e-3)
    assert bounds.hopeless(coins(170, 1830), 0.05)
    assert bounds.hopeless(coins(25, 10**9), 1e-9)
    assert not bounds.hopeless(coins(0, 10**9), 1e-12)
    assert not bounds.hopeless(coins(0, 0), 0.1)
    assert not bounds.hopeless(coins(100, 0), 1.0)
