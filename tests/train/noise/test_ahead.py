"""Noise computed by a thread for the step that comes: that which its own program would have drawn."""

from concurrent.futures import Future

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism
from train.noise import prefetch as ahead
from train.noise import recursion
from train.noise.normals import normals_of
from train.noise.recursion import Fresh
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU draws words in its program")

KEY = np.arange(8, dtype=np.uint32)
STEPS = 4
ROWS, MASK = np.ones((2, 3), np.float32), np.ones(2, bool)
PRIVATE = privatize(
    Mechanism(BMinSep(STEPS, 2, 0.5), BandedToeplitz((1.0, 0.4)), 1.0),
    clip_norm=1.0,
    expected_batch_size=2.0,
    key=KEY,
)


@pytest.fixture
def threaded(monkeypatch):
    monkeypatch.setattr(ahead, "_FEWEST", 1)


@pytest.fixture(scope="module")
def step():
    return new_step()


def new_step():
    return make_step(lambda params, x: (params * x).sum(), PRIVATE, optax.sgd(1.0), microbatch_size=2)


def begun(step, key=KEY):
    state = step.init(jnp.zeros(3))
    return state._replace(noise=state.noise._replace(key=jnp.asarray(key)))


def params_of(step, states):
    """Parameters after each of all steps, of states that take turns."""
    seen = []
    for _ in range(STEPS):
        states = [step(state, ROWS, MASK)[0] for state in states]
        seen.append([np.asarray(state.params) for state in states])
    return np.array(seen)


@pytest.fixture(scope="module")
def expected(step):
    """Of two keys, drawn inside of the program: too few parameters for a thread."""
    return params_of(step, [begun(step), begun(step, KEY + 1)])


def test_what_is_trained_is_the_same(step, expected, threaded):
    np.testing.assert_allclose(params_of(step, [begun(step)])[:, 0], expected[:, 0], rtol=1e-6)
    assert step._ahead._coming is None  # nothing beyond the last step


@pytest.mark.parametrize(
    "strategy",
    [BandedToeplitz((1.0, 0.4, 0.2)), BufferedToeplitz((0.9, 0.5), (0.2, 0.3), STEPS)],
    ids=["bands", "sums"],
)
def test_noise_of_the_thread_is_that_of_the_program(strategy, threaded, monkeypatch):
    """What is trained and kept is the same bit for bit: whole numbers of noise, and sums of whole numbers."""
    private = privatize(
        Mechanism(BMinSep(STEPS, 3, 0.5), strategy, 0.7), clip_norm=1.0, expected_batch_size=2.0, key=KEY
    )
    step = make_step(lambda params, x: (params * x).sum(), private, optax.sgd(1.0), microbatch_size=2)
    seen = []
    for fewest in (1, 2**16):
        monkeypatch.setattr(ahead, "_FEWEST", fewest)
        state = begun(step)
        assert (step._ahead.take(state.noise) is None) == (fewest > 1)
        seen.append([])
        for _ in range(STEPS):
            state, _ = step(state, ROWS, MASK)
            seen[-1].append(jax.tree.map(np.asarray, state))
    chex.assert_trees_all_equal(*seen)


def test_threads_do_not_share_memory_for_words(step, threaded, monkeypatch):
    """Who draws at once, while the thread draws for another state, would write into its words."""
    rooms = []
    drawn = ahead.words_on_the_host
    monkeypatch.setattr(ahead, "words_on_the_host", lambda *args: rooms.append(args[3]) or drawn(*args))
    for key in (KEY, KEY + 1):
        step(begun(step, key), ROWS, MASK)
    step._ahead._coming.made.result()
    assert rooms[0] is None and rooms.count(None) == 2
    assert rooms.count(step._ahead._room) == 2


def test_states_that_take_turns_get_the_noise_of_their_own_keys(step, expected, threaded):
    """Normals drawn for the state before would win: releases with the same noise give their difference."""
    np.testing.assert_allclose(params_of(step, [begun(step), begun(step, KEY + 1)]), expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("key", KEY + 1), ("step", np.int32(0))])
def test_a_changed_state_gets_its_own_noise(step, expected, name, value, monkeypatch):
    """What a thread has drawn for the state as it was, with one of two arrays the same, is not used."""
    seen = []
    for fewest in (1, 2**16):
        monkeypatch.setattr(ahead, "_FEWEST", fewest)
        state, _ = step(begun(step), ROWS, MASK)
        state = state._replace(noise=state.noise._replace(**{name: jnp.asarray(value)}))
        seen.append(step(state, ROWS, MASK)[0].params)
    np.testing.assert_allclose(*seen, rtol=1e-6)


def test_who_goes_on_from_a_state_draws_what_the_run_would_have_drawn(step, threaded):
    state, _ = step(begun(step), ROWS, MASK)
    kept = jax.tree.map(np.asarray, state)  # as a checkpoint holds it
    state, _ = step(state, ROWS, MASK)
    again, _ = new_step()(jax.tree.map(jnp.asarray, kept), ROWS, MASK)
    chex.assert_trees_all_equal(state, again)


@pytest.mark.parametrize(("number", "key"), [(1, KEY), (0, KEY + 1)])
def test_normals_of_another_step_or_key_release_nothing(step, number, key, expected):
    state = begun(step)
    made = recursion.solve(
        PRIVATE.mechanism.strategy, PRIVATE.levels, state.noise, normals_of(key, number, [(3,)])
    )
    wrong = Fresh(np.int32(number), key, made)
    after, _ = step._jitted(state, ROWS, MASK, step._loss, wrong)
    assert np.isnan(after.params).all()
    # Nor later, where an optimizer leaves out what is not finite.
    for _ in range(2):
        after, _ = step(after._replace(params=jnp.zeros(3)), ROWS, MASK)
        assert np.isnan(after.params).all()


def test_the_key_of_normals_is_not_in_memory_that_the_step_writes_to(step, threaded):
    state = begun(step)
    fresh = step._ahead.take(state.noise)
    assert fresh is not None and fresh.are_of(state.noise)
    assert not np.shares_memory(fresh.key, np.asarray(state.noise.key))


def test_a_draw_waits_for_the_step_before_the_last(step, threaded, monkeypatch):
    """However far steps are dispatched ahead, three vectors of normals are in memory at most."""
    waited = []
    monkeypatch.setattr(ahead.jax, "block_until_ready", waited.append)
    state, infos = begun(step), []
    for _ in range(STEPS):
        state, info = step(state, ROWS, MASK)
        infos.append(info.loss)
    assert waited[:2] == [None, None]
    assert all(a is b for a, b in zip(waited[2:], infos, strict=False))
    assert len(waited) == STEPS


def test_no_thread_inside_of_another_program(step, threaded):
    after, _ = jax.jit(step)(begun(step), ROWS, MASK)
    assert np.isfinite(after.params).all()
    assert step._ahead._given is None
    state = begun(step)
    jax.make_jaxpr(lambda rows: step(state, rows, MASK))(ROWS)
    assert step._ahead._given is None


def test_a_draw_that_failed_is_made_again(step, expected, threaded):
    state, _ = step(begun(step), ROWS, MASK)
    failed = Future()
    failed.set_exception(MemoryError())
    step._ahead._coming = step._ahead._coming._replace(made=failed)
    with pytest.raises(MemoryError):
        step(state, ROWS, MASK)
    state, _ = step(state, ROWS, MASK)
    np.testing.assert_allclose(state.params, expected[1, 0], rtol=1e-6)
