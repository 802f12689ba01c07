"""Convex losses by construction: their conditions by brute force, the iterates, what is refused."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxacct.tradeoff.plan import LastIteratePlan
from train.convex import LogisticRegression, fit_convex, noisy_cgd, project_box, project_l2_ball

KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
LOSSES = [
    LogisticRegression(2, 3.0, 0.1),
    LogisticRegression(2, 3.0, 0.1, clip_norm=0.7),
    LogisticRegression(4, 3.0, 0.05),
]


def gradient(loss, weights, x, y):
    return np.asarray(loss.mean_gradient(weights, x, y))


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


def test_clipping_a_softmax_gradient_is_not_monotone():
    """Why it is refused: the clipped gradient of one example, over two weights, points apart."""
    rng = np.random.default_rng(0)
    loss, clip, least = LogisticRegression(3, 3.0), 0.5, 0.0

    def clipped(w, x, y):
        scores = np.exp(x @ w.T)
        off = scores / scores.sum() - np.eye(3)[y]
        g = off.T @ x
        return g * min(1.0, clip / np.linalg.norm(g))

    x, y = loss.prepare([[3.0, 0.0]]), np.array([0])
    for _ in range(4000):
        u, v = rng.normal(size=(2, *loss.shape(2))) * 2
        v = u + (v - u) * rng.choice([0.01, 0.3, 1.0])
        least = min(least, np.sum((clipped(u, x, y) - clipped(v, x, y)) * (u - v)) / np.sum((u - v) ** 2))
    assert least < -1e-3
    with pytest.raises(ValueError, match="clip_norm"):
        LogisticRegression(3, 3.0, clip_norm=0.5)


def test_preparing_cuts_each_row_by_itself():
    loss = LogisticRegression(2, 2.0)
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = loss.prepare(rows)
    np.testing.assert_allclose(np.linalg.norm(found[:, :-1], axis=1), [2.0, 0.5, 0.0])
    assert (found[:, -1] == 1).all() and np.linalg.norm(found[0, :-1]) <= 2.0
    np.testing.assert_array_equal(loss.prepare(rows[:1]), found[:1])
    with pytest.raises(ValueError, match="finite"):
        loss.prepare([[np.nan, 0.0]])


def test_projections():
    ball, box = project_l2_ball(1.0), project_box(-1.0, 1.0, 2)
    np.testing.assert_allclose(ball(np.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(ball(np.array([0.3, 0.4])), [0.3, 0.4], rtol=1e-6)
    assert ball.diameter == 2 and box.diameter == pytest.approx(2 * 2**0.5)
    np.testing.assert_allclose(box(np.array([3.0, -0.5])), [1.0, -0.5])


def plan(method="cgd", **change):
    loss = LOSSES[0]
    fields = dict(
        method=method,
        num_examples=8,
        steps=12,
        batch_size=8 if method == "gd" else 2,
        stepsize=0.2,
        noise_std=20.0,
        grad_sensitivity=loss.grad_sensitivity,
        smoothness=loss.smoothness,
        strong_convexity=loss.strong_convexity,
        diameter=None,
        epsilon=8.0,
        delta=1e-5,
    )
    return LastIteratePlan(**fields | change)


DATA = np.random.default_rng(3).normal(size=(8, 2)), np.array([0, 1] * 4)


@pytest.mark.parametrize("method", ["gd", "cgd"])
def test_iterates_are_the_algorithm_in_numpy(method, x64):
    """The same noise, the same batches, plain NumPy; rounded at the end."""
    from train import normals

    run, loss = plan(method, diameter=1.0), LOSSES[0]
    found = fit_convex(run, loss, *DATA, keys=KEYS)
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


def test_stochastic_batches_and_fresh_keys():
    run = plan("sgd", epsilon=30.0)
    one, two = (fit_convex(run, LOSSES[0], *DATA, keys=KEYS) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert (fit_convex(run, LOSSES[0], *DATA) != one).any()


def test_learning_something():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 3000)
    features = rng.normal(size=(3000, 5)) * 0.3 + np.eye(5)[labels]
    loss = LogisticRegression(3, 2.0, 0.01)
    weights = noisy_cgd(
        loss,
        features,
        labels,
        KEYS,
        epochs=10,
        batch_size=300,
        stepsize=0.3,
        epsilon=2.0,
        delta=1e-5,
        diameter=20.0,
    )
    assert np.mean(loss.predict(weights, features) == labels) > 0.8
    assert jax.config.read("jax_enable_x64") is False


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"return_iterates": True}, "return_iterates"),
        ({"plan": plan(noise_std=0.1)}, "certified"),
        ({"plan": plan(grad_sensitivity=1.0)}, "grad_sensitivity"),
        ({"plan": plan(smoothness=0.2)}, "smoothness"),
        ({"plan": plan(strong_convexity=0.2)}, "strong_convexity"),
        ({"plan": plan(num_examples=12)}, "rows"),
        ({"loss": lambda w, x: 0.0}, "loss"),
        ({"labels": np.array([0, 1, 2, 0, 1, 2, 0, 1])}, "labels"),
        ({"labels": np.zeros(8)}, "labels"),
        ({"features": np.full((8, 2), np.inf)}, "finite"),
        ({"plan": 3}, "plan"),
    ],
)
def test_what_the_plan_does_not_cover_is_refused(change, word):
    fields = dict(plan=plan(), loss=LOSSES[0], features=DATA[0], labels=DATA[1])
    with pytest.raises(ValueError, match=word) as caught:
        fit_convex(**fields | change)
    assert "\n" not in str(caught.value)


def test_plans_refuse_steps_outside_the_conditions(tmp_path):
    for change, word in (
        ({"stepsize": 5.0}, "stepsize"),
        ({"method": "x"}, "method"),
        ({"batch_size": 3}, "batch_size"),
        ({"steps": 13}, "steps"),
        ({"noise_std": 0.0}, "noise_std"),
        ({"diameter": -1.0}, "diameter"),
    ):
        with pytest.raises(ValueError, match=word):
            plan(**change)
    with pytest.raises(ValueError, match="batch_size"):
        plan("gd", batch_size=2)
    path = tmp_path / "plan.json"
    plan().save(path)
    assert LastIteratePlan.load(path) == plan()
    with pytest.raises(ValueError, match="hold"):
        LastIteratePlan.from_json(plan().to_json() | {"noise_std": 0.1})
    with pytest.raises(ValueError, match="a number that cannot be computed with"):
        LastIteratePlan.from_json(plan().to_json() | {"diameter": 1e308})
    # What the promise rests on is in its sentence.
    easier = LastIteratePlan.from_json(plan().to_json() | {"grad_sensitivity": 0.0})
    assert "gradient sensitivity of at most 0," in easier.statement() != plan().statement()
    almost = dataclasses.replace(plan(), epsilon=8.000000001)
    assert "(8.000000001, " in almost.statement()
    made = LastIteratePlan.calibrate(
        3.0,
        1e-5,
        method="cgd",
        loss=LOSSES[1],
        num_examples=8,
        steps=12,
        batch_size=2,
        stepsize=0.2,
        diameter=None,
    )
    assert made.certified and made.bound().epsilon(1e-5) == pytest.approx(3.0, rel=1e-8)
    assert "last of 12 iterates" in made.statement()
