"""Random words and normals: quality, tails, independence, and the words and keys of JAX.

Distributions that integer draws really have, computed from their thresholds, against what is declared of
them: there the words are replaced by chosen ones or counted over, so that nothing is random.
"""

import itertools
import math
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import special, stats

from jaxacct import BandedToeplitz, CustomScheme, Mechanism, MultiAttribution, Poisson, TruncatedBMinSep
from jaxacct.calibration.calibrate import calibrate
from jaxacct.calibration.options import MIN_RATIO
from jaxacct.core.verify import verify
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.kernels import randomness, table, threefry
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, log_add_exp
from jaxacct.proposals import base
from jaxacct.proposals.families import replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes import BalancedMinSep, BallsInBins, BMinSep, CyclicPoisson, EpochwiseAllocation
from jaxacct.schemes.replicas import table as pairs
from jaxacct.schemes.replicas.table_weights import min_event, outcomes_of_two, rows_of, weights_of
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.strategies.stationary import circulant_length
from tests.draws import block_keys
from tests.oracles import enumeration
from tests.proposals_by_name import proposal_by_name

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


KEY = jax.random.key(0)


def last_words(reached, number: int) -> list[int]:
    """For each of 1 .. number the first 64-bit word at which `reached(words) >= k` is false, by bisection."""
    low, high = [0] * number, [2**64 - 1] * number
    for _ in range(64):
        middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]
        for k, got in enumerate(reached(middle)):
            low[k], high[k] = (middle[k], high[k]) if got >= k + 1 else (low[k], middle[k])
    return high


@pytest.mark.parametrize("p", [0.3, 1e-3])
def test_waits_against_every_participation_vector(p, monkeypatch):
    """Where waits of 64-bit words change, and so the distribution of all vectors at n = 6, b = 2."""
    scheme = BMinSep(6, 2, p, warm_start=False)
    n = scheme.iterations

    @jax.jit
    def firsts(*halves):
        monkeypatch.setattr(table, "words_at", lambda key, turn, num_samples: halves)
        return scheme.draw_positions(KEY, n)[:, 0]

    def waits(words):
        words = np.array(words, np.uint64)
        return firsts(*((words >> np.uint64(shift)).astype(np.uint32) for shift in (32, 0))).tolist()

    at_least = [Fraction(1), *(Fraction(word, 2**64) for word in last_words(waits, n))]
    meant = [Fraction(1 - Fraction(p)) ** k for k in range(n + 1)]
    for k in range(n):
        drawn, exact = at_least[k] - at_least[k + 1], meant[k] - meant[k + 1]
        assert abs(drawn / exact - 1) <= 2.0**-38 / p
    for vector, exact in enumeration.pattern_distribution(scheme).items():
        drawn, place = Fraction(1), 0
        for step in np.flatnonzero(vector):
            drawn *= at_least[step - place] - at_least[step - place + 1]
            place = int(step) + scheme.min_separation
        drawn *= at_least[max(0, n - place)]
        assert abs(float(drawn) / exact - 1) <= scheme.draw_errors[0] < 1e-7


def shares_of(words, place: int | None = None) -> list[Fraction]:
    """Exact probabilities of choices, by the words of their cumulative probabilities without the last."""
    pairs = zip(*(words if place is None else (part[:, place] for part in words)), strict=True)
    ends = [Fraction((int(high) << 32) + int(low), 2**64) for high, low in pairs]
    return [after - before for before, after in itertools.pairwise([Fraction(0), *ends, Fraction(1)])]


def are_within(errors: tuple[float, float], drawn, meant) -> bool:
    """Whether drawn probabilities have a relative error, but for rare choices, which have a distance."""
    chances = [Fraction(float(chance)) for chance in meant]
    shares = [chance / sum(chances) for chance in chances]
    apart = [abs(one - share) for one, share in zip(drawn, shares, strict=True)]
    rare = [share < 2.0**-30 for share in shares]
    distance = sum((off for off, is_rare in zip(apart, rare, strict=True) if is_rare), Fraction(0))
    common = zip(apart, shares, rare, strict=True)
    return distance <= errors[1] and all(
        off <= errors[0] * share for off, share, is_rare in common if not is_rare
    )


