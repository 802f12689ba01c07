"""Training by `jax.distributed` on two local processes: the bits of one, the keys of one, refusals."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.refusals import refused
from train import TrainOptions
from train.run import hosts

WAIT = 1800
"""Seconds, against processes that wait for one another for ever; a run takes 15 on quiet cores."""


def run(mode: str, out="none", processes=2) -> list[dict]:
    """The line of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.train.multihost"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    others = list(map(str, (processes, port, out, mode)))
    commands = [[*command, str(i), *others] for i in range(processes)]
    started = [subprocess.Popen(each, **options) for each in commands]
    try:
        found = [process.communicate(timeout=WAIT) for process in started]
    finally:
        for process in started:
            process.kill()
    lines = [[line for line in text.splitlines() if line.startswith("{")] for text, _ in found]
    assert mode.endswith("stop") or all(lines), [error[-2000:] for _, error in found]
    return [json.loads(each[-1]) for each in lines if each]


@pytest.mark.slow
def test_two_processes_train_the_bits_of_one(tmp_path):
    """Also after both ended hard in the middle; process 0 alone writes, and secrets keep their modes."""
    (one,) = run("whole", tmp_path / "one", processes=1)
    two = run("whole", tmp_path / "two")
    assert two == [one, one]
    run("stop", tmp_path / "part")
    assert not (tmp_path / "part/result.json").exists()
    assert run("whole", tmp_path / "part") == [one, one]
    for folder in ("one", "part"):
        assert (tmp_path / folder / "secret.json").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / folder / "checkpoints").stat().st_mode & 0o777 == 0o700
    for name in ("metrics.jsonl", "result.json"):
        assert (tmp_path / "part" / name).read_text() == (tmp_path / "one" / name).read_text()
    # Means of float32 over four devices are added up in another order by two processes.
    kept = [(tmp_path / folder / "private/metrics.jsonl").read_text() for folder in ("part", "one")]
    private = ([json.loads(line) for line in text.splitlines()] for text in kept)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *private)


@pytest.mark.slow
def test_parameters_that_two_processes_share_have_the_bits_of_whole_ones(tmp_path):
    """Each has a half of them; after a hard end both continue from the checkpoint of process 0."""
    (whole,) = run("whole", processes=1)
    assert run("cut", tmp_path / "cut") == [whole, whole]
    run("cut stop", tmp_path / "part")
    assert not (tmp_path / "part/result.json").exists()
    assert run("cut", tmp_path / "part") == [whole, whole]


@pytest.mark.slow
def test_keys_are_shared_and_fresh():
    """With keys of their own the parameters would differ, and noise could be averaged out."""
    a, b = run("fresh")
    assert a == b
    assert run("fresh")[0] != a


# Mode -> what each process says.
SAME = "{} must be the same on all processes, was different"
DIFFERENT = {each: 2 * [SAME.format(each)] for each in ("data", "model")}
DIFFERENT |= {
    "partial": 2 * ["mesh must have devices of all 2 processes, had those of "],
    "alone": [
        "options must be valid on all processes, were not on [1]",
        "mesh must be given with 2 processes: without it each would train by itself, with noise",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", DIFFERENT)
def test_what_differs_is_refused_by_all(mode, tmp_path):
    """Each process says why, and none waits for another."""
    found = run(mode, tmp_path / "run")
    assert len(found) == 2
    for one, message in zip(found, DIFFERENT[mode], strict=True):
        assert one["error"].startswith(message)
    assert not (tmp_path / "run").exists()


def test_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda own: own)
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
    both = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=i) for i in range(2)]))
    for options, batches, message in (
        (TrainOptions(), None, "mesh must be given with 2 processes: without it each would train"),
        (TrainOptions(mesh=mesh), None, r"mesh must have devices of all 2 processes, had those of \[0\]"),
        (SimpleNamespace(mesh=both), [1], "batches must not be given with several processes"),
    ):
        refused(message, hosts.check, options, batches)
    hosts.check(SimpleNamespace(mesh=both), None)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda own: np.append(own, True))
    message = r"options must be valid on all processes, were not on \[1\]"
    refused(message, hosts.check, SimpleNamespace(mesh=both), None)


def test_one_process_is_as_ever():
    hosts.check(TrainOptions(), None)
    keys = (1, 2, 3, 4), None
    assert hosts.keys(keys) is keys and hosts.first(lambda: keys) is keys
    assert hosts.local(keys) is keys and hosts.spread(None, keys, ()) is keys
    hosts.agree(anything=object())
