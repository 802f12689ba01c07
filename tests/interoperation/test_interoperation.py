"""What other libraries are given dominates; what is read from them has the distribution that it says."""

import dataclasses
import functools
import math
import types

import dp_accounting
import jax
import numpy as np
import pytest
import scipy
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

import jaxacct
from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Poisson, TruncatedBMinSep
from jaxacct.accountants.composition import composed_delta, curve_of_pld
from jaxacct.estimates.profile import Profile
from jaxacct.interoperation import (
    batch_selection,
    dominating_event,
    dominating_pld,
    pld_of_profile,
    scheme_of,
    strategy_of,
)
from jaxacct.interoperation.pessimistic_pld import INTERVAL
from jaxacct.strategies.banded_inverse import BandedInverse
from tests.oracles.chi_square import chi_square_p_value
from tests.oracles.composed_losses import sampled
from tests.oracles.enumeration import pattern_distribution
from tests.refusals import refused

ZERO_OUT = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


@functools.cache
def sampled_delta(epsilon: float, sigma: float, p: float, remove: bool) -> float:
    return float(sampled(epsilon, p, sigma, remove))


def sampled_deltas(epsilons, sigma, p) -> list[np.ndarray]:
    """[remove, add] of one Poisson-sampled Gaussian."""
    sides = (True, False)
    return [np.array([sampled_delta(float(e), sigma, p, side) for e in np.ravel(epsilons)]) for side in sides]


def profile_of(epsilons, remove, add, confidence=1 - 1e-9) -> Profile:
    """A profile whose upper bands are these."""
    rows = {name: np.stack([upper, upper, upper]) for name, upper in (("remove", remove), ("add", add))}
    both = np.maximum(remove, add)
    return Profile(epsilons, both, both, both, rows, confidence, 1, {"remove": "", "add": ""})


GRID = np.arange(0, 6001, 25) * INTERVAL


@functools.cache
def exported():
    return pld_of_profile(profile_of(GRID, *sampled_deltas(GRID, 0.8, 0.2)))


@functools.cache
def gaussian(sigma=2.0, **options):
    """Of dp-accounting; by default from above."""
    grid = dict(neighboring_relation=ZERO_OUT, value_discretization_interval=INTERVAL)
    return privacy_loss_distribution.from_gaussian_mechanism(sigma, **grid | options)


# From below, so that nothing but an error of ours is below it.
BELOW = dict(pessimistic_estimate=False, use_connect_dots=False)


def test_it_dominates_and_is_tight_at_every_epsilon():
    """At points of the grid, between them, and in compositions with itself and a Gaussian."""
    found = exported()
    for epsilon in [0.0, 0.0101, 0.5, 1.2345, 3.0, 5.99]:
        exact = np.max(sampled_deltas(epsilon, 0.8, 0.2))
        assert exact <= found.delta(epsilon) <= exact * 1.02 + 2e-9
    twice = found.compose(found).compose(gaussian())
    truth = gaussian(0.8, sampling_prob=0.2, **BELOW).self_compose(2).compose(gaussian(**BELOW))
    assert twice.failure_probability == pytest.approx(2e-9, rel=1e-6)
    for epsilon in (0.3, 1.5, 4.0):
        exact = truth.get_delta_for_epsilon(epsilon)
        assert exact <= twice.delta(epsilon) <= exact * 1.05 + 1e-8
    assert twice.epsilon(1e-3) == pytest.approx(truth.get_epsilon_for_delta(1e-3), 0.02)
    assert twice.epsilon(1e-10) == math.inf  # less than what may have gone wrong
    certain, likely = (dataclasses.replace(found, failure_probability=failure) for failure in (0.0, 0.01))
    assert likely.epsilon(0.03) == certain.epsilon(0.03 - 0.01)  # the same float64, so the same search
    assert likely.epsilon(0.009) == math.inf > certain.epsilon(0.009)


def test_directions_are_not_exchanged():
    """The attack: composed, each direction's losses add up on their own. Add alone would be far too small."""
    remove, add = sampled_deltas(GRID, 0.8, 0.2)
    assert add[-1] == 0 < remove[-1]
    found = pld_of_profile(profile_of(GRID, remove, add)).pld
    assert found._pmf_add._infinity_mass == 0 < found._pmf_remove._infinity_mass
    # At negative epsilons, which composition reaches, each is known from the other.
    for pmf, mirrored in ((found._pmf_add, remove), (found._pmf_remove, add)):
        exact = 1 - math.exp(-GRID[40]) * (1 - mirrored[40])
        assert pmf.get_delta_for_epsilon(-GRID[40]) == pytest.approx(exact, rel=1e-6)
    swapped = pld_of_profile(profile_of(GRID, add, remove)).pld
    assert swapped._pmf_remove._infinity_mass == 0 < swapped._pmf_add._infinity_mass


