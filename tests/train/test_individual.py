"""`fit(individual=...)`: losses against plain NumPy, retirement on the real code, the same bits, secrecy."""

import dataclasses
import json
import stat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BufferedToeplitz, Mechanism, Poisson
from jaxacct import individual as accounting
from jaxacct.report.run_card import RunCard
from tests.refusals import refused
from tests.train.runs import KEYS, PARAMS, ROWS, crashed, data, fit, flat, loss, plan, plan_of
from train.batches.sampler import Sampler
from train.batches.sources import ArrayRows
from train.individual import IndividualAccounting, PrivateLosses
from train.individual.steps import follow
from train.models.loss import as_loss
from train.optimizers import privatize

pytestmark = pytest.mark.usefixtures("shared_programs")

DELTA = 1e-5
FULL = plan("poisson", dataset_size=ROWS, rate=1.0, sigma=3.0)
SAMPLED = plan("poisson", dataset_size=ROWS, rate=0.5, sigma=3.0)


def run(covered=FULL, individual=None, **options):
    given = dict(plan=covered, model=PARAMS, loss=loss, data=data(), optimizer=optax.sgd(0.05))
    return fit(**given | dict(individual=individual, clip_norm=0.7, keys=KEYS) | options)


def losses(result) -> PrivateLosses:
    assert result.private_individual is not None
    return result.private_individual


# Parameters in which an optimizer leaves what was released at every step.
WATCHED = PARAMS | {"seen": jnp.zeros((12, 4))}


def recording(stepsize):
    """SGD that also writes the released update of step t into row t of `seen`."""

    def update(updates, state, params=None):
        released = jnp.append(updates["w"], updates["b"])
        seen = jnp.zeros((12, 4)).at[state].set(released)
        moved = {name: -stepsize * updates[name] for name in ("w", "b")}
        return moved | {"seen": seen}, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


RECORDED = dict(model=WATCHED, optimizer=recording(0.05))


def norms_on_the_way(result, stepsize=0.05, clip_norm=0.7):
    """(12, n) float64: norms of clipped gradients of the squared error, in units of the clip norm."""
    rows, w, found = data(), np.zeros(4), []
    x = np.append(rows["x"].astype(float), np.ones((ROWS, 1)), axis=1)
    for released in np.asarray(result.params["seen"], float):
        gradients = 2 * (x @ w - rows["y"])[:, None] * x
        found.append(np.minimum(1, np.linalg.norm(gradients, axis=1) / clip_norm))
        w = w - stepsize * released
    return np.array(found)


def test_losses_of_full_batches_against_numpy():
    """Mu is what the norms at every step say, as far as the grid goes."""
    seen = run(individual=IndividualAccounting(), **RECORDED)
    private = losses(seen)
    assert private.steps == 12 and private.active().all()
    mu = np.sqrt(np.square(norms_on_the_way(seen)).sum(axis=0)) / 3.0
    # A gradient of 4 numbers loses at most 2 of 2^18 units to the grid at each of 12 steps.
    spent = np.sqrt(np.asarray(private.records.spent, float))
    np.testing.assert_allclose(spent, mu, rtol=1e-5, atol=12**0.5 * 2.0**-17 / 3)
    # Of what was recorded: where mu is least, what the grid takes is more of it than delta bears.
    for i in (0, 7, int(mu.argmin())):
        assert accounting.gdp_delta(private.epsilon(DELTA)[i], spent[i]) == pytest.approx(DELTA, rel=1e-3)


