"""Analytic fallbacks against dp-accounting, closed forms, and the pattern revealed by enumeration."""

import json
import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import IndependentAttribution, MultiAttribution, TruncatedBMinSep
from jaxacct.accountants import RevealedPattern, analytic, revealed_pattern, unamplified
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.calibration import route
from jaxacct.common.files import to_json
from jaxacct.core.evidence import Bound
from jaxacct.schemes import BMinSep
from tests import calibrating
from tests.conformance.test_accountants import revealed_patterns
from tests.oracles import enumeration
from tests.refusals import refused


def at(scheme, noise_multiplier: float) -> ja.Mechanism:
    return ja.Mechanism(scheme, ja.BandedToeplitz.identity(), noise_multiplier)


def test_unamplified_noise_multiplier_is_on_the_line():
    for scheme in (ja.BMinSep(100, 10, 0.01), ja.BallsInBins(7, 9)):
        for epsilon, delta in ((0.1, 1e-9), (8.0, 1e-5), (40.0, 0.3)):
            sigma = unamplified.noise_multiplier_for(at(scheme, 1.0), epsilon, delta)
            k = np.sqrt(scheme.max_participations)
            assert gdp_delta(epsilon, k / sigma) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("accountant", ["analytic", "unamplified", "revealed-pattern", "pld"])
def test_a_named_accountant_makes_a_plan_without_a_draw(accountant, monkeypatch):
    """The smallest noise on the grid by that bound, which loads again; one step below it the bound fails."""
    monkeypatch.setattr(route, "verify_claim", None)
    scheme = ja.Poisson(4, 0.5) if accountant == "pld" else ja.MultiAttribution(20, 2, 0.05, 2)
    one_band, target = ja.BandedToeplitz.square_root(1), dict(epsilon=2.0, delta=1e-3)
    options = ja.CalibrationOptions(accountant=accountant, grid_ratio=1.3)
    plan = ja.calibrate(scheme, one_band, **target, options=options)
    best = "revealed-pattern" if accountant == "analytic" else accountant
    assert plan.certified and plan.evidence == Bound(best)
    assert ja.Plan.from_json(json.loads(to_json(plan.to_json()))) == plan
    sigma = plan.mechanism.noise_multiplier
    assert analytic.delta_by(best, at(scheme, sigma / 1.3), 2.0) > 1e-3
    again = ja.calibrate(scheme, one_band, noise_multiplier=sigma, **target, options=options)
    assert again.verdict.bound == plan.verdict.bound
    with pytest.raises(ja.NotCertifiedError, match=r"gives delta .*, above 0\.001"):
        ja.calibrate(scheme, one_band, noise_multiplier=sigma / 1.3, **target, options=options)


def test_what_a_named_accountant_refuses():
    for options, message in [
        (dict(accountant="prv"), "accountant must be one of analytic, unamplified, revealed-pattern, pld"),
        (dict(accountant="pld"), "accountant pld does not cover multi-attribution"),
        (dict(max_samples=9), "max_samples must not be given together with account"),
        (dict(proposal="plain"), "proposal must not be given together with account"),
        (dict(rule="fixed"), "rule must not be given together with account"),
        (dict(checkpoint_dir="x"), "checkpoint_dir must not be given together"),
        (dict(dataset_size=9, max_batch_size=5), "max_batch_size must not be given"),
    ]:
        given = dict(accountant="unamplified", epsilon=2, delta=1e-3) | options
        users, white = ja.MultiAttribution(20, 2, 0.05, 2), ja.BandedToeplitz.square_root(1)
        refused(message, calibrating.calibrate, users, white, **given)


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
