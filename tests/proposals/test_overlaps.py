"""Sensitivity of overlapping columns against every pattern there is, and matrices optimised for it."""

import itertools
import json
import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import unamplified
from jaxacct.strategies import Workload, by_name, worst_pattern
from jaxacct.strategies.banded_inverse import _log_error
from jaxacct.strategies.worst_pattern import Patterns
from tests.oracles import enumeration
from tests.oracles.enumeration import max_square_norm
from tests.strategies.test_buffered import loss
from tests.strategies.test_worst_pattern import matrix_of

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
