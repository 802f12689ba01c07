"""Bounded-weight proposals, both directions: constants, draws, terms and deltas against oracles.

The largest weighted term is at most the scale, of warm starts too. Three and more vectors drawn together:
against all tuples of vectors, and what they are worth beside pairs. Lower ends of estimates: exact losses
have weights rounded down; bounded losses have none.
"""

import math

import jax
import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson
from jaxacct.core.verify import verify
from jaxacct.estimates import estimate, interval
from jaxacct.estimates.interval import for_lower_ends
from jaxacct.kernels.likelihoods.interacting_recurrence import numbers_kept
from jaxacct.proposals import registry
from jaxacct.proposals.base import ProposalSpec, Setting, direction_key
from jaxacct.proposals.families import joint_replicas, replicas
from jaxacct.proposals.families.pair_weights import log_factor, rounds
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.replicas import joint
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics.hockey_stick import Direction, weighted_terms
from jaxacct.statistics.lines import Item, total
from tests.draws import divergence_interval, draws_of
from tests.oracles import enumeration, tuples
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.settings import PRODUCTION, SMALL, few_in_ci, slow
from tests.proposals_by_name import family_candidates, normalizer_of_two, proposal_by_name
from tests.refusals import refused
from tests.schemes.test_sampling import pld_delta, pld_distribution

Z = stats.norm.isf(FALSE_ALARM / 2)


def test_normalizer_against_all_tuples():
    """Of two replicas that is exact, and of more an upper bound."""
    for scheme, bands in SMALL:
        for sigma in [0.3, 1.0, 20.0]:
            strategy = BandedToeplitz.square_root(bands)
            mechanism = Mechanism(scheme, strategy, sigma)
            exact, _ = tuples.count_distribution(scheme, strategy.coefficients, sigma, 2)
            assert normalizer_of_two(mechanism) == pytest.approx(math.log(exact), rel=1e-10, abs=1e-13)
    mechanism = Mechanism(BMinSep(4, 2, 0.3), BandedToeplitz((2.0, 1.0)), 1.0)
    exact, _ = tuples.count_distribution(mechanism.scheme, mechanism.strategy.coefficients, 1.0, 4)
    assert math.log(exact) < log_normalizer(mechanism, 4) < 3 * math.log(exact)


@pytest.mark.parametrize(("scheme", "bands"), few_in_ci({10, 19}))
def test_drawn_counts_follow_the_enumerated_distribution(scheme, bands, key):
    """Chi-square over all count vectors, false alarm 1e-6; plain counts must be rejected."""
    strategy = BandedToeplitz.square_root(bands)
    mechanisms = [Mechanism(scheme, strategy, sigma) for sigma in (0.45, 2.0)]
    module = scheme.replicas(mechanisms[0])
    draw_with_one = jax.jit(module.draw_with_one, static_argnums=(1, 3))
    for mechanism in mechanisms:
        sigma = mechanism.noise_multiplier
        _, distribution = tuples.count_distribution(scheme, strategy.coefficients, sigma, 2)
        counts = np.asarray(draw_with_one(key, scheme, module.tables(mechanism), 40_000)[0])
        assert chi_square_p_value(counts, distribution) > FALSE_ALARM
        if sigma == 0.45 and len(distribution) > 1:
            _, plain_distribution = tuples.count_distribution(scheme, strategy.coefficients, 1e6, 2)
            assert chi_square_p_value(counts, plain_distribution) < FALSE_ALARM


# (setting, sigma, Z_2): the outside prototype of proofs/derivations.md, section 9.
PROTOTYPE = [
    (PRODUCTION, 256, 0.47, 1.15441),
    (PRODUCTION, 256, 0.40, 1.42628),
    (PRODUCTION, 256, 0.38, 1.68228),
    (BMinSep(1500, 64, (1 / 300) / (1 - 63 / 300)), 64, 0.6, 14.7),
    (BMinSep(1500, 64, (1 / 300) / (1 - 63 / 300)), 64, 1.0, 1.95),
    (BMinSep(1024, 32, (1 / 256) / (1 - 31 / 256)), 8, 0.4, 5386),
    (BMinSep(1024, 32, (1 / 256) / (1 - 31 / 256)), 8, 2.0, 1.024),
]


@pytest.mark.parametrize(("scheme", "bands", "sigma", "published"), PROTOTYPE)
def test_normalizers_of_the_prototype(scheme, bands, sigma, published):
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    assert math.exp(log_normalizer(mechanism)) == pytest.approx(published, rel=4e-3)


