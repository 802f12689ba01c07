"""Extrapolation by concavity (proofs/add_direction.md, theorem 4) against quadrature and the PLD
accountant."""

import math

import jax
import numpy as np
import pytest
from scipy.special import ndtri

from jaxacct.core.check import bound_of_line
from jaxacct.proposals import base
from jaxacct.proposals.add_direction import extrapolation
from jaxacct.proposals.add_direction import half_space as add_direction
from jaxacct.schemes import BallsInBins, BMinSep, Poisson
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import dense_counts
from tests.draws import draw_line
from tests.oracles.add_direction import FALSE_ALARM, exact_two_steps, make, pld_add, width

pytestmark = pytest.mark.optimized  # many draws from few programs


def test_height_of_a_term_is_concave_in_the_loss():
    """Theorem 4 needs `v -> Phi^{-1}(1 - e^v)` concave and decreasing for v < 0."""
    v = np.linspace(-30, -1e-3, 20001)
    heights = -ndtri(np.exp(v))
    assert np.all(np.diff(heights) < 0)
    assert np.all(np.diff(heights, 2) <= 1e-9)


@pytest.mark.parametrize("scheme", [Poisson(2, 0.3), BMinSep(2, 2, 0.4), BallsInBins(2, 2)])
def test_height_of_the_mean_is_concave_and_extrapolates_above(scheme):
    mechanism, epsilon = make(scheme, scheme.min_separation, 0.8), 0.35
    log_scale = add_direction.log_remainder_scale(mechanism, epsilon)
    mu = scheme.participation_probabilities()
    signal = mechanism.strategy.gram(mu)
    along = signal / math.sqrt(mu @ signal)
    distances = np.linspace(0, 3, 7)
    means = [exact_two_steps(mechanism, epsilon, d * along) for d in distances]
    heights = ndtri(np.array(means) * math.exp(-log_scale))
    assert np.all(np.diff(heights, 2) <= 1e-6)
    for i in range(1, 6):
        line = extrapolation.at_distances(mechanism, epsilon, distances[i], distances[i + 1])
        x = [means[j] * math.exp(-log_scale) for j in (i, i + 1)]
        assert math.exp(line.log_bound(*x)) >= means[0] * (1 - 1e-6)


def test_shifted_distributions_against_quadrature():
    mechanism, epsilon = make(BMinSep(2, 2, 0.4), 2, 0.8), 0.35
    mu = mechanism.scheme.participation_probabilities()
    signal = mechanism.strategy.gram(mu)
    along = signal / math.sqrt(mu @ signal)
    line = extrapolation.at_distances(mechanism, epsilon, 0.7, 1.9)
    for distribution, distance in ((line.near, 0.7), (line.far, 1.9)):
        exact = exact_two_steps(mechanism, epsilon, distance * along) * math.exp(-line.log_scale)
        terms = line.terms(distribution.draw(jax.random.key(3), 0, 400), 0.0)
        assert abs(terms.mean() - exact) <= width(exact, terms.size) + 1e-5


def bound_of(line, found, q) -> float:
    """The bound on H(Q, P) of samples at both distances."""
    return bound_of_line(
        line,
        q,
        *(dense_counts(part, len(bounds.TERM_EDGES)) for part in (found.near_counts, found.far_counts)),
    )


