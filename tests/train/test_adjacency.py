"""Training under add-or-remove-one adjacency: nothing that is published depends on the number of examples."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from tests.refusals import refused
from tests.train.clipping.test_cancelling import AS_USERS_COMPILE, cancelling, linear
from tests.train.runs import KEYS, ROWS, data, flat, plan_of, run
from train.batches.sampler import Sampler
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.individual import IndividualAccounting
from train.models.loss import Numbered, as_loss
from train.optimizers import privatize
from train.procedures.step import CLIPPINGS, make_step

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


def covered(adjacency):
    mechanism = Mechanism(BMinSep(12, 4, 0.1), BandedToeplitz.square_root(3), 1.0, adjacency)
    return plan_of(mechanism, ROWS, 1e9)


def test_smaller_data_sets_are_trained_on_with_the_same_public_numbers(tmp_path):
    plan = covered("add-or-remove-one")
    whole = run(plan=plan, out=tmp_path / "whole")
    fewer = run(plan=plan, data=data(ROWS - 3), out=tmp_path / "fewer")
    assert fewer.steps == whole.steps == 12
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "fewer")]
    for result in results:
        del result["model"], result["digest"]  # of parameters, and of all values
    assert results[0] == results[1]
    assert "data sets of 1 to 60 examples" in fewer.statement
    found, stated = Sampler.from_plan(plan, KEYS[0], dataset_size=ROWS - 3), Sampler.from_plan(plan, KEYS[0])
    assert found.max_batch_size == stated.max_batch_size
    members = np.concatenate([batch for batch in (found.next() for _ in range(12))])
    assert members.max() < ROWS - 3


def test_the_noise_and_the_divisor_are_those_of_the_stated_size():
    """Gradients of zero: what is left are the noise and the divisor, the same for both sizes."""
    plan = covered("add-or-remove-one")
    still = {"plan": plan, "loss": lambda params, example: 0.0 * params["b"] + 0.0 * params["w"].sum()}
    whole, fewer = run(**still), run(data=data(ROWS - 3), **still)
    np.testing.assert_array_equal(flat(whole.params), flat(fewer.params))


def test_other_sizes_are_refused():
    for adjacency, more in (("add-or-remove-one", 1), ("zero-out", -1), ("zero-out", 1), ("replace-one", -1)):
        rows = ROWS + more
        plan = covered(adjacency)
        refused("data must have the plan's dataset_size 60 rows", run, plan=plan, data=data(rows))
        refused("dataset_size must be the plan's 60", Sampler.from_plan, plan, KEYS[0], dataset_size=rows)


def test_individual_accounting_is_refused():
    accounting = IndividualAccounting(epsilon=1.0, delta=1e-5)
    for name in ("add-or-remove-one", "replace-one"):
        message = f"individual must not be given with {name}"
        refused(message, run, plan=covered(name), individual=accounting)


def test_a_loss_key_is_refused_where_others_change_their_index():
    """Its keys follow the index: the sum without the first example moves by more than its own gradient."""

    def signed(params, example, key):
        return jax.random.rademacher(key, ()) * example["x"][0] * params["b"]

    rows = np.resize([0.0, 1.0], (64, 1))
    at = as_loss(signed, jax.random.key(0)).at(0)
    gradients = jax.jit(jax.vmap(jax.grad(lambda b, row: at({"b": b}, row)), (None, 0)))

    def total(rows):
        padded = np.append(rows, np.zeros((64 - len(rows), 1)), axis=0)
        return float(gradients(jnp.ones(()), Numbered({"x": padded}, np.arange(64, dtype=np.uint32))).sum())

    assert rows[0] == 0 and abs(total(rows) - total(rows[1:])) > 2  # the removed gradient is 0
    message, plan = "loss_key must not be given with add-or-remove-one", covered("add-or-remove-one")
    refused(f"{message} adjacency", run, plan=plan, loss=signed, loss_key=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_others_have_the_same_gradients_in_other_rows(dtype):
    """Without the first example all others are one row earlier: the sum of their integers must not change."""

    def curved(params, example):
        hidden = jnp.tanh(example["x"].astype(dtype) @ params["w"].astype(dtype))
        return jnp.square(hidden.astype(jnp.float32) @ params["b"] - example["y"])

    rng = np.random.default_rng(0)
    params = {"w": jnp.float32(rng.normal(size=(21, 19))), "b": jnp.float32(rng.normal(size=19))}
    rows = {"x": np.float32(rng.normal(size=(37, 21))), "y": np.float32(rng.normal(size=37))}

    @jax.jit
    def total(rows, mask):
        options = dict(grid=Grid(1.0, 20), microbatch_size=37)
        return clipped_gradient_sum(curved, params, rows, mask, **options).total

    def units(rows, mask):
        return np.concatenate([part.ravel() for part in jax.tree.leaves(total(rows, mask).units())])

    whole = units(rows, np.arange(37) > 0)  # the first one's gradient is zero
    fewer = units(jax.tree.map(lambda leaf: np.roll(leaf, -1, axis=0), rows), np.arange(37) < 36)
    np.testing.assert_array_equal(whole, fewer)
    other = jax.tree.map(lambda leaf: np.nextafter(leaf, np.float32(9)), rows)
    assert dtype != jnp.float32 or (units(other, np.arange(37) > 0) != whole).any()


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_rows_that_vector_instructions_leave_over(clipping, size=37):
    """Attack: gradients that cancel; one row earlier those of the last rows had another rounding.

    The step without the first example moved the others by a whole clip norm, with the compiler's flags of
    users and as many rows at a time as the batch has.
    """
    mechanism = Mechanism(BMinSep(12, 4, 0.1), BandedToeplitz.square_root(3), 1.0, "add-or-remove-one")
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEYS[1])
    options = dict(clipping=clipping, microbatch_size=size)
    step = make_step(linear, private, optax.sgd(1.0), **options)
    rows, params = cancelling(3, size), {"w": jnp.zeros(3)}
    moved = jax.jit(lambda *given: step(*given)[0].params["w"], compiler_options=AS_USERS_COMPILE)
    whole = moved(step.init(params), rows, np.arange(size) > 0)
    rows = jax.tree.map(lambda leaf: np.roll(leaf, -1, axis=0), rows)
    np.testing.assert_allclose(moved(step.init(params), rows, np.arange(size) < size - 1), whole, atol=1e-5)
