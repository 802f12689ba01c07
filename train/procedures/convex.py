"""Noisy gradient descent on losses that are convex by construction; only the last iterate is released.

Logistic regression, binary or multinomial (arXiv 2403.00278): features are scaled to a bounded norm and get a
constant, so every example's loss has a known gradient bound and smoothness; a ridge term makes it strongly
convex (proofs/shifted_interpolation.md). Runs in float64. The last iterate is rounded to 2^-16 of its last
noise before it is shown; earlier ones are in checkpoints, which are secret, and nowhere else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff.last_iterate.contraction import contraction_factor
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions
from jaxacct.accountants.tradeoff.plan import LastIteratePlan
from jaxacct.common import validate as _validate

from ..batches.sampler import Replayed
from ..batches.sources import ArrayRows
from ..noise import normals
from ..options import TrainOptions
from ..run.loop import Run
from ..training import fit
from .bandmf import Rows
from .protocol import Procedure, Request, Result

_INSIDE = 1 - 1e-12  # factor of a norm bound, for rounding


@dataclass(frozen=True)
class LogisticRegression:
    """Regularised logistic regression on features of bounded norm.

    Attributes:
      num_classes: 2 is the binary loss with one weight vector; more is softmax.
      feature_norm: longer features are scaled to this norm; then a constant 1 is appended.
      regularization: m, of `(m/2) |weights|^2`, added to every example's loss; 0 for none.
      clip_norm: per-example gradients are clipped to this norm; binary only. Clipping a softmax gradient does
        not give the gradient of a convex function, so there the features' norm is the only bound.
      grad_sensitivity: L, largest distance of two examples' gradients at one point; the ridge term cancels.
      smoothness: M, the Hessian is at most `|x|^2 / 4` (binary) or `|x|^2 / 2` (softmax), and the ridge term.
      strong_convexity: m, from the ridge term alone.
    """

    num_classes: int
    feature_norm: float
    regularization: float = 0.0
    clip_norm: float | None = None
    grad_sensitivity: float = field(init=False, repr=False)
    smoothness: float = field(init=False, repr=False)
    strong_convexity: float = field(init=False, repr=False)

    def __post_init__(self):
        given = self.num_classes, self.feature_norm, self.regularization, self.clip_norm
        _validate.set_fields(self, **logistic_conditions(*given))

    def __call__(self, weights, example):
        """Return the loss of one example `(features with their constant, label)`; its gradient is clipped."""
        x, y = example
        scores = jnp.stack([0.0 * (x @ weights), x @ weights]) if self.num_classes == 2 else weights @ x
        return -jax.nn.log_softmax(scores)[y] + self.regularization / 2 * jnp.sum(jnp.square(weights))

    def shape(self, features: int) -> tuple[int, ...]:
        """Return the shape of the weights."""
        return (features + 1,) if self.num_classes == 2 else (self.num_classes, features + 1)

    def prepare(self, features):
        """Return (n, d + 1) float64: each row scaled to `feature_norm`, by itself, with a constant 1."""
        x = np.asarray(features, np.float64).reshape(len(features), -1)
        if not np.isfinite(x).all():
            raise ValueError("features must be finite, got NaN or infinity")
        norms = np.maximum(np.linalg.norm(x, axis=1), 1e-300)
        scale = np.minimum(1.0, self.feature_norm * _INSIDE / norms)
        return np.concatenate([x * scale[:, None], np.ones((len(x), 1))], axis=1)

    def mean_gradient(self, weights, x, y):
        """Return the mean of clipped gradients of rows `x` (b, d + 1) with labels `y` (b,), plus ridge."""
        if self.num_classes == 2:
            slope = jax.nn.sigmoid(x @ weights) - y.astype(x.dtype)
            if self.clip_norm is not None:
                max_factor = self.clip_norm / jnp.linalg.norm(x, axis=1)
                slope = jnp.clip(slope, -max_factor, max_factor)
            data = slope @ x / len(y)
        else:
            off = jax.nn.softmax(x @ weights.T) - jax.nn.one_hot(y, self.num_classes, dtype=x.dtype)
            data = off.T @ x / len(y)
        return data + self.regularization * weights

    def predict(self, weights, features):
        """Return (n,) classes."""
        x = self.prepare(features)
        weights = np.asarray(weights)
        return (x @ weights > 0).astype(int) if self.num_classes == 2 else (x @ weights.T).argmax(axis=1)


@dataclass(frozen=True)
class Projection:
    """The projection onto a convex set, all weights as one vector.

    Attributes:
      onto: weights -> weights in the set.
      diameter: of the set.
      is_named: whether it is a ball around 0, which a plan can name.
    """

    onto: Callable[[Any], Any]
    diameter: float
    is_named: bool = False

    def __call__(self, weights):
        return self.onto(weights)


def project_l2_ball(radius: float, center: Any = 0.0) -> Projection:
    """Return the projection onto a ball."""
    _validate.positive_number("radius", radius)

    def onto(weights):
        away = weights - center
        short = jnp.minimum(1.0, radius / jnp.maximum(jnp.linalg.norm(away.ravel()), 1e-300))
        return center + away * short

    return Projection(onto, 2 * radius, is_named=bool(np.ndim(center) == 0 and center == 0))


def project_box(low: float, high: float, size: int) -> Projection:
    """Return the projection onto `[low, high]^size`."""
    if not low < high:
        raise ValueError(f"low must be below high, got {low!r} and {high!r}")
    size = _validate.positive_integer("size", size)
    return Projection(lambda weights: jnp.clip(weights, low, high), (high - low) * size**0.5)


class Iterate(NamedTuple):
    """State of the descent: secret until the last step.

    Attributes:
      params: the weights, float64.
      step: () uint32: steps so far. The noise of a step is a function of it and the key.
      key: (8,) uint32.
    """

    params: jax.Array
    step: jax.Array
    key: jax.Array

    def __repr__(self) -> str:
        return f"Iterate(step={self.step}, secret)"


class IterateInfo(NamedTuple):
    """Private: no guarantee covers it."""

    gradient_norm: jax.Array


def _train(plan: LastIteratePlan, request: Request) -> Result:
    """Noisy gradient descent from 0, of which only the last iterate is shown.

    Batches of "gd" and "cgd" are the rows in their order, never shuffled; those of "sgd" are drawn without
    replacement from a secret key.
    """
    if request.model is not None:
        raise ValueError("model must be None for a plan of last-iterate: weights of the loss start at 0")
    loss, steps = request.loss, request.options.steps
    if not isinstance(loss, LogisticRegression):
        raise ValueError(
            "loss must be a LogisticRegression, which is convex and smooth by construction, got "
            f"{type(loss).__name__}"
        )
    if steps not in (None, plan.steps):
        raise ValueError(
            f"steps must be the plan's {plan.steps}, got {steps!r}: only its last iterate is shown"
        )
    for name, holds in (
        ("grad_sensitivity", loss.grad_sensitivity <= plan.grad_sensitivity),
        ("smoothness", loss.smoothness <= plan.smoothness),
        ("strong_convexity", loss.strong_convexity >= plan.strong_convexity),
    ):
        if not holds:
            raise ValueError(
                f"loss must have the plan's {name} {getattr(plan, name):g}, has {getattr(loss, name):g}"
            )
    contraction_factor(plan.stepsize, plan.strong_convexity, plan.smoothness)
    rows, evaluate = _prepared(plan, loss, request.data), request.evaluate
    sampler_key, noise_key = request.keys()
    noise_key = normals.fresh_key() if noise_key is None else noise_key
    if evaluate is not None:

        def evaluated(weights):
            with jax.enable_x64(False):
                return evaluate(weights)

        request = replace(request, evaluate=evaluated)
    fine = plan.stepsize * plan.noise_std * 2.0**-16
    with jax.enable_x64(True):
        weights = jnp.zeros(loss.shape(rows.arrays[0].shape[1] - 1), jnp.float64)
        return Run(
            plan=plan,
            request=request,
            start=lambda: Iterate(weights, jnp.uint32(0), jnp.asarray(noise_key, jnp.uint32)),
            step=_step(plan, loss),
            batch=Rows(rows, plan.batch_size),
            steps=plan.steps,
            clip_norm=loss.grad_sensitivity / 2,
            sampler_key=sampler_key,
            source_at=lambda key, drawn: Replayed(lambda generator: _batches(plan, generator), key, drawn),
            described={"loss": repr(loss)},
            released=lambda weights: np.asarray(jnp.round(weights / fine) * fine),
            only_last=True,
        ).take()


PROCEDURE = Procedure(_train, frozenset({"steps"}))


def _prepared(plan: LastIteratePlan, loss: LogisticRegression, data) -> ArrayRows:
    """Rows of (features of bounded norm, label), of `{"inputs", "labels"}`, a pair or a data set."""
    if hasattr(data, "take") and hasattr(data, "fingerprint"):
        data = data.take(np.arange(len(data)), len(data))
    data = _pair(data)
    x, y = loss.prepare(data[0]), np.asarray(data[1])
    if y.shape != (len(x),) or len(x) != plan.num_examples:
        raise ValueError(
            f"features and labels must have the plan's {plan.num_examples} rows, got {len(x)}, {y.shape}"
        )
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= loss.num_classes:
        raise ValueError(f"labels must be integers 0 to {loss.num_classes - 1}")
    return ArrayRows((x, y))


def _batches(plan: LastIteratePlan, generator: np.random.Generator) -> Iterator[np.ndarray]:
    n, b = plan.num_examples, plan.batch_size
    for step in range(plan.steps):
        if plan.method == "sgd":
            yield generator.choice(n, b, replace=False, shuffle=False)
        else:
            first = step * b % n
            yield np.arange(first, first + b)


def _step(plan: LastIteratePlan, loss: LogisticRegression):
    """Return one step: `step(state, (x, y), mask) -> (state, private info)`, jitted."""
    project = (lambda w: w) if plan.diameter is None else project_l2_ball(plan.diameter / 2)

    def step(state: Iterate, batch, mask) -> tuple[Iterate, IterateInfo]:
        del mask  # every batch is full
        gradient = loss.mean_gradient(state.params, *batch)
        z = normals.standard_normals(state.key, state.step, gradient.size).reshape(gradient.shape)
        params = project(state.params - plan.stepsize * (gradient + plan.noise_std * z))
        info = IterateInfo(jnp.linalg.norm(gradient.ravel()))
        return Iterate(params, state.step + jnp.uint32(1), state.key), info

    return jax.jit(step, donate_argnums=0)


def noisy_gd(loss_fn, data, key=None, *, steps: int, **options) -> np.ndarray:
    """Return the last iterate of noisy gradient descent on full batches; arguments as for `noisy_sgd`."""
    return _run("gd", loss_fn, data, key, steps=steps, batch_size=len(_pair(data)[0]), **options)


def noisy_cgd(loss_fn, data, key=None, *, epochs: int, batch_size: int, **options) -> np.ndarray:
    """Return the last iterate over `epochs` cycles of fixed batches; other arguments as for `noisy_sgd`."""
    n = len(_pair(data)[0])
    if n % _validate.positive_integer("batch_size", batch_size):
        raise ValueError(f"batch_size must divide the number of examples {n}, got {batch_size}")
    steps = _validate.positive_integer("epochs", epochs) * (n // batch_size)
    return _run("cgd", loss_fn, data, key, steps=steps, batch_size=batch_size, **options)


def noisy_sgd(loss_fn, data, key=None, *, steps: int, batch_size: int, **options) -> np.ndarray:
    """Return the last iterate, (weights) float64, with batches drawn without replacement.

    Args:
      loss_fn: a `LogisticRegression`, convex and smooth by construction.
      data: (features, labels), or `{"inputs", "labels"}`.
      key: as `keys` of `fit`. Only tests should fix it.
      steps: number of steps.
      batch_size: of each step.
      **options: `stepsize`; `delta`, and `epsilon` (to calibrate) or `noise_std` (on the mean gradient, which
        then gives its own epsilon); `clip_norm` and `regularizer`, the ridge, in place of the loss's own;
        `projection`, by `project_l2_ball`; `init`, None for 0.

    Raises:
      ValueError: a run that no bound covers.
    """
    return _run("sgd", loss_fn, data, key, steps=steps, batch_size=batch_size, **options)


def _pair(data):
    """Features and labels."""
    if isinstance(data, dict):
        if set(data) != {"inputs", "labels"}:
            raise ValueError(f"data must have inputs and labels, got {', '.join(map(str, data))}")
        data = data["inputs"], data["labels"]
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(f"data must be a pair of features and labels, got {type(data).__name__}")
    return data


def _run(
    method, loss_fn, data, key, *, delta, noise_std=None, epsilon=None, init=None, projection=None, **run
) -> np.ndarray:
    if not isinstance(loss_fn, LogisticRegression):
        raise ValueError(f"loss_fn must be a LogisticRegression, got {type(loss_fn).__name__}")
    if init is not None:
        raise ValueError("init must be None: the weights start at 0, which depends on no data")
    if (noise_std is None) == (epsilon is None):
        raise ValueError("epsilon (to calibrate) or noise_std must be given, and not both")
    changed = {"clip_norm": run.pop("clip_norm", None), "regularization": run.pop("regularizer", None)}
    loss_fn = replace(loss_fn, **{name: value for name, value in changed.items() if value is not None})
    data = _pair(data)
    if projection is not None and not getattr(projection, "is_named", False):
        raise ValueError("projection must be project_l2_ball(radius), the set around 0 that a plan can name")
    run |= dict(num_examples=len(data[0]), diameter=None if projection is None else projection.diameter)
    make = LastIteratePlan.calibrate if noise_std is None else LastIteratePlan.at_noise
    given: Any = epsilon if noise_std is None else noise_std
    plan = make(given, delta, method=method, loss=loss_fn, **run)
    return fit(plan, None, loss_fn, data, options=TrainOptions(keys=key)).params
