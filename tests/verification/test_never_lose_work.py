"""kill -9, a full disk, damaged checkpoints, a clock that jumps: resume exactly or say one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxacct import BandedToeplitz, Mechanism, Poisson, verify
from jaxacct.common import files
from jaxacct.common.files import Checkpoint
from tests.commands import exit_code

MECHANISM = Mechanism(Poisson(50, 0.05), BandedToeplitz((1.0,)), 1.3)
TARGET = dict(epsilon=1.0, delta=2e-3, proposal="plain", max_samples=60_000)
# By the programs of MECHANISM: one that takes long enough to be killed, and a short one.
PROBLEM = (
    "calibrate --scheme poisson --iterations 50 --sampling-probability 0.05 --bands 1 --strategy square-root "
    "--epsilon 1 --proposal plain"
).split()
COMMAND = [*PROBLEM, *"--delta 4e-4 --noise-multiplier 1.6".split()]


def lasting(path: Path) -> dict:
    """A plan file without what differs between runs of any kind: times."""
    data = json.loads(path.read_text())
    data["provenance"].pop("created")
    return data


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 4])
def test_killed_again_and_again_the_evidence_is_the_same(times, tmp_path):
    """SIGKILL after each new checkpoint, up to four times; the twin starts from a copy of the first.

    In CI `test_a_full_disk_keeps_what_was_there` stops a run that went on, without a process, and
    `test_cli::test_interrupt_and_resume` one in a process.
    """
    part, whole = tmp_path / "part", tmp_path / "whole"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}

    def start(folder, out):
        command = [sys.executable, "-m", "jaxacct", *COMMAND, "--checkpoint-dir", folder, "--out", out]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def written() -> str:
        """Content of the verification's checkpoints, the key aside."""
        if not part.exists():
            return ""
        return "".join(p.read_text() for p in sorted(part.glob("remove-*.json")))

    kills = 0
    for _ in range(times):
        before, process = written(), start(part, tmp_path / "part.json")
        deadline = time.monotonic() + 120
        while written() == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if not whole.exists():
            shutil.copytree(part, whole)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills, "every run ended before it could be killed: make it longer"
    for folder, out in ((part, "part.json"), (whole, "whole.json")):
        # In this process, where the other tests of the file have what was compiled.
        assert exit_code(*COMMAND, "--checkpoint-dir", folder, "--out", tmp_path / out) == 0
    assert lasting(tmp_path / "part.json") == lasting(tmp_path / "whole.json")


def stop_after(number: int):
    calls = []

    def progress(what, done, expected):
        calls.append(what)
        if len(calls) == number:
            raise KeyboardInterrupt

    return progress


def interrupted(folder) -> None:
    with Checkpoint(folder) as checkpoint, pytest.raises(KeyboardInterrupt):
        verify(MECHANISM, **TARGET, checkpoint=checkpoint, progress=stop_after(1), key=jax.random.key(7))


def resumed(folder):
    with Checkpoint(folder) as checkpoint:
        found = verify(MECHANISM, **TARGET, checkpoint=checkpoint)
    return found.remove, found.add


@pytest.fixture(scope="module")
def uninterrupted():
    found = verify(MECHANISM, **TARGET, key=jax.random.key(7))
    return found.remove, found.add


def test_a_full_disk_keeps_what_was_there(uninterrupted, tmp_path, monkeypatch):
    interrupted(tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            resumed(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json")} == kept
    assert not list(tmp_path.glob("*.tmp"))
    assert resumed(tmp_path) == uninterrupted


def test_a_clock_that_jumps_changes_nothing(uninterrupted, tmp_path, monkeypatch):
    interrupted(tmp_path)
    monkeypatch.setattr(time, "time", lambda: -1e9)
    assert resumed(tmp_path) == uninterrupted
