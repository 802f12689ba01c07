"""The pattern revealed: against enumeration and on the counterexample graph; sensitivities, called."""

import math

import numpy as np
import pytest

from jaxacct import BandedToeplitz, IndependentAttribution, Mechanism, MultiAttribution, TruncatedBMinSep
from jaxacct.accountants import RevealedPattern, revealed_pattern, unamplified
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.schemes import BMinSep
from tests.conformance.test_accountants import revealed_patterns
from tests.oracles import enumeration

SETTINGS = [
    MultiAttribution(7, 3, 0.2, 2),
    MultiAttribution(7, 3, 0.2, 2, False),
    MultiAttribution(6, 3, 0.3, 3, False),
    MultiAttribution(4, 1, 0.3, 2),
    MultiAttribution(5, 2, 1.0, 3),
    MultiAttribution(5, 2, 1.0, 2, False),
    MultiAttribution(3, 5, 0.4, 2),
    MultiAttribution(8, 3, 0.3, 1),
]


def at(scheme, noise_multiplier: float) -> Mechanism:
    return Mechanism(scheme, BandedToeplitz.identity(), noise_multiplier)


def revealed(scheme, noise_multiplier: float, epsilon: float) -> float:
    return RevealedPattern().delta(at(scheme, noise_multiplier), epsilon)


def sensitivity(scheme) -> float:
    return unamplified.sensitivity(at(scheme, 1.0))


def test_mean_over_all_patterns():
    """One band, where `|C x|^2` is the sum of squared counts."""
    for sigma in [0.5, 2.0]:
        for scheme in SETTINGS:
            for epsilon in (0.2, 1.0, 3.0):
                exact = revealed_patterns(at(scheme, sigma), epsilon)
                found = revealed(scheme, sigma, epsilon)
                assert found == pytest.approx(exact, rel=1e-6, abs=1e-15)
                assert found <= gdp_delta(epsilon, sensitivity(scheme) / sigma) * (1 + 1e-8)


def test_too_many_cells_fall_back_to_the_largest_counts(monkeypatch):
    scheme = MultiAttribution(300, 2, 0.05, 40)
    assert revealed_pattern.participation_tail(scheme.timing).size == 150
    assert 0 < revealed(scheme, 300.0, 1.0) <= gdp_delta(1.0, sensitivity(scheme) / 300.0)
    fewer = MultiAttribution(300, 2, 0.05, 4)
    exact = revealed(fewer, 20.0, 1.0)
    monkeypatch.setattr(revealed_pattern, "_MAX_CELLS", 0)
    assert exact < revealed(fewer, 20.0, 1.0)


def test_sensitivities():
    """Called, not retyped: of truncated batches, overlapping columns and a user's examples."""
    assert sensitivity(TruncatedBMinSep(1, 1, 0.4, 4, 8)) == 2.0
    # The exact pair of one truncated step: a Gaussian with shift 2 bounds it, and one with shift 1 does not.
    from tests.schemes.test_truncated_b_min_sep import pair_delta

    assert gdp_delta(8.0, 1.0 / 0.5) < pair_delta(7, 0.4, 4, 0.5, 8.0, "remove") < gdp_delta(8.0, 2.0 / 0.5)
    assert sensitivity(TruncatedBMinSep(1, 1, 0.4, 8, 8)) == 1.0
    # Two columns of norm 1 with the product rho: |c_1 + c_2|^2 = 2 (1 + rho), and each pair counts twice.
    columns = enumeration.strategy_matrix(np.array([0.8, 0.6]), 3, 2)
    rho = float(columns[:, 0] @ columns[:, 1])
    length = np.linalg.norm(columns.sum(axis=1))
    assert length**2 == pytest.approx(2 + 2 * rho)
    bounded = math.sqrt(BMinSep(2, 1, 0.5).squared_sensitivity(rho))
    assert length <= bounded == pytest.approx(np.sqrt(2 * (1 + 2 * rho)))
    # Three columns: with the cross terms once the bound would be too small.
    columns = enumeration.strategy_matrix(np.array([1.0, 1.0, 1.0]) / np.sqrt(3), 12, 10)
    length = np.linalg.norm(columns.sum(axis=1))
    cross = columns[:, 0] @ columns[:, 1] + columns[:, 0] @ columns[:, 2]
    assert np.sqrt(10 * (1 + cross)) < length <= math.sqrt(BMinSep(10, 1, 0.5).squared_sensitivity(cross))
    assert sensitivity(MultiAttribution(9, 3, 0.1, 4)) == pytest.approx(4 * np.sqrt(3))
    assert sensitivity(IndependentAttribution(9, 3, 0.1, 4)) == pytest.approx(4 * np.sqrt(3))
