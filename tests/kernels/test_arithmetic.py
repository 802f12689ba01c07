"""Compilers whose sums and comparisons are not those of the rounding margins are refused."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxacct.kernels import programs
from tests.refusals import refused
from tests.stored_plans import whole

FLAGS = {
    "sums": "--xla_cpu_enable_fast_math=true",
    "not finite": "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false "
    "--xla_cpu_fast_math_honor_infs=false",
}
CALLS = """
import sys
import jaxacct
import numpy as np
from jaxacct.core.plan import Plan
from jaxacct.verification.replay import replay
from train.training import fit

plan = Plan.load(sys.argv[1])
mechanism = plan.mechanism
pair = mechanism.scheme, mechanism.strategy
target = dict(epsilon=plan.epsilon, delta=plan.delta)
calls = {
    "verify": lambda: jaxacct.verify(mechanism, *target.values()),
    "Plan.verify": plan.verify,
    "replay": lambda: replay(plan),
    "calibrate": lambda: jaxacct.calibrate(*pair, **target),
    "calibrate at a noise": lambda: jaxacct.calibrate(*pair, **target, noise_multiplier=1.0),
    "smallest epsilon": lambda: jaxacct.calibrate(*pair, delta=plan.delta, noise_multiplier=1.0),
    "estimate_delta": lambda: jaxacct.estimate_delta(mechanism, plan.epsilon, num_samples=10),
    "estimate_epsilon": lambda: jaxacct.estimate_epsilon(mechanism, plan.delta, num_samples=10),
    "privacy_profile": lambda: jaxacct.privacy_profile(mechanism, [1.0], num_samples=10),
    "fit": lambda: fit(plan, {"w": np.zeros(1)}, lambda params, row: 0.0, np.zeros(4)),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        assert "XLA_FLAGS must not let the compiler reorder sums" in str(error), (name, error)
    else:
        raise SystemExit(f"{name} went on")
"""


@pytest.mark.parametrize("name", ["sums", pytest.param("not finite", marks=pytest.mark.slow)])
def test_nothing_is_certified_with_fast_math(name, tmp_path):
    """In a process of its own: XLA reads its flags once."""
    plan = tmp_path / "plan.json"
    whole("plain").save(plan)
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(plan)],
        env=os.environ | {"XLA_FLAGS": FLAGS[name], "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


WRONG = {
    "sums are reordered": lambda found: (np.zeros_like(found[0]), *found[1:]),
    "one remainder in 32 is lost": lambda found: (found[0] * (np.arange(32) < 31), *found[1:]),
    "the error of a sum is 0": lambda found: (found[0], np.zeros_like(found[1]), *found[2:]),
    "NaN is a number": lambda found: (*found[:2], np.zeros_like(found[2]), *found[3:]),
    "infinity is finite": lambda found: (*found[:3], np.ones_like(found[3]), *found[4:]),
    "NaN equals itself": lambda found: (*found[:4], np.zeros_like(found[4]), *found[5:]),
    "NaN is above 0": lambda found: (*found[:5], found[5] | found[4], *found[6:]),
    "a choice takes NaN for a number": lambda found: (*found[:6], np.ones_like(found[6]), *found[7:]),
    "a maximum drops NaN": lambda found: (*found[:7], np.zeros_like(found[7]), *found[8:]),
    "infinity minus infinity is a number": lambda found: (*found[:8], np.zeros_like(found[8]), found[9]),
    "the exponential of NaN is a number": lambda found: (*found[:9], np.zeros_like(found[9])),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_result_is_seen(name, monkeypatch):
    right = programs._compiled_arithmetic

    def wrong(*numbers):
        return WRONG[name]([np.asarray(each) for each in right(*numbers)])

    programs.check_arithmetic.cache_clear()
    programs.check_arithmetic()
    monkeypatch.setattr(programs, "_compiled_arithmetic", wrong)
    programs.check_arithmetic.cache_clear()
    try:
        refused("XLA_FLAGS must not let the compiler reorder sums", programs.check_arithmetic)
    finally:
        programs.check_arithmetic.cache_clear()


@pytest.mark.parametrize("row", [0, 32_767, 32_768])
def test_products_of_many_rows_are_compared_with_numpy(row, monkeypatch):
    """One wrong row is refused (jaxlib 0.10.2 has the last one wrong, proofs/errata.md)."""
    programs.check_arithmetic.__wrapped__()
    right = programs._compiled_squares

    def wrong(*given):
        return right(*given).at[row].add(1.0)

    monkeypatch.setattr(programs, "_compiled_squares", wrong)
    refused("jaxlib must compute sums of products of 32769 rows right", programs.check_arithmetic.__wrapped__)