def test_losses_of_sampled_batches_against_numpy():
    """All are counted at every step, in the batch or not; the draw and the sum are those of plain fit."""
    seen, plain = (run(SAMPLED, each, **RECORDED) for each in (IndividualAccounting(), None))
    np.testing.assert_array_equal(flat(seen.params), flat(plain.params))
    private = losses(seen)
    counts = np.asarray(private.records.counted.counts)
    exact = norms_on_the_way(seen)
    oracle = np.asarray(private.tracker.accountant.from_norms(exact).counts)
    # What the grid takes off a gradient puts those at an edge, among them the clipped ones, beyond it.
    shorter = np.asarray(private.tracker.accountant.from_norms(np.maximum(0, exact - 2.0**-16)).counts)
    charged = private.tracker.accountant.costs()[:, 0]
    assert (counts.sum(axis=1) == 12).all()
    assert (counts @ charged <= oracle @ charged + 1e-12).all()
    assert (counts @ charged >= shorter @ charged - 1e-12).all()
    few = dataclasses.replace(private, records=jax.tree.map(lambda leaf: leaf[:4], private.records))
    assert (few.epsilon(DELTA) <= few.renyi_epsilon(DELTA) + 1e-9).all()


def adversary(params, example):
    """The canary pulls at one parameter with all that clipping leaves it; the others do hardly anything."""
    others = 1e-3 * example["x"] @ params["w"]
    return -1e6 * example["canary"] * params["w"][0] + others * (1 - example["canary"])


def watched(individual, sigma, rate=1.0):
    """What the adversary reads off in each step, clip norms along the canary's direction; the result."""
    rows = {"x": np.zeros((ROWS, 3), np.float32), "canary": np.eye(ROWS, dtype=np.float32)[5]}
    covered = plan("poisson", dataset_size=ROWS, rate=rate, sigma=sigma)
    options = dict(data=rows, loss=adversary, model=WATCHED, optimizer=recording(1.0), clip_norm=1.0)
    result = run(covered, individual, **options)
    return -np.asarray(result.params["seen"])[:, 0] * rate * ROWS, result


def test_a_canary_is_retired_before_its_budget_is_passed():
    """A canary of the clip norm at every step, noise 0.02: the adversary reads off when it participated.

    A budget of three steps' mu leaves it in three sums, one that is a hair less in two. Noise of 0.02 reaches
    0.5 with probability 1e-137.
    """
    sigma = 0.02
    for room, last in ((1 + 1e-4, 3), (1 - 1e-4, 2)):
        budget = 3**0.5 / sigma * room
        epsilon = 3700.0
        delta = float(accounting.gdp_delta(epsilon, budget))
        assert accounting.gdp_mu(epsilon, delta) == pytest.approx(budget, rel=1e-6)
        seen, result = watched(IndividualAccounting(epsilon, delta), sigma)
        assert (seen > 0.5).tolist() == [True] * last + [False] * (12 - last)
        private = losses(result)
        assert not private.active()[5] and private.active().sum() == ROWS - 1
        assert private.epsilon(delta)[5] <= epsilon


def test_a_sampled_canary_is_retired_whether_it_was_drawn_or_not():
    """Half of the time it is not in the batch and pays all the same: three steps' budget lasts three."""
    sigma, rate, order = 0.02, 0.5, 2
    sampler = Sampler(Poisson(12, rate), ROWS, ROWS, KEYS[0])
    drawn = np.array([5 in sampler.next() for _ in range(12)])
    assert drawn[3:].any() and not drawn.all()
    cost = float(accounting.subsampled_gaussian_rdp(rate, sigma / (1 + 1e-6), (order,))[0])
    for room, last in ((1 + 1e-4, 3), (1 - 1e-4, 2)):
        epsilon = 3 * cost * room + np.log1p(-1 / order) - np.log(DELTA * order) / (order - 1)
        seen, result = watched(IndividualAccounting(epsilon, DELTA, order=order), sigma, rate)
        assert ((seen > 0.5) == (drawn & (np.arange(12) < last))).all()
        private = losses(result)
        nothing = private.records.counted.counts.shape[1] - 1
        assert not private.active()[5] and private.records.counted.counts[5, nothing] == 12 - last


