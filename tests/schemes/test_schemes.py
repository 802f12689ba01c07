"""Schemes: distributions of draws against enumeration, construction, bad input, JSON; batches too large.

That draws and batches follow the same distribution is in tests/conformance/test_registry.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy
from scipy import stats

import jaxacct as ja
from jaxacct import BalancedMinSep, BallsInBins, EpochwiseAllocation
from jaxacct.core import text
from jaxacct.likelihood import rounding
from jaxacct.schemes.protocol.batch_sizes import OVERFLOW, batch_sizes, max_batch_size, overflow
from tests.oracles import enumeration
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.settings import PRODUCTION
from tests.refusals import refused
from tests.stored_plans import as_json, claim_with


def test_counts_of_the_production_setting(key):
    """Counts 0..4 have probability 0.4053, 0.3777, 0.1637, 0.0438, 0.0081 (proofs/derivations.md, 7)."""
    num = 20_000
    draw = jax.jit(lambda k: PRODUCTION.draw_participation(k, 2000).sum(axis=1))
    counts = np.concatenate([np.asarray(draw(k)) for k in jax.random.split(key, num // 2000)])
    law = dict(enumerate([0.4053, 0.3777, 0.1637, 0.0438, 0.0081]))
    law[5] = 1 - sum(law.values())  # five or more
    assert chi_square_p_value(np.minimum(counts, 5)[:, None], {(j,): p for j, p in law.items()}) > FALSE_ALARM


def test_from_batch_size():
    p0 = 200 / 51_200
    scheme = ja.BMinSep.from_batch_size(
        dataset_size=51_200, batch_size=200, iterations=1024, min_separation=16
    )
    assert scheme.sampling_probability == pytest.approx(p0 / (1 - 15 * p0), rel=1e-14)
    assert scheme.participation_rate == pytest.approx(p0, rel=1e-14)
    assert scheme.warm_start
    full = ja.BMinSep.from_batch_size(dataset_size=160, batch_size=10, iterations=5, min_separation=16)
    assert full.sampling_probability == 1.0
    assert ja.Poisson.from_batch_size(dataset_size=100, batch_size=5, iterations=3) == ja.Poisson(3, 0.05)
    cyclic = ja.CyclicPoisson.from_batch_size(dataset_size=100, batch_size=5, iterations=3, cycle_length=4)
    assert cyclic == ja.CyclicPoisson(3, 4, 0.2)
    bins = ja.BallsInBins.from_batch_size(dataset_size=100, batch_size=5, iterations=3)
    assert bins == ja.BallsInBins(3, 20)
    # Never a larger batch than asked for.
    assert ja.BallsInBins.from_batch_size(dataset_size=101, batch_size=5, iterations=3).cycle_length == 21


def test_counts_of_many_examples(key):
    """Their distribution (false alarm 1e-6), and what each adds to a likelihood ratio."""
    many, some = ja.MultiAttribution(6, 2, 0.1, 20), ja.MultiAttribution(6, 2, 0.3, 3)
    steps, counts = jax.jit(lambda key: many.table.draw_counts(key, 10_000))(key)
    counts = np.asarray(counts)[np.asarray(steps) < 6]
    law = {(j,): weight for j, weight in enumerate(many.count_weights(), 1)}
    assert chi_square_p_value(counts[:, None], law) > FALSE_ALARM
    ratios = np.linspace(-3, 3, 12, dtype=np.float32).reshape(2, 6)
    joined = jax.jit(lambda x: some._any_count(x, np.float32(0.2)))(ratios)
    each = [w * np.exp(j * ratios - j * (j - 1) * 0.2) for j, w in enumerate(some.count_weights(), 1)]
    np.testing.assert_allclose(joined, np.log(sum(each)), rtol=1e-5, atol=1e-6)


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


def small(n):
    """Every separation, and every length of an epoch or number of participations."""
    for epoch in range(1, n + 2):
        yield from (EpochwiseAllocation(n, epoch, b) for b in range(1, epoch + 1))
    for b in range(1, n + 1):
        yield from (BalancedMinSep(n, b, k) for k in range(1, -(-n // b) + 1))


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [(EpochwiseAllocation(8, 3, 3), BallsInBins(8, 3)), (EpochwiseAllocation(5, 8, 2), BallsInBins(5, 8))],
)
def test_limits(scheme, limit):
    found = enumeration.pattern_distribution(scheme)
    assert found == pytest.approx(enumeration.pattern_distribution(limit), abs=1e-12)
    r = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, scheme.iterations)), jnp.float32)
    ours, theirs = jax.jit(lambda r: (scheme.log_likelihood_ratios(r), limit.log_likelihood_ratios(r)))(r)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_batch_sizes_follow_the_step():
    """By exact integers: p_i is largest at the ends, n / m of the mean, and the largest batch holds there.

    The mean rate of README's job would allow too small a batch, the largest one too large a one.
    """
    for n, b, k in ((1000, 16, 4), (40, 5, 6)):
        scheme, m = BalancedMinSep(n, b, k), n - (k - 1) * (b - 1)
        rates = scheme.participation_probabilities()
        ways = [
            sum(
                math.comb(i - j * (b - 1), j) * math.comb(m - 1 - i + j * (b - 1), k - 1 - j)
                for j in range(k)
                if 0 <= i - j * (b - 1) < m
            )
            for i in range(n)
        ]
        np.testing.assert_allclose(rates, np.array(ways, float) / math.comb(m, k), rtol=1e-12)
        np.testing.assert_allclose(rates, rates[::-1], rtol=1e-12)
        assert rates[0] == pytest.approx(k / m) and rates.mean() == pytest.approx(k / n)
    scheme, size = BalancedMinSep(1000, 16, 4), 50_000
    expected, largest = batch_sizes(scheme, size)
    rates = scheme.participation_probabilities()
    assert expected == pytest.approx(200)
    assert stats.binom.sf(largest, size, rates).sum() <= 1e-9 < stats.binom.sf(largest - 2, size, rates).sum()
    assert max_batch_size(size, 4 / 1000, 1000) < largest < max_batch_size(size, rates.max(), 1000)
    assert BalancedMinSep(400, 20, 20).participation_probabilities().min() < 2e-11, "no divisor of a step"


def test_bad_input():
    sizes = dict(dataset_size=100, batch_size=25, iterations=8)
    for make, message in (
        (lambda: EpochwiseAllocation(8, 3, 4), "min_separation must be at most epoch_steps 3"),
        (lambda: EpochwiseAllocation(8, 0), "epoch_steps must be"),
        (lambda: BalancedMinSep(8, 3, 3.5), "participations must be at most 3"),
        (lambda: BalancedMinSep(8, 3, 0), "participations must be"),
        (lambda: BalancedMinSep(8, 3, math.nan), "participations must be"),
        (
            lambda: BalancedMinSep.from_batch_size(**sizes | {"batch_size": 30}, min_separation=4),
            "participations must be at most 2",
        ),
    ):
        refused(message, make)
    assert EpochwiseAllocation.from_batch_size(**sizes, min_separation=2) == EpochwiseAllocation(8, 4, 2)
    assert EpochwiseAllocation.from_batch_size(**sizes | {"batch_size": 30}).epoch_steps == 4
    assert EpochwiseAllocation(9, 12, 2).min_separation == 12
    made = BalancedMinSep.from_batch_size(**sizes, min_separation=4)
    assert made == BalancedMinSep(8, 4, 2) and made.expected_batch_sizes(100).mean() == 25.0
    assert BalancedMinSep(9, 2, 0.5) == BalancedMinSep(9, 9, 0.5), "one participation has no distance"


def test_logarithms_of_binomials_that_bounds_depend_on():
    """Of exact integers, and rounded up by what gammaln may lose."""
    for n, k in ((10, 3), (2000, 1000), (2**20, 9)):
        with mpmath.workdps(40):
            above = rounding._log_choose(n, k) - mpmath.log(math.comb(n, k))
            parts = sum(mpmath.loggamma(size + 1) for size in (n, k, n - k))
            assert 0.5 < above / (2.0**-49 * parts) < 1.5
