"""Replicas where columns overlap: every identity of the proof by enumeration, draws, and an attack."""

import itertools
import math

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.verify import verify
from jaxacct.proposals import registry
from jaxacct.proposals.families import overlaps
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.schemes.replicas import by_age, table, table_weights
from jaxacct.schemes.replicas.base import log_lift
from tests.oracles import enumeration
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.composed_losses import gaussian
from tests.oracles.settings import slow_but

TAIL = (1.0, 0.6, 0.4, 0.3, 0.2, 0.1)
SETTINGS = [
    (ja.BMinSep(6, 2, 0.3), TAIL),
    (ja.BMinSep(5, 2, 0.3, False), TAIL[:5]),
    (ja.BMinSep(5, 2, 1.0, False), TAIL[:4]),
    (ja.Poisson(4, 0.3), TAIL[:3]),
    (ja.CyclicPoisson(6, 2, 0.5), TAIL),
    (ja.BallsInBins(7, 3), TAIL),
    (ja.MultiAttribution(4, 2, 0.3, 2), TAIL[:3]),
]
SIGMA = 0.8


def tuples_of(scheme, column):
    """All that the proof speaks of, by enumeration over pairs of participation vectors.

    Returns (counts of both, counts of the first, probabilities under the drawn distribution, ln Z-bar, ln
    factor, C).
    """
    n, b = scheme.iterations, scheme.min_separation
    strategy = ja.Toeplitz(column)
    c = enumeration.strategy_matrix(strategy.array, n + strategy.bands - 1, n)
    gram = c.T @ c / SIGMA**2
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    near, far = np.where(apart < b, gram, 0.0), np.where(apart >= b, gram, 0.0)
    x, p = enumeration.vectors(scheme)
    lift = 2 * scheme.examples_per_unit * float(strategy.cross_terms(n, b)) / SIGMA**2
    which = np.array(list(itertools.product(range(len(x)), repeat=2)))
    together, first = x[which].sum(axis=1), x[which[:, 0]]
    pulls = x @ near @ x.T
    lifted = lift * together.sum(axis=1)
    if scheme.replicas(ja.Mechanism(scheme, strategy, SIGMA)) is by_age:
        lifted = np.array([lifts_by_age(x[i], x[j], gram[0], b) for i, j in which])
    log_weight = np.log(p)[which].sum(axis=1) + lifted
    log_weight += pulls[which[:, 0], which[:, 1]]
    log_z = float(np.logaddexp.reduce(log_weight))
    shared = (np.einsum("ti,ij,tj->t", v, far, v) / 2 for v in (together, first))
    factor = next(shared) - next(shared) - lifted
    return together, first, np.exp(log_weight - log_z), log_z, factor, c


def lifts_by_age(one, two, shared, b: int) -> float:
    """At least what all pairs b steps apart or more share, as the page books it: by the ages up to 2 b."""
    n, oldest = len(one), min(len(one), 2 * b)
    at_most = [max(shared[d:], default=0.0) for d in range(4 * n)]
    total = 0.0
    for t in range(n):
        joining = one[t] + two[t]
        for x in (one, two):
            before = np.flatnonzero(x[:t])
            if joining and before.size:
                age = min(t - before[-1], oldest)
                earlier = sum(at_most[age + k * b] for k in range(1, n + 1))
                total += joining * (earlier + (at_most[age] if age >= b else 0.0))
    return float(total)


@pytest.fixture(autouse=True)
def ages_up_to_two_separations(monkeypatch):
    """So that some are older than what is distinguished."""
    monkeypatch.setattr(by_age, "_LONG_AGE", 1)
    yield
    by_age._backward.cache_clear()
    by_age.tables.cache_clear()


