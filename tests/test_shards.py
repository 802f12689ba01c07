"""Verification in parts: the same evidence as one machine, and what merging refuses."""

import dataclasses
import subprocess
import sys

import jax
import pytest

from jaxacct import BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Plan, shards, verify
from jaxacct.calibration import make_plan
from jaxacct.cli import main
from jaxacct.files import Checkpoint
from jaxacct.shards import Part, draw_part, merge, parse_shard

KEY = jax.random.key(11)
SAMPLES = 30_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Half-space in the add direction and two replicas in the remove direction: both are drawn."""
    mechanism = Mechanism(BMinSep(120, 4, 0.02), BandedToeplitz.square_root(4), 1.4)
    evidence = verify(mechanism, 1.0, 5e-4, key=jax.random.key(1))
    assert evidence.accepted
    return make_plan(mechanism, 1.0, 5e-4, evidence, 1000, None)


@pytest.fixture(scope="module")
def parts(plan) -> list[Part]:
    return [draw_part(plan, KEY, index, 3, SAMPLES) for index in range(3)]


def test_parts_make_the_evidence_of_one_machine(plan, parts):
    whole, evidence = merge([draw_part(plan, KEY, 0, 1, SAMPLES)])
    merged, in_parts = merge([parts[2], parts[0], parts[1]])
    assert in_parts == evidence
    assert evidence.accepted
    assert evidence.remove.num_samples == -(-SAMPLES // 128) * 128
    assert merged.mechanism == whole.mechanism == plan.mechanism
    assert merged.certified


def test_a_merged_plan_can_be_saved_and_loaded(parts, tmp_path):
    merged, _ = merge(parts)
    merged.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").evidence == merged.evidence


def test_the_streams_are_those_of_a_plain_verification(plan, parts):
    """The first blocks of `verify` with the same key lie in part 0: its histogram contains theirs."""
    evidence = verify(plan.mechanism, plan.epsilon, plan.delta, budget=plan.evidence.budget, key=KEY)
    assert evidence.remove.key == merge(parts)[1].remove.key
    first = dict(map(tuple, parts[0].counts["remove"]["losses"]))
    if evidence.remove.num_samples <= SAMPLES // 3:
        assert all(first.get(index, 0) >= number for index, number in evidence.remove.loss_counts)


def test_too_much_noise_taken_off_is_not_verified(plan):
    wrong = dataclasses.replace(
        plan,
        mechanism=Mechanism(plan.mechanism.scheme, plan.mechanism.strategy, 0.6),
        evidence=None,
        analytic_delta=0.0,
    )
    merged, evidence = merge([draw_part(wrong, KEY, index, 2, 4000) for index in range(2)])
    assert merged is None
    assert not evidence.accepted
    assert evidence.add.proposal == "not run"


def test_merging_refuses_and_says_which(plan, parts):
    with pytest.raises(ValueError, match="empty"):
        merge([])
    with pytest.raises(ValueError, match="1 came more than once"):
        merge([*parts, parts[1]])
    with pytest.raises(ValueError, match="0, 2 are missing"):
        merge([parts[1]])
    with pytest.raises(ValueError, match="part 1 is of another version"):
        merge([parts[0], dataclasses.replace(parts[1], version="0.0"), parts[2]])
    with pytest.raises(ValueError, match=r"jaxacct 0\.0, this is"):
        merge([dataclasses.replace(part, version="0.0") for part in parts])
    with pytest.raises(ValueError, match="part 2 is of another key"):
        merge([*parts[:2], draw_part(plan, jax.random.key(12), 2, 3, SAMPLES)])
    with pytest.raises(ValueError, match="part 2 is of another blocks"):
        merge([*parts[:2], draw_part(plan, KEY, 2, 3, SAMPLES + 1000)])
    other = Mechanism(CyclicPoisson(12, 4, 0.3), BandedToeplitz.square_root(4), 1.0)
    with pytest.raises(ValueError, match="part 1 is of another target"):
        strange = dataclasses.replace(plan, mechanism=other, evidence=None, analytic_delta=0.0)
        merge([parts[0], draw_part(strange, KEY, 1, 3, SAMPLES), parts[2]])
    counts = parts[0].counts | {"remove": parts[0].counts["remove"] | {"proposal": "plain"}}
    with pytest.raises(ValueError, match="drew from"):
        merge([dataclasses.replace(parts[0], counts=counts), *parts[1:]])
    short = parts[0].counts | {"remove": parts[0].counts["remove"] | {"terms": [[0, 5]]}}
    with pytest.raises(ValueError, match="part 0 holds 5 draws"):
        merge([dataclasses.replace(parts[0], counts=short), *parts[1:]])


def test_an_interrupted_part_goes_on(plan, parts, tmp_path):
    calls = []

    def stop(what, done, expected):
        calls.append(done)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with Checkpoint(tmp_path) as checkpoint, pytest.raises(KeyboardInterrupt):
        draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint, progress=stop)
    with Checkpoint(tmp_path) as checkpoint:
        assert draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint) == parts[1]


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/0", ""])
def test_bad_shards(text):
    with pytest.raises(ValueError, match="shard must be i/k"):
        parse_shard(text)


def test_the_commands(plan, tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return ended.value.code

    plan.save(tmp_path / "plan.json")
    key = tmp_path / "key.json"
    assert run("run-key", "--out", key) == 0
    made = [tmp_path / f"part-{i}.json" for i in range(2)]
    for i, part in enumerate(made):
        options = ("--shard", f"{i}/2", "--run-key", key, "--samples", 20_000, "--out", part)
        assert run("verify", tmp_path / "plan.json", *options) == 0
    assert run("merge", *made, "--out", tmp_path / "merged.json") == 0
    assert "verified" in capsys.readouterr().out
    assert Plan.load(tmp_path / "merged.json").certified
    assert run("merge", made[0]) == 2
    assert run("verify", tmp_path / "plan.json", "--shard", "0/2") == 2
    made[0].write_text(made[0].read_text()[:50])
    assert run("merge", *made) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 3
    assert "missing" in errors[0]
    assert "shard needs" in errors[1]
    assert "truncated" in errors[2]


RAY = """
import sys, ray
sys.path.insert(0, {root!r})
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
def draw(plan, key, index):
    from jaxacct import Plan, shards
    return shards.draw_part(Plan.load(plan), shards.read_run_key(key), index, 4, 20_000)

from jaxacct import shards
parts = ray.get([draw.remote({plan!r}, {key!r}, index) for index in range(4)])
plan, evidence = shards.merge(parts)
print("accepted", evidence.accepted, evidence.remove.num_samples)
"""


@pytest.mark.slow
def test_on_ray(plan, tmp_path):
    """The example of FLEET.md on Ray's own local cluster (pip install -e .[fleet]); minutes to start here."""
    pytest.importorskip("ray")
    plan.save(tmp_path / "plan.json")
    shards.write_run_key(tmp_path / "key.json")
    script = RAY.format(root=".", plan=str(tmp_path / "plan.json"), key=str(tmp_path / "key.json"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "accepted True 20096" in done.stdout, done.stderr[-2000:]
