"""Blocks spread over all local devices: the same evidence, to the last count, as on one."""

import contextlib
import io
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, jax
from jaxacct import BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Poisson, verify
from jaxacct.core.evidence import evidence_to_json
print(len(jax.local_devices()))
SETTINGS = (
    (Poisson(40, 0.05), 1, 1.0), (BMinSep(60, 4, 0.02), 4, 1.2), (CyclicPoisson(60, 4, 0.1), 4, 1.2)
)
for scheme, bands, sigma in SETTINGS[: int(sys.argv[1])]:
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    for proposal in ("plain", None)[: int(sys.argv[1])]:
        verdict = verify(mechanism, 1.0, 5e-3, key=jax.random.key(4), proposal=proposal, max_samples=20_000)
        assert verdict.remove.num_samples
        print(json.dumps(evidence_to_json(verdict.evidence), sort_keys=True))
"""


def evidence_here(settings: int) -> list[str]:
    """Of this process, which has one device."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(SCRIPT.replace("int(sys.argv[1])", str(settings)), {})
    assert out.getvalue().startswith("1\n")
    return out.getvalue().splitlines()[1:]


def with_devices(number: int) -> dict[str, str]:
    """The environment of a process with that many."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 4, 8])
def test_more_devices_change_nothing(devices):
    """The replicas' proposals of three schemes, and plain draws; these alone, of one scheme, in CI, below."""
    command = [sys.executable, "-c", SCRIPT, "3"]
    done = subprocess.run(command, env=with_devices(devices), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [str(devices), *evidence_here(3)]


def test_four_devices_change_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "1"], env=with_devices(4), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["4", *evidence_here(1)]
