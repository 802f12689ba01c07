"""Sensitivity over the patterns of fixed-order batches: against every pattern, and against the literature."""

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.strategies import worst_pattern
from jaxacct.strategies.worst_pattern import Patterns, squared_sensitivity
from tests.oracles.enumeration import allowed_steps, max_square_norm, strategy_matrix
from tests.refusals import refused


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