def test_bounds_that_wobble_still_dominate():
    """Bounds of draws are neither convex nor falling, some are 1; nothing may fall below the divergence."""
    rng = np.random.default_rng(0)
    remove, add = sampled_deltas(GRID, 0.8, 0.2)
    wobble = [np.minimum(1, part * np.exp(rng.exponential(0.3, part.size)) + 1e-7) for part in (remove, add)]
    wobble[0][3:7] = [1, np.nan, np.inf, 1]
    found = pld_of_profile(profile_of(GRID, *wobble))
    for epsilon in np.linspace(0, 6, 50):
        assert np.max(sampled_deltas(epsilon, 0.8, 0.2)) <= found.delta(epsilon)
    masses = found.pld._pmf_remove.to_dense_pmf()._probs
    assert masses.min() >= -1e-15 and masses.sum() + found.pld._pmf_remove._infinity_mass == pytest.approx(1)


def test_profiles_that_cannot_be_used():
    """With a confidence above 1 the failure probability would be negative, and delta too small."""
    for epsilons, line in (
        ([0.1, 0.2], "first of them 0"),
        ([0.0], "at least two"),
        ([0.0, 0.0105], "multiples of 0.001"),
        ([0.0, 501.0], "up to 500"),
    ):
        grid = np.array(epsilons)
        refused(line, pld_of_profile, profile_of(grid, grid + 0.5, grid + 0.5))
    ones, (remove, add) = np.ones(GRID.size), sampled_deltas(GRID, 0.8, 0.2)
    for bad in (0.0, 1.0, 2.0, math.nan):
        good = profile_of(GRID, remove, add)
        refused("confidence must be in", pld_of_profile, dataclasses.replace(good, confidence=bad))
    for pair in ((ones, ones), (remove, ones), (ones, remove)):
        refused("below 1 in both directions", pld_of_profile, profile_of(GRID, *pair))


def test_bad_arguments_are_one_line():
    mechanism = Mechanism(Poisson(6, 0.1), BandedToeplitz.square_root(1), 1.0)
    for bad in (0, 1e-5, math.nan, 1e9):
        refused("max_epsilon must", dominating_pld, mechanism, max_epsilon=bad)
    for name, bad in (("points", 1), ("failure_probability", 0), ("interval", -1)):
        refused(f"{name} must", dominating_pld, mechanism, max_epsilon=1, **{name: bad})


def test_from_draws(key):
    """Draws of six Poisson steps: above the truth by dp-accounting, and near it where draws can tell."""
    mechanism = Mechanism(Poisson(6, 0.2), BandedToeplitz.square_root(1), 1.0)
    options = dict(max_epsilon=4.0, points=21, num_samples=20_000, key=key)
    found = dominating_pld(mechanism, failure_probability=1e-6, **options)
    assert found.failure_probability == pytest.approx(1e-6, rel=1e-9)
    truth = gaussian(1.0, sampling_prob=0.2, **BELOW).self_compose(6)
    for epsilon in (0.2, 1.0, 2.0):
        exact = truth.get_delta_for_epsilon(epsilon)
        assert exact <= found.delta(epsilon) <= 1.6 * exact + 2e-3