def step_of(covered, individual):
    """The step of a run that follows every example."""
    sizes = dict(clip_norm=0.7, expected_batch_size=covered.expected_batch_size)
    private = privatize(covered.mechanism, **sizes, key=KEYS[1])
    parts = follow(individual, covered, ArrayRows(data()), as_loss(loss), private, optax.sgd(0.05))
    return parts["step"]


def test_a_retired_example_adds_exactly_nothing():
    """Once it is retired, other features and labels of an example change no bit of anything released."""
    filtered = plan("poisson", dataset_size=ROWS, rate=1.0, sigma=5.0)
    one, other = data(), data()
    # The gradient of row 5 has the clip norm at every step either way, but points elsewhere.
    for rows, sign in ((one, 1), (other, -1)):
        rows["x"][5], rows["y"][5] = sign * 100.0, -1e6
    ends = [run(filtered, IndividualAccounting(1.0, DELTA), data=rows) for rows in (one, other)]
    assert not any(losses(end).active()[5] for end in ends)
    assert not np.array_equal(flat(ends[0].params), flat(ends[1].params))
    # From one and the same state, in which row 5 is retired.
    step, again = step_of(filtered, IndividualAccounting(1.0, DELTA)), []
    for rows in (one, other):
        state = step.init(PARAMS)
        state = state._replace(private_individual=jax.tree.map(jnp.asarray, losses(ends[0]).records))
        again.append(step(state, rows, np.ones(ROWS, bool))[0])
    np.testing.assert_array_equal(flat(again[0].params), flat(again[1].params))


@pytest.mark.usefixtures("default_promotion")
def test_sampled_batches_are_filtered_and_resume_to_the_same_bits(tmp_path):
    individual = IndividualAccounting(1.2, DELTA)
    options = dict(individual=individual, checkpoint_every=4, optimizer=optax.adam(0.1))
    whole = run(SAMPLED, out=tmp_path / "whole", **options)
    private = losses(whole)
    assert 0 < private.active().sum() < ROWS
    spent = private.records.spent.astype(float) + private.records.rest
    assert spent.max() <= private.tracker.filter.budget and (private.renyi_epsilon(DELTA) <= 1.2).all()
    crashed(7, run, covered=SAMPLED, out=tmp_path / "part", **options)
    part = run(SAMPLED, out=tmp_path / "part", **options | {"keys": ((9, 9, 9, 9), KEYS[1] + 1)})
    np.testing.assert_array_equal(flat(part.params), flat(whole.params))
    jax.tree.map(np.testing.assert_array_equal, losses(part).records, private.records)
    check_secrecy(tmp_path / "whole", whole)
    for change, message in (
        (dict(data=data() | {"y": np.ones(ROWS, np.float32)}), "other data"),
        (dict(individual=IndividualAccounting(1.3, DELTA)), "another individual"),
    ):
        refused(message, run, SAMPLED, out=tmp_path / "part", **options | change)


def check_secrecy(folder, result):
    """Only the secret part of the folder holds individual values."""
    assert stat.S_IMODE((folder / "checkpoints").stat().st_mode) == 0o700
    names = "run.json secret.json checkpoints private model result.json lock .gitignore"
    assert {path.name for path in folder.iterdir()} == set(names.split())
    stored = json.loads((folder / "result.json").read_text())
    fields = {"schema", "schema_version", "digest", *RunCard.__dataclass_fields__}
    assert set(stored) == fields and not stored["evaluation"]
    assert "whether it was in the batch or not" in stored["guarantee"]
    assert "private_individual" not in repr(result) and repr(losses(result)) == "PrivateLosses(steps=12)"


