"""The loop of a private run: steps, checkpoints, logs, and what a resumed run is bound to."""

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxacct.common.version import VERSION
from jaxacct.report import run_card

from ..batches import fingerprints
from ..batches import prefetch as prefetching
from ..batches.fingerprints import of_arrays
from ..batches.given import BatchesError
from ..batches.sampler import SamplerState
from ..clipping.ghost import Choice
from ..noise.normals import with_next_key
from ..procedures.by_device import specs_of
from ..procedures.protocol import Request, Result
from . import folder as run_folder
from . import hosts, interrupts, machine, traces
from .folder import RunFolder
from .trained import Watch

if TYPE_CHECKING:
    from ..individual import PrivateLosses

_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """All steps of one private run, kept in the folder `request.out` where there is one.

    Attributes:
      plan: what covers it.
      request: as it was asked for.
      start: -> the state before the first step.
      step: a `procedures.step.PrivateStep`, or something with a call and `trace` like it. A run is bound to
        its loss and its optimizer as traced, and to what the loss reads beside the parameters.
      batch: `batch.take(indices)` returns the step's arguments for these examples; `batch.rows` has a
        `fingerprint()`.
      steps: number of steps.
      source_at: (sampler key, state of the sampler or None) -> batches, with `next()` and `state`.
      sampler_key: of a new run; a resumed one uses the key that it began with.
      clip_norm: which a resumed run must share, as the plan.
      described: further JSON values that it must share.
      clipping: printed, and part of the result.
      before_first: called before the first step of this call, once in a run with a folder.
      released: what is shown of the last state's parameters.
      only_last: earlier parameters stay hidden, also from `evaluate`: they are in checkpoints, which are
        secret.
      report: (last state, steps) -> every example's own loss.
      adds: what the run guarantees beyond `plan`.
    """

    plan: Any
    request: Request
    start: Callable[[], Any]
    step: Any
    batch: Any
    steps: int
    source_at: Callable[[Any, SamplerState | None], Any]
    sampler_key: Any
    clip_norm: float
    described: dict[str, Any] = field(default_factory=dict)
    clipping: Choice | None = None
    before_first: Callable[[], None] | None = None
    released: Callable[[Any], Any] = lambda params: params
    only_last: bool = False
    report: "Callable[[Any, int], PrivateLosses] | None" = None
    adds: str = ""

    def take(self) -> Result:
        """Return the result of all steps; ValueError where the folder holds another run."""
        with contextlib.ExitStack() as stack:
            # They stop a run where one example's loss is not finite, and at an empty batch.
            stack.enter_context(jax.debug_nans(False))
            stack.enter_context(jax.debug_infs(False))
            state, source, folder = self._begun(stack)
            coming = prefetching.batches(source, self.batch, source.state.step, self.steps)
            with prefetching.ahead(coming, self.request.options.prefetch) as ready:
                with interrupts.postponed(folder is not None) as interrupted:
                    state = self._taken(state, iter(ready), folder, interrupted)
            return self._ended(hosts.local(state), folder)

    def _shared(self, state, none) -> dict[str, Any]:
        """Return JSON values that all processes must share, and a resumed run."""
        mesh, claim = getattr(self.batch, "mesh", None), getattr(self.plan, "claim", self.plan).to_json()
        return {
            "plan": fingerprints.of_bytes(json.dumps(claim, sort_keys=True).encode()),
            "clip_norm": self.clip_norm,
            "steps": self.steps,
            "program": fingerprints.of_trace(self.step.trace(state, *none).jaxpr),
            **self.described,
            **machine.describe(1 if mesh is None else mesh.size),
        }

    def _begun(self, stack: contextlib.ExitStack) -> tuple[Any, Any, RunFolder | None]:
        """Return the state, the batches that come next, and the folder, which is open."""
        request, options = self.request, self.request.options
        state, none = self.start(), self.batch.take(np.zeros(0, np.int64))
        described, folder, drawn, verified = self._shared(state, none), None, None, False
        loss = getattr(self.step, "loss", None)
        frozen = {} if loss is None else loss.digests()
        # Of this process: process 0 writes it.
        mesh = getattr(self.batch, "mesh", None)
        specs, like = specs_of(mesh, state), hosts.local(state)
        if hosts.several():
            rows, params = self.batch.rows.fingerprint(), of_arrays(like.params)
            kept = request.out is not None
            hosts.agree(**described, frozen=frozen, data=rows, model=params, out=kept)
            state = hosts.spread(mesh, like, specs)
        sampler_key = self.sampler_key
        if request.out is not None:
            process = machine.process_name((state, loss))
            described |= {"frozen": frozen, "generator": run_folder.generator(), "process": process}
            if loss is not None:
                described |= traces.of_parts(loss, self.step.optimizer, state, none[0])

            def begin():
                nonlocal folder, like
                folder = stack.enter_context(RunFolder(request.out))
                key = folder.begin(described, sampler_key, self.batch.rows.fingerprint(), options.elastic)
                like, drawn = folder.restore(like) or (like, None)
                if drawn is not None and drawn.key != tuple(key):
                    raise ValueError(
                        f"out {request.out} holds checkpoints of another run than its secret.json"
                    )
                if drawn is not None:
                    like = functools.reduce(with_next_key, folder.moves_after(drawn.step), like)
                at = None if drawn is None else [list(drawn.key), drawn.step, drawn.digest]
                return key, at, folder.verified

            sampler_key, at, verified = hosts.first(begin)
            drawn = None if at is None else SamplerState(tuple(at[0]), *at[1:])
            state = hosts.spread(mesh, like, specs)
        source = self.source_at(sampler_key, drawn)
        if folder and drawn is None:
            folder.save(like, source.state)
        if self.clipping is not None and options.progress is not False:
            print(f"clipping: {self.clipping}", file=sys.stderr)
        if source.state.step == 0:
            # What fails at the end of a run fails before its first step.
            begun = self.released(request.shown(hosts.local(state)))
            if folder:
                folder.try_model(begun)
            if request.evaluate:
                request.evaluate(begun)
        # A run that began unverified is verified at the first call that asks for it.
        if self.before_first and not verified:
            self.before_first()
            if folder:
                folder.note(verified=True)
        # Of a run that was interrupted between a checkpoint and its evaluation.
        if folder and 0 < source.state.step < self.steps and not folder.has_logged(source.state.step):
            self._log(folder, source.state.step, like)
        return state, source, folder

    def _log(self, folder: RunFolder, step: int, state) -> None:
        """Log the evaluation at a step that may be shown."""
        if self.request.evaluate and not self.only_last:
            evaluation = self.request.evaluate(self.request.shown(hosts.local(state)))
            folder.log({"step": step, "evaluation": _finite(evaluation)})

    def _taken(self, state, ready, folder: RunFolder | None, interrupted) -> Any:
        """Return the state after all steps."""
        options, steps = self.request.options, self.steps
        given = self.described.get("batches") is not None
        waiting, drawn, watch = [], None, Watch()
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
            # Where batches are a loader's the noise depends on them: it is never that of other batches, not
            # even in a copy of the folder.
            bound_to = (drawn.digest,) if given else ()
            state, info = self.step(state, rows, mask, *bound_to)
            done, stop = drawn.step, interrupted.is_set()
            cut = hosts.is_cut(state)  # then all processes must reach a checkpoint together
            keep = done % options.checkpoint_every == 0 or done == steps or (stop and not cut)
            kept = hosts.local(state) if keep and (folder or cut) else state
            if folder or options.callback or watch.is_open:
                waiting.append((done, info))
            if waiting and (done % _LOG_EVERY == 0 or keep):
                # Of this step only if it is kept: waiting for its numbers leaves the device without work.
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
            if folder and keep and done < steps:
                self._log(folder, done, kept)
            del kept
            if callable(options.progress):
                options.progress("training", done, steps)

    def _ended(self, state, folder: RunFolder | None) -> Result:
        """Return the result of the last state, and write it to the folder."""
        params = self.released(self.request.shown(state))
        evaluation = self.request.evaluate(params) if self.request.evaluate else {}
        losses = None if self.report is None else self.report(state, self.steps)
        opt_state = getattr(state, "opt_state", None)
        how = None if self.clipping is None else str(self.clipping)
        statement = f"{self.plan.statement()} {self.adds}".strip()
        result = Result(params, self.steps, evaluation, statement, how, losses, opt_state)
        if folder:
            folder.save_model(params, self.steps)
            versions = {"jaxacct": VERSION, **machine.versions()}
            model = run_card.digest_of_files(folder.folder / "model")
            run = self.steps, self.clip_norm, how, _finite(evaluation), model, versions
            folder.finish(run_card.RunCard(run_card.about_plan(self.plan), statement, *run).to_json())
        return result


def _floats(info) -> dict[str, float | None]:
    """Numbers for JSON, which has no NaN (the median of an empty batch) and no infinity."""
    return _finite({name: float(value) for name, value in hosts.local(info)._asdict().items()})


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
