"""Run a plan: real batches, private steps, checkpoints; and refuse whatever the plan does not cover."""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
import optax
from flax import nnx

from jaxacct.common import validate as _validate
from jaxacct.common.progress import somebody_watches, watch
from jaxacct.core.plan import Plan

from . import by_device as _by_device
from . import machine, run_folder
from .batches import fingerprints, sampler
from .batches import prefetch as prefetching
from .batches.attribution import Attribution, check_graph, expected_batch_sizes
from .batches.sampler import Sampler, SamplerState, batch_sizes
from .batches.sources import ArrayRows, as_rows
from .clipping import ghost, microbatch
from .clipping.groups import ClipGroups, partition
from .clipping.per_example import default_microbatch_size
from .individual import IndividualAccounting, PrivateLosses, follow
from .loss import Loss, as_loss, nnx_loss, numbered, public_key
from .noise import recursion as noise
from .optimizers import privatize
from .plans import read_plan
from .run_folder import RunFolder
from .step import PER_EXAMPLE, clipping_of, make_step

_LOG_EVERY = 10


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
      params: pytree like the parameters that were given; of an nnx model, its `nnx.Param` state.
      steps: how many were run.
      evaluation: what `evaluate` returned at the end.
      statement: the guarantee, in a sentence.
      private_individual: what every example has spent, with `individual`. **Private**: not covered.
    """

    params: Any
    steps: int
    evaluation: dict[str, float]
    statement: str
    private_individual: PrivateLosses | None = dataclasses.field(default=None, repr=False)


class TrainingPlan(Protocol):
    """What `fit` asks of a plan, whatever it proves."""

    @property
    def training(self) -> str:
        """Which of `PROCEDURES` realises it."""
        ...

    @property
    def certified(self) -> bool:
        """Whether the promise holds, computed again."""
        ...

    @property
    def iterations(self) -> int:
        """Steps that it covers."""
        ...

    def statement(self) -> str:
        """The promise in a sentence, with the adversary it is against."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What a run is to be beside its plan, and where it is kept: the arguments of `fit`, which see."""

    model: Any
    loss: Any
    data: Any
    optimizer: optax.GradientTransformation | None = None
    clip_norm: float | None = None
    clip: str | None = None
    inner: optax.GradientTransformation | None = None
    steps: int | None = None
    microbatch_size: int | str | None = None
    normalize: bool = False
    mesh: jax.sharding.Mesh | None = None
    graph: Attribution | None = None
    out: Any = None
    evaluate: Callable[[Any], dict[str, float]] | None = None
    checkpoint_every: int = 100
    progress: Callable[[str, int, float], None] | None = None
    keys: tuple | None = None
    verify: bool = True
    individual: IndividualAccounting | None = None
    wrt: Any = None
    loss_key: Any = None
    skip_padding: bool | None = None
    has_aux: bool = False
    prefetch: int = 2
    clipping: str | None = None
    callback: Callable[[int, dict[str, float | None]], Any] | None = None
    elastic: bool = False
    clip_groups: Any = None

    def kept(self) -> dict[str, Any]:
        """What `run_and_keep` is told about keeping the run."""
        names = "out", "checkpoint_every", "evaluate", "progress", "prefetch", "callback", "elastic"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Procedure:
    """How plans of one kind are realised.

    Attributes:
      train: (plan, wanted) -> `Result`; refuses whatever the plan does not cover.
      honours: which optional fields of `Wanted` it does something with. Others are refused where they are
        given: what would be ignored might be what a guarantee is thought to rest on.
    """

    train: Callable[[Any, Wanted], Result]
    honours: frozenset[str]


# The `training` of a plan -> the module whose PROCEDURE realises it, loaded for the first such plan.
PROCEDURES = {
    "correlated-noise": "loop",
    "general-dpsgd": "batch_clipping",
    "last-iterate": "convex",
    "dice": "dice",
}
_KEEPING = {"out", "evaluate", "checkpoint_every", "progress", "keys", "verify"}
_KEEPING |= {"prefetch", "callback", "elastic"}


