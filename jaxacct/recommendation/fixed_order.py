"""Candidates for batches in a fixed order: their noise is known exactly, and nothing is sampled."""

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.calibration.choice import INVERSE
from jaxacct.recommendation.matrices import doublings
from jaxacct.recommendation.noise_estimate import revealed_noise
from jaxacct.recommendation.result import REVEALED, Recommended
from jaxacct.strategies import by_name, ending

NAMES = ("optimal", "square-root", "buffered")
MAX_BUFFERS = 4  # more are hardly better (tests/benchmarks/results/buffered.json)


def places(
    scheme, numbers, memory_copies: int, max_bands: int, bands: int | None, matrix_name: str | None
) -> list[Recommended]:
    """Return all candidates of a fixed order, one band among them.

    Bands, or buffers, are doublings by default, and as many buffers as `memory_copies` leave room for;
    `matrix_name` is one of `NAMES`, all by default, or `INVERSE`. ValueError for another matrix, or buffers
    without room.
    """
    if matrix_name not in (None, INVERSE, *NAMES):
        raise ValueError(
            f"strategy must be {', '.join((*NAMES, INVERSE))} for {scheme.name}, got {matrix_name!r}"
        )
    names = NAMES if matrix_name is None else (matrix_name,)
    limit = min(max_bands, scheme.iterations, scheme.steps_per_epoch)
    room = min((memory_copies - 1) // 2, MAX_BUFFERS if bands is None else bands)
    of_bands = doublings(2, limit) if bands is None else [min(bands, limit)]
    of_buffers = range(1, room + 1) if bands is None else [bands] * (bands <= room)
    matrices = [(INVERSE if names == (INVERSE,) else "optimal", 1)] if bands is None else []
    matrices += [(name, b) for name in names for b in (of_buffers if name == "buffered" else of_bands)]
    mu, candidates = gdp_mu(numbers.epsilon, numbers.delta), {}
    for name, number in matrices:
        workload = {} if name == "square-root" else {"workload": numbers.workload}
        matrix = ending(by_name(name, number, scheme, **workload), scheme)
        noise = revealed_noise(scheme, matrix, numbers.adjacency, mu)
        place = Recommended(scheme, matrix, name, noise, numbers.workload, accountant=REVEALED)
        # More buffers than are of use end as fewer: one candidate for each number.
        key = (name, matrix.named_bands) if name == "buffered" else matrix
        candidates[key] = min(place, candidates.get(key, place), key=lambda each: each.error)
    if not candidates:
        raise ValueError(f"memory_copies must be at least {2 * (bands or 1) + 1} for strategy buffered")
    return list(candidates.values())