def test_the_scale_is_the_largest_weighted_term():
    """`M = sup over losses of Z e^{(1 - m) L} (1 - e^{epsilon - L})`: neither below it nor above."""
    for epsilon in [0.1, 2.0]:
        for m in [1.5, 2, 3, 7]:
            losses = epsilon + np.linspace(1e-4, 10, 200_001)
            largest = np.max(np.exp(0.3 + (1 - m) * losses) * -np.expm1(epsilon - losses))
            assert math.exp(replicas.log_scale(0.3, m, epsilon)) == pytest.approx(largest, rel=1e-6)


def test_large_jobs_have_no_table():
    for scheme, bands, has in (
        (ja.BalancedMinSep(7200, 256, 28), 256, False),
        (ja.BalancedMinSep(1000, 64, 4), 16, True),
        (ja.BalancedMinSep(100_000, 64, 1), 32, True),  # at most one participation
        (ja.BalancedMinSep(100_000, 64, 1), 64, False),
    ):
        assert (scheme.replicas(Mechanism(scheme, BandedToeplitz.square_root(bands), 0.4)) is not None) == has


@pytest.mark.parametrize(
    ("scheme", "bands", "sigma"),
    [
        (ja.BalancedMinSep(100, 16, 4), 8, 0.03),  # beyond float64
        (ja.BalancedMinSep(100, 16, 4), 8, 0.2),  # draws would be too inexact
        (BMinSep(3000, 4, 0.5), 4, 0.05),
    ],
)
def test_attraction_too_strong_to_draw_is_no_proposal(scheme, bands, sigma):
    """Pairs of eight replicas at such noise once ended a calibration with an OverflowError."""
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    assert log_normalizer(mechanism) == math.inf and not family_candidates("replicas", mechanism, 1.0)
    refused("replicas:2 is not available", proposal_by_name, mechanism, 1.0, "remove", "replicas:2")
    found = registry.candidates(Setting(mechanism, 8.0, Direction.REMOVE, None), lambda proposal: 1e9)
    assert {proposal.name for proposal in found} == {"plain"}


@pytest.mark.parametrize("delta", [1e-6, slow(1e-4)])
def test_poisson_against_pld_at_small_deltas(delta, key):
    """The best proposal against the PLD accountant where plain sampling would see nothing.

    The epsilon is the one at which PLD says `delta`; agreement within the Monte Carlo error, the 2e-3 that
    PLD's rounding may cost, and no vacuity: the error is below a fifth of delta.
    """
    n, p, sigma = 60, 0.1, 1.0
    mechanism = Mechanism(Poisson(n, p), BandedToeplitz((1.0,)), sigma)
    epsilon = pld_distribution(sigma, p, n, "remove").get_epsilon_for_delta(delta)
    best = min(family_candidates("replicas", mechanism, epsilon), key=lambda proposal: proposal.log_scale)
    exact = pld_delta(sigma, p, n, epsilon, "remove")
    terms = weighted_terms(draws_of(best, direction_key(key, "remove"), 400), "remove", epsilon)
    error = terms.std() / math.sqrt(terms.size)
    assert abs(terms.mean() - exact) < Z * error + 5e-3 * exact
    assert error < exact / 5


STRATEGY = ja.BandedToeplitz((2.0, 1.0))
C = STRATEGY.array
WARM, COLD = ja.BMinSep(4, 2, 0.3), ja.BMinSep(4, 2, 0.3, False)
RARE = ja.BMinSep(4, 2, 0.02)
# (scheme, name of a proposal, epsilon, how near to the scale a term comes).
FAMILIES = [
    (WARM, "replicas:2", 0.7, 1 - 1e-6),
    (WARM, "replicas:4", 1.5, 1 - 1e-6),
    (COLD, "replicas:2", 0.7, 1 - 1e-6),
    (ja.CyclicPoisson(4, 2, 0.5), "replicas:2", 0.7, 1 - 1e-6),
    (ja.MultiAttribution(3, 2, 0.3, 2), "replicas:2", 0.7, 1 - 1e-6),
    (RARE, "replicas:2,4", 0.1, 0.9),
    (RARE, "replicas:4,8", 0.5, 0.55),
    (ja.BMinSep(4, 2, 0.02, False), "replicas:4,8", 0.5, 0.9),
    (ja.IndependentAttribution(3, 2, 0.3, 2), "replicas:4", 0.7, 0.5),
    (ja.IndependentAttribution(3, 2, 0.3, 2), "replicas:6", 1.5, 0.4),
]


