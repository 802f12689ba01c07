"""Products and quotients of series against SciPy's filters, by which they were computed before."""

import numpy as np
import pytest
import scipy

from jaxacct.strategies import series


@pytest.mark.parametrize(("n", "bands"), [(1, 1), (5, 16), (40, 40), (300, 7), (700, 300)])
def test_quotients_are_what_filters_do(n, bands, monkeypatch):
    """Forwards and backwards, for a first coefficient that is not 1, and beyond what is written out."""
    rng = np.random.default_rng(n)
    divisor = np.append(2.5, rng.uniform(-1, 1, bands - 1) / bands)
    values = rng.normal(size=n)
    wanted = scipy.signal.lfilter([1.0], divisor, values)
    backwards = scipy.signal.lfilter([1.0], divisor, values[::-1])[::-1]
    kept = values.copy()
    for most in (series._MOST, 0):
        monkeypatch.setattr(series, "_MOST", most)
        np.testing.assert_allclose(series.quotient(values, divisor), wanted, rtol=0, atol=1e-13)
        np.testing.assert_allclose(series.quotient(values, divisor, transposed=True), backwards, atol=1e-13)
    assert (values == kept).all()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (9, 4), (700, 300)])
def test_products_and_sums_at_lags(n, m):
    """By the definition, one by one and by FFT."""
    rng = np.random.default_rng(m)
    a, b = rng.normal(size=n), rng.normal(size=m)
    np.testing.assert_allclose(series.product(a, b), scipy.signal.convolve(a, b, method="direct"), atol=1e-12)
    sums = [sum(a[t + k] * b[t] for t in range(min(m, n - k))) for k in range(n)]
    np.testing.assert_allclose(series.sums_at_lags(a, b, n), sums, atol=1e-12)


def test_a_quotient_without_bound_is_not_finite():
    """A search that comes upon one goes back part of the way."""
    assert not np.isfinite(series.quotient(np.ones(2000), np.array([1.0, -3.0]))[-1])
