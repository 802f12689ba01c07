"""The n x n mechanism against enumeration and quadrature (proofs/finite_horizon.md)."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.kernels import randomness
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.strategies import ending
from tests.draws import divergence_interval
from tests.oracles import enumeration, settings, tuples
from tests.oracles.settings import slow
from tests.proposals_by_name import normalizer_of_two, proposal_by_name
from tests.refusals import refused
from tests.rounding_errors import loss_margin, measured_error
from tests.stored_plans import claim_with, loaded

FALSE_ALARM = 1e-6
SMALL = [(scheme, bands) for scheme, bands in settings.SMALL if 1 < bands <= scheme.iterations]
SMALL += [
    (ja.CyclicPoisson(9, 5, 0.6), 5),
    (ja.CyclicPoisson(6, 5, 0.6), 5),
    (ja.BallsInBins(9, 5), 5),
    (ja.BMinSep(6, 5, 0.3), 4),
]
SEVERAL = ja.IndependentAttribution(5, 3, 0.3, 2), 3


def square_root(bands: int, n: int) -> ja.FiniteToeplitz:
    return ja.FiniteToeplitz(ja.BandedToeplitz.square_root(bands).coefficients, n)


def mechanism_of(scheme, bands, sigma) -> ja.Mechanism:
    return ja.Mechanism(scheme, square_root(bands, scheme.iterations), sigma)


def coefficients_of(mechanism) -> tuple[float, ...]:
    assert isinstance(mechanism.strategy, ja.FiniteToeplitz)
    return mechanism.strategy.coefficients


@pytest.mark.parametrize(("scheme", "bands"), [SMALL[0], (ja.MultiAttribution(7, 3, 0.2, 2), 3), SEVERAL])
def test_the_loss_of_drawn_scores_is_that_of_the_n_outputs(scheme, bands, x64):
    """From normals and participations to L, against enumeration of `C x + sigma z` on n rows."""
    n, sigma, generator = scheme.iterations, 0.8, np.random.default_rng(0)
    strategy = square_root(bands, n)
    noise = generator.standard_normal((40, n))
    x = generator.choice(np.array(list(enumeration.pattern_distribution(scheme)), float), 40)

    @jax.jit
    def losses(noise, x):
        return loss_of_scores(scheme, strategy, strategy.scores_from_normals((noise,), n, sigma, x), sigma)

    outputs = sigma * noise + x @ enumeration.strategy_matrix(strategy.array, n, n).T
    exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs)
    np.testing.assert_allclose(losses(noise, x), exact, rtol=1e-9, atol=1e-12)


def test_the_loss_given_batch_sizes_is_that_of_the_n_outputs(x64):
    """Counts as under P, 2 included, and as under Q; `privacy_loss` is tested by enumeration."""
    scheme, sigma, generator = ja.TruncatedBMinSep(7, 3, 0.3, 4, 9), 0.8, np.random.default_rng(0)
    strategy, noise = square_root(3, 7), generator.standard_normal((40, 7))
    sizes = generator.integers(0, 8, (40, 7)).astype(np.int32)

    @jax.jit
    def losses(noise, x, sizes):
        scores = strategy.scores_from_normals((noise,), 7, sigma, x)
        return loss_of_scores(scheme, strategy, scores, sigma, batch_sizes=sizes)

    for x in (np.tile([0, 2.0, 0, 0, 1, 0, 0], (40, 1)), np.tile([0, -1.0, 0, 0, 0, -1, 0], (40, 1))):
        outputs = sigma * noise + x @ enumeration.strategy_matrix(strategy.array, 7, 7).T
        exact = ja.privacy_loss(ja.Mechanism(scheme, strategy, sigma), outputs, sizes)
        np.testing.assert_allclose(losses(noise, x, sizes), exact, rtol=1e-9, atol=1e-12)


def test_normalizer_of_shorter_columns_against_all_tuples():
    for scheme, bands in SMALL:
        for sigma in (0.3, 20.0):
            mechanism, n = mechanism_of(scheme, bands, sigma), scheme.iterations
            whole = ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma)
            exact, _ = tuples.count_distribution(scheme, coefficients_of(mechanism), sigma, 2, n)
            ours = normalizer_of_two(mechanism)
            assert ours == pytest.approx(math.log(exact), rel=1e-10, abs=1e-13)
            assert ours < normalizer_of_two(whole)


TWO_STEPS = ja.Mechanism(ja.BMinSep(2, 2, 0.4), ja.FiniteToeplitz((0.8, 0.6), 2), 0.8)


PAIR_OF_A_USER = ja.Mechanism(ja.IndependentAttribution(2, 2, 0.3, 2), ja.FiniteToeplitz((2.0, 1.0), 2), 0.9)


# One example in CI; several with whole columns in `conformance`.
@pytest.mark.parametrize(
    ("mechanism", "epsilon", "names"),
    [(TWO_STEPS, 1.0, ("plain", "replicas:2")), slow(PAIR_OF_A_USER, 1.5, ("replicas:4",))],
)
def test_proposals_have_the_exact_divergence(mechanism, epsilon, names):
    """And the extended horizon's is distinguished: the tests would notice rows that are not there."""
    of = mechanism.scheme, coefficients_of(mechanism), mechanism.noise_multiplier, epsilon, "remove"
    exact, extended = (tuples.two_step_delta(*of, rows) for rows in (2, None))
    for name in names:
        proposal = proposal_by_name(mechanism, epsilon, "remove", name)
        draws = proposal.draw(randomness.key_from_words([3, 4]), 0, 64)
        low, high = divergence_interval(proposal, draws, epsilon, FALSE_ALARM / 20)
        assert low <= exact <= high and (mechanism is not TWO_STEPS or high < extended)


