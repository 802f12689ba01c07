"""Strategy matrices C, one file a kind; what all say of themselves is in `strategies.base.Strategy`."""

from pathlib import Path

from jaxacct import _validate
from jaxacct.strategies.banded_inverse import BandedInverse
from jaxacct.strategies.banded_toeplitz import BandedToeplitz
from jaxacct.strategies.base import NoiseRecursion, Strategy, prefix_sum_error, workload_error
from jaxacct.strategies.dense import Dense
from jaxacct.strategies.finite_toeplitz import FiniteToeplitz, ending
from jaxacct.strategies.stationary import Stationary
from jaxacct.strategies.toeplitz import Toeplitz
from jaxacct.strategies.workload import Workload

STRATEGIES: dict[str, type[Strategy]] = {
    kind.kind: kind for kind in (BandedToeplitz, FiniteToeplitz, Toeplitz, BandedInverse, Dense)
}

# Strategies by name, from the number of bands and the scheme they are for.
_BY_NAME = {
    "optimal": lambda bands, scheme: BandedToeplitz.optimal(
        iterations=scheme.iterations,
        bands=bands,
        min_separation=scheme.min_separation,
        participations=scheme.max_participations,
    ),
    "square-root": lambda bands, scheme: BandedToeplitz.square_root(bands),
    "bisr": lambda bands, scheme: BandedInverse.bisr(iterations=scheme.iterations, bands=bands),
    "optimal-inverse": lambda bands, scheme: BandedInverse.optimal(
        iterations=scheme.iterations,
        bands=bands,
        min_separation=scheme.min_separation,
        participations=scheme.max_participations,
    ),
}
NAMES = tuple(_BY_NAME)


def by_name(name: str, bands: int, scheme) -> Stationary:
    """A strategy by one of `NAMES`, or from the file of coefficients of that name; ValueError otherwise."""
    _validate.positive_integer("bands", bands)
    if name in _BY_NAME:
        return _BY_NAME[name](bands, scheme)
    if not Path(name).exists():
        raise ValueError(f"strategy must be {', '.join(NAMES)} or a file of coefficients, was {name!r}")
    return BandedToeplitz.from_file(name)


def strategy_to_json(strategy: Strategy) -> dict:
    """Plain JSON values."""
    return strategy.to_json()


def strategy_from_json(data: dict) -> Strategy:
    """The inverse of `strategy_to_json`; ValueError for another kind."""
    kind = data.get("kind", BandedToeplitz.kind)
    if kind not in STRATEGIES:
        raise ValueError(f"strategy kind must be one of {', '.join(STRATEGIES)}, was {kind!r}")
    return STRATEGIES[kind].from_json(data)


__all__ = [
    "NAMES",
    "STRATEGIES",
    "BandedInverse",
    "BandedToeplitz",
    "Dense",
    "FiniteToeplitz",
    "NoiseRecursion",
    "Strategy",
    "Toeplitz",
    "Workload",
    "by_name",
    "ending",
    "prefix_sum_error",
    "strategy_from_json",
    "strategy_to_json",
    "workload_error",
]
