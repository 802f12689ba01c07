"""`fit` under a `DicePlan`: a plain loop in NumPy, the same bits on resuming, refusals, secrets."""

import dataclasses
import json
import stat

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct.accountants.dice import dice_delta_subsampled, dice_mu, dice_noise_std
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.individual import gdp_delta
from tests.refusals import refused
from tests.train.clipping.test_rows_apart import mixing
from tests.train.runs import KEYS, PARAMS, ROWS, Crash, crash_at, data, fit, flat, loss
from train.batches.sampler import Replayed, Sampler, make_generator
from train.clipping import rows_apart
from train.procedures.dice import DiceState, _shuffled, rule_of

pytestmark = pytest.mark.usefixtures("shared_programs")

PROBLEM = dict(batch_size=16, iterations=12, clip_norm=0.7, error_clip_norm=0.5)
RUN = PROBLEM | dict(dataset_size=ROWS)
PLAN = DicePlan.calibrate(8.0, 1e-5, **RUN)
# Of hardly any noise, to compare with a loop that draws none.
QUIET = dataclasses.replace(PLAN, noise_std=1e-7, epsilon=1e18)


def run(plan=PLAN, **options):
    given = dict(plan=plan, model=PARAMS, loss=loss, data=data(), optimizer=optax.sgd(0.05), keys=KEYS)
    return fit(**given | options)


def test_the_plan_holds_by_the_bound_and_by_nothing_less():
    assert gdp_delta(8.0, PLAN.mu) == pytest.approx(1e-5, rel=1e-6) and PLAN.certified
    assert PLAN.mu == dice_mu(noise_std=PLAN.noise_std, participations=4, **PROBLEM)
    assert DicePlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    less = PLAN.to_json() | {"noise_std": PLAN.noise_std * 0.999}
    refused("must be valid", DicePlan.from_json, less)
    assert "3.7" in PLAN.statement() and "zero-out" in PLAN.statement()


def by_numpy(covered, source) -> tuple[np.ndarray, list[np.ndarray]]:
    """The weights and the batches of a run without noise."""
    w, error, rows, seen, size = np.zeros(4), np.zeros(4), data(), [], covered.batch_size
    for step in range(12):
        places = source.next()
        seen.append(places)
        x = np.append(rows["x"][places].astype(float), np.ones((len(places), 1)), axis=1)
        raw = 2 * (x @ w - rows["y"][places])[:, None] * x
        clipped = raw * np.minimum(1, 0.7 / np.linalg.norm(raw, axis=1))[:, None]
        error = np.zeros(4) if covered.reset_every and step % covered.reset_every == 0 else error
        back = error * min(1, covered.error_clip_norm / max(np.linalg.norm(error), 1e-30))
        v = clipped.sum(axis=0) / size + back
        w, error = w - 0.05 * v, error + raw.sum(axis=0) / size - v
    return w, seen


@pytest.mark.parametrize("reset_every", [None, 5])
def test_against_a_loop_in_plain_numpy(reset_every):
    covered = dataclasses.replace(QUIET, reset_every=reset_every)
    ours = run(covered, microbatch_size=7)
    source = Replayed(lambda generator: _shuffled(covered, generator), KEYS[0], None)
    w, seen = by_numpy(covered, source)
    np.testing.assert_allclose(np.append(ours.params["w"], ours.params["b"]), w, rtol=1e-4, atol=1e-5)
    # Three batches of 16 fill an epoch of 60, without a row twice: four participations in 12 steps, not more.
    assert all(len(np.unique(np.concatenate(seen[i : i + 3]))) == 48 for i in (0, 3, 6, 9))
    assert np.bincount(np.concatenate(seen)).max() <= covered.participations == 4
    assert dataclasses.replace(covered, iterations=13).participations == 5


POISSON = DicePlan.calibrate(2.0, 1e-5, **RUN | dict(batch_size=6, error_clip_norm=0.02), sampling="poisson")


def test_poisson_batches_cost_less_where_few_are_drawn():
    """12 steps at p = 0.1: amplification, which `dice_mu` does not have, and a small reserve."""
    assert POISSON.certified and POISSON.overflow.delta == 1e-9

    def in_every_step(**changed):
        return dice_noise_std(2.0, 1e-5, **PROBLEM | changed)

    known = in_every_step(batch_size=6, error_clip_norm=0.02)
    assert 0.2 * known < POISSON.noise_std < 0.4 * known
    assert not dataclasses.replace(POISSON, noise_std=POISSON.noise_std * (1 - 1e-5)).certified
    # The plan is not certified by mu alone.
    assert gdp_delta(2.0, POISSON.mu) > 1e-5
    assert "Poisson-sampled" in POISSON.statement() and "which batch" not in POISSON.statement()
    whole = DicePlan.calibrate(2.0, 1e-5, **RUN, sampling="poisson")
    assert whole.noise_std <= in_every_step() * 1.001


