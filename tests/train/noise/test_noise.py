"""Streamed correlated noise: the dense inverse, covariances, keys, the optax transformation.

Noise by running sums: the matrix that was accounted for is the one that is applied, over long runs too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest
from scipy import linalg, signal, stats

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism, Poisson
from jaxacct.kernels.randomness import fresh_key, key_words
from tests.refusals import refused
from tests.train.runs import flat
from train.batches import sampler
from train.clipping import joined
from train.clipping.grid import Grid, GridSum
from train.clipping.sums import ClippedSum
from train.noise import chacha, normals
from train.noise import recursion as noise
from train.optimizers import linear_decay, privatize
from train.procedures.step import TrainState, advance, make_step

FALSE_ALARM = 1e-6
KEY = np.arange(8, dtype=np.uint32)
PARAMS = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros(4), jnp.zeros(())]}
LEVELS = 2.0**19


def run(strategy, steps, params=PARAMS, key=KEY):
    """(steps, parameters) of streamed integers `W` and of the `z` they were made from."""
    state = noise.init(strategy, params, key)
    step = jax.jit(lambda state: noise.draw(strategy, LEVELS, state, params))
    w, z = [], []
    for t in range(steps):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        z.append(flat(normals.normals_of(state.key, t, shapes)))
        drawn, state = step(state)
        w.append(flat(drawn))
    return np.stack(w), np.stack(z)


@pytest.mark.parametrize("bands", [1, 5, 100])
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


def test_normals_are_normal_and_fresh_at_every_step():
    drawn = [np.asarray(normals.standard_normals(KEY, t, 100_000)) for t in range(2)]
    for numbers in drawn:
        assert stats.kstest(numbers, "norm").pvalue > FALSE_ALARM
        # The eight of a block, and pairs by their squares, 12,500 times.
        eight = numbers.reshape(-1, 8).T
        for power in (1, 2):
            off = np.corrcoef(eight**power)[np.triu_indices(8, 1)]
            assert np.abs(off).max() < stats.norm.isf(FALSE_ALARM / 224) / np.sqrt(eight.shape[1])
    again = np.corrcoef(*drawn)[0, 1]
    assert abs(again) < stats.norm.isf(FALSE_ALARM) / np.sqrt(drawn[0].size)


box_muller = jax.jit(normals._box_muller)


def words_of(blocks: int) -> np.ndarray:
    """(16, blocks) uint32 of step 7."""
    return np.asarray(jax.jit(lambda: chacha.blocks(KEY, (jnp.arange(blocks), 7, 0, 0)))())


def pairs_of(words) -> np.ndarray:
    """Complex numbers."""
    real, imaginary = box_muller(*words)
    return np.asarray(real) + 1j * np.asarray(imaginary)


def test_pairs_of_words(x64):
    """Box-Muller by mpmath: 96 bits of radius, 53 of angle, the last 21 of which are the radius's last."""
    words = np.random.default_rng(0).integers(0, 2**64, (2, 40), dtype=np.uint64)
    words[0, :8] >>= np.arange(57, 65, dtype=np.uint64).clip(0, 63)  # far tails
    words[:, 8:12] = [[0, 0, 2**64 - 1, 2**64 - 1], [0, 2**64 - 1, 0, 2**64 - 1]]
    drawn = pairs_of(words)
    for x, y, pair in zip(*words.tolist(), drawn, strict=True):
        own, shared = y % 2**11, y // 2**11 % 2**21
        uniform = (mpmath.mpf(x) * 2**32 + own * 2**21 + shared + 0.5) / 2**96
        expected = mpmath.sqrt(-2 * mpmath.log(uniform)) * mpmath.expjpi(mpmath.mpf(y >> 11) / 2**52)
        allowed = 2e-8 if x > 2**64 - 2**12 else 4e-15 * (1 + 1 / abs(pair))
        assert abs(complex(expected) - pair) < allowed
    assert np.abs(drawn).max() == pytest.approx(normals.LARGEST, rel=1e-14)  # of the smallest words