def test_the_charge_is_never_below_what_enters_the_sum():
    """Gradients that are hardly above bucket edges: each is charged as at most its own noise."""
    individual = IndividualAccounting(1.2, DELTA, buckets=7)
    tracker = individual.tracker(0.5, 3.0)
    assert isinstance(tracker.accountant, accounting.RDPIndividualAccountant)
    limits = tracker.accountant.grid.norm_limits(3.0, 1.0)
    norms = np.nextafter(limits[:-1], np.float32(0))
    records, active = jax.jit(tracker.step)(tracker.init(norms.size), norms)
    charged = tracker.accountant.charged_sigmas[np.argmax(np.asarray(records.counted.counts), axis=1)]
    assert (charged <= 3.0 / norms.astype(float)).all() and np.asarray(active).all()
    # What a filter lets through, the slack of its comparisons and all, is within what is stated.
    whole = individual.tracker(1.0, 3.0).filter.budget_mu * (1 + 2.0**-20) ** 0.5
    assert accounting.gdp_delta(1.2, whole) <= DELTA
    most, order = tracker.filter.budget * (1 + 2.0**-20), tracker.filter.order
    assert accounting.rdp_to_epsilon([most], [order], DELTA)[0] <= 1.2
    bad = np.float32([np.nan, -1.0, 1.5])
    for follower in (individual.tracker(1.0, 3.0), tracker):
        records, active = jax.jit(follower.step)(follower.init(3), bad)
        assert not np.asarray(active)[:2].any()
    assert np.isinf(tracker.renyi_epsilon(records, DELTA)).all()


def test_costs_of_a_step_are_rounded_up():
    """The float32 of every bucket is the next above the divergence, computed again for each by itself."""
    tracker = IndividualAccounting(1.2, DELTA, buckets=40).tracker(0.5, 3.0)
    costs, order = tracker._costs(), tracker.filter.order
    assert costs.dtype == np.float32 and len(costs) == 41
    for cost, sigma in zip(costs.tolist(), tracker.accountant.charged_sigmas, strict=True):
        (exact,) = accounting.subsampled_gaussian_rdp(0.5, float(sigma), (order,)).ravel()
        assert exact <= cost <= exact * (1 + 2.0**-23)


REFUSED = [
    (
        plan("poisson", dataset_size=ROWS),
        dict(individual=IndividualAccounting(1e-3, DELTA)),
        "epsilon of indiv",
    ),
    (plan("cyclic-poisson", dataset_size=ROWS), {}, "join every batch independently"),
    (plan(dataset_size=ROWS), {}, "join every batch independently"),
    (plan(dataset_size=ROWS, separation=1, bands=1), {"individual": "yes"}, "individual must be"),
    (FULL, dict(individual=IndividualAccounting(1.0, DELTA, order=8)), "full batches"),
    (FULL, dict(skip_padding=True), "skip_padding must not be given with individual"),
    (FULL, dict(clipping="ghost"), "clipping must be 'per_example' with individual"),
    (FULL, dict(mesh=jax.make_mesh((1,), ("data",))), "mesh must not be given with individual"),
    *(
        # Batches are independent, and only the noise of a matrix without bands is not.
        (plan_of(Mechanism(Poisson(12, p), BufferedToeplitz((0.9, 0.4), (0.3, 0.2), 12), 3.0), ROWS), {},
         r"needs a plan of independent noise \(one band\)")
        for p in (1.0, 0.5)
    ),
]  # fmt: skip


@pytest.mark.parametrize("probability", [1.0, 0.5])
@pytest.mark.parametrize("readmit", [True, False])
def test_readmission_reaches_the_filter(probability, readmit):
    """The field of the filter that a run has, of mu and of Renyi."""
    tracker: Any = IndividualAccounting(20.0, DELTA, readmit=readmit).tracker(probability, 3.0)
    assert tracker.filter.readmit is readmit


def test_refuses():
    for covered, options, message in REFUSED:
        refused(message, run, covered, **{"individual": IndividualAccounting()} | options)
    for alone in (dict(epsilon=1.0), dict(delta=1e-5)):
        refused("together", IndividualAccounting, **alone)
    refused("epsilon", IndividualAccounting, epsilon=-1.0, delta=1e-5)
    refused("delta", IndividualAccounting, epsilon=1.0, delta=0.0)
    for name, value in dict(order=8, buckets=0).items():
        refused(name, IndividualAccounting, **{name: value})
