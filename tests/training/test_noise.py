"""Streamed correlated noise: the dense inverse, covariances, keys, the optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import linalg, signal, stats

from jaxacct import BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism, Poisson, prefix_sum_error
from jaxacct.kernels.randomness import fresh_key, key_words
from train import noise, normals, sampler
from train.grid import Grid, GridSum
from train.optimizers import linear_decay, privatize
from train.step import make_step

FALSE_ALARM = 1e-6
KEY = np.arange(8, dtype=np.uint32)
PARAMS = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros(4), jnp.zeros(())]}
LEVELS = 2.0**19


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def run(strategy, steps, params=PARAMS, key=KEY):
    """(steps, parameters) of streamed integers `W` and of the `z` they were made from."""
    state = noise.init(strategy, params, key)
    step = jax.jit(lambda state: noise.draw(strategy, LEVELS, state, params))
    w, z = [], []
    for t in range(steps):
        z.append(np.asarray(noise.standard_normals(state.key, t, flat(params).size)))
        drawn, state = step(state)
        w.append(flat(drawn))
    return np.stack(w), np.stack(z)


@pytest.mark.parametrize(
    "bands", [1, 5, 100, *(pytest.param(b, marks=pytest.mark.slow) for b in (2, 16, 64))]
)
def test_against_the_dense_inverse(bands):
    strategy = BandedToeplitz.square_root(bands)
    w, z = run(strategy, 64)
    assert w.dtype == np.int32
    column = np.zeros(64)
    column[: min(bands, 64)] = strategy.array[:64]
    dense = linalg.toeplitz(column, np.zeros(64))
    # Each rounding of half a unit passes through the same filter.
    atol = np.abs(np.linalg.inv(dense)).sum(axis=1).max() * strategy.array[0] * 0.5
    np.testing.assert_allclose(w, LEVELS * linalg.solve_triangular(dense, z, lower=True), atol=1.01 * atol)


def test_covariance_of_prefix_sums():
    """Mean squared prefix-sum error over 20,000 coordinates against theory; normal tail, false alarm 1e-6."""
    strategy, n = BandedToeplitz.optimal(iterations=24, bands=6, min_separation=6, participations=1), 24
    w, _ = run(strategy, n, {"a": jnp.zeros(20_000)})
    sums = np.cumsum(w / LEVELS, axis=0)
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


def test_normals_are_normal_and_fresh_at_every_step():
    drawn = [np.asarray(noise.standard_normals(KEY, t, 100_000)) for t in range(2)]
    for i, leaf in enumerate(drawn):
        assert stats.kstest(leaf, "norm").pvalue > FALSE_ALARM
        halves = leaf[:60_000].reshape(-1, 6).T  # the six of a block, and pairs by their squares
        for a in range(6):
            for b in range(a):
                for power in (1, 2):
                    r = np.corrcoef(halves[a] ** power, halves[b] ** power)[0, 1]
                    assert abs(r) < stats.norm.isf(FALSE_ALARM / 60) / np.sqrt(10_000)
        for other in drawn[:i]:
            assert abs(np.corrcoef(leaf, other)[0, 1]) < stats.norm.isf(FALSE_ALARM) / np.sqrt(100_000)


def test_chacha_against_rfc_8439():
    """The block of section 2.3.2, with 20 rounds."""
    key = np.frombuffer(bytes(range(32)), "<u4")
    block = normals.chacha(key, (1, 0x09000000, 0x4A000000, 0), rounds=20)
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    assert [f"{int(word):08x}" for word in block[:, 0]] == expected.split()


def test_elementary_functions_against_numpy(x64):
    """Float64 to a few units in the last place, at the ends too."""
    x = np.concatenate([2.0 ** -np.linspace(0, 97, 20_001), 1 - np.logspace(-16, -1, 500)])
    np.testing.assert_allclose(normals._log(x), np.log(x), rtol=1e-15, atol=1e-15)
    turns = np.linspace(0, 1, 20_001)
    sine, cosine = normals._sine_cosine(turns)
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * turns), atol=2e-15)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * turns), atol=2e-15)


def test_the_largest_normal_comes_from_the_smallest_word():
    words = np.zeros((16, 1), np.uint32)
    drawn = np.asarray(normals._box_muller(jnp.asarray(words)))
    assert drawn.real.max() == pytest.approx(normals.LARGEST, rel=1e-14)
    words[:] = 2**32 - 1
    assert np.isfinite(normals._box_muller(jnp.asarray(words))).all()


@pytest.mark.parametrize("size", [1, 5, 6, 7, 600_000])
def test_any_number_of_normals(size, monkeypatch):
    """All of them others, in one pass or in several."""
    monkeypatch.setitem(normals._BLOCKS_AT_ONCE, "cpu", 2**15)
    drawn = noise.standard_normals(KEY, 3, size)
    assert drawn.shape == (size,)
    assert drawn.dtype == np.float64
    assert len(np.unique(drawn)) == size
    if size == 600_000:
        # Both of a pair: block 0 is the first of the first piece, in either half of all that is drawn.
        six, pieces = np.asarray(noise.standard_normals(KEY, 3, 6)), -(-size // (6 * 2**15))
        np.testing.assert_allclose(drawn[: 3 * 2**15 : 2**15], six[:3], rtol=1e-12)
        np.testing.assert_allclose(drawn[3 * 2**15 * pieces :: 2**15][:3], six[3:], rtol=1e-12)


def test_which_parameter_gets_which_normal():
    """Runs are told apart by it (`train.run_folder.generator`): another place is another ARRANGEMENT."""
    assert (normals.ARRANGEMENT, normals._BLOCKS_AT_ONCE) == (2, {"cpu": 2**11, "others": 2**16})


@pytest.mark.parametrize("word", range(8))
def test_every_word_of_the_key_matters(word):
    other = KEY.copy()
    other[word] += 1
    a, b = (noise.standard_normals(k, 0, 12) for k in (KEY, other))
    assert not np.any(np.asarray(a) == np.asarray(b))


def test_fresh_keys_come_from_the_system_whole():
    """Mutants 21 and 22: every word of 20 keys is its own, in noise and in sampler."""
    for fresh, words in ((noise.fresh_key, 8), (sampler.fresh_key, 4)):
        keys = np.array([fresh() for _ in range(20)])
        assert keys.shape == (20, words)
        assert len(np.unique(keys)) == keys.size  # false alarm 160^2 / 2^33 = 3e-6


def test_run_keys_of_the_accountant_have_64_bits():
    keys = np.array([key_words(fresh_key()) for _ in range(20)])
    assert len(np.unique(keys)) == 40


def test_levels_that_no_integer_leaves():
    """The largest normal at every step with the worst signs stays below 2^31, and would not at twice."""
    sums = BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 40)
    for strategy in (BandedToeplitz.square_root(8), BandedToeplitz((1.0, 1.0)), sums):
        most = noise.largest_levels(strategy, 40)
        c = strategy.array
        impulse = signal.lfilter([1.0], c, np.eye(40)[0])
        worst = np.zeros(40)
        signs = np.sign(impulse[::-1])
        for t in range(40):
            earlier = sum(c[k] * worst[t - k] for k in range(1, min(t, c.size - 1) + 1))
            worst[t] = np.round((most * normals.LARGEST * signs[t] - earlier) / c[0])
        assert 2**30 < abs(worst[-1]) < 2**31


def grid_sum(private, number: int) -> GridSum:
    """A sum of `number` clip norms in each coordinate."""
    return GridSum.zeros(PARAMS, private.grid).plus(
        jax.tree.map(lambda p: jnp.full(p.shape, number * 2**private.grid.bits, jnp.int32), PARAMS)
    )


def test_privatize_is_the_sum_plus_scaled_noise_over_the_expected_batch():
    mechanism = Mechanism(BMinSep(5, 3, 0.1), BandedToeplitz.square_root(3), 0.5)
    private = privatize(mechanism, clip_norm=2.0, expected_batch_size=8.0, key=KEY)
    assert private.grid == Grid(2.0, 21)
    state = private.init(PARAMS)
    w, _ = run(mechanism.strategy, 5)  # levels are 0.5 x 2^21 there, half of them here
    total = grid_sum(private, 3)
    step = jax.jit(private.update)
    for t in range(5):
        update, state = step(total, state)
        np.testing.assert_allclose(flat(update), (6 + 2.0 * 0.5 * w[t] / LEVELS) / 8, rtol=1e-5, atol=1e-5)
    update, _ = step(total, state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(update))


def test_what_is_not_a_sum_of_that_clip_norm_is_refused():
    """A bare gradient, another clip norm, another grid: all trained without enough noise, without a word."""
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY)
    state = private.init(PARAMS)
    for wrong in (PARAMS, GridSum.zeros(PARAMS, Grid(2.0, 20)), GridSum.zeros(PARAMS, Grid(1.0, 19))):
        with pytest.raises(ValueError, match="updates must be a sum of clipped gradients"):
            private.update(wrong, state)


def test_a_step_takes_its_clip_norm_from_its_noise():
    for wrong in (optax.sgd(0.1), optax.chain(optax.sgd(0.1)), None):
        with pytest.raises(ValueError, match=r"private must come from train.optimizers.privatize"):
            make_step(lambda p, e: 0.0, wrong, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0)
    with pytest.raises(TypeError, match="clip_norm"):
        make_step(lambda p, e: 0.0, private, optax.sgd(0.1), clip_norm=2.0)
    assert str(private.key) not in repr(private)


@pytest.mark.parametrize("sigma", [1e-6, 1e7])
def test_noise_that_no_grid_serves_is_refused(sigma):
    with pytest.raises(ValueError, match="noise_multiplier must be between"):
        privatize(
            Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), sigma), clip_norm=1.0, expected_batch_size=1.0
        )


def test_one_band_is_plain_dp_sgd_and_keeps_no_buffer():
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    state = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY).init(PARAMS)
    assert all(leaf.size == 0 for leaf in jax.tree.leaves(state.recent))


def test_it_drops_into_a_chain_before_any_optimizer():
    mechanism = Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0)
    for optimizer in (optax.adam(1e-3), optax.sgd(0.1, momentum=0.95), optax.adamw(1e-3)):
        chain = optax.chain(private, optimizer)
        update, _ = chain.update(grid_sum(private, 0), chain.init(PARAMS), PARAMS)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [(BandedToeplitz.square_root(16), 15), (BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 5000), 4)],
)
def test_memory_is_bands_minus_one_copies_or_two_a_buffer(strategy, copies):
    state = noise.init(strategy, PARAMS, KEY)
    size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.recent)) == copies * size
    assert strategy.noise_copies == copies


def test_linear_decay_of_the_paper():
    schedule = linear_decay(0.4, 400)
    at = [float(schedule(step)) for step in (0, 100, 200, 300, 400)]
    np.testing.assert_allclose(at, [0.4, 0.4, (0.4 + 0.02) / 2, 0.02, 0.02], rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("clip_norm", 0.0), ("expected_batch_size", -1.0)])
def test_bad_arguments(name, value):
    options = {"clip_norm": 1.0, "expected_batch_size": 1.0} | {name: value}
    with pytest.raises(ValueError, match=name):
        privatize(Mechanism(Poisson(3, 0.1), BandedToeplitz((1.0,)), 1.0), **options)


def test_memory_of_a_draw_is_a_few_times_that_of_the_parameters():
    """Was 6.6 times, more than the gradients need where few are in memory at a time."""
    params = {"w": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)}
    white = privatize(
        Mechanism(Poisson(9, 0.1), BandedToeplitz.square_root(1), 1.0), clip_norm=1.0, expected_batch_size=4.0
    )
    total = jax.eval_shape(lambda: GridSum.zeros(params, white.grid))
    state = jax.eval_shape(lambda: white.init({"w": jnp.zeros(1_000_000)}))
    program = jax.jit(white.update).lower(total, state).compile()
    analysis = program.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 5 * 4e6
