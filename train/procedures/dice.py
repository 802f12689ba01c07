"""DiceSGD: clipping with error feedback, whose fixed point is the minimum (arXiv 2311.14632).

What clipping removes is kept in an error `e` and fed back, clipped, in later steps (algorithms 2 and 3): `v =
m + clip(e, C2)` plus noise is released. `e` is as private as the data and leaves neither in checkpoints
(`release`) nor in metrics; in the run folder of `fit` it is in `checkpoints/`, which is secret. The valid
accountant is `accountants.dice.dice_mu`: theorem 3.7 of the paper, which asks for less noise, is false
(proofs/dice.md).

Gradients and the clipped error are rounded towards zero onto a public grid, so no norm can grow, and added as
integers with integer noise: the release is a function of what was accounted for.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.common import validate as _validate

from ..batches.sampler import Replayed, Sampler
from ..clipping.ghost import PER_EXAMPLE, Choice
from ..clipping.grid import Grid
from ..clipping.per_example import clip_rows_to_grid, clipped_gradient_sum, global_norm
from ..clipping.sums import where_row
from ..models.loss import Loss, as_loss, numbered
from ..noise.normals import key_of_run, standard_normals
from ..run.loop import Run
from . import by_device as _by_device
from .bandmf import Rows
from .protocol import Procedure, Request, Result
from .step import PrivateStep, StepInfo, TrainState, moved
from .stored import stored

_BITS = 20  # the clip norm in grid units is 2^20
# Clip norms that the error is scaled to at most: no steps take it beyond float32's 2^127.
_MAX_RESIDUAL, _MAX_CLIP_NORM = 2.0**40, 2.0**60
_MAX_RAW = 2.0**20  # clip norms that a raw gradient is scaled to at most
_AUTOMATIC = 0.01


class DiceState(NamedTuple):
    """State between steps. **Private**: `error` and `key` are secrets.

    Attributes:
      count: () int32: steps so far.
      error: pytree like the parameters, float32: what clipping has removed from the mean and not yet fed
        back.
      key: (8,) uint32: the noise of a step is a function of it and of the count.
    """

    count: jax.Array
    error: Any
    key: jax.Array

    def __repr__(self) -> str:
        return f"DiceState(count={self.count}, private)"


@dataclass(frozen=True)
class DiceRule:
    """What a step releases, as pure functions.

    Attributes:
      clip_norm: C1, of each example's gradient.
      error_clip_norm: C2, of the error that is fed back; below C1 the method may be biased.
      noise_std: sigma_1, standard deviation on the mean; 0 trains without any privacy.
      batch_size: B, the fixed divisor: the expected batch size, never the one that was drawn.
      automatic: scale every gradient to norm C1 |g| / (|g| + 0.01) and the error likewise (algorithm 4).
      reset_every: the error is set to 0 before steps 0, R, 2 R, ...; None for never.
    """

    clip_norm: float
    error_clip_norm: float
    noise_std: float
    batch_size: int
    automatic: bool = False
    reset_every: int | None = None

    def __post_init__(self):
        c2 = _validate.positive_number("error_clip_norm", self.error_clip_norm)
        sigma = _validate.nonnegative_number("noise_std", self.noise_std)
        size = _validate.positive_integer("batch_size", self.batch_size)
        if self.reset_every is not None:
            _validate.positive_integer("reset_every", self.reset_every)
        if self.grid.clip_norm > _MAX_CLIP_NORM:
            raise ValueError(f"clip_norm must be at most {_MAX_CLIP_NORM:.4g}, got {self.clip_norm:g}")
        if max(sigma, c2) * size / self.grid.unit > 2.0**46:
            raise ValueError("noise_std and error_clip_norm must be smaller beside clip_norm: no grid fits")

    @property
    def grid(self) -> Grid:
        """Grid on which gradients are summed."""
        return Grid(_validate.positive_number("clip_norm", self.clip_norm), _BITS)

    def sums(self, gradients, mask):
        """Return (clipped in grid units, `raw`) sums over the leading axis, and norms before clipping.

        An example whose gradient is not finite counts as zero in both.
        """
        _by_device.refuse_several_devices(gradients=gradients, mask=mask)
        rows = mask.shape[0]
        with jax.enable_x64(True):
            kept, counts, norms, _ = clip_rows_to_grid(gradients, self.grid, self.automatic, counted=mask)
            raw = jax.vmap(functools.partial(self.raw, rows=rows))(gradients)
            # In float64 exact for the integers of a batch.
            total = functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.float64).sum(axis=0))
            return (total(counts), total(where_row(kept, raw))), norms

    def raw(self, tree, rows: int):
        """Return a gradient as whole numbers of `raw_unit`, float64, scaled down beyond 2^20 clip norms.

        The sum of `rows` of them is exact, in whatever order: an example whose gradient is zero does not
        change it, wherever its row moves the others (proofs/dice.md, section 2).
        """
        bounded = _scaled(tree, self.clip_norm * _MAX_RAW)
        return jax.tree.map(lambda leaf: jnp.round(leaf / self.raw_unit(rows)), bounded)

    def raw_unit(self, rows: int) -> float:
        """Return the unit in which 52 bits hold `rows` raw gradients: 2^-26 of the clip norm for 64."""
        return self.clip_norm * _MAX_RAW * 2.0 ** (math.ceil(math.log2(rows)) - 52)

    def release(self, state: "DiceState", clipped, raw, rows: int):
        """Return (`v + w`, the state after it) from the sums over a whole batch of `rows` rows."""
        with jax.enable_x64(True):
            units = self.batch_size / self.grid.unit  # a mean in grid units of the sum
            error = state.error
            if self.reset_every is not None:
                first = state.count % self.reset_every == 0
                error = jax.tree.map(lambda e: jnp.where(first, jnp.zeros_like(e), e), error)
            fed_back = _clip_to_units(error, self.error_clip_norm, units, self.automatic)
            v = jax.tree.map(jnp.add, clipped, fed_back)

            def kept(e, g, n):
                return e.astype(jnp.float64) + g * (self.raw_unit(rows) / self.batch_size) - n / units

            def noisy(n, w):
                return ((n + jnp.round(self.noise_std * units * w)) / units).astype(jnp.float32)

            released = jax.tree.map(noisy, v, _normals(state.key, state.count, v))
            error = _scaled(jax.tree.map(kept, error, raw, v), self.clip_norm * _MAX_RESIDUAL)
            after = optax.tree.cast(error, jnp.float32)
        return released, DiceState(state.count + 1, after, state.key)


def dice_aggregate(*, key=None, **rule) -> optax.GradientTransformationExtraArgs:
    """Return the first transformation of an optax chain: per-example gradients in, `v + w` out.

    `update(gradients, state, params, mask=mask)`: leaves of `gradients` have a leading axis of examples;
    `mask`, (examples,) bool, is False for padding and must be given where there may be more or fewer than
    `batch_size` of them. An example whose gradient is not finite counts as zero.

    Args:
      key: as of `train.optimizers.privatize`.
      **rule: attributes of `DiceRule`.

    Raises:
      ValueError: bad arguments, as a clip norm above 2^60; `init` without a key where JAX traces a program;
        updates without a common leading axis, or of another length than `batch_size` without a mask.
    """
    released = DiceRule(**rule)

    def update(updates, state: DiceState, params=None, *, mask=None, **_):
        count = _examples(updates, state.error, released.batch_size, mask)
        mask = jnp.ones(count, bool) if mask is None else jnp.asarray(mask, bool)
        (clipped, raw), _norms = released.sums(updates, mask)
        return released.release(state, clipped, raw, count)

    def init(params) -> DiceState:
        error = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), params)
        return DiceState(jnp.zeros((), jnp.int32), error, key_of_run(key, params))

    # optax's type of `update` has no state of its own kind.
    return optax.GradientTransformationExtraArgs(init, update)  # pyrefly: ignore[bad-argument-type]


def _examples(updates, error, size: int, mask) -> int:
    """Return the checked number of rows; static."""
    if jax.tree.structure(updates) != jax.tree.structure(error):
        raise ValueError("updates must have the structure of the parameters that the state was made for")
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(updates)}
    if len(counts) != 1 or counts == {()}:
        raise ValueError("updates must be per-example gradients with one common leading axis")
    ((count,),) = counts
    if mask is None and count != size:
        raise ValueError(f"mask must be given where updates have {count} rows and batch_size is {size}")
    if mask is not None and np.shape(mask) != (count,):
        raise ValueError(f"mask must have the shape ({count},), got {np.shape(mask)}")
    return count


def _scaled(tree, most: float):
    """Return a pytree, scaled down where its norm is beyond `most`; float64."""
    scale = jnp.minimum(1.0, most / jnp.maximum(global_norm(tree), 1e-300))
    return jax.tree.map(lambda leaf: jnp.nan_to_num(leaf.astype(jnp.float64)) * scale, tree)


def _clip_to_units(error, c2: float, units: float, automatic: bool):
    """Return `clip(e, C2)` in whole units, rounded towards zero, stored, and of norm at most C2 there."""
    norm, entries = global_norm(error), optax.tree.size(error)
    scale = c2 / (norm + _AUTOMATIC) if automatic else jnp.minimum(1.0, c2 / jnp.maximum(norm, 1e-300))
    room = (2.0**12 + entries) * 2.0**-52  # for rounding of a norm: of each square and of each addition
    factor = scale * (units * (1 - 2 * room))
    clipped = jax.tree.map(lambda e: jnp.trunc(e.astype(jnp.float64) * factor), error)
    limit, nothing = c2 * units * (1 - room), functools.partial(jax.tree.map, jnp.zeros_like)
    return stored(clipped, lambda n: global_norm(n) <= limit, nothing)


def _normals(key, step, like):
    """Return standard normals, float64, a pytree like `like`."""
    flat, unravel = jax.flatten_util.ravel_pytree(like)
    return unravel(standard_normals(key, step, flat.size))


def dice_sgd(
    learning_rate, *, momentum: float | None = None, **options
) -> optax.GradientTransformationExtraArgs:
    """Return `dice_aggregate(**options)` before SGD."""
    return optax.chain(dice_aggregate(**options), optax.sgd(learning_rate, momentum=momentum))


def dice_adam(learning_rate, *, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, **options):
    """Return `dice_aggregate(**options)` before Adam (algorithm 3), which is post-processing."""
    return optax.chain(dice_aggregate(**options), optax.adam(learning_rate, b1, b2, eps, eps_root))


def release(opt_state):
    """Return the state with every error and key set to zero: what may leave the trust boundary."""
    return _replaced(opt_state, "error", "key")


def reset_error(opt_state):
    """Return the state with every error set to zero; `dice_mu(reset_every=)` accounts for fixed times."""
    return _replaced(opt_state, "error")


def _replaced(opt_state, *names: str):
    """Return the state with these fields of every `DiceState` set to zero."""

    def zeroed(node):
        if not isinstance(node, DiceState):
            return node
        return node._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(node, name)) for name in names})

    return jax.tree.map(zeroed, opt_state, is_leaf=lambda node: isinstance(node, DiceState))


def dice_step(
    plan: DicePlan,
    loss: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    *,
    key=None,
    microbatch_size: int | None = None,
) -> PrivateStep:
    """Return a plan's `step(state, batch, mask) -> (state, private info)`; its noise is a `DiceState`."""
    rule = rule_of(plan)
    options: dict[str, Any] = dict(grid=rule.grid, normalize=rule.automatic)
    options |= dict(microbatch_size=microbatch_size or plan.max_batch_size)

    def step(state: TrainState, batch, mask, loss: Loss, specs) -> tuple[TrainState, StepInfo]:
        del specs  # of no mesh
        rows, given = mask.shape[0], (loss.at(state.noise.count), state.params, batch, mask)
        found = clipped_gradient_sum(*given, **options, also=functools.partial(rule.raw, rows=rows))
        released, dice = rule.release(state.noise, found.total.whole, found.also, rows)
        # After the plan's last step nothing more is covered.
        covered = state.noise.count < plan.iterations
        released = jax.tree.map(lambda leaf: jnp.where(covered, leaf, jnp.nan), released)
        return moved(optimizer, state, released, dice, found, mask)

    return PrivateStep(step, as_loss(loss), dice_aggregate(key=key, **asdict(rule)), optimizer)


