"""Strategy matrices C, one kind per file; `strategies.base.Strategy` is their interface."""

from pathlib import Path

from jaxacct.common import validate as _validate
from jaxacct.strategies.banded_inverse import BandedInverse
from jaxacct.strategies.banded_toeplitz import BandedToeplitz, Toeplitz
from jaxacct.strategies.base import (
    BufferedRecursion,
    NoiseRecursion,
    Strategy,
    prefix_sum_error,
    workload_error,
)
from jaxacct.strategies.buffered_toeplitz import BufferedToeplitz
from jaxacct.strategies.dense import Dense
from jaxacct.strategies.finite_toeplitz import FiniteToeplitz, ending
from jaxacct.strategies.stationary import Stationary
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, workload_named

STRATEGIES: dict[str, type[Strategy]] = {
    kind.kind: kind
    for kind in (BandedToeplitz, FiniteToeplitz, Toeplitz, BandedInverse, BufferedToeplitz, Dense)
}

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


__all__ = [
    "NAMES",
    "STRATEGIES",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedRecursion",
    "BufferedToeplitz",
    "Dense",
    "FiniteToeplitz",
    "NoiseRecursion",
    "Strategy",
    "Toeplitz",
    "Workload",
    "by_name",
    "ending",
    "prefix_sum_error",
    "workload_error",
    "workload_named",
]
