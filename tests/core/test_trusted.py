"""The trusted core stays small and listed: what loading and verifying the README's plan enters."""

import json
import subprocess
import sys

import pytest

from tests.trusted import LIST, MAX_FILES, MAX_LINES, PLAN, ROOT, page

PROGRAM = """if True:
    import json, sys
    from pathlib import Path
    from tests.trusted import entered
    found = entered(Path(sys.argv[1]))
    loaded = [name for name in sys.modules if name.startswith("jaxacct.")]
    entered = {name: len(lines) for name, lines in found.items()}
    print("\\n" + json.dumps({"entered": entered, "loaded": loaded}))
"""


def trace(plan) -> dict:
    """What a fresh interpreter enters and imports for a stored plan."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(plan)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def traced() -> dict:
    return trace(PLAN)


def assert_small(entered: dict):
    assert len(entered) <= MAX_FILES, sorted(entered)
    assert 800 < sum(entered.values()) <= MAX_LINES


def test_the_trusted_core_is_small_and_listed(traced):
    assert_small(traced["entered"])
    assert LIST.read_text() == page(traced["entered"]), "python -m tests.trusted"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas", "plain"])
def test_the_core_of_other_families_is_small(name):
    assert_small(trace(PLAN.parent / "plans" / f"{name}.json")["entered"])


def test_the_traced_plan_is_that_of_the_readmes_command():
    """The same job, and the sampler and matrix that it selects without further options."""
    stored = json.loads(PLAN.read_text())
    command = (ROOT / "README.md").read_text().partition("calibrate --out plan.json")[2].partition("```")[0]
    given = dict(zip(command.split()[1:-1:2], command.split()[2::2], strict=False))
    assert all(
        float(given["--" + name.replace("_", "-")]) == stored["choice"][name]
        for name in ("dataset_size", "batch_size", "iterations", "epsilon", "delta")
    )
    assert stored["choice"]["given"] == [] and stored["claim"]["scheme"]["name"] == stored["choice"]["scheme"]
    shown = (ROOT / "jaxacct/guides/plans.md").read_text()
    assert (
        f"selected: {stored['choice']['scheme']}, separation {stored['choice']['min_separation']}," in shown
    )
    assert str(stored["claim"]["noise_multiplier"]) in shown


def test_no_family_is_imported_that_the_plan_does_not_use(traced):
    """Nor search, recommendation, reports, or text that people read."""
    used = {"base", "registry", "threshold", "families", "families.replicas"}
    used |= {"families.overlaps", "families.pair_weights"}
    families = {name.removeprefix("jaxacct.proposals.") for name in traced["loaded"] if ".proposals." in name}
    assert families == used
    outside = ("calibration", "recommendation", "cli", "report", "estimates", "core.text")
    assert not [name for name in traced["loaded"] if name.removeprefix("jaxacct.").startswith(outside)]
