"""Generalised DP-SGD: samplers, terms without memory, sensitivity, noise, and what is refused."""

import dataclasses
import functools
import json
import math
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from jaxacct.accountants.tradeoff import participation_pmf
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from tests.refusals import refused
from tests.train.runs import KEYS, fit
from tests.train.runs import plan as correlated
from train.batches.sampler import Replayed, make_generator
from train.clipping.grid import Grid, GridSum
from train.clipping.per_example import clipped_gradient_sum
from train.procedures import batch_clipping
from train.procedures.batch_clipping import aggregate, epoch_batches, mean_gradient_term, optimizer_term

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


def linear(params, row):
    return params @ row


def square(params, row):
    return 0.5 * jnp.sum((params - row) ** 2)


def plan(**change):
    fields = dict(dataset_size=12, num_microbatches=1, microbatch_size=4, num_epochs=2, group_size=1)
    fields |= dict(sampling="shuffling", sigma=2.0, epsilon=50.0, delta=1e-5)
    return GeneralPlan(**fields | change)


def test_nothing_longer_than_the_clip_norm_is_returned():
    """Also where squares of float32 underflow or overflow; norms by exact fractions."""
    clipped = jax.jit(batch_clipping.clip_by_l2_norm, static_argnums=1)
    for dtype in [np.float32, jnp.bfloat16]:
        for size in [1e-44, 1.0, 3e38]:
            v = np.random.default_rng(0).normal(size=50).clip(-1, 1).astype(np.float32)
            v = {"a": jnp.asarray(size * v[:30], dtype), "b": np.float32(size * v[30:])}
            for clip_norm in (1e-3 * size, 1e-40):
                found = clipped(v, clip_norm)
                square = sum(Fraction(float(x)) ** 2 for leaf in found.values() for x in np.ravel(leaf))
                whole = sum(Fraction(float(x)) ** 2 for leaf in v.values() for x in np.ravel(leaf))
                assert square <= Fraction(clip_norm) ** 2 * Fraction(1 + 2.0**-45)
                # Nearly as long as it may be; of what is below the least normal float32 nothing need be left.
                if min(clip_norm, size) > 1e-37:
                    assert square >= 0.97 * min(whole, Fraction(clip_norm) ** 2)
        for bad in (np.nan, np.inf):
            assert not any(map(np.any, clipped(v | {"b": np.full(20, bad, np.float32)}, 1e-40).values()))


