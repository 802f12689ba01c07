"""Random words and normals: quality, tails, independence, and the words and keys of JAX."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import special, stats

from jaxacct import BandedToeplitz, BMinSep, Mechanism, calibrate, verify
from jaxacct.calibration.options import MIN_RATIO
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, log_add_exp
from jaxacct.proposals import base
from jaxacct.statistics.hockey_stick import DIRECTIONS
from tests.draws import block_keys

FALSE_ALARM = 1e-6
SHAPE = (1000, 2000)


@pytest.fixture(scope="module")
def pair():
    return tuple(
        np.asarray(part, np.float64)
        for part in jax.jit(lambda key: randomness.normal_pairs(key, SHAPE, jnp.float32))(jax.random.key(7))
    )


@pytest.fixture(scope="module")
def probabilities(pair):
    return [special.ndtr(part.reshape(-1)) for part in pair]


def table_of(first, second) -> np.ndarray:
    """How many pairs of numbers in [0, 1] are in each cell of 16 by 16."""
    cells = [np.minimum(part * 16, 15).astype(np.int64) for part in (first, second)]
    return np.bincount(cells[0] * 16 + cells[1], minlength=256)


def test_each_normal_is_normal(probabilities):
    """Kolmogorov-Smirnov on two million draws each; false alarm 1e-6."""
    for uniform in probabilities:
        assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("shape", [(7,), (128, 13), (3, 5, 7), (2, 4, 128), (0, 3)])
def test_words_drawn_flat_are_those_of_jax(shape):
    """Plans store keys so that draws can be repeated: how words are laid out must not change them."""

    @jax.jit
    def drawn(key):
        ways = [jax.random.bits(key, shape, jnp.uint32), threefry.bits_32(key, shape)]
        return [*ways, threefry.bits_32_at_once(key, shape)] if len(shape) == 1 else ways

    expected, *ways = drawn(jax.random.key(3))
    for found in ways:
        np.testing.assert_array_equal(found, expected)
    if len(shape) == 1:  # words of some places are those of all
        places = jnp.asarray([[4, 0], [1, 1]])
        at = jax.jit(lambda key: threefry.bits_32_at(key, shape[0], places))(jax.random.key(3))
        np.testing.assert_array_equal(at, np.asarray(expected)[places])


def test_tails_beyond_jax(pair):
    """Counts above 2, 3, 4 and 5 are binomial; the largest number there can be is 6.7."""
    values = np.abs(np.concatenate(pair).reshape(-1))
    for edge in (2, 3, 4, 5):
        seen, p = int((values > edge).sum()), 2 * stats.norm.sf(edge)
        tails = stats.binom.cdf(seen, values.size, p), stats.binom.sf(seen - 1, values.size, p)
        assert min(tails) > FALSE_ALARM / 8
    extreme = float(np.sqrt(-2 * np.log(2.0**-33)))
    assert 6.7 < extreme < 6.8
    assert values.max() <= extreme


def test_the_two_are_independent(pair, probabilities):
    """A 16 by 16 table of quantiles, and angles of neighbours: chi-square, false alarm 1e-6."""
    x, y = probabilities
    for first, second in ((x, y), (x[:-1], x[1:]), (x[:-1], y[1:])):
        assert stats.chisquare(table_of(first, second)).pvalue > FALSE_ALARM
    squares = (pair[0] ** 2 + pair[1] ** 2).reshape(-1)
    radius = -np.expm1(-squares / 2)
    angle = np.arctan2(pair[1], pair[0]).reshape(-1) / (2 * np.pi) + 0.5
    assert stats.kstest(radius, "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(angle, "uniform").pvalue > FALSE_ALARM
    assert stats.chisquare(table_of(radius, angle)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("shape", [(1,), (3, 5), (128, 3751)])
def test_words_are_those_of_jax(shape):
    """Bit for bit, one key at a time and mapped over keys."""
    keys = jax.random.split(jax.random.key(11), 3)
    two_words = jax.jit(lambda key: threefry.two_words(key, shape))
    mapped = jax.jit(jax.vmap(two_words))(keys)
    size = int(np.prod(shape))
    for index, key in enumerate(keys):
        theirs = np.asarray(threefry_2x32(jax.random.key_data(key), np.arange(2 * size, dtype=np.uint32)))
        ours = two_words(key)
        for part, whole, expected in zip(ours, mapped, (theirs[:size], theirs[size:]), strict=True):
            np.testing.assert_array_equal(np.asarray(part).reshape(-1), expected)
            np.testing.assert_array_equal(np.asarray(whole)[index], part)


def test_streams_keep_their_numbers():
    """Evidence, checkpoints and parts of earlier runs are drawn again by them."""
    numbers = {name: int(stream) for name, stream in randomness.Stream.__members__.items()}
    of_sides = dict(REMOVE=0, ADD=1, REMOVE_PILOT=2, ADD_PILOT=3)
    assert numbers == of_sides | dict(ESTIMATE_PILOT=100, CANDIDATE=1_000_000, SEARCH=2**30)
    # On the finest grid noise multipliers of .0001 to 1e12 have numbers near `CANDIDATE`, no pilot's.
    first, last = (numbers["CANDIDATE"] + math.log(x) / math.log(MIN_RATIO) for x in (1e-4, 1e12))
    assert numbers["ESTIMATE_PILOT"] + 10_000 < first and last < numbers["SEARCH"]
    for direction in DIRECTIONS:
        for stream in (randomness.Stream.REMOVE, randomness.Stream.REMOVE_PILOT):
            assert stream.at(direction.place).name == stream.name.replace("REMOVE", direction.name)


def test_keys_of_blocks():
    key = jax.random.key(11)
    found = randomness.block_keys(key, np.uint32(2**32 - 3), 2)
    expected = block_keys(key, 2**32 - 3, 2)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))


def test_streams_of_neighbouring_keys_do_not_meet():
    """Words of 64 keys made by fold_in repeat as often as independent words; Poisson, false alarm 1e-6."""
    keys = block_keys(jax.random.key(0), 0, 64)
    pairs = jax.jit(jax.vmap(lambda key: threefry.two_words(key, (1 << 14,))))(keys)
    words = np.stack([np.asarray(part) for part in pairs])
    words = np.sort(words.reshape(-1))
    repeats = int((words[1:] == words[:-1]).sum())
    expected = words.size**2 / 2 / 2**32
    assert stats.poisson.ppf(FALSE_ALARM, expected) <= repeats <= stats.poisson.isf(FALSE_ALARM, expected)


def test_float32_log_add_exp():
    """Within the 8 units of the budget, of the larger of the result and ln 2; a GPU's needs more than 4."""
    rng = np.random.default_rng(0)
    a = np.concatenate([rng.normal(size=200_000) * scale for scale in (1e-3, 1, 30, 1000)]).astype(np.float32)
    b = a + np.concatenate([rng.normal(size=400_000) * 0.3, rng.normal(size=400_000) * 20]).astype(np.float32)
    exact = np.logaddexp(a.astype(np.float64), b.astype(np.float64))
    found = np.asarray(log_add_exp(jnp.asarray(a), jnp.asarray(b)), np.float64)
    errors = np.abs(found - exact) / np.maximum(np.abs(exact), np.log(2))
    assert np.max(errors) < SOFTPLUS_ROUNDINGS * 2.0**-24
    assert float(log_add_exp(jnp.float32(-np.inf), jnp.float32(1.5))) == 1.5


