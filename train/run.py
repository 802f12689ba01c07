"""The loop of a private run: steps, checkpoints, logs, and what a resumed run is bound to."""

import contextlib
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import hosts, machine, run_folder
from .batches import fingerprints
from .batches import prefetch as prefetching
from .batches.given import BatchesError
from .batches.sampler import SamplerState
from .loss import digest
from .procedures import Request, Result
from .run_folder import RunFolder

if TYPE_CHECKING:
    from .individual import PrivateLosses

_LOG_EVERY = 10


def take_steps(
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
    statement: str,
    frozen: Callable[[], dict[str, str]],
    described: dict[str, Any] | None = None,
    before_first: Callable[[], None] | None = None,
    released: Callable[[Any], Any] = lambda params: params,
    only_last: bool = False,
    report: "Callable[[Any, int], PrivateLosses] | None" = None,
    bound: dict[str, str] | None = None,
) -> Result:
    """Return all steps of a private run, kept in the folder `request.out` where there is one.

    `step` is as `train.step.PrivateStep`, with a call and `trace`; `batch.take(indices)` returns its
    arguments for these examples, and `batch.rows` has a `fingerprint()`. `source_at` is: (sampler key, state
    of the sampler or None) -> batches, with `next()` and `state`. A resumed run must share `claim`, the JSON
    values of the plan, `described`, what `frozen()` returns (digests, by name, of what the loss reads beside
    the parameters) and `bound`, private texts of which only keyed digests are stored. `before_first` is
    called before the first step of this call, once in a run with a folder. `released` is what is shown of the
    last state's parameters; with `only_last` earlier ones stay hidden, also from `evaluate`: they are in
    checkpoints, which are secret. `report` is: (last state, steps) -> every example's own loss.
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
    with contextlib.ExitStack() as stack:
        # They stop a run where one example's loss is not finite, and at an empty batch.
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        folder, drawn, verified = None, None, False
        if hosts.several():
            rows, params = batch.rows.fingerprint(), digest(hosts.local(state.params))
            kept = request.out is not None
            hosts.agree(**described, frozen=frozen(), data=rows, model=params, out=kept)
            state = hosts.spread(mesh, state)
        if request.out is not None:
            # A resumed run uses the key that it began with.
            described |= {"frozen": frozen(), "generator": run_folder.generator()}
            private = {"data": batch.rows.fingerprint()} | (bound or {})
            replays = described.get("batches") is None

            def begin():
                nonlocal folder, state
                folder = stack.enter_context(RunFolder(request.out))
                key = folder.begin(described, sampler_key, private, options.elastic)
                state, drawn = folder.restore(state, replays=replays) or (state, None)
                if drawn is not None and drawn.key != tuple(key):
                    raise ValueError(
                        f"out {request.out} holds checkpoints of another run than its secret.json"
                    )
                at = None if drawn is None else [list(drawn.key), drawn.step, drawn.digest]
                return key, at, folder.verified

            sampler_key, at, verified = hosts.first(begin)
            drawn = None if at is None else SamplerState(tuple(at[0]), *at[1:])
            state = hosts.spread(mesh, state)
        source = source_at(sampler_key, drawn)
        if folder:
            folder.went_on(source.state.step)
        if folder and drawn is None:
            folder.save(state, source.state)
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
            folder.log({"step": source.state.step, "evaluation": _finite(shown(state))})
        coming = prefetching.batches(source, batch, source.state.step, steps)
        with prefetching.ahead(coming, options.prefetch) as ready:
            state = _loop(step, state, ready, steps, folder, shown if seen else None, options)
        state = hosts.local(state)
        params = released(request.shown(state))
        evaluation = evaluate(params) if evaluate else {}
        losses = None if report is None else report(state, steps)
        opt_state = getattr(state, "opt_state", None)
        result = Result(params, steps, evaluation, statement, losses, opt_state)
        if folder:
            folder.save_model(params)
            folder.finish({"steps": steps, "evaluation": _finite(evaluation), "guarantee": result.statement})
        return result


def _loop(step, state, ready, steps, folder, evaluate, options) -> Any:
    waiting, ready, drawn = [], iter(ready), None
    while True:
        try:
            rows, mask, drawn = next(ready)
        except StopIteration:
            return state
        except BatchesError:
            if folder and drawn is not None:
                folder.save(state, drawn)
            raise
        state, info = step(state, rows, mask)
        done = drawn.step
        keep = done % options.checkpoint_every == 0 or done == steps
        if folder or options.callback:
            waiting.append((done, info))
        if waiting and (done % _LOG_EVERY == 0 or keep):
            # Of this step only if it is kept: waiting for its numbers would leave the device without work.
            ended = len(waiting) if keep else len(waiting) - 1
            found, waiting = [(at, _floats(seen)) for at, seen in waiting[:ended]], waiting[ended:]
            if folder:
                folder.log_private([{"step": at, **values} for at, values in found])
            for at, values in found if options.callback else []:
                options.callback(at, values)
        if folder and keep:
            folder.save(state, drawn)
            if evaluate and done < steps:
                folder.log({"step": done, "evaluation": _finite(evaluate(state))})
        if options.progress:
            options.progress("training", done, steps)


def _floats(info) -> dict[str, float | None]:
    """Numbers for JSON, which has no NaN (the median of an empty batch) and no infinity."""
    values = hosts.local(info)._asdict()
    values |= {f"aux.{name}": value for name, value in (values.pop("aux", None) or {}).items()}
    return _finite({name: float(value) for name, value in values.items()})


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
