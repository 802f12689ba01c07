"""What a loss reads beside the parameters: frozen weights that stay out of everything, keys, no writing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.refusals import refused
from tests.train import test_batch_clipping
from tests.train.runs import KEYS, ROWS, crashed, data, fit, flat, plan, run, squared
from tests.train.test_dice import PLAN
from train import load_model
from train.clipping.ghost import ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.models.loss import Loss, Numbered, NumberedRows, as_loss, nnx_loss, public_key
from train.models.saving import save_model
from train.optimizers import privatize
from train.procedures.dice import dice_step
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


class Adapted(nnx.Module):
    """A linear layer in bfloat16, its adapters in float32, and dropout."""

    def __init__(self, seed=0, dtype=jnp.bfloat16):
        rngs = nnx.Rngs(seed)
        self.layer = nnx.LoRALinear(3, 1, lora_rank=2, param_dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(3))

    def __call__(self, x):
        return self.layer(x)[..., 0]


def dropped(model, example, key):
    del key  # dropout draws from the model's own stream
    return (model(model.dropout(example["x"])) - example["y"]) ** 2


def tune(**options):
    given = dict(model=Adapted(), loss=squared, wrt=nnx.LoRAParam) | options
    return run(**given)


def shapes(tree):
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


def four_examples():
    """(a transformation, rows, mask) of a step of four examples."""
    private = privatize(plan(dataset_size=ROWS).mechanism, clip_norm=1.0, expected_batch_size=4.0)
    return private, jax.tree.map(lambda leaf: leaf[:4], data()), np.ones(4, bool)


def test_only_what_is_selected_is_trained():
    """The same bits as adapters alone with the base as a constant: it has no noise, no norm, no state."""
    model = Adapted(dtype=jnp.float32)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    result = tune(model=model)
    lora = model.layer.lora
    params = {"a": lora.lora_a[...], "b": lora.lora_b[...]}

    def alone(frozen, params, example):
        kernel, bias = frozen
        x = example["x"]
        return ((x @ kernel + bias + x @ params["a"] @ params["b"])[0] - example["y"]) ** 2

    frozen = before["layer"]["kernel"], before["layer"]["bias"]
    ours = run(model=params, loss=jax.tree_util.Partial(alone, frozen), clip_norm=1.0)
    assert shapes(result.params) == [(3, 2), (2, 1)]
    assert np.abs(flat(result.params) - flat(params)).min() > 0
    np.testing.assert_allclose(flat(result.params), flat(ours.params), rtol=1e-5, atol=1e-6)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    chex.assert_trees_all_equal(before, after)


def test_frozen_weights_are_arguments_and_not_in_the_state():
    """A program with the weights as literals is another one for other weights; closed over, they are that."""
    private, rows, mask = four_examples()

    def program(loss, params) -> tuple[str, list]:
        step = make_step(loss, private, optax.adam(0.1))
        state = step.init(params)
        return step.trace(state, rows, mask).lower().as_text(), shapes(state)

    ours = [program(*nnx_loss(Adapted(seed), squared, nnx.LoRAParam)) for seed in (0, 1)]
    assert ours[0] == ours[1]
    assert (3, 1) not in ours[0][1] and (2, 3, 2) in ours[0][1]  # of the noise of three bands

    def closing(weight):
        return lambda params, example: (example["x"] @ (weight * params) - example["y"]) ** 2

    a, b = (program(closing(np.arange(3.0, dtype=np.float32) + i), jnp.zeros(3)) for i in (0, 1))
    assert a[0] != b[0]


def test_dropout_and_mixed_precision_resume_to_the_same_bits(tmp_path):
    options = dict(loss=dropped, loss_key=5, checkpoint_every=5, optimizer=optax.adam(0.1))
    whole = tune(out=tmp_path / "whole", **options)
    crashed(8, tune, out=tmp_path / "part", **options)
    part = tune(out=tmp_path / "part", **options)
    np.testing.assert_array_equal(flat(part.params), flat(whole.params))
    for name, other in (
        ("weights", dict(model=Adapted(1))),
        ("key of the loss", dict(loss_key=6)),
        ("frozen part", dict(wrt=nnx.Any(nnx.LoRAParam, nnx.PathContains("bias")))),
    ):
        said = refused(name, tune, out=tmp_path / "part", **options | other)
        assert "noise must not be used twice" in said
    # What was trained goes into the model that it was trained in, and into no other.
    loaded = load_model(tmp_path / "whole", Adapted())
    np.testing.assert_array_equal(flat(nnx.state(loaded, nnx.LoRAParam)), flat(whole.params))
    message = "model must have the frozen variables that the run began with"
    refused(message, load_model, tmp_path / "whole", Adapted(1))


def test_a_checkpoint_to_begin_from(tmp_path):
    save_model(tmp_path, Adapted(3))
    found = load_model(tmp_path, Adapted(0))
    np.testing.assert_array_equal(found.layer.kernel[...], Adapted(3).layer.kernel[...])
    save_model(tmp_path / "less", Adapted(3).layer.lora)
    refused("model must be of the structure", lambda: load_model(tmp_path / "less", Adapted(0)))


def test_more_than_parameters_can_be_trained_and_loaded(tmp_path):
    result = tune(wrt=nnx.Not(nnx.RngState), steps=1, out=tmp_path)
    loaded = load_model(tmp_path, Adapted(1))
    np.testing.assert_array_equal(flat(nnx.state(loaded, nnx.Not(nnx.RngState))), flat(result.params))
    bare = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    refused("model must be of the structure", load_model, tmp_path, bare)


def remember(model, example):
    """The attack: what one example is would be there for the gradient of the next."""
    model.seen[...] = model.seen[...] + example["x"]
    return squared(model, example) * model.seen[...].sum()


def overwrite(model, example):
    model.layer.bias[...] = example["x"][:1]
    return squared(model, example)


def add(model, example):
    model.more = nnx.Variable(example["x"])
    return squared(model, example)


def remember_inside(model, example):
    return nnx.remat(remember)(model, example)


def test_a_loss_that_writes_to_the_model_is_refused():
    for loss, wrote in [
        (remember, "wrote to seen"),
        (remember_inside, "wrote to seen"),
        (overwrite, r"wrote to layer\.bias"),
        (add, "added more"),
        (functools.partial(dropped, key=None), r"wrote to dropout\.rngs\.count.*give loss_key"),
    ]:
        refused(rf"^loss must not .*{wrote}", tune, loss=loss)


def scanned(model, example):
    def layer(carry, model):
        return carry, model(example["x"])

    stack = nnx.scan(layer, in_axes=(nnx.Carry, None), length=1)
    return (stack(0.0, model)[1][0] - example["y"]) ** 2


def uniform(params, example, key):
    return jax.random.uniform(key) * example * params


def test_a_key_depends_on_the_step_and_the_example_alone():
    """Keyed by place in the batch, one example more would give all after it other gradients, unclipped."""
    loss = as_loss(uniform, jax.random.key(1))

    @jax.jit
    def total(batch, step):
        given = np.ones((), np.float32), batch, np.ones(2, bool)
        return clipped_gradient_sum(loss.at(step), *given, grid=Grid(1.0, 20)).total.scaled(2**20)

    def summed(numbers, step=0):
        return int(total(Numbered(np.ones(2, np.float32), np.array(numbers, np.uint32)), step))

    alone = [summed([i, i]) // 2 for i in (3, 9)]
    assert summed([9, 3]) == summed([3, 9]) == sum(alone)
    assert len({*alone, summed([3, 3], step=1) // 2}) == 3
    rows = NumberedRows(type("Ten", (), {"take": lambda self, indices, size: np.zeros(size)})())
    np.testing.assert_array_equal(rows.take(np.array([7, 2]), 3).number, [7, 2, 0])


def test_streams_of_the_model_are_seeded_for_every_step_and_example():
    model, masks = Adapted(), []

    def look(model, example, key):
        masks.append((model.dropout(jnp.ones(64)), model.dropout(jnp.ones(64)), jax.random.bits(key)))
        return model(example).sum()

    loss, params = nnx_loss(model, look, nnx.LoRAParam, jax.random.key(0))
    for step, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        loss.at(step)(params, Numbered(jnp.ones(3), jnp.uint32(number)))
    drawn = [np.asarray(mask).tobytes() for both in masks[:3] for mask in both]
    assert len(set(drawn)) == 9
    assert [np.asarray(mask).tobytes() for mask in masks[3]] == drawn[:3]
    assert all(int(count) == 0 for count in jax.tree.leaves(nnx.state(model, nnx.RngCount)))


BAD = [
    (dict(wrt=nnx.BatchStat), "wrt must select parameters"),
    (dict(wrt=7), "wrt must be an nnx filter"),
    (dict(wrt=nnx.Any(nnx.LoRAParam, nnx.RngCount)), r"wrt must select floating-point arrays.*uint32"),
    (dict(loss=as_loss(squared), loss_key=1), r"loss_key must not be given with a train\.models\.loss\.Loss"),
]


def test_bad_arguments_are_refused_in_one_line():
    for options, message in BAD:
        refused(message, tune, **options)
    named_key = Loss(lambda frozen, key, params, example: jnp.sum(params), {"key": jnp.ones(3)}, None)
    refused("called key", named_key.digests)


def test_other_plans_freeze_and_draw_keys_as_well():
    """Of a general plan one round by hand, of DiceSGD the program; both would ignore a key at their peril."""
    rows = np.eye(3, dtype=np.float32).repeat(4, axis=0)
    frozen = jnp.array([1.0, 2.0, 3.0])

    def loss(frozen, params, row, key):
        return params @ (row * frozen) * jax.random.uniform(key)

    bound, covered = jax.tree_util.Partial(loss, frozen), test_batch_clipping.plan(num_epochs=1)

    def one_round(loss_key):
        given = covered, jnp.zeros(3), bound, rows, optax.sgd(1.0)
        found = fit(*given, clip_norm=1.0, steps=1, keys=KEYS, verify=False, loss_key=loss_key)
        return np.asarray(found.params)

    assert (one_round(4) != one_round(5)).any()
    step = dice_step(PLAN, as_loss(bound, public_key(4)), optax.sgd(1.0), key=KEYS[1])
    batch = Numbered(rows[:4], np.arange(4, dtype=np.uint32))
    text = step.trace(step.init(jnp.zeros(3)), batch, np.ones(4, bool)).lower().as_text()
    assert "threefry" in text and "[1.0" not in text


def _sum_of(loss, rows, mask, numbers=None):
    batch = rows if numbers is None else Numbered(rows, np.array(numbers, np.uint32))
    params, grid = np.zeros(64, np.float32), Grid(1.0, 20)
    return jax.jit(
        lambda batch: clipped_gradient_sum(loss, params, batch, mask, grid=grid).total.scaled(1.0)
    )(batch)


def test_keys_that_draw_for_a_whole_batch_are_refused():
    """The attack: with rbg, whether one example is there changes the others' masks; 2.29 was seen."""

    def loss(params, example, key):
        return jnp.sum(params * example * jax.random.bernoulli(key, 0.5, (64,)))

    rows = np.ones((4, 64), np.float32)
    there, not_there = np.ones(4, bool), np.array([True, True, True, False])
    key = jax.random.key(0, impl="rbg")
    refused("loss_key must be a key of threefry2x32, got one of key<rbg>", public_key, key)
    by_hand = as_loss(loss, key).at(0)
    refused("keep examples apart: keys of key<rbg>", _sum_of, by_hand, rows, there, [3, 5, 6, 9])
    with jax.default_prng_impl("rbg"):
        right = as_loss(loss, public_key(0)).at(0)
        with_it = _sum_of(right, rows, there, [3, 5, 6, 9])
        moved = np.linalg.norm(np.asarray(with_it) - _sum_of(right, rows, not_there, [5, 6, 9, 0]))
    assert 0.9 < moved <= 1


