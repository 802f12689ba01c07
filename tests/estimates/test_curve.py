"""Estimates at several noise multipliers."""

import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, estimate_delta
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.estimates.curve import delta_curve

FALSE_ALARM = 1e-6


def test_the_curve_holds_the_exact_deltas(key):
    """One participation for certain: a Gaussian. 10 intervals, each wrong with probability 1e-7."""
    sigmas = np.geomspace(0.5, 3, 10)
    curve = delta_curve(
        Poisson(1, 1.0),
        BandedToeplitz.identity(),
        sigmas,
        1.0,
        num_samples=50_000,
        confidence=1 - FALSE_ALARM / 10,
        key=key,
    )
    exact = np.array([gaussian_delta(1.0, sigma, 1.0) for sigma in sigmas])
    assert np.all(curve.low <= exact) and np.all(exact <= curve.high)
    assert np.all(np.diff(curve.value) < 0)  # shared randomness: no noise between neighbours


def test_a_point_is_that_of_one_noise_multiplier(key):
    setting = BMinSep(12, 3, 0.3), BandedToeplitz.square_root(3)
    curve = delta_curve(*setting, [0.4, 1.0], 0.5, num_samples=4000, confidence=1 - FALSE_ALARM, key=key)
    alone = estimate_delta(Mechanism(*setting, 1.0), 0.5, confidence=1 - FALSE_ALARM)
    assert curve.low[1] <= alone.high and alone.low <= curve.high[1] and curve.value[0] > curve.value[1]


def test_bad_input():
    scheme, strategy = BMinSep(8, 3, 0.2), BandedToeplitz.square_root(2)
    for sigmas in ([], [0.0, 1.0], [np.inf], 1.0, [[1.0]], ["x"]):
        with pytest.raises(ValueError, match="noise_multipliers must be a list of numbers above 0"):
            delta_curve(scheme, strategy, sigmas, 1.0)
    with pytest.raises(ValueError, match="bands must be at most"):
        delta_curve(scheme, BandedToeplitz.square_root(4), [1.0], 1.0)
