"""Every registered kind of strategy matrix through one table of requirements, against dense linear algebra.

A new kind needs a line in `MEMBERS` and, if it is not Toeplitz, one in `matrix_of`.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.strategies import NAMES, STRATEGIES, BufferedRecursion, Workload, by_name
from tests.oracles import enumeration
from tests.refusals import refused

N = 6
MEMBERS = {
    "banded-toeplitz": [ja.BandedToeplitz((0.8, 0.5, 0.3)), ja.BandedToeplitz.identity()],
    "finite-toeplitz": [ja.FiniteToeplitz((0.8, 0.5, 0.3), N), ja.FiniteToeplitz((1.0,), N)],
    "toeplitz": [ja.Toeplitz(tuple(0.6 ** np.arange(9)))],
    "banded-inverse": [ja.BandedInverse.bisr(iterations=N, bands=3)],
    "buffered-toeplitz": [ja.BufferedToeplitz((0.9, 0.4, 0.0), (0.3, 0.2, 0.1), N)],
    "dense": [ja.Dense(np.tril(0.2 + np.random.default_rng(0).random((N, N))) + np.eye(N))],
}
ALL = [strategy for members in MEMBERS.values() for strategy in members]
X = np.array([[1.0, 0, 0, 1, 0, 0], [0, 2.0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])


def test_every_registered_kind_is_in_the_table():
    assert set(MEMBERS) == set(STRATEGIES)
    for kind, members in MEMBERS.items():
        assert {type(member) for member in members} == {STRATEGIES[kind]}


def matrix_of(strategy, rows=N):
    """Dense C, (rows, N); with more rows than N it goes on past the last step."""
    if strategy.is_toeplitz:
        return enumeration.strategy_matrix(strategy.array, rows, N)
    return strategy.matrix


def extended(strategy):
    """C on the rows on which scores are drawn."""
    return matrix_of(strategy, strategy.rows(N))


def signal_scores(strategy, x):
    """`C^T C x`: scores without noise, on all rows that the strategy has."""
    rows, n = x.shape
    normals = strategy.draw_normals(jax.random.key(0), n, rows, x.dtype)
    return strategy.scores_from_normals(normals, n, 0.0, x)


def test_norms_bands_and_error():
    for strategy in ALL:
        small, long = matrix_of(strategy), extended(strategy)
        assert np.linalg.norm(long, axis=0).max() == pytest.approx(1, abs=1e-12)
        rows, columns = np.nonzero(long)
        assert strategy.bands == (rows - columns).max() + 1
        np.testing.assert_allclose(strategy.square_norms(N), np.square(small).sum(axis=0), atol=1e-12)
        np.testing.assert_allclose(
            np.broadcast_to(strategy.half_square_norms(), N), np.square(long).sum(axis=0) / 2, atol=1e-12
        )
        sums = np.tril(np.ones((N, N))) @ np.linalg.inv(small)
        error = ja.prefix_sum_error(strategy, iterations=N, noise_multiplier=1.7)
        assert error == pytest.approx(np.square(sums).sum() / N * 1.7**2, rel=1e-10)


@pytest.mark.parametrize("strategy", ALL)
def test_scores_are_the_matrix_products(strategy, x64):
    small, gram = matrix_of(strategy), extended(strategy).T @ extended(strategy)
    both = jax.jit(lambda x: (strategy.output_scores(x), signal_scores(strategy, x)))
    for ours, exact in zip(both(np.asarray(X, float)), (X @ small, X @ gram), strict=True):
        np.testing.assert_allclose(ours, exact, atol=1e-12)
    np.testing.assert_allclose(strategy.gram(X[0]), X[0] @ gram, atol=1e-12)


@pytest.mark.parametrize("strategy", ALL)
def test_noise_has_the_covariance_of_the_scores(strategy, x64):
    """Exactly: scores are linear in their normals, so unit vectors in place of draws give the factor."""
    shapes = [part.shape[1:] for part in strategy.draw_normals(jax.random.key(0), N, 1, jnp.float64)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    basis = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    parts = tuple(part.reshape(-1, *shape) for part, shape in zip(basis, shapes, strict=True))
    signal = np.tile(np.asarray(X[0], float), (sum(sizes), 1))

    @jax.jit
    def scores(parts, signal):
        both = None, signal
        return [strategy.scores_from_normals(parts, N, 0.7, counts) for counts in both]

    factor, with_signal = map(np.asarray, scores(parts, signal))
    gram = extended(strategy).T @ extended(strategy)
    np.testing.assert_allclose(factor.T @ factor, 0.7**2 * gram, atol=1e-12)
    np.testing.assert_allclose(with_signal - factor, np.tile(X[0] @ gram, (len(factor), 1)), atol=1e-12)


@pytest.mark.parametrize("strategy", ALL)
def test_float32_is_near_float64(strategy):
    def scores(key):
        return strategy.scores_from_normals(strategy.draw_normals(key, N, 4, jnp.float32), N, 1.0)

    single = jax.jit(scores)(jax.random.key(1))
    assert single.dtype == jnp.float32 and single.shape == (4, N)
    signal = jax.jit(lambda x: signal_scores(strategy, x))(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(signal, X @ (extended(strategy).T @ extended(strategy)), atol=1e-5)


def test_cross_terms_cover_every_participation():
    for separation in [1, 2, 3, N]:
        for strategy in ALL:
            gram = extended(strategy).T @ extended(strategy)
            bound = np.broadcast_to(strategy.cross_terms(N, separation), N)
            for pattern in enumeration.vectors(ja.BMinSep(N, separation, 0.5, False))[0]:
                for i in np.flatnonzero(pattern):
                    assert bound[i] >= gram[i, i + 1 :] @ pattern[i + 1 :] - 1e-12
            if strategy.bands <= separation:
                assert not bound.any()


def test_products_by_how_far_from_the_end():
    for strategy in ALL:
        if not strategy.is_toeplitz:
            with pytest.raises(NotImplementedError):
                strategy.products_from_end(N)
            continue
        gram = extended(strategy).T @ extended(strategy)
        products = strategy.products_from_end(N + 1)
        assert not products[:, N:].any() or strategy.bands > N
        for i in range(N):
            for d in range(i + 1):
                row = min(N - 1 - i, len(products) - 1)
                assert products[row, d] == pytest.approx(gram[i, i - d], abs=1e-12)


def last_vectors(recursion):
    """Noise from unit vectors in place of white noise, by the last few vectors."""
    coefficients, of_inverse = recursion
    streamed = np.zeros((N, N))
    for t in range(N):
        fresh = np.eye(N)[t]
        earlier = [(c, t - k) for k, c in enumerate(coefficients) if 1 <= k <= t]
        if of_inverse:
            streamed[t] = coefficients[0] * fresh + sum(c * np.eye(N)[at] for c, at in earlier)
        else:
            streamed[t] = (fresh - sum(c * streamed[at] for c, at in earlier)) / coefficients[0]
    return streamed


def running_sums(recursion):
    """The same by running sums, which stay within their reach."""
    streamed, sums = np.zeros((N, N)), np.zeros((len(recursion.weights), N))
    for t in range(N):
        streamed[t] = np.eye(N)[t] / recursion.first - recursion.weights @ sums
        assert np.all(np.abs(streamed[t]).sum() <= recursion.noise_reach * (1 + 1e-12))
        sums = recursion.decays[:, None] * sums + streamed[t]
        assert np.all(np.abs(sums).sum(axis=1) <= recursion.reach * (1 + 1e-12))
    return streamed


def test_noise_recursion_inverts_the_matrix():
    for strategy in ALL:
        if not strategy.is_toeplitz:
            refused("must be Toeplitz to train with", strategy.noise_recursion)
            continue
        recursion = strategy.noise_recursion()
        assert recursion.copies == strategy.noise_copies
        streamed = (running_sums if type(recursion) is BufferedRecursion else last_vectors)(recursion)
        np.testing.assert_allclose(streamed, np.linalg.inv(matrix_of(strategy)), atol=1e-10)


def test_json_hash_and_words():
    for strategy in ALL:
        again = type(strategy).from_json(json.loads(json.dumps(strategy.to_json())))
        assert again == strategy and hash(again) == hash(strategy) and again is not strategy
        assert strategy.describe()
        with pytest.raises(KeyError):
            type(strategy).from_json({"kind": strategy.kind})


def test_checks_of_the_scheme():
    """Either refused or with a bound; no case falls through."""
    for strategy in ALL:
        close, truncated = ja.BMinSep(N, 1, 0.2), ja.TruncatedBMinSep(N, strategy.bands, 0.1, 9, 10)
        if isinstance(strategy, ja.BandedToeplitz | ja.FiniteToeplitz):
            ja.Mechanism(truncated, strategy, 1.0)
            if strategy.bands > 1:
                refused("bands must be at most the minimum separation", ja.Mechanism, close, strategy, 1.0)
        else:
            assert ja.Mechanism(close, strategy, 1.0).is_upper_bound
            refused("banded Toeplitz for truncated-b-min-sep", ja.Mechanism, truncated, strategy, 1.0)
        if not strategy.is_toeplitz or isinstance(
            strategy, ja.BandedInverse | ja.BufferedToeplitz | ja.FiniteToeplitz
        ):
            refused("strategy must have", ja.Mechanism, ja.BMinSep(N + 1, 2, 0.2), strategy, 1.0)


def test_by_name():
    scheme = ja.BMinSep(N, 3, 0.2)
    for name in NAMES:
        assert type(by_name(name, 3, scheme)) in STRATEGIES.values()
        refused("bands must be", by_name, name, 0, scheme)
    refused(r"strategy must be optimal, .* or a file", by_name, "best", 3, scheme)


SCHEDULE = {"iterations": 64, "min_separation": 8, "participations": 2}
BAD_SCHEDULES = [
    ({"iterations": 0}, "iterations must be"),
    ({"min_separation": 1.5}, "min_separation must be"),
    ({"participations": 0}, "participations must be"),
    ({"participations": 9}, "participations must be at most 8, got 9"),
]


@pytest.mark.parametrize(
    ("kind", "size", "more"),
    [
        (
            ja.BandedToeplitz,
            "bands",
            [
                ({"bands": 9}, "bands must be at most min_separation 8, got 9"),
                ({"bands": 65, "min_separation": 65}, "bands must be at most iterations 64, got 65"),
            ],
        ),
        (ja.BandedInverse, "bands", [({"min_separation": None}, "min_separation must be given for 2")]),
        (
            ja.BufferedToeplitz,
            "buffers",
            [
                ({"min_separation": None}, "min_separation must be given for 2 participations"),
                ({"workload": 0.1}, "workload must be"),
                ({"iterations": 9000, "workload": Workload(lambda t: 1 / (1 + t))}, "must have a constant"),
            ],
        ),
    ],
)
def test_schedules_without_an_optimum_are_refused(kind, size, more):
    for change, message in [*BAD_SCHEDULES, ({size: 0}, f"{size} must be"), *more]:
        refused(message, kind.optimal, **{size: 4} | SCHEDULE | change)


def test_errors_of_no_run_are_refused():
    error_of = functools.partial(ja.prefix_sum_error, ja.BandedToeplitz.identity())
    refused("iterations must be", error_of, iterations=0, noise_multiplier=1.0)
    for sigma in (0.0, -1.0, np.nan, np.inf, "x", None):
        refused("noise_multiplier must be", error_of, iterations=3, noise_multiplier=sigma)
