"""Trackers: the accountant and the filter that follow the examples of a run.

Their records are pytrees of arrays with one row an example, **private**. `init(num_examples)` returns records
of nothing spent; `step(records, norms)` returns records and who is admitted, (rows,) bool, of norms in units
of the clip norm, jittable; `epsilon` and `renyi_epsilon` return (num_examples,) float64.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common.records import exact
from jaxacct.individual import (
    FilterState,
    GDPIndividualAccountant,
    IndividualGDPFilter,
    IndividualRDPFilter,
    PLDIndividualAccountant,
    RDPIndividualAccountant,
    subsampled_gaussian_rdp,
)
from jaxacct.individual.accountants import CountState

_MAX_POINTS = 2**21


class FullBatchRecords(NamedTuple):
    """Squared mu of each example (**private**)."""

    spent: Any
    """(num_examples,) float: see `FilterState`."""
    rest: Any
    """(num_examples,) float: rounding errors of the additions."""
    active: Any
    """(num_examples,) bool: in the last step's sum."""


class SampledRecords(NamedTuple):
    """Steps in each bucket of norms and Renyi divergence of each example (**private**)."""

    counts: Any
    """(num_examples, buckets) int32; excluded steps are in the last bucket, of norm 0."""
    refused: Any
    """(num_examples,) int32: number of norms that were not numbers."""
    spent: Any
    """(num_examples,) float, at the filter's order; 0 without a filter."""
    rest: Any
    """(num_examples,) float: rounding errors of the additions."""
    active: Any
    """(num_examples,) bool: admitted to the last step's sum if sampled."""


@dataclass(frozen=True)
class FullBatches:
    """Tracker of DP-GD: each step is Gaussian, an example's mu is exact."""

    accountant: GDPIndividualAccountant
    filter: IndividualGDPFilter | None

    def init(self, num_examples: int) -> FullBatchRecords:
        zeros = jnp.zeros(num_examples, jnp.float32)
        return FullBatchRecords(zeros, zeros, jnp.ones(num_examples, bool))

    def step(self, records: FullBatchRecords, norms) -> tuple[FullBatchRecords, jax.Array]:
        state = FilterState(*records, jnp.zeros((), jnp.int32))
        if self.filter is None:
            after = self.accountant.update(state, norms)
        else:
            after, _ = self.filter.step(state, norms * (1.0 / self.accountant.noise_multiplier))
        return FullBatchRecords(*after[:3]), after.active

    def describe(self) -> str:
        """Describe the filter, in a clause."""
        assert self.filter is not None
        return f"of mu {exact(self.filter.budget_mu)}, Gaussian steps of full batches"

    def epsilon(self, records: FullBatchRecords, delta: float) -> np.ndarray:
        return self.accountant.epsilon(FilterState(*records, 0), delta)

    renyi_epsilon = epsilon  # mu is exact


@dataclass(frozen=True)
class Sampled:
    """Tracker of Poisson DP-SGD: steps are counted in buckets of norms."""

    accountant: RDPIndividualAccountant
    filter: IndividualRDPFilter | None

    def init(self, num_examples: int) -> SampledRecords:
        zeros = jnp.zeros(num_examples, jnp.float32)
        counts = self.accountant.init(num_examples)
        return SampledRecords(*counts, zeros, zeros, jnp.ones(num_examples, bool))

    def step(self, records: SampledRecords, norms) -> tuple[SampledRecords, jax.Array]:
        bucket, known = self.accountant.bucket_of(norms)
        counts = CountState(records.counts, records.refused)
        state = FilterState(records.spent, records.rest, records.active, jnp.zeros((), jnp.int32))
        if self.filter is None:
            return SampledRecords(*self.accountant.count(counts, bucket, known), *state[:3]), state.active
        cost = jnp.where(known, jnp.asarray(self._costs())[bucket], jnp.nan)
        after, active = self.filter.step(state, cost)
        excluded = self.accountant.grid.sigmas.size - 1
        counts = self.accountant.count(counts, jnp.where(active, bucket, excluded), known)
        return SampledRecords(*counts, *after[:3]), active

    def _costs(self) -> np.ndarray:
        """Return (buckets,) float32, rounded up: the divergence of a step at the filter's order."""
        assert self.filter is not None
        costs = subsampled_gaussian_rdp(
            self.accountant.sampling_probability, self.accountant.charged_sigmas, (self.filter.order,)
        )[:, 0]
        rounded = costs.astype(np.float32)
        return np.where(rounded < costs, np.nextafter(rounded, np.float32(np.inf)), rounded)

    def describe(self) -> str:
        """Describe the filter, in a clause."""
        assert self.filter is not None
        return f"Renyi divergence {exact(self.filter.budget)} at order {self.filter.order}, Poisson batches"

    def epsilon(self, records: SampledRecords, delta: float) -> np.ndarray:
        """Epsilon of the Fourier accountant: an estimate for adaptive norms."""
        given = self.accountant
        finest = max(float(s) for s in given.charged_sigmas if math.isfinite(s)) / given.sampling_probability
        fixed = given.sampling_probability, given.noise_multiplier, given.clip_norm, given.grid
        for half_width in (10.0, 40.0, 160.0):
            points = 2 ** max(14, math.ceil(math.log2(8 * half_width * finest)))
            bound = PLDIndividualAccountant(*fixed, half_width, min(points, _MAX_POINTS))
            found = bound.epsilon(CountState(records.counts, records.refused), delta)
            if np.isfinite(found).all() or 2 * points > _MAX_POINTS:
                break
        return found

    def renyi_epsilon(self, records: SampledRecords, delta: float) -> np.ndarray:
        """Epsilon at the best order of each example, chosen afterwards: a report."""
        return self.accountant.epsilon(CountState(records.counts, records.refused), delta)


Tracker = FullBatches | Sampled
