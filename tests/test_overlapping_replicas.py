"""Replicas where columns overlap: every identity of the proof by enumeration, drawn laws, and an attack."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import (
    BallsInBins,
    BMinSep,
    BufferedToeplitz,
    CyclicPoisson,
    Mechanism,
    MultiAttribution,
    Poisson,
    Toeplitz,
)
from jaxacct.proposals import overlaps
from jaxacct.proposals.base import plain
from jaxacct.proposals.replicas import _module, log_normalizer, most_replicas, replica_proposal
from jaxacct.schemes.replicas import balls_in_bins as balls_in_bins_replicas
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.verification.run import verify
from tests.oracles import enumeration
from tests.schemes.test_schemes import chi_square_p_value
from tests.test_proposals import draw

FALSE_ALARM = 1e-6
TAIL = (1.0, 0.6, 0.4, 0.3, 0.2, 0.1)
SETTINGS = [
    (BMinSep(6, 2, 0.3), TAIL),
    (BMinSep(5, 2, 0.3, False), TAIL[:5]),
    (BMinSep(5, 2, 1.0, False), TAIL[:4]),
    (Poisson(4, 0.3), TAIL[:3]),
    (CyclicPoisson(6, 2, 0.5), TAIL),
    (BallsInBins(7, 3), TAIL),
    (MultiAttribution(4, 2, 0.3, 2), TAIL[:3]),
]
SIGMA = 0.8


def tuples_of(scheme, column, m: int):
    """All that the proof speaks of, by enumeration over m-tuples of participation vectors.

    Returns (counts of all, counts of the first, probabilities under the drawn law, ln Z-bar, ln factor, C).
    """
    n, b = scheme.iterations, scheme.min_separation
    strategy = Toeplitz(column)
    c = enumeration.strategy_matrix(strategy.array, n + strategy.bands - 1, n)
    gram = c.T @ c / SIGMA**2
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    near, far = np.where(apart < b, gram, 0.0), np.where(apart >= b, gram, 0.0)
    law = enumeration.pattern_law(scheme)
    x, p = np.array(list(law), float), np.array(list(law.values()))
    lift = m * scheme.examples_per_unit * float(strategy.cross_terms(n, b)) / SIGMA**2
    which = np.array(list(itertools.product(range(len(x)), repeat=m)))
    together, first = x[which].sum(axis=1), x[which[:, 0]]
    pulls = x @ near @ x.T
    log_weight = np.log(p)[which].sum(axis=1) + lift * together.sum(axis=1)
    for i, j in itertools.combinations(range(m), 2):
        log_weight += pulls[which[:, i], which[:, j]]
    log_z = float(np.logaddexp.reduce(log_weight))
    shared = (np.einsum("ti,ij,tj->t", v, far, v) / 2 for v in (together, first))
    factor = next(shared) - next(shared) - lift * together.sum(axis=1)
    return together, first, np.exp(log_weight - log_z), log_z, factor, c


def orders(scheme, column) -> list[int]:
    mechanism = Mechanism(scheme, Toeplitz(column), SIGMA)
    return [m for m in (2, 3) if m <= most_replicas(mechanism)]


@pytest.mark.parametrize(("scheme", "column"), SETTINGS, ids=str)
def test_the_density_and_the_weights_of_the_proof(scheme, column):
    """`Z dR/dQ >= f+^m`, no factor above 1, and the factors' mean given an output is `f / f+` exactly."""
    strategy = Toeplitz(column)
    for m in orders(scheme, column):
        together, _, chance, log_z, factor, c = tuples_of(scheme, column, m)
        assert log_normalizer(Mechanism(scheme, strategy, SIGMA), m) == pytest.approx(log_z, rel=1e-12)
        assert factor.max() <= 1e-9
        outputs = np.random.default_rng(0).normal(size=(30, len(c))) * 1.5 + 0.3
        means = together @ c.T
        ratios = np.exp((outputs @ means.T - np.square(means).sum(axis=1) / 2) / SIGMA**2) * chance
        law = enumeration.pattern_law(scheme)
        x, own = np.array(list(law), float), np.square(c).sum(axis=0) / 2
        # Counts of one step are one number j: j s - j^2 / 2 of its norm.
        above = np.exp(((outputs @ c) @ x.T - (x**2) @ own) / SIGMA**2) @ np.array(list(law.values()))
        exact = np.exp(enumeration.log_ratio(scheme, strategy.array, SIGMA, outputs))
        assert (ratios.sum(axis=1) * math.exp(log_z) >= above**m * (1 - 1e-9)).all()
        weighted = (ratios @ np.exp(factor)) * math.exp(log_z)
        np.testing.assert_allclose(weighted, exact * above ** (m - 1), rtol=1e-9)


@pytest.mark.parametrize("scheme", [BMinSep(6, 2, 0.3), Poisson(4, 0.4)], ids=str)
def test_a_smaller_lift_would_be_wrong(scheme):
    """A participation shares rows with the other replicas' too: kappa in place of m kappa is too little."""
    column = (1.0, 0.9, 0.8, 0.7)
    together, first, _, _, factor, c = tuples_of(scheme, column, 2)
    kappa = float(Toeplitz(column).cross_terms(scheme.iterations, scheme.min_separation)) / SIGMA**2
    lift = scheme.examples_per_unit * kappa * together.sum(axis=1)
    far = np.where(
        np.abs(np.subtract.outer(range(len(c[0])), range(len(c[0])))) >= scheme.min_separation, c.T @ c, 0
    )
    shared = np.einsum("ti,ij,tj->t", together, far, together) / 2 / SIGMA**2
    assert (shared <= 2 * lift + 1e-9).all() and (shared - lift).max() > 0.1
    assert factor.max() <= 1e-9 and first.shape == together.shape


