"""Noisy gradient descent on losses that are convex by construction; only the last iterate leaves.

Logistic regression, binary or multinomial (arXiv 2403.00278): every example's features are cut to a norm and
get a constant, so its loss has a known gradient bound and smoothness; a ridge term gives strong convexity
(proofs/shifted_interpolation.md).
Runs in float64. The last iterate is rounded to 2^-16 of its last noise before it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import _validate
from jaxacct.tradeoff.contraction import contraction_factor
from jaxacct.tradeoff.plan import LastIteratePlan

from . import normals, sampler
from .batch_clipping import make_generator


@dataclass(frozen=True)
class LogisticRegression:
    """Regularised logistic regression on features of bounded norm.

    Attributes:
      num_classes: 2 is the binary loss with one weight vector; more is softmax.
      feature_norm: features are cut to this norm; then a constant 1 is appended.
      regularization: m, of `(m/2) |weights|^2`, added to every example's loss; 0 for none.
      clip_norm: per-example gradients are clipped to this norm; binary only. Clipping a softmax gradient
        does not give the gradient of a convex function, so there the features' norm is the only bound.
    """

    num_classes: int
    feature_norm: float
    regularization: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self):
        _validate.positive_integer("num_classes", self.num_classes, minimum=2)
        _validate.positive_number("feature_norm", self.feature_norm)
        _validate.nonnegative_number("regularization", self.regularization)
        if self.clip_norm is not None:
            _validate.positive_number("clip_norm", self.clip_norm)
            if self.num_classes > 2:
                raise ValueError(
                    "clip_norm must not be given for more than two classes: a clipped softmax gradient is "
                    "not the gradient of a convex loss; bound feature_norm instead"
                )

    @property
    def _norm(self) -> float:
        return float(np.hypot(self.feature_norm, 1.0))

    @property
    def grad_sensitivity(self) -> float:
        """L: largest distance of two examples' gradients at one point; the ridge term cancels."""
        if self.num_classes > 2:
            return 2 * 2**0.5 * self._norm  # |p - y| <= sqrt(2)
        return 2 * (self._norm if self.clip_norm is None else min(self._norm, self.clip_norm))

    @property
    def smoothness(self) -> float:
        """M: the Hessian is at most `|x|^2 / 4` (binary) or `|x|^2 / 2` (softmax), and the ridge term."""
        return self._norm**2 / (4 if self.num_classes == 2 else 2) + self.regularization

    @property
    def strong_convexity(self) -> float:
        """m, from the ridge term alone."""
        return float(self.regularization)

    def shape(self, features: int) -> tuple[int, ...]:
        """Of the weights."""
        return (features + 1,) if self.num_classes == 2 else (self.num_classes, features + 1)

    def prepare(self, features):
        """(n, d + 1) float64: each row cut to `feature_norm`, with a constant 1. Depends on no other row."""
        x = np.asarray(features, np.float64).reshape(len(features), -1)
        if not np.isfinite(x).all():
            raise ValueError("features must be finite, had NaN or infinity")
        # A hair inside the norm, for rounding.
        scale = np.minimum(
            1.0, self.feature_norm * (1 - 1e-12) / np.maximum(np.linalg.norm(x, axis=1), 1e-300)
        )
        return np.concatenate([x * scale[:, None], np.ones((len(x), 1))], axis=1)

    def mean_gradient(self, weights, x, y):
        """Mean gradient over rows `x` (b, d + 1) with labels `y` (b,), clipped each, with the ridge term."""
        if self.num_classes == 2:
            slope = jax.nn.sigmoid(x @ weights) - y
            if self.clip_norm is not None:
                most = self.clip_norm / jnp.linalg.norm(x, axis=1)
                slope = jnp.clip(slope, -most, most)
            data = slope @ x / len(y)
        else:
            off = jax.nn.softmax(x @ weights.T) - jax.nn.one_hot(y, self.num_classes, dtype=x.dtype)
            data = off.T @ x / len(y)
        return data + self.regularization * weights

    def predict(self, weights, features):
        """(n,) classes."""
        x = self.prepare(features)
        weights = np.asarray(weights)
        return (x @ weights > 0).astype(int) if self.num_classes == 2 else (x @ weights.T).argmax(axis=1)


def project_l2_ball(radius: float, center=0.0) -> Callable:
    """The projection onto a ball of diameter 2 `radius`, all weights as one vector."""
    _validate.positive_number("radius", radius)

    def project(weights):
        away = weights - center
        return center + away * jnp.minimum(1.0, radius / jnp.maximum(jnp.linalg.norm(away.ravel()), 1e-300))

    project.diameter = 2 * radius  # pyright: ignore
    return project


def project_box(low: float, high: float, size: int) -> Callable:
    """The projection onto `[low, high]^size`, of diameter `(high - low) sqrt(size)`."""
    if not low < high:
        raise ValueError(f"low must be below high, were {low!r} and {high!r}")
    _validate.positive_integer("size", size)

    def project(weights):
        return jnp.clip(weights, low, high)

    project.diameter = (high - low) * size**0.5  # pyright: ignore
    return project