def test_words_are_those_of_another_implementation():
    """Of one block and of many, by the `cryptography` package."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(KEY.tobytes(), np.array([0, 7, 0, 0], "<u4").tobytes()), mode=None)
    words = np.frombuffer(cipher.encryptor().update(bytes(64 * 4099)), np.uint32).reshape(-1, 16).T
    for blocks in (1, 10, 4099):
        np.testing.assert_array_equal(words_of(blocks), words[:, :blocks])


def test_normals_of_the_host_are_those_of_programs():
    for step, size in ((0, 1), (3, 4097), (2**31 - 1, 40_001)):
        found = normals.normals_on_host(KEY.tobytes(), step, size)
        np.testing.assert_allclose(found, normals.standard_normals(KEY, step, size), rtol=1e-13, atol=1e-15)


def test_normals_that_lost_bits_on_their_way_are_refused():
    """As arguments of a program without 64 bits they would be float32, whose multiples of L have holes."""
    state = noise.init(BandedToeplitz.identity(), jnp.zeros(8), KEY)
    params = jnp.zeros(8)
    draw = jax.jit(lambda z: noise.draw(BandedToeplitz.identity(), LEVELS, state, params, normals=z))
    refused("normals must be float64, got float32", lambda: draw(np.zeros(8)))


def test_no_cell_of_the_grid_is_empty(x64):
    """For whole numbers (a, b) within radius 10.2, words whose pair of normals is rounded to them.

    A radius or an angle that left some out would tell that a sum cannot be what it is.
    """
    generator, levels, words = np.random.default_rng(3), 2.0**20, []
    radii, turns = generator.uniform(0, 10.19, 300), generator.uniform(0, 1, 300)
    cells = np.round(levels * radii * np.exp(2j * np.pi * turns))
    for cell in map(complex, cells):
        with mpmath.workdps(40):
            place = mpmath.mpc(cell) / levels
            radius = int(mpmath.exp(-(abs(place) ** 2) / 2) * 2**96)
            angle = int(mpmath.arg(place) / (2 * mpmath.pi) * 2**53) % 2**53
        own, shared = radius % 2**32 >> 21, radius % 2**21
        first = (angle - shared + 2**20) // 2**21 % 2**32  # so that the angle is next to this one
        words.append((min(radius >> 32, 2**64 - 1), first << 32 | shared << 11 | own))
    x, y = np.array(words, np.uint64).T
    drawn = pairs_of([x, y])
    np.testing.assert_array_equal(np.round(levels * drawn), cells)


def test_where_a_pair_goes_is_the_same_on_every_device(monkeypatch):
    """However many blocks are drawn at once; 40,000 normals are 5,000 blocks."""
    by_one = normals.standard_normals(KEY, 7, 40_000)
    monkeypatch.setitem(normals._BLOCKS_AT_ONCE, "cpu", 3_000)
    by_two = jax.jit(lambda: normals.standard_normals.__wrapped__(KEY, 7, 40_000))()
    np.testing.assert_allclose(by_one, by_two, rtol=1e-12)
    np.testing.assert_allclose(by_one[:8], normals.standard_normals(KEY, 7, 8), rtol=1e-12)
    assert len(np.unique(by_one)) == 40_000


def test_every_parameter_has_blocks_of_its_own():
    """No two share a word."""
    for sizes in [[3, 5, 0, 8, 1], [9], []]:
        drawn = normals.normals_of(KEY, 3, [(size,) for size in sizes])
        assert [part.size for part in drawn] == sizes and all(part.dtype == np.float64 for part in drawn)
        assert len(np.unique(np.concatenate([[], *drawn]))) == sum(sizes)
        begin = 0
        for part in drawn:
            whole = normals.standard_normals(KEY, 3, 48)
            np.testing.assert_array_equal(part, whole[begin : begin + part.size])
            begin += -(-part.size // 8) * 8


def test_which_parameter_gets_which_normal():
    """Runs are distinguished by it (`train.run.folder.generator`): another place is another ARRANGEMENT."""
    words = words_of(2).T.reshape(8, 2, 2).astype(np.uint64)
    with jax.enable_x64(True):
        pairs = pairs_of((words[..., 0] + (words[..., 1] << np.uint64(32))).T)
    drawn = normals.standard_normals(KEY, 7, 16)
    np.testing.assert_allclose(np.asarray(drawn).view(np.complex128), pairs, rtol=1e-12)
    assert (normals.ARRANGEMENT, chacha.ROUNDS) == (7, 20)


def test_fresh_keys_come_from_the_system_whole():
    """Mutants 21 and 22: every word of 20 keys is its own, in noise and in sampler."""
    for fresh, words in ((noise.fresh_key, 8), (sampler.fresh_key, 4)):
        keys = np.array([fresh() for _ in range(20)])
        assert keys.shape == (20, words)
        assert len(np.unique(keys)) == keys.size  # false alarm 160^2 / 2^33 = 3e-6
    # Those of the accountant have 64 bits.
    assert len(np.unique([key_words(fresh_key()) for _ in range(20)])) == 40


def test_levels_that_no_integer_leaves():
    """The largest normal at every step with the worst signs stays below 2^31, and would not at twice."""
    sums = BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 40)
    for strategy in (BandedToeplitz.square_root(8), BandedToeplitz((1.0, 1.0)), sums):
        most = noise.max_levels(strategy, 40)
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
    units = number * 2**private.grid.bits
    return GridSum.of(jax.tree.map(lambda p: np.full(p.shape, units), PARAMS), private.grid)


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


def white(sigma=1.0, **sizes):
    """The transformation of independent noise, of three steps."""
    sizes = dict(clip_norm=1.0, expected_batch_size=1.0, key=KEY) | sizes
    return privatize(Mechanism(Poisson(3, 0.1), BandedToeplitz.identity(), sigma), **sizes)


def test_a_sum_is_the_nearest_integers():
    """NaN or a number too large to be a sum ends the run; it is not zero."""
    private = white(0.7, clip_norm=2.0, expected_batch_size=3.0)
    whole = np.array([0, 1, -1, 2**16, 2**20 - 1, 2**46 + 1, -(2**47) + 1])
    with jax.enable_x64(True):
        one = GridSum.of(jnp.asarray(whole + np.array([0.4, -0.4, 0.25, 0, 0, 0, 0])), private.grid)
        whole_too = jnp.asarray(whole * 1.0)
        lost = [GridSum.of(whole_too.at[3].set(x), private.grid) for x in (np.nan, np.inf, -(2.0**48))]
    np.testing.assert_array_equal(one.units(), whole)
    state, update = private.init(np.zeros(7, np.float32)), jax.jit(private.update)
    drawn, _ = noise.draw(private.mechanism.strategy, private.levels, state, np.zeros(7))
    # Rounded once: 2^46 + 1 and a number of noise are added exactly.
    exact = (whole + np.asarray(drawn, np.int64)) * (private.grid.unit * (1 / 3.0))
    np.testing.assert_array_equal(update(one, state)[0], np.float32(exact))
    for each in lost:
        released, after = update(each, state)
        assert np.isnan(released).all() and np.isnan(each.whole).all() and not each.is_finite
        assert np.isnan(update(one, after)[0]).all()  # an optimizer that skips NaN sees nothing later, either


@pytest.mark.parametrize(
    "strategy",
    [BandedToeplitz.square_root(3), BandedInverse((1.0, -0.3), 3), BufferedToeplitz((0.9,), (0.2,), 3)],
)
def test_small_arrays_side_by_side_have_the_numbers_of_each_alone(strategy, monkeypatch):
    """Noise, what is kept, and updates, of which all are NaN after the mechanism's end."""
    mechanism = Mechanism(BMinSep(3, 3, 0.1), strategy, 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY)
    params = {**PARAMS, "large": jnp.zeros((5, 3)), "none": jnp.zeros(0)}

    def released(most: int) -> list:
        monkeypatch.setattr(joined, "_MAX_ENTRIES", most)
        update, state, found = jax.jit(lambda *given: private.update(*given)), private.init(params), []
        for _ in range(4):
            with jax.enable_x64(True):
                total = GridSum.of(jax.tree.map(lambda leaf: leaf + 7.0, params), private.grid)
            updates, state = update(total, state)
            found.append((updates, state.recent))
        return found

    together, alone = released(14), released(-1)
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    assert not np.isnan(flat([updates for updates, _ in together[:3]])).any()
    assert np.isnan(flat(together[3][0])).all()


