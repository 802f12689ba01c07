"""An audit of a user's model: faults that are planted are found, nothing else is, and the command says so."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, Mechanism
from jaxacct.schemes.truncation.truncated_b_min_sep import TruncatedBMinSep
from tests import commands
from tests.refusals import refused
from tests.stored_plans import with_derived
from tests.train.runs import KEYS, plan, plan_of
from train.audit import canaries, command
from train.audit.canaries import outputs
from train.audit.command import Finding, audit
from train.batches import sampler
from train.batches.sources import as_rows
from train.options import TrainOptions
from train.procedures import bandmf
from train.procedures.protocol import Request

pytestmark = pytest.mark.usefixtures("shared_programs")

ROWS, CLIP = 1200, 0.5
# Full batches, so that an analytic bound certifies at once what is nearly tight. At five other keys the
# bounds were 1.43 to 2.7 with a quarter of the noise and 3.2 to 4.5 without clipping.
PLAN = plan("poisson", dataset_size=ROWS, iterations=4, rate=1.0, sigma=6.0, epsilon=1.4)


def given():
    """A linear model with many coordinates, and data that pulls at all of them."""
    generator = np.random.default_rng(0)
    data = {"x": generator.normal(size=(ROWS, 3)).astype(np.float32), "y": np.ones(ROWS, np.float32)}
    return dict(model={"w": jnp.zeros((3, 700)), "b": jnp.zeros(())}, loss=loss, dataset=data)


def loss(params, example):
    return (example["x"] @ params["w"].mean(axis=1) + params["b"] - example["y"]) ** 2


def plant(monkeypatch, less: float, clips: float = 1) -> None:
    """So many times less noise; gradients of so many clip norms pass."""
    real = bandmf.privatize

    def broken(mechanism, clip_norm, **options):
        other = dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / less)
        return real(other, clip_norm=clips * clip_norm, **options)

    monkeypatch.setattr(bandmf, "privatize", broken)


FAULTS = {"honest": None, "noise": (4,), "clipping": (10, 10)}


@pytest.mark.parametrize("name", ["honest", "noise", pytest.param("clipping", marks=pytest.mark.slow)])
def test_planted_faults_are_found_and_nothing_else(name, monkeypatch):
    """A quarter of the noise, and no clipping below ten clip norms with the noise of one."""
    if fault := FAULTS[name]:
        plant(monkeypatch, *fault)
    found = audit(**given(), plan=PLAN, keys=KEYS, clip_norm=CLIP)
    assert found.contradicts == (fault is not None), found.statement()
    assert found.lower >= 0
    assert ("CONTRADICTED" in found.statement()) == found.contradicts
    shown = json.dumps(found.to_json())
    assert "private" not in shown and "scores" not in shown and "present" not in shown
    assert "private" not in repr(found)
    assert len(found.private_scores) == len(found.private_present) == found.canaries == 800


def test_the_coins_decide_who_is_a_canary_and_the_others_stay_what_they_are(monkeypatch):
    """Out means silent, the pair of the guarantee, and not replaced; half are in, others with other keys."""
    seen = []

    def silence(setting, canary_of, coordinates, optimizer):
        seen.append((canary_of, coordinates))
        return np.zeros((len(coordinates), 4))

    monkeypatch.setattr(canaries.Setting, "outputs", silence)

    def scored(mechanism, outputs):
        assert mechanism.noise_multiplier == PLAN.mechanism.noise_multiplier / 3
        return outputs.sum(axis=1)

    monkeypatch.setattr(command, "privacy_loss", scored)
    one, other = (audit(**given(), plan=PLAN) for _ in range(2))
    canary_of, coordinates = seen[0]
    assert (canary_of[800:] == canaries.REAL).all() and len(set(coordinates)) == 800
    expected = np.where(one.private_present, coordinates, canaries.SILENT)
    np.testing.assert_array_equal(canary_of[:800], expected)
    assert 280 < one.private_present.sum() < 520  # fails with probability 1e-16
    assert (one.private_present != other.private_present).any()


def jittered(params, example, key):
    """`loss` of an example that is another one whenever it is read: by its number and step."""
    return loss(params, {"x": example["x"] + jax.random.normal(key, (3,)), "y": example["y"]})


@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_canary_moves_its_coordinate_by_the_clip_norm_and_all_others_nothing(normalize):
    """Without noise to speak of: what the examples gave is known, also when, where and with which key."""
    covered = plan("poisson", dataset_size=40, iterations=3, rate=0.5, sigma=1e-3)
    data = {"x": np.ones((40, 3), np.float32), "y": np.arange(40, dtype=np.float32)}
    params = {"b": jnp.zeros(()), "w": jnp.zeros((3, 2))}
    functional, params = Request(params, jittered, data, options=TrainOptions(loss_key=3)).functional()
    options = dict(keys=KEYS, progress=False, normalize=normalize, microbatch_size=8)
    options = TrainOptions(**options, prefetch=0, verify=False)
    setting = canaries.Setting(covered, functional, params, as_rows(data), CLIP, options)
    canary_of = np.full(40, canaries.REAL, np.int32)
    canary_of[:3] = 4, canaries.SILENT, 2
    members = sampler.Sampler.from_plan(covered, KEYS[0])
    there = np.array([[np.isin([0, 2], members.next())] for _ in range(3)])
    assert there.any() and not there.all()
    # The optimizer moves, so that the gradients of later steps are others.
    seen = setting.outputs(canary_of, np.arange(7), optax.sgd(0.5, momentum=0.9))
    expected = np.zeros((7, 3))
    expected[[4, 2]] = there[:, 0].T
    np.testing.assert_allclose(seen, expected, atol=1e-2)  # sigma 1e-3, ten standard deviations
    np.testing.assert_array_equal(canaries.quiet(setting, 6), np.arange(1, 7))  # the bias is pulled most


def test_what_is_released_becomes_outputs_by_the_matrix():
    """`C u` against dense matrices, one of them by its inverse."""
    scheme, released = BMinSep(6, 3, 0.3), np.random.default_rng(0).normal(size=(5, 6))
    matrix = scipy.linalg.toeplitz([*BandedToeplitz.square_root(3).array, 0, 0, 0], np.zeros(6))
    found = outputs(Mechanism(scheme, BandedToeplitz.square_root(3), 1.0), released)
    np.testing.assert_allclose(found, released @ matrix.T)
    inverse = BandedInverse.bisr(iterations=6, bands=3)
    coefficients, of_inverse = inverse.noise_recursion()
    assert of_inverse
    column = np.pad(coefficients, (0, 6 - len(coefficients)))
    matrix = np.linalg.inv(scipy.linalg.toeplitz(column, np.zeros(6)))
    np.testing.assert_allclose(outputs(Mechanism(scheme, inverse, 1.0), released), released @ matrix.T)


REFUSED = [
    (dict(canaries=1201), "canaries must be 2 to 1200 with 1200 examples, 2101 coordinates and delta"),
    (dict(canaries=1), "canaries must be 2 to 1200"),
    (dict(canaries=0), "canaries must be"),
    (dict(confidence=1.0), "confidence must be"),
    (dict(clip_norm=-1.0), "clip_norm must be"),
    (dict(plan="plan.json"), "plan must be a jaxacct.Plan"),
    (dict(plan=plan_of(PLAN.mechanism, ROWS, 1.4, delta=0.01)), "smaller delta than 0.01 for a one"),
    (dict(plan=with_derived(PLAN, truncation_delta=1e-6)), "plan must not truncate batches"),
    (dict(model={"w": jnp.zeros(1)}), "canaries must be 2 to 1 with 1200"),
]


def test_refuses():
    """Truncated batches, too: those left out depend on who else is there."""
    assert TruncatedBMinSep.side_information is not None
    for options, message in REFUSED:
        refused(message, audit, **given() | {"plan": PLAN} | options)


MODULE = """
def mine():
    return {"model": 1, "loss": 2, "dataset": 3, "clip_norm": 0.5}