def procedure_of(plan: TrainingPlan) -> Procedure:
    """What realises a plan; ValueError for something else."""
    name = getattr(plan, "training", None)
    if name not in PROCEDURES:
        raise ValueError(f"plan must be a plan of {', '.join(PROCEDURES)}, was {type(plan).__name__}")
    return importlib.import_module(f".{PROCEDURES[name]}", __package__).PROCEDURE


def fit(
    plan: TrainingPlan | str | os.PathLike,
    model,
    loss,
    data,
    optimizer: optax.GradientTransformation | None = None,
    *,
    clip_norm: float | None = None,
    clip: str | None = None,
    inner: optax.GradientTransformation | None = None,
    out=None,
    steps: int | None = None,
    microbatch_size: int | str | None = None,
    normalize: bool = False,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    checkpoint_every: int = 100,
    mesh: jax.sharding.Mesh | None = None,
    progress: Callable[[str, int, float], None] | bool | None = None,
    keys: tuple | None = None,
    graph: Attribution | None = None,
    verify: bool = True,
    individual: IndividualAccounting | None = None,
    wrt=None,
    loss_key=None,
    skip_padding: bool | None = None,
    has_aux: bool = False,
    prefetch: int = 2,
    clipping: str = PER_EXAMPLE,
    callback: Callable[[int, dict[str, float | None]], Any] | None = None,
    elastic: bool = False,
    clip_groups: str | Sequence[Any] | ClipGroups | None = None,
) -> Result:
    """Train under a plan: its sampler, its noise, at most its steps, on as many examples.

    With `out`, everything is kept there; the same call goes on after an interruption and ends with the same
    bits. The keys are stored before the first step, and a step's noise is a function of them, so it is never
    drawn for another batch, program or data set: those are refused on resuming.

    Args:
      plan: certified, or the path of its file. What it is decides what trains (`PROCEDURES`): a
        `jaxacct.Plan` with a `dataset_size`; a `GeneralPlan`, whose rounds clip whole terms
        (`train.batch_clipping`); a `LastIteratePlan`, whose loss is convex by construction and of which no
        iterate but the last is shown (`train.convex`); a `DicePlan`, whose steps feed back what clipping cut
        off (`train.dice`).
      model: an `nnx.Module`, or a pytree of parameters; None for a `LastIteratePlan`, which starts at 0.
      loss: `loss(model or params, example) -> scalar` of one example, with `loss_key` of (model or params,
        example, key); a `train.convex.LogisticRegression` for a `LastIteratePlan`. It must not write to its
        model, and must be made of primitives of JAX that keep examples apart under `jax.vmap`
        (`train.clipping.rows_apart`): no callbacks, `custom_vmap` rules or keys of another kind than
        threefry's.
        Arrays that it reads are arguments of the step where they are bound by
        `jax.tree_util.Partial(loss, ...)`, literals of its program where it closes over them. They must be
        public, as all of a model that is not trained must be: made without the private data.
      data: pytree of arrays (dataset_size, ...), in memory or mapped from files; or anything with rows
      by
        their place that keeps what `train.batches.sources.Source` promises (of Grain, PyTorch, Hugging
        Face); a
        `pyarrow.Table`; or an object with `__len__`, `take(indices, size)`, which returns rows padded to
        `size`, and `fingerprint()`, a text that changes with the content. All but arrays are checked while
        they are read (`train.batches.sources.SourceRows`).
      optimizer: any of optax, with any schedule of steps; the noise is added before it. None for a
        `LastIteratePlan`, which is gradient descent.
      clip_norm: norm that gradients, or terms, are clipped to; 1 by default.
      clip: "individual", "batch" or "mixed", where it is given to be checked against the plan.
      inner: for a `GeneralPlan`, what goes through the records of each term, beginning anew in each; the mean
        gradient by default.
      out: folder of the run.
      steps: by default all of the
      plan's.
      microbatch_size: examples, or terms, whose gradients are in memory at a time; by default what the number
        of parameters suggests (`train.clipping.per_example.default_microbatch_size`). For a `jaxacct.Plan`
        "auto" takes
        the fastest on this machine, measured before the run begins and kept with it.
      normalize: automatic clipping.
      evaluate: called with the parameters at checkpoints (of a folder `out`) and at the end (for a
        `LastIteratePlan` at the end only); must use public data only, as its result is logged openly. Numbers
        by name.
      checkpoint_every: steps between checkpoints.
      mesh: devices that compute equally many rows of a batch each, `microbatch_size` at a time. Parameters
        stay as they are sharded between steps; each device holds all of them while it computes gradients.
      progress: called with ("training", steps done, steps in all); by default a bar on a terminal and in a
        notebook; False for nothing.
      keys: (sampler key, noise key); from the operating system by default. Only tests should fix them.
      graph: of users and examples, for an attribution plan; its `rows` say which rows of `data` the
        plan's examples are.
      verify: draw a Monte Carlo plan's evidence anew before the first step, with fresh randomness: seconds,
        or as long as certifying took. Not needed by who has just certified it. A run in a folder is verified
        once, at the first call that asks for it.
      individual: track every example's own privacy loss, and filter if it says so: for plans of Poisson
        batches (full ones, with sampling probability 1) and independent noise. Every example's gradient is
        computed at every step, and all data is on the device. See `train.individual`.
      wrt: an nnx filter of the variables to train, `nnx.Param` by default (`nnx.LoRAParam`, say). All others
        are frozen: no noise, no part in the clip norm, no copy in checkpoints or in the model that is kept
        (`load_model` puts what was trained into a model that has them). A run is bound to their values.
      loss_key: a number or a `jax.random` key, public: the loss is given a key that is a function of it, of
        the step and of the example's place in `data`, for dropout or augmentation; a model's own streams are
        seeded from it too. A resumed run draws the same. It has nothing to do with `keys`, which are secret.
      skip_padding: do no work for what a batch is padded with. Who can time the steps then sees how many
        examples are in each, which no guarantee covers. By default so, but where batches are cut to a size
        (their pair does not hold if sizes are known), over a `mesh`, and with `individual`.
      has_aux: the loss returns (scalar, dictionary of scalars); their means are logged
      privately.
      prefetch: batches that a thread reads ahead while the device works; 0 for none, where `data` must be
        read by the thread that calls. What is trained is the same.
      clipping: "ghost" for `train.clipping.ghost`, much faster where parameters are many and examples
      short, and with
        gradients scaled to a little less than `clip_norm`; for a `jaxacct.Plan` without `individual`.
      callback: called with (step, metrics) for every step, some steps late: loss, clipped fraction, norms,
        `aux.` and names. **Private**, as `private/metrics.jsonl`, which has the same: covered by no
        guarantee, for the eyes of whoever may see the data. See `train.metrics` for TensorBoard. A run that
        goes on says steps since its checkpoint again.
      elastic: go on in `out` on other devices, another number of them, another processor, or with
      other
        compiler flags or versions of packages, with a warning: what is trained is then no longer the same to
        the bit. Refused by default.
      clip_groups: clip the gradient of each group of parameters to a norm of its own, at most `clip_norm` all
        together: "layer", or nnx filters, one a group (`train.clipping.groups.ClipGroups`, also for norms
        that are
        not equal). Same noise, same guarantee. For a `jaxacct.Plan` without `individual`.

    Raises:
      ValueError: what the plan does not cover, bad arguments, an option that means nothing to this kind of
        plan, or a folder of another run; a plan that fresh draws do not verify.
      BatchOverflowError: see `train.batches.sampler`.
    """
    if isinstance(plan, str | os.PathLike):
        plan = read_plan(plan)
    procedure = procedure_of(plan)
    wanted = Wanted(
        model=model,
        loss=loss,
        data=data,
        optimizer=optimizer,
        clip_norm=clip_norm,
        clip=clip,
        inner=inner,
        steps=steps,
        microbatch_size=microbatch_size,
        normalize=normalize,
        mesh=mesh,
        graph=graph,
        out=out,
        evaluate=None if evaluate is None else _in_numbers(evaluate),
        checkpoint_every=checkpoint_every,
        progress=None if isinstance(progress, bool) else progress,
        keys=keys,
        verify=verify,
        individual=individual,
        wrt=wrt,
        loss_key=loss_key,
        skip_padding=skip_padding,
        has_aux=has_aux,
        prefetch=_validate.positive_integer("prefetch", prefetch, minimum=0),
        clipping=None if clipping == PER_EXAMPLE else clipping,
        callback=callback,
        elastic=elastic,
        clip_groups=clip_groups,
    )
    _validate.positive_integer("checkpoint_every", checkpoint_every)
    clipping_of(clipping)
    for field in dataclasses.fields(Wanted):
        optional = field.default is not dataclasses.MISSING and field.name not in _KEEPING
        if (
            optional
            and field.name not in procedure.honours
            and getattr(wanted, field.name) is not field.default
        ):
            raise ValueError(f"{field.name} must not be given for a plan of {plan.training}")
    if progress is None and somebody_watches():
        with watch(unit="steps") as bar:
            return procedure.train(plan, dataclasses.replace(wanted, progress=bar))
    return procedure.train(plan, wanted)