def rule_of(plan: DicePlan) -> DiceRule:
    """Return what a certified plan releases; ValueError for another."""
    if not plan.certified:
        raise ValueError("plan must be certified; its noise does not give its epsilon at its delta")
    return DiceRule(**{each.name: getattr(plan, each.name) for each in fields(DiceRule)})


def _shuffled(plan: DicePlan, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Batches of exactly `batch_size`: a fresh order every epoch, whose incomplete last batch is dropped."""
    while True:
        order = generator.permutation(plan.dataset_size)
        for first in range(0, plan.dataset_size - plan.batch_size + 1, plan.batch_size):
            yield order[first : first + plan.batch_size]


def _train(plan: DicePlan, request: Request) -> Result:
    """Clipped error feedback: the procedure of a `DicePlan`."""
    steps, rows = request.steps(plan.iterations), request.rows(plan.dataset_size)
    if request.clip_norm not in (None, plan.clip_norm):
        raise ValueError(f"clip_norm must be the plan's {plan.clip_norm:g}, got {request.clip_norm!r}")
    loss, params = request.functional()
    sampler_key, noise_key = request.keys()
    optimizer = request.given_optimizer()
    step = dice_step(plan, loss, optimizer, key=noise_key, microbatch_size=request.options.microbatch_size)

    def source_at(key, drawn):
        if plan.sampling == "shuffling":
            return Replayed(lambda generator: _shuffled(plan, generator), key, drawn)
        return Sampler(plan.scheme, plan.dataset_size, plan.max_batch_size, key, state=drawn)

    return Run(
        plan=plan,
        request=request,
        start=lambda: step.init(params),
        step=step,
        batch=Rows(numbered(loss, rows), plan.max_batch_size),
        steps=steps,
        clip_norm=plan.clip_norm,
        sampler_key=sampler_key,
        source_at=source_at,
        clipping=Choice(PER_EXAMPLE, "the error that is fed back needs the gradients of examples"),
    ).take()


PROCEDURE = Procedure(
    _train, frozenset("optimizer clip_norm steps microbatch_size wrt loss_key average".split())
)
