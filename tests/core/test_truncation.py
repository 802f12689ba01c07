"""Batches truncated to a maximum: the trainer, and the reserve against arXiv 2602.09338's appendix D."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct.calibration.grid import Problem
from jaxacct.core import truncation
from jaxacct.core.truncation import MAX_SECOND_MOMENT, covers, reserve
from jaxacct.schemes.protocol.batch_sizes import max_batch_size
from tests.oracles import tuples
from tests.oracles.settings import PRODUCTION
from tests.refusals import refused
from tests.stored_plans import forged, loaded
from train.batches.sampler import Sampler


def pair_given(others, most: int, p: float, steps: int):
    """[(weight, x, y)] of appendix D's pair given the others' batch sizes, for Poisson sampling."""
    found = []
    for sampled in itertools.product((0, 1), repeat=steps):
        outcomes = [(1.0, (), ())]
        for taken, r in zip(sampled, others, strict=True):
            if not taken:
                parts = [(1 - p, 0, 0)]
            elif r < most:
                parts = [(p, 1, 0)]
            else:
                parts = [(p * most / (r + 1), 2, -1), (p * (1 - most / (r + 1)), 0, 0)]
            outcomes = [(w * v, x + (a,), y + (b,)) for w, x, y in outcomes for v, a, b in parts]
        found += outcomes
    return found


def truncated_deltas(size, most, p, sigma, steps, epsilons, direction) -> np.ndarray:
    """H of appendix D's pair together with the others' batch sizes, on a grid of outputs."""
    total, distribution = np.zeros(len(epsilons)), stats.binom(size - 1, p)
    for others in itertools.product(range(size), repeat=steps):
        weights, x, y = map(np.array, zip(*pair_given(others, most, p, steps), strict=True))
        pair, points = ((x, weights), (y, weights)), 4001 if steps == 1 else 401
        divergences = tuples.divergence(*pair, sigma, epsilons, direction, points=points)
        total += np.prod(distribution.pmf(others)) * divergences
    return total


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("size", "most", "p", "sigma", "steps"),
    [
        (8, 2, 0.1, 0.7, 1),
        (8, 3, 0.2, 1.0, 1),
        (20, 6, 0.1, 0.4, 1),
        (30, 6, 0.1, 0.3, 1),
        (6, 2, 0.15, 0.6, 2),
    ],
)
def test_reserve_covers_the_pair_of_appendix_d(size, most, p, sigma, steps, direction):
    """Truncated delta <= delta without + reserve, and the reserve is not vacuous where truncation is rare."""
    scheme, epsilons = ja.Poisson(steps, p), (0.1, 0.5, 1.0, 2.0, 4.0)
    with_truncation, without_truncation = (
        truncated_deltas(size, largest, p, sigma, steps, epsilons, direction) for largest in (most, size)
    )
    for epsilon, exact, without in zip(epsilons, with_truncation, without_truncation, strict=True):
        reserved = reserve(scheme, epsilon, size, most)
        assert exact <= without + reserved + 1e-9
        assert reserved <= steps * stats.binom.sf(most - 1, size - 1, p) * (1 + 1e-6)


@pytest.mark.parametrize(
    "scheme",
    [ja.Poisson(50, 0.1), ja.CyclicPoisson(50, 5, 0.5), ja.BallsInBins(50, 10), ja.BMinSep(50, 5, 0.2)],
)
def test_the_reserve_vanishes_where_nothing_can_be_truncated(scheme):
    assert reserve(scheme, 1.0, 100, 100) == 0
    assert reserve(scheme, 1.0, 1000, 400) < 1e-30


def test_a_plan_with_truncation(tmp_path):
    scheme = ja.BMinSep.from_batch_size(dataset_size=3000, batch_size=50, iterations=60, min_separation=6)
    target = dict(epsilon=2.0, delta=2e-2, dataset_size=3000, key=jax.random.key(3))
    strategy = ja.BandedToeplitz.square_root(6)  # as in `test_cli`
    plan = ja.calibrate(scheme, strategy, max_batch_size=74, **target)
    reserved = reserve(scheme, 2.0, 3000, 74)
    assert plan.truncation_delta == reserved > 1e-3
    assert plan.target.budget.total + reserved <= 2e-2
    assert plan.max_batch_size == 74 < max_batch_size(3000, 50 / 3000, 60)
    assert plan.mechanism.noise_multiplier <= 0.6 * 1.01**4  # about what is needed without truncation
    assert "truncated to random subsets" in plan.statement()
    plan.save(tmp_path / "plan.json")
    assert ja.Plan.load(tmp_path / "plan.json") == plan
    assert Sampler.from_plan(plan).truncate
    refused("the budget spends", lambda: loaded(forged(plan, truncate_to=73)))


def test_candidates_whose_noise_is_not_covered_have_no_claim(monkeypatch):
    scheme = ja.BMinSep.from_batch_size(dataset_size=3000, batch_size=50, iterations=60, min_separation=6)
    sizes = dict(dataset_size=3000, truncate_to=74)
    problem = Problem(scheme, ja.BandedToeplitz.square_root(6), "zero-out", **sizes, epsilon=2.0, delta=2e-2)
    monkeypatch.setattr(truncation, "covers", lambda mechanism, _: mechanism.noise_multiplier > 1)
    assert problem.claim(1.1)[0] is not None
    assert problem.claim(0.9) == (None, "max_batch_size cannot be accounted for at noise multiplier 0.9")


def test_covered_up_to_the_second_moment_that_was_allowed_for(monkeypatch):
    mechanism = ja.Mechanism(ja.BMinSep(1024, 8, 0.02), ja.BandedToeplitz.square_root(8), 4.0)
    assert covers(mechanism, 30.0) and MAX_SECOND_MOMENT > 1
    assert not covers(dataclasses.replace(mechanism, noise_multiplier=0.3), 30.0)
    for factor, is_covered in ((0.999, True), (1.001, False)):
        log_moment = math.log(factor * MAX_SECOND_MOMENT)
        monkeypatch.setattr(truncation, "log_normalizer", lambda *_, log_moment=log_moment: log_moment)
        assert covers(mechanism, 30.0) is is_covered


def test_the_add_direction_of_a_small_epsilon_pays_for_every_batch_that_may_be_truncated():
    """proofs/truncation.md, add: sampled batches alone suffice from e^epsilon P(x = 0) >= 1 on, not below."""
    scheme, due = ja.Poisson(1, 0.1), stats.binom.sf(1, 7, 0.1)
    edge = -scheme.log_probability_of_none()
    assert reserve(scheme, 0.99 * edge, 8, 2) >= due
    assert reserve(scheme, 1.01 * edge, 8, 2) < due / 4


def test_bad_input():
    scheme = ja.Poisson(20, 0.1)
    options = dict(epsilon=1.0, delta=1e-3)
    strategy = ja.BandedToeplitz((1.0,))
    with pytest.raises(ValueError, match="above the expected batch size 10, got 10"):
        ja.calibrate(scheme, strategy, dataset_size=100, max_batch_size=10, **options)
    refused("dataset_size must be given", ja.calibrate, scheme, strategy, max_batch_size=10, **options)
    with pytest.raises(ValueError, match="max_batch_size must be larger"):
        ja.calibrate(scheme, strategy, dataset_size=100, max_batch_size=15, **options)
    refused("max_batch_size", ja.calibrate, scheme, strategy, dataset_size=100, max_batch_size=0, **options)


def test_without_a_normalizer_tails_are_not_covered():
    """Replicas of order 2 bound the tail that `reserve` depends on; columns that overlap have none."""
    mechanism = ja.Mechanism(ja.Poisson(2, 0.3), ja.Dense(np.array([[1.0, 0.0], [0.5, 1.0]])), 0.9)
    assert mechanism.scheme.replicas(mechanism) is None and truncation.tail_bound(mechanism.scheme, 8.0) < 1
    assert not covers(mechanism, 8.0)
    assert covers(ja.Mechanism(ja.Poisson(2, 0.3), ja.BandedToeplitz.identity(), 0.9), 8.0)


def test_the_production_reserve():
    """Against exact arithmetic by hand: expected participations times a binomial tail, a tenth of delta."""
    tail = stats.binom.sf(2047, 14_745_599, PRODUCTION.participation_rate)
    sampled = 7200 * PRODUCTION.participation_rate * tail
    reserved = reserve(PRODUCTION, 10.0, 14_745_600, 2048)
    assert sampled < reserved < 1.05 * sampled
    assert 0.05 < reserved / 1.301e-8 < 0.2


def test_a_cut_run_resumes_with_the_same_batches():
    scheme = ja.Poisson(20, 0.5)
    whole = Sampler(scheme, 100, 45, (1, 2, 3, 4), truncate=True)
    batches = [whole.next() for _ in range(20)]
    part = Sampler(scheme, 100, 45, (1, 2, 3, 4), truncate=True)
    for _ in range(7):
        part.next()
    resumed = Sampler(scheme, 100, 45, state=part.state, truncate=True)
    for batch in batches[7:]:
        np.testing.assert_array_equal(resumed.next(), batch)
