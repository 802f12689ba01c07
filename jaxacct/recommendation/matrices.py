"""Strategy matrices of candidates by name, made once for each set of public numbers."""

import functools
import math

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.calibration.choice import INVERSE, SCHEME_NAMES
from jaxacct.calibration.targets import Target
from jaxacct.common import validate
from jaxacct.recommendation.noise_estimate import MAX_TABLE_SIZE, by_moment, table_size
from jaxacct.recommendation.result import unit_error
from jaxacct.schemes import Scheme
from jaxacct.strategies import BandedToeplitz, Strategy, Workload, by_name, ending
from jaxacct.strategies.amplified import amplified
from jaxacct.strategies.workload import PREFIX_SUMS
from jaxacct.strategies.workload import checked as checked_workload


def matrix(name: str, bands: int, scheme: Scheme, workload: Workload, mu: float) -> Strategy:
    """Return the matrix of that name but "buffered"; `mu` as of `gdp_mu`."""
    if name == "amplified":
        return _amplified(bands, scheme, workload, mu)
    if name == INVERSE:
        return by_name(name, bands, scheme, workload)
    n = scheme.iterations
    made = _optimal(bands, n, workload) if name == "optimal" else BandedToeplitz.square_root(bands)
    return ending(made, scheme)


@functools.lru_cache(maxsize=64)
def _optimal(bands: int, iterations: int, workload: Workload) -> BandedToeplitz:
    return BandedToeplitz.optimal(
        iterations=iterations,
        bands=bands,
        min_separation=bands,  # checked, without effect
        participations=-(-iterations // bands),
        workload=workload,
    )


def amplified_matrix(
    bands: int, scheme: Scheme, target: Target, *, workload: Workload = PREFIX_SUMS
) -> Strategy:
    """Return the "amplified" matrix: of least error at the noise multiplier that it needs with sampling.

    `bands` are a maximum and `workload` is what the error is of. ValueError for a scheme whose moments take
    too long, or a target without epsilon or delta.
    """
    bands = validate.positive_integer("bands", bands)
    validate.one_of("scheme", scheme.name, SCHEME_NAMES)
    BandedToeplitz.square_root(bands).check(scheme)
    if table_size(scheme, BandedToeplitz.square_root(bands)) > MAX_TABLE_SIZE:
        raise ValueError(
            f"min_separation must be smaller for strategy amplified, got {scheme.min_separation}"
        )
    mu = gdp_mu(*target.point)
    return _amplified(bands, scheme, checked_workload(workload), mu)


@functools.lru_cache(maxsize=256)
def _amplified(bands: int, scheme: Scheme, workload: Workload, mu: float) -> Strategy:
    """Return the best by second moments of the square-root matrix and of amplified ones.

    These are made for noise multipliers from it and 1, 2, 4, ... repeats, uphill from the expected number.
    """
    n, most = scheme.iterations, scheme.max_participations
    root = ending(BandedToeplitz.square_root(bands), scheme)
    if bands == 1 or table_size(scheme, root) > MAX_TABLE_SIZE:
        return root
    noise = by_moment(scheme, root, 2, mu)
    repeats, nearest = sorted({*doublings(1, most), most}), noise

    @functools.cache
    def tried(i: int) -> tuple[float, Strategy]:
        nonlocal nearest
        made = amplified(
            iterations=n, bands=bands, noise_multiplier=noise, repeats=repeats[i], workload=workload
        )
        strategy = ending(made, scheme)
        nearest = by_moment(scheme, strategy, 2, mu, nearest)
        return nearest**2 * unit_error(strategy, n, workload), strategy

    expected = most * scheme.sums.probability
    first = min(range(len(repeats)), key=lambda i: abs(math.log(repeats[i] / max(1.0, expected))))
    candidates = [(noise**2 * unit_error(root, n, workload), root)]
    for step in (1, -1):
        i = first
        while 0 <= i + step < len(repeats) and tried(i + step)[0] < tried(i)[0]:
            i += step
        candidates.append(tried(i))
    return min(candidates, key=lambda pair: pair[0])[1]


def doublings(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... up to `last`."""
    numbers = []
    while first <= last:
        numbers.append(first)
        first *= 2
    return numbers