@pytest.mark.parametrize(
    ("n", "p", "sigma", "epsilon", "most"),
    [
        pytest.param(1500, 1 / 300, 1.248, 0.5, 1.2e-5, marks=pytest.mark.slow),
        pytest.param(1500, 1 / 300, 0.891, 1.0, 5e-7, marks=pytest.mark.slow),
        (300, 0.01, 1.0, 1.0, 6e-7),  # of as small a truth, 2e-10
        pytest.param(200, 0.02, 0.7, 1.5, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_many_participations_against_the_pld_accountant(n, p, sigma, epsilon, most):
    """No half-space helps here; the certificate stays above the truth and resolves small deltas."""
    mechanism = make(Poisson(n, p), 1, sigma)
    # The optimistic accountant says 0 here; the pessimistic one is right to a few percent at this interval.
    _, pessimistic = pld_add(n, p, sigma, epsilon, 1e-3)
    line = extrapolation.plan_extrapolations(mechanism, epsilon, jax.random.key(1))[0]
    found = draw_line(line, 0.0, FALSE_ALARM, jax.random.key(2), max_samples=100_000)
    assert found.num_samples <= 100_000
    assert pessimistic / 2 <= bound_of(line, found, FALSE_ALARM) <= most


def test_more_draws_are_planned_where_few_would_not_do():
    """A plan of more draws stands nearer to 0 and expects less; it is taken where the cheaper one fails."""
    mechanism, key = make(Poisson(200, 0.02), 1, 0.7), jax.random.key(1)
    few, many = extrapolation.plan_extrapolations(mechanism, 1.5, key)
    assert many.near_distance < few.near_distance and many.log_expected < few.log_expected
    assert (few.expected_samples, many.expected_samples) == extrapolation.PLANNED_SAMPLES

    def chosen(log_delta, otherwise=1e9):
        delta = math.exp(log_delta)
        return extrapolation.cheaper_extrapolation(mechanism, 1.5, delta, None, otherwise, key)

    between = (few.log_expected + many.log_expected) / 2
    assert chosen(few.log_expected + 0.1).planned_samples == few.planned_samples
    assert chosen(between).planned_samples == many.planned_samples
    assert chosen(between, 2 * many.planned_samples) is None and chosen(many.log_expected - 0.1) is None


def test_rare_distances_are_passed_over_by_bisection(monkeypatch):
    """Of a far event few distances below it are drawn, and it is planned from the first common ones."""
    mechanism, key = make(Poisson(300, 0.01), 1, 1.5), jax.random.key(1)
    drawn, real = [], base.draw_in_batches

    def counted(proposal, *given):
        drawn.append(proposal)
        return real(proposal, *given)

    monkeypatch.setattr(base, "draw_in_batches", counted)
    found = extrapolation.plan_extrapolations(mechanism, 1.0, key)
    few = len(drawn)
    # One after the other: the same distances, as each has a stream of its own.
    monkeypatch.setattr(extrapolation.bisect, "bisect_left", lambda *_, **__: 0)
    again = extrapolation.plan_extrapolations(mechanism, 1.0, key)
    assert [one.near_distance for one in found] == [one.near_distance for one in again]
    assert few <= 5 + 8 < 20 <= len(drawn) - few


def test_extrapolation_refuses_what_it_cannot_do():
    mechanism = make(Poisson(10, 0.1), 1, 1.0)
    with pytest.raises(ValueError, match="exactly zero"):
        extrapolation.at_distances(mechanism, 5.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="0 < near < far"):
        extrapolation.at_distances(mechanism, 0.5, 2.0, 1.0)
    assert not extrapolation.plan_extrapolations(mechanism, 5.0, jax.random.key(0))
    line = extrapolation.at_distances(mechanism, 0.5, 1.0, 2.0)
    assert line.log_bound(1.0, 0.5) == line.log_bound(0.5, 0.0) == line.log_scale


@pytest.mark.slow
def test_certificates_are_rarely_wrong():
    """At q = 0.2 and a truth just above delta_v, 100 runs: more than 45 wrong ones has probability 1e-7."""
    mechanism, epsilon = make(Poisson(2, 0.3), 1, 1.0), 0.4
    exact = exact_two_steps(mechanism, epsilon)
    wrong = 0
    for seed in range(100):
        line = extrapolation.at_distances(mechanism, epsilon, 0.2, 2.0)
        found = draw_line(line, exact * (1 - 1e-6), 0.2, jax.random.key(seed), 20_000)
        wrong += bound_of(line, found, 0.2) <= exact * (1 - 1e-6)
    assert wrong <= 45