_FAST = {0, 4}


@pytest.mark.parametrize(
    ("scheme", "column"),
    [pytest.param(*s, marks=() if i in _FAST else pytest.mark.slow) for i, s in enumerate(SETTINGS)],
    ids=str,
)
def test_drawn_counts_of_all_and_of_one(scheme, column, key):
    """Chi-square over all pairs of vectors; another pairing of the same draws has pairs that cannot be."""
    mechanism = Mechanism(scheme, Toeplitz(column), SIGMA)
    m = orders(scheme, column)[-1]
    together, first, chance, *_ = tuples_of(scheme, column, m)
    law: dict[tuple[int, ...], float] = {}
    for pair, weight in zip(np.hstack([together, first]).astype(int).tolist(), chance, strict=True):
        law[tuple(pair)] = law.get(tuple(pair), 0.0) + weight
    module = _module(mechanism)
    draw_with_one = jax.jit(module.draw_with_one, static_argnums=(1, 3))
    drawn = np.hstack(draw_with_one(key, scheme, module.tables(mechanism, m), 40_000))
    assert chi_square_p_value(drawn, law) > FALSE_ALARM
    n = scheme.iterations
    mixed = np.hstack([drawn[:, :n], np.roll(drawn[:, n:], 1, axis=0)])
    assert len(law) == 1 or not {tuple(pair) for pair in mixed.astype(int).tolist()} <= set(law)


@pytest.mark.parametrize("scheme", [BMinSep(7, 2, 0.3), MultiAttribution(200, 16, 0.3, 2)], ids=str)
def test_the_factor_is_computed_from_above(scheme):
    n, strategy = scheme.iterations, BufferedToeplitz((0.95, 0.6), (0.3, 0.2), scheme.iterations)
    mechanism = Mechanism(scheme, strategy, SIGMA)
    generator = np.random.default_rng(1)
    alone, other = (generator.random((200, n)) < 0.1 for _ in range(2))
    together, alone = (alone + 1.0 * other).astype(np.float32), alone.astype(np.float32)
    arrays = overlaps.overlap_arrays(mechanism, 2)
    found = np.asarray(overlaps.log_factor(scheme, strategy, arrays, together, alone), float)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    far = np.where(apart >= scheme.min_separation, strategy.column_products(n)[apart], 0.0) / SIGMA**2
    shared = [np.einsum("ti,ij,tj->t", v.astype(float), far, v) / 2 for v in (together, alone)]
    kappa = float(strategy.cross_terms(n, scheme.min_separation))
    exact = shared[0] - shared[1] - 2 * scheme.examples_per_unit * kappa / SIGMA**2 * together.sum(axis=1)
    assert (found >= np.minimum(exact, 0.0)).all()
    assert (found <= np.minimum(exact, 0.0) + 2e-4 * together.sum(axis=1) + 1e-6).all()


def test_the_same_divergence_as_plain_draws_with_bounded_terms(key):
    """Both have the mean `E_P (1 - alpha / f+)_+`; false alarm 1e-6 in all."""
    mechanism, epsilon, found = Mechanism(BMinSep(6, 2, 0.3), Toeplitz(TAIL), 2.5), 0.3, []
    for proposal in (plain(mechanism, "remove"), replica_proposal(mechanism, 2, epsilon)):
        terms = hockey_stick.weighted_terms(draw(proposal, 100, key), "remove", epsilon)
        scale = math.exp(proposal.log_scale)
        assert terms.max() <= scale * (1 + 1e-5)
        counts = bounds.bin_terms(np.minimum(terms / scale, 1))
        found.append([scale * end for end in bounds.mean_interval(counts, FALSE_ALARM / 2)])
    (low, high), (low_of_replicas, high_of_replicas) = found
    assert low_of_replicas <= high and low <= high_of_replicas < 1.2 * high


def test_no_verdict_below_the_truth(monkeypatch, key):
    """One phase: a Gaussian of known delta. Without the lift less than that would be certified."""
    scheme, strategy, sigma, epsilon = BallsInBins(4, 1), Toeplitz(TAIL), 4.0, 0.5
    mechanism = Mechanism(scheme, strategy, sigma)
    mu = np.linalg.norm(enumeration.strategy_matrix(strategy.array, 9, 4).sum(axis=1)) / sigma
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)

    def accepted(delta):
        balls_in_bins_replicas.log_normalizer.cache_clear()
        balls_in_bins_replicas.tables.cache_clear()
        found = verify(mechanism, epsilon, delta, proposal="2 replicas", max_samples=40_000, key=key)
        return found.remove.accepted

    assert not accepted(0.95 * exact)
    with monkeypatch.context() as patch:
        for module in (balls_in_bins_replicas, overlaps):
            patch.setattr(module, "log_lift", lambda mechanism, m: 0.0)
        assert accepted(0.95 * exact)
    assert not accepted(0.95 * exact)
