"""Sensitivity over the patterns of batches, of overlapping columns too: every pattern, and the literature."""

import itertools
import json
import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import unamplified
from jaxacct.strategies import Workload, by_name, worst_pattern
from jaxacct.strategies.banded_inverse import _log_error
from jaxacct.strategies.worst_pattern import Patterns, squared_sensitivity
from tests.oracles import enumeration
from tests.oracles.enumeration import allowed_steps, max_square_norm, strategy_matrix
from tests.refusals import refused
from tests.strategies.test_buffered import loss


def matrix_of(strategy, n: int) -> np.ndarray:
    """C from its first column, or as it is."""
    return strategy.matrix if isinstance(strategy, ja.Dense) else strategy_matrix(strategy.array, n, n)


def drawn(rng) -> tuple:
    """A random matrix of each kind and random limits, with and without epochs."""
    n = int(rng.integers(1, 10))
    e = int(rng.integers(1, n + 1)) if rng.random() < 0.5 else None
    p = Patterns(n, int(rng.integers(1, n + 1)), int(rng.integers(1, 6)), e)
    kind, entries = rng.integers(4), rng.uniform(0, 1, int(rng.integers(1, n + 1)))
    if kind == 0:
        strategy = ja.Toeplitz((0.5, *entries))
    elif kind == 1:
        strategy = ja.Toeplitz(tuple(np.sort(entries + 0.01)[::-1]))
    elif kind == 2:
        strategy = ja.Dense(np.tril(rng.uniform(0, 1, (n, n))) + 0.1 * np.eye(n))
    else:
        strategy = ja.BufferedToeplitz((0.9, 0.3), (0.2, 0.4), n)
    return strategy, p


