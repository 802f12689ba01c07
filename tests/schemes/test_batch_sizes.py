"""Batches too large for a run: their probability against the exact one, and the reserves of plans."""

import dataclasses
import math

import pytest
import scipy

import jaxacct as ja
from jaxacct.core import text
from jaxacct.schemes.protocol.batch_sizes import OVERFLOW, batch_sizes, max_batch_size, overflow
from tests.stored_plans import as_json, claim_with

TARGET = dict(epsilon=1.0, delta=1e-3, dataset_size=500, options=ja.CalibrationOptions(accountant="analytic"))


def test_what_is_put_aside_covers_the_exact_probability():
    """A thousandth of delta at most, however small it is; seen from both data sets where coins are seen."""
    for scheme in [ja.Poisson(50, 0.02), ja.MultiAttribution(50, 3, 0.02, 2)]:
        for epsilon in [0.5, 8.0, 700.0]:
            for delta in [1e-3, 1e-9, 1e-30]:
                booked = overflow(scheme, epsilon, delta, 10_000)
                assert booked is not None and booked.delta <= 1e-3 * delta and booked.probability <= OVERFLOW
                most = batch_sizes(scheme, 10_000, None, booked.probability)[1]
                exact = 0.0 if most == 10_000 else 50 * scipy.stats.binom.sf(most, 10_000, 0.02)
                times = 1.0 if scheme.others_are_independent else 1 + math.exp(epsilon)
                assert exact * times <= booked.delta * (1 + 1e-9)
                # One less would not do, as the size leaves room for the example itself.
                if most < 10_000:
                    assert 50 * scipy.stats.binom.sf(most - 2, 10_000, 0.02) > booked.probability


def test_nothing_where_sizes_are_cut_or_not_stated():
    assert overflow(ja.Poisson(50, 0.02), 1.0, 1e-3, None) is None
    assert overflow(ja.Poisson(50, 0.02), 1.0, 1e-3, 500, cut_to=30) is None
    assert overflow(ja.TruncatedBMinSep(6, 2, 0.2, dataset_size=40, max_batch_size=9), 1.0, 1e-3, 40) is None
    assert max_batch_size(500, 0.02, 50, 0.0) == 500


def test_plans_reserve_delta_for_it():
    """In the plan's budget and bound; the reserve is computed from the claim, so no file can leave it out."""
    plan = ja.calibrate(ja.BMinSep(8, 2, 0.05), ja.BandedToeplitz.square_root(2), **TARGET)
    assert plan.overflow_delta == pytest.approx(1e-9)
    assert plan.verdict.bound <= plan.target.budget.delta <= 1e-3 - plan.overflow_delta
    assert dict(text.budget_items(plan.verdict))["runs stopped by a batch too large"] == plan.overflow_delta
    whole = claim_with(plan.claim, budget=ja.Budget.split(1e-3))
    assert "the budget spends" in dataclasses.replace(plan, claim=whole).flaws[0]


def test_no_reserve_without_sizes():
    plan = ja.calibrate(
        ja.BMinSep(8, 2, 0.05), ja.BandedToeplitz.square_root(2), **TARGET | {"dataset_size": None}
    )
    assert plan.overflow_delta is None and plan.max_batch_size is None
    assert ja.Plan.from_json(as_json(plan)).certified


def test_a_bound_that_leaves_no_room_for_it_is_no_plan():
    """The analytic bound may not reach into the reserve for stopped runs."""
    plan = ja.calibrate(ja.BMinSep(8, 2, 0.05), ja.BandedToeplitz.square_root(2), **TARGET)
    delta = plan.verdict.bound * (1 + 1e-10)
    tight = claim_with(plan.claim, delta=delta, budget=ja.Budget.split(delta))
    assert not dataclasses.replace(plan, claim=tight).certified
