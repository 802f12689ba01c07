"""Replicas drawn in pairs: the weights of the proof by enumeration, what draws compute, and attacks."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.verify import verify
from jaxacct.proposals import candidates as offers
from jaxacct.proposals import registry
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.families import pair_weights, replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.replicas.base import log_attractions
from tests.conformance.test_schemes import IDENTITY
from tests.draws import divergence_interval, draws_of
from tests.oracles import enumeration
from tests.oracles.tuples import two_step_delta
from tests.proposals_by_name import family_candidates, proposal_by_name
from tests.refusals import refused

SIGMA = 1.1
STRATEGY = ja.BandedToeplitz((2.0, 1.0))
SMALL = [
    ja.BMinSep(3, 2, 0.3),
    ja.BMinSep(4, 2, 0.4, False),
    ja.CyclicPoisson(4, 2, 0.5),
    ja.BallsInBins(5, 2),
    ja.MultiAttribution(2, 2, 0.3, 2),
    ja.IndependentAttribution(2, 2, 0.3, 2),
    ja.IndependentAttribution(2, 2, 0.3, 3),
]


def every_tuple(scheme, m: int, attraction: float | None = None, cut: bool = False):
    """Over all m-tuples: (vectors, ln of the drawn distribution, ln Z, X as (m, m, tuples), ln of the factor,
    C).

    Args:
      attraction: in place of m - 1 in the drawn distribution.
      cut: whether C has n rows.
    """
    one, number = (scheme, 1) if scheme.parts is None else scheme.parts
    x, p = enumeration.vectors(one)
    n, times = one.iterations, m - 1 if attraction is None else attraction
    c = enumeration.strategy_matrix(STRATEGY.array, n if cut else n + STRATEGY.bands - 1, n)
    gram = x @ c.T @ c @ x.T / SIGMA**2
    which = np.array(list(itertools.product(range(len(x)), repeat=m)))
    shared = np.array([[gram[which[:, i], which[:, j]] for j in range(m)] for i in range(m)])
    meet, own = pair_weights.rounds(m, number)
    log_distribution = np.log(p)[which].sum(axis=1) + times * sum(
        shared[2 * i, 2 * i + 1] for i in range(m // 2)
    )
    log_z = m / 2 * math.log(np.exp(times * gram) @ p @ p)
    total = np.einsum("ij,ijt->t", np.triu(np.ones((m, m)), 1), shared)
    aligned = times * np.einsum("lij,ijt->lt", meet, shared)
    apart = np.einsum("lij,ijt->lt", own, shared)
    factor = total - np.log(np.exp(aligned).mean(axis=0)) + np.log(np.exp(-apart).mean(axis=0))
    return x[which], log_distribution - log_z, log_z, shared, factor, c


@pytest.mark.parametrize("m", [4, 6, 8, 12])
def test_everybody_meets_everybody_once(m):
    for number in (1, 2, 3):
        meet, own = pair_weights.rounds(m, number)
        assert (meet.sum(axis=0) == np.triu(np.ones((m, m)), 1)).all()
        both = meet | meet.swapaxes(1, 2)
        assert (both.sum(axis=2) == 1).all()  # one opponent a round
        assert both[0, np.arange(0, m, 2), np.arange(1, m, 2)].all()
        assert (own.sum(axis=(1, 2)) == math.comb(number, 2)).all()


@pytest.mark.parametrize("scheme", SMALL, ids=str)
def test_the_density_and_the_weights_of_the_proof(scheme):
    """Probabilities add to 1, no factor is above 1, and weights make the target's density of every output."""
    m = 4
    x, log_distribution, log_z, _, factor, c = every_tuple(scheme, m)
    one, number = (scheme, 1) if scheme.parts is None else scheme.parts
    proposal = proposal_by_name(ja.Mechanism(scheme, STRATEGY, SIGMA), 1.0, "remove", f"replicas:{m}")
    assert np.exp(log_distribution).sum() == pytest.approx(1, rel=1e-9)
    assert proposal.log_normalizer == pytest.approx(log_z, rel=1e-9)
    assert factor.max() <= 1e-12
    outputs = np.random.default_rng(0).normal(size=(20, len(c))) * 1.5 + 0.3
    means = x.sum(axis=1) @ c.T
    # Vectors in the order of players: the distribution of the pairs of round 0, as it is drawn.
    densities = np.exp((outputs @ means.T - np.square(means).sum(axis=1) / 2) / SIGMA**2 + log_distribution)
    alone = np.exp(enumeration.log_ratio(one, STRATEGY.array, SIGMA, outputs))
    exact = np.exp(enumeration.log_ratio(scheme, STRATEGY.array, SIGMA, outputs))
    weighted = math.exp(log_z) * alone ** (number - m) * (densities @ np.exp(factor))
    np.testing.assert_allclose(weighted, exact, rtol=1e-9)


