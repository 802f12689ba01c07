"""P-values and confidence levels of audits, computed again from their definitions."""

import math

import numpy as np
import pytest
from scipy import stats

from train.audit import bounds, checks


def test_bounds_on_two_rates_share_the_failure_probability():
    """Of 100 trials all hits and no false alarm: both Clopper-Pearson bounds are closed forms."""
    present, absent = np.ones(200), np.zeros(200)
    found = bounds.epsilon_lower_bound(present, absent, 1e-3, 0.95)[0]
    low = 0.025 ** (1 / 100)
    assert found == pytest.approx(math.log((low - 1e-3) / (1 - low)), rel=1e-9, abs=0)


@pytest.mark.parametrize("scale", [0.3, 2.0], ids=["short", "long"])
def test_the_p_value_of_norms_counts_both_sides_and_every_row(scale):
    rows = scale * np.random.default_rng(0).normal(size=(3, 7))
    squares = stats.gamma(7 / 2, scale=2)  # the chi-square distribution
    tails = [min(squares.cdf(row @ row), squares.sf(row @ row)) for row in rows]
    assert checks._energy(rows, 0.0) == pytest.approx(6 * min(tails), rel=1e-9, abs=0)


def test_the_p_value_of_the_distribution_is_two_sided():
    noise = 1.4 * np.random.default_rng(1).normal(size=(20, 30))
    distance = stats.kstest(noise.ravel(), "norm").statistic
    assert checks._normality(noise, 0.0) == pytest.approx(2 * math.exp(-1200 * distance**2), rel=1e-9, abs=0)
