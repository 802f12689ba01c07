"""Fixed-order batches: numbers, batches, certificates without samples, and what refuses to sample them."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import analytic, unamplified
from jaxacct.core import evidence as data
from jaxacct.core.check import check
from jaxacct.proposals.base import ProposalSpec
from jaxacct.schemes.protocol.numbers import Numbers
from tests.oracles.composed_losses import gaussian
from tests.refusals import refused
from tests.stored_plans import as_json

EPOCHS = ja.FixedOrder.from_batch_size(dataset_size=100, batch_size=20, iterations=15)
TARGET = dict(epsilon=2.0, delta=1e-5)


def test_bad_fields():
    for changes, said in [
        (dict(iterations=0), "iterations"),
        (dict(min_separation=0), "min_separation"),
        (dict(participations=1.5), "participations"),
        (dict(batch_size=0), "batch_size"),
        (dict(steps_per_epoch=True), "steps_per_epoch"),
    ]:
        refused(said, dataclasses.replace, EPOCHS, **changes)


def test_bad_numbers():
    good = dict(dataset_size=100, batch_size=20, iterations=15)
    for changes, said in (
        (dict(batch_size=20.5), "whole number"),
        (dict(batch_size=101), "at most dataset_size 100"),
        (dict(min_separation=6), "at most 5, the batches of an epoch"),
    ):
        refused(said, ja.FixedOrder.from_batch_size, **good | changes)
    for name, value, said in (
        ("sampling_probability", 0.1, "sampling_probability"),
        ("warm_start", False, "cold_start"),
    ):
        numbers = Numbers(iterations=15, separation=1, **{name: value})
        refused(f"{said} does not apply", ja.FixedOrder.from_numbers, numbers)
    refused("bands must be at most", ja.Mechanism, EPOCHS, ja.BandedToeplitz.square_root(2), 1.0)


def test_batch_sizes_are_whole_and_fit():
    assert ja.FixedOrder(30, 1, 3).size_of_batches(100) == 10
    refused("is not a whole number", lambda: ja.FixedOrder(30, 1, 3).size_of_batches(101))
    for scheme in (ja.FixedOrder(15, 1, 3, 21), ja.FixedOrder(15, 6, 9, 20), ja.FixedOrder(15, 1, 9, 21, 5)):
        refused("more often than the scheme allows", scheme.size_of_batches, 100)
        with pytest.raises(ValueError, match="more often than the scheme allows"):
            ja.calibrate(scheme, ja.BandedToeplitz.identity(), **TARGET, dataset_size=100)
    plan = ja.calibrate(EPOCHS, ja.BandedToeplitz.identity(), **TARGET, dataset_size=100)
    assert (plan.expected_batch_size, plan.max_batch_size, plan.overflow_delta) == (20.0, 20, None)


@pytest.mark.parametrize("separation", [1, 5])
def test_own_batches_keep_the_limits(separation):
    scheme = ja.FixedOrder(17, separation, 4, 20, 5)
    generator = np.random.default_rng(0)
    batches = scheme.batches(107, generator)
    steps = [batches.draw(step, generator) for step in range(17)]
    assert all(len(np.unique(each)) == 20 for each in steps)
    for example in range(107):
        places = np.array([i for i, each in enumerate(steps) if example in each])
        assert len(places) <= 4 and len(set(places // 5)) == len(places)
        assert (np.diff(places) >= separation).all()
    assert (np.array_equal(steps[0], steps[5])) == (separation == 5)
    for other in (ja.FixedOrder(10, 1, 3, 30), ja.FixedOrder(17, 1, 4, 20, 4)):
        refused("batches must be given", other.batches, 107, generator)


def test_calibration_is_a_gaussian_mechanism():
    """No samples; delta by another implementation is above 1e-5 one per cent of noise below the plan's."""
    for scheme, strategy in [
        (EPOCHS, ja.BandedToeplitz.identity()),
        (ja.FixedOrder(15, 5, 3, 20), ja.BandedToeplitz.square_root(4)),
        (EPOCHS, ja.BufferedToeplitz((0.9, 0.3), (0.2, 0.4), 15)),
        (EPOCHS, ja.Dense(np.tril(np.ones((15, 15))))),
        (ja.FixedOrder(15, 1, 2), ja.Toeplitz((1.0, 2.0, 1.0))),
    ]:
        plan = ja.calibrate(scheme, strategy, **TARGET)
        assert plan.certified and not plan.is_sampled and plan.evidence == data.Bound("unamplified")
        length = unamplified.sensitivity(plan.mechanism)
        found = gaussian(2.0, length / plan.noise_multiplier)
        assert plan.verdict.bound == pytest.approx(float(found), rel=1e-8) and found <= 1e-5
        assert gaussian(2.0, length / plan.noise_multiplier * 1.0101) > 1e-5
        assert ja.Plan.from_json(as_json(plan)).claim == plan.claim
        assert f"at most {scheme.max_participations} of them" in plan.statement()
        stated = ja.estimate_delta(plan.mechanism, 2.0)
        assert stated.num_samples == 0 and stated.low <= stated.high == plan.verdict.bound
        assert ja.estimate_epsilon(plan.mechanism, 1e-5).high <= 2.0 + 1e-6


