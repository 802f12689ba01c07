"""DiceSGD on toy problems with known answers, its sensitivity, what must not leak; `fit` under a `DicePlan`.

Paths were computed beforehand in float64 without a grid; here gradients are on one of 2^20 steps.
"""

import dataclasses
import functools
import json
import stat
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct.accountants.dice import dice_delta_subsampled, dice_mu, dice_noise_std
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.individual import gdp_delta
from tests.refusals import refused
from tests.train.clipping.test_rows_of_primitives import mixing
from tests.train.runs import KEYS, PARAMS, ROWS, Crash, crash_at, data, fit, loss
from train.batches.sampler import Replayed, Sampler, make_generator
from train.clipping import rows_apart
from train.clipping.per_example import clipped_gradient_sum
from train.noise.normals import LARGEST
from train.procedures import dice
from train.procedures.dice import DiceRule, DiceState, _shuffled, dice_adam, dice_aggregate, dice_sgd, rule_of

pytestmark = pytest.mark.usefixtures("shared_programs")

KEY = KEYS[1]


def tree(rows):
    rows = np.asarray(rows, np.float32)
    return {"w": rows[..., :2], "b": rows[..., 2]}


def flat(values):
    return np.append(np.asarray(values["w"]), np.asarray(values["b"]))


def aggregate(batch_size=2, **options):
    defaults = dict(clip_norm=1.0, error_clip_norm=1.0, noise_std=0.0, batch_size=batch_size, key=KEY)
    return dice_aggregate(**(defaults | options))


@pytest.mark.usefixtures("default_promotion")
def test_adam():
    rule = dice_adam(0.1, clip_norm=1.0, error_clip_norm=1.0, noise_std=0.0, batch_size=2, key=KEY)
    params = tree(np.zeros(3))
    state, update = rule.init(params), jax.jit(rule.update)
    for rows in ([[3, 4, 12], [0.3, 0, 0.4]], [[0, 0, 2], [6, 8, 0]]):
        updates, state = update(tree(rows), state, params)
        params = jax.tree.map(np.add, params, updates)
    np.testing.assert_allclose(flat(params), [-0.19651820, -0.18694415, -0.19571918], atol=1e-5)


def test_what_is_released_is_within_the_sensitivity():
    """Whatever the gradients, v moves by at most 2 C2 + C1 / B, and by C1 / B in the first step."""
    rng = np.random.default_rng(2)
    rule = aggregate(batch_size=4, clip_norm=0.7, error_clip_norm=0.3)
    update = jax.jit(rule.update)
    with_one = without = rule.init(tree(np.zeros(3)))
    for step in range(30):
        scale = 10.0 ** rng.integers(-30, 38)
        rows = rng.normal(size=(4, 3)) * np.array([[1], [1], [1], [scale]])
        rows = np.clip(rows, -3e38, 3e38)
        v, with_one = update(tree(rows), with_one, mask=np.ones(4, bool))
        w, without = update(tree(rows), without, mask=np.array([True, True, True, False]))
        moved = np.linalg.norm(flat(v).astype(float) - flat(w).astype(float))
        assert moved <= (0.7 / 4 if step == 0 else 0.7 / 4 + 0.6) * (1 + 1e-6)
        assert np.isfinite(flat(with_one.error)).all()


