"""Privacy filters as pure functions: `init`, then `step` with the cost of every example; jittable.

A filter decides which examples may participate *before* a step runs, from costs that depend on the example
and on previous releases alone, never on the batch. It fails closed: an example whose cost is NaN, negative or
infinite is inactive, and contributes nothing to the sum.

Sums have two parts (`spent` and its rounding compensation `rest`), so a million steps lose no accuracy, even
in float32. Squared mu may exceed a budget by half of a relative slack, whose other half covers the rounding
of squares and sums; every reported value includes the slack. Renyi divergences stay below the budget.

Source: arXiv 2209.15596, algorithms 1 and 2; proofs/individual.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon, gdp_mu
from jaxacct.common import validate as _validate
from jaxacct.individual.rdp import checked_orders, rdp_to_epsilon
from jaxacct.kernels.recurrence import two_sum


class FilterState(NamedTuple):
    """State of a filter; **private** for filters of examples.

    Attributes:
      spent: (num_examples,) or (num_examples, orders), float: charged so far, squared mu or Renyi divergence.
      rest: like `spent`: the rounding errors of the additions.
      active: (num_examples,) bool: participants of the last step.
      step: () int32: steps so far.
    """

    spent: Any
    rest: Any
    active: Any
    step: Any


def slack(dtype) -> float:
    """Relative slack on budgets: 1e-12 in float64, 2^-20 in float32, whose costs are rounded already."""
    return 1e-12 if jnp.dtype(dtype) == jnp.float64 else 2.0**-20


# Fraction of a target's budget that is reserved for float32's slack and its rounding of costs.
_BELOW = 1 - 2.0**-19


def add_exactly(total, rest, amount):
    """Return (total, rest) with `amount` added: Knuth's two-sum, renormalised, without rounding error."""
    rough, lost = two_sum(total, amount)
    rest = rest + lost
    new_total = rough + rest
    return new_total, rest - (new_total - rough)


def _of_the_examples(state: FilterState, cost):
    """Return `cost` as an array of the filter's dtype; refuse another number of examples."""
    cost = jnp.asarray(cost, state.spent.dtype)
    if cost.shape not in ((), state.spent.shape):
        raise ValueError(f"costs must have the shape {state.spent.shape} of the filter, got {cost.shape}")
    return cost


def _charge(state: FilterState, cost, budget):
    """Return whether the sum with `cost` is at most `budget`, and that sum: (fits, total, rest)."""
    cost = _of_the_examples(state, cost)
    total, rest = add_exactly(state.spent, state.rest, cost)
    # Written so that NaN compares false: an example with an unknown cost is inactive.
    fits = (total <= budget) & (cost >= 0) & jnp.isfinite(cost)
    return fits, total, rest


def _keep(state: FilterState, active, total, rest) -> FilterState:
    where = active if total.ndim == 1 else active[:, None]
    return FilterState(
        jnp.where(where, total, state.spent), jnp.where(where, rest, state.rest), active, state.step + 1
    )


def _empty(shape, num_examples: int) -> FilterState:
    zeros = jnp.zeros(shape)
    return FilterState(zeros, zeros, jnp.ones(num_examples, bool), jnp.zeros((), jnp.int32))


def spent_of(state: FilterState) -> np.ndarray:
    """Return the charged cost, float64 on the host, with the slack of its arithmetic: an upper bound."""
    exact = np.asarray(state.spent, np.float64) + np.asarray(state.rest, np.float64)
    return exact * (1 + slack(state.spent.dtype))


# A budget is in [1e-9, 1e9], as a noise multiplier: costs whose squares underflow in float32 are then below
# the slack of a filter for 2^31 steps together.


@dataclass(frozen=True)
class _MuFilter:
    """Filter with a budget of mu."""

    budget_mu: float

    def __post_init__(self):
        _validate.check_fields(self, budget_mu=_validate.noise_multiplier)

    @classmethod
    def from_epsilon_delta(cls, epsilon: float, delta: float, **options):
        """Return the filter of the largest B that is (epsilon, delta)-DP with all roundings in float32."""
        return cls(gdp_mu(epsilon, delta) * _BELOW, **options)

    def _limit(self, state: FilterState) -> float:
        """Return the largest sum of squares that fits, as a sum of that dtype: half of the slack is used."""
        return self.budget_mu**2 * (1 + slack(state.spent.dtype) / 2)


class OfExamples:
    """Filter with a budget for every example."""

    def init(self, num_examples: int) -> FilterState:
        """Return the state of `num_examples` examples before the first step."""
        return _empty(_validate.positive_integer("num_examples", num_examples), num_examples)


class OfSquares(OfExamples):
    """Squared mu of every example."""

    def mu(self, state: FilterState) -> np.ndarray:
        """Return (num_examples,) float64: the mu that each example has spent (**private**)."""
        return np.sqrt(spent_of(state))

    def epsilon(self, state: FilterState, delta: float) -> np.ndarray:
        """Return (num_examples,) float64: individual epsilons at delta (**private**)."""
        return gdp_epsilon(delta, self.mu(state))


@dataclass(frozen=True)
class GDPFilter(_MuFilter):
    """Filter with one budget for the data set (algorithm 2); steps cost that of the worst *possible* example.

    The cost must not be the maximum over the present examples, as in the paper's example: the halting step
    would then depend on the data.

    Attributes:
      budget_mu: B; everything released before the filter halts is `B sqrt(1 + slack)`-GDP, `slack` that of
        the dtype. `from_epsilon_delta` includes it.
    """

    def init(self, num_examples: int = 1) -> FilterState:
        """Return the state before the first step; `active` (1,)."""
        if num_examples != 1:
            raise ValueError(
                f"num_examples must be 1 for a filter of the whole data set, got {num_examples!r}"
            )
        return _empty(1, 1)

    def step(self, state: FilterState, mu) -> tuple[FilterState, jax.Array]:
        """Return (state, () bool: continue) for a mechanism that is mu-GDP for every possible example."""
        # A halted filter stays halted: the algorithm does not allow a later, cheaper mechanism.
        mu = _of_the_examples(state, mu)
        mu = jnp.where(state.active & (mu >= 0), mu, jnp.nan)
        active, total, rest = _charge(state, jnp.square(mu), self._limit(state))
        return _keep(state, active, total, rest), active[0]


