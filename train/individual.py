"""Every example's own privacy loss while a model trains, and filters that retire an example in time.

`fit(..., individual=IndividualAccounting(...))` for DP-GD and Poisson DP-SGD with independent noise. At every
step the clipped gradient of *every* example is computed at the current parameters, and the example is charged
for the norm of exactly what it would add to the integer sum, whether it was sampled or not: a charge that
depended on the draw, or on an old norm, would void the guarantee (proofs/individual.md, section 2).

What is learnt about single examples is **private**: a function of the data that no guarantee covers. It is
neither printed nor logged; it is in `Result.private_individual`, and of a run with a folder in
`checkpoints/<step>/private_individual`, which must not be published, as nothing in `checkpoints` must.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.core.plan import Plan
from jaxacct.individual import (
    FilterState,
    GDPIndividualAccountant,
    IndividualGDPFilter,
    IndividualRDPFilter,
    PLDIndividualAccountant,
    RDPIndividualAccountant,
    SigmaGrid,
    subsampled_gaussian_rdp,
)
from jaxacct.individual.accountants import CountState
from jaxacct.individual.rdp import ORDERS

from . import by_device as _by_device
from .batches.sampler import Sampler, SamplerState
from .clipping.per_example import admitted_gradient_sum
from .loss import Loss, as_loss, digest
from .noise.recursion import Fresh, NoiseState
from .optimizers import Privatizer
from .step import PrivateStep, StepInfo, TrainState, advance

_MOST_POINTS = 2**21


@dataclass(frozen=True)
class IndividualAccounting:
    """What `fit(individual=...)` keeps of every example; with an epsilon it also filters.

    Without `epsilon` losses are tracked and nothing else changes: the same plan and keys give the same bits.
    With it no example takes part in a step that would take its own loss past (epsilon, delta), so the release
    is (epsilon, delta)-DP for one example under zero-out adjacency, even where the plan's own epsilon is
    larger. Training goes on to the last step whoever is left: stopping early would tell who was retired.

    Attributes:
      epsilon, delta: budget of each example, both or neither; epsilon is a natural log.
      readmit: whether an example that did not fit may come back when its gradient is small again; sound
        either way.
      order: of the Renyi filter where batches are sampled; by default the one that lasts longest for an
        example of the clip norm, which no data decides. Full batches have a filter of mu.
      buckets: of norms that are told apart where batches are sampled; memory is examples x buckets x 4 bytes.
      smallest_norm: as a share of the clip norm: smaller norms, but 0, are charged as this.
      continues: what an earlier run on the same data left behind, `Result.private_individual`: its
        charges count here too, and the guarantee is for both runs together. **Private.**
    """

    epsilon: float | None = None
    delta: float | None = None
    readmit: bool = True
    order: int | None = None
    buckets: int = 40
    smallest_norm: float = 1 / 32
    continues: "PrivateLosses | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta of individual must be given together, or neither")
        if self.epsilon is not None:
            _validate.positive_number("epsilon", self.epsilon)
            _validate.open_probability("delta", self.delta)
        elif self.order is not None:
            raise ValueError("order of individual must not be given without an epsilon: nothing is filtered")
        _validate.positive_integer("buckets", self.buckets)
        if not 0 < self.smallest_norm < 1:
            raise ValueError(f"smallest_norm must be in (0, 1), was {self.smallest_norm!r}")

    def tracker(self, sampling_probability: float, noise_multiplier: float) -> "Tracker":
        """What follows the examples of a run; norms are in units of the clip norm.

        Raises:
          ValueError: an epsilon that no filter can keep at this delta.
        """
        if sampling_probability == 1:
            if self.order is not None:
                raise ValueError("order of individual must not be given for full batches: no Renyi filter")
            return FullBatches(GDPIndividualAccountant(noise_multiplier, 1.0), self._gaussian_filter())
        grid = SigmaGrid(noise_multiplier, noise_multiplier / self.smallest_norm, self.buckets)
        accountant = RDPIndividualAccountant(sampling_probability, noise_multiplier, 1.0, grid)
        return Sampled(accountant, self._renyi_filter(accountant))

    def _gaussian_filter(self) -> IndividualGDPFilter | None:
        if self.epsilon is None or self.delta is None:
            return None
        return IndividualGDPFilter.from_epsilon_delta(self.epsilon, self.delta, readmit=self.readmit)

    def _renyi_filter(self, accountant: RDPIndividualAccountant) -> IndividualRDPFilter | None:
        if self.epsilon is None or self.delta is None:
            return None
        filters = {}
        for order in ORDERS if self.order is None else (self.order,):
            try:
                filters[order] = IndividualRDPFilter.from_epsilon_delta(self.epsilon, self.delta, order)
            except ValueError:
                if self.order is not None:
                    raise
        if not filters:
            raise ValueError(
                f"epsilon of individual must be larger at delta {self.delta:g}, was {self.epsilon:g}: no "
                "Renyi order has anything to spend"
            )
        largest = accountant.charged_sigmas[0]
        costs = subsampled_gaussian_rdp(accountant.sampling_probability, largest, tuple(filters))
        best = max(zip(filters.values(), costs, strict=True), key=lambda pair: pair[0].budget / pair[1])[0]
        return IndividualRDPFilter(best.order, best.budget, self.readmit)

    def statement(self, tracker: "Tracker") -> str:
        """What it adds to the guarantee of the plan, in sentences."""
        private = (
            "Individual privacy losses are functions of the data: no guarantee covers them, nor who or how "
            "many were left out, nor any mean of them."
        )
        if self.epsilon is None or self.delta is None:
            return f"Every example's own privacy loss was tracked, which changes no guarantee. {private}"
        together = "" if self.continues is None else ", this run and those that it continues taken together,"
        return (
            f"An individual filter ({tracker.describe()}) left each example out of every step that would "
            "have taken its own loss past its budget: what is released"
            f"{together} is also ({exact(self.epsilon)}, {exact(self.delta)})-differentially private for one "
            "example under zero-out adjacency. Every example was charged at every step that it was not left "
            "out of for the norm of its own clipped gradient there, whether it was in the batch or not. "
            f"{private}"
        )


class Tracker(Protocol):
    """What follows the examples of a run; its records are pytrees of arrays with a row an example."""

    @property
    def accountant(self) -> Any:
        """Of norms, without a filter."""
        ...

    @property
    def filter(self) -> Any:
        """Who may take part, or None."""
        ...

    def init(self, num_examples: int) -> Any:
        """Nothing spent."""
        ...

    def step(self, records, norms) -> tuple[Any, jax.Array]:
        """(records, (rows,) bool: who is let in) of some rows; norms in units of the clip norm; jittable."""
        ...

    def describe(self) -> str:
        """The filter, a clause."""
        ...

    def epsilon(self, records, delta: float) -> np.ndarray:
        """(num_examples,) float64. **Private.**"""
        ...

    def renyi_epsilon(self, records, delta: float) -> np.ndarray:
        """(num_examples,) float64, by Renyi divergences where steps are sampled. **Private.**"""
        ...


class FullBatchRecords(NamedTuple):
    """A row an example: squared mu so far. **Private.**"""

    spent: Any
    """(num_examples,) float: see `FilterState`."""
    rest: Any
    """(num_examples,) float: what rounding left over."""
    active: Any
    """(num_examples,) bool: in the last step's sum."""


