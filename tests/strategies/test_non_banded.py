"""Strategy matrices that are not banded: bounds against enumeration, exact deltas, limits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants.analytic import best_accountant
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.proposals.candidates import candidates
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.strategies import STRATEGIES
from tests.commands import exit_code
from tests.oracles import enumeration, tuples
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.stored_plans import as_json, forged
from train.noise import recursion as noise

FALSE_ALARM = 1e-6


def dense_matrix(strategy, n: int, rows: int | None = None) -> np.ndarray:
    if isinstance(strategy, ja.Dense):
        return strategy.matrix
    return enumeration.strategy_matrix(strategy.array, rows or n, n)


def some_dense(n: int, seed: int = 0) -> ja.Dense:
    return ja.Dense(np.tril(np.random.default_rng(seed).random((n, n))) + np.eye(n))


def long_tail(n: int) -> ja.Toeplitz:
    return ja.Toeplitz(tuple(0.7 ** np.arange(n) + 0.05))


SETTINGS = [
    (ja.BMinSep(8, 3, 0.3), long_tail(8)),
    (ja.BMinSep(7, 2, 0.4, False), ja.BandedInverse.bisr(iterations=7, bands=3)),
    (ja.BMinSep(6, 1, 0.3), ja.BandedInverse.optimal(iterations=6, bands=2)),
    (ja.Poisson(6, 0.2), ja.Toeplitz((1.0, 0.5, 0.2))),
    (ja.CyclicPoisson(8, 3, 0.5), some_dense(8)),
    (ja.BallsInBins(7, 3), ja.BufferedToeplitz((0.8, 0.3), (0.4, 0.2), 7)),
    (ja.BMinSep(7, 3, 0.3), some_dense(7, 1)),
    (ja.MultiAttribution(5, 2, 0.3, 2), long_tail(5)),
    (ja.BMinSep(4, 2, 1.0, False), some_dense(4, 2)),
    (ja.BMinSep(3, 5, 0.5), long_tail(3)),
]


@functools.partial(jax.jit, static_argnums=(0, 1))
def both_losses(scheme, strategy, scores, sigma):
    """The bounds from above and from below."""
    return [loss_of_scores(scheme, strategy, scores, sigma, direction) for direction in DIRECTIONS]


def test_bounds_against_enumeration(x64):
    """f- <= f <= f+ on the horizon of the accountant, and `privacy_loss` >= L on the n rows of the run."""
    for scheme, strategy in SETTINGS:
        for sigma in [0.5, 2.0]:
            n, rng = scheme.iterations, np.random.default_rng(1)
            mechanism = ja.Mechanism(scheme, strategy, sigma)
            matrix = dense_matrix(strategy, n, n + strategy.bands - 1)
            law = enumeration.pattern_distribution(scheme)
            outputs = rng.normal(size=(40, len(matrix))) * (1 + sigma)
            exact = enumeration.log_mixture(law, matrix, sigma, outputs)
            high, low = map(np.asarray, both_losses(scheme, strategy, outputs @ matrix, sigma))
            assert np.all(high >= exact - 1e-9) and np.all(low <= exact + 1e-9)
            if scheme.iterations > scheme.min_separation:
                assert (high - exact).max() > 1e-4  # the cross terms are there
            exact = enumeration.log_mixture(law, dense_matrix(strategy, n), sigma, outputs[:, :n])
            assert np.all(np.asarray(ja.privacy_loss(mechanism, outputs[:, :n])) >= exact - 1e-9)


@pytest.mark.parametrize(
    ("strategy", "direction"),
    [slow(ja.Toeplitz((0.8, 0.6)), "remove"), (ja.Dense(np.array([[1.0, 0.0], [0.9, 0.6]])), "add")],
)
def test_exact_deltas_are_bounded(strategy, direction, key):
    """n = 2, r = 1: the estimate's interval is above the exact delta, by integration; false alarm 1e-6."""
    sigma, epsilon = 0.9, 0.7
    scheme = ja.BMinSep(2, 1, 0.5)
    pair = enumeration.pattern_distribution(scheme), {(0, 0): 1.0}
    exact = tuples.divergence(*pair, sigma, epsilon, direction, dense=dense_matrix(strategy, 2), points=701)
    mechanism = ja.Mechanism(scheme, strategy, sigma)
    found = ja.estimate_delta(mechanism, epsilon, num_samples=60_000, key=key, confidence=1 - FALSE_ALARM)
    assert found.high > exact - 1e-5
    assert found.value < 6 * exact + 0.02  # a bound, not just anything


