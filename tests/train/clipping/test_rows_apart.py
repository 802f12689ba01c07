"""Which programs keep rows apart: attacks, and what is computed one at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import buffer_callback, custom_partitioning, io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tests.refusals import refused
from tests.train.runs import run
from train.clipping import ghost, rows_apart
from train.clipping.ghost import choose
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.rows_apart import why_not

pytestmark = pytest.mark.usefixtures("default_promotion")  # programs as users write them

ONE = jax.ShapeDtypeStruct((), jnp.float32)
OTHER = jax.random.key(0, impl="rbg")


def doubled(x):
    return jax.pure_callback(lambda x: 2 * x, ONE, x)


def of_words(x):
    return x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1].sum().astype(x.dtype)


@jax.custom_batching.custom_vmap
def by_rule(x):
    return 2 * x


by_rule.def_vmap(lambda size, batched, x: (x + x.mean(), True))


def by_own_rule(name: str):
    """A primitive that gives every row the mean of the batch."""
    mixing = Primitive(name)
    mixing.def_impl(lambda x: x)
    mixing.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[mixing] = lambda args, dims: (args[0].mean() + 0 * args[0], dims[0])
    mlir.register_lowering(mixing, mlir.lower_fun(lambda x: x, multiple_results=False))
    return mixing.bind


@custom_partitioning.custom_partitioning
def partitioned(x):
    return 2 * x


partitioned.def_partition(
    partition=lambda mesh, args, result: None,
    infer_sharding_from_operands=lambda *_: None,
    sharding_rule="->",
)


def test_what_may_receive_a_whole_batch_is_named():
    for mixes, name in [
        (doubled, "pure_callback"),
        (lambda x: io_callback(lambda x: 2 * x, ONE, x), "io_callback"),
        (lambda x: buffer_callback.buffer_callback(lambda *_: None, ONE)(x), "buffer_callback"),
        (of_words, "rng_bit_generator"),
        (lambda x: jax.lax.rng_uniform(x, 1.0, (3,)), "rng_uniform"),
        (lambda x: jax.ffi.ffi_call("of_somebody", ONE)(x), "ffi_call"),
        (by_rule, "custom_vmap_call"),
        (partitioned, "custom_partitioning"),
        (by_own_rule("mixing"), "mixing"),
        (by_own_rule("add"), "add"),  # the name of one of JAX's
        (by_own_rule("scan"), "scan"),
        (lambda x: jax.vmap(lambda y: lax.psum(y, "rows"), axis_name="rows")(x[None])[0], None),
        # Not the first part of a program alone, and parts of parts.
        (lambda x: jax.lax.cond(x > 0, lambda: x, lambda: doubled(x)), "pure_callback"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(doubled)(y), x), "pure_callback"),
        (lambda x: lax.while_loop(lambda y: doubled(y) < 3, lambda y: y + 1, x), "pure_callback"),
        (jax.checkpoint(doubled), "pure_callback"),
        (lambda x: lax.reduce(x[None], 0.0, lambda a, b: a + b + doubled(b), (0,)), "pure_callback"),
        (lambda x: x[None].at[0].apply(doubled), "pure_callback"),
        (lambda x: lax.custom_linear_solve(lambda v: v, x, lambda _, b: doubled(b), symmetric=True), "pure_"),
    ]:
        found = why_not(jax.make_jaxpr(mixes)(jnp.float32(1)).jaxpr)
        assert (found is None) if name is None else (name in found and "\n" not in found)


def test_a_collective_is_refused():
    """What reads the other rows of an axis that a vmap around the whole step has named."""

    def of_row(x):
        found.append(why_not(jax.make_jaxpr(lambda x: lax.psum(x, "rows"))(x).jaxpr))
        return x

    found = []
    jax.eval_shape(jax.vmap(of_row, axis_name="rows"), jnp.ones(2))
    assert found[0].startswith("psum")


def test_keys_that_come_from_outside_are_seen():
    """Nothing in the program makes the key; it only draws with it."""
    with_key = jax.make_jaxpr(lambda key: jax.random.bits(key))
    assert "key<rbg>" in why_not(with_key(OTHER).jaxpr)
    assert why_not(with_key(jax.random.key(0, impl="threefry2x32")).jaxpr) is None


GRID = Grid(1.0, 20)
ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
MASK = np.array([True, True, False, True, True, True])
WARNING = "loss uses {}, which is not known to keep the examples of a batch apart: they are computed one at a"


def experts(params, x):
    """A mixture of two experts, each of one of two tokens."""
    return jnp.square(lax.ragged_dot(jnp.stack([x, 2 * x]), params, jnp.array([1, 1]))).sum()


def summed(loss, params, rows=ROWS, mask=MASK):
    return clipped_gradient_sum(loss, params, rows, mask, grid=GRID).total.scaled(1.0)


def of_a_loop(loss, params):
    gradients = [np.asarray(jax.grad(loss)(params, row)) for row in ROWS[MASK]]
    return sum(g / max(1.0, np.linalg.norm(g)) for g in gradients)


def test_a_mixture_of_experts_is_clipped_as_by_a_loop():
    params = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)
    with pytest.warns(UserWarning, match=WARNING.format("ragged_dot_general")):
        found = summed(experts, params)
    np.testing.assert_allclose(found, of_a_loop(experts, params), atol=1e-4)


def mixing():
    """A primitive of which a batch gives every row the sum of all rows."""
    made = Primitive("mixes")
    made.def_impl(lambda x: x)
    made.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[made] = lambda args, dims: (args[0].sum(0) + 0 * args[0], 0)
    ad.deflinear2(made, lambda cotangent, x: [cotangent])
    mlir.register_lowering(made, mlir.lower_fun(lambda x: x, multiple_results=False))
    return made


def test_rows_are_apart_whatever_the_rule_for_batches_does(monkeypatch):
    """The attack: a rule that mixes rows, of a primitive that is let through one at a time.

    Computed together, the absent third row would move the gradients of the others.
    """
    made = mixing()
    monkeypatch.setattr(rows_apart, "_alone", lambda: frozenset([made]))

    def loss(params, x):
        return (params * made.bind(x)).sum()

    with pytest.warns(UserWarning, match=WARNING.format("mixes")):
        found = summed(loss, jnp.ones(3))
    np.testing.assert_allclose(found, of_a_loop(loss, jnp.ones(3)), atol=1e-4)
    huge = ROWS.copy()
    huge[2] = 1e6
    with pytest.warns(UserWarning):
        np.testing.assert_array_equal(summed(loss, jnp.ones(3), huge), found)


def test_a_primitive_of_others_is_refused_all_the_same():
    made = mixing()
    given = lambda params, x: (params * made.bind(x)).sum(), jnp.ones(3)
    refused("loss must keep examples apart: mixes is not one of the primitives", summed, *given)


def test_a_callback_beside_it_is_refused():
    """It may keep a state from one example to the next."""

    def loss(params, x):
        seen = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x[0])
        return experts(params, x) + lax.stop_gradient(seen)

    message = r"keep examples apart: (pure_callback|ragged_dot_general) is not one"
    refused(message, summed, loss, jnp.ones((2, 3, 4)))


def test_ghost_clipping_is_not_chosen_for_it_and_refuses_it():
    params = jnp.ones((2, 3, 400))
    found = choose(experts, params, ROWS, grid=GRID)
    assert found.clipping == "per_example" and "one at a time" in found.reason
    message = "ragged_dot_general does one at a time: clipping must be 'per_exa"
    refused(message, ghost.ghost_gradient_sum, experts, params, ROWS, MASK, grid=GRID)


def test_fit_trains_a_mixture_of_experts():
    def loss(params, example):
        return experts(params["w"], example["x"]) + params["b"] - example["y"]

    params = {"w": jnp.ones((2, 3, 200)), "b": jnp.zeros(())}
    with pytest.warns(UserWarning, match=WARNING.format("ragged_dot_general")):
        found = run(model=params, loss=loss, steps=2)
    assert jnp.isfinite(found.params["w"]).all() and (found.params["w"] != 1).any()
