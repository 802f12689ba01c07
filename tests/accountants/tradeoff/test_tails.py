"""Bounds from tails: numbers, order, and which conditions they need."""

import numpy as np
import pytest

from jaxacct.accountants.tradeoff import GeneralDPSGD, tail_lower_tradeoff, tail_upper_tradeoff

ALPHAS = np.linspace(0, 1, 101)


def test_numbers():
    upper = tail_upper_tradeoff([0.0, 0.05, 0.2, 0.3, 0.5, 1.0], 1.0, 0.1)
    np.testing.assert_allclose(
        upper, [1, 0.7664400795, 0.4933712550, 0.3843687764, 0.1948146843, 0], rtol=1e-8, atol=1e-15
    )
    lower = tail_lower_tradeoff([0.0, 0.05, 0.2, 0.5, 0.96], 1.0, 0.05)
    np.testing.assert_allclose(
        lower, [0.95, 0.6904889772, 0.3870791723, 0.1301544453, 0], rtol=1e-8, atol=1e-15
    )
    assert tail_lower_tradeoff(0.05, 1.0, 0.05, symmetrize=False) == pytest.approx(0.6108563083, rel=1e-8)
    assert tail_upper_tradeoff(1.0, 1.0, 0.1, symmetrize=False) == pytest.approx(
        0.1
    )  # so not a trade-off function
    for f in (tail_upper_tradeoff, tail_lower_tradeoff):
        assert f(f(0.3, 1.0, 0.08), 1.0, 0.08) == pytest.approx(0.3, abs=1e-9)
    assert tail_lower_tradeoff(0.4, 1.0, 1.0) == 0


@pytest.mark.parametrize(
    ("m", "s", "sampling"), [(1, 10, "subsampling"), (10, 1, "subsampling"), (2, 5, "shuffling")]
)
def test_exact_curve_lies_between_its_tail_bounds(m, s, sampling):
    run, sigma = GeneralDPSGD(1000, m, s, 3, sampling, 3), 2.0
    pmf, curve = run.pmf(), run.curve(2.0)
    exact = curve(ALPHAS)
    for share in (0.3, 0.9, 1.0):
        cut = float(np.quantile(pmf.squared_sensitivity, share))
        low = tail_lower_tradeoff(ALPHAS, np.sqrt(cut) / sigma, min(1.0, pmf.tail(cut)))
        assert (low <= exact + 1e-9).all()
        head = pmf.head(cut)
        if head < 1:
            high = tail_upper_tradeoff(ALPHAS, np.sqrt(max(cut, 1.0)) / sigma, pmf.head(max(cut, 1.0)))
            assert (high >= exact - 1e-9).all()
