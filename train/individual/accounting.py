"""What a run keeps of every example, and what it reports of it.

A tracker is the accountant and the filter that follow the examples of a run. Its records are pytrees of
arrays with one row an example, **private**. `init(num_examples)` returns records of nothing spent;
`step(records, norms)` returns records and who is admitted, (rows,) bool, of norms in units of the clip norm,
jittable; `epsilon` and `renyi_epsilon` return (num_examples,) float64.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import individual
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.individual import IndividualGDPFilter, IndividualRDPFilter, RDPIndividualAccountant
from jaxacct.individual.rdp import ORDERS

_MIN_NORM = 1 / 32  # as a share of the clip norm: smaller norms, but 0, are charged as this


class Records(NamedTuple):
    """What each example has spent (**private**): in squared mu, or at the order of a filter.

    Attributes:
      spent: (num_examples,) float: see `FilterState`.
      rest: (num_examples,) float: rounding errors of the additions.
      active: (num_examples,) bool: admitted to the last step's sum, of sampled batches if sampled.
      counted: `CountState` of sampled batches; steps that an example was left out of are in the last, of norm
        0.
    """

    spent: Any
    rest: Any
    active: Any
    counted: Any = ()

    @classmethod
    def empty(cls, num_examples: int, counted: Any = ()) -> "Records":
        """Return records of nothing spent."""
        zeros = jnp.zeros(num_examples, jnp.float32)
        return cls(zeros, zeros, jnp.ones(num_examples, bool), counted)

    @property
    def filtered(self) -> individual.FilterState:
        return individual.FilterState(*self[:3], 0)


@dataclass(frozen=True)
class FullBatches:
    """Tracker of DP-GD: each step is Gaussian, an example's mu is exact."""

    accountant: individual.GDPIndividualAccountant
    filter: IndividualGDPFilter | None

    def init(self, num_examples: int) -> Records:
        return Records.empty(num_examples)

    def step(self, records: Records, norms) -> tuple[Records, jax.Array]:
        if self.filter is None:
            after = self.accountant.update(records.filtered, norms)
        else:
            after, _ = self.filter.step(records.filtered, norms * (1.0 / self.accountant.noise_multiplier))
        return Records(*after[:3]), after.active

    def describe(self) -> str:
        """Describe the filter, in a clause."""
        assert self.filter is not None
        return f"of mu {exact(self.filter.budget_mu)}, Gaussian steps of full batches"

    def epsilon(self, records: Records, delta: float) -> np.ndarray:
        return self.accountant.epsilon(records.filtered, delta)

    renyi_epsilon = epsilon  # mu is exact


@dataclass(frozen=True)
class Sampled:
    """Tracker of Poisson DP-SGD: steps are counted in buckets of norms."""

    accountant: RDPIndividualAccountant
    filter: IndividualRDPFilter | None

    def init(self, num_examples: int) -> Records:
        return Records.empty(num_examples, self.accountant.init(num_examples))

    def step(self, records: Records, norms) -> tuple[Records, jax.Array]:
        bucket, known = self.accountant.bucket_of(norms)
        after = records.filtered
        if self.filter is not None:
            cost = jnp.where(known, jnp.asarray(self._costs())[bucket], jnp.nan)
            after, active = self.filter.step(after, cost)
            bucket = jnp.where(active, bucket, self.accountant.grid.sigmas.size - 1)  # excluded
        counted = self.accountant.count(records.counted, bucket, known)
        return Records(*after[:3], counted), after.active

    def _costs(self) -> np.ndarray:
        """Return (buckets,) float32, rounded up: the divergence of a step at the filter's order."""
        assert self.filter is not None
        costs = individual.subsampled_gaussian_rdp(
            self.accountant.sampling_probability, self.accountant.charged_sigmas, (self.filter.order,)
        )[:, 0]
        rounded = costs.astype(np.float32)
        return np.where(rounded < costs, np.nextafter(rounded, np.float32(np.inf)), rounded)

    def describe(self) -> str:
        """Describe the filter, in a clause."""
        assert self.filter is not None
        return f"Renyi divergence {exact(self.filter.budget)} at order {self.filter.order}, Poisson batches"

    def epsilon(self, records: Records, delta: float) -> np.ndarray:
        """Epsilon of the Fourier accountant: an estimate for adaptive norms."""
        given = self.accountant
        fixed = given.sampling_probability, given.noise_multiplier, given.clip_norm, given.grid
        return individual.PLDIndividualAccountant(*fixed).epsilon(records.counted, delta)

    def renyi_epsilon(self, records: Records, delta: float) -> np.ndarray:
        """Epsilon at the best order of each example, chosen afterwards: a report."""
        return self.accountant.epsilon(records.counted, delta)


