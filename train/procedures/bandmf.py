"""Per-example clipped gradients with correlated noise: the procedure of a `jaxacct.Plan`."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxacct.core.plan import Plan

from ..batches import fingerprints
from ..batches.attribution import expected_batch_sizes
from ..batches.given import GivenBatches, Present
from ..batches.graph import Attribution, check_graph
from ..batches.sampler import Sampler, batch_sizes
from ..clipping.ghost import AUTO, PER_EXAMPLE, Choice, choose
from ..individual.steps import follow
from ..models.loss import numbered
from ..optimizers import Privatizer, privatize
from ..options import TrainOptions
from ..run import hosts, machine
from ..run.loop import Run
from . import by_device as _by_device
from .protocol import Procedure, Request, Result
from .step import make_step


def train(plan: Plan, request: Request) -> Result:
    """Train under a plan of correlated noise; ValueError for whatever it does not cover."""
    mechanism, options = plan.mechanism, request.options
    mesh, graph = options.mesh, options.graph
    steps = request.steps(plan.mechanism.scheme.iterations)
    _, expected, largest = batch_sizes(plan)
    given = _given_batches(plan, request, steps)
    rows = _rows(plan, request, graph)
    size = len(rows) if graph is None else None
    if graph is not None:
        expected = float(expected_batch_sizes(graph, mechanism.scheme).mean())
    clip_norm = request.given_clip_norm()
    loss, params = request.functional()
    rows = numbered(loss, rows)
    if mesh is not None:
        # Axes left to the compiler: a model written for one device then runs as it is.
        mesh = _by_device.automatic(mesh)
        loss, params = (_placed(mesh, tree) for tree in (loss, params))
    sampler_key, noise_key = request.keys()
    public: dict[str, Any] = dict(clip_norm=clip_norm, expected_batch_size=expected)
    private = privatize(mechanism, **public, key=noise_key, noise_memory=options.noise_memory)
    if private.redraws and (given is not None or options.elastic):
        raise ValueError(
            "noise_memory must be 'keep' with batches, each of which has a noise key of its own, and with "
            "elastic: another machine may round vectors otherwise that earlier steps were made of"
        )
    if private.redraws and request.out is not None and not machine.repeats((loss, params)):
        raise ValueError(
            "noise_memory must be 'keep' with out on a GPU, where a continued run has noise of another key, "
            "unless XLA_FLAGS has --xla_gpu_deterministic_ops=true"
        )
    optimizer = request.given_optimizer()
    shared: dict[str, Any] = dict(normalize=options.normalize)
    clipping = Choice(PER_EXAMPLE, "individual charges the gradient of each example")
    if options.individual is None:
        batch = Rows(rows, largest if mesh is None else -(-largest // mesh.size) * mesh.size, mesh)
        clipping = _clipping(options, loss, params, batch, private)
        shared |= dict(skip_padding=_skips_padding(plan, options), clipping=clipping.clipping)
        shared |= dict(mesh=mesh, microbatch_size=options.microbatch_size)
        parts: dict[str, Any] = dict(
            step=make_step(loss, private, optimizer, **shared),
            batch=batch,
            source_at=lambda key, drawn: _source(plan, graph, size, given, key, drawn),
        )
    else:
        if mechanism.adjacency != "zero-out":
            raise ValueError(
                f"individual must not be given with {mechanism.adjacency}: it is for zero-out adjacency"
            )
        _check_individual(options)
        shared |= dict(microbatch_size=options.microbatch_size or largest)
        parts = follow(options.individual, plan, rows, loss, private, optimizer, **shared)
    return Run(
        plan=plan,
        request=request,
        start=lambda: parts["step"].init(params),
        steps=steps,
        clip_norm=clip_norm,
        sampler_key=sampler_key,
        clipping=clipping,
        described=dict(
            batches=None if given is None else given.described(),
            clipping=clipping.clipping,
            normalize=options.normalize,
            microbatch_size=options.microbatch_size,
            noise_memory=options.noise_memory,
            layout=_by_device.layout(mesh, params),
            individual=repr(options.individual),
        ),
        before_first=(lambda: _verify(plan, options.progress or None)) if options.verify else None,
        **parts,
    ).take()


PROCEDURE = Procedure(
    train,
    frozenset(
        "optimizer clip_norm steps microbatch_size normalize mesh graph individual wrt loss_key "
        "skip_padding batches clipping average noise_memory".split()
    ),
)


def _given_batches(plan: Plan, request: Request, steps: int) -> GivenBatches | None:
    """Return the batches of the user's own loader; ValueError where the plan draws its own."""
    scheme = plan.mechanism.scheme
    if request.batches is None:
        return None
    if scheme.patterns is None:
        raise ValueError(
            f"batches must not be given for a plan of {scheme.name}, which draws them at random: calibrate "
            "with --scheme fixed-order for a loader of your own"
        )
    size, _, batch_size = batch_sizes(plan)
    return GivenBatches(request.batches, scheme.patterns, size, batch_size, steps)


