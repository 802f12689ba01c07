"""Buffered linear Toeplitz matrices against dense linear algebra, every pattern and other matrices."""

import numpy as np
import pytest
import scipy

from jaxacct import BandedToeplitz, BufferedToeplitz, prefix_sum_error
from jaxacct.strategies import Workload, workload_error
from jaxacct.strategies.buffered_toeplitz import _inverse_column, _log_error, _poles
from tests.oracles import enumeration
from tests.refusals import refused

N = 9
MEMBERS = [
    BufferedToeplitz((0.9, 0.4), (0.3, 0.4), N),
    BufferedToeplitz((0.7, 0.7, 0.0), (0.2, 0.1, 0.7), N),  # equal decays, without memory; weights of 1
    BufferedToeplitz((0.999999,), (1.0,), N),
    BufferedToeplitz((0.0,), (1e-9,), 1),
]


def loss(strategy, n: int, separation: int, k: int) -> float:
    error = prefix_sum_error(strategy, iterations=n, noise_multiplier=1.0)
    return error * strategy.squared_sensitivity(n, separation, k)


@pytest.mark.parametrize("strategy", MEMBERS)
def test_columns_of_the_matrix_and_its_inverse(strategy):
    n = strategy.iterations
    terms = list(zip(strategy.weights, strategy.decays, strict=True))
    by_hand = np.array([1.0, *(sum(w * d**t for w, d in terms) for t in range(n - 1))])
    dense = enumeration.strategy_matrix(by_hand, n, n)
    column = np.append(strategy.array, np.zeros(n - strategy.bands))
    np.testing.assert_allclose(column, by_hand / np.linalg.norm(by_hand), rtol=1e-14)
    decays, weights = np.array(strategy.decays), np.array(strategy.weights)
    np.testing.assert_allclose(_inverse_column(decays, weights, n), np.linalg.inv(dense)[:, 0], atol=1e-13)
    poles, masses = _poles(decays, weights)
    assert poles.size == decays.size and np.all(np.abs(poles) < 1) and np.all(masses >= 0)
    for workload in (
        Workload(),
        Workload(0.5, momentum=0.8, weight_decay=0.1),
        Workload(lambda t: 1 / (1 + t)),
    ):
        exact = np.square(workload.matrix(n) @ np.linalg.inv(dense)).sum() / n * np.square(by_hand).sum()
        found = workload_error(strategy, iterations=n, noise_multiplier=1.0, workload=workload)
        assert found == pytest.approx(exact, rel=1e-12)


def test_the_objective_and_its_gradient_against_differences():
    n, point = 40, np.array([0.95, 0.5, 0.1, 0.3, 0.2, 0.1])
    error_of = Workload(0.3, momentum=0.9).error_of(n, n)

    def value(numbers):
        return _log_error(numbers[:3], numbers[3:], error_of, n, 7, 4)

    workload, strategy = Workload(0.3, momentum=0.9), BufferedToeplitz(tuple(point[:3]), tuple(point[3:]), n)
    objective = strategy.unit_workload_error(n, workload) * strategy.squared_sensitivity(n, 7, 4)
    assert value(point)[0] == pytest.approx(np.log(objective), rel=1e-10)
    gradient = np.concatenate(value(point)[1:])
    for i, step in enumerate(1e-6 * np.eye(6)):
        slope = (value(point + step)[0] - value(point - step)[0]) / 2e-6
        assert gradient[i] == pytest.approx(slope, rel=1e-6)


def test_made_for_the_workload():
    schedule = dict(iterations=200, buffers=3, min_separation=50, participations=4)
    workload = Workload(momentum=0.9)
    plain, made = (BufferedToeplitz.optimal(**schedule, workload=w) for w in (Workload(), workload))
    errors = [
        workload_error(c, iterations=200, noise_multiplier=1.0, workload=workload)
        * c.squared_sensitivity(200, 50, 4)
        for c in (plain, made)
    ]
    assert errors[1] < 0.99 * errors[0]


def test_buffers_that_do_nothing_are_left_out():
    """128 steps, one participation: the optimum over any number of buffers has three."""
    few, many = (BufferedToeplitz.optimal(iterations=128, buffers=buffers) for buffers in (3, 6))
    assert many.buffers == 3
    assert loss(many, 128, 128, 1) == pytest.approx(loss(few, 128, 128, 1), rel=2e-6)
    assert BufferedToeplitz.optimal(iterations=1, buffers=2).array.tolist() == [1.0]
    assert BufferedToeplitz.optimal(iterations=2, buffers=2).buffers == 1
    once = BufferedToeplitz.optimal(iterations=128, buffers=3, min_separation=10**7)
    assert once == few  # and no array of that length


def test_memory_does_not_grow_with_bands():
    strategy = MEMBERS[0]
    longer = BufferedToeplitz(strategy.decays, strategy.weights, 5000)
    assert longer.bands > 100 and longer.noise_copies == strategy.noise_copies == 4


def test_no_few_sums_make_the_noise_of_a_banded_matrix():
    """States that stream C^-1 are as many as its Hankel matrix has rank: d, and b - 1 once it is cut off."""
    n, sums = 24, BufferedToeplitz((0.9, 0.4), (0.3, 0.4), 24)
    for strategy, rank in ((sums, 2), (BandedToeplitz(tuple(sums.array[:7])), 6)):
        column = np.linalg.inv(enumeration.strategy_matrix(strategy.array, n, n))[:, 0]
        hankel = scipy.linalg.hankel(column[1 : n // 2 + 1], column[n // 2 : n])
        assert np.linalg.matrix_rank(hankel, 1e-9) == rank


def test_bad_numbers():
    for change, message in [
        ({"decays": (1.0,)}, r"decays must be from 0 to below 1, one was 1\.0"),
        ({"decays": (-0.1,)}, r"decays must be from 0 to below 1, one was -0\.1"),
        ({"weights": (0.0,)}, r"weights must be above 0, one was 0\.0"),
        ({"weights": (1.1,)}, r"weights must add up to at most 1, added up to 1\.1"),
        ({"weights": (0.1, 0.2)}, "weights must be as many as decays, 1, got 2"),
        ({"decays": ()}, "decays must be a non-empty list"),
        ({"weights": (float("nan"),)}, "weights must be above 0"),
        ({"weights": ("a",)}, "weights must be a list of numbers"),
        ({"weights": (True,)}, "weights must be a list of numbers"),
        ({"iterations": 0}, "iterations must be"),
    ]:
        refused(message, BufferedToeplitz, **{"decays": (0.5,), "weights": (0.5,), "iterations": 4} | change)


# Error x squared sensitivity by jax-privacy with as many buffers, and by the optimal n free coefficients for
# one participation.
@pytest.mark.parametrize(
    ("n", "k", "buffers", "peer", "freely"),
    [
        (128, 1, 3, 5.74993, 5.74646),
        (1000, 1, 3, 9.30911, 9.29670),
        (128, 4, 3, 28.8420, 0),
        (1000, 8, 3, 109.031, 0),
    ],
)
def test_no_worse_than_the_peer_and_hardly_than_free_coefficients(n, k, buffers, peer, freely):
    found = BufferedToeplitz.optimal(iterations=n, buffers=buffers, min_separation=n // k, participations=k)
    assert found.buffers <= buffers
    at = loss(found, n, n // k, k)
    assert freely < at <= peer * (1 + 1e-6)
    assert not freely or at < 1.002 * freely
