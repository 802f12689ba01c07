"""Verification in parts: the same evidence as one machine, and what merging refuses."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Budget, Mechanism, Plan, calibrate
from jaxacct.cli.main import main
from jaxacct.common.files import Checkpoint
from jaxacct.core.check import Outcome
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import Bound
from jaxacct.core.verify import Run, Stop, verify_claim
from jaxacct.proposals.base import ProposalSpec
from jaxacct.proposals.threshold import Resolved
from jaxacct.verification import shards
from jaxacct.verification.shards import Part, draw_part, merge, parse_shard
from tests.stored_plans import claim_with

KEY = jax.random.key(11)
SAMPLES = 24_600
NOTHING = np.zeros(10, int)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Half-space in the add direction and two replicas in the remove direction: both are drawn."""
    mechanism = Mechanism(BMinSep(120, 4, 0.02), BandedToeplitz.square_root(4), 1.4)
    reserved = Claim(mechanism, Target.at(1.0, 5e-4), 1000, None).reserved
    claim = Claim(mechanism, Target.at(1.0, 5e-4, reserved=reserved), 1000, None)
    verdict = verify_claim(claim, Stop(), key=jax.random.key(1))
    assert verdict.certified
    return Plan(claim, verdict.evidence)


@pytest.fixture(scope="module")
def parts(plan) -> list[Part]:
    return [draw_part(plan, KEY, index, 3, SAMPLES) for index in range(3)]


@pytest.mark.parametrize("text", ["²/³", "٣/٨", "0/8 ", "-1/8", "8/8", "1/9999999999999999999", "0/1048577"])
def test_shards_are_plain_digits(text):
    with pytest.raises(ValueError, match="shard must be i/k"):
        parse_shard(text)


def test_forged_keys_and_parts_are_refused_when_read(tmp_path):
    path = tmp_path / "file.json"
    for words in ([True, False], [2**32, 0], [-1, 0], [10**40, 1], [0.0, 1], [1]):
        path.write_text(json.dumps({"run_key": words}))
        with pytest.raises(ValueError, match="must hold two words of 32 bits"):
            shards.read_run_key(path)
    fields = {"schema": "jaxacct-part", "target": "x", "version": "1", "device": "d", "key": [1, 2]}
    fields |= {"index": 0, "count": 2, "blocks": 5, "counts": {}}
    drawn = {"proposal": "plain", "margin": 0.1, "stretches": []}
    for change in (
        {"count": 10**12},  # whose gaps would be listed
        {"blocks": 10**40},
        {"key": [2**32, 1]},
        {"device": "d\nverified"},
        {"counts": {"remove": drawn | {"margin": 10**400}}},
        {"counts": {"remove\n": drawn}},
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError) as caught:
            Part.load(path)
        assert "\n" not in str(caught.value)


