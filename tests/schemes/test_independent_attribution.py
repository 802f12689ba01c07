"""Users with several independently drawn examples, against enumeration over all tuples of vectors."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.kernels.likelihoods import interacting_recurrence
from jaxacct.kernels.likelihoods.interacting_recurrence import numbers_kept
from jaxacct.proposals.base import direction_key
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics.hockey_stick import weighted_terms
from tests.draws import draws_of
from tests.likelihood.test_privacy_loss import outputs_of
from tests.oracles import enumeration, tuples
from tests.oracles.settings import few_in_ci, slow
from tests.proposals_by_name import family_candidates, proposal_by_name
from tests.refusals import refused
from tests.strategies.test_non_banded import both_losses

FALSE_ALARM = 1e-6

# (scheme, bands): cold and warm, n < b, n not a multiple of b, b = 1, p = 1, one to four examples.
SETTINGS = [
    (ja.IndependentAttribution(8, 3, 0.3, 2, False), 3),
    (ja.IndependentAttribution(8, 3, 0.3, 2), 3),
    (ja.IndependentAttribution(7, 4, 0.2, 2), 2),
    (ja.IndependentAttribution(7, 3, 1.0, 2), 2),
    (ja.IndependentAttribution(7, 3, 1.0, 2, False), 3),
    (ja.IndependentAttribution(3, 5, 0.4, 2), 4),
    (ja.IndependentAttribution(3, 5, 0.4, 2, False), 5),
    (ja.IndependentAttribution(4, 1, 0.3, 2), 1),
    (ja.IndependentAttribution(1, 2, 0.5, 2), 2),
    (ja.IndependentAttribution(6, 3, 0.3, 3), 3),
    (ja.IndependentAttribution(5, 2, 0.3, 4, False), 2),
    (ja.IndependentAttribution(8, 3, 0.3, 1), 3),
]
# Each is a program of its own: cold, p = 1, n < b, three and four examples.
FAST = {0, 3, 5, 9, 10}


@pytest.fixture
def bounded(monkeypatch):
    """No likelihood of more than one example fits."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", 0)


@pytest.mark.parametrize(("scheme", "bands"), few_in_ci(FAST | {7, 11}, SETTINGS))
def test_the_loss_is_that_of_all_tuples(scheme, bands, x64):
    """On the n x n matrix, from tiny to huge noise; b = 1 and one example too, as other schemes have them."""
    strategy = ja.BandedToeplitz.square_root(bands)
    for sigma in (0.05, 0.6, 100.0):
        outputs = outputs_of(scheme, sigma, np.random.default_rng(1), batch=12)
        ours = np.asarray(ja.privacy_loss(ja.Mechanism(scheme, strategy, sigma), outputs))
        exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs)
        np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-12)


BOUNDED = [
    pytest.param(*setting, finite, marks=() if i in ({1} if finite else FAST) else pytest.mark.slow)
    for finite in (False, True)
    for i, setting in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("scheme", "bands", "finite"), BOUNDED)
def test_both_sides_are_bounded_where_the_tables_do_not_fit(scheme, bands, finite, x64, bounded):
    """On the rows of which scores are `C^T y`; with one example the bounds are exact."""
    strategy, sigma = ja.BandedToeplitz.square_root(bands), 0.6
    if finite:
        bands = min(bands, scheme.iterations)
        strategy = ja.FiniteToeplitz(strategy.coefficients[:bands], scheme.iterations)
    rows = strategy.rows(scheme.iterations)
    outputs = np.random.default_rng(2).normal(size=(30, rows)) * 1.2 + 0.2
    exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs)
    dense = enumeration.strategy_matrix(strategy.coefficients, rows, scheme.iterations)
    above, below = map(np.asarray, both_losses(scheme, strategy, outputs @ dense, sigma))
    assert (above >= exact - 1e-12).all()
    assert (below <= exact + 1e-12).all()
    several = scheme.examples_per_user > 1
    assert ja.Mechanism(scheme, strategy, sigma).is_upper_bound == several
    assert (above - below).max() > 1e-3 if several else np.abs(above - below).max() < 1e-12


@pytest.mark.parametrize("bands", [1, 3, 4])
def test_the_overlap_bound_holds_for_every_pair(bands, bounded):
    """`kappa` per participation covers what two vectors share, worst over all pairs; and it is attained."""
    scheme, strategy = ja.IndependentAttribution(9, 4, 0.5, 2), ja.BandedToeplitz.square_root(bands)
    dense = enumeration.strategy_matrix(strategy.coefficients, 9 + bands - 1, 9)
    patterns = np.array(list(enumeration.pattern_distribution(scheme.one)), float)
    shared = (patterns @ dense.T) @ (patterns @ dense.T).T
    number = patterns.sum(axis=1)
    each = number[:, None] + number
    ratio = (shared / np.maximum(each, 1)).max()
    assert ratio <= scheme.overlap_bound(strategy) <= 1.6 * ratio


