"""Streamed correlated noise: the dense inverse, covariances, keys, the optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import linalg, stats

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, prefix_sum_error
from train import noise
from train.optimizers import linear_decay, privatize

FALSE_ALARM = 1e-6
KEY = np.array([[1, 2], [3, 4]], np.uint32)
PARAMS = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros(4), jnp.zeros(())]}


def run(strategy, steps, params=PARAMS, key=KEY):
    """(steps, parameters) of streamed `w` and of the `z` it was made from."""
    state = noise.init(strategy, params, key)
    step = jax.jit(lambda state: noise.draw(strategy, state, params))
    w, z = [], []
    for t in range(steps):
        z.append(noise.standard_normals(state.key, t, params))
        drawn, state = step(state)
        w.append(drawn)

    def flat(trees):
        return np.stack([np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(t)]) for t in trees])

    return flat(w), flat(z)


@pytest.mark.parametrize("bands", [1, 2, 5, 16, 64, 100])
def test_against_the_dense_inverse(bands):
    strategy = BandedToeplitz.square_root(bands)
    w, z = run(strategy, 64)
    column = np.zeros(64)
    column[: min(bands, 64)] = strategy.array[:64]
    dense = linalg.toeplitz(column, np.zeros(64))
    np.testing.assert_allclose(w, linalg.solve_triangular(dense, z, lower=True), atol=2e-5)


def test_covariance_of_prefix_sums():
    """Mean squared prefix-sum error over 20,000 coordinates against theory; normal tail, false alarm 1e-6."""
    strategy, n = BandedToeplitz.optimal(iterations=24, bands=6, min_separation=6, participations=1), 24
    w, _ = run(strategy, n, {"a": jnp.zeros(20_000)})
    sums = np.cumsum(w, axis=0)
    column = np.zeros(n)
    column[: strategy.bands] = strategy.array
    root = np.tril(np.ones((n, n))) @ np.linalg.inv(linalg.toeplitz(column, np.zeros(n)))
    covariance = root @ root.T
    empirical = sums @ sums.T / sums.shape[1]
    deviation = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / sums.shape[1])
    worst = np.abs((empirical - covariance) / deviation).max()
    assert worst < stats.norm.isf(FALSE_ALARM / 2 / n**2)
    theory = prefix_sum_error(strategy, iterations=n, noise_multiplier=1.0)
    assert np.diag(empirical).mean() == pytest.approx(theory, rel=0.05)


def test_normals_are_normal_and_fresh_at_every_step_and_leaf():
    params = {"a": jnp.zeros(50_000), "b": jnp.zeros(50_000)}
    drawn = [noise.standard_normals(jnp.asarray(KEY), t, params) for t in range(2)]
    leaves = [np.asarray(leaf) for tree in drawn for leaf in jax.tree.leaves(tree)]
    for i, leaf in enumerate(leaves):
        assert stats.kstest(leaf, "norm").pvalue > FALSE_ALARM
        for other in leaves[:i]:
            assert abs(np.corrcoef(leaf, other)[0, 1]) < stats.norm.isf(FALSE_ALARM) / np.sqrt(50_000)


@pytest.mark.parametrize("word", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_every_word_of_the_key_matters(word):
    other = KEY.copy()
    other[word] += 1
    a, b = (noise.standard_normals(jnp.asarray(k), 0, PARAMS)["a"] for k in (KEY, other))
    assert not np.any(np.asarray(a) == np.asarray(b))


def test_fresh_keys_come_from_the_system():
    assert len({noise.fresh_key().tobytes() for _ in range(10)}) == 10


def test_privatize_is_the_sum_plus_scaled_noise_over_the_expected_batch():
    mechanism = Mechanism(BMinSep(5, 3, 0.1), BandedToeplitz.square_root(3), 0.7)
    transform = privatize(mechanism, clip_norm=2.0, expected_batch_size=8.0, key=KEY)
    state = transform.init(PARAMS)
    w, _ = run(mechanism.strategy, 5)
    total = jax.tree.map(lambda p: jnp.ones_like(p) * 3, PARAMS)
    for t in range(5):
        update, state = jax.jit(transform.update)(total, state)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(update)])
        np.testing.assert_allclose(flat, (3 + 2.0 * 0.7 * w[t]) / 8, rtol=1e-5, atol=1e-6)
    update, _ = transform.update(total, state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(update))


def test_one_band_is_plain_dp_sgd_and_keeps_no_buffer():
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    state = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY).init(PARAMS)
    assert all(leaf.size == 0 for leaf in jax.tree.leaves(state.recent))


def test_it_drops_into_a_chain_before_any_optimizer():
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0)
    for optimizer in (optax.adam(1e-3), optax.sgd(0.1, momentum=0.95), optax.adamw(1e-3)):
        chain = optax.chain(private, optimizer)
        update, _ = chain.update(PARAMS, chain.init(PARAMS), PARAMS)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))


def test_memory_is_bands_minus_one_copies():
    state = noise.init(BandedToeplitz.square_root(16), PARAMS, KEY)
    size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.recent)) == 15 * size


def test_linear_decay_of_the_paper():
    schedule = linear_decay(0.4, 400)
    at = [float(schedule(step)) for step in (0, 100, 200, 300, 400)]
    np.testing.assert_allclose(at, [0.4, 0.4, (0.4 + 0.02) / 2, 0.02, 0.02], rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("clip_norm", 0.0), ("expected_batch_size", -1.0)])
def test_bad_arguments(name, value):
    options = {"clip_norm": 1.0, "expected_batch_size": 1.0} | {name: value}
    with pytest.raises(ValueError, match=name):
        privatize(Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0), **options)