@pytest.mark.parametrize(("scheme", "column"), SETTINGS, ids=str)
def test_the_density_and_the_weights_of_the_proof(scheme, column):
    """`Z dR/dQ >= f+^2`, no factor above 1, and the factors' mean given an output is `f / f+` exactly."""
    strategy = ja.Toeplitz(column)
    together, _, chance, log_z, factor, c = tuples_of(scheme, column)
    assert log_normalizer(ja.Mechanism(scheme, strategy, SIGMA)) == pytest.approx(log_z, rel=1e-8)
    assert factor.max() <= 1e-9
    outputs = np.random.default_rng(0).normal(size=(30, len(c))) * 1.5 + 0.3
    means = together @ c.T
    ratios = np.exp((outputs @ means.T - np.square(means).sum(axis=1) / 2) / SIGMA**2) * chance
    (x, weights), own = enumeration.vectors(scheme), np.square(c).sum(axis=0) / 2
    # Counts of one step are one number j: j s - j^2 / 2 of its norm.
    above = np.exp(((outputs @ c) @ x.T - (x**2) @ own) / SIGMA**2) @ weights
    exact = np.exp(enumeration.log_ratio(scheme, strategy.array, SIGMA, outputs))
    assert (ratios.sum(axis=1) * math.exp(log_z) >= above**2 * (1 - 1e-9)).all()
    weighted = (ratios @ np.exp(factor)) * math.exp(log_z)
    np.testing.assert_allclose(weighted, exact * above, rtol=1e-9)


@pytest.mark.parametrize("scheme", [ja.BMinSep(6, 2, 0.3), ja.Poisson(4, 0.4)], ids=str)
def test_a_smaller_lift_would_be_wrong(scheme):
    """A participation shares rows with the other replicas' too: kappa in place of m kappa is too little."""
    column = (1.0, 0.9, 0.8, 0.7)
    together, first, _, _, factor, c = tuples_of(scheme, column)
    kappa = float(ja.Toeplitz(column).cross_terms(scheme.iterations, scheme.min_separation)) / SIGMA**2
    lift = scheme.examples_per_unit * kappa * together.sum(axis=1)
    far = np.where(
        np.abs(np.subtract.outer(range(len(c[0])), range(len(c[0])))) >= scheme.min_separation, c.T @ c, 0
    )
    shared = np.einsum("ti,ij,tj->t", together, far, together) / 2 / SIGMA**2
    assert (shared <= 2 * lift + 1e-9).all() and (shared - lift).max() > 0.1
    assert factor.max() <= 1e-9 and first.shape == together.shape


# By ages, and of cyclic Poisson by the table; the others are programs of their own.
@pytest.mark.parametrize(("scheme", "column"), slow_but({0, 4}, SETTINGS), ids=str)
def test_drawn_counts_of_all_and_of_one(scheme, column, key):
    """Chi-square over all pairs of vectors; another pairing of the same draws has pairs that cannot be."""
    mechanism = ja.Mechanism(scheme, ja.Toeplitz(column), SIGMA)
    together, first, chance, *_ = tuples_of(scheme, column)
    distribution: dict[tuple[int, ...], float] = {}
    for pair, weight in zip(np.hstack([together, first]).astype(int).tolist(), chance, strict=True):
        distribution[tuple(pair)] = distribution.get(tuple(pair), 0.0) + weight
    module = scheme.replicas(mechanism)
    draw_with_one = jax.jit(module.draw_with_one, static_argnums=(1, 3))
    drawn = np.hstack(draw_with_one(key, scheme, module.tables(mechanism), 40_000)[:2])
    assert chi_square_p_value(drawn, distribution) > FALSE_ALARM
    n = scheme.iterations
    mixed = np.hstack([drawn[:, :n], np.roll(drawn[:, n:], 1, axis=0)])
    assert len(distribution) == 1 or not {tuple(pair) for pair in mixed.astype(int).tolist()} <= set(
        distribution
    )


