"""Where a plan's cover ends: its last step, truncated batches, infinite losses, rounding of clipped sums."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, Mechanism, Plan
from jaxacct.individual import RDPIndividualAccountant, SigmaGrid
from jaxacct.individual.accountants import NORM_SLACK
from jaxacct.schemes import SCHEMES
from tests.refusals import refused
from tests.stored_plans import with_derived
from tests.train import test_dice, test_individual
from tests.train.noise.test_keys import steps
from tests.train.runs import KEYS, PARAMS, ROWS, Crash, crash_at, data, flat, loss, plan, plan_of, run
from train.individual import IndividualAccounting
from train.individual.steps import individual_step
from train.optimizers import privatize
from train.procedures import bandmf
from train.procedures.dice import DiceRule, dice_step
from train.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("shared_programs")

COVERED = plan("poisson", dataset_size=ROWS, sigma=3.0)


def followed_step():
    private = privatize(COVERED.mechanism, clip_norm=1.0, expected_batch_size=6.0, key=KEYS[1])
    tracker = IndividualAccounting().tracker(0.1, 3.0)
    options = dict(microbatch_size=4, normalize=False)
    return individual_step(loss, private, optax.sgd(0.1), tracker, tracker.init(4), **options)


@pytest.mark.parametrize("name", ["step", "round", "dice step", "individual"])
def test_a_step_after_the_last_one_is_nan(name):
    """The budget is spent: nothing more may be released, in a loop of one's own either."""
    step = followed_step() if name == "individual" else steps(KEYS[1])[name]
    last = 6 if name == "round" else 12
    rows = jax.tree.map(lambda leaf: leaf[:4], data())
    if name == "round":
        rows = jax.tree.map(lambda leaf: leaf[None], rows)
    mask = np.ones(1 if name == "round" else 4, bool)
    state = step.init(jax.tree.map(jnp.array, PARAMS))
    for _ in range(last):
        state, _ = step(state, rows, mask)
    assert np.isfinite(flat(state.params)).all()
    state, _ = step(state, rows, mask)
    assert np.isnan(flat(state.params)).all()


CUT = [name for name, scheme in SCHEMES.items() if scheme.batch_size_cap is not None]


def test_padding_costs_as_much_as_examples_where_batches_are_cut(monkeypatch):
    """Run times show the sizes of batches, and the pair of truncated batches does not hold if they are known.

    By default, and a smaller batch is refused: with a truncation_delta, and for each scheme that cuts.
    """
    assert CUT == ["truncated-b-min-sep"]
    mesh = dict(mesh=jax.make_mesh((1,), ("data",)))
    refused("skip_padding must not be True with mesh", run, plan=COVERED, skip_padding=True, **mesh)
    asked = []

    def stop(*_, skip_padding, **others):
        asked.append(skip_padding)
        raise Crash

    monkeypatch.setattr(bandmf, "make_step", stop)
    monkeypatch.setattr(Plan, "certified", True)
    scheme = SCHEMES[CUT[0]](12, 4, 0.1, 12, ROWS)
    by_scheme = plan_of(Mechanism(scheme, BandedToeplitz.square_root(3), 1.0), ROWS)
    by_delta = plan("poisson", dataset_size=ROWS, sigma=3.0, truncation_delta=1e-6, max_batch_size=20)
    cut = "skip_padding must not be True for a plan that truncates batches"
    for covered, options, skips, message in (
        (COVERED, {}, True, None),
        (COVERED, dict(skip_padding=False), False, None),
        (COVERED, mesh, False, None),
        (with_derived(by_scheme, max_batch_size=12), {}, False, cut),
        (by_delta, {}, False, cut),
    ):
        with pytest.raises(Crash):
            run(plan=covered, **options)
        assert asked.pop() == skips
        if message:
            refused(message, run, plan=covered, **options, skip_padding=True)


def test_individual_losses_of_cut_batches_are_refused(monkeypatch):
    """Who is cut depends on the others, so no example's loss is its own."""
    monkeypatch.setattr(Plan, "certified", True)
    scheme = SCHEMES["truncated-b-min-sep"](12, 1, 0.1, 12, ROWS)
    cut = plan_of(Mechanism(scheme, BandedToeplitz((1.0,)), 3.0), COVERED.dataset_size)
    message = "individual needs a plan whose examples join every batch indep"
    for covered in (with_derived(COVERED, truncation_delta=1e-6), with_derived(cut, max_batch_size=12)):
        refused(message, test_individual.run, covered, IndividualAccounting())


