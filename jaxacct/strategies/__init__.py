"""Strategy matrices C, one kind per file; `strategies.base.Strategy` is their interface."""

from pathlib import Path

from jaxacct.common import validate as _validate
from jaxacct.strategies.banded_inverse import BandedInverse as BandedInverse
from jaxacct.strategies.banded_toeplitz import BandedToeplitz as BandedToeplitz
from jaxacct.strategies.banded_toeplitz import Toeplitz as Toeplitz
from jaxacct.strategies.base import BufferedRecursion as BufferedRecursion
from jaxacct.strategies.base import NoiseRecursion as NoiseRecursion
from jaxacct.strategies.base import Strategy as Strategy
from jaxacct.strategies.base import prefix_sum_error as prefix_sum_error
from jaxacct.strategies.base import workload_error as workload_error
from jaxacct.strategies.buffered_toeplitz import BufferedToeplitz as BufferedToeplitz
from jaxacct.strategies.dense import Dense as Dense
from jaxacct.strategies.finite_toeplitz import FiniteToeplitz as FiniteToeplitz
from jaxacct.strategies.finite_toeplitz import ending as ending
from jaxacct.strategies.stationary import Stationary
from jaxacct.strategies.workload import PREFIX_SUMS
from jaxacct.strategies.workload import Workload as Workload
from jaxacct.strategies.workload import workload_named as workload_named

_KINDS = (BandedToeplitz, FiniteToeplitz, Toeplitz, BandedInverse, BufferedToeplitz, Dense)
STRATEGIES: dict[str, type[Strategy]] = {kind.kind: kind for kind in _KINDS}

# Strategies by name, from the number of bands, the scheme and the workload.
_OPTIMISED = {
    "optimal": BandedToeplitz.optimal,
    "optimal-inverse": BandedInverse.optimal,
    "buffered": lambda bands, **schedule: BufferedToeplitz.optimal(buffers=bands, **schedule),
}
_CLOSED_FORMS = {
    "square-root": lambda bands, scheme: BandedToeplitz.square_root(bands),
    "bisr": lambda bands, scheme: BandedInverse.bisr(iterations=scheme.iterations, bands=bands),
}
NAMES = ("optimal", "square-root", "bisr", "optimal-inverse", "buffered")


def by_name(name: str, bands: int, scheme, workload: Workload = PREFIX_SUMS) -> Stationary:
    """Return a strategy by one of `NAMES`, or from a file of coefficients; ValueError otherwise.

    `bands` are those of C, of its inverse, or buffers; `workload` is for an optimised matrix, and must be
    prefix sums for others.
    """
    _validate.positive_integer("bands", bands)
    separation = scheme.min_separation
    if scheme.patterns is not None:  # epochs that are shuffled anew: about one epoch apart
        separation = max(separation, scheme.patterns.steps_per_epoch or 1)
    if name in _OPTIMISED:
        return _OPTIMISED[name](
            iterations=scheme.iterations,
            bands=bands,
            min_separation=separation,
            participations=scheme.max_participations,
            workload=workload,
        )
    if workload != PREFIX_SUMS:
        raise ValueError(f"workload must not be given together with strategy {name}, which is not optimised")
    if name in _CLOSED_FORMS:
        return _CLOSED_FORMS[name](bands, scheme)
    if not Path(name).exists():
        raise ValueError(f"strategy must be {', '.join(NAMES)} or a file of coefficients, got {name!r}")
    return BandedToeplitz.from_file(name)


_OTHERS = "BufferedRecursion NoiseRecursion Strategy Workload by_name ending prefix_sum_error workload_error"
__all__ = [*_OTHERS.split(), "NAMES", "STRATEGIES", "workload_named", *(kind.__name__ for kind in _KINDS)]