def test_a_row_outside_of_the_batch_is_in_neither_sum():
    """What is released and the error are those of the rows alone, whatever lies where padding would."""
    rule, rows = aggregate(), [[0.3, 0, 0.4], [3, 4, 12], [6, 8, 0]]
    update, state = jax.jit(rule.update), rule.init(tree(np.zeros(3)))
    alone = update(tree(rows[:2]), state, mask=np.ones(2, bool))
    beside = update(tree(rows), state, mask=np.array([True, True, False]))
    for one, other in zip(*map(jax.tree.leaves, (alone, beside)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_noise():
    """Mean 0 and standard deviation sigma_1 on the mean; false alarm 1e-6 (5 standard errors)."""
    size = 200_000
    rule = aggregate(batch_size=3, noise_std=0.05)
    nothing = np.zeros((3, size), np.float32)
    state, update = rule.init(nothing[0]), jax.jit(rule.update)
    drawn, state = update(nothing, state)
    assert abs(np.asarray(drawn, float).mean()) < 5 * 0.05 / size**0.5
    assert np.asarray(drawn, float).std() == pytest.approx(0.05, rel=5 / (2 * size) ** 0.5)
    again, _ = update(nothing, state)
    assert not np.array_equal(drawn, again)
    # Noise never enters the error.
    assert not np.asarray(state.error).any()


def test_secrets_do_not_leave():
    sizes = dict(clip_norm=1.0, error_clip_norm=1.0, noise_std=1.0, batch_size=2)
    rule, other = (dice_sgd(0.1, **sizes) for _ in range(2))
    params = tree(np.zeros(3))
    state = rule.init(params)
    _, state = jax.jit(rule.update)(tree([[3, 4, 12], [0.3, 0, 0.4]]), state, params)
    nodes = jax.tree.leaves(dice.release(state), is_leaf=lambda node: isinstance(node, DiceState))
    public = [node for node in nodes if isinstance(node, DiceState)]
    assert len(public) == 1 and not public[0].key.any() and not flat(public[0].error).any()
    (after, *_) = dice.reset_error(state)
    assert not flat(after.error).any() and after.key.any()
    # Two runs have two keys.
    assert not np.array_equal(rule.init(params)[0].key, other.init(params)[0].key)


def rule_with(**options):
    return DiceRule(**dict(clip_norm=1.0, error_clip_norm=1.0, noise_std=0.0, batch_size=1) | options)


def test_the_largest_noise_and_error_of_a_grid():
    """2^46 units of a mean: with noise of 12 deviations all sums are below 2^53, and exact."""
    assert (LARGEST + 2) * 2.0**46 < 2.0**52
    for name in ("noise_std", "error_clip_norm"):
        rule_with(**{name: 2.0**26})
        rule_with(**{name: 2.0**24}, batch_size=4)
        for size in (1, 2):
            refused("no grid fits", rule_with, **{name: 2.0**26 * (1 + 1e-9)}, batch_size=size)


@pytest.mark.parametrize("sizes", [(3.4e38, 3.4e38), (1e-45, 3.4e38)])
def test_no_number_of_steps_takes_the_error_beyond_float32(sizes):
    """At the largest clip norm, gradients as large as there are leave it at its bound."""
    rule = aggregate(clip_norm=2.0**60, error_clip_norm=1e-3, batch_size=1)
    rows = jnp.outer(jnp.float32(sizes), jnp.float32([1, -1, 1]))
    gradients = {"w": rows[:, :2], "b": rows[:, 2]}

    @jax.jit
    def run(state):
        def step(_, state):
            return rule.update(gradients, state, mask=np.ones(2, bool))[1]

        state = jax.lax.fori_loop(0, 100, step, state)
        return state, rule.update(gradients, state, mask=np.ones(2, bool))

    state = rule.init(tree(np.zeros(3)))
    state = state._replace(error=tree(np.array([1, -1, 1]) * (2.0**100 / 3**0.5)))
    for _ in range(3):
        state, (v, after) = run(state)
        largest = np.linalg.norm(flat(state.error).astype(float))
        assert np.isfinite(flat(v)).all() and largest <= 2.0**100 * (1 + 1e-6)
        # It has reached its bound: further steps add nothing.
        assert largest > 2.0**100 * 0.99 and np.isfinite(flat(after.error)).all()


def test_the_norm_of_what_is_fed_back_is_checked_with_room_for_its_rounding(monkeypatch):
    """Integers whose exact norm is C2 are not sound, whatever made them; those a little shorter are."""
    seen, real = [], dice.stored

    def stored(values, is_sound, mend):
        seen.append(is_sound)
        return real(values, is_sound, mend)

    monkeypatch.setattr(dice, "stored", stored)
    for entries, c2 in ((1, 1.0), (2**12, 0.5)):
        rule, error = rule_with(error_clip_norm=c2), {"w": jnp.full(entries, 3e7, jnp.float32)}
        state = DiceState(jnp.zeros((), jnp.int32), error, jnp.asarray(KEY))
        with jax.enable_x64(True):
            nothing = {"w": jnp.zeros(entries, jnp.float64)}
            v, _ = rule.release(state, nothing, nothing, 2)
            (is_sound,) = [each for each in seen if not seen.clear()]
            whole = c2 * 2.0**20 / entries**0.5  # whole units, of exactly the norm C2 together
            room = (2.0**12 + entries) * 2.0**-52
            assert whole == int(whole) and not is_sound({"w": jnp.full(entries, whole)})
            assert not is_sound({"w": jnp.full(entries, whole).at[0].set(jnp.nan)})
            # Squares and sums are rounded by 2^-53 each, all of them together by less than the room.
            assert not is_sound({"w": jnp.full(entries, whole * (1 - room / 2))})
            assert is_sound({"w": jnp.full(entries, whole * (1 - 3 * room / 2))})
        # What is fed back is nearly C2, and no more, exactly.
        units = [Fraction(float(x)) * 2**20 for x in np.asarray(v["w"])]
        square = sum(x * x for x in units)
        assert (c2 * 2**20 - 2 * entries**0.5) ** 2 <= square <= (c2 * 2**20) ** 2


def test_whether_a_zeroed_example_was_sampled_changes_no_sum():
    """Attack: its row moves the others to other microbatches, and float64 sums of these were others.

    The error is made of such sums, and what is fed back of the error: it showed who was sampled.
    """
    rule, most = rule_with(), 1.5 * 2.0**19
    others = [most, 0.9 * 2.0**-34, 0.9 * 2.0**-34, -most]

    @jax.jit
    def raw(rows, mask):
        given = dict(grid=rule.grid, also=functools.partial(rule.raw, rows=8), microbatch_size=2)
        return clipped_gradient_sum(lambda p, x: p * x, jnp.zeros(()), rows, mask, **given).also

    padding = [0.0] * 3
    with_zero = raw(jnp.array([0.0, *others, *padding], jnp.float32), np.arange(8) < 5)
    without = raw(jnp.array([*others, 0.0, *padding], jnp.float32), np.arange(8) < 4)
    np.testing.assert_array_equal(with_zero, without)


def test_raw_gradients_are_whole_numbers_that_hold_a_batch():
    rule = rule_with(clip_norm=0.7)
    with jax.enable_x64(True):
        for rows in (1, 3, 2**24):
            unit = rule.raw_unit(rows)
            small = rule.raw({"w": jnp.array([0.3, -0.1])}, rows)
            large = rule.raw({"w": jnp.full(1, 1e30)}, rows)
            np.testing.assert_allclose(unit * small["w"], [0.3, -0.1], atol=0.51 * unit)
            assert all(np.array_equal(each["w"], np.round(each["w"])) for each in (small, large))
            assert rows * large["w"][0] <= 2.0**53 and large["w"][0] * unit == pytest.approx(0.7 * 2**20)


def test_what_is_fed_back_comes_out_of_the_loop(monkeypatch):
    monkeypatch.setattr(dice, "stored", lambda values, *_: jax.tree.map(jnp.zeros_like, values))
    rule, error = rule_with(), {"w": jnp.ones(3, jnp.float32)}
    state = DiceState(jnp.zeros((), jnp.int32), error, jnp.asarray(KEY))
    with jax.enable_x64(True):
        nothing = {"w": jnp.zeros(3, jnp.float64)}
        v, _ = rule.release(state, nothing, nothing, 2)
    assert not np.any(v["w"])


def path(gradients, start, steps, *, rate, batch_size, c1=1.0, c2=1.0, **options):
    """((steps, ...) x, (steps, ...) e) after each step; `gradients(x)` has one row an example."""
    sizes = dict(clip_norm=c1, error_clip_norm=c2, noise_std=0.0, batch_size=batch_size)
    rule = dice_sgd(rate, **sizes, key=KEY, **options)
    x = jnp.asarray(start, jnp.float32)

    @jax.jit
    def run(x, state):
        def step(carry, _):
            x, state = carry
            updates, state = rule.update(gradients(x), state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), (x, state[0].error)

        return jax.lax.scan(step, (x, state), length=steps)[1]

    return jax.tree.map(np.asarray, run(x, rule.init(x)))


def biased(c):
    """Gradients of the paper's example B.1: Huber losses at -1 (C' times) and C' (once), C' = ceil(c) + 1."""
    knee = int(np.ceil(c)) + 1
    centres = np.float32([-1.0] * knee + [float(knee)])
    return lambda x: (x - centres).clip(-knee, knee), knee


def test_the_example_of_the_paper():
    """Clipped SGD stops at -(C' - C) / C', not where the paper says; DiceSGD at the minimum 0."""
    c, (gradients, knee) = 2.0, biased(2.0)
    x = 0.5
    for _ in range(4000):
        x -= 0.05 * float(gradients(x).clip(-c, c).mean())
    assert x == pytest.approx(-(knee - c) / knee, abs=1e-3)
    xs, es = path(gradients, 0.5, 6000, rate=0.05, batch_size=knee + 1, c1=c, c2=c)
    assert abs(xs[-1]) < 1e-4 and es[-1] == pytest.approx(-0.25, abs=1e-3)


def test_bad_input():
    rule_with(clip_norm=2.0**60)
    refused(r"clip_norm must be at most 1.153e\+18, got 3e\+25", rule_with, clip_norm=3e25)
    bad = dict(clip_norm=0.0, error_clip_norm=float("nan"), noise_std=-1.0, batch_size=0)
    for name, value in bad.items():
        refused(name, aggregate, **{name: value})
    refused("no grid fits", aggregate, noise_std=1e12)
    rule = aggregate()
    state, rows = rule.init(tree(np.zeros(3))), tree(np.zeros((3, 3)))
    refused("mask", rule.update, rows, state)
    refused("mask", rule.update, rows, state, mask=np.ones(2, bool))
    refused("structure", rule.update, np.zeros((2, 3), np.float32), state)


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
    np.testing.assert_allclose(flat(ours.params), w, rtol=1e-4, atol=1e-5)
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
    np.testing.assert_allclose(flat(ours.params), w, rtol=1e-4, atol=1e-5)


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
