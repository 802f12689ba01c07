"""Estimates of the noise multiplier that a candidate needs, without samples; no guarantee.

With f the likelihood ratio and Q the distribution without the example, the moments `Z_m = E_Q f^m` are known
for two and, of b-min-sep and Poisson sampling, for three replicas. A Gaussian mechanism of sensitivity mu has
`ln Z_m = m (m - 1) mu^2 / 2`, so for each m there is a noise multiplier s_m at which Z_m is that of the
Gaussian mechanism that just meets the target. The truth lies on the line through (2, s_2) and (3, s_3) at an
order that depends on epsilon and delta, and hardly on the candidate; Poisson sampling of independent noise,
for which the truth is known (`accountants.pld`), gives that order.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants import unamplified
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.calibration.grid import MIN_NOISE_MULTIPLIER, Problem, smallest_bound
from jaxacct.calibration.options import BOUND_RATIO
from jaxacct.mechanisms.mechanism import REPLACE_ONE, ZERO_OUT, Mechanism
from jaxacct.proposals.families import replicas
from jaxacct.recommendation.result import REVEALED, Recommended
from jaxacct.recommendation.third_moments import log_third_moment
from jaxacct.schemes import BalancedMinSep, BMinSep, Poisson, Scheme, scheme_from_json, scheme_to_json
from jaxacct.schemes.replicas import by_age
from jaxacct.schemes.replicas.table import entries, log_normalizer_about
from jaxacct.strategies import BandedToeplitz, Strategy, Workload
from jaxacct.strategies.workload import PREFIX_SUMS

MAX_TABLE_SIZE = 2e7  # numbers of a table of second moments, about half a second
MAX_AGED_TABLE_SIZE = 5e7  # of overlapping columns, with ages: a few seconds for each noise multiplier
MAX_THIRD_TABLE_SIZE = 1e8  # of third moments, which end early: a few seconds
# Third moments of this size take a quarter of a second or more: they are left out where by the second moment
# and the ratio of a similar candidate, which is right to 3 %, the error is so many times the smallest.
COSTLY_THIRD_TABLE_SIZE, FAR_BEHIND = 5e6, 1.06
MAX_ORDER = 20.0
SHORT_RUN = 512  # steps of a run whose moments are not worth extrapolating


@dataclass(frozen=True)
class Estimates:
    """How noise multipliers are estimated for one target.

    Attributes:
      mu: sensitivity per unit of noise of the Gaussian mechanism that just meets the target.
      order: m - 2 of the point on the line through s_2 and s_3, in units of s_3 - s_2.
      ratio: of the truth to s_2 for Poisson sampling; for others without s_3 and a similar mechanism.
      third: s_3 over s_2 of Poisson sampling, near where others have theirs.
      epsilon, delta, adjacency: the guarantee that candidates are to have.
      workload: what they are ranked by.
      rate: mean participations of an example in a step.
    """

    mu: float
    order: float
    ratio: float
    third: float
    epsilon: float
    delta: float
    adjacency: str
    workload: Workload
    rate: float

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def at(
        poisson: Scheme,
        epsilon: float,
        delta: float,
        adjacency: str = ZERO_OUT,
        workload: Workload = PREFIX_SUMS,
    ) -> "Estimates":
        """Return the estimates from Poisson sampling of independent noise with the same sizes."""
        identity, mu = BandedToeplitz.identity(), gdp_mu(epsilon, delta)
        second, third = (by_moment(poisson, identity, m, mu) for m in (2, 3))
        problem = Problem(poisson, identity, ZERO_OUT, epsilon=epsilon, delta=delta)
        # The moments of a Gaussian mechanism are exact.
        truth = None if poisson.max_rate == 1 else smallest_bound(problem, "pld", BOUND_RATIO)
        truth = second if truth is None else truth
        order = (truth - second) / (third - second) if abs(third - second) > 1e-6 * second else 0.0
        order = min(MAX_ORDER, max(-1.0, order))
        target = epsilon, delta, adjacency, workload, poisson.sums.probability
        return Estimates(mu, order, truth / second, third / second, *target)

    def over_zero_out(self, scheme: Scheme, strategy: Strategy) -> float:
        """Return about how much more noise than zero-out the adjacency needs.

        It is that of Poisson sampling where the steps of a column of C are one round: certificates for 16
        bands need 1.13 times as much where this is 1.09 and DP-SGD needs 1.02.
        """
        if self.adjacency != REPLACE_ONE:
            return 1.0
        width = min(strategy.bands, scheme.iterations)
        probability = min(1.0, width * self.rate)
        return replaced(math.ceil(scheme.iterations / width), probability, self.epsilon, self.delta)

    def of(
        self, scheme: Scheme, strategy: Strategy, matrix: str, like: Recommended | None, least=math.inf
    ) -> Recommended | None:
        """Return one candidate, looked for from another; None where even its second moment takes too long.

        Without s_3 the ratio to s_2 is that of the other one. So it is where s_3 would take long and by that
        ratio the error is far behind the `least` there is.
        """
        near = within_separation(scheme, strategy)
        if near is not strategy:
            return self._overlapping(scheme, strategy, near, matrix)
        if table_size(scheme, strategy) > MAX_TABLE_SIZE:
            return None
        known = like.moments if like is not None else ()
        second = by_moment(scheme, strategy, 2, self.mu, known[0] if known else 1.0)
        ratio = self.ratio
        if like is not None:
            of_zero_out = like.noise_multiplier / self.over_zero_out(like.scheme, like.strategy)
            ratio = of_zero_out / like.moments[0]
        noise, moments = ratio * second, (second,)
        behind = Recommended(scheme, strategy, matrix, noise, self.workload).error > FAR_BEHIND * least
        costly = like is not None and behind
        if third_size(scheme) <= (COSTLY_THIRD_TABLE_SIZE if costly else MAX_THIRD_TABLE_SIZE):
            start = (known[1] / known[0] if len(known) > 1 else self.third) * second
            third = by_moment(scheme, strategy, 3, self.mu, start)
            noise = second + self.order * (third - second)
            moments = (second, third)
        less = scheme.sums.fixed_count and noise < second  # where Z_2 may be infinite
        if less and not math.isfinite(log_moment(Mechanism(scheme, strategy, noise), 2)):
            return None  # there are no draws to certify it by
        # Revealing the pattern is enough, whatever the line says.
        most = revealed_noise(scheme, strategy, self.adjacency, self.mu)
        noise = min(most, max(MIN_NOISE_MULTIPLIER, self.over_zero_out(scheme, strategy) * noise))
        return Recommended(scheme, strategy, matrix, noise, self.workload, moments)

    def _overlapping(self, scheme, strategy, near, matrix: str) -> Recommended | None:
        """Return a candidate whose columns overlap: that of `near`, with the greater sensitivity.

        Certificates of 2 and 4 bands of the inverse need 3 to 5 % more, as those of banded matrices do; 9 %
        by cyclic Poisson sampling. With fixed counts draws are worth little where columns overlap, and
        replace-one has none: the pattern is revealed.
        """
        revealed = revealed_noise(scheme, strategy, self.adjacency, self.mu)
        if self.adjacency == REPLACE_ONE or scheme.sums.fixed_count:
            return Recommended(scheme, strategy, matrix, revealed, self.workload, accountant=REVEALED)
        n, separation = scheme.iterations, scheme.min_separation
        if scheme.name == BMinSep.name and scheme.sums.probability < 1:
            age = by_age.longest_age(Mechanism(scheme, strategy, revealed))
            if n * (separation + age) ** 2 > MAX_AGED_TABLE_SIZE:
                return None
        place = self.of(scheme, near, matrix, None)
        if place is None:
            return None
        overlap = float(strategy.cross_terms(n, separation).max())
        noise = min(revealed, math.sqrt(1 + 2 * overlap) * place.noise_multiplier)
        return Recommended(scheme, strategy, matrix, noise, self.workload, place.moments)


def within_separation(scheme: Scheme, strategy: Strategy) -> Strategy:
    """Return the matrix without the bands beyond the minimum separation; itself where it has none."""
    if scheme.patterns is not None or strategy.bands <= scheme.min_separation:
        return strategy
    first: Any = strategy.columns(scheme.iterations, np.zeros(1, int))[: scheme.min_separation, 0]
    return BandedToeplitz(tuple(first))


def revealed_noise(scheme: Scheme, strategy: Strategy, adjacency: str, mu: float) -> float:
    """Return the noise multiplier for all participations revealed; `mu` as of `gdp_mu`."""
    sensitivity = unamplified.sensitivity(Mechanism(scheme, strategy, 1.0, adjacency))
    return max(MIN_NOISE_MULTIPLIER, sensitivity / mu)


def by_moment(scheme: Scheme, strategy: Strategy, m: int, mu: float, start: float = 1.0) -> float:
    """Return the noise multiplier at which `ln Z_m = m (m - 1) mu^2 / 2`; `MIN_NOISE_MULTIPLIER` at least.

    It is right to about 1e-4. Secants from `start`: logarithms of both sides are nearly straight.
    """
    least, slope, before = math.log(MIN_NOISE_MULTIPLIER), -2.0 * m, None
    x = max(math.log(start), least)
    for _ in range(60):
        log_z = log_moment(Mechanism(scheme, strategy, math.exp(x)), m)
        excess = math.log(max(log_z, 1e-300) * 2 / (m * (m - 1))) - 2 * math.log(mu)
        step = 0.5  # where it is infinite
        if math.isfinite(excess):
            if before is not None and (excess - before[1]) * (x - before[0]) < 0:
                slope = (excess - before[1]) / (x - before[0])
            before = x, excess
            step = max(least - x, min(1.0, max(-1.0, -excess / slope)))
        x += step
        if abs(step) < 2e-3:
            break
    return math.exp(x)


def log_moment(mechanism: Mechanism, m: int = 2) -> float:
    """Return `ln Z_m`, of a long run from two shorter ones: its growth per step is constant after mixing.

    Two participations s steps apart forget where they began as waits of variance (1 - p) / p^2 add up to the
    square of the separation b: after about (b p)^2 / (1 - p) waits of b steps.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sums.probability
    if scheme.sums.fixed_count:  # a shorter run has other counts
        return log_normalizer_about(mechanism)
    mixing = b * (b * p) ** 2 / (1 - p) if p < 1 else math.inf
    if m == 3:
        return log_third_moment(mechanism, 4 * mixing <= n)  # else constant growth may be temporary
    short = max(SHORT_RUN, 8 * b, 4 * mixing)
    ends_at_n = strategy.bands > 1 and strategy.rows(n) == n
    if n <= 2 * short or scheme.sums.phases or ends_at_n:
        return _log_second(mechanism)

    def of(steps):
        shorter = Mechanism(_shorter(scheme, steps), strategy, mechanism.noise_multiplier)
        return _log_second(shorter)

    long = math.ceil(short)
    half, whole = of(long // 2), of(long)
    return whole + (n - long) * (whole - half) / (long - long // 2)


def _log_second(mechanism: Mechanism) -> float:
    """Return `ln Z_2` where draws may be too inexact, too."""
    exact = mechanism.is_upper_bound
    return replicas.log_normalizer(mechanism) if exact else log_normalizer_about(mechanism)


def third_size(scheme: Scheme) -> float:
    """Return about how many numbers the third moment takes; infinite where there is none."""
    n, b = scheme.iterations, scheme.min_separation
    return (n + b) * b * (b + 1) / 2 if scheme.name in (BMinSep.name, Poisson.name) else math.inf


@functools.lru_cache(maxsize=64)  # a scheme keeps its table
def _shorter(scheme: Scheme, iterations: int) -> Scheme:
    return scheme_from_json(scheme_to_json(scheme) | {"iterations": iterations})


@functools.lru_cache(maxsize=64)
def replaced(rounds: int, probability: float, epsilon: float, delta: float) -> float:
    """Return the noise multiplier for replace-one over that for zero-out, for DP-SGD with Poisson sampling.

    Between 1 and 2, to 0.01: nearly 1 where an example rarely participates and noise is low.
    """
    poisson, identity = Poisson(rounds, probability), BandedToeplitz.identity()
    problems = [
        Problem(poisson, identity, adjacency, epsilon=epsilon, delta=delta)
        for adjacency in (ZERO_OUT, REPLACE_ONE)
    ]
    of_zero_out, of_replace_one = (smallest_bound(problem, None, 1.005) or math.inf for problem in problems)
    return of_replace_one / of_zero_out


def table_size(scheme: Scheme, strategy: Strategy) -> float:
    """Return about how many numbers computing `Z_m` takes; infinite where there are no tables."""
    mechanism = Mechanism(scheme, strategy, 1.0)
    if float(scheme.min_separation) ** 2 > MAX_TABLE_SIZE and scheme.name != BalancedMinSep.name:
        return math.inf
    if scheme.replicas(mechanism) is None:
        return math.inf
    if scheme.sums.fixed_count:
        if replicas.log_normalizer(Mechanism(scheme, BandedToeplitz.identity(), 1e3)) == math.inf:
            return math.inf  # draws would be too inexact at any noise
    return entries(scheme.table)  # pyrefly: ignore[missing-attribute]
