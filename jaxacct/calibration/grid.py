"""What is calibrated, and the grid of candidates for the one number of it that is found.

That number is the noise multiplier, epsilon or delta: a larger one is easier to certify.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from jaxacct.accountants import ACCOUNTANTS, analytic, unamplified
from jaxacct.accountants.allocation.random_allocation import RandomAllocation, noise_about
from jaxacct.common import validate
from jaxacct.core import truncation
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme
from jaxacct.statistics import roots
from jaxacct.statistics.bounds import Budget
from jaxacct.strategies import Strategy

MIN_NOISE_MULTIPLIER = 0.05
"""Smallest noise multiplier of a search: some targets hold at any, and privacy loss distributions of less
take minutes."""
LIMITS = {  # smallest and largest candidate of each number
    "noise_multiplier": (MIN_NOISE_MULTIPLIER, validate.MAX_NOISE),
    "epsilon": (1e-3, validate.MAX_EPSILON),
    "delta": (1e-15, 0.5),
}
DELTA_STEPS = 5  # steps of epsilon's grid in one of delta's: as many samples tell neighbours apart


@dataclasses.dataclass(frozen=True)
class Problem:
    """A mechanism, its target and its data set; one of the three numbers may be None, and is found.

    Attributes:
      scheme, strategy, adjacency, compose_with, dataset_size: as of `calibrate`.
      truncate_to: its `max_batch_size`.
      noise_multiplier, epsilon, delta: all numbers that are given.
    """

    scheme: Scheme
    strategy: Strategy
    adjacency: str
    compose_with: object = None
    dataset_size: int | None = None
    truncate_to: int | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None

    @property
    def missing(self) -> str | None:
        """Name of the number that is found; None where all are given."""
        return next((name for name in LIMITS if getattr(self, name) is None), None)

    def at(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism with that noise multiplier."""
        return Mechanism(self.scheme, self.strategy, noise_multiplier, self.adjacency)

    def check(self) -> None:
        """Refuse, before a search, a bad mechanism or event, and batch sizes that leave no delta."""
        self.at(1.0 if self.noise_multiplier is None else self.noise_multiplier)
        if self.epsilon is not None and self.delta is not None:
            target, why = self.target(self.epsilon, self.delta)
            if target is None:
                raise ValueError(why)
        if self.compose_with is not None:
            ClaimedTarget.at(1.0, 0.1, self.compose_with).profile  # noqa: B018

    def claim(self, value: float | None = None) -> tuple[Claim | None, str]:
        """Return (claim with this value of the number that is found, why there is none).

        Its budget is all of delta but the reserves for batch sizes, half at most.
        """
        given = {name: getattr(self, name) for name in LIMITS}
        given |= {} if self.missing is None else {self.missing: value}
        mechanism = self.at(given["noise_multiplier"])
        target, why = self.target(given["epsilon"], given["delta"])
        if target is None:
            return None, why
        if self.truncate_to is not None and not truncation.covers(mechanism, target.epsilon):
            noise = mechanism.noise_multiplier
            return None, f"max_batch_size cannot be accounted for at noise multiplier {noise:g}"
        return Claim(mechanism, target, self.dataset_size, self.truncate_to), ""

    @functools.cached_property
    def target(self) -> Callable[..., tuple[ClaimedTarget | None, str]]:
        """Function (epsilon, delta) -> (target of a claim, why there is none); events have no hash."""
        return functools.cache(self._made_target)

    def _made_target(self, epsilon: float, delta: float) -> tuple[ClaimedTarget | None, str]:
        whole = ClaimedTarget(epsilon, delta, Budget.split(delta), self.compose_with)
        claim = Claim(self.at(1.0), whole, self.dataset_size, self.truncate_to)
        truncation_delta = claim.truncation_delta or 0.0
        if not truncation_delta < delta / 2:
            return None, (
                f"max_batch_size must be larger: truncating batches to {self.truncate_to} may cost "
                f"{truncation_delta:.3g} of {delta:g}; the scheme truncated-b-min-sep has likelihoods "
                "that account for the truncation"
            )
        budget = Budget.split(delta - claim.reserved)
        return dataclasses.replace(whole, budget=budget), ""


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Candidates for the number that a problem leaves open: whole powers of `step`.

    Attributes:
      problem: with that number missing.
      ratio: of neighbouring noise multipliers or epsilons.
    """

    problem: Problem
    ratio: float

    @property
    def step(self) -> float:
        """Ratio of neighbours."""
        return self.ratio ** (DELTA_STEPS if self.problem.missing == "delta" else 1)

    @property
    def ends(self) -> tuple[int, int]:
        """Smallest and largest exponent."""
        least, most = LIMITS[str(self.problem.missing)]
        return math.ceil(math.log(least, self.step)), math.floor(math.log(most, self.step))

    def claim(self, exponent: int) -> Claim | None:
        """Return the claim of a candidate; None beyond the ends, or without room for batch sizes."""
        least, most = self.ends
        return self.problem.claim(self.step**exponent)[0] if least <= exponent <= most else None


def smallest_bound(
    problem: Problem, accountant: str | None, ratio: float, estimate: float | None = None
) -> float | None:
    """Return the smallest value of the number that is found at which an accountant proves the claim.

    It is within a factor of `ratio` of it, and None where there is none. The best accountant for None; the
    search for a noise multiplier starts from an `estimate`.
    """
    least, most = LIMITS[str(problem.missing)]
    near, width = math.sqrt(least * most), ratio - 1
    if problem.missing == "delta":
        width *= DELTA_STEPS

    @functools.cache
    def by(mechanism: Mechanism, epsilon: float) -> float:
        return analytic.bound_by(accountant, mechanism, epsilon, problem.compose_with)[1]

    def room(value: float) -> float:
        claim = problem.claim(value)[0]
        if claim is None:
            return -math.inf
        found, delta = by(claim.mechanism, claim.target.epsilon), claim.target.budget.delta
        # Over the logarithm of noise or epsilon this is nearly straight, of slope 2 for a Gaussian tail.
        gap = math.log(math.log(found) / math.log(delta)) if found < 1 else -math.inf
        return gap if (gap >= 0) == (found <= delta) else delta - found  # logarithms are rounded

    if problem.missing == "noise_multiplier":
        target = problem.target(problem.epsilon, problem.delta)[0]
        assert target is not None
        revealed = unamplified.noise_multiplier_for(problem.at(1.0), target.epsilon, target.budget.delta)
        most = min(most, max(2 * least, 1e4 * revealed))
        if estimate is None and ACCOUNTANTS[RandomAllocation.name].supports(
            problem.at(1.0), problem.compose_with
        ):
            estimate = noise_about(problem.at(1.0), target.epsilon, target.budget.delta)
        near = max(1.001 * least, min(revealed, estimate or revealed))
    value = roots.root(room, least, most, near, width)[1]
    return value if value < most or room(most) >= 0 else None