def test_parts_make_the_evidence_of_one_machine(plan, parts):
    whole, evidence = merge(plan, [draw_part(plan, KEY, 0, 1, SAMPLES)])
    merged, in_parts = merge(plan, [parts[2], parts[0], parts[1]])
    assert in_parts.evidence == evidence.evidence
    assert evidence.certified
    assert evidence.remove.num_samples == -(-SAMPLES // 128) * 128
    assert merged.mechanism == whole.mechanism == plan.mechanism
    assert merged.certified


def test_a_merged_plan_can_be_saved_and_loaded(plan, parts, tmp_path):
    merged, _ = merge(plan, parts)
    merged.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").evidence == merged.evidence


def test_the_streams_are_those_of_a_plain_verification(plan, parts):
    """The first blocks of `verify` with the same key lie in part 0: its histogram contains theirs."""
    evidence = verify_claim(plan.claim, Stop(), key=KEY).evidence
    assert evidence.remove.key == merge(plan, parts)[1].evidence.remove.key
    first = Counter()
    for stretch in parts[0].counts["remove"].stretches:
        first.update(dict(stretch.losses))
    if evidence.remove.num_samples <= SAMPLES // 3:
        assert all(first.get(index, 0) >= number for index, number in evidence.remove.loss_counts)


def test_too_much_noise_taken_off_is_not_verified(plan):
    wrong = Plan(claim_with(plan.claim, noise_multiplier=0.6), Bound("unamplified"))
    merged, evidence = merge(wrong, [draw_part(wrong, KEY, index, 2, 4000) for index in range(2)])
    assert merged is None
    assert not evidence.certified
    assert evidence.add.outcome == Outcome.NOT_RUN


def test_merging_refuses_and_says_which(plan, parts):
    with pytest.raises(ValueError, match="empty"):
        merge(plan, [])
    with pytest.raises(ValueError, match="1 came more than once"):
        merge(plan, [*parts, parts[1]])
    with pytest.raises(ValueError, match="0, 2 are missing"):
        merge(plan, [parts[1]])
    with pytest.raises(ValueError, match="part 1 is of another version"):
        merge(plan, [parts[0], dataclasses.replace(parts[1], version="0.0"), parts[2]])
    with pytest.raises(ValueError, match=r"jaxacct 0\.0, this is"):
        merge(plan, [dataclasses.replace(part, version="0.0") for part in parts])
    with pytest.raises(ValueError, match="part 2 is of another key"):
        merge(plan, [*parts[:2], dataclasses.replace(parts[2], key=(0, 12))])
    with pytest.raises(ValueError, match="part 2 is of another blocks"):
        merge(plan, [*parts[:2], dataclasses.replace(parts[2], blocks=999)])
    with pytest.raises(ValueError, match="part 1 is of another target"):
        merge(plan, [parts[0], dataclasses.replace(parts[1], target="0" * 64), parts[2]])
    with pytest.raises(ValueError, match="drew from 'plain'"):
        merge(plan, [forged(parts[0], proposal="plain"), *parts[1:]])
    with pytest.raises(ValueError, match="margin for rounding is 0 where"):
        merge(plan, [forged(parts[0], margin=0.0), *parts[1:]])
    more = 2 * parts[1].counts["remove"].margin  # enough, but terms of two margins are not added up
    with pytest.raises(ValueError, match="part 1 has another margin for rounding"):
        merge(plan, [parts[0], forged(parts[1], margin=more), parts[2]])


def forged(part: Part, **fields) -> Part:
    """A part with another proposal, margin, or other stretches in the remove direction."""
    counts = part.counts | {"remove": dataclasses.replace(part.counts["remove"], **fields)}
    return dataclasses.replace(part, counts=counts)


def with_stretch(part: Part, change) -> Part:
    first, *others = part.counts["remove"].stretches
    return forged(part, stretches=(change(first), *others))


FORGERIES = {
    "repeated indices hide hits": (
        lambda s: dataclasses.replace(s, terms=(*s.terms, (s.terms[-1][0], 1))),
        "strictly ascending indices",
    ),
    "descending": (lambda s: dataclasses.replace(s, terms=s.terms[::-1]), "strictly ascending indices"),
    "negative": (
        lambda s: dataclasses.replace(s, terms=((s.terms[0][0], s.terms[0][1] + 1), (5120, -1))),
        "counts above 0",
    ),
    "beyond the last bin": (lambda s: dataclasses.replace(s, terms=((10**6, 2048),)), "below 5122"),
    "not an integer": (lambda s: dataclasses.replace(s, terms=((0, 2048.0),)), "pairs of integers"),
    "too few": (lambda s: dataclasses.replace(s, terms=((0, 5),)), "holds 5 draws in a stretch"),
    "too many losses": (lambda s: dataclasses.replace(s, losses=((7, 10**9),)), "not its share"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_histograms_are_refused(kind, plan, parts):
    change, message = FORGERIES[kind]
    with pytest.raises(ValueError, match=message):
        merge(plan, [with_stretch(parts[0], change), *parts[1:]])


def test_a_relabelled_run_is_not_verified(plan, parts):
    """Drawn at delta 5e-4, merged as 5e-10; with another budget; for another data set or cut."""
    budget = Budget.split(4e-10)
    for change in (
        {"delta": 5e-10, "budget": budget},
        {"delta": 6e-4},
        {"epsilon": 0.5},
        {"dataset_size": 10**6},
        {"truncate_to": 500},
    ):
        target = Plan(claim_with(plan.claim, **change), plan.evidence)
        with pytest.raises(ValueError, match="another mechanism, epsilon, delta, budget or data set"):
            merge(target, parts)
        # A forger can also write the digest; the counts then have to do for the stricter target.
        if target.delta == 5e-10:
            relabelled = [dataclasses.replace(part, target=shards.target_of(target)) for part in parts]
            with pytest.raises(ValueError, match="drew from 'replicas:2' in the remove direction, not"):
                merge(target, relabelled)


def test_merging_keeps_sizes_and_cuts():
    scheme, strategy = BMinSep(24, 3, 0.02), BandedToeplitz.square_root(3)
    cut = calibrate(
        scheme, strategy, epsilon=2.0, delta=1e-3, dataset_size=500, max_batch_size=35, noise_multiplier=1.2
    )
    merged, _ = merge(cut, [draw_part(cut, KEY, index, 2, 4000) for index in range(2)])
    assert merged is not None and merged.certified
    for name in ("dataset_size", "expected_batch_size", "max_batch_size", "truncation_delta"):
        assert getattr(merged, name) == getattr(cut, name) is not None
    assert "larger" in merged.statement() or "truncated to random subsets" in merged.statement()


def test_redrawing_finds_made_up_counts(plan, parts, monkeypatch):
    """All but one draw of a stretch without a hit: honest totals, a histogram of no key."""
    merge(plan, parts, redraw=2)

    def lucky(stretch):
        number = sum(count for _, count in stretch.terms)
        return dataclasses.replace(stretch, terms=((0, number),))

    drawn = parts[0].counts["remove"].stretches
    liar = forged(parts[0], stretches=tuple(map(lucky, drawn)))
    assert liar != parts[0]
    assert merge(plan, [liar, *parts[1:]])[1].certified  # nothing but drawing shows it
    with pytest.raises(ValueError, match="part 0 does not hold what its key draws"):
        merge(plan, [liar, *parts[1:]], redraw=1000)


def test_a_part_goes_on_with_its_own_checkpoint_only(plan, parts, tmp_path):
    """The same folder, then another key, other samples, another plan: each draws anew."""
    with Checkpoint(tmp_path) as checkpoint:
        draw_part(plan, jax.random.key(12), 1, 3, SAMPLES, checkpoint=checkpoint)
        assert draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint) == parts[1]
        other = Plan(claim_with(plan.claim, dataset_size=2000), plan.evidence)
        assert draw_part(other, KEY, 1, 3, SAMPLES, checkpoint=checkpoint).target != parts[1].target
        calls = []
        draw_part(
            plan,
            KEY,
            1,
            3,
            SAMPLES,
            checkpoint=checkpoint,
            progress=lambda what, done, all: calls.append(what),
        )
        assert calls  # the folder holds the other plan's stretches, which are not used


def test_a_part_does_not_go_on_with_draws_of_another_distribution(plan, parts, tmp_path):
    """As an earlier version may have kept them: terms in units of another scale, or of an unspecified one."""
    with Checkpoint(tmp_path) as checkpoint:
        draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint)
        kept = {path.stem: checkpoint.load(path.stem) for path in tmp_path.glob("part-1-of-3-*.json")}
        assert kept
        known = ("target", "key", "blocks", "version")
        for change in (lambda job: job | {"log_scale": 1.0}, lambda job: {name: job[name] for name in known}):
            for name, state in kept.items():
                first, *rest = state["stretches"]
                drawn = sum(number for _, number in first["terms"])
                lies = [first | {"terms": [[0, drawn]]}, *rest]
                checkpoint.save(name, {"job": change(state["job"]), "stretches": lies})
            assert draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint) == parts[1]


