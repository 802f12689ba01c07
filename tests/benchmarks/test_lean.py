"""The lean programs of comparisons: clipping, noise and the choice of settings, against NumPy."""

import chex
import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, BufferedToeplitz, FixedOrder, Mechanism, Poisson
from tests.benchmarks import lean
from tests.benchmarks.real_data import COLUMNS, TRIAL_SEEDS, Protocol, Table, best_setting


@pytest.mark.parametrize("name", ["linear", "perceptron"])
def test_clipped_sums_are_those_of_the_gradients_of_examples(name):
    rng, model = np.random.default_rng(0), lean.MODELS[name]
    x, y = rng.random((4, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, 4)
    params = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype("f4") / 9, model.init(0))
    mask, clip, want = np.array([1, 1, 1, 0]), 2.0, None
    for row, label, real in zip(x, y, mask, strict=True):
        gradient = jax.grad(lambda p: lean.loss(model, p, {"inputs": row, "labels": label}))(params)  # noqa: B023
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]).astype(float)
        clipped = real * flat * min(1.0, clip / np.linalg.norm(flat))
        want = clipped if want is None else want + clipped
    found = lean.clipped_sum(model, params, x, y, mask, clip)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])
    np.testing.assert_allclose(flat, want, atol=1e-5)
    assert np.linalg.norm(want) < 3 * clip  # something was clipped


@pytest.mark.parametrize("kind", ["white", "banded", "buffered"])
def test_noise_is_that_of_the_matrix(kind):
    steps = 60
    scheme = FixedOrder(steps, 20, 3)
    strategy = {
        "white": BandedToeplitz((1.0,)),
        "banded": BandedToeplitz.square_root(4),
        "buffered": BufferedToeplitz.optimal(
            iterations=steps, buffers=1, min_separation=20, participations=3
        ),
    }[kind]
    found = lean.correlated_noise(Mechanism(scheme, strategy, 3.0), 5, np.random.default_rng(1))
    matrix = np.zeros((steps, steps))
    column = strategy.columns(steps, np.zeros(1, int))[:, 0]
    for lag in range(steps):
        matrix += np.diag(np.full(steps - lag, column[lag]), -lag)
    z = np.random.default_rng(1).standard_normal((steps, 5), dtype=np.float32)
    np.testing.assert_allclose(matrix @ found, 3.0 * z, atol=1e-3)


def test_a_step_adds_the_noise_in_clip_norms_and_divides_by_the_expected_batch():
    mechanism = Mechanism(Poisson(1, 0.5), BandedToeplitz((1.0,)), 7.0)
    data = np.zeros((8, 28, 28, 1), np.float32), np.zeros(8, np.int32)
    batch, setting = 4.0, lean.Setting(rate=2.0, momentum=0.0, clip=1e-3)
    found = lean.train(lean.Linear, mechanism, batch, [(setting, 5)], data)[0]
    noise = lean.correlated_noise(mechanism, 7850, np.random.default_rng([5, 1]))[0]
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])
    # Gradients of at most 8 clipped examples move a coordinate by at most 8 clip norms.
    np.testing.assert_allclose(flat, -2.0 * 1e-3 * noise / batch, atol=8 * 2.0 * 1e-3 / batch)
    assert abs(np.corrcoef(flat, noise)[0, 1]) > 0.99


def test_the_setting_is_chosen_by_means_over_all_trials(tmp_path):
    table, (low, high, *_) = Table(tmp_path / "real-data.csv"), Protocol().settings(2.0)
    cell = dict(method="b-min-sep", epsilon=2.0, noise_multiplier=1.0)

    def add(setting, seed, accuracy):
        row = dict(phase="trial", seed=seed, accuracy=accuracy, seconds=0.0)
        table.add(**row, **setting._asdict(), **cell)

    assert set(COLUMNS) >= {"seed", "accuracy"} and best_setting(table, cell) is None
    for seed, (one, other) in zip(TRIAL_SEEDS, [(0.9, 0.8), (0.1, 0.8), (0.9, 0.8)], strict=True):
        add(low, seed, one)
        add(high, seed, other)
    assert best_setting(table, cell) == high
    add(Protocol().settings(2.0)[2], TRIAL_SEEDS[0], 0.99)  # not all of its trials are finished
    assert best_setting(table, cell) == high
    assert best_setting(Table(table.path), cell) == high


@pytest.mark.parametrize("name", ["linear", "cnn"])
def test_runs_side_by_side_are_those_alone(name):
    """Each has its own seed and setting."""
    rng, model = np.random.default_rng(0), lean.MODELS[name]
    data = rng.uniform(size=(40, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, 40).astype(np.int32)
    mechanism = Mechanism(BMinSep(4, 2, 0.2), BandedToeplitz.square_root(2), 0.5)
    runs = [(lean.Setting(rate, 0.9, 0.3), seed) for rate, seed in ((1.0, 0), (3.0, 1), (3.0, 0))]
    together = lean.train(model, mechanism, 8.0, runs, data)
    alone = [lean.train(model, mechanism, 8.0, [run], data)[0] for run in runs]
    for ours, expected in zip(together, alone, strict=True):
        chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-7)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, together[::2]), strict=True))