def _in_numbers(evaluate):
    """`evaluate` with what it returns, JAX scalars perhaps, as floats."""

    def evaluated(params) -> dict[str, float]:
        found = evaluate(params)
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError("evaluate must return a dictionary of numbers") from None

    return evaluated


def given_optimizer(wanted: Wanted) -> optax.GradientTransformation:
    """The optimizer, where there must be one."""
    given = wanted.optimizer
    if given is None:
        raise ValueError("optimizer must be given")
    if isinstance(given, nnx.Optimizer) or not (hasattr(given, "init") and hasattr(given, "update")):
        hint = ": give the transformation that it was made of" if isinstance(given, nnx.Optimizer) else ""
        raise ValueError(f"optimizer must be an optax transformation, was {type(given).__name__}{hint}")
    return given


def given_microbatch_size(wanted: Wanted) -> int | None:
    """How many gradients at a time, where nothing is measured."""
    size = wanted.microbatch_size
    return None if size is None else _validate.positive_integer("microbatch_size", size)


def _train(plan: Plan, wanted: Wanted) -> Result:
    """Correlated noise on per-example clipped gradients: the procedure of a `jaxacct.Plan`."""
    mechanism, mesh, graph = plan.mechanism, wanted.mesh, wanted.graph
    if wanted.clip not in (None, "individual"):
        raise ValueError(f"clip must be 'individual' for this plan, was {wanted.clip!r}")
    steps = wanted.steps
    steps = mechanism.scheme.iterations if steps is None else _validate.positive_integer("steps", steps)
    _, expected, largest = batch_sizes(plan)
    rows = _check(plan, wanted.data, steps, graph)
    if graph is not None:
        expected = float(expected_batch_sizes(graph, mechanism.scheme).mean())
    clip_norm = _validate.positive_number("clip_norm", 1.0 if wanted.clip_norm is None else wanted.clip_norm)
    loss, params = functional(wanted)
    rows = numbered(loss, rows)
    if mesh is not None:
        # Axes left to the compiler: a model written for one device then runs as it is.
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
        loss, params = jax.tree.map(lambda leaf: _on(mesh, leaf), (loss, params))
    sampler_key, noise_key = wanted.keys or (sampler.fresh_key(), noise.fresh_key())
    private = privatize(mechanism, clip_norm=clip_norm, expected_batch_size=expected, key=noise_key)
    optimizer, lasting = given_optimizer(wanted), _lasting(plan)
    groups = described = None
    if wanted.clip_groups is not None:
        groups, described = partition(params, wanted.clip_groups, clip_norm, wanted.model)
        groups.limits(private.grid)
    if wanted.individual is None:
        size = largest if mesh is None else _round_up(largest, mesh.size)
        batch = Rows(rows, size, mesh)
        options = dict(normalize=wanted.normalize, has_aux=wanted.has_aux)
        options |= dict(skip_padding=_skips_padding(plan, wanted), clipping=wanted.clipping or PER_EXAMPLE)
        options |= dict(groups=groups, mesh=mesh)

        def make(micro):
            return make_step(loss, private, optimizer, microbatch_size=micro, **options)

        nobody = batch.take(np.zeros(0, np.int64))

        def by_default() -> int:
            if wanted.clipping is None:
                return default_microbatch_size(params)
            return ghost.default_microbatch_size(loss, params, nobody[0], wanted.has_aux)

        if wanted.microbatch_size == microbatch.AUTO:
            micro = microbatch.stored(wanted.out)
            micro = micro or microbatch.fastest(make, params, nobody[0], nobody[1], by_default())
        else:
            micro = given_microbatch_size(wanted) or min(by_default(), size)
        parts: dict[str, Any] = dict(
            step=make(micro),
            batch=batch,
            microbatch_size=micro,
            source_at=lambda key, drawn: Sampler.from_plan(plan, key, graph, drawn),
            statement=plan.statement(),
        )
    else:
        if mesh is not None:
            raise ValueError("mesh must not be given with individual: its records are on one device")
        if wanted.clipping is not None:
            raise ValueError("clipping must be 'per_example' with individual, which counts what each gives")
        if groups is not None:
            raise ValueError("clip_groups must not be given with individual, which follows one clip norm")
        if wanted.skip_padding:
            raise ValueError("skip_padding must not be given with individual: every example is charged")
        micro = given_microbatch_size(wanted) or largest
        options: dict[str, Any] = dict(microbatch_size=micro, normalize=wanted.normalize)
        options["has_aux"] = wanted.has_aux
        parts = follow(wanted.individual, plan, rows, loss, private, optimizer, **options)._asdict()
        lasting |= {"individual": repr(wanted.individual)}  # all of its fields but `continues`
    return run_and_keep(
        state=parts["step"].init(params),
        steps=steps,
        plan=lasting,
        clip_norm=clip_norm,
        clipping=wanted.clipping or PER_EXAMPLE,
        clip_groups=described,
        sampler_key=sampler_key,
        frozen=loss.digests,
        before_first=(lambda: _verify_anew(plan, wanted.progress)) if wanted.verify else None,
        **parts,
        **wanted.kept(),
    )


