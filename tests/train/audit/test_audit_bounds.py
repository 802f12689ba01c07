"""Lower bounds of audits, against all mechanisms of a few coins, the worst ones, and canaries alone."""

import itertools

import numpy as np
import pytest
import scipy

from train.audit.bounds import lowest_rate, max_canaries, one_run_bound, price, refusal
from train.audit.command import SUSPECTED


def test_the_lowest_rate_is_exact():
    """It is where the binomial tail is the level; nothing right is any rate."""
    assert scipy.stats.binom.sf(6, 20, lowest_rate(7, 20, 0.01)) == pytest.approx(0.01)
    assert lowest_rate(0, 20, 0.01) == 0


def response(rng, coins, epsilon, delta):
    """Scores of randomised response that reveals the coin with probability delta: (epsilon, delta)-DP."""
    right = rng.random(coins.shape) < 1 / (1 + np.exp(-epsilon))
    revealed = rng.random(coins.shape) < delta
    score = np.where(right, coins, ~coins) * 1.0
    return np.where(revealed, 10.0 * (2.0 * coins - 1), score - 0.5) + 1e-3 * rng.random(coins.shape)


def test_the_price_of_delta_is_paid():
    """A mechanism that reveals one coin in twenty is (0, 1/20)-DP: at that delta nothing may be found."""
    coins = np.random.default_rng(0).random(400) < 0.5
    scores = np.where(np.arange(400) % 20 == 0, 2.0 * coins - 1, 0.0)
    assert one_run_bound(scores, coins, 0.0, 0.95)[0] > 0.5
    assert one_run_bound(scores, coins, 0.05, 0.95)[0] == 0
    # Guesses that are all right: what delta costs is off the failure probability.
    scores = coins * 1.0
    whole, half, none = (one_run_bound(scores, coins, delta, 0.95)[0] for delta in (0.0, 1e-3, 1e-2))
    assert whole == pytest.approx(np.log(1 / ((80 ** (1 / 400)) - 1)), rel=1e-6)  # q^400 = 0.05 / 4
    assert whole - 0.2 < half < whole - 0.02 and none == 0


def test_how_many_canaries_delta_allows():
    """With which it takes half of the failure probability; by a sum of binomial probabilities."""
    q, epsilon = 1 / (1 + np.exp(-1.0)), 1.0
    largest = [scipy.stats.binom.pmf(np.arange(n + 1), n, q).max() for n in range(9)]
    assert price(9, 20, 1e-3, epsilon) == pytest.approx(20e-3 * (1 - q) * np.mean(largest))
    assert max_canaries(0.1, 0.95, epsilon) == 0 and max_canaries(1e-5, 0.95, 2.2) > 10_000
    most = max_canaries(1e-4, 0.95, epsilon)
    costs = [price(round(8 / 125 * m), m, 1e-4, epsilon) for m in (most, most + 2)]
    assert costs[0] <= 0.05 / 8 < costs[1]
    # Any epsilon may have been claimed.
    assert price(9, 20, 1e-3, 1e9) == 0 and max_canaries(1e-5, 0.95, 1e9) > 10_000