def test_a_sum_that_lost_bits_on_its_way_is_refused():
    """Through NumPy and a program it would be float32: 2^40 + 1 and 2^40 are the same then."""
    with jax.enable_x64(True):
        one = GridSum.of(jnp.asarray([2.0**40 + 1]), Grid(1.0, 20))
    on_the_host = jax.tree.map(np.asarray, one)
    refused("updates must be a sum in float64", lambda: jax.jit(lambda total: total.scaled(1.0))(on_the_host))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(on_the_host.scaled(1.0), one.scaled(1.0))


def test_what_is_not_a_sum_of_that_clip_norm_is_refused():
    """A bare gradient, another clip norm, another grid: all trained without enough noise, without a word."""
    private = white()
    state = private.init(PARAMS)
    for wrong in (PARAMS, GridSum.of(PARAMS, Grid(2.0, 20)), GridSum.of(PARAMS, Grid(1.0, 19))):
        refused("updates must be a sum of clipped gradients", private.update, wrong, state)


def test_a_step_takes_its_clip_norm_from_its_noise():
    step_of = functools.partial(make_step, lambda p, e: 0.0, optimizer=optax.sgd(0.1))
    for wrong in (optax.sgd(0.1), optax.chain(optax.sgd(0.1)), None):
        refused(r"private must come from train.optimizers.privatize", step_of, private=wrong)
    private = white()
    with pytest.raises(TypeError, match="clip_norm"):
        step_of(private=private, clip_norm=2.0)
    assert str(private.key) not in repr(private)


