"""Distributions that integer draws really have, computed from their thresholds, against what is declared of
them.

The words of the generator are replaced by chosen ones or counted over, so that nothing here is random.
"""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, CustomScheme, Mechanism, MultiAttribution, Poisson, TruncatedBMinSep
from jaxacct.kernels import randomness, table
from jaxacct.proposals import base
from jaxacct.proposals.families import replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes import BalancedMinSep, BallsInBins, BMinSep, CyclicPoisson, EpochwiseAllocation
from jaxacct.schemes.replicas import table as pairs
from jaxacct.schemes.replicas.table_weights import min_event, outcomes_of_two, rows_of, weights_of
from jaxacct.strategies.stationary import circulant_length
from tests.oracles import enumeration
from tests.proposals_by_name import proposal_by_name

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
