"""Matrices for the noise that they need with sampling: what stands for it, its gradient, the optimum."""

from typing import Any

import numpy as np
import pytest

from jaxacct import BandedToeplitz, prefix_sum_error
from jaxacct.strategies import Workload, workload_error
from jaxacct.strategies.amplified import _lags, _log_square_noise, _log_sum, amplified
from tests.refusals import refused

C = np.array([1.0, 0.5, 0.3, 0.25, 0.0, 0.1])


def noise_by_bisection(c: np.ndarray, repeats: float, total: float) -> float:
    """The noise multiplier at which `sum_d (exp(repeats a_d / sigma^2) - 1)` over all lags is `total`."""
    a = np.correlate(c, c, "full") / np.dot(c, c)
    low, high = 1e-2, 1e4
    while high / low > 1 + 1e-12:
        middle = np.sqrt(low * high)
        low, high = (
            (middle, high)
            if np.expm1(np.minimum(repeats * a / middle**2, 700)).sum() > total
            else (low, middle)
        )
    return high


@pytest.mark.parametrize(("sigma", "repeats"), [(0.5, 1.0), (2.0, 3.0), (30.0, 1.0), (1.0, 16.0)])
def test_noise_at_a_given_sum_and_its_gradient(sigma, repeats):
    root = BandedToeplitz.square_root(6).array
    total = np.expm1(repeats * np.correlate(root, root, "full") / sigma**2).sum()
    log_sum = _log_sum(_lags(root), repeats / sigma**2)[0]
    assert log_sum == pytest.approx(np.log(total), rel=1e-12)
    value, gradient = _log_square_noise(C, repeats, log_sum)
    assert np.exp(value / 2) == pytest.approx(noise_by_bisection(C, repeats, total), rel=1e-9)
    assert np.exp(_log_square_noise(3 * root, repeats, log_sum)[0] / 2) == pytest.approx(sigma, rel=1e-12)
    for i, step in enumerate(1e-5 * np.eye(6)):
        ends = [_log_square_noise(c, repeats, log_sum)[0] for c in (C + step, C - step)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("workload", [Workload(), Workload(momentum=0.9)])
def test_least_error_at_that_noise(workload):
    """Less than the square root and the optimum of revealed patterns; near the latter for many repeats."""
    n, bands, sigma = 60, 8, 1.5
    schedule: dict[str, Any] = dict(
        iterations=n, bands=bands, min_separation=bands, participations=1, workload=workload
    )
    root, optimal = BandedToeplitz.square_root(bands), BandedToeplitz.optimal(**schedule)

    def error(made, repeats):
        total = np.expm1(repeats * np.correlate(root.array, root.array, "full") / sigma**2).sum()
        noise = noise_by_bisection(made.array, repeats, total)
        return workload_error(made, iterations=n, noise_multiplier=noise, workload=workload)

    for repeats in (1, 4):
        made = amplified(
            iterations=n, bands=bands, noise_multiplier=sigma, repeats=repeats, workload=workload
        )
        assert error(made, repeats) < 0.998 * min(error(root, repeats), error(optimal, repeats))
    many = amplified(iterations=n, bands=bands, noise_multiplier=0.1, repeats=50, workload=workload)
    np.testing.assert_allclose(many.array, optimal.array, atol=0.01)


def test_one_band_and_bad_numbers():
    given: dict[str, Any] = dict(iterations=4, bands=2, noise_multiplier=1.0, repeats=1)
    assert amplified(**dict(given, bands=1)) == BandedToeplitz.identity()
    assert prefix_sum_error(amplified(**given), iterations=4, noise_multiplier=1.0) > 0
    changes: list[tuple[dict[str, Any], str]] = [
        ({"bands": 5}, "bands must be at most iterations 4, got 5"),
        ({"repeats": 0}, "repeats must be"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"workload": None}, "workload must be"),
    ]
    for change, message in changes:
        refused(message, amplified, **given | change)