@pytest.mark.parametrize(
    "scheme",
    [
        BMinSep(200, 64, 0.01),
        BallsInBins(200, 41),
        CyclicPoisson(100, 41, 0.3),
        BalancedMinSep(41, 4, 2.999999),  # one participation in three millions is not kept
        CustomScheme([0.5] * 9, start=[1 - 2.0**-30, 2.0**-31, 2.0**-32]),
        CustomScheme([0.5] * 9, start=[1e-20, 1.0]),
        MultiAttribution(20, 4, 0.01, 40),  # most counts are too rare for 64 bits
    ],
    ids=str,
)
def test_choices_are_drawn_as_precisely_as_declared(scheme):
    """First eligible steps and outcomes, as their words say: sums in float64 are not exact to 64 bits."""
    sampling = scheme.table
    assert sampling.start_errors[0] < 1e-5
    if len(sampling.starts) > 1:
        assert are_within(sampling.start_errors, shares_of(sampling.draws.start), sampling.starts)
    reached = sampling.eligible_probabilities > 0
    declared, kinds = sampling.outcome_errors, [outcome.chance for outcome in sampling.outcomes]
    assert declared[0] < 1e-5
    for place, at in enumerate(np.ndindex(reached.shape)):
        if reached[at] and sum(each[at] for each in kinds):
            drawn = shares_of(sampling.draws.outcomes, place)
            assert are_within(declared, drawn, [each[at] for each in kinds])


def test_choices_of_pairs_are_drawn_as_precisely_as_declared():
    """Half the sum of the differences of all outcomes of two eligible replicas, in the worst state."""
    mechanism = Mechanism(BalancedMinSep(41, 4, 2.5), BandedToeplitz.square_root(3), 0.6)
    table, words = mechanism.scheme.table, pairs.tables(mechanism)["of_both"]
    terms = np.stack(outcomes_of_two(mechanism, weights_of(mechanism)))
    worst = Fraction(0)
    for place, at in enumerate(np.ndindex(terms.shape[1:])):
        meant = [Fraction(float(term)) for term in terms[:, *at]]
        if sum(meant):
            drawn = zip(shares_of(words, place), meant, strict=True)
            worst = max(worst, sum(abs(share - term / sum(meant)) for share, term in drawn) / 2)
    choices, (_, variation) = 2 * table.max_outcomes, pairs.errors(mechanism)
    assert 0 < choices * worst <= variation - 2 * table.draw_errors[1] < 1e-12


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(9, 0.3),
        BMinSep(9, 3, 0.3),
        BMinSep(9, 4, 1e-3, warm_start=False),
        CyclicPoisson(9, 4, 0.3),
        BalancedMinSep(9, 3, 1.5),
        EpochwiseAllocation(9, 3, 2),
        CustomScheme([0.5, 0.1, 0.0, 0.2, 0.3, 0.4, 0.1], lockout=[2, 3, 2, 2, 4, 2, 3]),
    ],
    ids=str,
)
def test_no_state_of_a_pair_has_an_event_more_seldom_than_reserved(scheme):
    """Of every state in turn; the bound is below the least of them by no more than a wait without weights."""
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(min(2, scheme.min_separation)), 0.3)
    sampling, weights, rows = scheme.table, weights_of(mechanism), rows_of(scheme.table)
    leaves, n, found = sampling.leaves, sampling.iterations, min_event(mechanism, weights)
    events = []
    for i, k, other in np.ndindex(*leaves.shape, sampling.num_left):
        if leaves[i, k] or leaves[i, other]:
            none = (1 - leaves[i, k]) * (1 - leaves[i, other])
            events.append(1 - none * weights.both[i + 1, k, other] / weights.both[i, k, other])
    for row, (left, release) in enumerate(zip(rows.base, rows.release, strict=True)):
        for i, k, other in np.ndindex(*leaves.shape, sampling.num_left):
            if max(left, -1) < i < min(release, n) and leaves[i, k]:
                now, then = weights.alone[row, i - left : i - left + 2, k, other]
                events.append(1 - (1 - leaves[i, k]) * then / now)
    assert min([*events, leaves[leaves > 0].min()]) - 2.0**-49 <= found <= min(events)


