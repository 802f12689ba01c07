"""Options of `train.fit` beside plan, model, data and optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

import jax
import optax

from jaxacct.common import validate as _validate

from .batches.graph import Attribution
from .clipping.ghost import AUTO
from .individual import IndividualAccounting
from .noise.redrawn import KEEP


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a run is computed, followed and kept; an option that does not apply to a plan is refused.

    Attributes:
      steps: number of steps, at most the plan's; by default all of them. A run in a folder may end earlier or
        go on later than it began with, under the same guarantee. Choose by what is public: `evaluate`, not
        `callback` or the private log.
      clipping: "ghost" (`train.clipping.ghost`) is much faster where parameters are many and examples short;
        gradients are scaled to slightly less than `clip_norm`. "per_example": gradients of examples. "auto":
        "ghost" where it applies and pays (`train.clipping.ghost`). For a `jaxacct.Plan`.
      normalize: automatic clipping: every gradient is scaled to about `clip_norm`.
      average: decay of an exponential moving average of the parameters, in (0, 1). `evaluate` then
        receives the average, and it is what is published. It has no privacy cost. Not for a
        `LastIteratePlan`.
      inner: optimizer that goes through the records of each term of a `GeneralPlan`, with a new state in each
        term; by default a term is the mean gradient of its records.
      microbatch_size: gradients of examples (or terms) in memory at a time; by default derived from the
        number of parameters. It is rounded down to a power of two (proofs/adjacency.md).
      skip_padding: do not compute padded rows. The duration of a step then shows its batch size, which no
        guarantee covers. Default: True, except for truncated batches (refused), a mesh and `individual`.
      wrt: nnx filter of the variables to train, by default `nnx.Param`. All others are frozen and public: no
        noise, no part in the clip norm, no copy in checkpoints; the run is bound to their values.
      loss_key: public integer or `jax.random` key, for dropout or augmentation: the loss is called with a
        third argument, a key derived from this one, the step and the example's index. Unrelated to `keys`.
        Refused for add-or-remove-one adjacency, where other examples change their index.
      graph: users and examples, for an attribution plan; its `rows` map the plan's examples to rows of data.
      individual: follow every example's own privacy loss (`train.individual`), for Poisson batches and
        independent noise.
      noise_memory: "keep" the last vectors of correlated noise, or "recompute" them from the key: every step
        draws as many vectors as there are bands, and none is stored. The released numbers are the same, but
        for a rare integer on CPUs, where another program rounds the normals.
        For a `jaxacct.Plan` whose matrix has a banded inverse, without `batches` and `elastic`; with `out`
        not on a GPU unless its operations are deterministic.
      mesh: devices; each computes an equal share of the rows of a batch, `microbatch_size` at a time.
        Parameters that are sharded over it (`NamedSharding`, or annotations of nnx) stay so, with the
        optimizer's state and the kept noise; others are whole on every device.
      verify: draw a Monte Carlo plan's evidence again before the first step. A run in a folder is verified
        once. Takes as long as certification.
      checkpoint_every: steps between checkpoints.
      progress: called with ("training", steps done, total steps); by default a bar on an interactive terminal
        or in a notebook; False for none, and for no line about the clipping.
      callback: called with (step, metrics) of every step, a few steps late. **Private**: no guarantee covers
        the metrics.
      prefetch: batches that a thread reads ahead, 0 for none. The trained bits do not depend on it.
      elastic: continue a run on other devices, processors, compiler flags or package versions, with a
        warning: the noise has another key there, so that a copy of the folder may go on elsewhere, too.
        `mesh`, `microbatch_size` and `skip_padding` may change as well. Refused by default.
      keys: (sampler key, noise key); by default from the operating system. Fix them in tests only.
    """

    steps: int | None = None
    clipping: Literal["auto", "ghost", "per_example"] = AUTO
    normalize: bool = False
    average: float | None = None
    inner: optax.GradientTransformation | None = None
    microbatch_size: int | None = None
    skip_padding: bool | None = None
    wrt: Any = None
    loss_key: Any = None
    graph: Attribution | None = None
    individual: IndividualAccounting | None = None
    noise_memory: Literal["keep", "recompute"] = KEEP
    mesh: jax.sharding.Mesh | None = None
    verify: bool = True
    checkpoint_every: int = 100
    progress: Callable[[str, int, float], None] | bool | None = None
    callback: Callable[[int, dict[str, float | None]], Any] | None = None
    prefetch: int = 2
    elastic: bool = False
    keys: tuple | None = field(default=None, repr=False)

    def __post_init__(self):
        _validate.positive_integer("checkpoint_every", self.checkpoint_every)
        _validate.positive_integer("prefetch", self.prefetch, minimum=0)
        for name in ("normalize", "verify", "elastic"):
            _validate.instance(name, getattr(self, name), bool, "True or False")
        _validate.instance("skip_padding", self.skip_padding, (bool, NoneType), "True, False or None")
        _validate.instance("mesh", self.mesh, (jax.sharding.Mesh, NoneType), "a jax.sharding.Mesh")
        for name in ("callback", "progress"):
            value = getattr(self, name)
            if not (value is None or callable(value) or (name == "progress" and isinstance(value, bool))):
                raise ValueError(f"{name} must be a function, got {value!r}")
        if self.keys is not None and not (isinstance(self.keys, tuple) and len(self.keys) == 2):
            raise ValueError(f"keys must be (sampler key, noise key), got {type(self.keys).__name__}")
        if self.steps is not None:
            _validate.positive_integer("steps", self.steps)
        if self.microbatch_size is not None:
            _validate.positive_integer("microbatch_size", self.microbatch_size)