def test_samplers():
    for m, s in ((3, 2), (1, 4), (12, 1)):
        shuffled = epoch_batches((1, 2, 3, 4), 12, m, s, "shuffling")
        assert shuffled.shape == (12 // (m * s), m, s) and sorted(shuffled.ravel()) == list(range(12))
        drawn = epoch_batches((1, 2, 3, 4), 12, m, s, "subsampling")
        assert drawn.shape == shuffled.shape
        assert all(len(set(row.ravel())) == m * s for row in drawn)
    generator = make_generator((1, 2, 3, 4))
    first, second = (epoch_batches(generator, 12, 3, 2, "shuffling") for _ in range(2))
    assert (first != second).any()
    for bad in ((12, 5, 1, "shuffling"), (12, 3, 2, "poisson"), (0, 1, 1, "shuffling")):
        refused("", epoch_batches, (1, 2, 3, 4), *bad)
    refused("key", epoch_batches, (1, 2), 12, 3, 2, "shuffling")


@pytest.mark.parametrize("sampling", ["shuffling", "subsampling"])
def test_samplers_follow_the_distribution_of_the_accountant(sampling):
    """Squared counts of two records over 4000 epochs, chi-square at false alarm 1e-6."""
    generator, counts = make_generator((5, 6, 7, 8)), Counter()
    for _ in range(4000):
        rounds = epoch_batches(generator, 8, 2, 2, sampling)
        hits = [sum(((term == 0) | (term == 5)).any() for term in one) for one in rounds]
        counts[sum(k * k for k in hits)] += 1
    distribution = participation_pmf(8, 2, 2, 1, 2, sampling)
    assert set(counts) <= set(distribution.squared_sensitivity.tolist())
    seen = np.array([counts[int(y)] for y in distribution.squared_sensitivity])
    assert stats.chisquare(seen, distribution.prob * (seen.sum() / distribution.prob.sum())).pvalue > 1e-6


@functools.cache
def summed(term, grid):
    """The program."""
    return jax.jit(lambda *given: clipped_gradient_sum(term, *given, grid=grid).total.scaled(1.0))


def total(term, rows, grid, params=None):
    params = np.zeros(rows.shape[-1], np.float32) if params is None else params
    return np.asarray(summed(term, grid)(params, np.float32(rows), np.ones(len(rows), bool)))


def test_a_term_moves_the_sum_by_at_most_twice_the_clip_norm():
    """Equality where every term turns from C v to -C v; k terms move it by 2 k C, not 2 sqrt(k) C."""
    grid, rng = Grid(1.0, 20), np.random.default_rng(0)
    term = mean_gradient_term(linear)
    rows = rng.normal(size=(3, 4, 5)) * 10
    base = total(term, rows, grid)
    for changed in (1, 2, 4):
        other = rows.copy()
        other[0, :changed] = rng.normal(size=(changed, 5)) * 1e6
        assert np.linalg.norm(total(term, other, grid) - base) <= 2 * (1 + 1e-6)
    v = np.array([1.0, 0, 0, 0, 0])
    there, back = np.broadcast_to(9 * v, (3, 4, 5)), np.broadcast_to(-9 * v, (3, 4, 5))
    assert np.linalg.norm(total(term, there, grid) - total(term, back, grid)) == pytest.approx(6, rel=1e-5)


def test_terms_are_what_they_say():
    params, rows = np.float32([0.5, -1.0]), np.float32([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    mean = jax.jit(jax.grad(mean_gradient_term(square)))(params, rows)
    np.testing.assert_allclose(mean, np.mean(params - rows, axis=0), rtol=1e-6)
    # Classical SGD inside the term: the sum of gradients along the way (equation 2).
    rate = 0.1
    w, along = np.array(params), np.zeros(2)
    for row in np.array(rows):
        gradient = w - row
        along += gradient
        w = w - rate * gradient
    found = jax.jit(jax.grad(optimizer_term(square, optax.sgd(rate))))(params, rows)
    np.testing.assert_allclose(found, rate * along, rtol=1e-5)


def test_inner_state_never_leaks_between_rounds_or_terms():
    """Momentum that lived on would carry a record of one term into another, which has no reserve."""
    inner = optax.sgd(0.1, momentum=0.9)
    term = optimizer_term(square, inner)
    params, rows = np.zeros(2, np.float32), np.random.default_rng(1).normal(size=(2, 3, 2)).astype(np.float32)
    grid, gradient = Grid(100.0, 20), jax.jit(jax.grad(term))
    alone = gradient(params, rows[1])
    huge = rows.copy()
    huge[0] = 1e3
    for before in (rows, huge):
        both = [gradient(params, one) for one in before]
        np.testing.assert_array_equal(both[1], alone)
        difference = total(term, before, grid) - total(term, before[:1], grid)
        np.testing.assert_allclose(difference, alone, atol=1e-3)
    # A round carries parameters, noise and the outer state, and nothing else.
    options = dict(clip_norm=1.0, inner=inner, key=KEYS[1])
    step = batch_clipping.make_round(plan(), square, optax.sgd(0.0), **options)
    assert all(np.shape(leaf) in ((2,), (), (8,), (0, 2)) for leaf in jax.tree.leaves(step.init(params)))


def test_noise_of_a_round():
    """Per-coordinate deviation of the released mean is 2 C sigma / m; both sides at false alarm 1e-6."""
    size, clip = 40000, 0.5
    many = plan(num_microbatches=3, microbatch_size=2, dataset_size=12)
    private = batch_clipping.private_rounds(many, clip_norm=clip, key=KEYS[1])
    params = np.zeros(size, np.float32)
    state, release = private.init(params), jax.jit(private.update)
    nothing = GridSum.of(params, private.grid)
    update, state = release(nothing, state)
    expected = 2 * clip * many.sigma / 3
    spread = 4.9 / math.sqrt(2 * size)
    assert abs(np.std(np.asarray(update)) / expected - 1) < spread + 1e-3
    for _ in range(many.iterations - 1):
        update, state = release(nothing, state)
    assert np.isfinite(update).all()
    over, _ = release(nothing, state)
    assert np.isnan(over).all()  # one round more than the plan


def test_fit_runs_all_rounds_and_says_who_it_covers(tmp_path):
    """Interrupted after four of six rounds, with a checkpoint after three: the same bits."""
    data, calls = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), []
    fields = dict(plan=plan(), model=jnp.zeros(3), loss=square, data=data, optimizer=optax.adam(0.1))
    fields |= dict(clip_norm=1.0, inner=optax.adam(0.01))
    whole = fit(**fields, keys=KEYS, progress=lambda *seen: calls.append(seen))
    assert whole.steps == 6 == len(calls) and np.isfinite(whole.params).all()
    assert "sees which records" in whole.statement and "batch clipping, shuffling" in whole.statement

    def stop(what, done, expected):
        if done == 4:
            raise KeyboardInterrupt

    fields |= dict(out=tmp_path / "run", checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        fit(**fields, keys=KEYS, progress=stop)
    for change, word in (({"data": data + 1}, "other data"), ({"clip_norm": 2.0}, "another clip_norm")):
        refused(word, fit, **fields | change)
    result = fit(**fields)  # with fresh keys, which the folder's replace
    np.testing.assert_array_equal(result.params, whole.params)
    assert result.steps == 6


def test_batches_are_replayed_and_others_are_refused():
    """A checkpoint goes on with the batches of its key; one of other batches is not believed."""

    def draws(generator):
        return (generator.permutation(4) for _ in range(5))

    whole = Replayed(draws, KEYS[0], None)
    batches = [whole.next() for _ in range(2)]
    state, third = whole.state, whole.next()
    again = Replayed(draws, KEYS[0], state)
    np.testing.assert_array_equal(again.next(), third)
    assert len(batches) == state.step == 2
    for wrong in ({"digest": "0" * 32}, {"key": (1, 2, 3, 5)}):
        refused("batches were others", Replayed, draws, KEYS[0], dataclasses.replace(state, **wrong))


def test_what_the_plan_does_not_cover_is_refused():
    for change, word in [
        ({"data": np.zeros((11, 3), np.float32)}, "dataset_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"normalize": True}, "normalize must not be given for a plan of general-dpsgd"),
        ({"steps": 7}, "steps must be at most the plan's 6, got 7"),
        ({"optimizer": None}, "optimizer must be given"),
        ({"plan": 3}, "plan must be a plan of"),
        ({"plan": plan(num_epochs=2000)}, "certified"),
        ({"plan": "plan.json"}, "plan"),
        ({"plan": plan(num_microbatches=4, microbatch_size=1), "inner": optax.sgd(0.1)}, "inner"),
        ({"data": np.full((12, 3), np.nan, np.float32)}, "finite"),
    ]:
        fields = dict(plan=plan(), model=jnp.zeros(3), loss=square, data=np.zeros((12, 3), np.float32))
        fields |= dict(optimizer=optax.sgd(0.1), clip_norm=1.0)
        refused(word, fit, **fields | change)
    refused("inner", lambda: fit(**fields | {"plan": correlated(dataset_size=12), "inner": optax.sgd(0.1)}))


def test_plans_are_checked_when_they_are_read(tmp_path):
    sizes = dict(dataset_size=1000, num_microbatches=1, microbatch_size=100, num_epochs=50)
    made = GeneralPlan.calibrate(8.0, 1e-5, sampling="shuffling", **sizes)
    assert made.sigma == pytest.approx(4.24426047, rel=1e-8) and made.certified
    path = tmp_path / "plan.json"
    made.save(path)
    assert GeneralPlan.load(path) == made and made.terms.adversary == "sampling-revealed"
    stored = json.loads(path.read_text())
    bad = dict(delta=9e-6, num_epochs=51, group_size=2, sampling="subsampling", schema="other")
    bad = [*bad.items(), ("microbatch_size", 7), ("epsilon", 7.9), ("epsilon", math.nan)]
    bad += [("sigma", value) for value in (made.sigma * 0.999, -1.0, "4", math.inf)]
    for name, value in bad:
        refused("", GeneralPlan.from_json, stored | {name: value})
    without = {name: value for name, value in stored.items() if name != "delta"}
    for malformed, message in (
        (without, "missing required field `delta`"),
        (stored | {"note": 1}, "plan has the unknown field 'note'"),
        (stored | {"num_epochs": 50.0}, r"plan\.num_epochs: Expected `int`, got `float`"),
        ([stored], "schema jaxacct-general-dpsgd"),
    ):
        refused(message, GeneralPlan.from_json, malformed)


def test_a_round_by_itself():
    """`aggregate` clips whole terms on the grid; a round keeps nothing."""
    updates = {"a": jnp.array([[3.0], [0.3], [0.0]]), "b": jnp.array([[4.0], [0.4], [0.0]])}
    total = aggregate(updates, 1.0, "mixed")
    np.testing.assert_allclose([total["a"][0], total["b"][0]], [0.9, 1.2], atol=1e-5)
    for bad, word in (
        ((updates, 1.0, "batch"), "batch"),
        ((updates, 1.0, "sum"), "mode"),
        (({"a": jnp.array([[jnp.nan]])}, 1.0, "batch"), "finite"),
        (({"a": jnp.zeros(2), "b": jnp.zeros(())}, 1.0, "mixed"), "leading axis"),
    ):
        refused(word, aggregate, *bad)
    # With hardly any noise: the mean of the clipped terms, and what is private only if asked for.
    key = np.arange(8, dtype=np.uint32)
    data = np.float32([[[3.0, 4.0]], [[0.3, 0.4]]])

    def negative_mean(params, rows):
        return -rows.mean(axis=0)

    options = dict(inner_fn=negative_mean, clip_norm=1.0, sigma=1e-4, diagnostics=True)
    by_mean = functools.partial(batch_clipping.private_round_update, key, **options)
    seen, info = jax.jit(by_mean)(np.zeros(2, np.float32), data)
    np.testing.assert_allclose(seen, [-0.45, -0.6], atol=2e-3)
    assert float(info.clipped_fraction) == 0.5
    moved = batch_clipping.outer_update(jnp.ones(2), jnp.array([1.0, 2.0]), 0.5)
    np.testing.assert_allclose(moved, [0.5, 0.0])


@pytest.mark.parametrize("sampling", ["shuffling", "subsampling"])
def test_every_place_of_a_round_is_as_likely_for_a_record(sampling):
    """Places of each of 8 records in rounds of 2 terms of 2; chi-square, false alarm 1e-6 of all together."""
    generator, counts = make_generator((5, 6, 7, 8)), np.zeros((8, 4))
    for _ in range(500):
        for one in epoch_batches(generator, 8, 2, 2, sampling):
            counts[one.ravel(), np.arange(4)] += 1
    assert counts.sum() == 4000 and min(stats.chisquare(counts, axis=1).pvalue) > 1e-6 / 8
