"""The smallest epsilon, or delta, of a mechanism whose noise is given: certified, near the truth."""

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

import jaxacct as ja
from jaxacct.accountants import ACCOUNTANTS
from jaxacct.calibration import grid, route
from jaxacct.calibration.pilots import Pilots
from jaxacct.cli import main as cli
from jaxacct.core import shares, truncation
from jaxacct.core.evidence import Bound
from tests import commands
from tests.oracles.settings import slow
from tests.refusals import refused

SCHEME, STRATEGY = ja.BMinSep(12, 3, 0.3), ja.BandedToeplitz.square_root(3)
NOISE = 2.4
SAMPLED = dict(noise_multiplier=NOISE, key=jax.random.key(0))
ESTIMATE = dict(num_samples=12_000, key=jax.random.key(7), confidence=1 - 1e-6)


@pytest.fixture(scope="module")
def found():
    return ja.calibrate(SCHEME, STRATEGY, delta=1e-2, **SAMPLED)


def test_the_min_epsilon_is_certified_and_near_the_truth(found):
    """A false alarm has probability 1e-6: the interval of the estimate does not hold its epsilon."""
    truth = ja.estimate_epsilon(found.mechanism, 1e-2, **ESTIMATE)
    assert found.certified and found.is_sampled and found.delta == 1e-2
    assert truth.low <= found.epsilon <= 1.15 * truth.high
    assert found.noise_multiplier == NOISE
    # The whole failure probability is in delta, and what is stored can be checked again.
    budget = found.target.budget
    assert budget.delta_v + budget.failure_probability * (1 - budget.delta_v) <= found.delta
    assert found.evidence.share <= max(shares.FIRST_SHARES)
    assert ja.Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    # Epsilon is on the grid: its digits are independent of the samples.
    exponent = round(math.log(found.epsilon, 1.01))
    assert found.epsilon == 1.01**exponent


def test_the_smallest_delta_is_certified_and_near_the_truth():
    plan = ja.calibrate(SCHEME, STRATEGY, epsilon=0.6, **SAMPLED)
    truth = ja.estimate_delta(plan.mechanism, 0.6, **ESTIMATE)
    assert plan.certified and plan.epsilon == 0.6
    assert truth.low <= plan.delta <= 1.4 * truth.high
    assert ja.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("certify", [(), (0,), (2, 3), *(slow(x) for x in ((2,), (3,)))], ids=str)
def test_candidates_are_fixed_before_they_are_verified(certify, monkeypatch, found):
    """Verdicts decide which of them is released, in shares of q that are fixed, too."""
    seen, pilots = [], []
    verify = route.verify_claim

    def verdict_of(claim, stop, key, **options):
        seen.append((claim.target.epsilon, stop.share, jax.random.key_data(key).tolist()))
        verdict = verify(claim, dataclasses.replace(stop, max_samples=128), key=key, **options)
        assert not verdict.certified  # with so few samples
        if len(seen) - 1 in certify:
            verdict = dataclasses.replace(verdict, flaws=())
            monkeypatch.setattr(type(verdict), "certified", property(lambda v: not v.flaws), raising=False)
        return verdict

    stream = Pilots.stream

    def seen_stream(self, mechanism):
        pilots.append(jax.random.key_data(stream(self, mechanism)).tolist())
        return stream(self, mechanism)

    monkeypatch.setattr(route, "verify_claim", verdict_of)
    monkeypatch.setattr(Pilots, "stream", seen_stream)
    half = ja.CalibrationOptions(share=0.5)  # of two calls, of which one plan is chosen
    plan = ja.calibrate(SCHEME, STRATEGY, delta=1e-2, options=half, **SAMPLED)
    first = min(epsilon for epsilon, _, _ in seen)
    steps = [round(math.log(epsilon / first, 1.01)) for epsilon, _, _ in seen]
    assert steps == [0, 1, 5, 2][: len(steps)] and first <= found.epsilon
    assert [share for _, share, _ in seen] == pytest.approx([0.45, 0.025, 0.025, 0.025][: len(steps)])
    keys = [tuple(key) for _, _, key in seen]
    assert len(set(keys)) == len(keys) and not set(keys) & {tuple(key) for key in pilots}
    if not certify or certify == (3,):
        assert isinstance(plan.evidence, Bound) and plan.epsilon > 1.01**5 * first
    else:
        released = {(2,): 5, (0,): 0, (2, 3): 2}[certify]
        assert round(math.log(plan.epsilon / first, 1.01)) == released


