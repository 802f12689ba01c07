"""Bounds from below: intervals of users whose likelihood is bounded hold the exact divergence."""

import math

import jax
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from jaxacct import (
    BandedToeplitz,
    BMinSep,
    IndependentAttribution,
    Mechanism,
    estimate_delta,
    estimate_epsilon,
    privacy_profile,
)
from jaxacct.estimates import estimate, interval
from jaxacct.estimates.estimate import draw_samples
from jaxacct.kernels.likelihoods.interacting_recurrence import numbers_kept
from jaxacct.proposals.base import Draws
from jaxacct.proposals.candidates import proposals_at
from jaxacct.proposals.families import pairs
from jaxacct.proposals.families.from_below import from_below, loss_from_below
from jaxacct.proposals.families.pair_weights import log_factor, rounds
from jaxacct.proposals.families.pairs import pair_proposal
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics.lines import total
from tests.oracles import enumeration, tuples
from tests.proposals_by_name import proposal_by_name

FALSE_ALARM = 1e-6
P = 0.3
# Examples, noise multiplier, epsilon, distribution: two examples by themselves, four by pairs.
PLAIN = (2, 0.9, 0.2)
CASES = {
    "remove, plain": (*PLAIN, "plain"),
    "remove, pairs": (4, 1.6, 1.0, "pairs:6,1"),
    "remove, powers": (2, 0.9, 1.0, "example-replicas:3"),
    "remove, plain by pairs": (4, 1.6, 0.2, "pairs:1,1"),
}