def most_often(coins, guesses, right, epsilon, delta):
    """The largest probability of so many right guesses under any (epsilon, delta)-DP mechanism whatsoever.

    A linear program: the probability of each output (which coins are guessed, and how) given the coins.
    """
    inputs = list(itertools.product((0, 1), repeat=coins))
    guessed = itertools.combinations(range(coins), guesses), itertools.product((0, 1), repeat=guesses)
    outputs = [tuple(zip(*each, strict=True)) for each in itertools.product(*guessed)]
    pairs = [(a, b) for a, b in itertools.permutations(range(len(inputs)), 2)]
    pairs = [(a, b) for a, b in pairs if sum(map(int.__ne__, inputs[a], inputs[b])) == 1]
    n, size = len(outputs), len(inputs) * len(outputs)
    won = [sum(given[i] == guess for i, guess in each) >= right for given in inputs for each in outputs]
    gain = np.concatenate([np.array(won) / len(inputs), np.zeros(len(pairs) * n)])
    # p(y | a) - e^epsilon p(y | b) <= excess(y), excesses of a pair add up to at most delta.
    above, sums = np.zeros((len(pairs), n, len(gain))), np.zeros((len(pairs), len(gain)))
    for i, (a, b) in enumerate(pairs):
        rows, excess = np.arange(n), size + i * n
        above[i, rows, a * n + rows], above[i, rows, b * n + rows] = 1, -np.exp(epsilon)
        above[i, rows, excess + rows] = -1
        sums[i, excess : excess + n] = 1
    ones = np.kron(np.eye(len(inputs)), np.ones(n))
    upper = np.concatenate([above.reshape(-1, len(gain)), sums])
    limits = np.repeat([0.0, delta], [len(pairs) * n, len(pairs)])
    equal = np.pad(ones, ((0, 0), (0, len(gain) - size)))
    found = scipy.optimize.linprog(-gain, upper, limits, equal, np.ones(len(inputs)))
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize("guesses", [1, 2, 3])
def test_no_mechanism_of_three_coins_beats_the_theorem(guesses):
    """Optimal ones attain it where all guesses are right: no smaller term for delta would be true."""
    for right in range(1, guesses + 1):
        worst = most_often(3, guesses, right, 0.7, 0.02)
        bound = refusal(right, guesses, 3, 0.02, 0.7)
        assert worst <= bound + 1e-9
        paid = worst - refusal(right, guesses, 3, 0.0, 0.7)
        assert paid > 0.6 * price(guesses, 3, 0.02, 0.7)
        if right == guesses:
            assert worst == pytest.approx(bound, abs=1e-9)


def canary_scores(rng, sigma, supposed, canaries=960, steps=4, rate=0.9):
    """Coins, and privacy losses of what Poisson batches release of canaries alone in their coordinates."""
    coins = rng.random(canaries) < 0.5
    there = (rng.random((canaries, steps)) < rate) & coins[:, None]
    released = there + sigma * rng.normal(size=there.shape)
    return np.log1p(rate * np.expm1((released - 0.5) / supposed**2)).sum(axis=1), coins


def test_rare_participations_are_seen_when_scores_suppose_less_noise():
    """Twice in a hundred steps, with a quarter of the noise: one participation in the noise of all steps.

    Guesses of "out" are seldom sure here, so with as many of them as of "in" few would be right.
    """
    rng = np.random.default_rng(0)
    found = {}
    for share in (1.0, SUSPECTED):
        scores, coins = canary_scores(rng, 0.2, 0.8 * share, steps=100, rate=0.02)
        found[share] = one_run_bound(scores, coins, 1e-5, 0.95)[0]
    assert found[1.0] < 2 and found[SUSPECTED] > 2.7


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (2.0, 2e-5)])
def test_bounds_hold_as_often_as_they_say_and_come_near(epsilon, delta):
    """The worst mechanism there is, 150 times at confidence 0.9; a wrong bound would pass it more often.

    150 trials that fail with probability at most 0.1 fail more than 36 times with probability 2e-7.
    """
    rng, found = np.random.default_rng(1), []
    for _ in range(150):
        coins = rng.random(400) < 0.5
        found.append(one_run_bound(response(rng, coins, epsilon, delta), coins, delta, 0.9)[0])
    assert sum(lower > epsilon for lower in found) <= 36, found
    assert np.mean(found) > 0.35 * epsilon, found


def test_a_quarter_of_the_noise_is_refuted_and_the_noise_that_is_claimed_is_not():
    """As on the CNN of `test_audit_command.py`; (2.1, 1e-5) holds without sampling, mu = 0.5.

    One in 200 of the first is missed: three of 25 with probability 3e-4. The second are off with
    probability 0.05 at most by the theorem, and far below.
    """
    rng = np.random.default_rng(0)

    def lower(sigma):
        return one_run_bound(*canary_scores(rng, sigma, 4.0 * SUSPECTED), 1e-5, 0.95)[0]

    broken, honest = ([lower(sigma) for _ in range(25)] for sigma in (1.0, 4.0))
    assert np.sum(np.array(broken) > 2.2) >= 23 and max(honest) < 1.2 and np.mean(honest) > 0.3
