"""One private training step: clipped gradient sum, noise, optimizer; jitted, its state donated.

The core takes any pytree of parameters, so linen and plain JAX users call it as it is; `nnx_loss` turns an
nnx model into that form. Over a mesh each device computes its own rows, and the sum is that of one device.
What the loss reads beside the parameters (`train.models.loss`) is an argument of the program as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.common import validate as _validate

from ..clipping.ghost import AUTO, GHOST, PER_EXAMPLE, ghost_gradient_sum, with_choice
from ..clipping.grid import GridSum
from ..clipping.per_example import clipped_gradient_sum
from ..clipping.sums import ClippedSum, Clipping
from ..models.loss import Loss, as_loss
from ..noise.normals import normals_on_host, number_of, with_next_key
from ..noise.recursion import NoiseState
from ..optimizers import Privatizer, begun, copied
from . import by_device as _by_device

# How gradients are clipped and added up -> what does it; `AUTO` stands for one of them.
CLIPPINGS: dict[str, Callable[..., ClippedSum]] = {
    PER_EXAMPLE: clipped_gradient_sum,
    GHOST: ghost_gradient_sum,
}

_MOST_AHEAD = 2**26  # parameters: their normals take half a GiB, twice, and their key stream one more
_FEWEST_AHEAD = 2**12  # which small models share one program of: it takes .8 s to compile


class TrainState(NamedTuple):
    """All that changes from step to step.

    Attributes:
      noise: `NoiseState`, or a `train.procedures.dice.DiceState`. Secret: it holds the key.
      private_individual: records of all examples, where they are followed. **Private**.
    """

    params: Any
    noise: Any
    opt_state: Any
    private_individual: Any = ()


class StepInfo(NamedTuple):
    """Private: for readers who may see the data. No guarantee covers it.

    Attributes:
      clipped_fraction: share of the examples that count whose gradient was scaled down.
      dropped: () int32: examples that count as zero, as their loss or gradient is not finite.
      max_norm: largest gradient norm of the examples that count, before clipping; NaN where none does.
    """

    loss: jax.Array
    clipped_fraction: jax.Array
    median_norm: jax.Array
    dropped: jax.Array
    max_norm: jax.Array


def info_of(found: ClippedSum, mask) -> StepInfo:
    """Return the private log of a step; `mask`, (batch,) bool: sampled examples."""
    losses, norms = found.losses, found.norms
    counted = mask & jnp.isfinite(norms) & jnp.isfinite(losses)
    sampled, number = mask.sum(), counted.sum()
    return StepInfo(
        jnp.where(mask, losses, 0).sum() / jnp.maximum(1, sampled).astype(losses.dtype),
        found.clipped_fraction,
        jnp.nanmedian(jnp.where(mask, norms, jnp.nan)),
        sampled - number,
        jnp.where(number > 0, jnp.max(norms, where=counted, initial=0.0), jnp.nan),
    )


class _Drawn(NamedTuple):
    """Normals for exactly the step whose state has this object; secret.

    Attributes:
      step: of the normals.
    """

    noise: NoiseState
    key: bytes
    step: int
    normals: jax.Array

    def __repr__(self) -> str:
        """Return that it is secret: messages of errors may show it."""
        return "_Drawn(secret)"

    @classmethod
    def of(cls, noise: NoiseState, key: bytes, step: int, size: int) -> "_Drawn":
        """Return those of a step, whose state has `noise`."""
        return cls(noise, key, step, normals_on_host(key, step, size))


class PrivateStep:
    """`step(state, batch, mask) -> (state, info)`, jitted; `state` is donated. See `make_step`.

    Args:
      function: (state, batch, mask, loss, specs) -> (state, info); specs, and perhaps normals after them, are
        those of `advance`.
      loss: of one example.
      private: whose `init` begins `TrainState.noise`.
      optimizer: of the parameters.
      mesh: of the devices that it is for.
      records: `TrainState.private_individual` of a new run.
      draws_ahead: whether normals may be drawn by `normals_on_host`, and given to `function`.
    """

    def __init__(
        self,
        function,
        loss: Loss,
        private: Any,
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh | None = None,
        records: Any = (),
        draws_ahead: bool = False,
    ):

        def checked(state: TrainState, batch, mask, loss: Loss, specs=(), *normals):
            _by_device.refuse_several_devices(mesh, state=state, batch=batch, mask=mask, loss=loss)
            return function(state, batch, mask, loss, specs, *normals)

        self._jitted = jax.jit(checked, donate_argnums=0, static_argnums=4)
        self._mesh = None if mesh is None else _by_device.automatic(mesh)
        self._records, self._draws_ahead = records, draws_ahead
        self._drawn: _Drawn | None = None
        self._before: jax.Array | None = None
        self.loss = _by_device.axes_as_in(self._mesh, loss)
        self.optimizer, self.private = optimizer, private
        self._begun = False

    def init(self, params) -> TrainState:
        """Return the state before the first step, a copy, with the dtypes that every later one has.

        An optimizer may begin in the parameters' dtype and go on in its updates' (momentum of bfloat16
        parameters does); a state that was restored into the first would be rounded.

        Raises:
          ValueError: for an optimizer whose state never settles, or that needs more than the noisy gradient.
        """
        with _by_device.apart():
            return self._first_state(copied(_by_device.axes_as_in(self._mesh, params)))

    def _first_state(self, params) -> TrainState:
        """Return the state that begins with these arrays, which are its own."""
        opt_state, after = begun(self.optimizer, params)
        for _ in range(3):
            before = [jnp.result_type(leaf) for leaf in jax.tree.leaves(opt_state)]
            if before == [leaf.dtype for leaf in jax.tree.leaves(after)]:
                noise = self.private.init(params)  # its own: a copy would be in memory beside it
                return TrainState(params, noise, opt_state, copied(self._records))
            opt_state = jax.tree.map(lambda leaf, to: jnp.asarray(leaf, to.dtype), opt_state, after)
            _, after = begun(self.optimizer, params, opt_state)
        raise ValueError("optimizer must keep the dtypes of its state from step to step")

    def __call__(
        self, state: TrainState, batch, mask, digest: str | None = None
    ) -> tuple[TrainState, StepInfo]:
        """Return the state after the step, and its private log.

        With `digest`, a text that determines this batch and all before it, the noise is drawn with a new key,
        a function of the state's and of the text: no two batches have the same noise.
        """
        with _by_device.apart():
            state, batch, mask = _by_device.axes_as_in(self._mesh, (state, batch, mask))
            after, info = self._after(state, batch, mask, digest)
        if not self._begun:
            # A loss or an optimizer that names several devices has left the step to the compiler.
            _by_device.refuse_several_devices(self._mesh, state=after)
            self._begun = True
        return after, info

    def _after(self, state: TrainState, batch, mask, digest: str | None) -> tuple[TrainState, StepInfo]:
        """Return what `__call__` does, of arrays over automatic axes."""
        if not self._begun:
            state = _bound_together(state, self.loss, self._mesh)
        specs = _by_device.specs_of(self._mesh, state)
        if digest is not None:
            if self.private.redraws:
                raise ValueError("noise_memory must be 'keep' with batches: each has a noise key of its own")
            state = with_next_key(state, digest)
        drawn = self._drawn_for(state.noise)
        if drawn is None:
            return self._jitted(state, batch, mask, self.loss, specs)
        before, self._before = self._before, None
        if before is not None:
            before.block_until_ready()  # normals of two steps are in memory, not of all that are dispatched
        state, info = self._jitted(state, batch, mask, self.loss, specs, drawn.normals)
        # In a program around it even of a known state, nothing is kept.
        if digest is None and not isinstance(info.loss, jax.core.Tracer):
            after = _Drawn.of(state.noise, drawn.key, drawn.step + 1, drawn.normals.size)
            self._drawn, self._before = after, info.loss
        return state, info

    def _drawn_for(self, noise) -> "_Drawn | None":
        """Return the normals of the step of `noise`; None where the step's own program is to draw them.

        On a CPU they are drawn before the step before is done: on another core, if there is one. All steps of
        as many parameters share the program.
        """
        drawn = self._drawn  # read once: another thread may take steps of its own with this object
        if drawn is None or drawn.noise is not noise:
            self._drawn = None
            # An array is traced, too, where the state is a constant of another program.
            leaves = [*jax.tree.leaves(noise), jnp.zeros(())]
            if not self._draws_ahead or jax.default_backend() != "cpu":
                return None
            if any(isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array) for leaf in leaves):
                return None
            number = number_of([leaf.shape[1:] for leaf in jax.tree.leaves(noise.recent)])
            size = max(number, _FEWEST_AHEAD)
            if size > _MOST_AHEAD:
                return None
            key = np.asarray(noise.key, "<u4").tobytes()
            self._drawn = drawn = _Drawn.of(noise, key, int(noise.step), size)
        return drawn

    def trace(self, state: TrainState, batch, mask) -> jax.stages.Traced:
        """Return the step as a program."""
        specs = _by_device.specs_of(self._mesh, state)
        drawn = self._drawn_for(state.noise)
        normals = () if drawn is None else (drawn.normals,)
        with _by_device.apart():
            given = _by_device.axes_as_in(self._mesh, (state, batch, mask))
            return self._jitted.trace(*given, self.loss, specs, *normals)


def _bound_together(state, loss: Loss, mesh: jax.sharding.Mesh | None):
    """Return the state bound to the mesh, or the one device of any of its arrays, or of the loss.

    All outputs of a step are bound then: a different input state would compile a second program.
    """
    leaves = jax.tree.leaves((state, loss))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return state  # of a program around it
    if mesh is not None:
        return _by_device.over(mesh, _by_device.specs_of(mesh, state), state)
    bound = {leaf.sharding for leaf in leaves if getattr(leaf, "committed", False)}
    one = len(bound) == 1 and isinstance(next(iter(bound)), jax.sharding.SingleDeviceSharding)
    return jax.device_put(state, bound.pop()) if one else state


def make_step(
    loss: Callable[..., jax.Array],
    private: Privatizer,
    optimizer: optax.GradientTransformation,
    *,
    clipping: str = AUTO,
    mesh: jax.sharding.Mesh | None = None,
    admit: Callable[..., Any] | None = None,
    records: Any = (),
    **options,
) -> PrivateStep:
    """Return a private step: gradients clipped to the clip norm of `private`, its noise, then the optimizer.

        step = make_step(loss, privatize(mechanism, clip_norm=1.0, expected_batch_size=64), optax.adam(1e-3))
        state = step.init(params)
        state, info = step(state, batch, mask)

    A loop that continues from a saved state must not release a step twice where its sums may have other last
    bits, as on a GPU: both would have one noise (proofs/released_numbers.md, section 6).

    Args:
      loss: `loss(params, example) -> scalar` of one example. What a `jax.tree_util.Partial` binds, or a
        `train.models.loss.Loss` as `nnx_loss` returns it holds, is frozen; one with a key takes batches of
        `train.models.loss.Numbered`, and is refused for add-or-remove-one adjacency.
      private: from `train.optimizers.privatize`.
      optimizer: any; what it does is post-processing.
      clipping: "auto", "ghost" or "per_example", as in `TrainOptions`.
      mesh: as in `train.clipping.sums.Clipping`.
      admit: as of `train.clipping.per_example.clipped_gradient_sum`; then `mask` says who was sampled.
      records: for `admit`, before the first step.
      **options: others of `Clipping`: microbatch_size, normalize and skip_padding.
    """
    _validate.one_of("clipping", clipping, (AUTO, *CLIPPINGS))
    if not isinstance(private, Privatizer):
        raise ValueError(
            "private must come from train.optimizers.privatize, which says clip norm and noise once, got "
            f"{type(private).__name__}"
        )
    loss = as_loss(loss)
    if loss.key is not None and private.mechanism.is_add_or_remove:
        raise ValueError(
            f"loss_key must not be given with {private.mechanism.adjacency} adjacency: keys follow the index "
            "of an example, and without one example all later ones have another index"
        )

    shared: dict[str, Any] = dict(grid=private.grid, mesh=mesh, **options)
    Clipping(**shared)  # checks the options

    def step(state: TrainState, batch, mask, loss: Loss, specs, normals=None):
        kind, given = clipping, (loss.at(state.noise.step), state.params, batch)
        if clipping == AUTO:
            (kind, _), checked = with_choice(*given, **shared)
            given = (checked, *given[1:])
        of_params = specs[: len(jax.tree.leaves(state.params))]
        followed = {} if admit is None else dict(admit=admit, records=state.private_individual)
        found = CLIPPINGS[kind](*given, mask, **shared, specs=of_params, **followed)
        return advance(private, optimizer, state, found, mask, mesh, specs, normals)

    ahead = mesh is None and not private.redraws
    return PrivateStep(step, loss, private, optimizer, mesh, records=records, draws_ahead=ahead)


def advance(
    private: Privatizer,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    found: ClippedSum,
    mask,
    mesh: jax.sharding.Mesh | None = None,
    specs: tuple[jax.sharding.PartitionSpec, ...] = (),
    normals=None,
) -> tuple[TrainState, StepInfo]:
    """Return the state after noise on the sum and the optimizer update, and the private log.

    Args:
      private: clipping and noise.
      optimizer: of the parameters.
      state: before the step.
      found: clipped sum.
      mask: (batch,) bool, sampled examples.
      mesh: devices.
      specs: sharding of each array of the state over the mesh.
      normals: of this step, where another program drew them.
    """
    chex.assert_trees_all_equal_shapes(found.total.whole, state.params)
    chex.assert_equal_shape([found.losses, found.norms, mask])
    if mesh is None:
        gradient, noise = private.update(found.total, state.noise, normals=normals)
    else:
        of_params = specs[: len(jax.tree.leaves(state.params))]
        gradient, noise = _noisy_by_device(private, found.total, state.noise, mesh, of_params)
    chex.assert_type(jax.tree.leaves(gradient), jnp.float32)
    after, info = moved(optimizer, state, gradient, noise, found, mask)
    return _by_device.over(mesh, specs, after, jax.lax.with_sharding_constraint), info


def moved(optimizer, state: TrainState, released, noise, found: ClippedSum, mask):
    """Return the state after the optimizer's update by what is `released`, and the private log."""
    updates, opt_state = optimizer.update(released, state.opt_state, state.params)
    after = TrainState(optax.apply_updates(state.params, updates), noise, opt_state, found.records)
    return after, info_of(found, mask)