class SampledRecords(NamedTuple):
    """A row an example: steps in each bucket of norms, Renyi divergence spent so far. **Private.**"""

    counts: Any
    """(num_examples, buckets) int32; steps that it was left out of are in the last bucket, of norm 0."""
    refused: Any
    """(num_examples,) int32: 0, or norms that were no numbers."""
    spent: Any
    """(num_examples,) float, at the filter's order; 0 without a filter."""
    rest: Any
    """(num_examples,) float: what rounding left over."""
    active: Any
    """(num_examples,) bool: let into the last step's sum if sampled."""


@dataclass(frozen=True)
class FullBatches:
    """Follows the examples of DP-GD: each step is Gaussian, an example's mu is exact."""

    accountant: GDPIndividualAccountant
    filter: IndividualGDPFilter | None

    def init(self, num_examples: int) -> FullBatchRecords:
        """Nothing spent."""
        zeros = jnp.zeros(num_examples, jnp.float32)
        return FullBatchRecords(zeros, zeros, jnp.ones(num_examples, bool))

    def step(self, records: FullBatchRecords, norms) -> tuple[FullBatchRecords, jax.Array]:
        """(records, (rows,) bool: who is let in) of some rows; norms in units of the clip norm; jittable."""
        state = FilterState(*records, jnp.zeros((), jnp.int32))
        if self.filter is None:
            after = self.accountant.update(state, norms)
            return FullBatchRecords(*after[:3]), after.active
        mu = norms * (1.0 / self.accountant.noise_multiplier)
        after, active = self.filter.step(state, mu)
        return FullBatchRecords(*after[:3]), active

    def describe(self) -> str:
        """The filter, a clause."""
        assert self.filter is not None
        return f"of mu {exact(self.filter.budget_mu)}, Gaussian steps of full batches"

    def epsilon(self, records: FullBatchRecords, delta: float) -> np.ndarray:
        """(num_examples,) float64. **Private.**"""
        return self.accountant.epsilon(FilterState(*records, 0), delta)

    def renyi_epsilon(self, records: FullBatchRecords, delta: float) -> np.ndarray:
        """As `epsilon`: mu says all. **Private.**"""
        return self.epsilon(records, delta)


