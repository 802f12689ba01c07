"""optax transformations: the privatizer, the learning rate of the paper, averages of iterates."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism

from .clipping.grid import Grid, GridSum
from .clipping.programs import shapes
from .noise import recursion as noise
from .noise import redrawn
from .procedures.by_device import refuse_explicit_axes


@dataclass(frozen=True, eq=False)
class Privatizer:
    """The optax transformation from integer sums of clipped gradients to private mean gradients.

    Attributes:
      mechanism: what was accounted for.
      grid: the clip norm, and the grid on which gradients are summed.
      expected_batch_size: public; the batch size that was drawn is not.
      key: (8,) uint32; secret. None to draw one for every run, in `init`.
      noise_memory: "keep", or "recompute" for a matrix with a banded inverse (`train.noise.redrawn`).
    """

    mechanism: Mechanism
    grid: Grid
    expected_batch_size: float
    key: Any = field(repr=False)
    noise_memory: str = redrawn.KEEP

    @property
    def redraws(self) -> bool:
        """Whether earlier vectors are drawn again rather than kept; of one band there are none."""
        return self.noise_memory == redrawn.RECOMPUTE and self.mechanism.strategy.noise_copies > 0

    def init(self, params) -> noise.NoiseState:
        """Return the noise of a new run before its first step, with a key of its own unless one was given."""
        if self.redraws:
            return redrawn.init(params, self.key)
        return noise.init(self.mechanism.strategy, params, self.key)

    @property
    def levels(self) -> float:
        """Standard deviation of a step's fresh noise in grid units."""
        return self.mechanism.noise_multiplier * 2.0**self.grid.bits

    def update(self, updates, state: noise.NoiseState, params=None, *, cuts=None, normals=None):
        """Return `(sum + clip_norm sigma w_t) / expected_batch_size` in float32, and the noise after it.

        `updates` is the `GridSum` of the step. One on another grid, or of another clip norm,
        is refused; after one that is not finite all updates are NaN. `cuts` and `normals` are those of
        `train.noise.recursion.draw`.
        """
        if not isinstance(updates, GridSum) or updates.grid != self.grid:
            was = f"on {updates.grid}" if isinstance(updates, GridSum) else type(updates).__name__
            raise ValueError(f"updates must be a sum of clipped gradients on {self.grid}, got {was}")
        refuse_explicit_axes(updates=updates.values)
        draw = redrawn.draw if self.redraws else functools.partial(noise.draw, normals=normals)
        drawn, after = draw(self.mechanism.strategy, self.levels, state, updates.whole, cuts=cuts)
        end, sound = self.mechanism.scheme.iterations, updates.is_finite
        covered = (state.step < end) & sound
        after = after._replace(step=jnp.where(sound, after.step, end))
        return updates.scaled(1 / self.expected_batch_size, drawn, covered), after


def privatize(
    mechanism: Mechanism,
    *,
    clip_norm: float,
    expected_batch_size: float,
    key=None,
    noise_memory: str = redrawn.KEEP,
) -> Privatizer:
    """Return the noise of `make_step`, and the clip norm that it is for.

        private = privatize(mechanism, clip_norm=1.0, expected_batch_size=64)
        step = make_step(loss, private, optax.adam(1e-3))

    The update is `(sum + clip_norm sigma w_t) / expected_batch_size`, `w = C^{-1} z`, of integers
    (proofs/released_numbers.md); after the mechanism's last step it is NaN.

    Args:
      mechanism: what was accounted for.
      clip_norm: the norm that gradients are clipped to.
      expected_batch_size: public; the batch size that was drawn is not.
      key: (8,) uint32; by default `init` draws one from the operating system for every run. Fix it in tests
        only: two runs with one key can be subtracted from each other.
      noise_memory: as in `TrainOptions`.

    Raises:
      ValueError: bad arguments, or "recompute" for a matrix whose inverse is not banded.
    """
    _validate.one_of("noise_memory", noise_memory, (redrawn.KEEP, redrawn.RECOMPUTE))
    expected = _validate.positive_number("expected_batch_size", expected_batch_size)
    private = Privatizer(mechanism, Grid.of(mechanism, clip_norm), expected, key, noise_memory)
    if private.redraws:
        redrawn.check(mechanism.strategy)
    return private


