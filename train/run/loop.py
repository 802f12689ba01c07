"""The loop of a private run: steps, checkpoints, logs, and what a resumed run is bound to."""

import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxacct.common.files import read_json
from jaxacct.common.version import VERSION
from jaxacct.report import run_card

from ..batches import fingerprints
from ..batches import prefetch as prefetching
from ..batches.given import BatchesError
from ..batches.sampler import SamplerState
from ..clipping.automatic import Choice
from ..models.loss import digest
from ..procedures.by_device import specs_of
from ..procedures.protocol import Request, Result
from . import folder as run_folder
from . import hosts, interrupts, machine
from .folder import RunFolder
from .trained import Watch

if TYPE_CHECKING:
    from ..individual import PrivateLosses

_LOG_EVERY = 10


def take_steps(
    plan: Any,
    request: Request,
    step: Any,
    state: Any,
    batch,
    steps: int,
    *,
    claim: dict,
    clip_norm: float,
    sampler_key,
    source_at: Callable[[Any, SamplerState | None], Any],
    frozen: Callable[[], dict[str, str]],
    traces: Callable[[Any, Any], dict[str, str]],
    clipping: Choice | None = None,
    described: dict[str, Any] | None = None,
    before_first: Callable[[], None] | None = None,
    released: Callable[[Any], Any] = lambda params: params,
    only_last: bool = False,
    report: "Callable[[Any, int], PrivateLosses] | None" = None,
    bound: dict[str, str] | None = None,
    adds: str = "",
) -> Result:
    """Return all steps of a private run, kept in the folder `request.out` where there is one.

    `step` is as `procedures.step.PrivateStep`, with a call and `trace`; `batch.take(indices)` returns its
    arguments for these examples, and `batch.rows` has a `fingerprint()`. `source_at` is: (sampler key, state
    of the sampler or None) -> batches, with `next()` and `state`. A resumed run must share `claim`, the JSON
    values of the plan, `described`, what `frozen()` returns (digests, by name, of what the loss reads beside
    the parameters), `traces(state, rows)` (those of the traced loss and optimizer) and `bound`, private texts
    of which only keyed digests are stored. `clipping` is printed and part of the result. `before_first` is
    called before the first step of this call, once in a run with a folder. `released` is what is shown of the
    last state's parameters; with `only_last` earlier ones stay hidden, also from `evaluate`: they are in
    checkpoints, which are secret. `report` is: (last state, steps) -> every example's own loss. `adds` is
    what the run guarantees beyond `plan`.
    """
    options, evaluate = request.options, request.evaluate
    mesh = getattr(batch, "mesh", None)
    described = {
        "plan": fingerprints.of_bytes(json.dumps(claim, sort_keys=True).encode()),
        "clip_norm": clip_norm,
        "steps": steps,
        "program": fingerprints.of_program(step.trace(state, *batch.take(np.zeros(0, np.int64)))),
        **(described or {}),
        **machine.describe(1 if mesh is None else mesh.size),
    }
    # Of this process: process 0 writes it.
    specs, like = specs_of(mesh, state), hosts.local(state)
    with contextlib.ExitStack() as stack:
        # They stop a run where one example's loss is not finite, and at an empty batch.
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        folder, drawn, verified = None, None, False
        given = described.get("batches") is not None
        if hosts.several():
            rows, params = batch.rows.fingerprint(), digest(like.params)
            kept = request.out is not None
            hosts.agree(**described, frozen=frozen(), data=rows, model=params, out=kept)
            state = hosts.spread(mesh, like, specs)
        if request.out is not None:
            # A resumed run uses the key that it began with.
            if clipping is not None:
                described |= {"clipping_reason": clipping.reason}
            described |= {"frozen": frozen(), "generator": run_folder.generator()}
            described |= traces(state, batch.take(np.zeros(0, np.int64))[0])
            private = {"data": batch.rows.fingerprint()} | (bound or {})

            def begin():
                nonlocal folder, like
                folder = stack.enter_context(RunFolder(request.out))
                key = folder.begin(described, sampler_key, private, options.elastic)
                like, drawn = folder.restore(like) or (like, None)
                if drawn is not None and drawn.key != tuple(key):
                    raise ValueError(
                        f"out {request.out} holds checkpoints of another run than its secret.json"
                    )
                at = None if drawn is None else [list(drawn.key), drawn.step, drawn.digest]
                return key, at, folder.verified

            sampler_key, at, verified = hosts.first(begin)
            drawn = None if at is None else SamplerState(tuple(at[0]), *at[1:])
            state = hosts.spread(mesh, like, specs)
        source = source_at(sampler_key, drawn)
        if folder:
            folder.went_on(source.state.step)
        if folder and drawn is None:
            folder.save(like, source.state)
        if clipping is not None:
            reason = stored(request.out, "clipping_reason")
            clipping = clipping if reason is None else clipping._replace(reason=reason)
            if options.progress is not False:
                print(f"clipping: {clipping}", file=sys.stderr)
        if source.state.step == 0:
            # What fails at the end of a run fails before its first step.
            begun = released(request.shown(hosts.local(state)))
            if folder:
                folder.try_model(begun)
            if evaluate:
                evaluate(begun)
        # A run that began unverified is verified at the first call that asks for it.
        if before_first and not verified:
            before_first()
            if folder:
                folder.note(verified=True)
        seen = None if only_last else evaluate

        def shown(state) -> dict[str, float]:
            return evaluate(request.shown(hosts.local(state))) if evaluate else {}

        if folder and seen and 0 < source.state.step < steps and not folder.has_logged(source.state.step):
            # The run was interrupted between the checkpoint and its evaluation.
            folder.log({"step": source.state.step, "evaluation": _finite(shown(like))})
        del like
        coming = prefetching.batches(source, batch, source.state.step, steps)
        with prefetching.ahead(coming, options.prefetch) as ready:
            after = (folder, shown if seen else None, options)
            state = _loop(step, state, ready, steps, *after, given=given)
        state = hosts.local(state)
        params = released(request.shown(state))
        evaluation = evaluate(params) if evaluate else {}
        losses = None if report is None else report(state, steps)
        opt_state = getattr(state, "opt_state", None)
        how = None if clipping is None else str(clipping)
        statement = f"{plan.statement()} {adds}".strip()
        result = Result(params, steps, evaluation, statement, how, losses, opt_state)
        if folder:
            folder.save_model(params, steps)
            versions = {"jaxacct": VERSION, **machine.versions()}
            model = run_card.digest_of_files(folder.folder / "model")
            run = steps, clip_norm, how, _finite(evaluation), model, versions
            folder.finish(run_card.RunCard(run_card.about_plan(plan), statement, *run).to_json())
        return result


