"""Normals drawn before their step is asked for: they are those of the state that the step is given."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.runs import PARAMS, flat, loss, plan
from train.noise import recursion
from train.optimizers import privatize
from train.procedures import step as step_module
from train.procedures.step import _draw, make_step

BATCH = {"x": jnp.zeros((4, 3)), "y": jnp.zeros(4)}, jnp.zeros(4, bool)
PLAN = plan(dataset_size=60)


def step_of(seed: int):
    """With a key of its own. No example joins a batch: each step's parameters move by its noise alone."""
    key = np.arange(seed, seed + 8, dtype=np.uint32)
    private = privatize(PLAN.mechanism, clip_norm=1.0, expected_batch_size=10.0, key=key)
    return make_step(loss, private, optax.sgd(1.0))


def drawn_in_one_program(step, steps: int) -> list[np.ndarray]:
    """The parameters after each step, of noise that `recursion.draw` draws itself."""
    private, state = step.private, step.private.init(PARAMS)
    draw = jax.jit(lambda state: recursion.draw(private.mechanism.strategy, private.levels, state, PARAMS))
    found, total = [], np.zeros(4)
    for _ in range(steps):
        integers, state = draw(state)
        total = total - flat(integers)
        found.append(total * 2.0**-private.grid.bits / private.expected_batch_size)
    return found


def parameters(state) -> np.ndarray:
    return flat(state.params)


@pytest.fixture(scope="module")
def steps():
    """Two steps with keys of their own, and what each gives."""
    return [(step, drawn_in_one_program(step, 5)) for step in map(step_of, (0, 100))]


def test_each_state_has_its_own(steps):
    """Attack: one step object is given the states of two runs in turns, and a state of earlier once more."""
    (step, one), (other, two) = steps
    ours, theirs = step.init(PARAMS), other.init(PARAMS)
    for at in range(3):
        ours, _ = step(ours, *BATCH)
        theirs, _ = step(theirs, *BATCH)
        np.testing.assert_allclose(parameters(ours), one[at], rtol=1e-5)
        np.testing.assert_allclose(parameters(theirs), two[at], rtol=1e-5)
    earlier = jax.tree.map(jnp.array, ours)
    for _ in range(2):
        ours, _ = step(ours, *BATCH)
    for at in (3, 4):
        earlier, _ = step(earlier, *BATCH)
        np.testing.assert_allclose(parameters(earlier), one[at], rtol=1e-5)
    np.testing.assert_array_equal(parameters(earlier), parameters(ours))


def test_in_a_program_around_it(steps):
    """A scan draws in its own program, and leaves no part of it in the step."""
    step, expected = steps[0]

    @jax.jit
    def scanned(state):
        return jax.lax.scan(lambda state, _: (step(state, *BATCH)[0], None), state, length=3)[0]

    np.testing.assert_allclose(parameters(scanned(step.init(PARAMS))), expected[2], rtol=1e-5)
    state, _ = step(step.init(PARAMS), *BATCH)
    np.testing.assert_allclose(parameters(state), expected[0], rtol=1e-5)


def test_a_trace_around_a_known_state_leaves_nothing(steps):
    """Attack: what is kept of a step within another trace would be no array, and end the run."""
    step, expected = steps[0]
    state, _ = step(step.init(PARAMS), *BATCH)
    jax.eval_shape(lambda rows: step(state, rows, BATCH[1])[0].params["w"], BATCH[0])
    state, _ = step(state, *BATCH)
    np.testing.assert_allclose(parameters(state), expected[1], rtol=1e-5)


def test_a_thread_with_another_state_does_not_lend_its_normals(steps, monkeypatch):
    """Attack: another thread takes a step with the same object after this one has drawn."""
    (step, one), (other, two) = steps
    theirs, state = other.init(PARAMS), step.init(PARAMS)

    def interrupted(self, name, value):
        object.__setattr__(self, name, value)
        if name == "_drawn" and value is not None:
            monkeypatch.undo()
            with ThreadPoolExecutor(1) as pool:
                after, _ = pool.submit(step, theirs, *BATCH).result()
            np.testing.assert_allclose(parameters(after), two[0], rtol=1e-5)

    monkeypatch.setattr(step_module.PrivateStep, "__setattr__", interrupted, raising=False)
    for expected in one[:3]:
        state, _ = step(state, *BATCH)
        np.testing.assert_allclose(parameters(state), expected, rtol=1e-5)


def test_another_key_or_step_in_a_state_is_followed(steps):
    (step, _), (other, two) = steps
    state, _ = step(step.init(PARAMS), *BATCH)
    begun = other.init(PARAMS)
    # As restored from a checkpoint: the same state but for its noise.
    state, _ = step(state._replace(params=begun.params, noise=begun.noise), *BATCH)
    np.testing.assert_allclose(parameters(state), two[0], rtol=1e-5)


def test_small_models_share_the_program():
    programs = []
    small = make_step(lambda w, example: w.sum() * example["y"], step_of(3).private, optax.sgd(1.0))
    for step, params in ((step_of(1), PARAMS), (step_of(2), PARAMS), (small, jnp.zeros(20))):
        state, _ = step(step.init(params), *BATCH)
        step(state, *BATCH)
        programs.append(_draw._cache_size())
    assert programs[0] == programs[1] == programs[2] > 0


def test_no_message_shows_what_was_drawn(steps):
    step, _ = steps[0]
    state, _ = step(step.init(PARAMS), *BATCH)
    assert state.noise.key is not None
    shown = repr(step._drawn) + repr(step) + repr(vars(step)["_drawn"])
    assert "secret" in shown and "Array" not in shown
