"""Canaries in the data of a run, and what the run releases in their coordinates.

A canary's loss is linear in one coordinate of the model: its gradient is 100 clip norms long there and zero
elsewhere, so it is clipped to the clip norm wherever the model is. A silent canary has gradient 0.

The guarantee for one example is against an adversary who has all others, when they participated and every
released parameter: their clipped gradients are no noise that hides a canary, and are subtracted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jax.experimental import io_callback

from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import Mechanism

from ..batches.sources import ArrayRows
from ..clipping.per_example import default_microbatch_size
from ..models.loss import Loss, Numbered, numbered
from ..training import TrainOptions, fit

LENGTH = 100.0  # length of a canary's gradient, in clip norms, before it is clipped
REAL, SILENT = -1, -2  # in place of a coordinate


@dataclass(frozen=True)
class Setting:
    """What is attacked: a plan, a loss, initial parameters and data, as arguments of `fit`."""

    plan: Plan
    loss: Loss
    params: Any
    rows: Any
    clip_norm: float
    options: TrainOptions

    @property
    def coordinates(self) -> int:
        """Number of coordinates of the parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def outputs(self, canary_of: np.ndarray, coordinates: np.ndarray, optimizer) -> np.ndarray:
        """Run `fit` and return the mechanism's outputs at `coordinates` without those of other examples.

        They are (coordinates, steps) float64, per clip norm. `canary_of`, (dataset_size,) int32, has the
        coordinate of an example's canary, `REAL` or `SILENT`.
        """
        steps = self.plan.mechanism.scheme.iterations
        log = np.full((steps, len(coordinates)), np.nan, np.float32)
        others = Bystanders(self, canary_of == REAL, coordinates)
        rows = _Rows(self.rows, canary_of, others)
        fit(
            self.plan,
            self.params,
            self.loss.wrapped(lambda base: _with_canaries(base, self.clip_norm)),
            rows,
            _recorded(optimizer, coordinates, log, others),
            clip_norm=self.clip_norm,
            options=self.options,
        )
        jax.effects_barrier()
        if not np.isfinite(log).all():
            raise ValueError("audit must see a finite number for every step, some are missing or not finite")
        expected = self.plan.expected_batch_size
        assert expected is not None
        others.settle()
        sums = log.T * (expected / self.clip_norm) - others.sums.T / self.clip_norm
        return outputs(self.plan.mechanism, sums)


class Bystanders:
    """Sums of the clipped gradients of some examples at each step, (steps, coordinates) float64 in `sums`.

    Computed separately from the clipping and the sums of a run: in an honest run they differ by rounding.

    Args:
      setting: what is attacked.
      known: (dataset_size,) bool, the examples.
      coordinates: of the flattened parameters.
    """

    def __init__(self, setting, known: np.ndarray, coordinates: np.ndarray):
        self.sums = np.zeros((setting.plan.mechanism.scheme.iterations, len(coordinates)))
        self._loss, self._rows, self._known = setting.loss, numbered(setting.loss, setting.rows), known
        asked = setting.options.microbatch_size or default_microbatch_size(setting.params)
        self._size = min(setting.plan.max_batch_size, asked)
        self._drawn = np.zeros(0, np.int64)
        self._before: tuple[int, Any] | None = None
        clip_norm, normalize = setting.clip_norm, setting.options.normalize

        def total(loss, params, rows, real, step):
            def one(example, real):
                value, gradient = jax.value_and_grad(loss.at(step))(params, example)
                flat = jnp.concatenate([g.reshape(-1).astype(jnp.float32) for g in jax.tree.leaves(gradient)])
                norm = jnp.linalg.norm(flat)
                scale = clip_norm / (norm + 0.01) if normalize else jnp.minimum(1.0, clip_norm / norm)
                counts = real & jnp.isfinite(value) & jnp.isfinite(norm)
                return jnp.where(counts, scale * flat[coordinates], 0.0)

            return jax.vmap(one)(rows, real).sum(axis=0)

        self._total = jax.jit(total)

    def draw(self, indices: np.ndarray) -> None:
        """Record that a batch is read; the step before it was taken or is about to be."""
        self.settle()
        self._drawn = indices[self._known[indices]]

    def step(self, step: int, params: Any) -> None:
        """Record that the last batch is used at these parameters; called back by the program."""
        # Copied: the arrays of a callback may be memory that the program uses again.
        self._before = step, jax.tree.map(lambda leaf: np.array(leaf, copy=True), params)

    def settle(self) -> None:
        """Add the sum of the last batch, once its step has been taken."""
        jax.effects_barrier()
        if self._before is None:
            return
        (step, params), self._before = self._before, None
        for start in range(0, len(self._drawn), self._size):
            some = self._drawn[start : start + self._size]
            rows = self._rows.take(some, self._size)
            real = np.arange(self._size) < len(some)
            self.sums[step] += np.asarray(self._total(self._loss, params, rows, real, np.int32(step)))