def test_what_no_grid_serves_is_refused():
    """The inverse of the last C grows by 90 a step, beyond all floats; was "math domain error"."""
    for sigma in (1e-6, 1e7):
        refused("noise_multiplier must be between", white, sigma)
    growing = Mechanism(BMinSep(200, 2, 0.1), BandedToeplitz((0.01, 0.9)), 1.0)
    refused("noise_multiplier must be between", Grid.of, growing, 1.0)
    refused("clip_norm", white, clip_norm=0.0)
    refused("expected_batch_size", white, expected_batch_size=-1.0)


def summed(total, *, more_axes: int = 0):
    """A sum of two examples, whose losses have as many axes too many."""
    losses = jnp.zeros((2, *[1] * more_axes))
    return ClippedSum(GridSum.of(total, white().grid), jnp.zeros(2), losses, jnp.zeros(()), {})


def test_planted_mistakes_of_shape_are_seen():
    """They would share one noise among parameters."""
    private, optimizer, params = white(), optax.sgd(0.1), jnp.zeros(3)
    state = TrainState(params, private.init(params), optimizer.init(params))
    for planted in (summed(jnp.zeros(1)), summed(params, more_axes=1)):
        with pytest.raises(AssertionError, match="shape"):
            advance(private, optimizer, state, planted, np.ones(2, bool))
    with pytest.raises(AssertionError, match="assert_trees_all_equal_shapes"):
        summed(params).total.scaled(1.0, jnp.zeros(1, jnp.int32))


def test_linear_decay_of_the_paper():
    schedule = linear_decay(0.4, 400)
    at = [float(schedule(step)) for step in (0, 100, 200, 300, 400)]
    np.testing.assert_allclose(at, [0.4, 0.4, (0.4 + 0.02) / 2, 0.02, 0.02], rtol=1e-6)


def test_chacha_against_rfc_8439():
    """The block of section 2.3.2, with 20 rounds."""
    key = np.frombuffer(bytes(range(32)), "<u4")
    block = jax.jit(lambda: chacha.blocks(key, (1, 0x09000000, 0x4A000000, 0), rounds=20))()
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    assert [f"{int(word):08x}" for word in block[:, 0]] == expected.split()