def test_events():
    one, five = BandedToeplitz.square_root(1), BandedToeplitz.square_root(3)
    exact = dominating_event(Mechanism(Poisson(6, 0.2), one, 1.5))
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5))
    assert exact.exact and exact.event == dp_accounting.SelfComposedDpEvent(event, 6)
    assert dominating_event(Mechanism(BMinSep(6, 1, 0.2), one, 1.5)).event == exact.event
    cyclic = dominating_event(Mechanism(CyclicPoisson(7, 3, 0.2), five, 1.5))
    assert not cyclic.exact and cyclic.event == dp_accounting.SelfComposedDpEvent(event, 3)
    pattern = dominating_event(Mechanism(BMinSep(7, 3, 0.2), five, 1.5))
    assert not pattern.exact
    assert pattern.event.noise_multiplier == pytest.approx(1.5 / math.sqrt(3))
    # Rounds are independent, but a column of the matrix reaches into the rounds that follow.
    together = dominating_event(Mechanism(Poisson(6, 0.2), BandedInverse((1.0, -0.5), 6), 1.5))
    assert not together.exact and together.event.noise_multiplier < 1.5 / math.sqrt(6)
    refused("mechanism", dominating_event, "mine")


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(5, 0.3),
        BMinSep(5, 2, 0.3),
        BMinSep(5, 2, 0.3, False),
        CyclicPoisson(5, 2, 0.4),
        BallsInBins(5, 3),
        TruncatedBMinSep(5, 2, 0.3, max_batch_size=500, dataset_size=600),
    ],
)
def test_jax_privacys_sampler_has_the_distribution_of_the_scheme(scheme):
    """Chi-square of 30,000 examples' patterns, false alarm 1e-6; the distribution of p + 0.03 is refused."""
    selection = batch_selection(scheme)
    assert scheme_of(selection, 600) == scheme
    examples = 30_000
    if scheme.name == "truncated-b-min-sep":
        selection = batch_selection(scheme.untruncated)
    took_part = np.zeros((examples, scheme.iterations), np.int8)
    for step, batch in enumerate(selection.batch_iterator(examples, rng=7)):
        took_part[batch, step] = 1
    untruncated = getattr(scheme, "untruncated", scheme)
    assert chi_square_p_value(took_part, pattern_distribution(untruncated)) > 1e-6
    if getattr(untruncated, "sampling_probability", 1) < 1:
        other = dataclasses.replace(untruncated, sampling_probability=untruncated.sampling_probability + 0.03)
        assert chi_square_p_value(took_part, pattern_distribution(other)) < 1e-6


def test_poisson_without_barring_has_no_warm_start():
    """jax-privacy fails to make the warm start of a separation of 1; it is the cold one's distribution."""
    assert [batch.size for batch in batch_selection(BMinSep(4, 1, 0.5)).batch_iterator(0, rng=0)] == [0] * 4


def test_parts_of_equal_size_are_refused_as_the_others_give_an_example_away():
    """The counterexample: two examples, two parts. The other's batch determines the first one's."""
    from jax_privacy.batch_selection import CyclicPoissonSampling, PartitionType

    selection = CyclicPoissonSampling(1.0, 2, cycle_length=2, partition_type=PartitionType.EQUAL_SPLIT)
    for seed in range(20):
        first, second = selection.batch_iterator(2, rng=seed)
        assert len(first) == len(second) == 1 and first != second
    refused("INDEPENDENT", scheme_of, selection)
    assert scheme_of(CyclicPoissonSampling(0.1, 9)) == Poisson(9, 0.1)  # one part is the same either way


def test_distributions_that_are_not_here_are_refused():
    from jax_privacy import batch_selection as theirs

    for selection, line in (
        (theirs.FixedBatchSampling(3, 4), "FixedBatchSampling"),
        (theirs.CyclicPoissonSampling(0.1, 4, 3, cycle_length=2), "must not truncate"),
        (theirs.CyclicPoissonSampling(0.1, 4, 30), "dataset_size must be given"),
        (theirs.BMinSepSampling(0.1, 4, 2, truncated_batch_size=30), "dataset_size must be given"),
        (theirs.BMinSepSampling(0.0, 4, 2), "sampling_probability"),
        ("poisson", "got str"),
    ):
        refused(line, scheme_of, selection)
    for scheme in (jaxacct.MultiAttribution(6, 2, 0.1, 2), "b-min-sep"):
        refused("scheme must be one of", batch_selection, scheme)


def test_truncated_poisson_batches_are_those_of_a_separation_of_1():
    from jax_privacy.batch_selection import CyclicPoissonSampling

    selection = CyclicPoissonSampling(0.25, 3000, truncated_batch_size=4)
    scheme = scheme_of(selection, 12)
    assert scheme == TruncatedBMinSep(3000, 1, 0.25, max_batch_size=4, dataset_size=12)
    others = batch_selection(scheme)
    sizes = [
        np.bincount([batch.size for batch in one.batch_iterator(12, rng=5)], minlength=5)
        for one in (selection, others)
    ]
    assert scipy.stats.chi2_contingency(sizes).pvalue > 1e-6


def test_coefficients():
    ours = BandedToeplitz.square_root(3)
    assert strategy_of(np.array(ours.coefficients)).coefficients == pytest.approx(ours.coefficients)
    larger = np.array(ours.coefficients) * 1.0000000247  # whose noise would be less than is certified
    for bad in ([1.0, 0.5], [[1.0]], [math.nan], [], larger):
        refused("norm 1", strategy_of, bad)


def test_a_config_adds_noise_by_its_norm():
    """C x + s z of norm v is (C / v) x + (s / v) z, and a config has s = sigma v."""
    config = types.SimpleNamespace(strategy=np.float32([1.0, 0.5, 0.2]), column_normalize=False)
    assert strategy_of(config).given_norm == pytest.approx(math.sqrt(1.29), rel=1e-6)
    config.column_normalize = True
    refused("without column_normalize", strategy_of, config)


