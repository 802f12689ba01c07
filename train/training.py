"""`fit`: train under a plan, and refuse whatever the plan does not cover."""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import optax

from jaxacct.common import validate as _validate
from jaxacct.common.progress import is_interactive, watch
from jaxacct.kernels.programs import check_arithmetic
from jaxacct.report.run_card import read_plan

from . import arguments
from .options import TrainOptions
from .procedures import by_device as _by_device
from .procedures.protocol import AnyPlan, Request, Result, procedure_of
from .run import hosts


def fit(
    plan: AnyPlan | str | os.PathLike,
    model,
    loss,
    data,
    optimizer: optax.GradientTransformation | None = None,
    *,
    clip_norm: float | None = None,
    out=None,
    evaluate: Callable[..., dict[str, float]] | None = None,
    batches: Iterable | None = None,
    options: TrainOptions | None = None,
) -> Result:
    """Train under a plan: its batches, its noise, at most its steps, on its number of examples.

    With `out` the run is kept in a folder: the same call continues it after an interruption and reproduces
    the same bits (on a GPU only with `--xla_gpu_deterministic_ops=true`, else with noise of another key).
    Keys are stored before the first step, and the noise of a step is a function of them, so it is never drawn
    for another batch, program or data set: those are refused when a run is resumed.

    Args:
      plan: certified, or the path of its file. Its kind selects the procedure: a `jaxacct.Plan` with a
        `dataset_size` (`procedures.bandmf`), a `GeneralPlan`, which clips whole terms
        (`procedures.batch_clipping`), a `LastIteratePlan` for convex losses (`procedures.convex`), or a
        `DicePlan` with error feedback (`procedures.dice`).
      model: an `nnx.Module` or a pytree of parameters; None for a `LastIteratePlan`, which starts at 0.
      loss: `loss(model or params, example) -> scalar` of one example; for a `LastIteratePlan` a
        `procedures.convex.LogisticRegression`. It must not write to its model, and must consist of primitives
        of JAX that keep examples apart under `jax.vmap` (`train.clipping.rows_apart`). Arrays bound by
        `jax.tree_util.Partial(loss, ...)` are arguments of the step, arrays that it closes over are literals;
        both must be public, as all variables that are not trained.
      data: pytree of arrays (dataset_size, ...), in memory or mapped from files; anything with rows by index
        that keeps what `train.batches.sources.Source` promises (Grain, PyTorch, Hugging Face). All but arrays
        in memory are checked while they are read.
      optimizer: any of optax; noise is added before it. None for a `LastIteratePlan`.
      clip_norm: norm that gradients, or terms, are clipped to; 1 by default.
      out: folder of the run, see `train.run.folder`.
      evaluate: called with the parameters at checkpoints (with `out`) and at the end (for a `LastIteratePlan`
        only there); returns numbers by name, logged openly: it must use public data only.
      batches: loader of a plan of `jaxacct.FixedOrder`, from step 0: an iterable of ids, integer arrays
        (batch_size,) below the plan's dataset_size (`train.batches.given`). Each batch is checked before it
        is trained on. By default whole epochs in random order. Other plans draw their batches.
      options: everything else.

    Returns:
      The parameters, the last evaluation and the guarantee.

    Raises:
      ValueError: what the plan does not cover, bad arguments, an option that does not apply to this kind of
        plan, a folder of another run, a plan that fresh draws do not verify, or a compiler that reorders sums
        or takes NaN for a number.
      BatchOverflowError: see `train.batches.sampler`.
      BatchesError: a batch of `batches` that the plan does not cover; the run stops before it, with a
        checkpoint.
    """
    check_arithmetic()  # examples that are not finite are left out by comparisons
    if isinstance(plan, str | os.PathLike):
        plan = read_plan(plan)
    options = TrainOptions() if options is None else options
    _validate.instance("options", options, TrainOptions, "a train.TrainOptions")
    procedure = procedure_of(plan)
    arguments.check_out(out)
    arguments.check_data(data)
    hosts.check(options, batches)
    if evaluate is not None:
        arguments.check_callable("evaluate", evaluate, "evaluate(params) -> {name: number}")
    # The caller's own programs see the mesh that the caller has set, if any; others see none.
    mesh = None if jax.sharding.get_abstract_mesh().empty else options.mesh
    evaluate = None if evaluate is None else _in_numbers(evaluate, mesh)
    show = options.progress is None and is_interactive()
    if options.progress is True:
        options = replace(options, progress=None)
    request = Request(model, loss, data, optimizer, clip_norm, out, evaluate, batches, options)
    procedure.check(plan, request)
    if not plan.certified:
        raise ValueError("plan must be certified; its evidence does not support the guarantee")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_by_device.apart())
        if show:
            bar = stack.enter_context(watch())
            request = replace(request, options=replace(options, progress=bar))
        result = procedure.train(plan, request)
    params, opt_state = _by_device.axes_as_in(mesh, (result.params, result.opt_state))
    return replace(result, params=params, opt_state=opt_state)


def _in_numbers(evaluate, mesh: jax.sharding.Mesh | None):
    """Return `evaluate` with its results, JAX scalars perhaps, as floats; called within the mesh, if any."""

    def evaluated(params) -> dict[str, float]:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            found = evaluate(_by_device.axes_as_in(mesh, params))
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError("evaluate must return a dictionary of numbers") from None

    return evaluated


__all__ = ["Result", "TrainOptions", "fit"]