Tracker = FullBatches | Sampled


@dataclass(frozen=True)
class IndividualAccounting:
    """What is kept of every example; with an epsilon examples are also filtered.

    Without `epsilon` losses are tracked and nothing else changes: the same plan and keys give the same bits.
    With it no example participates in a step that would take its own loss past (epsilon, delta), so the
    release is (epsilon, delta)-DP for one example under zero-out adjacency, even where the plan's epsilon is
    larger. Training runs to the last step for any number of admitted examples: stopping early would reveal
    it.

    Attributes:
      epsilon, delta: budget of each example, both or neither; epsilon is a natural log.
      readmit: whether an excluded example may return when its gradient is small again; sound either way.
      order: of the Renyi filter where batches are sampled; by default the one that lasts longest for an
        example of the clip norm, a public choice. Full batches have a filter of mu.
      buckets: number of distinguished norms where batches are sampled; memory is examples x buckets x 4
        bytes.
    """

    epsilon: float | None = None
    delta: float | None = None
    readmit: bool = True
    order: int | None = None
    buckets: int = 40

    def __post_init__(self):
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta of individual must be given together, or neither")
        if self.epsilon is not None:
            _validate.positive_number("epsilon", self.epsilon)
            _validate.open_probability("delta", self.delta)
        elif self.order is not None:
            raise ValueError("order of individual must not be given without an epsilon: nothing is filtered")
        _validate.positive_integer("buckets", self.buckets)

    def tracker(self, sampling_probability: float, noise_multiplier: float) -> Tracker:
        """Return the tracker of a run; ValueError for an epsilon that no filter can keep at this delta."""
        if sampling_probability == 1:
            if self.order is not None:
                raise ValueError("order of individual must not be given for full batches: no Renyi filter")
            mu = None
            if self.epsilon is not None and self.delta is not None:
                mu = IndividualGDPFilter.from_epsilon_delta(self.epsilon, self.delta, readmit=self.readmit)
            return FullBatches(individual.GDPIndividualAccountant(noise_multiplier, 1.0), mu)
        grid = individual.SigmaGrid(noise_multiplier, noise_multiplier / _MIN_NORM, self.buckets)
        accountant = RDPIndividualAccountant(sampling_probability, noise_multiplier, 1.0, grid)
        return Sampled(accountant, self._renyi_filter(accountant))

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
                f"epsilon of individual must be larger at delta {self.delta:g}, got {self.epsilon:g}: no "
                "Renyi order has a positive budget"
            )
        largest = accountant.charged_sigmas[0]
        costs = individual.subsampled_gaussian_rdp(accountant.sampling_probability, largest, tuple(filters))
        best = max(zip(filters.values(), costs, strict=True), key=lambda pair: pair[0].budget / pair[1])[0]
        return IndividualRDPFilter(best.order, best.budget, self.readmit)

    def statement(self, tracker: Tracker) -> str:
        """Return what it adds to the guarantee of the plan, in sentences."""
        private = (
            "Individual privacy losses are functions of the data: no guarantee covers them, nor who or how "
            "many were left out, nor any mean of them."
        )
        if self.epsilon is None or self.delta is None:
            return f"Every example's own privacy loss was tracked, which changes no guarantee. {private}"
        return (
            f"An individual filter ({tracker.describe()}) left each example out of every step that would "
            "have taken its own loss past its budget: what is released is also "
            f"({exact(self.epsilon)}, {exact(self.delta)})-differentially private for one example under "
            "zero-out adjacency. Every example was charged at every step that it was not left out of for the "
            f"norm of its own clipped gradient there, whether it was in the batch or not. {private}"
        )


@dataclass(frozen=True, eq=False)
class PrivateLosses:
    """Every example's own loss in a run, in the order of the data. **Private**, not for publication.

    Attributes:
      steps: of the run.
      tracker: the accountant and the filter of the run.
      records: of every example.
    """

    steps: int
    tracker: Tracker = field(repr=False)
    records: Any = field(repr=False)

    def epsilon(self, delta: float) -> np.ndarray:
        """Return (num_examples,) float64 at delta (**private**).

        Full batches: exact, by mu-GDP. Sampled batches: the Fourier accountant, an estimate where norms
        depend on training (proofs/individual.md, section 4).
        """
        return self.tracker.epsilon(self.records, _validate.open_probability("delta", delta))

    def renyi_epsilon(self, delta: float) -> np.ndarray:
        """Return (num_examples,) float64 at delta by Renyi divergences, for sampled batches (**private**)."""
        return self.tracker.renyi_epsilon(self.records, _validate.open_probability("delta", delta))

    def active(self) -> np.ndarray:
        """Return (num_examples,) bool: admitted to the last step (**private**)."""
        return np.asarray(self.records.active)