def test_elementary_functions_against_numpy(x64):
    """Float64 to a few units in the last place, at the ends too."""
    x = np.concatenate([2.0 ** -np.linspace(0, 97, 20_001), 1 - np.logspace(-16, -1, 500)])
    np.testing.assert_allclose(jax.jit(normals._log)(x), np.log(x), rtol=1e-15, atol=1e-15)
    eighths = np.arange(8, dtype=np.uint64) << 61
    angles = np.r_[np.arange(20_001, dtype=np.uint64) * (2**64 // 20_001), eighths, eighths - 1, eighths + 1]
    sine, cosine = jax.jit(normals._sine_cosine)(angles)
    turns = angles.astype(np.float64) * 2.0**-64
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * turns), atol=2e-15)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * turns), atol=2e-15)


def test_every_word_of_the_key_matters():
    for word in range(8):
        other = KEY.copy()
        other[word] += 1
        a, b = (noise.standard_normals(k, 0, 12) for k in (KEY, other))
        assert not np.any(np.asarray(a) == np.asarray(b))


def test_memory_is_bands_minus_one_copies_or_two_a_buffer():
    buffered = BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 5000)
    for strategy, copies in ((BandedToeplitz.square_root(16), 15), (buffered, 4)):
        recent = noise.init(strategy, PARAMS, KEY).recent
        assert flat(recent).size == copies * flat(PARAMS).size and strategy.noise_copies == copies


def test_memory_of_a_draw_is_a_few_times_that_of_the_parameters():
    """The sum in float64 with that in integers, and a piece of what noise is made of; was 6.6 times."""
    params, private = {"w": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)}, white()
    total = jax.eval_shape(lambda params: GridSum.of(params, private.grid), params)
    state = jax.eval_shape(lambda: private.init({"w": jnp.zeros(1_000_000)}))
    with jax.enable_x64(True):
        program = jax.jit(private.update).lower(total, state).compile()
    analysis = program.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 2 * 4e6


@pytest.mark.parametrize(
    "strategy",
    [BandedToeplitz.square_root(64), BandedInverse.bisr(iterations=64, bands=64)],
    ids=["c", "inverse"],
)
def test_kept_noise_is_updated_in_place(strategy):
    """A copy of the ring would take 63 times the memory of the parameters, and most of the time of a draw."""
    params = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
    state = jax.eval_shape(lambda: noise.init(strategy, jnp.zeros(1_000_000), KEY))
    draw = jax.jit(lambda state: noise.draw(strategy, LEVELS, state, params), donate_argnums=0)
    analysis = draw.lower(state).compile().memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 2 * params.size * 4


STEPS, LONG_LEVELS, SIZE = 10_000, 2.0**20, 6
# The optimum of four buffers for one participation in 10,000 steps.
LONG = BufferedToeplitz((0.999704, 0.995801, 0.959023, 0.663107), (0.0226, 0.04759, 0.14062, 0.27889), STEPS)


def units_of(strategy, levels=LONG_LEVELS) -> np.ndarray:
    """(buffers,) grid units that a whole number in the first part of the state stands for."""
    reach = strategy.noise_recursion().reach
    return 2.0 ** np.maximum(0, np.ceil(np.log2(1.001 * levels * normals.LARGEST * reach / 2**30)))


def sums_of(parts, strategy, levels=LONG_LEVELS) -> np.ndarray:
    """Running sums, (.., buffers, size) extended floats, of (.., 2 buffers, size) int32."""
    whole, fraction = np.split(np.asarray(parts).astype(np.longdouble), 2, axis=-2)
    return (whole + fraction * np.longdouble(2.0) ** -31) * units_of(strategy, levels)[:, None]