def _source(plan: Plan, graph, size: int | None, given: GivenBatches | None, key, drawn):
    """Return the batches of a run after `drawn`, for `size` rows."""
    if plan.mechanism.scheme.patterns is None:
        return Sampler.from_plan(plan, key, graph, drawn, size)
    # The order is one of the plan's places: those of examples that are absent stay empty.
    source = Sampler.from_plan(plan, key, state=drawn) if given is None else given.begin(key, drawn)
    return source if size is None or size == plan.dataset_size else Present(source, size)


def _rows(plan: Plan, request: Request, graph: Attribution | None):
    """Return the data, as the plan's examples."""
    check_graph(plan.mechanism.scheme, graph, plan.dataset_size, plan.holds_for_shared_examples)
    if graph is None:
        # Under add-or-remove-one the size of the data set is private: any that the plan covers is trained on.
        return request.rows(plan.dataset_size, at_most=plan.mechanism.is_add_or_remove)
    return GraphRows(request.rows(graph.dataset_size, "graph's"), graph)


def _clipping(options: TrainOptions, loss, params, batch: "Rows", private: Privatizer) -> Choice:
    """Return the clipping: the given one, or a chosen one."""
    if options.clipping != AUTO:
        return Choice(options.clipping, "as given")
    empty, _ = batch.take(np.zeros(0, np.int64))
    return choose(loss.at(0), params, empty, grid=private.grid, mesh=batch.mesh)


def _check_individual(options: TrainOptions) -> None:
    for name, why in (
        ("mesh", "its records are on one device"),
        ("skip_padding", "every example is charged"),
    ):
        if getattr(options, name) not in (None, False):
            raise ValueError(f"{name} must not be given with individual: {why}")
    if options.clipping not in (AUTO, PER_EXAMPLE):
        raise ValueError("clipping must be 'per_example' with individual, which needs every example's norm")


def _skips_padding(plan: Plan, options: TrainOptions) -> bool:
    """Return whether the duration of a step depends on its batch size; ValueError where it must not."""
    truncated = plan.truncation_delta is not None or plan.mechanism.scheme.batch_size_cap is not None
    if options.skip_padding and truncated:
        raise ValueError(
            "skip_padding must not be True for a plan that truncates batches: its guarantee does not hold "
            "against an adversary who learns their sizes, which run times would show"
        )
    if options.skip_padding is None:
        return not truncated and options.mesh is None
    return options.skip_padding


def _verify(plan: Plan, progress) -> None:
    """Refuse a plan that fresh draws do not verify: stored counts do not show how they were obtained."""
    if not plan.is_sampled:
        return  # `certified` computed it again
    verdict = plan.verify(progress=progress)
    if not verdict.certified:
        raise ValueError(f"plan could not be verified with fresh randomness: {verdict.flaws[0]}")


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
        return fingerprints.of_bytes(
            self.rows.fingerprint().encode() + b"".join(part.tobytes() for part in parts)
        )


@dataclass(frozen=True)
class Rows:
    """Padded batches and their masks, spread over the mesh if there is one."""

    rows: Any
    size: int
    mesh: jax.sharding.Mesh | None = None

    def take(self, indices):
        def read(indices, size):
            return self.rows.take(indices, size), np.arange(size) < len(indices)

        if self.mesh is None:
            return read(indices, self.size)
        return hosts.rows_on(self.mesh, _by_device.spec_of_rows(self.mesh), read, indices, self.size)


def _placed(mesh: jax.sharding.Mesh, tree):
    """Return arrays over the mesh, each sharded as it is, or as its nnx variable says, or else not."""
    leaves, structure = jax.tree.flatten(tree)
    said = jax.tree.leaves(nnx.get_partition_spec(tree))
    both = zip(leaves, said, strict=True)
    placed = [hosts.on(mesh, leaf, _by_device.spec_on(mesh, leaf, spec)) for leaf, spec in both]
    return jax.tree.unflatten(structure, placed)