def test_random_allocation_is_k_of_n_steps(monkeypatch):
    """With a stand-in for the sampler, which no release that installs here has."""
    from jax_privacy import batch_selection as theirs

    @dataclasses.dataclass(frozen=True)
    class RandomAllocationSampling:
        total_participations: int
        iterations: int
        cycle_length: int = 1

    monkeypatch.setattr(theirs, "RandomAllocationSampling", RandomAllocationSampling, raising=False)
    for k, separation in ((3, 1), (1, 8)):
        scheme = jaxacct.BalancedMinSep(8, separation, k)
        assert scheme_of(RandomAllocationSampling(k, 8)) == scheme
        assert batch_selection(scheme) == RandomAllocationSampling(k, 8)
    refused("cycle_length", lambda: scheme_of(RandomAllocationSampling(2, 8, 2)))
    for other in (jaxacct.BalancedMinSep(8, 2, 3), jaxacct.BalancedMinSep(8, 1, 2.5)):
        refused("whole participations", batch_selection, other)


def test_only_what_is_of_one_adjacency_composes():
    """The attack: a Gaussian event of zero-out is half as far apart as one of replace-one."""
    remove, add = sampled_deltas(GRID, 0.8, 0.2)
    both = np.maximum(remove, add)
    found = pld_of_profile(profile_of(GRID, both, both), adjacency="replace-one")
    for other in (gaussian(), exported()):
        refused("adjacency must be replace-one to be composed, got zero-out", found.compose, other)
    refused("adjacency must be zero-out to be composed, got replace-one", lambda: exported().compose(found))
    assert found.compose(gaussian(), "replace-one").compose(found).adjacency == "replace-one"
    refused("adjacency must be", found.compose, gaussian(), "replace-two")
    mechanism = Mechanism(Poisson(2, 0.3), BandedToeplitz.identity(), 2.0, "replace-one")
    assert dominating_pld(mechanism, max_epsilon=1.0, points=2, num_samples=2048).adjacency == "replace-one"


@pytest.mark.parametrize("interval", [INTERVAL, 1e-4])
def test_a_distribution_of_dp_accounting_composes(interval):
    """The bound is that of the same events; a discretization other than ours or its default is refused."""
    own, event = exported(), dp_accounting.GaussianDpEvent(2.0)
    found = own.compose(gaussian(value_discretization_interval=interval))
    assert found.interval == INTERVAL
    for epsilon in (0.5, 1.5):
        exact = composed_delta(own.steps, epsilon, event) + own.failure_probability
        assert exact * (1 - 1e-6) <= found.delta(epsilon) <= 1.001 * exact
        assert found.pld.get_delta_for_epsilon(epsilon) >= exact * (1 - 1e-3) - own.failure_probability
    odd = gaussian(value_discretization_interval=5e-4)
    refused(r"value_discretization_interval must be 0\.001 or 0\.0001 to be composed", own.compose, odd)


@pytest.mark.parametrize("grid", [1e-4, 1e-3, 7e-4, 3e-5])
def test_a_curve_on_another_grid_is_above_the_divergence(grid):
    curve = curve_of_pld(gaussian(1.5, value_discretization_interval=1e-4), 1e-4, grid)
    np.testing.assert_allclose(curve.losses / grid, np.round(curve.losses / grid), atol=1e-6)
    losses = np.linspace(-2.0, 4.0, 301)
    exact = norm.cdf(0.5 / 1.5 - 1.5 * losses) - np.exp(losses) * norm.cdf(-0.5 / 1.5 - 1.5 * losses)
    assert np.all(curve.at(losses).deltas >= exact)
    np.testing.assert_allclose(curve.at(losses).deltas, exact, rtol=2e-3, atol=1e-9)


def test_the_default_config_of_jax_privacy_is_taken():
    """Its float32 coefficients have not quite norm 1, and its noise is multiplied by theirs."""
    from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

    run = dict(strategy_optimization_steps=3, epsilon=1.0, delta=1e-5)
    with jax.numpy_dtype_promotion("standard"):
        config = BandMFExecutionPlanConfig.default(2, 8, **run)
    given = np.asarray(config.strategy, np.float64)
    found = strategy_of(config)
    assert found.given_norm == pytest.approx(np.linalg.norm(given), rel=1e-15)
    assert found.coefficients == pytest.approx(tuple(given / np.linalg.norm(given)), rel=1e-12)