class _Rows(ArrayRows):
    """A data set of which some examples are canaries; `others` are notified of each batch."""

    def __init__(self, rows, canary_of: np.ndarray, others: Bystanders):
        self.rows, self.canary_of, self.others = rows, canary_of, others

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices, size: int):
        self.others.draw(np.array(indices, np.int64))
        canary = np.full(size, SILENT, np.int32)
        canary[: len(indices)] = self.canary_of[indices]
        return {"canary": canary, "example": self.rows.take(indices, size)}

    def fingerprint(self) -> str:
        raise NotImplementedError  # nothing is kept


def _with_canaries(base: Callable, clip_norm: float) -> Callable:
    """Return a loss of rows of `_Rows`: for a canary, linear in one coordinate; for a silent one, 0."""

    def loss(params, row):
        number = row.number if isinstance(row, Numbered) else None
        row = row.example if isinstance(row, Numbered) else row
        example = row["example"] if number is None else Numbered(row["example"], number)
        flat = jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in jax.tree.leaves(params)])
        at = row["canary"]
        planted = jnp.where(at >= 0, LENGTH * clip_norm * flat[jnp.maximum(at, 0)], 0.0)
        return jnp.where(at == REAL, base(params, example).astype(jnp.float32), planted)

    return loss


def _recorded(
    optimizer, coordinates: np.ndarray, log: np.ndarray, others: Bystanders
) -> optax.GradientTransformation:
    """Return `optimizer`, which writes some coordinates of its input into the rows of `log`."""

    def write(step, row, params):
        log[int(step)] = np.asarray(row)
        others.step(int(step), params)

    def init(params):
        return optimizer.init(params), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        inner, step = state
        flat = jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in jax.tree.leaves(updates)])
        io_callback(write, None, step, flat[coordinates], params)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (inner, step + 1)

    return optax.GradientTransformation(init, update)


def outputs(mechanism: Mechanism, released: np.ndarray) -> np.ndarray:
    """Return `C u` of (trials, steps) sequences `u = x + sigma C^{-1} z`, the outputs of the mechanism.

    Raises:
      ValueError: the strategy is not a Toeplitz matrix.
    """
    column = getattr(mechanism.strategy, "array", None)
    if column is None:
        raise ValueError(f"plan must have a Toeplitz strategy, has {mechanism.strategy.describe()}")
    return scipy.signal.lfilter(column, [1.0], np.asarray(released, np.float64), axis=1)


def quiet(setting: Setting, number: int) -> np.ndarray:
    """Return the coordinates in which the other examples add up to least before the run.

    An honest run's other examples are subtracted; a broken one may not have clipped them. Judged by the
    clipped gradients g of some examples: `(n mean g)^2 + n mean g^2` bounds the square of the shift by n of
    them and of its standard deviation. Any choice independent of the coins is valid.
    """
    n = len(setting.rows)
    places = np.arange(max(0, n - 64), n)  # the last ones: the first are canaries
    rows = numbered(setting.loss, setting.rows).take(places, len(places))
    gradient, sums = jax.jit(jax.grad(setting.loss.at(0))), np.zeros((2, setting.coordinates))
    for i in range(len(places)):
        found = gradient(setting.params, jax.tree.map(lambda leaf, i=i: leaf[i], rows))
        flat = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(found)])
        flat *= min(1.0, setting.clip_norm / max(np.linalg.norm(flat), 1e-300))
        sums += flat, flat**2
    mean, square = sums / len(places)
    nuisance = np.nan_to_num((n * mean) ** 2 + n * square, nan=np.inf)
    return np.sort(np.argsort(nuisance, kind="stable")[:number])
