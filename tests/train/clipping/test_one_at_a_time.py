"""Primitives that are not known to keep rows apart: examples are computed one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tests.train.test_loop import run
from train.clipping import ghost, rows_apart
from train.clipping.ghost import choose
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum

pytestmark = pytest.mark.usefixtures("default_promotion")

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
    with pytest.raises(ValueError, match="loss must keep examples apart: mixes is not one of the primitives"):
        summed(lambda params, x: (params * made.bind(x)).sum(), jnp.ones(3))


def test_a_callback_beside_it_is_refused():
    """It may keep a state from one example to the next."""

    def loss(params, x):
        seen = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x[0])
        return experts(params, x) + lax.stop_gradient(seen)

    with pytest.raises(
        ValueError, match=r"keep examples apart: (pure_callback|ragged_dot_general) is not one"
    ):
        summed(loss, jnp.ones((2, 3, 4)))


def test_ghost_clipping_is_not_chosen_for_it_and_refuses_it():
    params = jnp.ones((2, 3, 400))
    found = choose(experts, params, ROWS, grid=GRID)
    assert found.clipping == "per_example" and "one at a time" in found.reason
    with pytest.raises(ValueError, match=r"ragged_dot_general does one at a time: clipping must be 'per_exa"):
        ghost.ghost_gradient_sum(experts, params, ROWS, MASK, grid=GRID)


def test_fit_trains_a_mixture_of_experts():
    def loss(params, example):
        return experts(params["w"], example["x"]) + params["b"] - example["y"]

    params = {"w": jnp.ones((2, 3, 200)), "b": jnp.zeros(())}
    with pytest.warns(UserWarning, match=WARNING.format("ragged_dot_general")):
        found = run(model=params, loss=loss, steps=2)
    assert jnp.isfinite(found.params["w"]).all() and (found.params["w"] != 1).any()