def log_weight(mechanism, name: str):
    """Of outputs: ln of the weight that a draw has at most."""
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    one, number = scheme.parts or (scheme, 1)
    m, *times = ProposalSpec.parse(name).parameters
    other = scheme.inflated(times[0])[0] if times else one
    log_z = m / 2 * math.log(tuples.count_distribution(other, C, sigma / math.sqrt(m - 1), 2)[0])

    def of_outputs(y):
        own, others = (enumeration.log_ratio(distribution, C, sigma, y) for distribution in (scheme, other))
        # In pairs a user's own vectors share nothing with each other at best.
        return log_z + (number * others if number > 1 else own) - m * others

    return of_outputs


@pytest.mark.parametrize(("scheme", "name", "epsilon", "near"), FAMILIES)
def test_no_weighted_term_exceeds_the_scale(scheme, name, epsilon, near):
    mechanism = ja.Mechanism(scheme, STRATEGY, 1.2)
    log_scale = proposal_by_name(mechanism, epsilon, "remove", name).log_scale
    weight, rng = log_weight(mechanism, name), np.random.default_rng(4)

    def terms(y):
        loss = enumeration.log_ratio(scheme, C, 1.2, y)
        positive = loss > epsilon
        parts = np.where(positive, np.log(-np.expm1(np.where(positive, epsilon - loss, -1.0))), -math.inf)
        return weight(y) + parts - log_scale

    y = rng.normal(size=(3000, scheme.iterations + 1)) * rng.choice([1.0, 2.0, 5.0], size=(3000, 1)) + 1
    for step in (0.5, 0.2, 0.1, 0.03, 0.01, 0.003, 1e-3):
        best = y[np.argsort(terms(y))[-40:]]
        moved = best[rng.integers(40, size=400)] + step * rng.normal(size=(400, y.shape[1]))
        y = np.concatenate([best, moved])
    assert math.log(near) <= terms(y).max() <= 1e-9


TWO, THREE, ONE = (0.8, 0.6), (0.8, 0.48, 0.36), (1.0,)
# Cold and warm, one band, a separation longer than the run, and runs of a few times the separation.
SETTINGS = [
    (BMinSep(5, 2, 0.3), TWO, 3),
    (BMinSep(4, 2, 0.3, False), TWO, 4),
    (BMinSep(4, 1, 0.4), ONE, 4),
    (BMinSep(3, 5, 0.2), THREE, 3),
    (BMinSep(7, 3, 0.1), THREE, 3),
]


def mechanism(scheme, coefficients, sigma=0.9) -> Mechanism:
    return Mechanism(scheme, BandedToeplitz(coefficients), sigma)


