"""The public numbers of a run, and the schemes and numbers of bands that a search looks at."""

import math
from dataclasses import dataclass
from typing import Any

from jaxacct.calibration.choice import INVERSE, copies_of
from jaxacct.calibration.targets import Target
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import ADJACENCIES
from jaxacct.recommendation.matrices import doublings
from jaxacct.schemes import SCHEMES, BalancedMinSep, BMinSep, CyclicPoisson, EpochwiseAllocation, Scheme
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.strategies import BandedToeplitz, Workload, workload_named
from jaxacct.strategies.workload import checked as checked_workload

MEMORY_COPIES = 16
MAX_INVERSE_BANDS = 8  # as many draws a step
FIXED_COUNTS = (BalancedMinSep.name, EpochwiseAllocation.name)  # all examples participate equally often


@dataclass(frozen=True)
class RunNumbers:
    """The public numbers that the search reads; `given` is the matrix, if given by its coefficients."""

    dataset_size: int
    batch_size: float
    iterations: int
    epsilon: float
    delta: float
    workload: Workload
    given: BandedToeplitz | None
    adjacency: str

    @classmethod
    def of(
        cls, dataset_size, batch_size, iterations, target: Target, workload, given, adjacency
    ) -> "RunNumbers":
        """Return those of arguments of `recommend`; ValueError for invalid ones."""
        point = target.point
        size = _validate.positive_integer("dataset_size", dataset_size)
        batch = _validate.positive_number("batch_size", batch_size)
        n = _validate.positive_integer("iterations", iterations)
        work = workload_named(workload, n) if isinstance(workload, str) else checked_workload(workload)
        _validate.one_of("adjacency", adjacency, ADJACENCIES)
        return cls(size, batch, n, *point, work, given, adjacency)

    @property
    def run(self) -> dict[str, Any]:
        """Arguments of schemes and of a `Choice`."""
        return {name: getattr(self, name) for name in ("dataset_size", "batch_size", "iterations")}

    @property
    def cycle(self) -> float:
        """Steps in which an example participates once, on average."""
        return self.dataset_size / self.batch_size

    @property
    def at_most_once(self) -> bool:
        """Whether the expected number of participations of an example is at most 1."""
        return self.iterations <= self.cycle

    @property
    def room(self) -> int:
        """Largest separation at which a fixed number of participations fits."""
        return self.iterations // math.ceil(round(self.iterations / self.cycle, 12))

    def line(self, grid, number: int) -> tuple[list[Scheme], list[Scheme]]:
        """Return the schemes of a number of bands, as in the grid and those of a middle separation first."""
        middle = math.log(max(1.0, self.cycle / 4))
        line = [scheme for scheme, bands in grid if bands == number]
        # Far above the middle tables are larger than below, and the end of the line is no place to begin.
        away = {scheme: math.log(scheme.min_separation) - middle for scheme in line}
        return line, sorted(line, key=lambda scheme: (away[scheme] > 0.5, abs(away[scheme])))

    def grid(self, max_bands: int, scheme, bands, separation) -> list[tuple[Scheme, int]]:
        """Return (scheme, bands) of every candidate: bands are powers of two, separations doublings."""
        n, cycle = self.iterations, self.cycle
        limit = min(max_bands, n, math.floor(cycle))
        pairs: list[tuple[Scheme, int]] = []
        for b in [bands] if bands is not None else dict.fromkeys([*doublings(1, limit), limit]):
            separations = doublings(b, min(n, math.floor(cycle)))
            if cycle == math.floor(cycle) and cycle <= _validate.MAX_SEPARATION:
                separations.append(int(cycle))  # probability 1: balls-in-bins
            if scheme == BalancedMinSep.name:
                separations = [s for s in separations if s <= self.room]
            for s in separations if separation is None else [separation]:
                pair = (self.scheme(scheme, s, separation is not None), b)
                if b <= min(n, pair[0].min_separation) and pair not in pairs:
                    pairs.append(pair)
        return pairs

    def longest(self, grid, name: str | None, separation: int | None) -> Scheme:
        """Return the scheme of largest separation, with which an example participates least often.

        Beyond the doublings of the `grid` it is that of a cycle, or of the whole run.
        """
        if separation is None and name in (None, BMinSep.name, CyclicPoisson.name, BalancedMinSep.name):
            most = self.room if name == BalancedMinSep.name else self.iterations
            return self.scheme(name, min(most, math.floor(self.cycle), _validate.MAX_SEPARATION), False)
        return max((scheme for scheme, _ in grid), key=lambda scheme: scheme.min_separation)

    def fixed_counts(self, max_bands: int, bands, separation) -> dict[str, list]:
        """Return the `grid` of each of `FIXED_COUNTS` that has exactly the rate, with some numbers of bands.

        With at most one participation they are all the first one.
        """
        grids: dict[str, list] = {}
        for name in FIXED_COUNTS[:1] if self.at_most_once else FIXED_COUNTS:
            if name == EpochwiseAllocation.name and self.cycle != math.floor(self.cycle):
                continue
            try:
                grids[name] = [
                    pair for number in bands for pair in self.grid(max_bands, name, number, separation)
                ]
            except ValueError:  # no room at the separation that was given
                continue
        return grids

    def scheme(self, name: str | None, separation: int, given: bool) -> Scheme:
        """Return the scheme of that name, at this separation where it takes one; ValueError if none is."""
        if name is None:
            name, given = ("poisson", False) if separation == 1 else ("b-min-sep", given)
        least = separation if given or "separation" in SCHEMES[name].options else None
        return SCHEMES[name].from_numbers(Numbers(**self.run, separation=separation, min_separation=least))

    def why_none(self, name: str | None, bands: int | None, separation: int | None) -> str:
        """Return the message of a grid without candidates: what limits the bands."""
        cycle = math.floor(self.cycle)
        if separation is not None:
            limit, what = separation, "min_separation"
        elif name is not None and "separation" not in SCHEMES[name].options:
            limit, what = self.scheme(name, 1, False).min_separation, f"the separation of {name},"
        else:
            limit, what = min(self.iterations, cycle), "iterations and dataset_size / batch_size,"
        return f"bands must be at most {what} {limit}, got {bands}"


def memory_of(copies: int | None, matrix: str | None, bands: int | None) -> tuple[str | None, int, int]:
    """Return (name of the matrix, maximum copies, maximum bands) of arguments of `recommend`.

    ValueError for more bands than copies, no copies where noise is not drawn again, or no numbers of them.
    """
    if copies == 0 and matrix is None:
        matrix = INVERSE
    needed = 1 if bands is None else copies_of(_validate.positive_integer("bands", bands), matrix)
    copies = max(MEMORY_COPIES, needed) if copies is None else copies
    copies = _validate.positive_integer("memory_copies", copies, minimum=0)
    if copies == 0 and matrix != INVERSE:
        raise ValueError(
            f"memory_copies must be at least 1 for strategy {matrix}, got 0: it is for {INVERSE}"
        )
    if bands is not None and min(bands, needed) > max(1, copies):
        raise ValueError(f"bands must be at most memory_copies {copies}, got {bands}")
    return matrix, copies, MAX_INVERSE_BANDS if matrix == INVERSE else copies