@dataclass(frozen=True)
class Sampled:
    """Follows the examples of Poisson DP-SGD: steps are counted in buckets of norms."""

    accountant: RDPIndividualAccountant
    filter: IndividualRDPFilter | None

    def init(self, num_examples: int) -> SampledRecords:
        """No steps."""
        zeros = jnp.zeros(num_examples, jnp.float32)
        counts = self.accountant.init(num_examples)
        return SampledRecords(*counts, zeros, zeros, jnp.ones(num_examples, bool))

    def step(self, records: SampledRecords, norms) -> tuple[SampledRecords, jax.Array]:
        """(records, (rows,) bool: who is let in if sampled); norms in units of the clip norm; jittable."""
        bucket, known = self.accountant.bucket_of(norms)
        counts = CountState(records.counts, records.refused)
        state = FilterState(records.spent, records.rest, records.active, jnp.zeros((), jnp.int32))
        if self.filter is None:
            return SampledRecords(*self.accountant.count(counts, bucket, known), *state[:3]), state.active
        cost = jnp.where(known, jnp.asarray(self._costs())[bucket], jnp.nan)
        after, active = self.filter.step(state, cost)
        nothing = self.accountant.grid.sigmas.size - 1
        counts = self.accountant.count(counts, jnp.where(active, bucket, nothing), known)
        return SampledRecords(*counts, *after[:3]), active

    def _costs(self) -> np.ndarray:
        """(buckets,) float32, rounded up: the divergence of a step at the filter's order."""
        assert self.filter is not None
        exact_costs = subsampled_gaussian_rdp(
            self.accountant.sampling_probability, self.accountant.charged_sigmas, (self.filter.order,)
        )[:, 0]
        rounded = exact_costs.astype(np.float32)
        return np.where(rounded < exact_costs, np.nextafter(rounded, np.float32(np.inf)), rounded)

    def describe(self) -> str:
        """The filter, a clause."""
        assert self.filter is not None
        return f"Renyi divergence {exact(self.filter.budget)} at order {self.filter.order}, Poisson batches"

    def epsilon(self, records: SampledRecords, delta: float) -> np.ndarray:
        """(num_examples,) float64, of the Fourier accountant: for adaptive norms an estimate. **Private.**"""
        given = self.accountant
        finest = max(float(s) for s in given.charged_sigmas if math.isfinite(s)) / given.sampling_probability
        for half_width in (10.0, 40.0, 160.0):
            points = 2 ** max(14, math.ceil(math.log2(8 * half_width * finest)))
            bound = PLDIndividualAccountant(
                given.sampling_probability,
                given.noise_multiplier,
                given.clip_norm,
                given.grid,
                half_width,
                min(points, _MOST_POINTS),
            )
            found = bound.epsilon(CountState(records.counts, records.refused), delta)
            if np.isfinite(found).all() or 2 * points > _MOST_POINTS:
                break
        return found

    def renyi_epsilon(self, records: SampledRecords, delta: float) -> np.ndarray:
        """(num_examples,) float64, the best order of each, chosen after looking: a report. **Private.**"""
        return self.accountant.epsilon(CountState(records.counts, records.refused), delta)


