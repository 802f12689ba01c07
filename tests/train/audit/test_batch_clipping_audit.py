"""The trainer of batch clipping, attacked on neighbouring data with one key.

Two runs of `fit` with the same keys have the same batches and the same noise, so what they release differs by
their clipped sums, exactly: the strongest adversary's shift, round by round. With noise 2 C sigma in every
round the best attack is that of a Gaussian of mean `sqrt(sum of squares) / (2 C sigma)`, whose delta(epsilon)
is known. No number is drawn, so there is no false alarm.

The canary is one record that turns around all records after it in its batch: each of their gradients is at
most C long, their sum is not. It wins against a trainer that clips examples only, and against one whose inner
optimizer remembers the round before.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train.clipping.per_example
import train.procedures.batch_clipping
from jaxacct.accountants.tradeoff import gdp_delta
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from tests.train.fitting import fit
from train.batches.sampler import make_generator
from train.procedures.batch_clipping import epoch_batches
from train.procedures.step import make_step

KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
CLIP, INNER = 0.5, optax.sgd(1.0, momentum=0.9)
PLAN = GeneralPlan.calibrate(
    1.0, 1e-3, dataset_size=12, num_microbatches=1, microbatch_size=4, num_epochs=2, sampling="shuffling"
)


def record(rounds: int) -> optax.GradientTransformation:
    """Leave the model where it is and write what is released into the parameter "log"."""

    def update(updates, count, params=None):
        row = jnp.where((jnp.arange(rounds) == count)[:, None], updates["model"][None], 0)
        return {"model": jnp.zeros_like(updates["model"]), "log": row}, count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def loss(params, row):
    """`pull` moves the first weight; the gradient of the second, at most C, is the first one's sign."""
    switch, out = params["model"]
    return CLIP * (row["pull"] * switch + jnp.tanh(1e4 * switch) * out)


def released(pull, inner=INNER) -> np.ndarray:
    """(rounds, 2) sums with their noise."""
    params = {"model": jnp.zeros(2), "log": jnp.zeros((PLAN.iterations, 2))}
    data = {"pull": np.asarray(pull, np.float32)}
    options = dict(clip_norm=CLIP, inner=inner, keys=KEYS)
    return np.asarray(fit(PLAN, params, loss, data, record(PLAN.iterations), **options).params["log"])


def neighbours(canary: int):
    pull = np.zeros(12)
    pull[canary] = 1.0
    return pull, -pull


def shifts(canary: int) -> np.ndarray:
    """(rounds,) how far the releases are apart, in units of 2 C."""
    one, other = map(released, neighbours(canary))
    return np.linalg.norm(one - other, axis=1) / (2 * CLIP)


def attack(distances: np.ndarray) -> float:
    """Delta at the plan's epsilon of the best attack."""
    return float(gdp_delta(PLAN.epsilon, math.sqrt(np.sum(distances**2)) / PLAN.sigma))


def rounds_of(record: int) -> list[int]:
    generator, found = make_generator(KEYS[0]), []
    for epoch in range(2):
        batches = epoch_batches(generator, 12, 1, 4, "shuffling")
        found += [3 * epoch + at for at, batch in enumerate(batches) if record in batch]
    return found


def canary() -> int:
    """A record with records after it in its first batch, and a round after that one in its epoch."""
    first, *later = epoch_batches(make_generator(KEYS[0]), 12, 1, 4, "shuffling")
    assert later
    return int(first[0, 0])


def test_the_attack_does_as_well_as_the_plan_allows_and_no_better():
    distances = shifts(canary())
    mine = rounds_of(canary())
    assert len(mine) == 2 and mine[0] == 0
    np.testing.assert_allclose(distances[mine], 1, rtol=1e-4)  # the whole term turned around
    assert (np.delete(distances, mine) == 0).all()  # the same bits wherever the canary is not
    assert PLAN.delta * 0.99 < attack(distances) < PLAN.delta * (1 + 1e-3)


def clip_examples_only(monkeypatch):
    """Gradients of examples are at most C by themselves here: then nothing more is clipped."""

    def broken(gradients, grid, normalize=False, counted=None):
        with jax.enable_x64(True):
            counts = jax.tree.map(lambda g: jnp.trunc(g.astype(jnp.float64) / grid.unit), gradients)
            counts = jax.tree.map(lambda n: n.astype(jnp.int32), counts)
        rows = len(jax.tree.leaves(gradients)[0])
        return jnp.ones(rows, bool), counts, jnp.ones(rows), jnp.zeros(rows, bool)

    monkeypatch.setattr(train.clipping.per_example, "clip_rows_to_grid", broken)


def remember_the_round_before(monkeypatch):
    """The inner optimizer goes on with the state that the last batch left."""

    def term(params, rows):
        def step(carry, row):
            here, state = carry
            updates, state = INNER.update(jax.grad(loss)(here, row), state, here)
            return (optax.apply_updates(here, updates), state), None

        before, now = (jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], rows) for at in (0, 4))
        (_, state), _ = jax.lax.scan(step, (params, INNER.init(params)), before)
        (last, _), _ = jax.lax.scan(step, (params, state), now)
        way = jax.lax.stop_gradient(jax.tree.map(lambda a, b: a - b, params, last))
        return sum(jnp.sum(params[name] * way[name]) for name in params)

    class Leaky:
        def __init__(self, step):
            self._step, self._before = step, None

        def __getattr__(self, name):
            return getattr(self._step, name)

        def __call__(self, state, rows, mask):
            before = rows if self._before is None else self._before
            before = jax.tree.map(lambda b: 0 * b, before) if self._before is None else before
            self._before = rows
            joined = jax.tree.map(lambda b, r: np.concatenate([b, r], axis=1), before, rows)
            return self._step(state, joined, mask)

        def trace(self, state, rows, mask):
            return self._step.trace(state, jax.tree.map(lambda r: np.concatenate([r, r], axis=1), rows), mask)

    def broken(plan, loss, optimizer, *, clip_norm, inner, key, terms_at_once):
        private = train.procedures.batch_clipping.private_rounds(plan, clip_norm=clip_norm, key=key)
        return Leaky(make_step(term, private, optimizer, microbatch_size=terms_at_once))

    monkeypatch.setattr(train.procedures.batch_clipping, "make_round", broken)


@pytest.mark.parametrize("broken", [clip_examples_only, remember_the_round_before])
def test_the_attack_wins_against_a_broken_trainer(broken, monkeypatch):
    broken(monkeypatch)
    assert attack(shifts(canary())) > 1.5 * PLAN.delta


@pytest.mark.usefixtures("default_promotion")
def test_a_round_is_the_same_after_any_round():
    """All records of the first round are other ones, huge: the rounds after it release the same bits."""
    inner = optax.adam(0.1)
    first = epoch_batches(make_generator(KEYS[0]), 12, 1, 4, "shuffling")[0, 0]
    pull = np.linspace(-1.0, 1.0, 12)
    other = pull.copy()
    other[first] = 1e6
    one, two = released(pull, inner)[:3], released(other, inner)[:3]
    assert (one[0] != two[0]).any()
    np.testing.assert_array_equal(one[1:], two[1:])
