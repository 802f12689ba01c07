"""What is calibrated, the grid of its noise multipliers, and the analytic candidate that always exists."""

import bisect
import dataclasses
import functools
import itertools
import math

from jaxacct.accountants import analytic, unamplified
from jaxacct.common import validate
from jaxacct.core.claim import Claim, Target
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme
from jaxacct.statistics import roots
from jaxacct.statistics.bounds import Budget
from jaxacct.strategies import Strategy

MIN_NOISE_MULTIPLIER = 0.05
"""Smallest noise multiplier of a search: some targets hold at any, and privacy loss distributions of less
take minutes."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A mechanism without its noise multiplier, and its data set."""

    scheme: Scheme
    strategy: Strategy
    adjacency: str
    dataset_size: int | None
    truncate_to: int | None

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return Mechanism(self.scheme, self.strategy, noise_multiplier, self.adjacency)

    def claim(self, mechanism: Mechanism, target: Target) -> Claim:
        """Return the claim that a mechanism of the problem has a target."""
        return Claim(mechanism, target, self.dataset_size, self.truncate_to)

    def target(self, epsilon: float, delta: float, failure_fraction: float, compose_with) -> Target:
        """Return the target with a budget of all of delta but reserves for batch sizes, half at most."""
        whole = Target(epsilon, delta, Budget.split(delta, failure_fraction), compose_with)
        claim = self.claim(self.at(1.0), whole)
        truncation_delta = claim.truncation_delta or 0.0
        if not truncation_delta < delta / 2:
            raise ValueError(
                f"max_batch_size must be larger: truncating batches to {self.truncate_to} may cost "
                f"{truncation_delta:.3g} of {delta:g}; the scheme truncated-b-min-sep has likelihoods "
                "that account for the truncation"
            )
        return dataclasses.replace(whole, budget=Budget.split(delta - claim.reserved, failure_fraction))


def analytic_exponent(
    mechanism: Mechanism,
    target: Target,
    ratio: float,
    accountant: str | None = None,
    estimate: float | None = None,
) -> int:
    """Return the smallest grid exponent at which an analytic accountant proves the target's budget.

    The noise multiplier of `mechanism` is replaced by those of the grid; the search starts from `estimate`.
    ValueError when the composed event alone exceeds the target, or for a named `accountant` that does not
    cover the scheme.
    """
    epsilon, delta, compose_with = target.epsilon, target.budget.delta, target.compose_with
    top = unamplified.noise_multiplier_for(mechanism, epsilon, delta)
    last = math.ceil(math.log(top) / math.log(ratio)) + 1

    def excess(exponent: int) -> float:
        if not MIN_NOISE_MULTIPLIER <= ratio**exponent <= validate.MAX_NOISE:
            return math.inf
        noisy = dataclasses.replace(mechanism, noise_multiplier=ratio**exponent)
        return math.log(analytic.bound_by(accountant, noisy, epsilon, compose_with)[1] / delta)

    start, step = last, max(1, round(0.03 / math.log(ratio)))
    if estimate is not None:
        start, step = min(last, round(math.log(estimate) / math.log(ratio))), 1
    found = first_root(excess, start, step, last + math.ceil(math.log(1e4) / math.log(ratio)))
    if found is None and compose_with is None:
        which = "any accountant" if accountant is None else f"accountant {accountant}"
        raise ValueError(f"delta must be larger for {which}, got a budget of {delta:g}")
    if found is None:
        raise ValueError(
            f"compose_with must leave room for the mechanism at epsilon {epsilon:g}, delta {delta:g}; "
            "it alone exceeds the target"
        )
    return found


def first_root(excess, start: int, step: int, stop: int) -> int | None:
    """Return the smallest integer from which a falling function is at most 0, None above `stop`.

    Few evaluations where it is nearly straight: steps from `start` are doubled up to a change of sign, which
    interpolation narrows, every third time bisection.
    """
    excess = functools.cache(excess)
    low, high = roots.bracket(lambda at: excess(at) <= 0, start, step, highest=stop)
    if high > stop:
        return None
    if low == -math.inf:
        raise ValueError("excess must be above 0 somewhere")
    for turn in itertools.count():
        if high - low <= 1:
            return int(high)
        middle, above, below = (low + high) // 2, excess(low), excess(high)
        if turn % 3 < 2 and math.isfinite(above) and above > below:
            # Where the last one holds, its neighbour is asked.
            middle = math.ceil(low + above / (above - below) * (high - low)) - (turn % 3)
            middle = min(max(middle, low + 1), high - 1)
        low, high = (low, middle) if excess(middle) <= 0 else (middle, high)


def smallest_where(holds, start: int, stop: int) -> int | None:
    """Return the smallest integer from which a property holds, None above `stop`; few steps near `start`."""
    low, high = roots.bracket(holds, start, 1, highest=stop)
    if high > stop:
        return None
    between = range(int(low) + 1, int(high))
    return between.start + bisect.bisect_left(between, True, key=holds)
