"""Two replicas and the mean with independent cuts: distribution and bound by enumeration, in NumPy."""

import itertools
import math

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, TruncatedBMinSep
from jaxacct.proposals.families import truncated_mean
from jaxacct.proposals.families.truncated import truncated_lines
from jaxacct.proposals.threshold import budget_lines
from jaxacct.statistics.lines import total
from tests.oracles import enumeration
from tests.proposals.test_independent_cuts import all_cuts, densities, mechanism_of
from tests.proposals_by_name import family_candidates, proposal_by_name

NAME = "truncated-mean"
# Warm and cold, one band, n < b.
SMALL = [
    (TruncatedBMinSep(4, 2, 0.3, 4, 12), 2),
    (TruncatedBMinSep(3, 1, 0.4, 4, 10, False), 1),
    pytest.param(TruncatedBMinSep(3, 4, 0.5, 4, 9), 4, marks=pytest.mark.slow),
]
BOTH = pytest.mark.parametrize("direction", ["remove", "add"])


def of(mechanism, direction):
    """(C, mean participation, how often v has it: once, more; its scores' norms)."""
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    dense = enumeration.strategy_matrix(strategy.array, strategy.rows(n), n)
    distribution = enumeration.pattern_distribution(mechanism.scheme.uncut)
    mean = sum(weight * np.array(x) for x, weight in distribution.items())
    return dense, mean, *((0, 1) if direction == "remove" else (1, 1))


def log_minorant(mechanism, direction, cut, outputs):
    """m, what ln of the other side's likelihood is at least minus: the mean of its exponents, negated."""
    dense, mean, once, more = of(mechanism, direction)
    counts = (once + more * np.array(cut)) * (-1 if direction == "remove" else 1)
    norms = (dense**2).sum(axis=0)
    return -((counts * (outputs @ dense) - counts**2 * norms / 2) @ mean) / mechanism.noise_multiplier**2


@BOTH
@pytest.mark.parametrize(("scheme", "bands"), SMALL)
def test_the_mixture_and_its_factor(scheme, bands, direction):
    """Z sums up all cuts and pairs with factors; with those the mixture is `pi R0 f^2 e^m`, at any output."""
    mechanism = mechanism_of(scheme, bands, 1.2)
    dense, mean, once, more = of(mechanism, direction)
    proposal, cuts = (
        proposal_by_name(mechanism, 1.0, direction, NAME),
        scheme.independent_cuts,
    )
    tables, variance = proposal.tables(), mechanism.noise_multiplier**2
    np.testing.assert_allclose(tables["mean"], mean, rtol=1e-6)
    outputs = np.random.default_rng(1).normal(size=(3, len(dense))) * 2
    distribution, sign = enumeration.pattern_distribution(scheme.uncut), 1 if direction == "remove" else -1
    total_weight, rows = 0.0, []
    for cut, chance in all_cuts(cuts.chances):
        label = 1 + np.array(cut) if direction == "remove" else np.array(cut)
        v, found = mean * (once + more * np.array(cut)), np.zeros(3)
        for (x, p_x), (other, p_other) in itertools.product(distribution.items(), repeat=2):
            s, t = dense @ (x * label), dense @ (other * label)
            moved = s + t + dense @ v
            halves = (dense**2).sum(axis=0) @ (mean * (once + more * np.array(cut)) ** 2) / 2
            log_mass = (moved @ moved / 2 - s @ s / 2 - t @ t / 2 + halves) / variance
            found += (
                p_x
                * p_other
                * np.exp(log_mass + sign * outputs @ moved / variance)
                * math.exp(-moved @ moved / 2 / variance)
            )
            rows.append((cut, (np.array(x) + other) * label, v, chance * p_x * p_other, log_mass))
        f_p, f_q = densities(scheme, dense, mechanism.noise_multiplier, outputs, cut)
        f = f_p if direction == "remove" else f_q
        m = log_minorant(mechanism, direction, cut, outputs)
        np.testing.assert_allclose(found, f**2 * np.exp(m), rtol=1e-9)
        other_side = f_q if direction == "remove" else f_p
        assert np.all(np.log(other_side) >= -m - 1e-12)
    cut, counts, moved = (np.array([row[k] for row in rows], np.float32) for k in range(3))
    factor_of = jax.jit(truncated_mean.log_factor, static_argnums=(0, 5))
    factor = factor_of(mechanism.strategy, tables, cut, counts, moved, direction)
    factor = np.asarray(factor, float) / variance
    assert factor.max() <= 0 and (factor.min() < -0.01 or (bands == 1 and direction == "add"))
    # A draw's weight over all that is drawn is what the mixture has, over its factor; raised by float32 only.
    weights = [chance * math.exp(log_mass) for *_, chance, log_mass in rows]
    total_weight = sum(w / math.exp(f) for w, f in zip(weights, factor, strict=True))
    assert math.log(total_weight) == pytest.approx(proposal.log_normalizer, abs=1e-3)
    assert math.log(total_weight) <= proposal.log_normalizer


