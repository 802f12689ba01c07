"""The trusted core stays small and listed: what loading and verifying the README's plan enters."""

import json
import subprocess
import sys

import pytest

from tests.trusted import LIST, MAX_FILES, MAX_LINES, ROOT, page

PROGRAM = """if True:
    import json, sys
    from tests.trusted import entered
    found = entered()
    loaded = [name for name in sys.modules if name.startswith("jaxacct.")]
    entered = {name: len(lines) for name, lines in found.items()}
    print("\\n" + json.dumps({"entered": entered, "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def traced() -> dict:
    """What a fresh interpreter enters and imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_trusted_core_is_small(traced):
    entered = traced["entered"]
    assert len(entered) <= MAX_FILES, sorted(entered)
    assert 800 < sum(entered.values()) <= MAX_LINES


def test_the_list_is_what_is_entered(traced):
    assert LIST.read_text() == page(traced["entered"]), "python -m tests.trusted"


def test_no_family_is_imported_that_the_plan_does_not_use(traced):
    """Nor search, recommendation, reports, or text that people read."""
    used = {"base", "registry", "threshold", "families"}
    used |= {f"families.{name}" for name in ("plain_bounded", "replicas", "overlaps")}
    families = {name.removeprefix("jaxacct.proposals.") for name in traced["loaded"] if ".proposals." in name}
    assert families == used
    outside = ("calibration", "recommendation", "cli", "report", "estimates", "core.text")
    assert not [name for name in traced["loaded"] if name.removeprefix("jaxacct.").startswith(outside)]
