"""Analytic fallbacks against dp-accounting and against enumeration-free closed forms."""

import json

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import analytic, unamplified
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.calibration import route
from jaxacct.common.files import to_json
from jaxacct.core.evidence import Bound
from tests import calibrating
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
