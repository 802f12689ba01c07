"""The trainer of batch clipping, attacked on neighbouring data with one key.

Two runs of `fit` with the same keys have the same batches and the same noise, so what they release differs by
their clipped sums, exactly: the strongest adversary's shift, round by round. With noise 2 C sigma in every
round the best attack is that of a Gaussian of mean `sqrt(sum of squares) / (2 C sigma)`, whose delta(epsilon)
is known. No number is drawn, so there is no false alarm.

The canary is one record that turns around all records after it in its batch: each of their gradients is at
most C long, their sum is not.
"""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct.accountants.tradeoff import gdp_delta
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from tests.train.runs import KEYS, fit
from train.batches.sampler import make_generator
from train.procedures.batch_clipping import epoch_batches

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