@pytest.mark.parametrize("exact", [slow(True), False], ids=["exact", "bounded"])
@pytest.mark.parametrize(
    ("scheme", "quick"),
    [
        (ja.IndependentAttribution(2, 2, 0.3, 2), True),
        slow(ja.IndependentAttribution(2, 2, 0.3, 2, False), False),
        slow(ja.IndependentAttribution(2, 1, 0.2, 2), False),
        slow(ja.IndependentAttribution(2, 2, 0.3, 3), False),
    ],
    ids=str,
)
def test_proposals_against_integration(scheme, quick, exact, key, monkeypatch):
    """No term above 1, and the mean is the exact delta of two steps (or above it where f is bounded).

    Quick: of the smallest order at one epsilon and of the largest at the other.
    """
    if not exact:
        monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", 0)
    bands, sigma = min(2, scheme.min_separation), 0.9
    strategy = ja.BandedToeplitz((2.0, 1.0)[:bands])
    mechanism = ja.Mechanism(scheme, strategy, sigma)
    width = -math.log(FALSE_ALARM)
    direction = "remove"
    for epsilon in (0.1, 1.5):
        truth = tuples.two_step_delta(scheme, strategy.coefficients, sigma, epsilon, direction)
        found = family_candidates("replicas", mechanism, epsilon)
        assert found
        if quick:
            found = found[:1] if epsilon < 1 else found[-1:]
        for proposal in found[:1] + found[1:][-1:]:
            draws = draws_of(proposal, direction_key(key, direction), 60)
            terms = weighted_terms(draws, direction, epsilon) / math.exp(proposal.log_scale)
            assert terms.max() < 1 + 2e-5
            error = math.sqrt(2 * terms.var() * width / terms.size) + width / terms.size
            mean, slack = terms.mean(), 2e-3 * truth / math.exp(proposal.log_scale)
            assert mean > truth / math.exp(proposal.log_scale) - error - slack
            if exact:
                assert mean < truth / math.exp(proposal.log_scale) + error + slack


@pytest.mark.parametrize("warm", [slow(True), False])
def test_what_rounding_leaves_out_is_kept(warm, monkeypatch):
    """In float32 against float64, 600 steps, three examples; plain sums have far larger errors."""
    scheme, rng = ja.IndependentAttribution(600, 3, 0.02, 3, warm), np.random.default_rng(4)
    ratios = rng.normal(size=(600, 16)).astype(np.float32) / 4
    shared = np.float32([0.3, 0.2, 0.1])

    def loss(dtype):
        anew = jax.jit(lambda rows, shared: scheme.log_likelihood_ratios(rows.T, shared))
        return np.asarray(anew(jax.numpy.asarray(ratios, dtype), jax.numpy.asarray(shared, dtype)))

    found = [loss(np.float32)]
    monkeypatch.setattr(interacting_recurrence, "two_sum", lambda a, b: (a + b, 0 * b))
    found.append(loss(np.float32))
    monkeypatch.undo()
    with jax.enable_x64(True):
        exact = loss(np.float64)
    every, none = (float(np.abs(each - exact).max()) for each in found)
    unit = 2.0**-24 * 3 * 600 * 0.02
    assert every < 4 * unit and none > 6 * every


def test_what_is_refused():
    refused(
        "examples_per_user must be an integer of at least 1, got 0", ja.IndependentAttribution, 5, 2, 0.1, 0
    )
    with pytest.raises(ValueError, match="strategy must be banded Toeplitz for independent-attribution"):
        ja.Mechanism(ja.IndependentAttribution(5, 2, 0.1, 2), ja.Toeplitz((0.8, 0.5, 0.2)), 1.0)
    with pytest.raises(ValueError, match="replicas:2 is not available for this mechanism"):
        users = ja.Mechanism(ja.IndependentAttribution(5, 2, 0.1, 2), ja.BandedToeplitz.identity(), 1.0)
        proposal_by_name(users, 1.0, "remove", "replicas:2")
    refused(
        "norms must be", ja.IndependentAttribution(5, 2, 0.1, 2).log_likelihood_ratios, jax.numpy.zeros(5)
    )


def test_which_likelihoods_are_exact():
    assert ja.IndependentAttribution(7200, 256, 1e-4, 2).is_exact
    assert ja.IndependentAttribution(1000, 16, 1e-3, 4).is_exact
    assert not ja.IndependentAttribution(1000, 64, 1e-3, 4).is_exact
    assert numbers_kept(16, 2, warm=True) == 16 * 31


def test_a_plan_of_users_is_proven_like_all_others():
    """End to end: certified, loaded again; nothing in its lines or its statement is measured."""
    scheme, strategy = ja.IndependentAttribution(4, 2, 0.1, 2), ja.BandedToeplitz.square_root(2)
    target = dict(epsilon=1.0, delta=0.02, noise_multiplier=1.2, key=jax.random.key(3))
    plan = ja.Plan.from_json(ja.calibrate(scheme, strategy, **target).to_json())
    assert plan.certified and plan.evidence.remove.num_samples > 0
    assert "not proven" not in plan.statement()
    assert all("proofs/" in line.source for line in plan.verdict.remove.items)


@pytest.mark.parametrize("number", [1, 2, 5, 40])
def test_errors_of_independent_draws_multiply(number):
    """k examples, each drawn with a density that is up to 1 + e of the stated one: (1 + e)^k together."""
    scheme = ja.IndependentAttribution(6, 2, 0.3, number)
    one = Fraction(scheme.one.draw_errors[0])
    exact = (1 + one) ** number - 1
    assert 0 < float(one) and exact * (1 - Fraction(1, 2**40)) <= Fraction(scheme.draw_errors[0])
    assert scheme.draw_errors[0] == pytest.approx(float(exact), rel=1e-12)