def log_terms(mechanism, direction, epsilon, cut, y):
    """ln of terms over Z / 1, with the mean and without it."""
    f_p, f_q = densities(mechanism.scheme, of(mechanism, direction)[0], mechanism.noise_multiplier, y, cut)
    top, below = (f_p, f_q) if direction == "remove" else (f_q, f_p)
    with np.errstate(divide="ignore"):
        careless = np.log(np.maximum(top - math.exp(epsilon) * below, 0) / top**2)
    return careless - log_minorant(mechanism, direction, cut, y), careless


@BOTH
def test_no_term_exceeds_the_scale(direction):
    """The search comes near M and not above; an attack wins where the mean is left out."""
    scheme, bands = SMALL[0]
    worst = without = -math.inf
    for sigma, epsilon in ((1.0, 0.3), (0.7, 1.5)):
        mechanism = mechanism_of(scheme, bands, sigma)
        rng, rows = np.random.default_rng(2), scheme.iterations + bands - 1
        proposal = proposal_by_name(mechanism, epsilon, direction, NAME)
        scale = proposal.log_scale - proposal.log_normalizer
        for cut in itertools.product((0, 1), repeat=scheme.iterations):
            y = rng.normal(size=(2000, rows)) * rng.choice([0.5, 2.0, 8.0], size=(2000, 1))
            y += rng.choice([-3.0, 0.0, 3.0], size=(2000, 1))
            for step in (1.0, 0.3, 0.1, 0.03):
                best = y[np.argmax(log_terms(mechanism, direction, epsilon, cut, y)[0])]
                y = np.concatenate([y[:50], best + step * rng.normal(size=(500, rows)), best[None]])
            found, careless = log_terms(mechanism, direction, epsilon, cut, y)
            worst, without = max(worst, found.max() - scale), max(without, careless.max() - scale)
    assert math.log(0.6) < worst <= 1e-9
    assert without > math.log(1.1)


@BOTH
def test_many_participations(direction):
    """Where floors lose e to the participations the mean is far better; and what is reserved."""
    scheme = TruncatedBMinSep.from_batch_size(
        dataset_size=600, batch_size=30, iterations=120, min_separation=4, max_batch_size=32
    )
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(3), 2.5)
    proposal = proposal_by_name(mechanism, 8.0, direction, NAME)
    assert proposal.log_scale < proposal_by_name(mechanism, 8.0, direction, "truncated").log_scale - 2
    assert (
        proposal.scale_at is not None and proposal.scale_at(8.0) == proposal.log_scale and proposal.of_a_bound
    )
    lines = budget_lines(proposal, 1e-6)
    fewer = budget_lines(proposal_by_name(mechanism, 8.0, direction, "truncated"), 1e-6)
    assert total(fewer, "relative") < total(lines, "relative") < 0.05
    assert total(lines, "epsilon") < 0.01
    # As long as no replica is: not drawn.
    longer = truncated_lines(mechanism, 1e-6, direction, 1.0, 0.0, (6.0, 1000.0))
    assert total(longer, "relative") == math.inf


def test_a_long_mean_sees_the_errors_of_its_scores():
    """Of a vector longer than 2 as well: errors as large as the margin move the factor by at most it."""
    strategy, n = BandedToeplitz((1.0, 0.5)), 64
    mean, nothing = np.full(n, 0.9, np.float32), np.zeros((1, n), np.float32)
    shared = np.full(n, 100.0, np.float32)  # far above what v has, so that the factor is not cut off

    @jax.jit
    def factor(margin):
        tables = {"mean": mean, "shared": shared, "margin": margin}
        return truncated_mean.log_factor(strategy, tables, nothing, nothing, mean[None], "add")[0]

    factors = [float(factor(margin)) for margin in (0.0, 100.0)]
    assert factors[1] - factors[0] >= 100 * np.linalg.norm(mean) / 2


def test_where_there_is_none():
    uncut = mechanism_of(SMALL[0][0].uncut, 2)
    assert family_candidates("truncated-mean", uncut, 1.0) == []
    with pytest.raises(ValueError, match="scheme must truncate batches itself, got b-min-sep"):
        proposal_by_name(uncut, 1.0, "remove", NAME)
    loud = mechanism_of(SMALL[0][0], 2, 0.01)
    with pytest.raises(ValueError, match=r"overflow at noise multiplier 0\.01"):
        proposal_by_name(loud, 1.0, "remove", NAME)
