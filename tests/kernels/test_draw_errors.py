"""Distributions that integer draws really have, computed from their thresholds, against what is declared of
them.

The words of the generator are replaced by chosen ones or counted over, so that nothing here is random.
"""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import (
    BalancedMinSep,
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    CustomScheme,
    CyclicPoisson,
    FiniteToeplitz,
    Mechanism,
    MultiAttribution,
    Poisson,
    TruncatedBMinSep,
)
from jaxacct.kernels import randomness, table
from jaxacct.proposals import base
from jaxacct.proposals.families import replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.replicas import table as pairs
from jaxacct.schemes.replicas.table_weights import outcomes_of_two, weights_of
from jaxacct.strategies.stationary import circulant_length
from tests.oracles import enumeration, tuples
from tests.proposals_by_name import replica_proposal

KEY = jax.random.key(0)


def with_words(monkeypatch, words):
    """Every draw gets these 64-bit words: their upper halves first, or alone where 32 bits are asked for."""
    words = np.asarray(words, np.uint64)
    high, low = (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)

    def bits_32(key, shape):
        given = np.stack([high, low]) if shape[0] == 2 and len(shape) > 1 else high
        return jnp.asarray(given.reshape(shape))

    monkeypatch.setattr(randomness, "bits_32", bits_32)


@pytest.mark.parametrize("p", [0.3, 1 / 3, 0.999, 2.0**-10, 2.0**-26, 1e-9, 1 - 1e-9, 2.0**-48])
def test_a_coin_falls_as_often_as_it_says(p, monkeypatch):
    """The first word that fails is p 2^bits to half a step, with 64 bits for a rare side."""
    bits = randomness.coin_bits(p)
    assert bits == (32 if 2.0**-10 <= p <= 1 - 2.0**-10 else 64)
    first = round(Fraction(p) * 2**bits)
    around = np.array([first - 1, first], np.uint64) << np.uint64(64 - bits)
    with_words(monkeypatch, around)
    assert randomness.bernoulli(KEY, p, (2,)).tolist() == [True, False]


@pytest.mark.parametrize("p", [0.3, 1 / 3, 0.999, 1.1 * 2.0**-10, 1e-4, 1e-9, 1 - 1e-9])
def test_the_error_of_coins_against_their_distribution(p):
    """Every outcome of 40 throws, exactly; and the declared error is at most 50 times too large."""
    bits, n = randomness.coin_bits(p), 40
    drawn, meant = Fraction(round(Fraction(p) * 2**bits), 2**bits), Fraction(p)
    worst = max(abs((drawn / meant) ** k * ((1 - drawn) / (1 - meant)) ** (n - k) - 1) for k in range(n + 1))
    declared = randomness.bernoulli_error(p, n)
    assert worst <= declared < 1e-3
    assert declared > 0


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
        assert abs(float(drawn) / exact - 1) <= scheme.draw_error() < 1e-7


def shares_of(words, place: int | None = None) -> list[Fraction]:
    """Exact probabilities of choices, by the words of their cumulative probabilities without the last."""
    pairs = zip(*words, strict=True) if place is None else ((one[place] for one in each) for each in words)
    ends = [Fraction((int(high) << 32) + int(low), 2**64) for high, low in pairs]
    return [after - before for before, after in itertools.pairwise([Fraction(0), *ends, Fraction(1)])]


def largest_error(drawn, meant) -> Fraction:
    """Largest relative error of drawn probabilities, of choices with these chances."""
    chances = [Fraction(float(chance)) for chance in meant]
    pairs = zip(drawn, chances, strict=True)
    return max((abs(share * sum(chances) / chance - 1) for share, chance in pairs if chance), default=0)


