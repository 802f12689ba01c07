"""Samples that the workers of an executor draw: the evidence of one machine, and what is refused."""

import contextlib
import dataclasses
import io
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, CalibrationOptions, Mechanism, Plan, calibrate, verify
from jaxacct.common.files import Checkpoint
from jaxacct.core import blocks
from jaxacct.core.blocks import MAX_AHEAD, Fleet, draw_piece
from jaxacct.core.check import resolve
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import evidence_to_json
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.kernels import randomness
from jaxacct.proposals.base import direction_key
from jaxacct.statistics.hockey_stick import Direction
from tests.oracles.settings import slow
from tests.refusals import refused

KEY = jax.random.key(11)
MECHANISM = Mechanism(BMinSep(120, 4, 0.02), BandedToeplitz.square_root(4), 1.4)
CLAIM = Claim(MECHANISM, ClaimedTarget.at(1.0, 5e-4), None, None)
SAMPLES = 24_600  # no multiple of a block, nor of a piece


def evidence_by(executor, rule="anytime", **options):
    """Two replicas."""
    verdict = verify_claim(CLAIM, Stop(rule, SAMPLES), key=KEY, executor=executor, **options)
    assert verdict.remove.num_samples
    return verdict.evidence


@pytest.fixture(scope="module")
def alone():
    return {rule: evidence_by(None, rule) for rule in ("anytime", "fixed")}


class AtOnce(Executor):
    """Runs a function when it is asked for the result; `change` alters what a worker returns."""

    def __init__(self, change=lambda counts: counts, changed=lambda piece: piece):
        self.change, self.changed, self.pieces, self.cancelled = change, changed, [], 0

    def submit(self, function, piece):
        self.pieces.append(piece)
        executor, future = self, Future()

        class Late(Future):
            def result(self):
                return executor.change(function(pickle.loads(pickle.dumps(executor.changed(piece)))))

            def cancel(self):
                executor.cancelled += 1
                return future.cancel()

        return Late()