def _skips_padding(plan: Plan, wanted: Wanted) -> bool:
    """Whether steps take as long as their batches are large.

    Raises:
      ValueError: where that is asked for and must not be.
    """
    cut = plan.truncation_delta is not None or plan.mechanism.scheme.batch_size_cap is not None
    if wanted.skip_padding and cut:
        raise ValueError(
            "skip_padding must not be True for a plan that cuts batches: its guarantee does not hold for who "
            "knows their sizes, which run times would tell"
        )
    if wanted.skip_padding and wanted.mesh is not None:
        raise ValueError("skip_padding must not be True with mesh: most devices would have nothing to do")
    return not cut and wanted.mesh is None if wanted.skip_padding is None else wanted.skip_padding


def functional(wanted: Wanted):
    """`(Loss, params)`, the parameters copied: the state is donated, theirs stays theirs.

    Frozen arrays are not donated and not copied.
    """
    key = public_key(wanted.loss_key)
    if isinstance(wanted.loss, Loss) and key is not None:
        raise ValueError("loss_key must not be given with a train.loss.Loss, which has its own")
    if isinstance(wanted.model, nnx.Module):
        wrt = nnx.Param if wanted.wrt is None else wanted.wrt
        loss, params = nnx_loss(wanted.model, wanted.loss, wrt, key)
    else:
        if wanted.wrt is not None:
            raise ValueError(
                "wrt must not be given for a pytree of parameters: bind what is frozen to the loss by "
                "jax.tree_util.Partial(loss, frozen), which calls loss(frozen, params, example)"
            )
        loss, params = as_loss(wanted.loss, key), wanted.model
    loss = jax.tree.map(jax.numpy.asarray, loss)
    return loss, jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), params)