@pytest.fixture(scope="module")
def long_run():
    """W and z, (steps, size), and the running sums before each step, (steps, buffers, size)."""
    params = jnp.zeros(SIZE)

    def step(state, _):
        drawn, after = noise.draw(LONG, LONG_LEVELS, state, params)
        return after, (drawn, noise.standard_normals(state.key, state.step, SIZE), state.recent)

    _, (w, z, parts) = jax.jit(lambda s: jax.lax.scan(step, s, None, STEPS))(noise.init(LONG, params, KEY))
    return np.asarray(w), np.asarray(z), sums_of(parts, LONG)


def exact_sums(w: np.ndarray, dtype: Any = np.longdouble) -> np.ndarray:
    """(steps, buffers, size) sums of the integers before each step."""
    decays = np.array(LONG.decays, dtype)[:, None]
    sums, now = [], np.zeros((LONG.buffers, SIZE), dtype)
    for row in w.astype(dtype):
        sums.append(now)
        now = decays * now + row
    return np.array(sums)


def mean_error(sums: np.ndarray, exact: np.ndarray) -> float:
    """Maximum error of the mean of a step's integer, in grid units."""
    return float(np.abs(np.tensordot(np.array(LONG.weights), sums - exact, (0, 1))).max())


def test_the_matrix_applied_is_the_one_accounted_for(long_run):
    """`C W = levels z` up to c_0 / 2 at every step, the sums in extended precision; n = 10,000."""
    w, z, _ = long_run
    first = LONG.noise_recursion().first
    exact = np.tensordot(exact_sums(w), np.array(LONG.weights), (1, 0)) + w
    assert np.abs(exact - LONG_LEVELS / first * z).max() <= 0.5 + 1e-6
    # And so it is the inverse times white noise, by the coefficients of C themselves.
    mixed = signal.fftconvolve(w, LONG.array[:, None], axes=0)[:STEPS]
    np.testing.assert_allclose(mixed, LONG_LEVELS * z, atol=0.5 * first + 0.01)


def test_sums_are_far_more_exact_than_the_resolution(long_run):
    """Over 10^10 coordinate-steps 1e-10 of sensitivity (proofs/buffered.md, section 3); 0.1 in float32."""
    w, _, sums = long_run
    exact = exact_sums(w)
    off, single = mean_error(sums, exact), mean_error(exact_sums(w, np.float32), exact)
    moved = 2 * np.sqrt(1e10) / (LONG_LEVELS / LONG.noise_recursion().first)
    assert off < 1e-8 and off * moved < 1e-9
    assert single * moved > 0.05
    # What the page proves, from what the sums may reach at all.
    lost = 2.0**-32 * units_of(LONG) + 3 * 2.0**-53 * np.abs(exact).max(axis=(0, 2)).astype(float)
    assert off <= np.dot(LONG.weights, lost / (1 - np.array(LONG.decays)))


@pytest.mark.parametrize("buffer", [0, 1])
def test_no_sum_leaves_its_32_bits(buffer):
    """Normals as large as they can be, with the signs that make one sum the largest, at the most levels."""
    strategy = BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 40)
    recursion, levels = strategy.noise_recursion(), noise.max_levels(strategy, 40)
    inverse = signal.lfilter([1.0], strategy.array, np.eye(40)[0])
    signs = np.sign(signal.lfilter([1.0], [1.0, -strategy.decays[buffer]], inverse))[::-1]
    sums, ring = np.zeros(2), jnp.zeros((4, 1), jnp.int32)
    with jax.enable_x64(True):
        solve, renewed, _ = noise._stream_of(strategy).at(levels, jnp.int32(0))

        @jax.jit
        def step(ring, normal):
            (drawn,) = solve(normal, ring)
            return renewed(ring, drawn), drawn

        for sign in signs:
            ring, drawn = step(ring, jnp.full(1, sign * normals.LARGEST))
            sums = np.array(strategy.decays) * sums + np.asarray(drawn, float)
    assert abs(sums[buffer]) == pytest.approx(levels * normals.LARGEST * recursion.reach[buffer], rel=1e-6)
    kept = sums_of(ring, strategy, levels)[:, 0]
    np.testing.assert_allclose(kept.astype(float), sums, rtol=1e-12)