@pytest.mark.parametrize("scheme", [ja.MultiAttribution(200, 16, 0.3, 2)], ids=str)
def test_the_factor_is_computed_from_above(scheme):
    n, strategy = scheme.iterations, ja.BufferedToeplitz((0.95, 0.6), (0.3, 0.2), scheme.iterations)
    mechanism = ja.Mechanism(scheme, strategy, SIGMA)
    generator = np.random.default_rng(1)
    alone, other = (generator.random((200, n)) < 0.1 for _ in range(2))
    together, alone = (alone + 1.0 * other).astype(np.float32), alone.astype(np.float32)
    arrays = overlaps.overlap_arrays(mechanism)
    factor = jax.jit(overlaps.log_factor_of_overlaps, static_argnums=(0, 1))
    found = np.asarray(factor(scheme, strategy, arrays, together, alone, together.sum(1)), float)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    far = np.where(apart >= scheme.min_separation, strategy.column_products(n)[apart], 0.0) / SIGMA**2
    shared = [np.einsum("ti,ij,tj->t", v.astype(float), far, v) / 2 for v in (together, alone)]
    kappa = float(strategy.cross_terms(n, scheme.min_separation))
    exact = shared[0] - shared[1] - 2 * scheme.examples_per_unit * kappa / SIGMA**2 * together.sum(axis=1)
    assert (found >= np.minimum(exact, 0.0)).all()
    assert (found <= np.minimum(exact, 0.0) + 2e-4 * together.sum(axis=1) + 1e-6).all()


def test_no_verdict_below_the_truth(monkeypatch, key):
    """One phase: a Gaussian of known delta. Without the lift less than that would be certified."""
    scheme, strategy, sigma, epsilon = ja.BallsInBins(4, 1), ja.Toeplitz(TAIL), 4.0, 0.5
    mechanism = ja.Mechanism(scheme, strategy, sigma)
    mu = np.linalg.norm(enumeration.strategy_matrix(strategy.array, 9, 4).sum(axis=1)) / sigma
    exact = float(gaussian(epsilon, mu))

    def accepted(delta):
        registry.build.cache_clear()
        of_table = table.log_normalizer_about, table._relative_error, table.tables
        for cache in (*of_table, table_weights.weights_of):
            cache.cache_clear()
        found = verify(mechanism, epsilon, delta, proposal="replicas:2", max_samples=40_000, key=key)
        return found.remove.certified

    assert not accepted(0.95 * exact)
    with monkeypatch.context() as patch:
        for module in (table_weights, overlaps):
            patch.setattr(module, "log_lift", lambda mechanism: 0.0)
        assert accepted(0.95 * exact)
    assert not accepted(0.95 * exact)


def distribution_by_age(scheme, arrays) -> dict:
    """{(vectors of both): (probability, lifts)} of what `draw_with_one` draws, in float64 from its tables."""
    b, size = scheme.min_separation, len(arrays["stays"])
    none = size - b
    after = np.asarray(by_age._after(np.arange(size), none))
    tables = {
        name: np.asarray(arrays[name], np.float64)
        for name in ("alone", "together", "stays", "ahead", "lifts")
    }
    high, low = (np.asarray(words, np.float64) for words in arrays["starts"])
    starts = np.diff(high * 2.0**-32 + low * 2.0**-64, prepend=0.0, append=1.0).reshape(b, b)
    now = {((none + i, none + j), ((), ())): (starts[i, j], 0.0) for i in range(b) for j in range(b)}
    for step in range(scheme.iterations):
        ahead, later = tables["ahead"][step], {}
        for ((c, d), past), (chance, lifts) in now.items():
            weights = {
                (1, 1): tables["together"][c, d] * ahead[0, 0],
                (1, 0): tables["alone"][c, d] * ahead[0, after[d]],
                (0, 1): tables["alone"][d, c] * ahead[after[c], 0],
                (0, 0): tables["stays"][c, d] * ahead[after[c], after[d]],
            }
            for joins, weight in weights.items():
                if weight > 0:
                    codes = tuple(
                        0 if join else int(after[code]) for join, code in zip(joins, (c, d), strict=True)
                    )
                    key = codes, tuple((*x, join) for x, join in zip(past, joins, strict=True))
                    before = later.get(key, (0.0, 0.0))[0]
                    paid = lifts + sum(joins) * tables["lifts"][c, d]
                    later[key] = before + chance * weight / sum(weights.values()), paid
        now = later
    found: dict = {}
    for (_, past), (chance, lifts) in now.items():
        found[past] = found.get(past, (0.0, 0.0))[0] + chance, lifts
    return found