@pytest.mark.parametrize("scheme", [ja.BMinSep(9, 3, 0.3), ja.BMinSep(2, 5, 0.4, False)])
def test_banded_is_exact(scheme, x64):
    """With no more bands than the separation the bound is the likelihood ratio, whatever the class."""
    banded = ja.BandedToeplitz.square_root(2)
    outputs = np.random.default_rng(0).normal(size=(6, scheme.iterations))
    wanted = ja.privacy_loss(ja.Mechanism(scheme, banded, 0.7), outputs)
    same = ja.Mechanism(scheme, ja.Toeplitz(banded.coefficients), 0.7)
    assert not same.is_upper_bound
    np.testing.assert_array_equal(ja.privacy_loss(same, outputs), wanted)
    full = enumeration.strategy_matrix(banded.coefficients, scheme.iterations, scheme.iterations)
    dense = ja.Mechanism(scheme, ja.Dense(full), 0.7)
    np.testing.assert_allclose(ja.privacy_loss(dense, outputs), wanted, rtol=1e-9)


def test_slack_vanishes():
    """Exponentially in r where the inverse is banded, by enumeration; only slowly for a long tail."""
    fast, slow = ja.BandedInverse((1.0, -0.5), 12), long_tail(12)

    def slack(strategy, r):
        scheme = ja.BMinSep(12, r, 0.4)
        matrix = enumeration.strategy_matrix(strategy.array, 12 + strategy.bands - 1, 12)
        outputs = np.random.default_rng(0).normal(size=(200, len(matrix))) * 2
        exact = enumeration.log_ratio(scheme, strategy.array, 1.0, outputs)
        high = jax.jit(loss_of_scores, static_argnums=(0, 1))(scheme, strategy, outputs @ matrix, 1.0)
        return float(np.max(np.asarray(high) - exact))

    with jax.enable_x64(True):
        gaps = [slack(fast, r) for r in (1, 3, 5, 7)]
        assert all(b < a / 3 for a, b in itertools.pairwise(gaps))
        assert slack(slow, 7) > 5 * gaps[-1]
    # Column entries 2^-t: the autocorrelation is 2^-d, so kappa = q + q^2 + .. with q = 2^-r.
    for r in (1, 3, 5, 7):
        q, kappa = 0.5**r, float(fast.cross_terms(12, r))
        assert q * (1 - 1e-2) < kappa < q / (1 - q) * (1 + 1e-6)


def test_bisr_and_the_optimum():
    """BISR is the inverse of the square root at full length; the optimum is no worse, and a local minimum."""
    n = 40
    full = ja.BandedInverse.bisr(iterations=n, bands=n)
    np.testing.assert_allclose(
        full.array[:n] / full.array[0],
        ja.BandedToeplitz.square_root(n).array / ja.BandedToeplitz.square_root(n).array[0],
    )
    for bands in (2, 4, 9):
        best, start = (
            make(iterations=n, bands=bands) for make in (ja.BandedInverse.optimal, ja.BandedInverse.bisr)
        )
        error = ja.prefix_sum_error(best, iterations=n, noise_multiplier=1.0)
        assert error < ja.prefix_sum_error(start, iterations=n, noise_multiplier=1.0)
        for k, change in itertools.product(range(1, bands), (-1e-3, 1e-3)):
            moved = np.array(best.inverse)
            moved[k] = min(0.0, moved[k] + change * moved[0])
            other = ja.BandedInverse(tuple(moved), n)
            assert ja.prefix_sum_error(other, iterations=n, noise_multiplier=1.0) > error * (1 - 1e-9)