@dataclass(frozen=True, eq=False)
class PrivateLosses:
    """What every example has spent in a run. **Private**: for whoever may see the data, not for publication.

    Its methods return NumPy arrays with one entry an example, in the order of the data.

    Attributes:
      steps: of the run.
      tracker: what followed the examples.
      records: of every example.
      fingerprint: of the data that the records are of.
    """

    steps: int
    tracker: Tracker = field(repr=False)
    records: Any = field(repr=False)
    fingerprint: str = field(repr=False)

    def epsilon(self, delta: float) -> np.ndarray:
        """(num_examples,) float64 at delta. **Private.**

        Full batches: exact, by mu-GDP. Sampled batches: the Fourier accountant, for norms that training
        chooses an estimate (proofs/individual.md, section 4).
        """
        return self.tracker.epsilon(self.records, _validate.open_probability("delta", delta))

    def renyi_epsilon(self, delta: float) -> np.ndarray:
        """(num_examples,) float64 at delta by Renyi divergences, for sampled batches. **Private.**"""
        return self.tracker.renyi_epsilon(self.records, _validate.open_probability("delta", delta))

    def active(self) -> np.ndarray:
        """(num_examples,) bool: whether it was let into the last step. **Private.**"""
        return np.asarray(self.records.active)


class IndividualTrainState(NamedTuple):
    """A `TrainState` and the records of all examples."""

    params: Any
    noise: NoiseState
    """Secret: it holds the key."""
    opt_state: Any
    private_individual: Any
    """**Private**; checkpoints have an item of this name."""


class IndividualStep(PrivateStep):
    """`step(state, all rows, sampled) -> (state, info)`: the step of `make_step` on who is let in."""

    def __init__(
        self,
        loss: Callable[..., jax.Array],
        private: Privatizer,
        optimizer: optax.GradientTransformation,
        tracker: Tracker,
        start,
        *,
        microbatch_size: int | None,
        normalize: bool,
        has_aux: bool = False,
    ):
        self._start = start

        def admit(records, squares):
            with jax.enable_x64(True):
                norms = _rounded_up(jnp.sqrt(squares) * 2.0**-private.grid.bits)
            return tracker.step(records, norms)

        def step(
            state: IndividualTrainState, rows, sampled, loss: Loss, fresh: Fresh | None, specs=()
        ) -> tuple[IndividualTrainState, StepInfo]:
            del specs  # of no mesh
            _by_device.refuse_several_devices(state=state, rows=rows, sampled=sampled, loss=loss)
            found, records = admitted_gradient_sum(
                loss.at(state.noise.step),
                state.params,
                rows,
                sampled,
                admit,
                state.private_individual,
                grid=private.grid,
                microbatch_size=microbatch_size,
                normalize=normalize,
                has_aux=has_aux,
            )
            after, info = advance(private, optimizer, TrainState(*state[:3]), found, sampled, fresh)
            return IndividualTrainState(*after, records), info

        super().__init__(step, as_loss(loss), private, optimizer)

    def init(self, params) -> IndividualTrainState:
        """The state before the first step."""
        return IndividualTrainState(*super().init(params), jax.tree.map(jnp.array, self._start))


def _rounded_up(values) -> jax.Array:
    """float64 as float32 that is not below it."""
    rounded = values.astype(jnp.float32)
    above = jnp.nextafter(rounded, jnp.full_like(rounded, jnp.inf))
    return jnp.where(rounded.astype(jnp.float64) < values, above, rounded)