PROCEDURE = Procedure(
    _train,
    frozenset(
        "optimizer clip_norm clip steps microbatch_size normalize mesh graph individual wrt loss_key "
        "skip_padding has_aux clipping clip_groups".split()
    ),
)


class Step(Protocol):
    """What `run_and_keep` repeats, as `train.step.PrivateStep`."""

    def __call__(self, state, batch, mask) -> tuple[Any, Any]:
        """`(state, private info)`; a state is a pytree with `params`."""
        ...

    def trace(self, state, batch, mask) -> jax.stages.Traced:
        """Return the step as a program."""
        ...


def run_and_keep(
    step: Step,
    state: Any,
    batch,
    steps: int,
    *,
    plan: dict,
    clip_norm: float,
    sampler_key,
    source_at: Callable[[Any, SamplerState | None], Any],
    statement: str,
    frozen: Callable[[], dict[str, str]],
    before_first: Callable[[], None] | None,
    out,
    checkpoint_every: int,
    evaluate: Callable[[Any], dict[str, float]] | None,
    progress: Callable[[str, int, float], None] | None,
    prefetch: int = 0,
    callback: Callable[[int, dict[str, float | None]], Any] | None = None,
    elastic: bool = False,
    released: Callable[[Any], Any] = lambda params: params,
    only_last: bool = False,
    report: Callable[[Any, int], PrivateLosses] | None = None,
    bound: dict[str, str] | None = None,
    microbatch_size: int | None = None,
    clipping: str | None = None,
    clip_groups: list[dict[str, Any]] | None = None,
) -> Result:
    """All steps of a private run, kept in the folder `out` where there is one; see `fit`.

    Args:
      batch: `take(indices)` gives what `step` takes of these examples; `rows` with a `fingerprint()`.
      plan: JSON values that no run may change and go on.
      frozen: gives digests, by name, of what the loss reads beside the parameters; nor may these change.
      source_at: (key, what it had drawn or None) -> the batches, with `next()` and `state`.
      before_first: called before the first step of this call, once in a run with a folder.
      released: what is shown of the last parameters.
      only_last: whether parameters on the way must be shown to nobody, `evaluate` included; they are in
        checkpoints, which are secret anyway.
      report: (the last state, steps) -> what every example has spent.
      bound: texts that no run may change and go on, private: only keyed digests of them are kept.
      microbatch_size: of the step, to be found again.
      clipping, clip_groups: of the step, to be told from another.
    """
    described = {
        "plan": _digest(json.dumps(plan, sort_keys=True).encode()),
        "clip_norm": clip_norm,
        "steps": steps,
        **({} if clipping is None else {"clipping": clipping, "clip_groups": clip_groups}),
        "program": fingerprints.of_program(step.trace(state, *batch.take(np.zeros(0, np.int64)))),
        "microbatch_size": microbatch_size,
        "versions": _versions(),
        **machine.describe(1 if (mesh := getattr(batch, "mesh", None)) is None else mesh.size),
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(out)) if out is not None else None
        drawn = None
        if folder:
            # A run that has begun goes on with the key it began with.
            described |= {"frozen": frozen(), "generator": run_folder.generator()}
            private = {"data": batch.rows.fingerprint()} | (bound or {})
            sampler_key = folder.begin(described, sampler_key, private, elastic)
            state, drawn = folder.restore(state) or (state, None)
            if drawn is not None and drawn.key != tuple(sampler_key):
                raise ValueError(f"out {out} holds checkpoints of another run than its secret.json")
        source = source_at(sampler_key, drawn)
        if folder:
            folder.went_on(source.state.step)
        if folder and drawn is None:
            folder.save(state, source.state)
        # A run that began unverified is verified where a later call asks for it.
        if before_first and not (folder and folder.verified):
            before_first()
            if folder:
                folder.note(verified=True)
        seen = None if only_last else evaluate
        if folder and seen and 0 < source.state.step < steps and not folder.has_logged(source.state.step):
            # It ended between the checkpoint and its evaluation.
            folder.log({"step": source.state.step, "evaluation": _finite(seen(state.params))})
        coming = prefetching.batches(source, batch, source.state.step, steps)
        with prefetching.ahead(coming, prefetch) as ready:
            state = _run(step, state, ready, steps, folder, checkpoint_every, seen, progress, callback)
        params = released(state.params)
        evaluation = evaluate(params) if evaluate else {}
        losses = None if report is None else report(state, steps)
        result = Result(params, steps, evaluation, statement, losses)
        if folder:
            folder.save_model(params)
            folder.finish({"steps": steps, "evaluation": _finite(evaluation), "guarantee": result.statement})
        return result