def copied(tree) -> Any:
    """Return a pytree with every leaf, a number perhaps, as an array of its own; steps donate their state."""

    def copy(leaf):
        if not isinstance(leaf, jax.Array):
            leaf = jnp.array(leaf, jnp.result_type(leaf))
        elif isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
            leaf = leaf.copy()
        else:  # `leaf.copy` compiles a program for every shape
            leaf = jax.device_put(leaf, may_alias=False)
        return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf

    return jax.tree.map(copy, tree)


def begun(optimizer: optax.GradientTransformation, params, opt_state=None) -> tuple[Any, Any]:
    """Return the optimizer's first state for `params`, a copy, and the shapes of the state after a step.

    An update receives the noisy gradient, the state and the parameters, and nothing else.

    Raises:
      ValueError: for an optimizer that needs more: the loss, its gradient or gradients of examples; or that
        fails for these parameters.
    """

    def is_private(node) -> bool:
        return isinstance(node, optax.contrib.DifferentiallyPrivateAggregateState)

    def update(gradient, opt_state, params):
        return optimizer.update(gradient, opt_state, params)[1]

    try:
        opt_state = copied(optimizer.init(params)) if opt_state is None else opt_state
    except Exception as error:  # whatever a transformation raises
        raise ValueError(f"optimizer must begin with the model's parameters; {_raised(error)}") from error
    if any(map(is_private, jax.tree.leaves(opt_state, is_leaf=is_private))):
        raise ValueError(
            "optimizer must not clip or add noise for privacy, as optax.contrib.dpsgd and "
            "differentially_private_aggregate do: the plan's clipping and noise come before it; give the "
            "optimizer alone"
        )
    gradient = shapes(params, dtype=jnp.float32)
    try:
        return opt_state, jax.eval_shape(update, gradient, opt_state, params)
    except Exception as error:
        raise ValueError(
            "optimizer must need a gradient like the parameters alone: no guarantee covers the loss or its "
            "gradient without noise (value, grad, value_fn, obj_fn or grad_fn of its update); "
            f"{_raised(error)}"
        ) from error


def _raised(error: Exception) -> str:
    """Return what an optimizer raised, in one line."""
    return f"it raised {type(error).__name__}: {_validate.in_one_line(error)}"


def linear_decay(base: float, steps: int) -> optax.Schedule:
    """Return the schedule from `base` to `base` / 20 over steps n/4 to 3n/4 (arXiv 2602.09338, 7.2)."""
    return optax.linear_schedule(base, base / 20, max(1, steps // 2), steps // 4)


def sgd(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Return SGD with momentum 0.95 and `linear_decay` (arXiv 2602.09338, 7.2)."""
    return optax.sgd(linear_decay(learning_rate, steps), momentum=0.95)


def adam(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Return Adam with `linear_decay`."""
    return optax.adam(linear_decay(learning_rate, steps))


OPTIMIZERS = {"sgd": sgd, "adam": adam}


class Averaged(NamedTuple):
    """State of `averaging`: post-processing of noisy gradients, without privacy cost.

    It is part of the optimizer's state, so checkpoints hold it and a resumed run keeps it.

    Attributes:
      inner: of the optimizer.
      weight: () float32: 1 - decay^steps.
      average: pytree like the parameters, float32.
    """

    inner: Any
    weight: jax.Array
    average: Any


def averaging(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer with an exponential moving average of the parameters in its state.

    The average of steps 1 to t has weights proportional to `decay^(t - s)`; initial parameters have none.
    """
    _validate.open_probability("average", decay)

    def init(params) -> Averaged:
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
        return Averaged(optimizer.init(params), jnp.zeros((), jnp.float32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = optimizer.update(updates, state.inner, params)
        weight = decay * state.weight + (1 - decay)
        share = (1 - decay) / weight
        average = jax.tree.map(
            lambda old, leaf: old + share * (leaf.astype(jnp.float32) - old),
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, Averaged(inner, weight, average)

    return optax.GradientTransformation(init, update)


def average_of(state: Averaged, params):
    """Return the average in the dtypes of the parameters; before the first step the parameters."""
    return jax.tree.map(
        lambda leaf, mean: jnp.where(state.weight > 0, mean, leaf).astype(leaf.dtype), params, state.average
    )