def test_the_fallback_covers_overlaps():
    """With the pattern revealed the norm is that of all columns together."""
    scheme, strategy = ja.BMinSep(9, 3, 1.0, False), long_tail(9)
    matrix = enumeration.strategy_matrix(strategy.array, 17, 9)
    x = np.zeros(9)
    x[::3] = 1
    cross = float(ja.Mechanism(scheme, strategy, 1.0).cross_terms)
    exact = np.linalg.norm(matrix @ x)
    assert exact <= np.sqrt(3 * (1 + 2 * cross)) < 1.5 * exact
    mechanisms = (ja.Mechanism(scheme, each, 2.0) for each in (strategy, ja.BandedToeplitz.identity()))
    overlapping, white = (best_accountant(mechanism, 1.0)[1] for mechanism in mechanisms)
    assert overlapping > white


def test_certified_and_stored(tmp_path, capsys):
    """Calibrated, said to be an upper bound, and read back."""
    scheme = ja.BMinSep.from_batch_size(dataset_size=3000, batch_size=50, iterations=60, min_separation=12)
    strategy = ja.BandedInverse.bisr(iterations=60, bands=3)
    key = jax.random.key(5)
    plan = ja.calibrate(
        scheme, strategy, epsilon=2.0, delta=1e-3, dataset_size=3000, noise_multiplier=0.8, key=key
    )
    assert plan.certified and plan.is_sampled and "upper bound" in plan.statement()
    assert plan.verdict.remove.proposal == "replicas:2"
    plan.save(tmp_path / "plan.json")
    assert ja.Plan.load(tmp_path / "plan.json").mechanism == plan.mechanism
    assert exit_code("show", tmp_path / "plan.json") == 0 and "upper bound" in capsys.readouterr().out
    names = {
        direction: {c.proposal.name for c in candidates(plan.mechanism, 2.0, direction, Budget.split(1e-3))}
        for direction in ("remove", "add")
    }
    assert {"plain", "replicas:2"} <= names["remove"]
    small = ja.Mechanism(ja.BMinSep(8, 3, 0.3), long_tail(8), 2.0)
    profile = ja.privacy_profile(small, [0.1, 0.2], num_samples=4000, key=jax.random.key(2))
    assert not profile.lower.any() and np.all(profile.upper > 0)
    for kind in (long_tail(60), some_dense(60)):
        other = forged(plan, mechanism=ja.Mechanism(scheme, kind, 3.0))
        assert STRATEGIES[kind.kind].from_json(as_json(other)["claim"]["strategy"]) == kind


def test_bad_input():
    for make, message in [
        (lambda: ja.BandedInverse((1.0, 0.5), 8), "without negative entries"),
        (lambda: ja.Dense(np.array([[1.0, 0.0], [-0.1, 1.0]])), "finite entries of at least 0"),
        (lambda: ja.Dense(np.ones((3, 3))), "lower triangular"),
        (lambda: ja.Dense(np.ones((3, 2))), "must be square"),
        (lambda: noise.init(some_dense(3), {"a": jnp.zeros(2)}, np.zeros(8, np.uint32)), "must be Toeplitz"),
    ]:
        refused(message, make)
    small = ja.Mechanism(ja.BMinSep(2, 1, 0.5), ja.Dense(np.array([[1.0, 0.0], [0.9, 0.6]])), 1.0)
    assert ja.sample_privacy_loss(jax.random.key(0), small, 5).shape == (5,)


@pytest.mark.parametrize(
    "strategy", [ja.BandedInverse.bisr(iterations=20, bands=4), ja.Toeplitz(tuple(0.6 ** np.arange(20)))]
)
def test_streamed_noise_is_the_inverse_times_white_noise(strategy):
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    levels = 2.0**19
    state = noise.init(strategy, params, np.arange(8, dtype=np.uint32))
    step = jax.jit(lambda state: noise.draw(strategy, levels, state, params))
    white = [noise.standard_normals(state.key, t, 7)[:3] for t in range(20)]
    drawn = []
    for _ in range(20):
        w, state = step(state)
        drawn.append(np.asarray(w["a"]) / levels)
    exact = np.linalg.solve(enumeration.strategy_matrix(strategy.array, 20, 20), np.array(white, float))
    np.testing.assert_allclose(np.array(drawn), exact, rtol=1e-4, atol=1e-5)
