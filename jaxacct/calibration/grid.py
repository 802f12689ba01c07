"""What is calibrated, and the grid of candidates for the one number of it that is found.

That number is the noise multiplier, epsilon or delta: a larger one is easier to certify.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from jaxacct.accountants import analytic, unamplified
from jaxacct.common import validate
from jaxacct.core import truncation
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme
from jaxacct.statistics.bounds import Budget
from jaxacct.strategies import Strategy

MIN_NOISE_MULTIPLIER = 0.05
"""Smallest noise multiplier of a search: some targets hold at any, and privacy loss distributions of less
take minutes."""
LIMITS = {
    "noise_multiplier": (MIN_NOISE_MULTIPLIER, validate.MAX_NOISE),
    "epsilon": (1e-3, validate.MAX_EPSILON),
    "delta": (1e-15, 0.5),
}
"""Smallest and largest candidate of each number."""
DELTA_STEPS = 5
"""Steps of epsilon's grid that one of delta's has: about as many samples tell two neighbours apart."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A mechanism, its target and its data set; one of the three numbers may be None, and is found.

    Attributes:
      scheme, strategy, adjacency, compose_with, dataset_size: as of `calibrate`.
      truncate_to: its `max_batch_size`.
      failure_fraction: of `CalibrationOptions`.
      noise_multiplier, epsilon, delta: all numbers that are given.
    """

    scheme: Scheme
    strategy: Strategy
    adjacency: str
    compose_with: object = None
    dataset_size: int | None = None
    truncate_to: int | None = None
    failure_fraction: float = 0.01
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
        """Function (epsilon, delta) -> (target of a claim, why there is none)."""
        return functools.cache(self._made_target)

    def _made_target(self, epsilon: float, delta: float) -> tuple[ClaimedTarget | None, str]:
        whole = ClaimedTarget(epsilon, delta, Budget.split(delta, self.failure_fraction), self.compose_with)
        claim = Claim(self.at(1.0), whole, self.dataset_size, self.truncate_to)
        truncation_delta = claim.truncation_delta or 0.0
        if not truncation_delta < delta / 2:
            return None, (
                f"max_batch_size must be larger: truncating batches to {self.truncate_to} may cost "
                f"{truncation_delta:.3g} of {delta:g}; the scheme truncated-b-min-sep has likelihoods "
                "that account for the truncation"
            )
        budget = Budget.split(delta - claim.reserved, self.failure_fraction)
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

    def bound(self, accountant: str | None, estimate: float | None = None) -> int | None:
        """Return the exponent of the smallest candidate that an accountant proves; None without any.

        The best accountant for None; the search for a noise multiplier starts from an `estimate`.
        """
        problem, (start, most) = self.problem, self.ends

        @functools.cache
        def by(mechanism: Mechanism, epsilon: float) -> float:
            return analytic.bound_by(accountant, mechanism, epsilon, problem.compose_with)[1]

        def excess(exponent: int) -> float:
            claim = self.claim(exponent)
            if claim is None:
                return math.inf
            found, delta = by(claim.mechanism, claim.target.epsilon), claim.target.budget.delta
            # Over the logarithm of noise or epsilon this is nearly straight, of slope -2 for a Gaussian tail.
            gap = math.log(math.log(delta) / math.log(found)) if found < 1 else math.inf
            return gap if (gap <= 0) == (found <= delta) else found - delta  # logarithms are rounded

        step = max(1, round(0.5 / math.log(self.ratio)))
        if problem.missing == "noise_multiplier":
            target = problem.target(problem.epsilon, problem.delta)[0]
            assert target is not None
            revealed = unamplified.noise_multiplier_for(problem.at(1.0), target.epsilon, target.budget.delta)
            most = min(most, math.ceil(math.log(1e4 * revealed, self.step)))
            start = math.log(min(revealed, estimate or _about(problem.at(1.0), revealed)), self.step)
            start = max(self.ends[0], math.ceil(start))
        else:
            start = (start + most) // 2
        return smallest_exponent(excess, start, step, most)


def _about(mechanism: Mechanism, revealed: float) -> float:
    """Return about the noise multiplier of a target, from that with a revealed pattern: a central limit.

    Where they are not stated, rounds are the steps of a column of C, in which the unit participates with a
    probability p. They have the second moments of a Gaussian mechanism of
    `mu^2 = rounds p^2 (e^{1 / sigma^2} - 1)`.
    """
    scheme, n = mechanism.scheme, mechanism.scheme.iterations
    if scheme.patterns is not None:  # nothing is random
        return revealed
    width = min(mechanism.strategy.bands, n)
    p, rounds = scheme.independent_rounds or (min(1.0, width * scheme.max_rate), n / width)
    mu = unamplified.sensitivity(mechanism) / revealed
    return 1 / math.sqrt(math.log1p(mu**2 / (rounds * p**2))) if p > 0 else revealed


def smallest_exponent(excess: Callable[[int], float], start: int, step: int, stop: int) -> int | None:
    """Return the smallest integer from which a falling function is at most 0, None above `stop`.

    Few evaluations where it is nearly straight and falls by about 1 in `step`: secants of the two smallest
    values, growing steps up to a change of sign, and bisection where values are infinite or secants fail.
    """
    low, high, at, least = -math.inf, math.inf, min(start, stop), 1
    found: dict[int, float] = {}
    while low < stop:
        here = found[at] = excess(at)
        low, high = (low, at) if here <= 0 else (at, high)
        if high - low <= 1:
            return int(high)
        root = _secant_root(found, step)
        if high - low < math.inf:
            is_slow = len(found) > 8 and len(found) % 2
            if root is None or is_slow or not low - 1 < root < high + 1:
                root = (low + high) // 2
        else:
            away = max(least, step if root is None else abs(root - at))
            root, least = at - away if here <= 0 else at + away, 4 * least
        at = int(min(max(math.ceil(root), low + 1), high - 1, stop))
    return None


def _secant_root(found: dict[int, float], step: int) -> float | None:
    """Return where the line through the two smallest of these values is 0; None without a finite one."""
    near = sorted((place for place in found if math.isfinite(found[place])), key=lambda at: abs(found[at]))
    if not near:
        return None
    slope = -1 / step
    if len(near) > 1:
        secant = (found[near[1]] - found[near[0]]) / (near[1] - near[0])
        slope = min(secant, slope / 2) if secant < 0 else slope
    return near[0] - found[near[0]] / slope
