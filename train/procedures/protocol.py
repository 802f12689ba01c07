"""Procedures that realise plans, one for each kind, and what they share: a request and its checks."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from flax import nnx

from jaxacct.common import validate as _validate
from jaxacct.common.stored_plan import StoredPlan
from jaxacct.core.plan import Plan

from .. import arguments
from ..batches import sampler
from ..batches.sources import as_rows
from ..individual import PrivateLosses
from ..models.loss import Loss, as_loss, nnx_loss, public_key
from ..optimizers import average_of, averaging, copied
from ..options import TrainOptions
from ..run import hosts

# The `training` of a plan -> the module whose PROCEDURE realises it, loaded for the first such plan.
PROCEDURES = {
    "correlated-noise": "bandmf",
    "general-dpsgd": "batch_clipping",
    "last-iterate": "convex",
    "dice": "dice",
}


AnyPlan = Plan | StoredPlan  # what `train.fit` takes; its `training` is a key of `PROCEDURES`


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
      params: pytree like the given parameters; of an nnx model, the state of its trained variables. With
        `average`, the average.
      steps: number of steps.
      evaluation: what `evaluate` returned at the end.
      statement: the guarantee, in a sentence.
      clipping: how gradients were clipped, and why; None for a `LastIteratePlan`, whose losses are bounded.
      private_individual: with `individual`, every example's own loss. **Private**: not covered.
      opt_state: the optimizer's last state, None without an optimizer. A function of noisy gradients, so the
        guarantee covers it.
    """

    params: Any
    steps: int
    evaluation: dict[str, float]
    statement: str
    clipping: str | None = None
    private_individual: PrivateLosses | None = field(default=None, repr=False)
    opt_state: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Request:
    """The arguments of `train.fit` beside the plan."""

    model: Any
    loss: Any
    data: Any
    optimizer: optax.GradientTransformation | None = None
    clip_norm: float | None = None
    out: Any = None
    evaluate: Callable[[Any], dict[str, float]] | None = None
    batches: Iterable | None = None
    options: TrainOptions = field(default_factory=TrainOptions)

    def steps(self, covered: int) -> int:
        """Return the number of steps; ValueError for more than the plan covers."""
        steps = covered if self.options.steps is None else self.options.steps
        if steps > covered:
            raise ValueError(
                f"steps must be at most the plan's {covered}, got {steps}: more are not covered by the "
                "guarantee"
            )
        return steps

    def rows(self, number: int | None, whose: str = "plan's dataset_size", at_most: bool = False):
        """Return the data as an object with `take`; ValueError unless it has `number` rows."""
        rows = as_rows(self.data)
        if at_most and number is not None and 0 < len(rows) <= number:
            return rows
        if len(rows) != number:
            raise ValueError(f"data must have the {whose} {number} rows, got {len(rows)}")
        return rows

    def given_clip_norm(self) -> float:
        """Return the clip norm, by default 1; ValueError unless it is in [1e-30, 1e30]."""
        return 1.0 if self.clip_norm is None else _validate.scale("clip_norm", self.clip_norm)

    def given_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer; ValueError where it is missing or none of optax."""
        optimizer, average = arguments.check_optimizer(self.optimizer), self.options.average
        return optimizer if average is None else averaging(optimizer, average)

    def shown(self, state):
        """Return the parameters of a state that may be shown: its own, or their average."""
        return state.params if self.options.average is None else average_of(state.opt_state, state.params)

    def keys(self) -> tuple[Any, Any]:
        """Return (sampler key, noise key or None for a fresh one)."""
        return hosts.keys(self.options.keys or (sampler.fresh_key(), None))

    def functional(self) -> tuple[Loss, Any]:
        """Return `(Loss, params)`; trained parameters are copied, as steps donate their state."""
        arguments.check_model(self.model)
        arguments.check_trained(self.model)
        arguments.check_callable("loss", self.loss, "loss(model, example) -> number")
        key, wrt = public_key(self.options.loss_key), self.options.wrt
        if isinstance(self.loss, Loss) and key is not None:
            raise ValueError("loss_key must not be given with a train.models.loss.Loss, which has its own")
        if isinstance(self.model, nnx.Module):
            loss, params = nnx_loss(self.model, self.loss, wrt, key)
        elif wrt is not None:
            raise ValueError(
                "wrt must not be given for a pytree of parameters: bind what is frozen to the loss by "
                "jax.tree_util.Partial(loss, frozen), which calls loss(frozen, params, example)"
            )
        else:
            loss, params = as_loss(self.loss, key), self.model
        loss = jax.tree.map(jax.numpy.asarray, loss)
        return loss, copied(params)


@dataclass(frozen=True)
class Procedure:
    """How plans of one kind are realised.

    Attributes:
      train: (plan, request) -> `Result`; refuses whatever the plan does not cover.
      supports: names of the arguments and options that it uses, beside `COMMON`. Others are refused where
        they are set: the guarantee may be thought to depend on an ignored option.
    """

    train: Callable[[Any, Request], Result]
    supports: frozenset[str]

    def check(self, plan: AnyPlan, request: Request) -> None:
        """Refuse an argument or option that is set and not supported, by a one-line ValueError."""
        for record in (request, request.options):
            for each in dataclasses.fields(record):
                if each.name in COMMON | self.supports or each.default is dataclasses.MISSING:
                    continue
                value = getattr(record, each.name)
                if value is not each.default and not (isinstance(value, str) and value == each.default):
                    raise ValueError(f"{each.name} must not be given for a plan of {plan.training}")


# Arguments and options of every procedure: they say where a run is kept and how it is followed.
COMMON = frozenset(
    "out evaluate options checkpoint_every progress keys verify prefetch callback elastic".split()
)


def procedure_of(plan: AnyPlan) -> Procedure:
    """Return the procedure of a plan; ValueError for something else."""
    name = getattr(plan, "training", None)
    if name not in PROCEDURES:
        raise ValueError(f"plan must be a plan of {', '.join(PROCEDURES)}, got {type(plan).__name__}")
    return importlib.import_module(f".{PROCEDURES[name]}", __package__).PROCEDURE