def test_adjacencies():
    plan = ja.calibrate(EPOCHS, ja.BandedToeplitz.identity(), **TARGET, adjacency="add-or-remove-one")
    assert "the place of an absent example stays empty" in plan.statement()
    zero_out = ja.calibrate(EPOCHS, ja.BandedToeplitz.identity(), **TARGET)
    assert plan.noise_multiplier == zero_out.noise_multiplier
    assert "stays empty" not in zero_out.statement()
    replaced = ja.calibrate(EPOCHS, ja.BandedToeplitz.identity(), **TARGET, adjacency="replace-one")
    length = 2 * math.sqrt(3)
    assert unamplified.sensitivity(replaced.mechanism) == pytest.approx(length)
    assert gaussian(2.0, length / replaced.noise_multiplier) <= 1e-5
    assert gaussian(2.0, length / replaced.noise_multiplier * 1.0101) > 1e-5


def test_what_samples_is_refused():
    """Attack: sampled evidence for a pattern that is not random, though an adversary may choose it."""
    mechanism = ja.Mechanism(EPOCHS, ja.BandedToeplitz.identity(), 0.3)
    for call in (
        lambda: ja.privacy_loss(mechanism, np.zeros(15)),
        lambda: EPOCHS.draw_participation(None, 1),
        lambda: EPOCHS.participation_probabilities(),
        lambda: EPOCHS.log_probability_of_none(),
        lambda: EPOCHS.sums,
    ):
        refused("no random participations to sample", call)
    claim = ja.Claim(mechanism, ja.ClaimedTarget.at(2.0, 1e-5), None, None)
    counts = data.Mean(ProposalSpec("plain", ()), 1.0, (1, 2), ((0, 2**20),), ((0, 2**20),), (0.5,), (1.0,))
    forged = data.Sampled(claim.digest, "anytime", 1.0, counts, data.WeightBound(ProposalSpec("plain", ())))
    verdict = check(claim, forged)
    assert not verdict.certified and "samples do not apply" in verdict.flaws[0]
    given = EPOCHS, ja.BandedToeplitz.identity()
    for name, value in (("max_samples", 10**6), ("rule", "fixed")):
        options = ja.CalibrationOptions(**{name: value})
        refused(f"{name} must not be given", ja.calibrate, *given, **TARGET, options=options)
    refused("max_batch_size", ja.calibrate, *given, **TARGET, dataset_size=100, max_batch_size=30)


def test_the_bound_is_exact():
    mechanism = ja.Mechanism(ja.FixedOrder(8, 4, 2), ja.BandedToeplitz.square_root(4), 3.0)
    for epsilon in (0.0, 1e-3, 1.0, 5.0):
        exact = gaussian(epsilon, math.sqrt(2) / 3.0)
        assert exact <= analytic.close(mechanism).delta(mechanism, epsilon) <= exact * (1 + 1e-6)
    assert analytic.close(mechanism, compose_with=dp_accounting.GaussianDpEvent(5.0)) is None
    assert analytic.close(ja.Mechanism(ja.BMinSep(8, 4, 0.2), ja.BandedToeplitz.square_root(4), 3.0)) is None
