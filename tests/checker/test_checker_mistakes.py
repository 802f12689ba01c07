"""Mistakes planted into our implementation that certify a plan wrongly: the checker sees each.

Each is planted into a copy of the package, which certifies in a process of its own a mechanism whose
divergence is above what is claimed; our code without the mistake rejects it. Three are planted here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import jaxacct
from jaxacct import checker
from jaxacct.core import verify
from jaxacct.proposals import registry, threshold
from jaxacct.proposals.families import plain_bounded
from jaxacct.schemes.replicas import b_min_sep

PACKAGE = Path(jaxacct.__file__).parent
B_MIN_SEP, CYCLIC, BINS = (f"schemes/replicas/{name}.py" for name in ("b_min_sep", "cyclic", "balls_in_bins"))
REPLICAS, HALF_SPACE, STATIONARY = (
    "proposals/families/replicas.py",
    "proposals/families/half_space.py",
    "strategies/stationary.py",
)
THRESHOLD, BOUNDS, LOSS = "proposals/threshold.py", "statistics/bounds.py", "likelihood/loss.py"

# (scheme, bands, sigma, epsilon, claimed delta, options); the divergence is 1.25 to 1.5 times the delta.
SETTINGS = {
    "b-min-sep": ("BMinSep(40, 4, 0.1)", "BandedToeplitz.square_root(4)", 0.9, 4.0, 1.0e-3, "{}"),
    "plain": (
        "BMinSep(40, 4, 0.1)",
        "BandedToeplitz.square_root(4)",
        0.9,
        4.0,
        1.0e-3,
        "{'proposal': 'plain'}",
    ),
    "cyclic": ("CyclicPoisson(40, 4, 0.3)", "BandedToeplitz.square_root(4)", 1.0, 4.0, 4.5e-4, "{}"),
    "bins": ("BallsInBins(40, 10)", "BandedToeplitz.square_root(4)", 1.5, 3.0, 3.2e-4, "{}"),
    "finite": (
        "BallsInBins(12, 4)",
        "ending(BandedToeplitz.square_root(4), BallsInBins(12, 4))",
        1.2,
        3.0,
        8e-3,
        "{}",
    ),
    "unamplified": ("BMinSep(40, 4, 0.1)", "BandedToeplitz.square_root(4)", 1.6, 4.0, 1e-2, "'accountant'"),
    # True, but the evidence of the add direction is not.
    "add": ("BMinSep(40, 4, 0.1)", "BandedToeplitz.square_root(4)", 1.6, 1.0, 1.9e-2, "{}"),
}


class Mistake(NamedTuple):
    path: str
    before: str
    after: str
    setting: str


MISTAKES = [
    Mistake(REPLICAS, "m * math.log((m - 1) / m)", "2 * m * math.log((m - 1) / m)", "b-min-sep"),
    Mistake(REPLICAS, "log_normalizer - math.log(m - 1)", "math.log(2 / 3) - math.log(m - 1)", "b-min-sep"),
    Mistake(REPLICAS, "+ (1 - m) * epsilon", "+ (1 - m) * (epsilon + 1)", "b-min-sep"),
    Mistake(
        B_MIN_SEP, "log_z = float(np.log(total)) + log_rest", "log_z = float(np.log(total)) / 2", "b-min-sep"
    ),
    Mistake(B_MIN_SEP, "lifted = p * np.exp(log_lift(mechanism, m))", "lifted = 0.5 * p", "b-min-sep"),
    Mistake(
        CYCLIC,
        "remaining = chain_weights(edges, 2 *",
        "remaining = chain_weights(edges * 0 + 1, 2 *",
        "cyclic",
    ),
    Mistake(BINS, "return math.log(total) - m", "return math.log(total) - (m + 0.5)", "bins"),
    Mistake(
        THRESHOLD, "math.exp(min(100.0, math.log(left)", "2 * math.exp(min(100.0, math.log(left)", "finite"
    ),
    Mistake(BOUNDS, "_log_mixture((theta - values) /", "_log_mixture((2 * theta - values) /", "b-min-sep"),
    Mistake(BOUNDS, "index = np.log2(positive)", "index = np.log2(positive / 2)", "b-min-sep"),
    Mistake(
        LOSS,
        "lowered = lowered_norms(scheme, strategy, direction,",
        "lowered = 1.2 * lowered_norms(scheme, strategy, direction,",
        "plain",
    ),
    Mistake("kernels/recurrence.py", "axis=0) - float(np.log(cycle_length))", "axis=0) - 2.0", "cyclic"),
    Mistake(STATIONARY, "* np.sqrt(length / 2)", "* np.sqrt(length / 3)", "plain"),
    Mistake(STATIONARY, "length) ** 2, real.dtype)", "length) ** 2 * 0.8, real.dtype)", "plain"),
    Mistake(
        THRESHOLD,
        "self.epsilon - margin, profile",
        "self.epsilon + 0.4, profile",
        "bins",
    ),
    Mistake(
        "schemes/b_min_sep.py",
        "jnp.floor(exponential / number(-log_q))",
        "jnp.floor(2 * exponential / number(-log_q))",
        "plain",
    ),
    Mistake(
        "accountants/unamplified.py",
        "return mechanism.gradient_distance * math.sqrt(square)",
        "return mechanism.gradient_distance * math.sqrt(square) / 2",
        "unamplified",
    ),
    Mistake(
        "proposals/families/plain_bounded.py",
        "return epsilon >= -log_none + 1e-12",
        "return epsilon >= -log_none - 4 + 1e-12",
        "add",
    ),
    Mistake(
        HALF_SPACE,
        "log_scale += log_remainder_scale(mechanism, epsilon)",
        "log_scale += log_remainder_scale(mechanism, epsilon) - 3.0",
        "add",
    ),
    Mistake(
        "schemes/b_min_sep.py",
        "return float(logsumexp(self.start_log_weights() + times_log(chances, log_q)))",
        "return float(logsumexp(self.start_log_weights() + times_log(chances / 20, log_q)))",
        "add",
    ),
]

SCRIPT = """
import json, sys
import jax
from jaxacct import *
from jaxacct.strategies import ending
from jaxacct.core.verify import verify
mechanism = Mechanism({scheme}, {strategy}, {sigma})
if {options} == "accountant":
    plan = calibrate(mechanism.scheme, mechanism.strategy, epsilon={epsilon}, delta={delta},
                     noise_multiplier={sigma}, accountant="unamplified")