@pytest.mark.parametrize(
    "scheme",
    [
        BMinSep(200, 64, 0.01),
        BallsInBins(200, 41),
        CyclicPoisson(100, 41, 0.3),
        BalancedMinSep(41, 4, 2.999999),  # one participation in three millions is not kept
        CustomScheme([0.5] * 9, start=[1 - 2.0**-30, 2.0**-31, 2.0**-32]),
    ],
    ids=str,
)
def test_choices_are_drawn_as_precisely_as_declared(scheme):
    """First eligible steps and outcomes, as their words say: sums in float64 are not exact to 64 bits."""
    sampling = scheme.table
    off = largest_error(shares_of(sampling.draws.start), sampling.starts)
    assert off <= sampling.start_error < 1e-5
    reached = sampling.eligible_probabilities > 0
    declared, kinds = sampling.outcome_error(reached), [outcome.chance for outcome in sampling.outcomes]
    for place, at in enumerate(np.ndindex(reached.shape)):
        if reached[at] and sum(each[at] for each in kinds):
            drawn = shares_of(sampling.draws.outcomes, place)
            assert largest_error(drawn, [each[at] for each in kinds]) <= declared < 1e-5


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
    assert 0 < choices * worst <= variation - 2 * table.draw_variation < 1e-12


def cells(thresholds) -> np.ndarray:
    """(.., number) probabilities of the indices that 32 random bits give."""
    edges = np.asarray(thresholds, np.float64) / 2.0**32
    ends = np.concatenate([np.zeros((*edges.shape[:-1], 1)), edges, np.ones((*edges.shape[:-1], 1))], -1)
    return np.diff(ends)


@pytest.mark.parametrize("m", [2, 4])
def test_a_weight_is_off_by_what_its_loss_is_times_the_replicas_less_one(m, monkeypatch):
    """Draws with given losses, and the same a little higher: weights fall by `weight_error`."""
    mechanism = Mechanism(Poisson(20, 0.01), BandedToeplitz((1.0,)), 1.0)
    proposal = replica_proposal(mechanism, m, 1.0)
    assert proposal.replicas == m
    losses = jnp.linspace(-1.0, 3.0, randomness.BLOCK_SIZE)
    found = []
    for off in (0.0, 0.25):
        monkeypatch.setattr(replicas, "loss_of_scores", lambda *a, off=off: losses + off)
        draws = proposal.draw_block(
            KEY, mechanism.scheme, mechanism.strategy, 1.0, proposal.tables(), np.float32
        )
        found.append(np.asarray(draws.log_weight, np.float64))
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


CUT = TruncatedBMinSep(6, 2, 0.2, dataset_size=40, max_batch_size=9)


def sizes_and_counts():
    sizes = CUT.side_information.draw(KEY, 64)
    return [sizes, *(CUT.draw_counts(KEY, 64, side, sizes) for side in ("remove", "add"))]


def test_cut_batches_can_be_drawn_under_x64():
    """Traced only: the carry of the scan over steps once changed its type."""
    with jax.enable_x64(True):
        shapes = [(part.shape, part.dtype) for part in jax.eval_shape(sizes_and_counts)]
    assert shapes == [((64, 6), np.int32), ((64, 6), np.float32), ((64, 6), np.float32)]