@pytest.mark.parametrize(
    "scheme", [ja.BMinSep(5, 2, 0.3), ja.BMinSep(6, 3, 0.1, False), ja.BMinSep(4, 2, 0.01)], ids=str
)
def test_ages_draw_what_they_declare(scheme):
    """Every pair of vectors within the declared errors, lifts from below; a table 1 % off is noticed."""
    strategy = ja.Toeplitz(TAIL)
    mechanism = ja.Mechanism(scheme, strategy, SIGMA)
    module = scheme.replicas(mechanism)
    relative, variation = module.errors(mechanism)
    assert 0 < relative < 1e-3
    starts, n = scheme.min_separation**2 * 2.0**-51, scheme.iterations
    assert variation == pytest.approx(starts + 3 * n * 2.0**-64, rel=1e-9, abs=0)
    together, first, chance, *_ = tuples_of(scheme, TAIL)
    exact = {
        (tuple(x), tuple(s - x)): p
        for s, x, p in zip(together.astype(int), first.astype(int), chance, strict=True)
    }
    arrays = module.tables(mechanism)
    after = by_age._codes(mechanism).after
    np.testing.assert_array_equal(
        by_age._after(np.arange(len(after)), len(after) - scheme.min_separation), after
    )

    def excess(arrays):
        drawn = distribution_by_age(scheme, arrays)
        apart = ((drawn.get(pair, (0.0,))[0], exact.get(pair, 0.0)) for pair in drawn | exact)
        return sum(max(0.0, abs(one - other) - relative * other) for one, other in apart) / 2

    assert excess(arrays) <= variation + 1e-14
    for name in ("alone", "together"):
        assert excess(arrays | {name: 0.99 * arrays[name]}) > 10 * variation
    gram = strategy.column_products(scheme.iterations) / SIGMA**2
    lift = float(overlaps.overlap_arrays(mechanism)["lift"])
    for (one, two), (_, lifts) in distribution_by_age(scheme, arrays).items():
        booked = lifts_by_age(np.array(one), np.array(two), gram, scheme.min_separation)
        assert booked * (1 - 1e-4) - 1e-9 <= lift * lifts <= booked * (1 + 1e-6) + 1e-9


def test_ages_make_the_scale_smaller():
    scheme = ja.BMinSep.from_batch_size(dataset_size=1000, batch_size=20, iterations=120, min_separation=16)
    strategy = ja.BufferedToeplitz.optimal(iterations=120, buffers=2, min_separation=16, participations=8)
    mechanism = ja.Mechanism(scheme, strategy, 0.8)
    assert 0 < log_normalizer(mechanism) < table.log_normalizer_about(mechanism) / 2
    assert (
        by_age.longest_age(ja.Mechanism(ja.BMinSep(7200, 256, 0.01), ja.Toeplitz((1.0, *[0.01] * 300)), 1.0))
        == 0
    )


@pytest.mark.parametrize("scheme", [ja.BMinSep(6, 2, 0.3), ja.BMinSep(9, 3, 0.2)], ids=str)
def test_lifts_are_added_up_from_below(scheme):
    """The density may be divided by at most was earned: tables, and sums of them, are rounded down.

    A draw adds at most the participations of two, each addition with an error of 2^-24.
    """
    mechanism = ja.Mechanism(scheme, ja.Toeplitz(TAIL), SIGMA)
    codes, *_ = by_age._factors(mechanism)
    exact = (codes.far[:, None] + codes.far) / log_lift(mechanism)
    lifts = np.asarray(by_age.tables(mechanism)["lifts"], np.float64)
    most_rounded = (1 + 2.0**-24) ** (2 * scheme.max_participations)
    assert exact.max() > 0.1 and np.all(lifts * most_rounded <= exact)
    np.testing.assert_allclose(lifts, exact, rtol=1e-5)