@pytest.mark.parametrize("other", [{"log_scale": -1.0}, {"spec": ProposalSpec("others", (2,))}, {"words": 2}])
def test_a_part_keeps_which_distribution_its_draws_are_of(other, plan, parts, tmp_path, monkeypatch):
    """Two distributions of one margin: what is kept of one is no part of the other."""
    honest = shards.choose_run

    def of_another_distribution(*arguments):
        of = honest(*arguments).of
        return Run(dataclasses.replace(of, proposal=dataclasses.replace(of.proposal, **other)))

    with Checkpoint(tmp_path) as checkpoint:
        with monkeypatch.context() as patch:
            patch.setattr(shards, "choose_run", of_another_distribution)
            patch.setattr(Resolved, "count", lambda *arguments: (NOTHING, NOTHING))
            draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint)
        assert draw_part(plan, KEY, 1, 3, SAMPLES, checkpoint=checkpoint) == parts[1]


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
    whole = tmp_path / "plan.json"
    assert run("merge", whole, *made, "--redraw", 1, "--out", tmp_path / "merged.json") == 0
    assert "verified" in capsys.readouterr().out
    assert Plan.load(tmp_path / "merged.json").certified
    assert run("merge", whole, made[0]) == 2
    assert run("verify", tmp_path / "plan.json", "--shard", "0/2") == 2
    made[0].write_text(made[0].read_text()[:50])
    assert run("merge", whole, *made) == 2
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
    from jaxacct import Plan
    from jaxacct.verification import shards
    return shards.draw_part(Plan.load(plan), shards.read_run_key(key), index, 4, 20_000)

from jaxacct.verification import shards
parts = ray.get([draw.remote({plan!r}, {key!r}, index) for index in range(4)])
from jaxacct import Plan
plan, verdict = shards.merge(Plan.load({plan!r}), parts)
print("certified", verdict.certified, verdict.remove.num_samples)
"""


@pytest.mark.slow
def test_on_ray(plan, tmp_path):
    """The example of FLEET.md on Ray's own local cluster (pip install -e .[fleet]); minutes to start here."""
    pytest.importorskip("ray")
    plan.save(tmp_path / "plan.json")
    shards.write_run_key(tmp_path / "key.json")
    script = RAY.format(root=".", plan=str(tmp_path / "plan.json"), key=str(tmp_path / "key.json"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "certified True 20096" in done.stdout, done.stderr[-2000:]