def test_the_bound_and_the_overflow_together_are_at_most_delta():
    """A noise whose bound is below delta by less than the overflow is not certified; one just above is."""
    problem = PROBLEM | dict(error_clip_norm=0.02, batch_size=6)

    def bound(noise_std):
        return dice_delta_subsampled(2.0, noise_std=noise_std, sampling_probability=6 / ROWS, **problem)

    low, high = 0.9 * POISSON.noise_std, 1.1 * POISSON.noise_std
    for _ in range(60):
        middle = (low + high) / 2
        fits = bound(middle) <= POISSON.delta - POISSON.overflow.delta / 2
        low, high = (low, middle) if fits else (middle, high)
    assert POISSON.delta - POISSON.overflow.delta < bound(high) <= POISSON.delta
    assert not dataclasses.replace(POISSON, noise_std=high).certified
    assert bound(POISSON.noise_std) + POISSON.overflow.delta <= POISSON.delta and POISSON.certified


def test_poisson_batches_against_a_loop_in_plain_numpy():
    covered = dataclasses.replace(POISSON, noise_std=1e-7, epsilon=1e18)
    ours = run(covered)
    w, _ = by_numpy(covered, Sampler(covered.scheme, ROWS, covered.max_batch_size, KEYS[0]))
    np.testing.assert_allclose(np.append(ours.params["w"], ours.params["b"]), w, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("default_promotion")
def test_resumed_it_ends_with_the_same_bits_and_keeps_its_secrets(tmp_path):
    options = dict(checkpoint_every=4, optimizer=optax.adam(0.1))
    whole = run(out=tmp_path / "whole", **options)
    with crash_at(Replayed, "next", 7), pytest.raises(Crash):
        run(out=tmp_path / "part", **options)
    part = run(out=tmp_path / "part", **options | {"keys": ((9, 9, 9, 9), KEYS[1] + 1)})
    np.testing.assert_array_equal(flat(part.params), flat(whole.params))
    assert stat.S_IMODE((tmp_path / "whole/checkpoints").stat().st_mode) == 0o700
    for change, message in [
        (dict(optimizer=optax.sgd(0.1)), "another optimizer"),
        (dict(data=data() | {"y": np.ones(ROWS, np.float32)}), "other data"),
    ]:
        refused(message, run, out=tmp_path / "part", **options | change)


def test_refuses():
    for options, message in [
        (dict(plan=dataclasses.replace(PLAN, noise_std=0.1)), "certified"),
        (dict(data=data(59)), "dataset_size 60 rows, got 59"),
        (dict(steps=13), "at most the plan's 12, got 13"),
        (dict(clip_norm=2.0), "clip_norm must be the plan's 0.7"),
        (dict(normalize=True), "normalize must not be given"),
        (dict(microbatch_size=0), "microbatch_size"),
        (dict(optimizer=None), "optimizer must be given"),
    ]:
        refused(message, run, **options)


def test_bad_plans():
    bad = dict(batch_size=61, automatic=1, reset_every=0, delta=0.0, sampling="cyclic")
    for name, value in bad.items():
        refused(name, dataclasses.replace, PLAN, **{name: value})


def test_what_the_bound_says_of_the_rule_that_runs():
    """One huge example against none of it: v differs by at most the charge of `dice_mu`, step by step."""
    rule = dataclasses.replace(rule_of(PLAN), noise_std=0.0)
    fresh = DiceState(jnp.zeros((), jnp.int32), jnp.zeros(3), jnp.asarray(KEYS[1]))
    dice, sums, release = [fresh, fresh], jax.jit(rule.sums), jax.jit(rule.release, static_argnums=3)
    generator = make_generator(KEYS[0])
    for step in range(12):
        rows = generator.normal(size=(16, 3)).astype(np.float32)
        rows[0] *= 10.0 ** generator.integers(0, 30)
        out, joins = [], step % 3 == 0
        for world in (0, 1):
            mask = np.arange(16) >= (world if joins else 1)
            (clipped, raw), _ = sums(rows, mask)
            v, dice[world] = release(dice[world], clipped, raw, 16)
            out.append(np.asarray(v, float))
        most = joins * 0.7 / 16 + (2 * 0.5 if step else 0)
        assert np.linalg.norm(out[0] - out[1]) <= most * (1 + 1e-6)


def test_examples_of_unknown_primitives_are_computed_one_at_a_time(monkeypatch):
    """The attack: a rule for batches that mixes rows, beside `ragged_dot`; neither sum has other rows."""
    known, made = rows_apart._alone(), mixing()
    monkeypatch.setattr(rows_apart, "_alone", lambda: known | {made})

    def of_one_group(params, example):
        x, w = made.bind(example["x"])[None], params["w"][None, :, None]
        product = jax.lax.ragged_dot(x, w, jnp.ones(1, int))
        return (product[0, 0] + params["b"] - example["y"]) ** 2

    with pytest.warns(UserWarning, match="are computed one at a time"):
        found = fit(QUIET, PARAMS, of_one_group, data(), optax.sgd(0.05), keys=KEYS)
    np.testing.assert_allclose(flat(found.params), flat(run(QUIET).params), rtol=1e-4, atol=1e-6)