@dataclass(frozen=True)
class Everyone:
    """All rows at every step, and who of them was sampled: charges are of everybody."""

    rows: Any
    on_device: Any

    def take(self, indices):
        """(all rows, (dataset_size,) bool)."""
        sampled = np.zeros(len(self.rows), bool)
        sampled[indices] = True
        return self.on_device, sampled


class Followed(NamedTuple):
    """What `fit` needs to run with individual accounting in place of what it has without."""

    step: IndividualStep
    batch: Everyone
    source_at: Callable[[Any, SamplerState | None], Sampler]
    statement: str
    report: Callable[[IndividualTrainState, int], PrivateLosses]
    bound: dict[str, str]
    """What the run is bound to under its secret key: the losses that it continues."""


def follow(
    individual: IndividualAccounting,
    plan: Plan,
    rows,
    loss: Callable[..., jax.Array],
    private: Privatizer,
    optimizer: optax.GradientTransformation,
    *,
    microbatch_size: int,
    normalize: bool,
    has_aux: bool = False,
) -> Followed:
    """The parts of a run that follows every example.

    Raises:
      ValueError: a plan whose steps are not independent, losses of another data set or of another tracker.
    """
    _validate.instance(
        "individual", individual, IndividualAccounting, "a train.individual.IndividualAccounting"
    )
    scheme, size = plan.mechanism.scheme, len(rows)
    tracker = individual.tracker(_probability(plan), plan.mechanism.noise_multiplier)
    start, before = tracker.init(size), individual.continues
    fingerprint = rows.fingerprint()
    if before is not None:
        _validate.instance("continues", before, PrivateLosses, "the private_individual of an earlier result")
        if before.fingerprint != fingerprint:
            raise ValueError("continues of individual must be of this data set, was of another one")
        if before.tracker != tracker:
            raise ValueError(
                "continues of individual must have this run's sampling probability, noise multiplier, buckets"
                f" and filter, had {before.tracker}"
            )
        start = before.records
    options: dict[str, Any] = dict(microbatch_size=microbatch_size, normalize=normalize, has_aux=has_aux)
    step = IndividualStep(loss, private, optimizer, tracker, start, **options)
    everyone = Everyone(rows, jax.tree.map(jnp.asarray, rows.take(np.arange(size), size)))

    def source_at(key, drawn: SamplerState | None) -> Sampler:
        # As long as the data set: everybody's gradient is computed anyway, and no batch is too large.
        if drawn is None:
            return Sampler(scheme, size, size, key)
        return Sampler.resume(scheme, size, size, drawn)

    def report(state: IndividualTrainState, steps: int) -> PrivateLosses:
        records = jax.tree.map(np.asarray, state.private_individual)
        earlier = 0 if before is None else before.steps
        return PrivateLosses(steps + earlier, tracker, records, fingerprint)

    statement = f"{plan.statement()} {individual.statement(tracker)}"
    bound = {} if before is None else {"continues": f"{before.steps} {digest(before.records)}"}
    return Followed(step, everyone, source_at, statement, report, bound)


def _probability(plan: Plan) -> float:
    """With which every example joins every batch on its own.

    Raises:
      ValueError: for a plan of another kind: nothing is proven of individual losses there.
    """
    mechanism, scheme = plan.mechanism, plan.mechanism.scheme
    rounds = scheme.independent_rounds
    if (
        rounds is None
        or rounds[1] != scheme.iterations
        or scheme.unit != "example"
        or scheme.batch_size_cap is not None
        or plan.truncation_delta is not None
    ):
        raise ValueError(
            "individual needs a plan whose examples join every batch independently (Poisson, nothing cut), "
            f"was {scheme.name}"
        )
    if mechanism.strategy.noise_copies:
        raise ValueError(
            "individual needs a plan of independent noise (one band): what is known of individual losses "
            f"adds steps up, was {mechanism.strategy.describe()}"
        )
    return float(rounds[0])