@pytest.mark.parametrize(
    "kind, rule", [("threads", "anytime"), ("processes", "anytime"), slow("threads", "fixed")]
)
def test_workers_make_the_evidence_of_one_machine(kind, rule, alone):
    spawned = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(3) if kind == "threads" else ProcessPoolExecutor(1, mp_context=spawned)
    with pool as executor:
        assert evidence_by(executor, rule) == alone[rule]
    assert alone["fixed"].remove.num_samples == -(-SAMPLES // 128) * 128


def test_calibrate_by_an_executor_gives_the_same_plan():
    target, executor, plans = dict(epsilon=1.0, delta=5e-3, noise_multiplier=1.4, key=KEY), AtOnce(), []
    for e in (None, executor):
        options = CalibrationOptions(executor=e, proposal="plain")
        plans.append(calibrate(MECHANISM.scheme, MECHANISM.strategy, **target, options=options))
    assert plans[0].evidence == plans[1].evidence and executor.pieces
    loaded = Plan.from_json(plans[1].to_json())
    assert loaded.certified
    verdicts = [loaded.verify(key=KEY, executor=e) for e in (None, executor)]
    assert verdicts[0].evidence == verdicts[1].evidence


def test_an_interrupted_verification_resumes_with_another_executor(alone, tmp_path):
    def stop(what, done, expected):
        if done >= 6000:
            raise KeyboardInterrupt

    with Checkpoint(tmp_path) as checkpoint, pytest.raises(KeyboardInterrupt):
        evidence_by(AtOnce(), "fixed", checkpoint=checkpoint, progress=stop)
    executor = AtOnce()
    with Checkpoint(tmp_path) as checkpoint:
        assert evidence_by(executor, "fixed", checkpoint=checkpoint) == alone["fixed"]
    assert executor.pieces[0].first == 48


def test_pieces_that_turn_out_to_be_needless_are_cancelled():
    executor = AtOnce()
    verdict = verify_claim(CLAIM, Stop("anytime", 10**7), key=KEY, executor=executor)
    drawn = verdict.num_samples // (blocks.PIECE * randomness.BLOCK_SIZE)
    assert len(executor.pieces) == drawn + executor.cancelled
    assert 0 < executor.cancelled <= 2 * MAX_AHEAD


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("a draw is lost", lambda counts: (moved(counts[0], {0: -1}), counts[1])),
        ("a draw too many", lambda counts: (counts[0], moved(counts[1], {0: 1}))),
        ("a hit is offset", lambda counts: (moved(counts[0], {0: 1, -1: -1}), counts[1])),
        ("another piece", lambda counts: tuple(part // 2 for part in counts)),
        ("other bins", lambda counts: (counts[0][:-1], counts[1])),
        ("floats", lambda counts: tuple(part.astype(float) for part in counts)),
        ("lists", lambda counts: tuple(part.tolist() for part in counts)),
    ],
)
def test_what_no_worker_can_have_drawn_is_refused(kind, change):
    refused(r"executor must return all 2048 draws of blocks 0\.\.15", lambda: evidence_by(AtOnce(change)))


def moved(counts, by):
    found = counts.copy()
    for index, number in by.items():
        found[index] += number
    return found


def test_workers_of_another_version_or_distribution_are_refused():
    def with_fields(**fields):
        return AtOnce(changed=lambda piece: dataclasses.replace(piece, **fields))

    refused(r"executor must have workers with jaxacct 0\.0, one has", evidence_by, with_fields(version="0.0"))
    other = {"proposal": "replicas:2", "log_scale": 0.5}
    with pytest.raises(ValueError, match=r"executor must have workers like this machine: .*log_scale"):
        evidence_by(with_fields(distribution=other))


def test_stretches_that_are_not_consecutive_are_refused():
    of = resolve(CLAIM, Direction.REMOVE, blocks.ProposalSpec.parse("plain"))
    stream = direction_key(KEY, Direction.REMOVE)
    fleet = Fleet.of(AtOnce(), CLAIM)
    for first, last in ((16, 32), (0, 8)):
        with fleet.counter(of, stream, of.margin, 0, 64) as count, pytest.raises(ValueError, match="next"):
            count(first, last)


def test_keys_are_pickled_and_not_shown(caplog):
    """A log of pieces shows no key; a worker needs it."""
    executor = AtOnce()
    with caplog.at_level(logging.DEBUG):
        evidence_by(executor)
    words = randomness.key_words(direction_key(KEY, Direction.REMOVE))
    piece = executor.pieces[0]
    assert piece.key == tuple(words) and pickle.loads(pickle.dumps(piece)) == piece
    for word in words:
        assert str(word) not in repr(piece) + caplog.text
    assert all(np.array_equal(*pair) for pair in zip(draw_piece(piece), draw_piece(piece), strict=True))


@pytest.mark.parametrize("executor", [4, "dask", ProcessPoolExecutor])
def test_an_executor_is_checked_before_anything_runs(executor, monkeypatch):
    monkeypatch.setattr("jaxacct.core.verify.choose_run", None)
    monkeypatch.setattr("jaxacct.calibration.calibrate.Route", None)
    bad = executor if executor is not ProcessPoolExecutor else object()
    line = r"executor must be a concurrent\.futures\.Executor, got"
    refused(line, verify, MECHANISM, 1.0, 1e-3, executor=bad)
    refused(line, CalibrationOptions, executor=bad)
    with pytest.raises(ValueError, match="executor must not be given together with accountant"):
        CalibrationOptions(accountant="unamplified", executor=AtOnce())


@pytest.mark.slow
def test_on_dask(alone):
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        assert evidence_by(client.get_executor(pure=False)) == alone["anytime"]


@pytest.mark.slow
def test_on_ray(alone):
    ray = pytest.importorskip("ray")

    class RayExecutor(Executor):
        def submit(self, function, /, *args, **kwargs):
            return ray.remote(num_cpus=1)(function).remote(*args, **kwargs).future()

    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        assert evidence_by(RayExecutor()) == alone["anytime"]
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_on_submitit(alone, tmp_path):
    """Local processes in place of Slurm's jobs, of which there are as many as pieces: few samples."""
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    executor.update_parameters(timeout_min=5)
    stop = Stop("fixed", 4000)
    found = [verify_claim(CLAIM, stop, key=KEY, executor=e).evidence for e in (None, executor)]
    assert evidence_to_json(found[0]) == evidence_to_json(found[1])


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


@pytest.mark.parametrize(("devices", "settings"), [(4, 1), slow(3, 3), slow(4, 3), slow(8, 3)])
def test_more_devices_change_nothing(devices, settings):
    """The replicas' proposals of three schemes, and plain draws; these alone, of one scheme, in CI."""
    command = [sys.executable, "-c", SCRIPT, str(settings)]
    done = subprocess.run(command, env=with_devices(devices), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [str(devices), *evidence_here(settings)]
