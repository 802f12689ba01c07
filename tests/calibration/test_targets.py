"""Targets in words of risk: the (epsilon, delta) that implies them, by enumeration and in closed form."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, Plan, Poisson, Target, calibrate, recommend
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.calibration import targets
from jaxacct.report import risk
from tests import calibrating
from tests.refusals import refused
from tests.stored_plans import FOLDER

RATES = [(0.1, 0.01), (0.5, 0.001), (0.95, 0.1), (0.6, 0.4), (0.011, 0.01), (0.3, 1e-5)]
ONE = BandedToeplitz((1.0,))
SIZES = dict(dataset_size=600, batch_size=60, iterations=20)


def worst_pair(epsilon: float, delta: float):
    """Distributions that attain (epsilon, delta) in both directions."""
    high, low = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    return np.array([delta, high, low, 0.0]), np.array([0.0, low, high, delta])


def best_power(first, second, level: float) -> float:
    """Largest probability under `first` of a randomized test of this level, by enumeration of its sets."""
    best = 0.0
    for size in range(len(first) + 1):
        for chosen in itertools.combinations(range(len(first)), size):
            inside = sum(second[place] for place in chosen)
            if inside > level + 1e-15:
                continue
            power = sum(first[place] for place in chosen)
            for extra in set(range(len(first))) - set(chosen):
                part = min(1.0, (level - inside) / second[extra]) if second[extra] > 0 else 1.0
                best = max(best, power + part * first[extra])
            best = max(best, power)
    return best


def test_the_point_implies_the_rates_and_a_larger_delta_does_not():
    """The pair that attains the point has the true positive rate, in both directions and not more."""
    for tpr, fpr in RATES:
        epsilon, delta = Target.tpr(tpr, fpr=fpr).point
        first, second = worst_pair(epsilon, delta)
        assert tpr - 1e-6 < best_power(first, second, fpr) <= tpr
        assert best_power(second, first, fpr) <= tpr
        assert risk.true_positive_rate(epsilon, delta, fpr) <= tpr
        assert best_power(*worst_pair(epsilon, delta + 1e-3 * (1 - delta)), fpr) > tpr


def test_points_of_every_slope_imply_the_rates():
    """All lines through the rates, positive slopes and mirrored ones, against enumeration."""
    for tpr, fpr in RATES:
        low, high = -math.log((1 - fpr) / (1 - tpr)), math.log(tpr / fpr)
        for share in (0.03, 0.3, 0.5, 0.8, 0.97):
            epsilon, delta = targets._line(low + share * (high - low), tpr, fpr)
            first, second = worst_pair(epsilon, delta)
            assert best_power(first, second, fpr) <= tpr
            assert best_power(second, first, fpr) <= tpr


def test_the_point_is_the_tangent_of_the_gaussian():
    """The Gaussian mechanism of this risk has exactly this delta: no other point needs less noise of it."""
    for tpr, fpr in RATES:
        noise = 1 / (stats.norm.ppf(tpr) - stats.norm.ppf(fpr))
        epsilon, delta = Target.tpr(tpr, fpr=fpr).point
        assert gdp_delta(epsilon, 1.0 / noise) == pytest.approx(delta, rel=1e-6)
        for slope in (epsilon * 0.9, epsilon * 1.02):
            other, most = targets._line(math.copysign(slope, 1 - tpr - fpr), tpr, fpr)
            assert gdp_delta(other, 1.0 / noise) > most


def test_a_full_batch_needs_the_noise_of_the_gaussian():
    """Closed form without amplification: 1 / (z(tpr) - z(fpr)), up to the grid of one per cent."""
    plan = calibrate(Poisson(1, 1.0), ONE, target=Target.tpr(0.1, fpr=0.01))
    exact = 1 / (stats.norm.ppf(0.1) - stats.norm.ppf(0.01))
    assert exact <= plan.noise_multiplier < 1.0101 * exact
    assert "0.1 at 0.01" in plan.statement()
    plan = calibrate(Poisson(1, 1.0), ONE, target=Target.mu(1.0, delta=1e-5))
    assert 1 <= plan.noise_multiplier < 1.0101 and plan.delta == 1e-5


def test_what_plain_samples_do_not_resolve_keeps_the_point_of_the_gaussian():
    target = Target.tpr(3e-6, fpr=1e-6)
    assert target.with_least_noise(Poisson(1, 1.0), ONE) == target


def test_statements_are_of_the_certified_point():
    readme = Plan.load(FOLDER.parent / "readme_plan.json")
    assert readme.epsilon == 8 and "It implies" not in readme.statement()
    assert Target(1.0, 0.1).in_words(1.0, 0.1) is None
    assert "no other point of its curve is certified" in Target.mu(1.0, delta=1e-5).in_words(4.4, 1e-5)


def test_bad_targets_are_refused():
    for target, match in [
        ({}, "must be given"),
        ({"epsilon": 1.0}, "target must be one of"),
        ({"tpr": 0.1}, "target must be one of"),
        ({"mu": 1.0}, "target must be one of"),
        ({"epsilon": 1.0, "delta": 1e-5, "mu": 1.0}, "given were epsilon, delta, mu"),
        ({"epsilon": 0.0, "delta": 0.1}, "epsilon must be a finite number above 0"),
        ({"advantage": 0.1, "delta": 1e-5}, "advantage must not be given together with delta"),
        *(({"advantage": wrong}, "advantage must be in") for wrong in (0.0, 1.0, math.nan)),
        ({"tpr": 0.1, "fpr": 0.1}, "tpr must be above fpr"),
        ({"tpr": 0.01, "fpr": 0.1}, "tpr must be above fpr"),
        ({"tpr": 1.0, "fpr": 0.1}, "tpr must be in"),
        ({"tpr": 0.1, "fpr": 0.0}, "fpr must be in"),
        ({"tpr": math.nan, "fpr": 0.1}, "tpr must be in"),
        ({"tpr": "0.1", "fpr": 0.1}, "tpr must be in"),
        ({"tpr": 0.1 + 2e-16, "fpr": 0.1}, "tpr must be"),
        ({"mu": -1.0, "delta": 1e-5}, "mu must be"),
        ({"mu": 1e3, "delta": 1e-5}, "mu must give an epsilon of at most 10000"),
        ({"epsilon": 10_001.0, "delta": 1e-5}, "epsilon must be"),
    ]:
        refused(match, calibrating.calibrate, Poisson(1, 1.0), ONE, **target)


def test_a_point_that_does_not_imply_its_rates_is_refused():
    """Of every slope, in both forms of the line: a larger delta, or one that is missing."""
    for tpr, fpr in RATES:
        target = Target.tpr(tpr, fpr=fpr)
        assert dataclasses.replace(target, delta=0.5 * target.point[1]).rates == (tpr, fpr)
        for delta in (None, target.point[1] + 1e-3 * (1 - target.point[1])):
            refused("target must imply its rates", dataclasses.replace, target, delta=delta)


def test_a_call_has_one_target():
    for call in (functools.partial(calibrate, Poisson(1, 1.0), ONE), functools.partial(recommend, **SIZES)):
        for given in (dict(epsilon=1.0), dict(delta=0.1), dict(epsilon=1.0, delta=0.1)):
            with pytest.raises(ValueError, match="epsilon and delta must not be given together with target"):
                call(**given, target=Target(1.0, 0.1))
        refused(r"target must be a jaxacct\.Target, got \(1\.0, 0\.1\)", call, target=(1.0, 0.1))
        refused(r"target must be one of .*; given was epsilon alone", call, epsilon=1.0)


def test_a_sampled_step_needs_the_noise_of_its_own_curve():
    """TPR of the best test is (1 - p) FPR + p Phi(z(FPR) + 1 / sigma): another point than the Gaussian's."""
    rate, tpr, fpr = 0.1, 0.1, 0.01
    exact = 1 / (stats.norm.ppf((tpr - (1 - rate) * fpr) / rate) - stats.norm.ppf(fpr))
    epsilon, delta = Target.tpr(tpr, fpr=fpr).with_least_noise(Poisson(1, rate), ONE).point
    assert risk.true_positive_rate(epsilon, delta, fpr) <= tpr
    plan = calibrate(Poisson(1, rate), ONE, epsilon=epsilon, delta=delta)
    assert exact <= plan.noise_multiplier < 1.05 * exact
    usual = calibrate(
        Poisson(1, rate), ONE, **dict(zip(("epsilon", "delta"), Target.tpr(tpr, fpr=fpr).point, strict=True))
    )
    assert usual.noise_multiplier > 1.2 * exact
