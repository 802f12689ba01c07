"""Individual accountants: a small state per example, updated in the training step, queried afterwards.

Everything they return is **private**: a function of the data that no guarantee covers.

`update` takes the norms of *all* examples at the current parameters, whether they were sampled or not: the
cost of an example depends on its gradient and on previous releases, never on the draw of the batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.common import validate as _validate
from jaxacct.individual.buckets import SigmaGrid
from jaxacct.individual.filters import FilterState, OfSquares, add_exactly
from jaxacct.individual.fourier import FourierAccountant
from jaxacct.individual.rdp import ORDERS, rdp_to_epsilon, subsampled_gaussian_rdp

# Norms may exceed the clip norm by this fraction, for rounding; every bucket is charged for it.
NORM_SLACK = 1e-6


class CountState(NamedTuple):
    """Steps of each example in each bucket (**private**).

    Attributes:
      counts: (num_examples, buckets) int32.
      refused: (num_examples,) int32: number of norms that were not in [0, clip norm]. Such an example has no
        guarantee.
    """

    counts: Any
    refused: Any


class _OfNorms:
    """Accountant with a `clip_norm`, and `init` and `update` of a state."""

    clip_norm: float
    init: Callable[..., Any]

    def from_norms(self, norms) -> Any:
        """Return the state after the steps of `norms`, (steps, num_examples), checked on the host.

        A one-line ValueError, for a negative or unclipped norm, replaces a state that becomes infinite later.
        """
        norms, clip_norm = np.asarray(norms), self.clip_norm
        if not np.all(norms >= 0) or not np.all(norms <= clip_norm * (1 + NORM_SLACK)):
            raise ValueError(
                f"norms must be in [0, {clip_norm:g}] (clipped), got [{np.min(norms):g}, {np.max(norms):g}]"
            )
        return _scanned(self, self.init(norms.shape[1]), norms)


@functools.partial(jax.jit, static_argnums=0)
def _scanned(accountant, state, norms):
    return jax.lax.scan(lambda state, row: (accountant.update(state, row), None), state, norms)[0]


@dataclass(frozen=True)
class GDPIndividualAccountant(OfSquares, _OfNorms):
    """Full-batch Gaussian steps: the individual mu is `sqrt(sum norm^2) / (sigma C)`; exact, rounded up.

    A norm above 0 counts as a squared mu of at least 2^-100, as smaller squares may underflow.

    Attributes:
      noise_multiplier: sigma, noise standard deviation per unit of clip norm.
      clip_norm: C.
    """

    noise_multiplier: float
    clip_norm: float

    def __post_init__(self):
        number = _validate.noise_multiplier
        _validate.check_fields(self, noise_multiplier=number, clip_norm=number)

    def update(self, state: FilterState, norms) -> FilterState:
        """Return the state after a step in which clipped gradients had these (num_examples,) norms; jittable.

        A norm that is not a number of at least 0 makes the example's mu infinite.
        """
        norms = jnp.asarray(norms, state.spent.dtype)
        norms = jnp.where(norms >= 0, norms, jnp.inf)
        mu = norms * (1.0 / (self.noise_multiplier * self.clip_norm))
        # As integers: hardware may take a subnormal norm for 0.
        bits = jnp.int64 if norms.dtype == jnp.float64 else jnp.int32
        is_positive = jax.lax.bitcast_convert_type(jnp.abs(norms), bits) > 0
        square = jnp.maximum(jnp.square(mu), jnp.where(is_positive, 2.0**-100, 0.0))
        total, rest = add_exactly(state.spent, state.rest, square)
        broken = ~jnp.isfinite(total)
        return FilterState(
            jnp.where(broken, jnp.inf, total), jnp.where(broken, 0, rest), state.active, state.step + 1
        )

    def delta(self, state: FilterState, epsilon: float) -> np.ndarray:
        """Return (num_examples,) float64 at epsilon (**private**)."""
        return gdp_delta(epsilon, self.mu(state))


@dataclass(frozen=True)
class _Bucketed(_OfNorms):
    """Base of accountants of Poisson-sampled steps: each step is a count in a bucket of norms."""

    sampling_probability: float
    noise_multiplier: float
    clip_norm: float
    grid: SigmaGrid

    def __post_init__(self):
        _validate.check_fields(self, sampling_probability=_validate.probability)
        number = _validate.noise_multiplier
        _validate.check_fields(self, noise_multiplier=number, clip_norm=number)
        if self.grid.smallest != self.noise_multiplier:
            raise ValueError(
                f"grid must begin at the noise multiplier {self.noise_multiplier:g}, "
                f"began at {self.grid.smallest:g}"
            )

    @property
    def charged_sigmas(self) -> np.ndarray:
        """(buckets,) float64: the noise ratio at which each bucket is charged, with the slack of norms."""
        return self.grid.sigmas / (1 + NORM_SLACK)

    def init(self, num_examples: int) -> CountState:
        """Return the state without steps."""
        n = _validate.positive_integer("num_examples", num_examples)
        return CountState(jnp.zeros((n, self.grid.sigmas.size), jnp.int32), jnp.zeros(n, jnp.int32))

    def bucket_of(self, norms) -> tuple[jax.Array, jax.Array]:
        """Return the bucket of each norm, rounded to the expensive side, and whether it is valid; jittable.

        Args:
          norms: (num_examples,) float.

        Returns:
          bucket: (num_examples,) integers below the number of buckets; 0, the most expensive, if not valid.
          known: (num_examples,) bool, whether the norm is in [0, clip norm].
        """
        norms = jnp.asarray(norms)
        wide = norms.dtype == jnp.float64
        norms = norms if wide else norms.astype(jnp.float32)
        dtype, bits = (np.float64, np.int64) if wide else (np.float32, np.int32)
        limits = self.grid.norm_limits(self.noise_multiplier, self.clip_norm, dtype)
        known = (norms >= 0) & (norms <= jnp.asarray(self.clip_norm * (1 + NORM_SLACK), dtype))
        # Limits decrease: a norm belongs to the last bucket whose limit it keeps; within the slack, to the
        # first. Compared as integers, which have the same order for numbers of at least 0: hardware may flush
        # a subnormal norm to 0, and it must not be charged 0.
        pattern = jax.lax.bitcast_convert_type(jnp.abs(norms), bits)
        reached = pattern[:, None] <= jnp.asarray(limits.view(bits))[None]
        return jnp.where(known, jnp.maximum(0, reached.sum(axis=1) - 1), 0), known

    def update(self, state: CountState, norms) -> CountState:
        """Return the state after a step of these (num_examples,) norms of *all* examples; jittable.

        Memory is linear in examples times buckets.
        """
        return self.count(state, *self.bucket_of(norms))

    def count(self, state: CountState, bucket, known) -> CountState:
        """Return the state after one step of examples in the (num_examples,) buckets of `bucket_of`."""
        rows = jnp.arange(state.counts.shape[0])
        counts = state.counts.at[rows, bucket].add(known.astype(jnp.int32))
        return CountState(counts, state.refused + (~known).astype(state.refused.dtype))


def _for_each_vector(state: CountState, ask, unknown: float) -> np.ndarray:
    """Return `ask(vectors)`, called once per distinct count vector; `unknown` where a norm was invalid."""
    vectors, inverse = np.unique(np.asarray(state.counts), axis=0, return_inverse=True)
    return np.where(np.asarray(state.refused) > 0, unknown, ask(vectors)[inverse.reshape(-1)])


@dataclass(frozen=True)
class PLDIndividualAccountant(_Bucketed):
    """Accountant of Poisson-sampled Gaussian steps: counts in buckets of norms, then the Fourier accountant.

    An upper bound, with all errors reserved, for norms that do not depend on previous releases. Where norms
    are chosen adaptively, as in training, the privacy-loss distribution of the realised norms is *not* proven
    to bound the adaptive composition, and these values are estimates (proofs/individual.md). The rigorous
    adaptive statements are those of `IndividualRDPFilter` and `RDPIndividualAccountant`'s orders.

    Attributes:
      sampling_probability: q.
      noise_multiplier: sigma, noise standard deviation per unit of clip norm; the grid's smallest ratio.
      clip_norm: C.
      grid: buckets of effective noise.
    """

    @functools.cached_property
    def fourier(self) -> FourierAccountant:
        """Fourier accountant of these buckets."""
        return FourierAccountant(self.sampling_probability, tuple(map(float, self.charged_sigmas)))

    def epsilon(self, state: CountState, delta: float) -> np.ndarray:
        """Return (num_examples,) float64 at delta: one query per distinct count vector (**private**)."""
        return _for_each_vector(state, lambda counts: self.fourier.epsilon(delta, counts), np.inf)

    def delta(self, state: CountState, epsilon: float) -> np.ndarray:
        """Return (num_examples,) float64 at epsilon (**private**)."""
        return _for_each_vector(state, lambda counts: self.fourier.delta(epsilon, counts), 1.0)


@dataclass(frozen=True)
class RDPIndividualAccountant(_Bucketed):
    """Accountant of Poisson-sampled Gaussian steps at Renyi orders.

    At an order fixed beforehand this is rigorous for adaptively chosen norms whose sums are bounded by a
    filter; the best order of each example, chosen from the values, is a report and not a guarantee.

    Attributes as of `PLDIndividualAccountant`, and `orders`: whole numbers of at least 2.
    """

    orders: tuple[int, ...] = ORDERS

    def costs(self) -> np.ndarray:
        """Return (buckets, orders) float64: the divergence of one step."""
        return subsampled_gaussian_rdp(self.sampling_probability, self.charged_sigmas, self.orders)

    def epsilon(self, state: CountState, delta: float) -> np.ndarray:
        """Return (num_examples,) float64 at delta, the best order of each (**private**)."""
        return _for_each_vector(
            state, lambda counts: rdp_to_epsilon(counts @ self.costs(), self.orders, delta)[0], np.inf
        )