@dataclass(frozen=True)
class IndividualGDPFilter(OfSquares, _MuFilter):
    """Filter with a budget for every example (algorithm 1), for full batches or any Gaussian pair.

    Attributes:
      budget_mu: B; everything released is `B sqrt(1 + slack)`-GDP for the removal of any example, `slack`
        that of the dtype. `from_epsilon_delta` includes it.
      readmit: whether an excluded example may return when it costs less; valid either way, as the charged
        squares always add up to at most B^2.
      spend_exactly: scale the contribution of an example that would cross such that it spends exactly the
        remaining budget; `step_and_scale` then returns scales below 1 (remark 3, whose sum of mu should be of
        squares).
    """

    readmit: bool = True
    spend_exactly: bool = False

    def step(self, state: FilterState, mu) -> tuple[FilterState, jax.Array]:
        """Return (state, (num_examples,) bool: may participate), `mu` being `clipped norm / noise std`.

        ValueError with `spend_exactly`, whose scales must be applied.
        """
        if self.spend_exactly:
            raise ValueError("spend_exactly needs step_and_scale: contributions have to be scaled")
        mu = _of_the_examples(state, mu)
        mu = jnp.where((mu >= 0) & (self.readmit | state.active), mu, jnp.nan)
        active, total, rest = _charge(state, jnp.square(mu), self._limit(state))
        return _keep(state, active, total, rest), active

    def step_and_scale(self, state: FilterState, mu) -> tuple[FilterState, jax.Array]:
        """Return (state, (num_examples,) scales in [0, 1]): multiply each clipped contribution by its scale.

        An example that fits has scale 1; one that would cross has the scale that spends the remaining budget,
        rounded down; one without budget, or whose mu is not a number of at least 0, has scale 0.
        """
        dtype = state.spent.dtype
        mu = _of_the_examples(state, mu)
        known = (mu >= 0) & jnp.isfinite(mu)
        left = (self.budget_mu**2 - state.spent) - state.rest
        # The rounding residue of an exactly spent budget counts as 0.
        left = jnp.where(left > self.budget_mu**2 * slack(dtype), left, 0.0)
        crossing = jnp.sqrt(left) / jnp.where(mu > 0, mu, 1)
        partial = jnp.maximum(0.0, crossing * (1 - 4 * jnp.finfo(dtype).eps))
        scale = jnp.where(known, jnp.where(jnp.square(mu) <= left, 1.0, jnp.minimum(1.0, partial)), 0.0)
        if not self.readmit:
            scale = jnp.where(state.active, scale, 0.0)
        charged = jnp.where(known, jnp.square(scale * jnp.where(known, mu, 0)), 0)
        total, rest = add_exactly(state.spent, state.rest, charged)
        # After a partial step no budget is left, so such an example becomes inactive.
        return _keep(state, scale > 0, total, rest)._replace(active=(scale == 1)), scale


@dataclass(frozen=True)
class IndividualRDPFilter(OfExamples):
    """Filter with a Renyi budget for every example: rigorous for Poisson-sampled steps with adaptive norms.

    An example is active while the divergences charged to it at one order, fixed beforehand, stay within the
    budget. The release is then (order, budget)-RDP for the removal and the addition of any example
    (Feldman and Zrnic 2021), where each charge covers both directions, as `subsampled_gaussian_rdp` does.

    Attributes:
      order: a, above 1, fixed before the first step.
      budget: of the Renyi divergence at that order.
      readmit: whether an excluded example may return when it costs less; valid either way.
    """

    order: int
    budget: float
    readmit: bool = True

    def __post_init__(self):
        object.__setattr__(self, "order", int(checked_orders([self.order])[0]))
        _validate.check_fields(self, budget=_validate.noise_multiplier)

    @classmethod
    def from_epsilon_delta(cls, epsilon: float, delta: float, order: int, **options):
        """Return the filter of the largest budget at `order` that is (epsilon, delta)-DP in float32.

        ValueError where no budget is small enough.
        """
        order = int(checked_orders([order])[0])
        epsilon = _validate.positive_number("epsilon", epsilon)
        log_delta = np.log(_validate.open_probability("delta", delta))
        budget = epsilon - np.log1p(-1 / order) + (log_delta + np.log(order)) / (order - 1)
        if not budget > 0:
            raise ValueError(f"order must be larger for epsilon {epsilon:g} at delta {delta:g}, got {order}")
        return cls(order, float(budget) * _BELOW, **options)

    def step(self, state: FilterState, rdp) -> tuple[FilterState, jax.Array]:
        """Return (state, (num_examples,) bool: may participate); `rdp` is of this step, at `order`."""
        rdp = _of_the_examples(state, rdp)
        rdp = jnp.where(self.readmit | state.active, rdp, jnp.nan)
        # Half of the slack covers the rounding of sums.
        active, total, rest = _charge(state, rdp, self.budget * (1 - slack(state.spent.dtype) / 2))
        return _keep(state, active, total, rest), active

    def epsilon(self, state: FilterState, delta: float) -> np.ndarray:
        """Return (num_examples,) float64: individual epsilons at delta (**private**)."""
        return rdp_to_epsilon(spent_of(state)[:, None], [self.order], delta)[0]