@pytest.mark.slow
def test_batch_sizes_and_counts_under_x64_are_those_without():
    single = [np.asarray(part) for part in sizes_and_counts()]
    with jax.enable_x64(True):
        double = [np.asarray(part) for part in sizes_and_counts()]
        mechanism = Mechanism(CUT, BandedToeplitz.square_root(2), 1.0)
        losses = base.plain(mechanism, "remove").draw(KEY, 0, 1, jnp.float64).loss
    for one, other in zip(single, double, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(losses).all()


# -- Exact distributions of replicas whose tables are looked up step by step --


def sums_of(vectors: dict) -> dict:
    """The distribution of sums over replicas, from that of ((counts of one, ..) a step, ..)."""
    found: dict[tuple[int, ...], float] = {}
    for joined, chance in vectors.items():
        counts = tuple(map(sum, joined))
        found[counts] = found.get(counts, 0.0) + chance
    return found


def distribution_of_the_past(now: dict) -> dict:
    """{what was drawn: probability} of {(state, what was drawn): probability}."""
    found: dict = {}
    for (_, past), chance in now.items():
        found[past] = found.get(past, 0.0) + chance
    return found


def distribution_of_multi_attribution(scheme, arrays) -> dict:
    b, k = scheme.min_separation, scheme.examples_per_user
    begun = {((0, 0), (0, 0)): 1.0}
    if arrays["starts"] is not None:
        one, two = (cells(part) for part in arrays["starts"])
        begun = {((i, 0), (j, 0)): one[i] * two[i, j] for i in range(b) for j in range(b)}
    now = {(state, ()): chance for state, chance in begun.items()}
    for step in range(scheme.iterations):
        after: dict = {}
        together = cells(arrays["together"][step]).reshape(k + 1, k + 1)
        alone = None if arrays["alone"] is None else cells(arrays["alone"][step])
        for (state, past), chance in now.items():
            (lockout, _), (other, _) = state
            if lockout and other:
                ways = {(0, 0): 1.0}
            elif not lockout and not other:
                ways = {(i, j): together[i, j] for i in range(k + 1) for j in range(k + 1)}
            else:
                locked_out, history = max(state)
                distribution = alone[locked_out - 1, history]
                ways = {(j, 0) if lockout == 0 else (0, j): distribution[j] for j in range(k + 1)}
            for joined, probability in ways.items():
                moved = tuple(
                    (max(0, (b if count else was) - 1), count if count else past_count)
                    for count, (was, past_count) in zip(joined, state, strict=True)
                )
                key = moved, (*past, joined)
                after[key] = after.get(key, 0.0) + chance * probability
        now = after
    return distribution_of_the_past(now)


DISTRIBUTIONS = [
    (MultiAttribution(4, 3, 0.2, 2), "together"),
    (MultiAttribution(4, 2, 0.01, 2, False), "alone"),
]


def excess(drawn: dict, exact: dict, relative: float) -> float:
    """The distance that is left where densities may be wrong by a relative error."""
    vectors = drawn | exact
    apart = ((drawn.get(x, 0.0), exact.get(x, 0.0)) for x in vectors)
    return math.fsum(max(0.0, abs(one - other) - relative * other) for one, other in apart) / 2


@pytest.mark.parametrize("rows", ["extended", "n"])
@pytest.mark.parametrize(
    ("scheme", "table"),
    DISTRIBUTIONS,
    ids=str,
)
def test_replicas_draw_what_their_tables_say_within_what_they_declare(scheme, table, rows):
    """Every sequence of draws, in float64, from the float32 tables; a table that is off is noticed."""
    strategy, sigma = BandedToeplitz.square_root(scheme.min_separation), 0.7
    if rows == "n":
        strategy = FiniteToeplitz(strategy.coefficients, scheme.iterations)
    mechanism = Mechanism(scheme, strategy, sigma)
    module = scheme.replicas(mechanism)
    relative, variation = module.errors(mechanism)
    arrays = module.tables(mechanism)
    rows = strategy.rows(scheme.iterations)
    _, exact = tuples.count_distribution(scheme, strategy.coefficients, sigma, 2, rows)
    drawn = sums_of(distribution_of_multi_attribution(scheme, arrays))
    assert sum(drawn.values()) == pytest.approx(1.0, abs=1e-6)
    assert excess(drawn, exact, relative) <= variation + 1e-14
    assert relative + variation < 1e-3
    worse = sums_of(distribution_of_multi_attribution(scheme, arrays | {table: off(arrays[table])}))
    assert excess(worse, exact, relative) > 10 * (variation + 1e-14)


def off(table):
    """The table, or the first of several, 1 % lower."""
    if isinstance(table, list):
        return [off(table[0]), *table[1:]]
    low = np.asarray(table)
    return (low * 0.99).astype(low.dtype)