def test_bounds_enclose_every_pattern(monkeypatch):
    """300 random matrices and limits, by the dynamic program and by pairs alone."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(300):
        strategy, p = drawn(rng)
        exact = max_square_norm(matrix_of(strategy, p.iterations), p)
        upper = squared_sensitivity(strategy, p)
        assert exact <= upper
        ratios.append(upper / exact)
        with monkeypatch.context() as patch:
            patch.setattr(worst_pattern, "MAX_ROWS", 0)
            assert exact <= squared_sensitivity.__wrapped__(strategy, p)
    assert max(ratios) < 1.1 and np.mean(np.array(ratios) < 1 + 1e-9) > 0.95


def test_vectors_of_any_direction_are_covered():
    """Attack: gradients in three dimensions, chosen by power iteration, on every pattern of a small run."""
    rng, n = np.random.default_rng(1), 7
    for _ in range(20):
        strategy = ja.Dense(np.tril(rng.uniform(0, 1, (n, n))) + 0.1 * np.eye(n))
        p = Patterns(n, 2, 3)
        upper = squared_sensitivity(strategy, p)
        for steps in filter(lambda steps: len(steps) == 3, allowed_steps(p)):
            columns = strategy.matrix[:, list(steps)]
            gradients = rng.normal(size=(3, 3))
            for _ in range(20):
                gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
                assert np.square(columns @ gradients).sum() <= upper
                gradients = columns.T @ columns @ gradients


def test_negative_entries_need_absolute_values():
    """Why C must have none: with a negative product of columns opposite gradients do more than equal ones."""
    matrix = np.array([[1.0, 0.0], [-0.8, 0.6]])
    equal, opposite = np.square(matrix @ [1.0, 1.0]).sum(), np.square(matrix @ [1.0, -1.0]).sum()
    assert opposite > 1.9 * equal
    assert opposite == pytest.approx(np.abs(matrix.T @ matrix).sum())
    refused("at least 0", ja.Dense, matrix)


def test_epochs_lower_the_bound():
    """Numbers of proofs/fixed_order.md: one order in all epochs, shuffled epochs, neighbours allowed."""
    strategy = ja.BufferedToeplitz((0.99, 0.8, 0.2), (0.1, 0.2, 0.3), 1000)
    limits = Patterns(1000, 250, 4), Patterns(1000, 1, 4, 250), Patterns(1000, 1, 4)
    found = [squared_sensitivity(strategy, p) for p in limits]
    assert found == pytest.approx([4.1769, 6.8838, 11.3080], abs=1e-3)
    long = ja.BufferedToeplitz((0.99, 0.8, 0.2), (0.1, 0.2, 0.3), 7200)
    steps = 720 * np.arange(10) + 719 * (np.arange(10) % 2 == 0)  # pairs at ends of epochs
    lower = np.square(long.columns(7200, steps).sum(axis=1)).sum()
    upper = squared_sensitivity(long, Patterns(7200, 1, 10, 720))
    assert lower < upper < 1.001 * lower


def test_disjoint_columns_are_exact_at_the_end_of_the_run():
    """The last columns are cut off: with 4 bands and 9 steps the third participation has one row of four."""
    for iterations in [8, 9, 11, 12]:
        for participations in [1, 2, 4]:
            for strategy in (
                ja.BandedToeplitz.square_root(4),
                ja.FiniteToeplitz((1.0, 3.0, 2.0, 1.0), iterations),
            ):
                p = Patterns(iterations, 4, participations)
                upper = squared_sensitivity(strategy, p)
                assert upper == pytest.approx(max_square_norm(matrix_of(strategy, iterations), p), rel=1e-12)
            if iterations == 9 and participations == 4:
                assert upper < 2.9  # three columns of norm 1 are not to be had


def test_columns_that_never_rise_are_exact():
    """Theorem 2 of arXiv 2405.13763: steps 0, b, 2 b, .. are the worst; short and long runs agree."""
    strategy = ja.BufferedToeplitz((0.99, 0.8, 0.2), (0.1, 0.2, 0.3), 400)
    for b, k in ((1, 4), (50, 8), (130, 5), (400, 3)):
        upper = squared_sensitivity(strategy, Patterns(400, b, k))
        steps = b * np.arange(min(k, -(-400 // b)))
        exact = np.square(matrix_of(strategy, 400)[:, steps].sum(axis=1)).sum()
        assert upper == pytest.approx(exact, rel=1e-11)
        assert strategy.squared_sensitivity(400, b, k) == pytest.approx(exact, rel=1e-10)


N = 10


def worst(strategy, n: int, separation: int, participations: int) -> float:
    return max_square_norm(matrix_of(strategy, n), Patterns(n, separation, participations))


FALLING = [
    ja.BandedInverse.bisr(iterations=N, bands=3),
    ja.Toeplitz(tuple(0.8 ** np.arange(N))),
    ja.Toeplitz((1.0, 1.0, 1.0, 0.2)),
    ja.BandedInverse((1.0, -1.0), N),
    ja.BufferedToeplitz((0.9, 0.3), (0.6, 0.4), N),
]
RISING = [
    ja.Toeplitz((1.0, 0.0, 0.1, 0.9)),
    ja.Toeplitz((0.3, 0.0, 0.0, 0.0, 1.0)),
    *(ja.Toeplitz(tuple(np.random.default_rng(seed).random(N))) for seed in range(3)),
]


def test_sensitivity_against_every_pattern():
    """Met exactly by columns that fall; never passed by others, nor more than with the largest overlap."""
    for strategy in FALLING + RISING:
        for separation, k in itertools.product((1, 2, 3, 4, N), (1, 2, 3)):
            bound = strategy.squared_sensitivity(N, separation, k)
            exact = worst(strategy, N, separation, k)
            if strategy in FALLING:
                assert exact <= bound <= exact * (1 + 1e-12)
            assert exact <= bound
            most = min(k, -(-N // separation))
            assert bound <= most * (1 + 2 * float(strategy.cross_terms(N, separation))) * (1 + 1e-12)
            if separation == N or k == 1:
                assert bound == pytest.approx(1, rel=1e-12)


def test_what_takes_too_long_falls_back(monkeypatch):
    strategy = ja.BandedInverse.bisr(iterations=12, bands=4)
    counted = strategy.squared_sensitivity(12, 3, 3)
    worst_pattern.overlapping_sensitivity.cache_clear()
    monkeypatch.setattr(worst_pattern, "_MAX_OVERLAP_PRODUCTS", 0)
    fallback = strategy.squared_sensitivity(12, 3, 3)
    worst_pattern.overlapping_sensitivity.cache_clear()
    assert counted < fallback == 3 * (1 + 2 * float(strategy.cross_terms(12, 3)))


@pytest.mark.parametrize("k", [1, 4, 16])
def test_against_the_published_formula(k):
    """BISR of 8 bands, n = 128, by jax-privacy in float64 (design/PEERS.md, 3g): its first entry is 1."""
    published = {1: 1.8754578, 4: 7.6844778, 16: 53.5836843}[k]
    strategy = ja.BandedInverse.bisr(iterations=128, bands=8)
    squared = strategy.squared_sensitivity(128, 128 // k, k) / strategy.array[0] ** 2
    assert squared == pytest.approx(published, rel=1e-7)


@pytest.mark.parametrize("scheme", [ja.BMinSep(N, 3, 1.0, False), ja.MultiAttribution(N, 3, 1.0, 2, False)])
def test_the_revealed_pattern_rests_on_it(scheme):
    strategy = FALLING[1]
    found = unamplified.sensitivity(ja.Mechanism(scheme, strategy, 1.0))
    assert found == pytest.approx(scheme.examples_per_unit * math.sqrt(worst(strategy, N, 3, 4)), rel=1e-12)
    dense = ja.Dense(enumeration.strategy_matrix(strategy.array, N, N))
    assert found <= unamplified.sensitivity(ja.Mechanism(scheme, dense, 1.0))


# n = 128, 8 bands of the inverse: the numbers to beat of issue 13, and ours before.
@pytest.mark.parametrize(
    ("k", "elsewhere", "before"), [(1, 6.131, 6.043), (4, 28.61, 34.88), (16, 209.6, 420.5)]
)
def test_optimal_for_the_participations(k, elsewhere, before):
    found = ja.BandedInverse.optimal(iterations=128, bands=8, min_separation=128 // k, participations=k)
    plain = ja.BandedInverse.bisr(iterations=128, bands=8)
    at = loss(found, 128, 128 // k, k)
    assert at <= elsewhere and at < before and at < 0.93 * loss(plain, 128, 128 // k, k)
    assert len(found.inverse) == 8
    stored = json.loads(json.dumps(found.to_json()))
    assert set(stored) == {"kind", "inverse", "iterations", "given_norm"}
    assert ja.BandedInverse.from_json(stored) == found


def test_optimal_at_many_steps():
    """The search from BISR left the numbers that there are at 1000 steps, and BISR came back: 43.75."""
    found = ja.BandedInverse.optimal(iterations=1000, bands=8)
    assert ja.prefix_sum_error(found, iterations=1000, noise_multiplier=1.0) == pytest.approx(
        12.625, rel=1e-4
    )


def test_by_name_for_the_most_participations():
    cyclic = by_name("optimal-inverse", 3, ja.CyclicPoisson(12, 3, 0.1))
    assert cyclic == by_name("optimal-inverse", 3, ja.BallsInBins(12, 3))
    assert cyclic == ja.BandedInverse.optimal(iterations=12, bands=3, min_separation=3, participations=4)
    assert by_name("optimal-inverse", 3, ja.Poisson(12, 0.05)) == ja.BandedInverse((1.0,), 12)


def test_small_optimum_against_a_grid():
    """Two bands, one number to find: no value on a fine grid is better, by enumeration of patterns."""
    found = ja.BandedInverse.optimal(iterations=8, bands=2, min_separation=2, participations=3)

    def exact(strategy):
        return ja.prefix_sum_error(strategy, iterations=8, noise_multiplier=1.0) * worst(strategy, 8, 2, 3)

    least = min(exact(ja.BandedInverse((1.0, -h), 8)) for h in np.linspace(0, 1, 101))
    assert exact(found) <= least * (1 + 1e-9)


def test_gradient_against_differences():
    n, point = 12, np.array([1.0, -0.4, 0.1, -0.2])
    at = (Workload().error_of(n, 4), n, 3, 3)
    _, gradient = _log_error(point, *at)
    for k in range(3):
        step = 1e-6 * np.eye(4)[k + 1]
        slope = (_log_error(point + step, *at)[0] - _log_error(point - step, *at)[0]) / 2e-6
        assert gradient[k] == pytest.approx(slope, rel=1e-6)