def test_the_rarest_radii_take_their_last_bits_from_their_row(monkeypatch):
    """Of the lowest index the radius is that of `u = (row's word) 2^-40`, so there is no last one."""

    def lowest(key, shape):
        return jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)

    monkeypatch.setattr(randomness, "two_words", lowest)
    pairs = randomness.normal_pairs(jax.random.key(1), (64, 2), jnp.float32)
    x, y = (np.asarray(part, float) for part in pairs)
    radius = np.hypot(x, y)
    least = np.sqrt(2 * 40 * np.log(2))
    assert (radius > least * (1 - 1e-6)).all()
    np.testing.assert_allclose(radius[:, 0], radius[:, 1], rtol=1e-6)  # of one row
    # A word is uniform, so radius^2 / 2 - 40 ln 2 is exponential: 64 of them, false alarm 1e-6.
    assert stats.kstest(np.maximum(radius[:, 0] ** 2 / 2 - 40 * np.log(2), 0), "expon").pvalue > 1e-6


def test_batching_changes_nothing():
    """A key's normals are the same alone, jitted and mapped with others, to the last bit."""
    keys = block_keys(jax.random.key(5), 3, 4)

    def draw(key):
        return randomness.normal_pairs(key, (8, 33), jnp.float32)

    together = jax.jit(jax.vmap(draw))(keys)
    for i, key in enumerate(keys):
        for one, many in zip(jax.jit(draw)(key), together, strict=True):
            np.testing.assert_array_equal(one, many[i])


# Draws of one command are independent: no key is used for two purposes. A recorder is put in place of
# `randomness.stream_key`, through which every stream of a command goes. A stream that certifies must not be
# one that something was fitted to.
SCHEME, STRATEGY = BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3)


@pytest.fixture
def purposes(monkeypatch):
    """{words of a key: the places in the code that made it}."""
    found: dict[tuple, set] = {}
    made = randomness.stream_key

    def recorded(key, stream):
        derived = made(key, stream)
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno
        found.setdefault(tuple(randomness.key_words(derived)), set()).add(place)
        return derived

    monkeypatch.setattr(randomness, "stream_key", recorded)
    return found


MECHANISM = Mechanism(SCHEME, STRATEGY, 1.5)
COMMANDS = {
    "verify": lambda key: verify(Mechanism(SCHEME, STRATEGY, 2.0), 1.0, 1e-2, key=key),
    "calibrate": lambda key: calibrate(SCHEME, STRATEGY, epsilon=1.0, delta=1e-2, key=key),
    "estimate delta": lambda key: estimate_delta(MECHANISM, 1.0, num_samples=12_800, key=key),
    "estimate epsilon": lambda key: estimate_epsilon(MECHANISM, 1e-2, num_samples=12_800, key=key),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "verify" else ()) for n in COMMANDS]
)
def test_no_key_has_two_purposes(name, purposes, key):
    COMMANDS[name](key)
    assert purposes, "nothing was recorded"
    shared = {words: places for words, places in purposes.items() if len(places) > 1}
    assert not shared, shared
    assert tuple(randomness.key_words(key)) not in purposes  # no stream is the command's key itself


def test_streams_of_a_run_are_numbered_apart(key):
    """All numbers of `Stream`, with both directions: different keys under one key."""
    streams = list(randomness.Stream)
    keys = {tuple(randomness.key_words(randomness.stream_key(key, int(stream)))) for stream in streams}
    assert len(keys) == len(streams)
    directions = {
        tuple(np.asarray(jax.random.key_data(base.direction_key(key, d)))) for d in ("remove", "add")
    }
    assert len(directions) == 2