def test_weights_that_a_device_is_bound_to_make_one_program():
    """As `load_model` gives them: the state that came out of the first step went into a second program."""
    private, rows, mask = four_examples()
    weight = jax.device_put(np.ones(3, np.float32), jax.devices()[0])
    loss = jax.tree_util.Partial(lambda weight, w, e: (e["x"] @ (weight * w) - e["y"]) ** 2, weight)
    step = make_step(loss, private, optax.sgd(0.1))
    state = step.init(jnp.zeros(3))
    for _ in range(3):
        state, _ = step(state, rows, mask)
    assert step._jitted.programs() == 1


def test_transformations_that_hand_the_model_back_are_no_writing():
    example = jax.tree.map(lambda leaf: leaf[0], data())
    expected, params = nnx_loss(Adapted(), squared)
    expected = float(jax.jit(lambda *given: expected(*given))(params, example))
    for loss in (lambda m, e: nnx.remat(squared)(m, e), lambda m, e: nnx.jit(squared)(m, e), scanned):
        functional, params = nnx_loss(Adapted(), loss)
        value, gradient = jax.jit(jax.value_and_grad(functional))(params, example)
        assert value == pytest.approx(expected, rel=1e-2)
        assert any(np.any(np.asarray(leaf, np.float32) != 0) for leaf in jax.tree.leaves(gradient))


def test_what_is_handed_a_whole_batch_is_refused():
    """The attack: a masked row's content reached the others' gradients by 1.67."""

    def own_key(params, example):
        seed = jax.lax.bitcast_convert_type(example[0], jnp.uint32)
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), seed)
        return jnp.sum(params * jax.random.normal(key, (64,)))

    given = own_key, jnp.zeros(64), np.ones((4, 64), np.float32), np.ones(4, bool)
    for sum_of in (clipped_gradient_sum, ghost_gradient_sum):
        refused(r"keep examples apart.*key<rbg>", sum_of, *given, grid=Grid(1.0, 20))
