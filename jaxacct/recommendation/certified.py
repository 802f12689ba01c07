"""Candidates at the noise that an accountant certifies, before any estimate: they are what stands at once."""

import math

from jaxacct.accountants import analytic
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.calibration.grid import Problem, smallest_bound
from jaxacct.calibration.options import BOUND_RATIO
from jaxacct.common import validate
from jaxacct.common.progress import Progress, announce
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.recommendation.grid import RunNumbers
from jaxacct.recommendation.matrices import matrix
from jaxacct.recommendation.result import Recommended
from jaxacct.schemes import BallsInBins, Scheme
from jaxacct.strategies import BandedToeplitz, ending


def one_band(numbers: RunNumbers, name: str | None, progress: Progress | None) -> list[Recommended]:
    """Return independent noise (DP-SGD) with every sampler whose accountant is exact, at certified noise.

    With the scheme of that `name` alone, if given. Other samplers may have less by estimates that no samples
    reach. Each noise multiplier below those before it is reported at once, Poisson sampling's first.
    """
    identity, cycle = BandedToeplitz.identity(), numbers.cycle
    schemes = [numbers.scheme(None, 1, False)]
    if cycle == math.floor(cycle) and cycle <= validate.MAX_SEPARATION:
        schemes.append(numbers.scheme(BallsInBins.name, int(cycle), False))
    grids = numbers.fixed_counts(1, (1,), 1)
    schemes += [scheme for grid in grids.values() for scheme, _ in grid]
    places: list[Recommended] = []
    for scheme in dict.fromkeys(schemes):
        exact = analytic.exact(Mechanism(scheme, identity, 1.0, numbers.adjacency), numbers.delta)
        if exact is not None and name in (None, scheme.name):
            least = min((place.noise_multiplier for place in places), default=math.inf)
            place = certified(scheme, identity, "optimal", numbers, exact.name, least, progress)
            places += [] if place is None else [place]
    return places


def bounded(grid, matrix_name: str, numbers: RunNumbers, progress: Progress | None) -> Recommended | None:
    """Return a candidate at the noise that an accountant certifies: what stands before any estimate.

    Poisson sampling of independent noise where it is among the candidates, whose accountant is exact, or else
    the largest separation, which has the fewest participations.
    """
    scheme, number = max(
        grid, key=lambda pair: (pair[1] == 1 == pair[0].min_separation, pair[0].min_separation)
    )
    mu = gdp_mu(numbers.epsilon, numbers.delta)
    made = ending(numbers.given, scheme) if numbers.given is not None else None
    made = matrix(matrix_name, number, scheme, numbers.workload, mu) if made is None else made
    return certified(scheme, made, matrix_name, numbers, None, math.inf, progress)


def certified(
    scheme: Scheme,
    strategy,
    matrix_name: str,
    numbers: RunNumbers,
    accountant: str | None,
    least: float,
    progress: Progress | None,
) -> Recommended | None:
    """Return a candidate at the noise that an accountant certifies, the best one for None; report new leasts.

    The search begins at the least one so far.
    """
    target = dict(epsilon=numbers.epsilon, delta=numbers.delta)
    problem = Problem(scheme, strategy, numbers.adjacency, **target)
    noise = smallest_bound(problem, accountant, BOUND_RATIO, None if least == math.inf else least)
    if noise is None:
        return None
    mechanism = Mechanism(scheme, strategy, noise, numbers.adjacency)
    name = analytic.bound_by(accountant, mechanism, numbers.epsilon)[0]
    if progress and noise < least:
        found = f"noise multiplier {noise:.5g} (accountant {name}), scheme {scheme.name}"
        announce(progress, f"certified without samples: {found}, bands {strategy.named_bands}")
    return Recommended(scheme, strategy, matrix_name, noise, numbers.workload, accountant=name)