@pytest.mark.parametrize("named", [None, "pld"])
def test_poisson_sampling_takes_the_exact_accountant(named):
    """C = I: epsilon of dp-accounting, to a thousandth, and no sample."""
    options = ja.CalibrationOptions(accountant=named)
    given = ja.Poisson(200, 0.01), ja.BandedToeplitz.identity()
    find = functools.partial(ja.calibrate, *given, noise_multiplier=1.0, options=options)
    plan = find(delta=1e-5)
    event = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    exact = PLDAccountant().compose(event, 200).get_epsilon(1e-5 * (1 - 1e-12))
    assert plan.evidence == Bound("pld") and 0.999 * exact < plan.epsilon < 1.002 * exact
    assert find(epsilon=plan.epsilon).delta == pytest.approx(1e-5, rel=0.02)


def test_more_noise_than_any_target_needs():
    plan = ja.calibrate(SCHEME, STRATEGY, noise_multiplier=1e6, delta=1e-2)
    assert plan.epsilon == pytest.approx(grid.LIMITS["epsilon"][0], rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(), "target must be given|must be one of"),
        (dict(noise_multiplier=1.0), "target must be given"),
        (dict(epsilon=1.0), "target must be one of"),
        (dict(noise_multiplier=1.0, epsilon=0.0), "epsilon must be"),
        (dict(noise_multiplier=1.0, delta=1.0), "delta must be"),
        (dict(noise_multiplier=-1.0, delta=0.1), "noise_multiplier must be"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], message):
    refused(message, ja.calibrate, SCHEME, STRATEGY, **change)


@pytest.mark.parametrize("given", [dict(delta=3e-2), dict(epsilon=1.0)], ids=str)
def test_what_is_reserved_for_truncated_batches_is_not_spent_by_an_accountant(given):
    """Two-sided: the bound leaves the reserve, and at one step of the grid less it does not."""
    sizes = dict(noise_multiplier=1.0, dataset_size=800, max_batch_size=110)
    options = ja.CalibrationOptions(accountant="pld")
    found = ja.calibrate(ja.Poisson(20, 0.1), ja.BandedToeplitz.identity(), **sizes, **given, options=options)
    claim, step = found.claim, 1.01 ** (0.05 if "delta" in given else 0.05 * grid.DELTA_STEPS)
    assert claim.truncation_delta is not None and claim.truncation_delta > 0.1 * found.delta
    smaller = (found.epsilon / step, found.delta) if "delta" in given else (found.epsilon, found.delta / step)
    for (epsilon, delta), holds in (((found.epsilon, found.delta), True), (smaller, False)):
        reserve = truncation.reserve(ja.Poisson(20, 0.1), epsilon, 800, 110)
        bound = ACCOUNTANTS["pld"].delta(found.mechanism, epsilon)
        assert (bound <= delta - reserve) == holds, (bound, delta, reserve)


@pytest.mark.parametrize("given", [dict(delta=1e-2), dict(epsilon=0.5)], ids=str)
def test_too_little_noise_is_not_certified(given):
    """Whatever the target: no NaN, no infinite margin, no warning of NumPy."""
    options = ja.CalibrationOptions(accountant="analytic")
    for noise in (1e-9, 1e-3):
        with pytest.raises(
            ja.NotCertifiedError, match=r"too small for any (epsilon up to 100|delta up to 0.5)"
        ):
            ja.calibrate(SCHEME, STRATEGY, noise_multiplier=noise, **given, options=options)


def test_on_the_command_line(tmp_path, capsys):
    common = ["--scheme", "poisson", "--sampling-probability", "0.01", "--iterations", "200"]
    out = tmp_path / "plan.json"
    given = ["--noise-multiplier", "1", "--delta", "1e-5", "--out", str(out)]
    assert cli.run(["calibrate", *common, *given]) == 0
    plan = ja.Plan.load(out)
    assert plan.delta == 1e-5 and f"is ({plan.epsilon!r}, 1e-05)-differentially" in capsys.readouterr().out
    found = commands.values_of(capsys, "calibrate", *common, "--noise-multiplier", "1", "--epsilon", "2")
    assert found["claim"]["epsilon"] == 2.0
    small = "--noise-multiplier", "0.05", "--epsilon", "0.01"
    line = commands.refusal(capsys, "calibrate", *common, *small, code=1)
    assert "not certified: noise multiplier 0.05 is too small for any delta" in line
    sizes = ["--dataset-size", "80", "--batch-size", "10", "--iterations", "12"]
    line = commands.refusal(capsys, "calibrate", *sizes, "--noise-multiplier", "1", "--delta", "1e-5")
    assert "bands must be given here" in line