@pytest.mark.parametrize("m", [2, 4])
def test_a_weight_is_off_by_what_its_loss_is_times_the_replicas_less_one(m, monkeypatch):
    """Draws with given losses, and the same a little higher: weights fall by `weight_error`."""
    mechanism = Mechanism(Poisson(20, 0.01), BandedToeplitz((1.0,)), 1.0)
    proposal = proposal_by_name(mechanism, 1.0, "remove", f"replicas:{m}")
    assert proposal.replicas == m
    losses = jnp.linspace(-1.0, 3.0, randomness.BLOCK_SIZE)

    @jax.jit
    def log_weights(off):
        monkeypatch.setattr(replicas, "loss_of_scores", lambda *_: losses + off)
        given = mechanism.scheme, mechanism.strategy, 1.0, proposal.tables()
        return proposal.draw_block(KEY, *given, np.float32).log_weight

    found = [np.asarray(log_weights(np.float32(off)), np.float64) for off in (0.0, 0.25)]
    np.testing.assert_allclose(found[0] - found[1], proposal.weight_error(0.25), rtol=1e-5)
    most = proposal.log_normalizer + (1 - m) * np.asarray(losses)
    assert (found[0] <= most + 1e-5).all() and (m > 2 or np.allclose(found[0], most, rtol=1e-5))
    assert base.plain(mechanism, "remove").weight_error(0.25) == 0
    line = next(line for line in budget_lines(proposal, 1e-5) if line.name == "float32 weights")
    # Three roundings of ln Z and of (m - 1) L, L at its largest.
    assert line.amount > 3 * 2.0**-24 * proposal.log_normalizer


@pytest.mark.parametrize(("n", "bands"), [(3, 2), (5, 4), (16, 9)])
def test_no_score_wraps_around(n, bands, x64):
    """Each white number alone through the transform: together the covariance of `C^T z`, far lags too."""
    strategy = BandedToeplitz.square_root(bands)
    length = circulant_length(n, bands)
    assert length % 2 == 0
    assert length >= n + bands - 1
    half = length // 2 + 1
    one, none = np.eye(half), np.zeros((half, half))
    scores = jax.jit(lambda pair: strategy.scores_from_normals(pair, n, 1.0))
    rows = [scores(pair) for pair in ((one, none), (none, one))]
    rows = np.concatenate([np.asarray(part) for part in rows])
    dense = enumeration.strategy_matrix(strategy.coefficients, n + bands - 1, n)
    np.testing.assert_allclose(rows.T @ rows, dense.T @ dense, atol=1e-12)
    signal = np.asarray(strategy.scores_from_normals((none[:1], none[:1]), n, 1.0, np.eye(n)[-1:]))
    np.testing.assert_allclose(signal[0], dense.T @ dense[:, -1], atol=1e-12)


TRUNCATED = TruncatedBMinSep(6, 2, 0.2, dataset_size=40, max_batch_size=9)


def sizes_and_counts():
    sizes = TRUNCATED.side_information.draw(KEY, 64)
    return [sizes, *(TRUNCATED.draw_counts(KEY, 64, side, sizes) for side in ("remove", "add"))]


def test_truncated_batches_can_be_drawn_under_x64():
    """Traced only: the carry of the scan over steps once changed its type."""
    with jax.enable_x64(True):
        shapes = [(part.shape, part.dtype) for part in jax.eval_shape(sizes_and_counts)]
    assert shapes == [((64, 6), np.int32), ((64, 6), np.float32), ((64, 6), np.float32)]
