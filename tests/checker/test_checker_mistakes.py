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
from jaxacct.likelihood import loss as losses
from jaxacct.proposals import registry, threshold
from jaxacct.schemes.replicas import table

PACKAGE = Path(jaxacct.__file__).parent
REPLICAS, STATIONARY = "proposals/families/replicas.py", "strategies/stationary.py"
TABLES, WEIGHTS = "schemes/replicas/table.py", "schemes/replicas/table_weights.py"
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
    "balanced": ("BalancedMinSep(20, 3, 2.5)", "BandedToeplitz.square_root(3)", 1.6, 2.0, 1.05e-4, "{}"),
    "epochwise": ("EpochwiseAllocation(20, 6, 3)", "BandedToeplitz.square_root(3)", 1.1, 4.0, 3.4e-4, "{}"),
    "replace-one": (
        "BMinSep(12, 3, 0.3)",
        "BandedToeplitz.square_root(3)",
        "2.4, 'replace-one'",
        2.0,
        3.8e-3,
        "{}",
    ),
}


class Mistake(NamedTuple):
    path: str
    before: str
    after: str
    setting: str


MISTAKES = [
    Mistake(
        REPLICAS, "(m - 1) / m) + (1 - m) * epsilon", "(m - 1) / m) * 2 + (1 - m) * epsilon", "b-min-sep"
    ),
    Mistake(REPLICAS, "log_normalizer - math.log(m - 1)", "math.log(2 / 3) - math.log(m - 1)", "b-min-sep"),
    Mistake(REPLICAS, "/ m) + (1 - m) * epsilon", "/ m) + (1 - m) * (epsilon + 1)", "b-min-sep"),
    Mistake(TABLES, "return math.log(total) if 0 <", "return math.log(total) / 2 if 0 <", "b-min-sep"),
    Mistake(WEIGHTS, "lift = math.exp(log_lift(mechanism))", "lift = 0.5", "b-min-sep"),
    Mistake(
        WEIGHTS,
        "scheme.table, np.exp(log_attractions(mechanism))",
        "scheme.table, np.exp(0 * log_attractions(mechanism))",
        "cyclic",
    ),
    Mistake(TABLES, "return math.log(total) if 0 <", "return math.log(total) - 0.5 if 0 <", "bins"),
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
        "kernels/table.py",
        "jnp.where(step < n, step + lockout[at], n)",
        "jnp.where(step < n, step + 2 * lockout[at], n)",
        "plain",
    ),
    Mistake(
        "accountants/unamplified.py",
        "return mechanism.gradient_distance * math.sqrt(square)",
        "return mechanism.gradient_distance * math.sqrt(square) / 2",
        "unamplified",
    ),
    Mistake(TABLES, "return math.log(total) if 0 <", "return math.log(total) - 1 if 0 <", "balanced"),
    Mistake(TABLES, "return math.log(total) if 0 <", "return math.log(total) - 1 if 0 <", "epochwise"),
    Mistake(
        LOSS,
        "strategy, -scores_, sigma, Direction.ADD",
        "strategy, scores_ * 0, sigma, Direction.ADD",
        "replace-one",
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
                     noise_multiplier=mechanism.noise_multiplier,
                     options=CalibrationOptions(accountant="unamplified"))
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


def test_the_mistakes_can_be_planted():
    assert len(MISTAKES) == 19
    for mistake in MISTAKES:
        assert (PACKAGE / mistake.path).read_text().count(mistake.before) == 1, mistake


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_mistake_they_are_rejected(setting, tmp_path):
    assert not certified_by(tmp_path, PACKAGE, setting)


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


# Some of them, or their like, in this process.


def _less_normalizer(module):
    def plant(monkeypatch):
        honest = module.log_normalizer
        monkeypatch.setattr(module, "log_normalizer", lambda mechanism: honest(mechanism) - 1.0)

    return plant


def _twice_the_threshold(monkeypatch):
    honest = threshold.threshold
    monkeypatch.setattr(threshold, "threshold", lambda proposal, delta_v: 4 * honest(proposal, delta_v))


def _nothing_in_its_place(monkeypatch):
    """Replace-one as zero-out: the other example's outputs are those without any."""

    def without(*arguments):
        loss = losses.loss_of_scores(*arguments)
        return loss, loss

    monkeypatch.setattr(losses, "losses_of_mirrored", without)
    monkeypatch.setattr(losses, "loss_of_mirrored", losses.loss_of_scores)


def _row(name, plant, scheme, sigma, epsilon, delta, adjacency="zero-out", marks=()):
    return pytest.param(plant, scheme, sigma, epsilon, delta, adjacency, id=name, marks=marks)


SLOW = pytest.mark.slow
FEW, BALANCED_20 = jaxacct.BMinSep(12, 3, 0.3), jaxacct.BalancedMinSep(20, 3, 2.5)
EPOCHS_20 = jaxacct.EpochwiseAllocation(20, 6, 3)


@pytest.mark.parametrize(
    "plant, scheme, sigma, epsilon, delta, adjacency",
    [
        _row("threshold", _twice_the_threshold, FEW, 2.4, 1.0, 2e-3, marks=SLOW),
        _row("normalizer", _less_normalizer(table), FEW, 2.4, 1.0, 2e-3, marks=SLOW),
        _row("balanced", _less_normalizer(table), BALANCED_20, 1.6, 2.0, 1.05e-4, marks=SLOW),
        _row("epochwise", _less_normalizer(table), EPOCHS_20, 1.1, 4.0, 3.4e-4),
        _row("replace-one", _nothing_in_its_place, FEW, 2.4, 2.0, 3.8e-3, "replace-one"),
    ],
)
def test_the_checker_sees_a_mistake(plant, scheme, sigma, epsilon, delta, adjacency, monkeypatch):
    """The true divergences are 1.25 to 1.5 times delta."""
    mechanism = jaxacct.Mechanism(scheme, jaxacct.BandedToeplitz.square_root(3), sigma, adjacency)
    plant(monkeypatch)
    registry.build.cache_clear()
    verdict = verify.verify(mechanism, epsilon, delta, max_samples=200_000)
    assert verdict.certified
    plan = jaxacct.Plan(verdict.claim, verdict.evidence).to_json()
    registry.build.cache_clear()
    found = checker.check(plan, np.random.default_rng(1))
    assert found["verdict"] == "not certified"
    assert found["remove"]["verdict"] == "refuted", found