def bad():
    return {"model": 1}
"""


def test_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_model_of_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    PLAN.save(tmp_path / "plan.json")
    mine = ["--plan", tmp_path / "plan.json", "--model", "my_model_of_tests:mine"]
    mine += ["--out", tmp_path / "audit.json"]
    scores, there, asked = np.arange(4.0), np.array([True, False, True, False]), []
    found = Finding(0.5, 0.6, 3, 2, 1.0, 1e-5, 0.95, 4, scores, there)

    def canned(**options):
        asked.append(options)
        return dataclasses.replace(found, lower=lower)

    monkeypatch.setattr(command, "audit", canned)
    lower = 0.5
    code, out, _ = commands.command(capsys, "audit", *mine)
    assert code == 0 and "one-run audit, 4 canaries" in out and "proves nothing" in out
    assert "costs its epsilon again" in out and asked[0]["plan"] == PLAN
    given = {"model": 1, "loss": 2, "dataset": 3, "clip_norm": 0.5, "confidence": 0.95}
    assert given.items() <= asked[0].items() and asked[0].get("keys") is None
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert stored["finding"] == json.loads(json.dumps(found.to_json()))
    lower = 1.5
    code, out, _ = commands.command(capsys, "audit", *mine, "--json-output", "--clip-norm", "2")
    assert code == 1 and json.loads(out)["finding"]["contradicts"] and asked[1]["clip_norm"] == 2
    (tmp_path / "other.txt").write_text("mine")
    for words, said in (
        (["--model", "my_model_of_tests"], "model must be module:function"),
        (["--model", "no_such_module:f"], "no_such_module:f cannot be imported"),
        (["--model", "my_model_of_tests:bad"], "must return a dictionary of model, loss and dataset"),
        (["--out", tmp_path / "other.txt"], "out"),
        (["--plan", tmp_path / "other.txt"], "plan"),
    ):
        pairs = zip(mine[::2], mine[1::2], strict=True)
        kept = [word for pair in pairs if pair[0] not in words for word in pair]
        code, _, error = commands.command(capsys, "audit", *kept, *words)
        assert code == 2 and said in error and error.count("\n") == 1, (words, error)


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_the_command_on_digits(tmp_path, capsys):
    """As it comes, in some fifteen seconds."""
    plan(dataset_size=1440, iterations=24, rate=0.2, sigma=6.0, epsilon=4.0).save(tmp_path / "plan.json")
    words = "--plan", tmp_path / "plan.json", "--out", tmp_path / "found.json"
    code, out, _ = commands.command(capsys, "audit", *words)
    assert code == 0 and "one-run audit, 960" in out