def stored(out, name: str) -> Any:
    """Return what the run in a folder began with by this name, or None."""
    path = None if out is None else Path(out) / "run.json"
    found = read_json(path, "run") if path is not None and path.exists() else {}
    return found.get(name) if isinstance(found, dict) else None


def _loop(step, state, ready, steps, folder, evaluate, options, *, given: bool) -> Any:
    """Return the state after all steps; `given` says that batches come from a loader of the user's own."""
    with interrupts.postponed(folder is not None) as interrupted:
        return _steps(step, state, ready, steps, folder, evaluate, options, given, interrupted)


def _steps(step, state, ready, steps, folder, evaluate, options, given, interrupted) -> Any:
    waiting, ready, drawn, watch = [], iter(ready), None, Watch()
    while True:
        try:
            rows, mask, coming = next(ready)
            if folder:
                folder.commit(coming)
        except StopIteration:
            return state
        except BatchesError:
            if folder and drawn is not None:
                folder.save(state, drawn)
            raise
        drawn = coming
        # Where batches are a loader's the noise depends on them: it is never that of other batches, not even
        # in a copy of the folder.
        state, info = step(state, rows, mask, drawn.digest) if given else step(state, rows, mask)
        done, stop = drawn.step, interrupted.is_set()
        cut = hosts.is_cut(state)  # then all processes must reach a checkpoint together
        keep = done % options.checkpoint_every == 0 or done == steps or (stop and not cut)
        kept = hosts.local(state) if keep and (folder or cut) else state
        if folder or options.callback or watch.is_open:
            waiting.append((done, info))
        if waiting and (done % _LOG_EVERY == 0 or keep):
            # Of this step only if it is kept: waiting for its numbers would leave the device without work.
            ended = len(waiting) if keep else len(waiting) - 1
            found, waiting = [(at, _floats(seen)) for at, seen in waiting[:ended]], waiting[ended:]
            if folder:
                folder.log_private([{"step": at, **values} for at, values in found])
            for at, values in found:
                watch.see(values, last=at == steps)
                if options.callback:
                    options.callback(at, values)
        if folder and keep:
            folder.save(kept, drawn)
        if folder and stop and done < steps:
            raise KeyboardInterrupt
        if folder and keep and evaluate and done < steps:
            folder.log({"step": done, "evaluation": _finite(evaluate(kept))})
        del kept
        if options.progress:
            options.progress("training", done, steps)


def _floats(info) -> dict[str, float | None]:
    """Numbers for JSON, which has no NaN (the median of an empty batch) and no infinity."""
    values = hosts.local(info)._asdict()
    values |= {f"aux.{name}": value for name, value in (values.pop("aux", None) or {}).items()}
    return _finite({name: float(value) for name, value in values.items()})


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
