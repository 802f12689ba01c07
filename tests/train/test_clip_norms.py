"""Clip norms by step: what noise and one example move, in clip norms of the step; binding and refusals.

Attacks are exact: of two runs with the same keys one lacks an example, so the difference of what the
optimizer receives is that example's, and a run on gradients of 0 shows the noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct.accountants.tradeoff.plan import GeneralPlan
from tests.train.fitting import fit
from tests.train.plans import plan
from train.clipping.norms_by_step import checked
from train.individual import IndividualAccounting
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")

STEPS, ROWS, SIZE = 6, 8, 64
KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
NORMS = (2.0, 1.0, 0.25, 1.5, 0.01, 2.0)
# The number of each row is in the first coordinate of a long gradient, so that every gradient is clipped.
DATA = 100.0 * np.eye(ROWS, SIZE, dtype=np.float32) + 10.0


def loss(params, row):
    return params["w"] @ row


def recorded() -> optax.GradientTransformation:
    """An optimizer that moves nothing and whose state is what it received."""

    def init(params):
        return jnp.zeros((STEPS, SIZE)), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        seen, step = state
        return jax.tree.map(jnp.zeros_like, updates), (seen.at[step].set(updates["w"]), step + 1)

    return optax.GradientTransformation(init, update)


def with_aux(params, row):
    return loss(params, row), {"first": row[0]}


def received(data, clip_norm, covered=None, of=loss, **options):
    """Return (steps, numbers): what the optimizer received."""
    covered = covered or plan(dataset_size=ROWS, iterations=STEPS, rate=0.9, separation=1, bands=1)
    given = dict(clip_norm=clip_norm, keys=KEYS, verify=False, progress=False, **options)
    result = fit(covered, {"w": jnp.zeros(SIZE)}, of, data, recorded(), **given)
    return np.asarray(result.opt_state[0], np.float64)


BANDED = plan(dataset_size=ROWS, iterations=STEPS, rate=0.5, separation=3, bands=3)
WHITE = plan(dataset_size=ROWS, iterations=STEPS, rate=0.9, separation=1, bands=1)
TERMS = GeneralPlan(
    dataset_size=ROWS, num_microbatches=2, microbatch_size=2, num_epochs=3, sampling="shuffling",
    group_size=1, sigma=2.0, epsilon=50.0, delta=1e-5,
)  # fmt: skip


@pytest.mark.parametrize("covered", [BANDED, TERMS])
def test_noise_is_proportional_to_the_norm_of_the_step(covered):
    """Correlated noise is made in units of the step's norm: what cancels is the same multiple of it."""
    one = received(0 * DATA, max(NORMS), covered)
    by_step = received(0 * DATA, NORMS, covered)
    shares = (np.float32(NORMS) / np.float32(max(NORMS)))[:, None]
    np.testing.assert_array_equal(by_step, np.float32(one) * shares)
    assert (one != 0).all()


@pytest.mark.parametrize("clipping", ["per_example", "ghost"])
@pytest.mark.parametrize(("covered", "length"), [(BANDED, 100.0), (BANDED, 0.8), (WHITE, 0.8)])
def test_one_example_moves_a_step_by_its_clip_norm_at_most(covered, length, clipping):
    """The attack: an example whose gradient has this norm, against its absence.

    A gradient that is longer than C_t moves the step by C_t, a shorter one by its own norm.
    """
    data = (DATA * np.float32(length) / np.linalg.norm(DATA[0])).astype(np.float32)
    without, moved = data.copy(), {}
    without[0] = 0
    for clip_norm in (NORMS, max(NORMS)):
        gone = received(data, clip_norm, covered, clipping=clipping)
        gone -= received(without, clip_norm, covered, clipping=clipping)
        moved[clip_norm] = np.linalg.norm(gone, axis=1)
    one, by_step = moved[max(NORMS)], moved[NORMS]
    taken = one > 0
    assert taken.sum() >= 2
    expected = np.minimum(length, NORMS) / min(length, max(NORMS))
    # 64 numbers are rounded to units of 2^-19 or less, and added to noise of a few clip norms in float32.
    np.testing.assert_allclose(by_step[taken] / one[taken], expected[taken], rtol=5e-4)


def test_batches_of_terms_move_by_twice_their_norm_at_most():
    other = DATA.copy()
    other[0] = -DATA[0]
    moved = np.linalg.norm(received(DATA, NORMS, TERMS) - received(other, NORMS, TERMS), axis=1)
    taken = moved > 0
    assert taken.sum() == 3  # once an epoch
    assert (moved[taken] <= np.array(NORMS)[taken] * 2 / TERMS.num_microbatches * (1 + 1e-6)).all()


def test_private_metrics_are_those_of_the_loss():
    seen = {}
    for clip_norm in (NORMS, max(NORMS)):
        logged = []
        options = dict(of=with_aux, has_aux=True, callback=lambda step, found, to=logged: to.append(found))
        received(DATA, clip_norm, **options)
        seen[clip_norm] = logged
    for one, other in zip(seen[NORMS], seen[max(NORMS)], strict=True):
        assert one.keys() == other.keys() >= {"loss", "median_norm", "aux.first"}
        for name in one.keys() - {"step"}:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)


def test_a_folder_is_bound_to_its_norms(tmp_path):
    received(DATA, NORMS, out=tmp_path / "run")
    received(DATA, list(NORMS), out=tmp_path / "run")  # the same run
    for other in (max(NORMS), (*NORMS[:-1], 1.9), NORMS[::-1]):
        with pytest.raises(ValueError, match="another clip_norm"):
            received(DATA, other, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("norms", "why"),
    [
        (NORMS[:-1], r"clip_norm must be a number or the plan's 6, got shape \(5,\)"),
        ([NORMS], r"got shape \(1, 6\)"),
        ((*NORMS[:-1], 0.0), "clip_norm must be a finite number above 0, got 0.0"),
        ((*NORMS[:-1], float("nan")), "clip_norm must be a finite number above 0"),
        ((*NORMS[:-1], float("inf")), "clip_norm must be a finite number above 0"),
        ((*NORMS[:-1], 1e-7), "clip_norm must have norms within a factor of 1e"),
        ([[1.0], 2.0], "clip_norm must be a number or one for each step"),
    ],
)
def test_refused_norms(norms, why):
    with pytest.raises(ValueError, match=why):
        received(DATA, norms)


def test_refused_beside_individual_and_above_the_noise():
    white = plan("poisson", dataset_size=ROWS, iterations=STEPS, rate=0.9)
    with pytest.raises(ValueError, match="clip_norm must be one number with individual"):
        received(DATA, NORMS, white, individual=IndividualAccounting())
    private = privatize(WHITE.mechanism, clip_norm=1.0, expected_batch_size=1.0)
    with pytest.raises(ValueError, match="norms must be at most the clip norm 1, got 2"):
        make_step(loss, private, optax.sgd(1.0), norms=NORMS)
    assert checked(NORMS, STEPS) == list(NORMS)