@pytest.mark.parametrize(("scheme", "coefficients", "m"), SETTINGS, ids=str)
def test_normalizer_of_several_against_all_tuples(scheme, coefficients, m):
    for sigma in (0.5, 3.0):
        exact, _ = tuples.count_distribution(scheme, coefficients, sigma, m)
        found = joint.log_normalizer(mechanism(scheme, coefficients, sigma), m)
        assert found == pytest.approx(math.log(exact), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize(("scheme", "coefficients", "m"), SETTINGS, ids=str)
def test_draws_are_of_the_enumerated_distribution(scheme, coefficients, m, key):
    """False alarm 1e-6; 100,000 draws."""
    one = mechanism(scheme, coefficients)
    _, expected = tuples.count_distribution(scheme, coefficients, one.noise_multiplier, m)
    draw = jax.jit(joint.draw_counts, static_argnums=(1, 3))
    drawn = np.asarray(draw(key, scheme, joint.tables(one, m), 100_000))
    assert chi_square_p_value(drawn, expected) > 1e-6
    pairs = {vector: weight for vector, weight in expected.items() if max(vector) < m}
    wrong = {v: w / sum(pairs.values()) if v in pairs else 1e-9 for v, w in expected.items()}
    assert chi_square_p_value(drawn, wrong) < 1e-6, "it could not fail"


def test_errors_are_reserved():
    """Strong attraction needs more than rounding of a walk; where it has no bound there is no proposal."""
    relative = [joint.errors(mechanism(BMinSep(60, 2, 0.1), TWO, sigma), 3)[0] for sigma in (3.0, 0.5, 0.3)]
    assert relative[0] < 1e-3 < relative[1] < relative[2]
    assert joint.errors(mechanism(BMinSep(60, 2, 0.1), TWO, 0.1), 3)[0] == math.inf
    assert proposal_of(mechanism(BMinSep(60, 2, 0.1), TWO, 0.1)) is None


def proposal_of(one, m=3):
    return joint_replicas.build(Setting(one, 1.0, Direction.REMOVE, None), m)


def test_other_mechanisms_have_none():
    """Attack: mechanisms that the tables are not of: another sampler, p = 1, replace-one, no bands."""
    good = BMinSep(6, 2, 0.3)
    others = [
        mechanism(ja.CyclicPoisson(6, 2, 0.3), TWO),
        mechanism(ja.BallsInBins(6, 2), TWO),
        mechanism(BMinSep(6, 2, 1.0), TWO),
        Mechanism(good, BandedToeplitz(TWO), 0.9, "replace-one"),
        Mechanism(good, ja.Toeplitz((0.8, 0.4, 0.3, 0.2, 0.1, 0.05)), 0.9),
    ]
    assert proposal_of(mechanism(good, TWO)) is not None
    assert [proposal_of(other) for other in others] == [None] * len(others)
    for m in (2, 9):
        with pytest.raises(ValueError, match="joint-replicas"):
            proposal_by_name(mechanism(good, TWO), 1.0, "remove", f"joint-replicas:{m}")


@pytest.mark.parametrize(
    ("scheme", "coefficients", "m"), [SETTINGS[0], slow(BMinSep(4, 1, 0.4), ONE, 3)], ids=str
)
def test_terms_have_the_mean_of_the_divergence(scheme, coefficients, m):
    """Terms are in [0, 1]; intervals of the divergence and of plain samples meet; false alarm 1e-6."""
    one = mechanism(scheme, coefficients)
    for epsilon in (0.5, 2.0):
        found = []
        for name in (f"joint-replicas:{m}", "plain"):
            proposal = proposal_by_name(one, epsilon, "remove", name)
            draws = draws_of(proposal, jax.random.key(5), 512)
            found.append(divergence_interval(proposal, draws, epsilon, 5e-7))
        (low, high), (least, most) = found
        assert low <= most and least <= high and high < 1.3 * low, "it could not fail"


def test_rounding_is_that_of_m_vectors():
    """An error of the loss moves a weight m - 1 times as much; the weight has a reserve of its own."""
    one = mechanism(BMinSep(60, 2, 0.01), TWO)
    found = [proposal_by_name(one, 2.0, "remove", f"joint-replicas:{m}") for m in (3, 4)]
    assert [proposal.weight_error(0.1) for proposal in found] == pytest.approx([0.2, 0.3])
    for proposal in found:
        lines = {line.item: line.amount for line in budget_lines(proposal, 1e-6)}
        assert 0 < lines[Item.WEIGHTS] < 1e-3 and lines[Item.DISTRIBUTION] > 0


def test_a_verification_is_near_the_divergence():
    """Pairs need 200,000 samples or more here; certified at 1.3 times the divergence, and not at .7 times."""
    one = Mechanism(BMinSep(200, 8, 1e-3), BandedToeplitz.square_root(8), 0.55)
    proposal = proposal_by_name(one, 4.0, "remove", "joint-replicas:4")
    low, high = divergence_interval(proposal, draws_of(proposal, jax.random.key(7), 256), 4.0, 1e-6)
    for delta, expected in ((0.7 * low, False), (1.3 * high, True)):
        verdict = verify(one, 4.0, delta, proposal=proposal.name, max_samples=30_000, key=jax.random.key(3))
        assert verdict.certified is expected


def test_rare_participation_is_resolved_where_pairs_do_not():
    """The scale of a large run's target; pairs of a tournament attract each other m - 1 times as much."""
    one = Mechanism(BMinSep(2000, 16, 1.218e-4), BandedToeplitz.square_root(16), 0.4741)
    joint_scale = min(p.log_scale for p in family_candidates("joint-replicas", one, 4.0))
    assert joint_scale < min(p.log_scale for p in family_candidates("replicas", one, 4.0)) - 7
    setting = Setting(one, 4.0, Direction.REMOVE, None)
    for limit, expected in ((-5, False), (-12, True)):  # of what needs few samples: pairs, or four together
        found = registry.candidates(setting, lambda proposal: 0.0 if proposal.log_scale < limit else 1e6)  # noqa: B023
        assert any(proposal.spec.family == "joint-replicas" for proposal in found) is expected


P = 0.3


def bounded(examples: int, sigma: float, monkeypatch) -> ja.Mechanism:
    """As if the tables of the likelihood of more than two, or of any, did not fit."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", numbers_kept(2, 2, False) * (examples > 2))
    mechanism = ja.Mechanism(
        ja.IndependentAttribution(2, 2, P, examples, False), ja.BandedToeplitz.identity(), sigma
    )
    assert mechanism.is_upper_bound and (mechanism.scheme.pair_bound is not None) == (examples > 2)
    return mechanism


def test_weights_that_are_rounded_up_have_others_for_lower_ends(monkeypatch):
    """Of replicas in pairs, of exact losses: a lower end of their own weights would be too high."""
    mechanism = ja.Mechanism(ja.BMinSep(4, 2, P), ja.BandedToeplitz.identity(), 1.0)
    distribution, asked = proposal_by_name(mechanism, 1.0, "remove", "replicas:4"), []
    monkeypatch.setattr(replicas, "log_factor", lambda *args: asked.append(args[3]) or log_factor(*args))
    lower = for_lower_ends(distribution)
    assert lower.log_scale == distribution.log_scale and lower.rounded_down is None
    scheme, strategy, key = mechanism.scheme, mechanism.strategy, jax.random.key(0)
    for one in (distribution, lower):
        jax.eval_shape(
            lambda key, one=one: one.draw_block(key, scheme, strategy, 1.0, one.tables(), np.float32), key
        )
    assert asked == [1, -1]
    plain = proposal_by_name(mechanism, 1.0, "remove", "plain")
    assert for_lower_ends(plain) is plain


def test_each_end_is_of_its_own_draws(monkeypatch):
    """The upper end of weights rounded up, the lower one of those rounded down."""
    mechanism, grid = ja.Mechanism(ja.BMinSep(4, 2, P), ja.BandedToeplitz.identity(), 1.0), np.array([1.0])
    chosen, asked = proposal_by_name(mechanism, 1.0, "remove", "replicas:4"), []
    lower = for_lower_ends(chosen)
    ends = {chosen: (0.3, 0.4, 0.5), lower: (0.2, 0.3, 0.45)}
    monkeypatch.setattr(interval, "bands", lambda drawn, *_: np.array(ends[drawn.chosen])[:, None])
    found = interval.bands_of_both(chosen, grid, lambda one: asked.append(one), 0.1)
    np.testing.assert_array_equal(found[:, 0], [0.2, 0.4, 0.5])
    assert asked == [chosen, lower]


def test_weights_are_rounded_down():
    """The exact factor, in float64 from its formula, is between both."""
    factor_of = jax.jit(log_factor, static_argnums=(1, 2, 3))
    m, shared = 4, np.random.default_rng(0).uniform(0, 3, (4, 4, 50)).astype(np.float32)
    shared += shared.swapaxes(0, 1)
    up, down = (np.asarray(factor_of(shared, 2, 3, side), np.float64) for side in (1, -1))
    meet, own = rounds(m, 2)
    aligned, apart = ((m - 1) * np.einsum("lij,ijt->lt", meet, shared), np.einsum("lij,ijt->lt", own, shared))
    factor = aligned.sum(axis=0) / (m - 1) - np.log(np.exp(aligned).mean(axis=0))
    factor += np.log(np.exp(-apart).mean(axis=0))
    assert (down < factor).all() and (factor < up).all() and (up - down < 1e-3).all()


@pytest.mark.parametrize("examples", [2, 4])
def test_losses_that_are_bounded_have_no_lower_end(examples, monkeypatch):
    """Attack: as if they were exact, an interval could lie above the divergence. Low is 0 instead."""
    mechanism = bounded(examples, 0.9 if examples == 2 else 1.6, monkeypatch)
    for name in ["plain", "replicas:1", "replicas:6"] if examples > 2 else ["plain", "replicas:4"]:
        assert for_lower_ends(proposal_by_name(mechanism, 1.0, "remove", name)) is None
    if examples == 2:
        plain = proposal_by_name(mechanism, 0.2, "remove", "plain")
        monkeypatch.setattr(estimate, "proposals_at", lambda *_, **__: [plain])  # fewer programs
        options = dict(num_samples=2048, key=jax.random.key(2))
        found = ja.estimate_delta(mechanism, 0.2, **options)
        assert found.low == 0 < found.value < found.high
        found = ja.estimate_epsilon(mechanism, found.high, **options)
        assert found.low == 0 < found.value <= found.high


def test_losses_by_pairs_cost_more(monkeypatch):
    by_pairs = bounded(4, 1.6, monkeypatch)
    assert estimate.best_proposal(by_pairs, 0.2, "remove", None, None).name == "replicas:1"
    (alone, pairs) = (proposal_by_name(by_pairs, 0.2, "remove", name) for name in ("plain", "replicas:1"))
    booked = [total(budget_lines(distribution, 1e-9), "epsilon") for distribution in (alone, pairs)]
    assert booked[0] < booked[1] < 3 * booked[0] and alone.relative_error == pairs.relative_error > 0
