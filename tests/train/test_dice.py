"""DiceSGD on toy problems with known answers, its sensitivity, and what must not leak.

Paths were computed beforehand in float64 without a grid; here gradients are on one of 2^20 steps.
"""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.refusals import refused
from train.clipping.per_example import clipped_gradient_sum
from train.noise.normals import LARGEST
from train.procedures import dice
from train.procedures.dice import DiceRule, DiceState, dice_adam, dice_aggregate, dice_sgd

KEY = np.arange(8, dtype=np.uint32)


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

    with_zero, without = (
        raw(
            jnp.array([*first, *others, *[0.0] * (4 - len(first))], jnp.float32),
            np.arange(8) < 4 + len(first),
        )
        for first in ([0.0], [])
    )
    np.testing.assert_array_equal(with_zero, without)


def test_raw_gradients_are_whole_numbers_that_hold_a_batch():
    rule = rule_with(clip_norm=0.7)
    with jax.enable_x64(True):
        for rows in (1, 3, 2**24):
            unit = rule.raw_unit(rows)
            small, large = (
                rule.raw({"w": jnp.array([0.3, -0.1])}, rows),
                rule.raw({"w": jnp.full(1, 1e30)}, rows),
            )
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