def test_a_certified_plan_is_private_and_the_extended_one_is_not_certified():
    """Two steps, by quadrature: the n rows have the delta and are certified, the extended horizon has not."""
    scheme, coefficients, sigma = TWO_STEPS.scheme, coefficients_of(TWO_STEPS), 0.8
    whole = ja.BandedToeplitz(coefficients)

    def delta(rows):
        return max([tuples.two_step_delta(scheme, coefficients, sigma, 1.0, way, rows) for way in DIRECTIONS])

    assert 0.85 * 0.05 <= delta(2) <= 0.95 * 0.05 < 0.05 < delta(3)
    target = dict(epsilon=1.0, delta=0.05, noise_multiplier=sigma, key=jax.random.key(5))
    plan = ja.calibrate(scheme, whole, **target, options=ja.CalibrationOptions(proposal="plain"))
    assert plan.mechanism == TWO_STEPS
    stored = json.loads(json.dumps(plan.to_json()))
    assert ja.Plan.from_json(stored).certified
    # The evidence belongs to the n rows, and is refused for the extended mechanism.
    with pytest.raises(ValueError, match="for another mechanism"):
        loaded(dataclasses.replace(plan, claim=claim_with(plan.claim, strategy=whole)))
    with pytest.raises(ValueError, match="digest does not match"):
        edited = stored["claim"] | {"strategy": {"coefficients": list(coefficients), "given_norm": 1.0}}
        ja.Plan.from_json(stored | {"claim": edited})
    extended = ja.Mechanism(scheme, whole, sigma)
    assert claim_with(plan.claim, strategy=whole).digest != plan.claim.digest
    seen = ja.verify(extended, 1.0, 0.05, max_samples=200_000, key=jax.random.key(6), proposal="plain")
    assert not seen.certified


def test_the_rule():
    few, many = ja.BandedToeplitz.square_root(4), ja.BandedToeplitz.square_root(64)
    for scheme in (ja.BMinSep(60, 4, 0.1), ja.BallsInBins(60, 4), ja.IndependentAttribution(60, 4, 0.1, 2)):
        assert ending(few, scheme) == ja.FiniteToeplitz(few.coefficients, 60)
    assert ending(few, ja.BMinSep(61, 4, 0.1)) is few  # more than 20 steps for each band but the first
    assert ending(many, ja.BMinSep(63, 64, 0.1)) is many  # no column would be whole
    assert ending(ja.BandedToeplitz.identity(), ja.Poisson(3, 0.1)) == ja.BandedToeplitz.identity()


def test_what_it_refuses():
    refused("coefficients must be at most iterations 2 numbers, got 3", ja.FiniteToeplitz, (1.0, 0.5, 0.2), 2)
    refused("iterations must be", ja.FiniteToeplitz, (1.0,), 0)
    for n in (4, 6):  # the release would be another one
        with pytest.raises(ValueError, match=f"strategy must have the scheme's 5 iterations, got {n}"):
            ja.Mechanism(ja.BMinSep(5, 2, 0.1), square_root(2, n), 1.0)


@pytest.mark.parametrize("sigma", [0.05, 1.0, 100.0])
@pytest.mark.parametrize(
    ("scheme", "bands", "orders"),
    [
        (ja.BallsInBins(256, 64), 64, [2]),
        slow(ja.BMinSep(16, 4, 0.1), 4, [1, 2]),
        slow(ja.IndependentAttribution(60, 8, 0.03, 2), 8, [1, 2]),
        slow(ja.TruncatedBMinSep(60, 8, 0.03, 12, 100), 8, [1]),
    ],
)
def test_errors_stay_well_below_the_margin(scheme, bands, orders, sigma):
    mechanism = mechanism_of(scheme, bands, sigma)
    for replicas in orders:
        error = measured_error(jax.random.key(99), mechanism, replicas)
        assert 0 < error < loss_margin(mechanism, replicas) / 2
    whole = ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma)
    assert loss_margin(mechanism, 2) < 1.5 * loss_margin(whole, 2)