else:
    found = verify(mechanism, {epsilon}, {delta}, max_samples=200_000, key=jax.random.key(1), **{options})
    if not found.certified:
        sys.exit(7)
    plan = Plan(found.claim, found.evidence)
json.dump(plan.to_json(), open("plan.json", "w"))
"""


def certified_by(folder: Path, package: Path, setting: str) -> bool:
    """Whether that copy of the package certifies the setting, and writes folder/plan.json."""
    names = ("scheme", "strategy", "sigma", "epsilon", "delta", "options")
    script = SCRIPT.format(**dict(zip(names, SETTINGS[setting], strict=True)))
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=folder, env=environment, capture_output=True
    )
    assert ended.returncode in (0, 7) or b"NotCertifiedError" in ended.stderr, ended.stderr.decode()[-2000:]
    return ended.returncode == 0


def test_the_mistakes_are_twenty_and_can_be_planted():
    assert len(MISTAKES) == 20
    for mistake in MISTAKES:
        assert (PACKAGE / mistake.path).read_text().count(mistake.before) == 1, mistake


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_mistake_they_are_rejected(setting, tmp_path):
    accepted = certified_by(tmp_path, PACKAGE, setting)
    assert accepted == (setting == "add")
    if accepted:
        assert checker.check_file(tmp_path / "plan.json")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=[f"{i}-{m.setting}" for i, m in enumerate(MISTAKES)])
def test_the_checker_sees_every_planted_mistake(mistake, tmp_path):
    package = tmp_path / "copy" / "jaxacct"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / mistake.path
    path.write_text(path.read_text().replace(mistake.before, mistake.after))
    assert certified_by(tmp_path, package, mistake.setting)
    code, found = checker.check_file(tmp_path / "plan.json")
    assert code == 1 and found["verdict"] == "not certified", found
    print(found)


# Three of them, or their like, in this process.


def _less_normalizer(monkeypatch):
    honest = b_min_sep.log_normalizer
    monkeypatch.setattr(b_min_sep, "log_normalizer", lambda mechanism, m: honest(mechanism, m) - 1.0)


def _twice_the_threshold(monkeypatch):
    honest = threshold.threshold
    monkeypatch.setattr(threshold, "threshold", lambda proposal, delta_v: 4 * honest(proposal, delta_v))


def _zero_too_early(monkeypatch):
    monkeypatch.setattr(plain_bounded, "add_is_zero", lambda mechanism, epsilon: True)


@pytest.mark.parametrize(
    "plant, delta", [(_less_normalizer, 2e-3), (_twice_the_threshold, 2e-3), (_zero_too_early, 0.02)]
)
def test_the_checker_sees_a_mistake(plant, delta, monkeypatch):
    """BMinSep(12, 3, .3), sigma 2.4, epsilon 1 has divergences of .0027 (remove) and .0009 (add)."""
    scheme, strategy = jaxacct.BMinSep(12, 3, 0.3), jaxacct.BandedToeplitz.square_root(3)
    mechanism = jaxacct.Mechanism(scheme, strategy, 2.4)
    assert delta > 0.01 or not verify.verify(mechanism, 1.0, delta, max_samples=20_000).certified
    plant(monkeypatch)
    registry.build.cache_clear()
    verdict = verify.verify(mechanism, 1.0, delta, max_samples=100_000)
    assert verdict.certified
    plan = jaxacct.Plan(verdict.claim, verdict.evidence).to_json()
    registry.build.cache_clear()
    found = checker.check(plan, np.random.default_rng(1))
    assert found["verdict"] == "not certified" and found["differences"], found