def fit_convex(
    plan: LastIteratePlan,
    loss: LogisticRegression,
    features,
    labels,
    *,
    return_iterates: bool = False,
    progress: Callable[[str, int, float], None] | None = None,
    keys: tuple | None = None,
) -> np.ndarray:
    """The last iterate of noisy gradient descent under a plan: full, cyclic or stochastic batches.

    Starts at 0. Batches of "cgd" are the rows in their order, never shuffled; those of "sgd" are drawn
    without replacement from a secret key.

    Args:
      plan: certified again here.
      loss: whose conditions must be at least the plan's.
      features: (num_examples, ...) finite.
      labels: (num_examples,) classes 0 .. num_classes - 1.
      return_iterates: refused: an iterate that is seen voids the plan.
      keys: (sampler key, noise key); from the operating system by default. Only tests should fix them.

    Returns:
      weights, float64.

    Raises:
      ValueError: what the plan does not cover.
    """
    if return_iterates:
        raise ValueError(
            "return_iterates must be False: the plan holds only where no iterate but the last is shown"
        )
    if not isinstance(plan, LastIteratePlan):
        raise ValueError(f"plan must be a LastIteratePlan, was {type(plan).__name__}")
    if not isinstance(loss, LogisticRegression):
        raise ValueError(
            "loss must be a LogisticRegression, which is convex and smooth by construction, was "
            f"{type(loss).__name__}"
        )
    if not plan.certified:
        raise ValueError("plan must be certified; its noise does not give its epsilon at its delta")
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
    x, y = loss.prepare(features), np.asarray(labels)
    if y.shape != (len(x),) or len(x) != plan.num_examples:
        raise ValueError(
            f"features and labels must have the plan's {plan.num_examples} rows, had {len(x)}, {y.shape}"
        )
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= loss.num_classes:
        raise ValueError(f"labels must be integers 0 to {loss.num_classes - 1}")
    sampler_key, noise_key = keys or (sampler.fresh_key(), normals.fresh_key())
    batches = _batches(plan, make_generator(sampler_key))
    with jax.enable_x64(True):
        run = _program(plan, loss, jnp.asarray(x), jnp.asarray(y), jnp.asarray(noise_key, jnp.uint32))
        weights = jnp.zeros(loss.shape(x.shape[1] - 1), jnp.float64)
        at_once = max(1, 2**20 // plan.batch_size)
        for start in range(0, plan.steps, at_once):
            chunk = np.stack([next(batches) for _ in range(min(at_once, plan.steps - start))])
            weights = run(weights, jnp.asarray(chunk), jnp.uint32(start))
            if progress:
                progress("training", start + len(chunk), plan.steps)
        fine = plan.stepsize * plan.noise_std * 2.0**-16
        return np.asarray(jnp.round(weights / fine) * fine)


def _batches(plan: LastIteratePlan, generator: np.random.Generator):
    n, b = plan.num_examples, plan.batch_size
    for step in range(plan.steps):
        if plan.method == "sgd":
            yield generator.choice(n, b, replace=False, shuffle=False).astype(np.int32)
        else:
            first = step * b % n
            yield np.arange(first, first + b, dtype=np.int32)


def _program(plan: LastIteratePlan, loss: LogisticRegression, x, y, key):
    project = (lambda w: w) if plan.diameter is None else project_l2_ball(plan.diameter / 2)

    @jax.jit
    def run(weights, batches, start):
        def step(weights, at):
            rows, number = at
            gradient = loss.mean_gradient(weights, x[rows], y[rows])
            z = normals.standard_normals(key, number, weights.size).reshape(weights.shape)
            return project(weights - plan.stepsize * (gradient + plan.noise_std * z)), None

        numbers = start + jnp.arange(len(batches), dtype=jnp.uint32)
        return jax.lax.scan(step, weights, (batches, numbers))[0]

    return run


def noisy_gd(
    loss, features, labels, key=None, *, steps, stepsize, epsilon, delta, diameter=None
) -> np.ndarray:
    """Calibrate and run full batches; the last iterate. `key` as `keys` of `fit_convex`."""
    return _calibrated(
        "gd", loss, features, labels, key, steps, len(features), stepsize, epsilon, delta, diameter
    )


def noisy_cgd(
    loss, features, labels, key=None, *, epochs, batch_size, stepsize, epsilon, delta, diameter=None
) -> np.ndarray:
    """The same with a fixed cycle of batches."""
    n = len(features)
    if n % _validate.positive_integer("batch_size", batch_size):
        raise ValueError(f"batch_size must divide the number of examples {n}, was {batch_size}")
    steps = _validate.positive_integer("epochs", epochs) * (n // batch_size)
    return _calibrated(
        "cgd", loss, features, labels, key, steps, batch_size, stepsize, epsilon, delta, diameter
    )


def noisy_sgd(
    loss, features, labels, key=None, *, steps, batch_size, stepsize, epsilon, delta, diameter=None
) -> np.ndarray:
    """The same with batches drawn without replacement."""
    return _calibrated(
        "sgd", loss, features, labels, key, steps, batch_size, stepsize, epsilon, delta, diameter
    )


def _calibrated(method, loss, features, labels, key, steps, batch_size, stepsize, epsilon, delta, diameter):
    if not isinstance(loss, LogisticRegression):
        raise ValueError(f"loss must be a LogisticRegression, was {type(loss).__name__}")
    plan = LastIteratePlan.calibrate(
        epsilon,
        delta,
        method=method,
        loss=loss,
        num_examples=len(features),
        steps=steps,
        batch_size=batch_size,
        stepsize=stepsize,
        diameter=diameter,
    )
    return fit_convex(plan, loss, features, labels, keys=key)
