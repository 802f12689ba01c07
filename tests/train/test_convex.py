"""Convex losses by construction: their conditions by brute force, the iterates, what is refused."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

from jaxacct.accountants.tradeoff.plan import LastIteratePlan
from tests.refusals import refused
from tests.train.runs import KEYS, fit
from train.noise import normals
from train.procedures import convex
from train.procedures.convex import LogisticRegression, noisy_cgd, noisy_gd, noisy_sgd

pytestmark = pytest.mark.usefixtures("shared_programs")

LOSSES = [LogisticRegression(2, 3.0, 0.1), LogisticRegression(2, 3.0, 0.1, clip_norm=0.7)]
LOSSES += [LogisticRegression(4, 3.0, 0.05)]


@functools.cache
def gradient_of(loss):
    return jax.jit(loss.mean_gradient)


def gradient(loss, weights, x, y):
    return np.asarray(gradient_of(loss)(weights, x, y))


@pytest.mark.parametrize("loss", LOSSES)
def test_conditions_hold(loss, x64):
    """Sensitivity, monotonicity and smoothness of gradients over random weights and examples."""
    rng, d = np.random.default_rng(0), 3
    worst = 0.0
    for scale in (0.1, 1.0, 30.0):
        for _ in range(60):
            x = loss.prepare(rng.normal(size=(2, d)) * scale)
            y = rng.integers(0, loss.num_classes, 2)
            shape = loss.shape(d)
            u, v = rng.normal(size=shape) * scale, rng.normal(size=shape) * scale
            one, other = (gradient(loss, u, x[i : i + 1], y[i : i + 1]) for i in (0, 1))
            worst = max(worst, np.linalg.norm(one - other))
            step = gradient(loss, u, x[:1], y[:1]) - gradient(loss, v, x[:1], y[:1])
            gap = np.sum((u - v) ** 2)
            assert np.sum(step * (u - v)) >= loss.strong_convexity * gap * (1 - 1e-9) - 1e-12
            assert np.linalg.norm(step) <= loss.smoothness * math.sqrt(gap) * (1 + 1e-9) + 1e-12
            # A step of at most 2/(M + m) contracts by 1 - eta m.
            eta = 2 / (loss.smoothness + loss.strong_convexity)
            moved = np.linalg.norm((u - v) - eta * step)
            assert moved <= (1 - eta * loss.strong_convexity) * math.sqrt(gap) * (1 + 1e-9)
    assert 0.5 * loss.grad_sensitivity < worst <= loss.grad_sensitivity * (1 + 1e-12)


def test_preparing_cuts_each_row_by_itself():
    loss = LogisticRegression(2, 2.0)
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = loss.prepare(rows)
    np.testing.assert_allclose(np.linalg.norm(found[:, :-1], axis=1), [2.0, 0.5, 0.0])
    assert (found[:, -1] == 1).all() and np.linalg.norm(found[0, :-1]) <= 2.0
    np.testing.assert_array_equal(loss.prepare(rows[:1]), found[:1])
    refused("finite", loss.prepare, [[np.nan, 0.0]])


def last(plan, loss, data, **options):
    """The last iterate, float64."""
    return fit(plan, None, loss, {"inputs": data[0], "labels": data[1]}, **options).params


def plan(method="cgd", **change):
    conditions = ("grad_sensitivity", "smoothness", "strong_convexity")
    fields = {name: getattr(LOSSES[0], name) for name in conditions}
    fields |= dict(method=method, num_examples=8, steps=12, batch_size=8 if method == "gd" else 2)
    fields |= dict(stepsize=0.2, noise_std=20.0, diameter=None, epsilon=8.0, delta=1e-5)
    return LastIteratePlan(**fields | change)


DATA = np.random.default_rng(3).normal(size=(8, 2)), np.array([0, 1] * 4)


@pytest.mark.parametrize("method", ["gd", "cgd"])
def test_iterates_are_the_algorithm_in_numpy(method, x64):
    """The same noise, the same batches, plain NumPy; rounded at the end."""
    run, loss = plan(method, diameter=1.0), LOSSES[0]
    found = last(run, loss, DATA, keys=KEYS)
    x, y, w = loss.prepare(DATA[0]), DATA[1], np.zeros(3)
    for step in range(run.steps):
        rows = [(step * run.batch_size + i) % 8 for i in range(run.batch_size)]
        slope = 1 / (1 + np.exp(-(x[rows] @ w))) - y[rows]
        z = np.asarray(normals.standard_normals(KEYS[1], step, 3))
        w = w - run.stepsize * (slope @ x[rows] / len(rows) + 0.1 * w + run.noise_std * z)
        w = w * min(1.0, 0.5 / np.linalg.norm(w))
    unit = run.stepsize * run.noise_std * 2.0**-16
    np.testing.assert_allclose(found, w, atol=unit)
    np.testing.assert_array_equal(found, np.round(found / unit) * unit)


def test_what_the_plan_does_not_cover_is_refused(tmp_path):
    for change, word in [
        ({"plan": plan(noise_std=0.1)}, "certified"),
        ({"plan": plan(grad_sensitivity=LOSSES[0].grad_sensitivity * 0.999)}, "grad_sensitivity"),
        ({"plan": plan(smoothness=LOSSES[0].smoothness * 0.999)}, "smoothness"),
        ({"plan": plan(strong_convexity=0.1001)}, "strong_convexity"),
        ({"plan": plan(num_examples=12)}, "rows"),
        ({"data": {"inputs": DATA[0], "labels": np.array([0, 1, 2, 0, 1, 2, 0, 1])}}, "labels"),
        ({"data": {"inputs": DATA[0], "labels": np.zeros(8)}}, "labels"),
        ({"data": {"inputs": np.full((8, 2), np.inf), "labels": DATA[1]}}, "finite"),
        ({"plan": 3}, "plan"),
        ({"model": np.zeros(3)}, "model must be None"),
        ({"steps": 11}, "steps must be the plan's 12"),
        ({"optimizer": object()}, "optimizer must not be given for a plan of last-iterate"),
        ({"clip_norm": 1.0}, "clip_norm must not be given"),
        ({"inner": object()}, "inner must not be given"),
        ({"normalize": True}, "normalize must not be given"),
        ({"average": 0.9}, "average must not be given for a plan of last-iterate"),
        ({"data": np.zeros((8, 3))}, "data must be a pair of features and labels"),
        ({"data": {"x": DATA[0]}}, "data must have inputs and labels, got x"),
        ({"loss": lambda w, x: 0.0}, "loss must be a LogisticRegression"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
    ]:
        fields = dict(plan=plan(), model=None, loss=LOSSES[0], data=DATA, out=tmp_path / "run")
        refused(word, fit, **fields | change)
        assert not (tmp_path / "run").exists()


def test_plans_refuse_steps_outside_the_conditions(tmp_path):
    bad = dict(stepsize=5.0, method="x", batch_size=3, steps=13, noise_std=0.0, diameter=-1.0)
    for name, value in bad.items():
        refused(name, plan, **{name: value})
    refused("batch_size", plan, "gd", batch_size=2)
    path = tmp_path / "plan.json"
    plan().save(path)
    assert LastIteratePlan.load(path) == plan()
    stored, read = plan().to_json(), LastIteratePlan.from_json
    refused("its noise does not give its epsilon", read, stored | {"noise_std": 0.1})
    refused("diameter must be in", read, stored | {"diameter": 1e308})
    # The statement names its assumptions.
    easier = read(stored | {"grad_sensitivity": 0.0})
    assert "gradient sensitivity of at most 0," in easier.statement() != plan().statement()
    almost = dataclasses.replace(plan(), epsilon=8.000000001)
    assert "(8.000000001, " in almost.statement()
    run = dict(method="cgd", loss=LOSSES[1], steps=12, batch_size=2, stepsize=0.2, diameter=None)
    made = LastIteratePlan.calibrate(3.0, 1e-5, num_examples=8, **run)
    assert made.certified and made.bound().epsilon(1e-5) == pytest.approx(3.0, rel=1e-8)
    assert "last of 12 iterates" in made.statement()
    refused(r"num_examples must be .* 0", LastIteratePlan.calibrate, 3.0, 1e-5, num_examples=0, **run)


def test_an_interrupted_run_shows_its_last_iterate_alone_and_with_the_same_bits(tmp_path):
    """Stopped after 8 of 12 steps, a checkpoint after 6: `evaluate` never saw an iterate on the way."""
    run, seen = plan("sgd", epsilon=30.0), []
    whole = last(run, LOSSES[0], DATA, keys=KEYS)

    def stop(what, done, expected):
        if done == 8:
            raise KeyboardInterrupt

    def evaluate(weights):
        assert jax.config.read("jax_enable_x64") is False
        seen.append(weights)
        return {"norm": float(np.linalg.norm(weights))}

    folder = tmp_path / "run"
    options = dict(out=folder, checkpoint_every=3, evaluate=evaluate)
    data = {"inputs": DATA[0], "labels": DATA[1]}
    with pytest.raises(KeyboardInterrupt):
        fit(run, None, LOSSES[0], data, **options, keys=KEYS, progress=stop)
    assert len(seen) == 1 and not seen.pop().any()  # the first iterate, before any step
    assert not (folder / "model").exists() and not (folder / "metrics.jsonl").exists()
    assert (folder / "checkpoints").stat().st_mode & 0o077 == 0
    for change, word in (
        ({"data": {"inputs": DATA[0] + 1, "labels": DATA[1]}}, "other data"),
        ({"plan": plan("sgd", epsilon=31.0)}, "another plan"),
        ({"loss": LogisticRegression(2, 3.0, 0.2)}, "another plan|another loss|smoothness"),
    ):
        fields = dict(plan=run, model=None, loss=LOSSES[0], data=data) | options
        refused(word, fit, **fields | change)
    result = fit(run, None, LOSSES[0], data, **options)  # with fresh keys, which the folder's replace
    np.testing.assert_array_equal(result.params, whole)
    assert len(seen) == 1 and (seen[0] == whole).all() and result.steps == 12
    assert not (folder / "metrics.jsonl").exists()
    assert "last of 12 iterates" in json.loads((folder / "result.json").read_text())["guarantee"]


def test_the_functions_of_the_paper():
    """By noise or by epsilon; a loss, a set or a start that no plan can name is refused."""
    given = dict(stepsize=0.2, delta=1e-5, projection=convex.project_l2_ball(0.5))
    by_noise = noisy_gd(LOSSES[0], DATA, KEYS, steps=12, noise_std=20.0, **given)
    sizes = dict(num_examples=8, steps=12, batch_size=8, stepsize=0.2, diameter=1.0)
    covered = LastIteratePlan.at_noise(20.0, 1e-5, method="gd", loss=LOSSES[0], **sizes)
    assert covered.certified and covered.epsilon < 8
    np.testing.assert_array_equal(by_noise, last(covered, LOSSES[0], DATA, keys=KEYS))
    given |= dict(batch_size=2)
    few = dict(steps=2, noise_std=20.0)
    refused("clip_norm", noisy_sgd, LOSSES[2], DATA, KEYS, clip_norm=1.0, **few, **given)
    by_epsilon = noisy_cgd(LOSSES[0], DATA, KEYS, epochs=3, epsilon=8.0, **given)
    assert np.isfinite(by_epsilon).all() and (by_epsilon != by_noise).any()
    refused("clip_norm", LogisticRegression, 3, 3.0, clip_norm=0.5)  # the gradient of no convex function
    for change, word in (
        ({"epsilon": 1.0}, "not both"),
        ({"init": np.zeros(3)}, "init"),
        ({"projection": convex.project_box(-1.0, 1.0, 3)}, "projection"),
        ({"projection": convex.project_l2_ball(0.5, 1.0)}, "projection"),
        ({"stepsize": 5.0}, "stepsize"),
    ):
        refused(word, noisy_sgd, LOSSES[0], DATA, KEYS, **few | given | change)
    refused("data must be a pair", noisy_cgd, LOSSES[0], DATA[0], DATA[1], epochs=1, noise_std=20.0, **given)
    refused("loss_fn", lambda: noisy_cgd(lambda w, e: 0.0, DATA, epochs=1, noise_std=20.0, **given))


def test_stochastic_batches_and_fresh_keys():
    run = plan("sgd", epsilon=30.0)
    one, two = (last(run, LOSSES[0], DATA, keys=KEYS) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert (last(run, LOSSES[0], DATA) != one).any()


def test_the_loss_is_that_of_its_gradient(x64):
    for loss in (LOSSES[0], LOSSES[2]):
        x = loss.prepare([[1.0, -2.0, 0.5]])
        weights = np.random.default_rng(1).normal(size=loss.shape(3))
        derivative = jax.jit(lambda *given, loss=loss: jax.grad(loss)(*given))
        for y in range(loss.num_classes):
            found = derivative(weights, (x[0], y))
            np.testing.assert_allclose(found, gradient(loss, weights, x, np.array([y])), rtol=1e-9)
