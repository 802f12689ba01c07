"""Cells calibrated, one after another, and kept in a table."""

import csv
import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxacct import CalibrationOptions
from jaxacct.calibration.calibrate import calibrate
from jaxacct.common.files import write_atomically
from jaxacct.common.progress import Progress
from jaxacct.core.evidence import Sampled
from jaxacct.recommendation.matrices import matrix
from jaxacct.recommendation.noise_estimate import Estimates
from jaxacct.schemes import SCHEMES, Poisson, Scheme
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.strategies import by_name
from jaxacct.strategies.workload import PREFIX_SUMS
from tests.benchmarks.paper.setting import EXAMPLES_A_BATCH, Cell

KEYS = tuple(field.name for field in dataclasses.fields(Cell))
FOUND = ("noise_multiplier", "prefix_sum_error", "method", "samples", "seconds")


class Table:
    """A CSV file of finished cells; every one that is added is on disk.

    Columns beyond `KEYS` and `FOUND`, as in older tables, are read over.

    Raises:
      ValueError: for a file that is no such table.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[Cell, dict[str, str]] = {}
        if not path.exists():
            return
        with path.open(newline="", encoding="utf-8") as file:
            try:
                for row in csv.DictReader(file):
                    self.rows[_cell(row)] = {name: row[name] for name in FOUND}
                    self.error_of(_cell(row))
            except (KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError):
                raise ValueError(
                    f"out must hold no other cells.csv, {path} is none of this command"
                ) from None

    def __contains__(self, cell: Cell) -> bool:
        return cell in self.rows

    def error_of(self, cell: Cell) -> float:
        """Prefix-sum error at the noise multiplier that was certified, a number above 0."""
        error = float(self.rows[cell]["prefix_sum_error"])
        if not 0 < error < float("inf"):
            raise ValueError(f"prefix_sum_error must be above 0, got {error!r}")
        return error

    def add(self, cell: Cell, row: dict[str, str]) -> None:
        """Keep a cell, and write the whole table, atomically."""
        self.rows[cell] = row
        lines = [",".join((*KEYS, *FOUND))]
        for key, found in self.rows.items():
            values = [*dataclasses.astuple(key), *(found[name] for name in FOUND)]
            lines.append(",".join(str(value) for value in values))
        write_atomically(self.path, "\n".join(lines) + "\n")

    def best(self, cells: Iterable[Cell]) -> Cell | None:
        """Of those that are finished, the one with the least error."""
        return min((cell for cell in cells if cell in self), key=self.error_of, default=None)


def _cell(row: dict[str, str]) -> Cell:
    return Cell(
        row["scheme"],
        *(int(row[name]) for name in KEYS[1:5]),
        *(float(row[name]) for name in KEYS[5:]),
    )


def scheme_of(cell: Cell) -> Scheme:
    """The scheme of a cell."""
    kind = SCHEMES[cell.scheme]
    takes = "separation" in kind.options
    numbers = Numbers(
        iterations=cell.iterations,
        separation=cell.separation,
        dataset_size=EXAMPLES_A_BATCH * cell.epoch_length,
        batch_size=EXAMPLES_A_BATCH,
        min_separation=cell.separation if takes else None,
    )
    return kind.from_numbers(numbers)


def promising(cells: list[Cell], progress: Progress | None = None) -> list[Cell]:
    """The two cells of a point that are expected to be best, and the best of each kind of separation.

    Nothing is drawn for that. Estimates by moments order a separation that is the number of bands and a
    larger one badly: 32.9 and 38.0 were expected where 35.9 and 31.8 were certified (cinic_10.json, at
    epsilon 4). So the best one of either kind is among those that are returned.
    """
    one = cells[0]
    errors = estimated_errors(
        [(scheme_of(cell), cell.bands) for cell in cells],
        dataset_size=EXAMPLES_A_BATCH * one.epoch_length,
        batch_size=EXAMPLES_A_BATCH,
        epsilon=one.epsilon,
        delta=one.delta,
        progress=progress,
    )
    # One without an estimate, whose tables would take too long, is put last.
    known = [(float("inf") if error is None else error, place) for place, error in enumerate(errors)]
    ranked = [cells[place] for _, place in sorted(known)]
    longer = [cell for cell in ranked if cell.separation > cell.bands]
    equal = [cell for cell in ranked if cell.separation == cell.bands]
    return list(dict.fromkeys([*ranked[:2], *longer[:1], *equal[:1]]))


def certified(cell: Cell, progress: Progress | None = None) -> dict[str, str]:
    """The row of a cell: schemes of independent rounds by privacy loss distributions, others by draws."""
    started = time.monotonic()
    scheme = scheme_of(cell)
    accountant = "pld" if scheme.independent_rounds is not None and cell.scheme != "b-min-sep" else None
    plan = calibrate(
        scheme,
        by_name("optimal", cell.bands, scheme),
        epsilon=cell.epsilon,
        delta=cell.delta,
        progress=progress,
        options=CalibrationOptions(accountant=accountant),
    )
    drawn = plan.evidence.num_samples
    how = "certified" if isinstance(plan.evidence, Sampled) else f"analytic {plan.evidence.accountant}"
    return {
        "noise_multiplier": repr(plan.mechanism.noise_multiplier),
        "prefix_sum_error": repr(plan.prefix_sum_error),
        "method": how,
        "samples": str(drawn),
        "seconds": f"{time.monotonic() - started:.1f}",
    }


def estimated_errors(
    pairs: Sequence[tuple[Scheme, int]],
    *,
    dataset_size: int,
    batch_size: float,
    epsilon: float,
    delta: float,
    progress: Progress | None = None,
) -> list[float | None]:
    """Prefix-sum errors of given schemes with optimal matrices at estimated noise; no guarantee.

    Args:
      pairs: (scheme, bands) each, of equally many steps.
      dataset_size, batch_size: of the run.
      epsilon, delta: the target.
      progress: called with (what, 0, 0).

    Returns:
      An estimate for each pair, None where the moments would take too long.
    """
    n = pairs[0][0].iterations
    rate = Poisson.from_batch_size(dataset_size=dataset_size, batch_size=batch_size, iterations=n)

    def say(what: str) -> None:
        if progress:
            progress(f"estimating: {what}", 0, 0)

    estimates, found, like = Estimates.at(rate, epsilon, delta), [], None
    for scheme, bands in pairs:
        say(f"{scheme.name}, separation {scheme.min_separation}, {bands} bands")
        strategy = matrix("optimal", bands, scheme, PREFIX_SUMS, estimates.mu)
        place = estimates.of(scheme, strategy, "optimal", like)
        like = place or like
        found.append(None if place is None else place.error)
    return found