def test_norms_within_the_slack_are_charged_for_it():
    """The longest norm that is taken: its bucket is charged as no more noise than the example really has."""
    grid = SigmaGrid(3.0, 96.0, 7)
    accountant = RDPIndividualAccountant(0.5, 3.0, 1.0, grid)
    longest = np.float32(1 + NORM_SLACK)
    longest = longest if longest <= 1 + NORM_SLACK else np.nextafter(longest, np.float32(0))
    assert longest > 1
    bucket, known = jax.jit(accountant.bucket_of)(np.array([longest]))
    assert bool(known[0])
    assert Fraction(float(accountant.charged_sigmas[int(bucket[0])])) * Fraction(float(longest)) <= 3
    # Of every other bucket: float32 may put a norm that is this much longer into it.
    limits = grid.norm_limits(3.0, 1.0)[:-1].astype(float)
    assert (accountant.charged_sigmas[:-1] * limits * (1 + NORM_SLACK) <= 3.0 * (1 + 1e-15)).all()


def test_dice_counts_nothing_of_an_example_whose_loss_is_not_finite():
    """Its gradient is finite: without it, the same bits."""

    def lost(params, example):
        return loss(params, example) + example["more"]

    rows = jax.tree.map(lambda leaf: leaf[:4], data())
    rows |= {"more": np.float32([0, np.inf, np.nan, 0])}
    step = dice_step(test_dice.PLAN, lost, optax.sgd(0.1), key=KEYS[1])
    ends = []
    for mask in ([True] * 4, [True, False, False, True]):
        state, _ = step(step.init(jax.tree.map(jnp.array, PARAMS)), rows, np.array(mask))
        ends.append((flat(state.params), flat(state.noise.error)))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)
    assert ends[0][1].any()


@pytest.mark.parametrize("automatic", [False, True])
def test_the_error_that_is_fed_back_is_no_longer_than_its_norm_in_whole_units(automatic):
    """Entries that rounding to the nearest would lengthen, added up in exact integers."""
    size = 1000
    c2 = 1.7 * size**0.5 * 2.0**-20
    rule = DiceRule(1.0, c2, 0.0, 1, automatic)
    assert rule.grid.unit == 2.0**-20
    unit = Fraction(rule.grid.unit)
    sums, release = jax.jit(rule.sums), jax.jit(lambda *given: rule.release(*given, rows=1))
    (clipped, raw), _ = sums(np.zeros((1, size), np.float32), np.ones(1, bool))
    for scale in (1.0, 1e-4, 1e6):
        error = jnp.asarray(scale * np.random.default_rng(0).uniform(0.9, 1, size), jnp.float32)
        state = test_dice.DiceState(jnp.int32(0), error, jnp.asarray(KEYS[1]))
        released, _ = release(state, clipped, raw)
        units = [round(Fraction(float(value)) / unit) for value in released]
        assert sum(value**2 for value in units) * unit**2 <= Fraction(c2) ** 2
        assert scale < 1 or any(units)  # what is too long is not fed back at all


def logged(folder) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("stage", ["checkpoint", "evaluation", "log"])
def test_nothing_of_a_step_is_shown_before_its_checkpoint(stage, tmp_path):
    """A crash on either side of each of the three; the log ends as if there had been none.

    What was shown without a checkpoint could be made again elsewhere, of other gradients and the same noise.
    """

    def evaluate(params):
        if stage == "evaluation" and not crashed and params["w"].any():
            crashed.append(1)
            raise Crash
        return {"size": float(jnp.abs(params["w"]).sum())}

    crashed: list[int] = []
    options = dict(checkpoint_every=4, evaluate=evaluate)
    target = {"checkpoint": (RunFolder, "save", 2), "log": (RunFolder, "log", 1)}
    with crash_at(*target.get(stage, (RunFolder, "save", 99))), pytest.raises(Crash):
        run(out=tmp_path / "part", **options)
    assert logged(tmp_path / "part") == []
    assert (tmp_path / "part/checkpoints/4").exists() == (stage != "checkpoint")
    part, whole = (run(out=tmp_path / name, **options) for name in ("part", "whole"))
    np.testing.assert_array_equal(flat(part.params), flat(whole.params))
    for name in ("metrics.jsonl", "private/metrics.jsonl", "result.json"):
        assert (tmp_path / "part" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert logged(tmp_path / "part") == [4, 8]


@pytest.mark.parametrize("last", ["save_model", "finish"])
def test_the_model_is_shown_after_its_checkpoint(last, tmp_path):
    with crash_at(RunFolder, last, 1), pytest.raises(Crash):
        run(out=tmp_path, checkpoint_every=5)
    assert (tmp_path / "checkpoints/12").exists() and not (tmp_path / "result.json").exists()
    assert run(out=tmp_path, checkpoint_every=5).steps == 12
