"""Blocks spread over all local devices: the same evidence, to the last count, as on one."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys

import jax
import pytest

from jaxacct import BandedToeplitz, Claim, Mechanism, Plan, Poisson, Target
from jaxacct.core.evidence import Bound, evidence_to_json
from jaxacct.verification import shards

SCRIPT = """
import json, sys, jax
from jaxacct import BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Poisson, verify
from jaxacct.core.evidence import evidence_to_json
print(len(jax.local_devices()))
SETTINGS = (
    (BMinSep(60, 4, 0.02), 4, 1.2), (CyclicPoisson(60, 4, 0.1), 4, 1.2), (Poisson(40, 0.05), 1, 1.0)
)
for scheme, bands, sigma in SETTINGS[: int(sys.argv[1])]:
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    for proposal in (None, "plain")[: int(sys.argv[1])]:
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
    """The replicas' proposals of three schemes, and plain draws; of one in CI, below."""
    command = [sys.executable, "-c", SCRIPT, "3"]
    done = subprocess.run(command, env=with_devices(devices), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [str(devices), *evidence_here(3)]


HOST = """
import sys, json, jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
from jaxacct import BandedToeplitz, Claim, Mechanism, Plan, Poisson, Target
from jaxacct.core.evidence import Bound, evidence_to_json
from jaxacct.verification import shards
mechanism = Mechanism(Poisson(6, 0.3), BandedToeplitz.identity(), 2.0)
plan = Plan(Claim(mechanism, Target.at(1.0, 5e-3), None, None), Bound("unamplified"))
merged, verdict = shards.verify_distributed(plan, 10_000, jax.random.key(3))
assert jax.process_count() == 2 and merged is not None and merged.certified
print(json.dumps(evidence_to_json(verdict.evidence), sort_keys=True))
"""


def test_two_processes_over_loopback():
    """Of four devices each, of which the first also draws alone what one device draws.

    Whether the plan's own bound holds does not matter: only what is drawn and merged counts here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOST + more, "1", port, str(index)],
            env=with_devices(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, more in enumerate((SCRIPT, ""))
    ]
    done = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), done[0][1][-1500:] + done[1][1][-1500:]
    # Gloo says which of them is which, first of all.
    *_, first, devices, drawn = done[0][0].splitlines()
    second = done[1][0].splitlines()[-1]
    mechanism = Mechanism(Poisson(6, 0.3), BandedToeplitz.identity(), 2.0)
    plan = Plan(Claim(mechanism, Target.at(1.0, 5e-3), None, None), Bound("unamplified"))
    _, alone = shards.merge(plan, [shards.draw_part(plan, jax.random.key(3), 0, 1, 10_000)])
    assert alone.remove.num_samples
    assert first == second == json.dumps(evidence_to_json(alone.evidence), sort_keys=True)
    assert (devices, [drawn]) == ("4", evidence_here(1))
