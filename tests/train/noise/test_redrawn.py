"""Noise that is kept nowhere, of the key and the step alone; normals that are drawn ahead of their step."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, Mechanism
from tests.refusals import refused
from tests.train.runs import KEYS, PARAMS, ROWS, data, fit, flat, loss, plan
from train.noise import normals, recursion, redrawn
from train.optimizers import privatize
from train.procedures import step as step_module
from train.procedures.step import make_step
from train.run import machine

pytestmark = pytest.mark.usefixtures("shared_programs")

LEVELS, KEY = 2.0**19, np.arange(8, dtype=np.uint32)
MANY = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(3)}
INVERSE = BandedInverse.bisr(iterations=12, bands=4)


def integers(strategy, draw, state, steps=7):
    step = jax.jit(lambda state: draw(strategy, LEVELS, state, MANY))
    for _ in range(steps):
        found, state = step(state)
        yield flat(found)


def test_the_integers_are_those_of_kept_noise():
    """Of every step, the first ones included, in which the earlier vectors are zero."""
    kept = integers(INVERSE, recursion.draw, recursion.init(INVERSE, MANY, KEY))
    again = integers(INVERSE, redrawn.draw, redrawn.init(MANY, KEY))
    for ours, theirs in zip(again, kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nothing_is_kept():
    """No array of the state has the size of the parameters, nor has a checkpoint."""
    mechanism = Mechanism(BMinSep(12, 4, 0.2), INVERSE, 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0, noise_memory="recompute")
    state = private.init(MANY)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == len(KEY) + 1
    kept = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0).init(MANY)
    assert sum(leaf.size for leaf in jax.tree.leaves(kept.recent)) == 3 * 2003


def test_a_state_of_kept_noise_is_not_redrawn():
    """Its vectors would stay those of earlier steps, and be added again by the next kept step."""
    kept = recursion.init(INVERSE, MANY, KEY)
    refused("noise_memory must be 'keep' for this state", redrawn.draw, INVERSE, LEVELS, kept, MANY)
    with pytest.raises((TypeError, ValueError)):
        recursion.draw(INVERSE, LEVELS, redrawn.init(MANY, KEY), MANY)


def trained(tmp_path=None, steps=None, **options):
    covered = plan(dataset_size=ROWS, iterations=12, separation=4, strategy=INVERSE)
    given = dict(keys=KEYS, steps=steps, out=tmp_path) | options
    return fit(covered, PARAMS, loss, data(), optax.sgd(0.1), **given).params


def test_a_run_releases_the_bits_of_kept_noise_and_resumes(tmp_path):
    kept = trained()
    np.testing.assert_array_equal(trained(noise_memory="recompute")["w"], kept["w"])
    trained(tmp_path, 5, noise_memory="recompute")
    found = trained(tmp_path, noise_memory="recompute")
    np.testing.assert_array_equal(found["w"], kept["w"])
    refused("another noise_memory", trained, tmp_path, noise_memory="keep")


def test_where_it_does_not_apply():
    """Each is refused in one line that says what does."""
    sizes = dict(clip_norm=1.0, expected_batch_size=4.0, noise_memory="recompute")
    keep, banded = "^noise_memory must be 'keep'", BandedToeplitz.square_root(4)
    other = Mechanism(BMinSep(12, 4, 0.2), banded, 1.0)
    refused(f"{keep} for .*--memory-copies 0, which selects an inverse", privatize, other, **sizes)
    one = Mechanism(BMinSep(12, 4, 0.2), BandedToeplitz.square_root(1), 1.0)
    assert not privatize(one, **sizes).redraws  # nothing is kept of one band
    refused(r"^noise_memory must be one of keep, recompute, got 'none'", trained, noise_memory="none")
    elastic = dict(noise_memory="recompute", elastic=True)
    refused(f"{keep} with batches, .* and with elastic", trained, **elastic)
    private = privatize(Mechanism(BMinSep(12, 4, 0.2), INVERSE, 1.0), **sizes)
    step, rows = make_step(loss, private, optax.sgd(0.1)), jax.tree.map(lambda leaf: leaf[:4], data())
    refused(f"{keep} with batches", step, step.init(PARAMS), rows, np.ones(4, bool), digest="one")


def test_a_run_kept_on_a_gpu_must_repeat_its_steps(tmp_path, monkeypatch):
    """With a noise key for each call, vectors of earlier calls could not be drawn again."""
    monkeypatch.setattr(machine, "platforms", lambda tree: {"gpu"})
    message, out = "noise_memory must be 'keep' with out on a GPU", tmp_path / "run"
    refused(message, trained, out, noise_memory="recompute")
    assert not out.exists()
    np.testing.assert_array_equal(trained(noise_memory="recompute")["w"], trained()["w"])


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
        programs.append(normals._of_words._cache_size())
    assert programs[0] == programs[1] == programs[2] > 0


def test_no_message_shows_what_was_drawn(steps):
    step, _ = steps[0]
    state, _ = step(step.init(PARAMS), *BATCH)
    assert state.noise.key is not None
    shown = repr(step._drawn) + repr(step) + repr(vars(step)["_drawn"])
    assert "secret" in shown and "Array" not in shown