def test_less_attraction_would_be_wrong():
    """With pairs that attract m - 2 times as much factors exceed 1; clipped, they lose of what P has."""
    scheme, m = SMALL[0], 4
    x, log_distribution, log_z, _, factor, c = every_tuple(scheme, m, attraction=m - 2)
    assert factor.max() > 0.1
    outputs = np.random.default_rng(0).normal(size=(20, len(c))) + 1.0
    means = x.sum(axis=1) @ c.T
    densities = np.exp((outputs @ means.T - np.square(means).sum(axis=1) / 2) / SIGMA**2 + log_distribution)
    exact = np.exp(enumeration.log_ratio(scheme, STRATEGY.array, SIGMA, outputs))
    clipped = math.exp(log_z) * exact ** (1 - m) * (densities @ np.exp(np.minimum(factor, 0)))
    assert (clipped < 0.99 * exact).any() and (clipped <= exact * (1 + 1e-9)).all()


@pytest.mark.parametrize(("scheme", "cut"), [(SMALL[0], True), (SMALL[4], False), (SMALL[6], False)])
def test_what_draws_compute_of_their_vectors(scheme, cut):
    """Overlaps and the factor in float32 against float64: never below, and hardly above."""
    m = 4
    x, _, _, shared, factor, _ = every_tuple(scheme, m, cut=cut)
    some = np.random.default_rng(1).permutation(len(x))[:200]
    one, number = (scheme, 1) if scheme.parts is None else scheme.parts
    strategy = ja.FiniteToeplitz(STRATEGY.coefficients, one.iterations) if cut else STRATEGY
    attractions = jnp.asarray(log_attractions(ja.Mechanism(one, strategy, SIGMA)), jnp.float32)
    vectors, n = x[some].astype(np.int64), one.iterations
    positions, slots = np.full((len(some), m // 2, 2 * n), n, np.int32), np.arange(n)
    counts = np.zeros((2, len(some), m // 2, 2 * n), np.float32)
    for pair in range(m // 2):  # one after the other, in no order of time
        positions[:, pair, :n] = np.where(vectors[:, 2 * pair : 2 * pair + 2].any(axis=1), slots, n)
        for k in (0, 1):
            counts[k, :, pair, :n] = vectors[:, 2 * pair + k]

    @jax.jit
    def computed(positions, first, second):
        rows = pair_weights.shared_events(positions, first, second, attractions, m, n)
        return rows, pair_weights.log_factor(rows, number, one.max_participations)

    flat = [part.reshape(len(some), -1) for part in (positions, *counts)]
    rows, found = computed(*flat)
    off = ~np.eye(m, dtype=bool)
    np.testing.assert_allclose(np.asarray(rows)[off], shared[..., some][off], rtol=1e-5, atol=1e-6)
    assert (np.asarray(found) >= np.minimum(factor[some], 0)).all() and np.asarray(found).max() <= 0
    np.testing.assert_allclose(found, factor[some], atol=1e-3)


def test_no_verdict_below_the_truth(monkeypatch, key):
    """Pairs that attract each other once, and not m - 1 times, would certify less than the truth."""
    mechanism, epsilon = ja.Mechanism(ja.MultiAttribution(2, 2, 0.3, 2), IDENTITY, 1.5), 1.0
    exact = two_step_delta(mechanism.scheme, (1.0,), 1.5, epsilon, "remove")
    monkeypatch.setattr(replicas, "ORDERS", (4,))
    monkeypatch.setattr(offers, "FEW_SAMPLES", 0)

    def accepted(delta):
        registry.build.cache_clear()
        found = verify(mechanism, epsilon, delta, proposal="replicas:4", max_samples=40_000, key=key)
        assert found.remove.proposal == "replicas:4"
        return found.remove.certified

    assert accepted(1.1 * exact) and not accepted(0.9 * exact)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "sharper", lambda one, m: one)
        assert accepted(0.9 * exact)
    assert not accepted(0.9 * exact)


USER = ja.Mechanism(ja.IndependentAttribution(2, 2, 0.3, 2), IDENTITY, 2.0)


def test_the_scale_of_a_users_pairs():
    """The largest term of two examples of one user."""
    epsilon, m = 0.5, 6
    proposal = proposal_by_name(USER, epsilon, "remove", f"replicas:{m}")
    f = np.exp(epsilon + np.geomspace(1e-4, 5, 4000))
    largest = math.exp(proposal.log_normalizer) * np.max(f ** (1 - m / 2) * (1 - math.exp(epsilon) / f))
    assert largest <= math.exp(proposal.log_scale) <= largest * (1 + 1e-3)


@pytest.mark.parametrize(
    "scheme", [ja.IndependentAttribution(3, 2, 0.3, 4), ja.IndependentAttribution(4, 2, 0.4, 3)], ids=str
)
def test_the_likelihood_by_pairs_is_above_that_of_all_tuples(scheme):
    """And below that of examples that share nothing; pairs that share half as much again are not above."""
    n = scheme.iterations
    c = enumeration.strategy_matrix(STRATEGY.array, n + 1, n)
    rng = np.random.default_rng(0)
    outputs = SIGMA * rng.normal(size=(300, n + 1)) + c.sum(axis=1) * rng.choice([0, 1, 2], size=(300, 1))
    ratios = np.float32((outputs @ c - 0.5) / SIGMA**2)
    norms = (STRATEGY.column_products(2) / SIGMA**2).astype(np.float32)
    run = jax.jit(scheme.log_likelihood_ratios_by_pairs)
    above, too_low, apart = (np.asarray(run(ratios, norms * shared)) for shared in (1, 1.5, 0))
    exact = enumeration.log_ratio(scheme, STRATEGY.array, SIGMA, outputs)
    margin = 1e-5 * (1 + np.abs(exact))
    assert (above >= exact - margin).all() and (above <= apart + margin).all()
    assert (too_low < exact - margin).any() and (apart - above).max() > 0.1


def production(scheme, sigma: float) -> ja.Mechanism:
    return ja.Mechanism(scheme, ja.BandedToeplitz.square_root(16), sigma)


def test_no_more_than_two_where_those_need_few_samples():
    quiet = production(ja.BMinSep(1000, 64, 1 / (250 - 63)), 1.0)
    names = {c.proposal.name for c in candidates(quiet, 4.0, "remove", ja.Budget.split(1e-5))}
    assert names == {"plain", "replicas:2"}


def test_numbers_and_schemes_that_there_are_not():
    users = ja.Mechanism(SMALL[6], STRATEGY, SIGMA)
    truncated = ja.Mechanism(ja.TruncatedBMinSep(2, 2, 0.4, 4, 10), STRATEGY, SIGMA)
    overlapping = ja.Mechanism(SMALL[0], ja.Toeplitz((0.8, 0.5, 0.3)), SIGMA)
    for mechanism, m in ((users, 2), (users, 5), (users, 1), (truncated, 4), (overlapping, 4)):
        line = f"replicas:{m} is not available for this mechanism"
        refused(line, proposal_by_name, mechanism, 1.0, "remove", f"replicas:{m}")
    assert [p.name for p in family_candidates("replicas", overlapping, 1.0)] == ["replicas:2"]


@pytest.mark.slow  # `conformance` has another number of replicas
def test_a_users_draws_have_the_exact_divergence(key):
    """Weights, scale and terms together, in an interval around the truth (1e-6)."""
    epsilon = 0.5
    exact = two_step_delta(USER.scheme, (1.0,), 2.0, epsilon, "remove")
    proposal = proposal_by_name(USER, epsilon, "remove", "replicas:6")
    low, high = divergence_interval(proposal, draws_of(proposal, key, 64), epsilon, 1e-6)
    assert low <= exact * (1 + 1e-3) and exact <= high < 1.5 * low


def test_few_samples_where_tables_of_more_replicas_do_not_fit():
    """A user's four examples, 64 steps apart (10 million plain draws), and one example at a small epsilon."""
    p = 1 / (250 - 63)
    for scheme, sigma, epsilon in (
        (ja.IndependentAttribution(1000, 64, p, 4), 5.0, 4.0),
        (ja.BMinSep(1000, 64, p), 3.0, 1.0),
    ):
        mechanism = production(scheme, sigma)
        found = candidates(mechanism, epsilon, "remove", ja.Budget.split(1e-5))
        predicted = {each.proposal.name: each.predicted_samples for each in found}
        chosen = found[0].proposal
        assert chosen.spec.parameters[0] > 2 and predicted[chosen.name] < 60_000 < 1e7 < predicted["plain"]
        again = proposal_by_name(mechanism, epsilon, "remove", chosen.name)
        assert (again.name, again.log_scale) == (chosen.name, chosen.log_scale) and again.scale_at is not None
        assert again.scale_at(epsilon) == again.log_scale > again.scale_at(2 * epsilon)
        # Half as many pairs are drawn, each wrong by as much as two replicas are.
        m = chosen.spec.parameters[0]
        of_pair = replicas.sharper(pair_weights.one_of(mechanism)[0], m)
        relative, variation = of_pair.scheme.replicas(of_pair).errors(of_pair)
        assert chosen.total_variation == m / 2 * variation
        assert chosen.relative_error >= m / 2 * relative > 0
        # A user's own vectors have a distribution of their own given the outputs, and what is rare of it is
        # reserved.
        own = [line.name for line in budget_lines(chosen, 1e-5) if line.name.endswith("a user's own")]
        assert len(own) == (scheme.parts is not None)
    assert len({p.name for p in family_candidates("replicas", mechanism, 1.0)}) > 2