def _verify_anew(plan: Plan, progress) -> None:
    """Refuse a plan that fresh draws do not verify: stored counts show nothing of how they were come by."""
    if not plan.is_sampled:
        return  # computed again by `certified`
    most = max(2_000_000, 8 * plan.evidence.num_samples)
    verdict = plan.verify(rule="anytime", max_samples=most, progress=progress)
    if not verdict.certified:
        raise ValueError(f"plan could not be verified with fresh randomness: {verdict.flaws[0]}")


def _run(step, state, ready, steps, folder, checkpoint_every, evaluate, progress, callback) -> Any:
    waiting = []
    for rows, mask, drawn in ready:
        state, info = step(state, rows, mask)
        done = drawn.step
        if folder or callback:
            waiting.append((done, info))
        if waiting and (done % _LOG_EVERY == 0 or done % checkpoint_every == 0 or done == steps):
            found = [(at, _floats(seen)) for at, seen in waiting]
            waiting = []
            if folder:
                folder.log_private([{"step": at, **values} for at, values in found])
            for at, values in found if callback else []:
                callback(at, values)
        if folder and (done % checkpoint_every == 0 or done == steps):
            folder.save(state, drawn)
            if evaluate and done < steps:
                folder.log({"step": done, "evaluation": _finite(evaluate(state.params))})
        if progress:
            progress("training", done, steps)
    return state