def bounded(examples: int, sigma: float, monkeypatch) -> Mechanism:
    """As if the tables of the likelihood of more than two, or of any, did not fit."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", numbers_kept(2, 2, False) * (examples > 2))
    mechanism = Mechanism(IndependentAttribution(2, 2, P, examples, False), BandedToeplitz.identity(), sigma)
    assert mechanism.is_upper_bound and (mechanism.scheme.pair_bound is not None) == (examples > 2)
    return mechanism


def exact(mechanism: Mechanism, epsilon: float, direction: str) -> float:
    return tuples.two_step_delta(mechanism.scheme, (1.0,), mechanism.noise_multiplier, epsilon, direction)


def distributions(case: str, monkeypatch):
    """(distribution, distribution from below, epsilon, the exact divergence)."""
    direction, (examples, sigma, epsilon, name) = case.split(",")[0], CASES[case]
    mechanism = bounded(examples, sigma, monkeypatch)
    distribution = proposal_by_name(mechanism, epsilon, direction, name)
    below = from_below(distribution)
    assert below is not None and below is not distribution
    return distribution, below, np.array([epsilon]), exact(mechanism, epsilon, direction)


def draws_of(distribution, num_samples: int) -> Draws:
    return draw_samples(distribution, jax.random.key(1), num_samples)


@pytest.mark.parametrize("case", ["remove, pairs"])
def test_draws_from_below_hold_the_exact_divergence(case, monkeypatch):
    """Attack: what is below passed off for the value would miss it (1e-6)."""
    _, below, at, truth = distributions(case, monkeypatch)
    low, _, high = interval.bands(below, at, draws_of(below, 16_384), FALSE_ALARM)[:, 0]
    assert 0.5 * truth < low < high < truth


@pytest.mark.slow
@pytest.mark.parametrize("case", ["remove, plain"])
def test_a_bound_from_above_is_not_the_value(case, monkeypatch):
    """Attack: intervals of it alone, as if it were exact, miss the divergence (1e-6)."""
    distribution, below, at, truth = distributions(case, monkeypatch)
    parts = [draws_of(side, 16_384) for side in (distribution, below)]
    low, _, high = interval.bands(distribution, at, parts[0], FALSE_ALARM)[:, 0]
    assert truth < low < high < 1.5 * truth
    # Of the same outputs.
    gap = parts[0].loss - parts[1].loss
    assert gap.min() > -1e-4 and gap.max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_as_often_as_they_say(case, monkeypatch):
    """Runs that miss are Binomial(200, <= 0.05)."""
    distribution, below, at, truth = distributions(case, monkeypatch)
    parts, misses = {side: draws_of(side, 200 * 2048) for side in (distribution, below)}, 0

    def part(draws: Draws, run: int) -> Draws:
        return Draws(*(field[2048 * run : 2048 * (run + 1)] for field in draws))

    for run in range(200):
        found = interval.bands_of_both(
            distribution, below, at, lambda side, run=run: part(parts[side], run), 0.05
        )
        low, value, high = found[:, 0]
        assert low <= value <= high
        misses += not low <= truth <= high
    assert misses <= stats.binom.isf(FALSE_ALARM, 200, 0.05)


@pytest.mark.slow
def test_estimates_of_users_are_known_from_below(monkeypatch):
    """Each interval fails with 1e-6. Before, all ended at 0."""
    examples, sigma, epsilon = PLAIN
    mechanism = bounded(examples, sigma, monkeypatch)
    offered = proposals_at
    monkeypatch.setattr(  # fewer programs to compile
        estimate, "proposals_at", lambda *a, **k: [p for p in offered(*a, **k) if "one example" not in p.name]
    )
    delta = exact(mechanism, epsilon, "remove")
    options = dict(num_samples=8192, confidence=1 - FALSE_ALARM, key=jax.random.key(2))
    found = estimate_delta(mechanism, epsilon, **options)
    assert 0.6 * delta < found.low <= delta <= found.high < 1.6 * delta
    assert found.low <= found.value <= found.high
    bands = privacy_profile(mechanism, [epsilon], **options)
    assert 0.6 * delta < bands.lower[0] <= delta <= bands.upper[0] < 1.6 * delta
    assert bands.proposals == {"remove": "plain"} == found.proposals
    crossing = estimate_epsilon(mechanism, delta, **options)
    assert 0 < crossing.low <= epsilon <= crossing.high < 1


def test_weights_that_are_rounded_up_have_others_from_below(monkeypatch):
    """Of replicas in pairs, of exact losses: a lower end of their own weights would be too high."""
    mechanism = Mechanism(BMinSep(4, 2, P), BandedToeplitz.identity(), 1.0)
    distribution, asked = pair_proposal(mechanism, 4, 1.0), []
    monkeypatch.setattr(pairs, "log_factor", lambda *args: asked.append(args[3]) or log_factor(*args))
    below = from_below(distribution)
    assert below.log_scale == distribution.log_scale and below.below is None
    scheme, strategy, key = mechanism.scheme, mechanism.strategy, jax.random.key(0)
    for one in (distribution, below):
        jax.eval_shape(
            lambda key, one=one: one.draw_block(key, scheme, strategy, 1.0, one.tables(), np.float32), key
        )
    assert asked == [1, -1]
    plain = proposal_by_name(mechanism, 1.0, "remove", "plain")
    assert from_below(plain) is plain


@pytest.mark.parametrize(
    ("examples", "sigma"), [(2, 0.7), (3, 1.5), pytest.param(3, 4.0, marks=pytest.mark.slow)]
)
def test_the_loss_of_every_draw_is_below_that_of_all_tuples(examples, sigma):
    """And what is taken off has to be: with a tenth less the bound is wrong at some output."""
    scheme, strategy = IndependentAttribution(4, 2, 0.4, examples), BandedToeplitz((2.0, 1.0))
    rng, c = np.random.default_rng(0), enumeration.strategy_matrix(strategy.array, 5, 4)
    outputs = sigma * rng.normal(size=(400, 5)) * rng.choice([0.3, 1, 3], size=(400, 1))
    outputs[200:] += c.sum(axis=1) * rng.choice([0, 1], size=(200, 1))
    exact = enumeration.log_ratio(scheme, strategy.array, sigma, outputs)
    bound = jax.jit(loss_from_below, static_argnums=(0, 1))
    below = np.asarray(bound(scheme, strategy, (outputs @ c).astype(np.float32), sigma))
    assert (below <= exact + 2e-6 * (1 + np.abs(exact))).all()  # scores are rounded to float32
    # One example alone, and its mean participation, by enumeration.
    distribution = enumeration.pattern_distribution(scheme.one)
    vectors = np.array(list(distribution), float)
    logs = np.log(list(distribution.values()))[:, None] + vectors @ (outputs @ c - 0.5).T / sigma**2
    alone = np.asarray(logsumexp(logs, axis=0))
    mean = np.exp(logs - alone).T @ vectors
    shared = examples * (examples - 1) / 2 * ((mean @ c.T) ** 2).sum(axis=1) / sigma**2
    np.testing.assert_allclose(below, examples * alone - shared, rtol=1e-3, atol=1e-3)
    assert (examples * alone - 0.9 * shared > exact + 1e-6).any()


def test_losses_from_below_are_below_those_of_all_tuples():
    """Where examples participate for certain, and means are not drawn; for others see the test above."""
    scheme = IndependentAttribution(4, 2, 1.0, 3)
    strategy, sigma, rng = BandedToeplitz((2.0, 1.0)), 1.5, np.random.default_rng(0)
    c = enumeration.strategy_matrix(strategy.array, 5, 4)
    outputs = sigma * rng.normal(size=(400, 5)) + c.sum(axis=1) * rng.choice([0, 1], size=(400, 1))
    true = enumeration.log_ratio(scheme, strategy.array, sigma, outputs)
    run = jax.jit(loss_from_below, static_argnums=(0, 1))
    found = np.asarray(run(scheme, strategy, (outputs @ c).astype(np.float32), sigma))
    assert (found <= true + 1e-5 * (1 + np.abs(true))).all()


def test_weights_are_rounded_down():
    """The exact factor, in float64 from its formula, is between both."""
    factor_of = jax.jit(log_factor, static_argnums=(1, 2, 3))
    m, shared = 4, np.random.default_rng(0).uniform(0, 3, (4, 4, 50)).astype(np.float32)
    shared += shared.swapaxes(0, 1)
    up, down = (np.asarray(factor_of(shared, 2, 3, side), np.float64) for side in (1, -1))
    meet, own = rounds(m, 2)
    aligned, apart = ((m - 1) * np.einsum("lij,ijt->lt", meet, shared), np.einsum("lij,ijt->lt", own, shared))
    factor = aligned.sum(axis=0) / (m - 1) - np.log(np.exp(aligned).mean(axis=0))
    factor += np.log(np.exp(-apart).mean(axis=0))
    assert (down < factor).all() and (factor < up).all() and (up - down < 1e-3).all()


def test_what_is_known_from_below(monkeypatch):
    """A distribution of exact losses is its own; of what else is bounded nothing is known."""
    (distribution, *_) = proposals_at(
        Mechanism(BMinSep(2, 2, P), BandedToeplitz.identity(), 2.0), 0.2, "remove"
    )
    assert from_below(distribution) is distribution
    mechanism = bounded(*PLAIN[:2], monkeypatch)
    for distribution in proposals_at(mechanism, 1.0, "remove"):
        below = from_below(distribution)
        assert below is not None and below.draw_block is not distribution.draw_block
        margins = [total(budget_lines(side, 1e-9), "epsilon") for side in (distribution, below)]
        assert 0 < margins[1] < math.inf and below.relative_error == distribution.relative_error
        assert margins[1] > margins[0]
    by_pairs = bounded(4, 1.6, monkeypatch)
    assert estimate.best_proposal(by_pairs, 0.2, "remove", None, None).name == "pairs:1,1"
    (alone, pairs) = (proposal_by_name(by_pairs, 0.2, "remove", name) for name in ("plain", "pairs:1,1"))
    booked = [total(budget_lines(distribution, 1e-9), "epsilon") for distribution in (alone, pairs)]
    assert booked[0] < booked[1] < 3 * booked[0] and alone.relative_error == pairs.relative_error > 0