def _noisy_by_device(private: Privatizer, total, noise: NoiseState, mesh, specs):
    """Return `private.update`, each device of a mesh for its own parts of the parameters."""
    mesh = _by_device.automatic(mesh)
    x64, whole = jax.config.read("jax_enable_x64"), jax.sharding.PartitionSpec()
    shapes = [leaf.shape for leaf in jax.tree.leaves(total.whole)]
    # Arrays without numbers stay outside of `jax.shard_map`: jaxlib 0.11.2 crashes (proofs/errata.md).
    is_empty, empty = not any(leaf.size for leaf in jax.tree.leaves(noise.recent)), noise.recent

    def update(total, noise):
        with jax.enable_x64(x64):
            cuts = [_by_device.own_cut(*each, mesh) for each in zip(shapes, specs, strict=True)]
            if is_empty:
                none = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), jnp.int32), total.whole)
                noise = noise._replace(recent=none)
            gradient, after = private.update(total, noise, cuts=cuts)
            return gradient, after._replace(recent=()) if is_empty else after

    params = jax.tree.unflatten(jax.tree.structure(total.whole), specs)
    of_total = GridSum(params, whole, total.grid)
    kept = [jax.sharding.PartitionSpec(None, *spec) for spec in specs]
    recent: Any = () if is_empty else jax.tree.unflatten(jax.tree.structure(noise.recent), kept)
    of_noise = jax.tree.map(lambda _: whole, noise)._replace(recent=recent)
    noise = noise._replace(recent=()) if is_empty else noise
    with jax.enable_x64(True):
        options: dict[str, Any] = dict(in_specs=(of_total, of_noise), out_specs=(params, of_noise))
        gradient, after = jax.shard_map(update, mesh=mesh, check_vma=False, **options)(total, noise)
    return gradient, after._replace(recent=empty) if is_empty else after