def _versions() -> dict[str, str]:
    return {"jax": jax.__version__, "numpy": np.__version__}


def _floats(info) -> dict[str, float | None]:
    """Numbers for JSON, which has no NaN (the median of an empty batch) and no infinity."""
    values = info._asdict()
    values |= {f"aux.{name}": value for name, value in (values.pop("aux", None) or {}).items()}
    return _finite({name: float(value) for name, value in values.items()})


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _check(plan: Plan, data, steps: int, graph):
    """Refuse what the plan does not cover; the data as an object with `take`."""
    if not plan.certified:
        raise ValueError("plan must be certified; its evidence does not support the guarantee")
    if steps > plan.mechanism.scheme.iterations:
        raise ValueError(
            f"steps must be at most the plan's {plan.mechanism.scheme.iterations}, was {steps}: more are not "
            "covered by the guarantee"
        )
    check_graph(plan.mechanism.scheme, graph, plan.dataset_size, plan.holds_for_shared_examples)
    rows = as_rows(data)
    if graph is not None:
        if len(rows) != graph.dataset_size:
            raise ValueError(f"data must have the graph's {graph.dataset_size} rows, had {len(rows)}")
        return GraphRows(rows, graph)
    if len(rows) != plan.dataset_size:
        raise ValueError(f"data must have the plan's dataset_size {plan.dataset_size} rows, had {len(rows)}")
    return rows


@dataclass(frozen=True)
class GraphRows:
    """The examples of a graph as a data set: each is a row of another one."""

    rows: Any
    graph: Attribution

    def __len__(self) -> int:
        return self.graph.num_examples

    def take(self, indices, size: int):
        return self.rows.take(self.graph.rows[indices], size)

    def fingerprint(self) -> str:
        """Digest of the rows and of the graph."""
        parts = (self.graph.rows, self.graph.first_user, self.graph.users)
        return _digest(self.rows.fingerprint().encode() + b"".join(part.tobytes() for part in parts))


@dataclass(frozen=True)
class Rows:
    """Padded batches and their masks, spread over the mesh if there is one."""

    rows: Any
    size: int
    mesh: jax.sharding.Mesh | None

    def take(self, indices):
        batch = self.rows.take(indices, self.size), np.arange(self.size) < len(indices)
        if self.mesh is None:
            return batch
        along = jax.sharding.NamedSharding(self.mesh, _by_device.spec_of_rows(self.mesh))
        return jax.device_put(batch, along)


def _on(mesh, leaf):
    """A parameter sharded over the mesh as it was over one of the same devices, or else a copy on each."""
    old = leaf.sharding
    same = isinstance(old, jax.sharding.NamedSharding) and old.mesh.axis_names == mesh.axis_names
    spec = old.spec if same else jax.sharding.PartitionSpec()
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _lasting(plan: Plan) -> dict:
    """A plan's claim; a re-verification may replace the evidence."""
    return plan.claim.to_json()


__all__ = [
    "PROCEDURES",
    "ArrayRows",
    "Procedure",
    "Result",
    "Rows",
    "TrainingPlan",
    "Wanted",
    "as_rows",
    "fit",
    "given_microbatch_size",
    "run_and_keep",
]
