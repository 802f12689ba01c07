"""Which scheme, separation, number of bands and matrix to certify, from public numbers alone.

Every candidate is given the noise multiplier that it will about need, and candidates are ranked by the
prefix-sum error there, or by what momentum, weight decay and a schedule make of the noise. Nothing here is a
guarantee, nothing is drawn, and nothing of the data is looked at but its size, which neighbours share: so the
choice spends nothing, and the same numbers always choose alike.

The estimate. With f the likelihood ratio and Q the law without the example, the moments `Z_m = E_Q f^m` are
known exactly for two and three replicas (proofs/proposals.md). A Gaussian mechanism of sensitivity mu has
`ln Z_m = m (m - 1) mu^2 / 2`, so for each m there is a noise multiplier s_m at which Z_m is that of the
Gaussian mechanism that just meets the target. The truth lies on the line through (2, s_2) and (3, s_3) at an
order that depends on epsilon and delta, and hardly on the candidate; Poisson sampling of independent noise,
for which the truth is known (`accountants.pld`), says where.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxacct.accountants import unamplified
from jaxacct.calibration.calibrate import LEAST_SEARCHED
from jaxacct.calibration.choice import MATRICES, SCHEME_NAMES, SEARCHED, Choice
from jaxacct.common import validate as _validate
from jaxacct.common.progress import Progress
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.candidates import FEW_SAMPLES, predicted_samples
from jaxacct.proposals.families import replicas
from jaxacct.schemes import SCHEMES, BalancedMinSep, Poisson, Scheme, scheme_from_json, scheme_to_json
from jaxacct.schemes.numbers import Numbers
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.subsampled_gaussian import composed_subsampled_gaussian
from jaxacct.strategies import (
    BandedToeplitz,
    BufferedToeplitz,
    Strategy,
    Workload,
    ending,
    prefix_sum_error,
    workload_error,
    workload_named,
)
from jaxacct.strategies.amplified import amplified
from jaxacct.strategies.workload import PREFIX_SUMS
from jaxacct.strategies.workload import checked as checked_workload
from jaxacct.strategies.workload_names import PREFIX_SUM, name_of

MEMORY_COPIES = 16
_BUFFERS = 4  # more are hardly better (tests/benchmarks/RESULTS.md)
_LOOKED_FOR = ("optimal", "amplified")  # the latter is never behind the square root
# Candidates whose errors are this near are as good as each other: the one that needs less is taken.
ALIKE = 1.02
_SHOWN = 8
_CLIMBED = 3  # numbers of bands and matrices, whose separations are looked at
_MOST_NUMBERS = 2e7  # of a table of second moments, about half a second
_MOST_OF_THIRD = 1e8  # of third moments, which end early: a few seconds
# Of third moments that take a quarter of a second or more: not worth it where the error is so much larger
# than another's by the second moment and the ratio of a candidate that is alike, which is right to 3 %.
_MUCH_OF_THIRD, _FAR_BEHIND = 5e6, 1.06
_FURTHEST_ORDER = 20.0
_SHORT = 1024  # steps of a run whose moments are not worth extrapolating
# On two CPU cores (tests/benchmarks/RESULTS.md): of programs, of a step of a draw, of a number of a table.
_COMPILE_SECONDS, _STEP_SECONDS, _NUMBER_SECONDS = 10.0, 7e-9, 1.6e-7
# Of a calibration, about: noise multipliers with tables and pilot draws of their own, and verifications of
# the predicted length.
_LOOKED_AT, _PILOT, _VERIFICATIONS = 10, 8192, 2.5


@dataclass(frozen=True)
class Recommended:
    """A candidate with estimates of what it gives and of what it takes to certify it; no guarantee.

    Attributes:
      scheme: who takes part when.
      strategy: how noise is correlated.
      matrix: "optimal", "square-root", "amplified" or "buffered".
      memory_copies: of the parameters, which training keeps for the noise, the one being made included.
      noise_multiplier: an estimate of the smallest one that can be certified.
      prefix_sum_error: mean squared error of prefix sums at that noise multiplier, an estimate.
      error: of the workload that candidates are ranked by, an estimate; prefix sums by default.
      predicted_samples: draws of one verification; an estimate.
      predicted_seconds: of `calibrate` on two CPU cores, roughly.
      accountant: by which `calibrate` is to certify it without draws, or None for draws.
    """

    scheme: Scheme
    strategy: Strategy
    matrix: str
    memory_copies: int
    noise_multiplier: float
    prefix_sum_error: float
    error: float
    predicted_samples: float
    predicted_seconds: float
    accountant: str | None = None

    def to_json(self) -> dict:
        """Plain JSON values."""
        return {
            "scheme": scheme_to_json(self.scheme),
            "bands": self.strategy.named_bands,
            "min_separation": self.scheme.min_separation,
            "matrix": self.matrix,
            "memory_copies": self.memory_copies,
            "noise_multiplier_estimate": self.noise_multiplier,
            "prefix_sum_error_estimate": self.prefix_sum_error,
            "error_estimate": self.error,
            "predicted_samples": self.predicted_samples,
            "predicted_seconds": self.predicted_seconds,
        }

    def options(self) -> str:
        """Of `jaxacct calibrate`, besides those of the problem."""
        separation = (
            f" --min-separation {self.scheme.min_separation}" if _takes_separation(self.scheme) else ""
        )
        by = "" if self.accountant is None else f" --accountant {self.accountant}"
        bands = self.strategy.named_bands
        return f"--scheme {self.scheme.name}{separation} --bands {bands} --strategy {self.matrix}{by}"

    def describe(self) -> str:
        """For people, a clause."""
        bands = self.strategy.bands
        if self.matrix == "buffered":
            number = self.strategy.named_bands
            buffers = f"{number} buffer{'s' * (number > 1)} (BLT), participation revealed"
            return f"{self.scheme.name}, separation {self.scheme.min_separation}, {buffers}"
        matrix = "1 band, which is DP-SGD" if bands == 1 else f"{bands} bands, {self.matrix} matrix"
        return f"{self.scheme.name}, separation {self.scheme.min_separation}, {matrix}"


@dataclass(frozen=True)
class Recommendation:
    """Candidates ranked by the error of the workload at the noise that each will about need.

    Attributes:
      candidates: the best of all that were looked at, smallest error first, with DP-SGD among them where
        nothing rules it out.
      place: of the one to take: the one that keeps fewest copies, then the cheapest to certify, of those
        whose error is within 2 % of the smallest.
      looked_at: how many candidates there were.
      choice: what was searched and what was chosen, for the plan (`calibrate(..., choice=)`).
    """

    candidates: tuple[Recommended, ...]
    place: int
    looked_at: int
    choice: Choice

    @property
    def chosen(self) -> Recommended:
        """The one to take."""
        return self.candidates[self.place]

    @property
    def one_band(self) -> Recommended | None:
        """The best with independent noise (DP-SGD), to compare with; None where it was ruled out."""
        return next((c for c in self.candidates if c.strategy.bands == 1), None)

    @property
    def what_error(self) -> str:
        """The name of the error that candidates are ranked by."""
        workload = self.choice.workload
        return "prefix-sum error" if workload == PREFIX_SUM else f"error of {workload or 'this schedule'}"

    def table(self) -> str:
        """For people; the choice has a star."""
        heads = ("scheme", "separation", "bands", "matrix", "copies", "noise", "error", "samples", "seconds")
        rows = [
            (
                c.scheme.name,
                str(c.scheme.min_separation),
                str(c.strategy.named_bands),
                "none" if c.strategy.bands == 1 else c.matrix,
                str(c.memory_copies),
                f"~{c.noise_multiplier:.3g}",
                f"~{c.error:.4g}",
                f"~{c.predicted_samples:,.0f}",
                f"~{c.predicted_seconds:.0f}",
            )
            for c in self.candidates
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = []
        for i, row in enumerate((heads, *rows)):
            star = "* " if i - 1 == self.place else "  "
            lines.append(star + "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)))
        return "\n".join(lines)

    def why(self) -> str:
        """What was chosen and why, for people."""
        chosen, best, dp_sgd = self.chosen, self.candidates[0], self.one_band
        error = f"{self.what_error} about {chosen.error:.3g}"
        if chosen is best:
            why = f"{error}, the smallest of {self.looked_at} looked at"
        else:
            saved = "is cheaper to certify"
            if chosen.memory_copies < best.memory_copies:
                saved = "needs less memory"
            smallest = f"within 2 % of the smallest of {self.looked_at} looked at"
            why = f"{error}, {smallest}, and it {saved}"
        against = ""
        if dp_sgd is not None and chosen.strategy.bands > 1:
            against = f"; independent noise (DP-SGD) would have about {dp_sgd.error:.3g}"
        copies = "copy" if chosen.memory_copies == 1 else "copies"
        return (
            f"chosen: {chosen.describe()}; it keeps {chosen.memory_copies} {copies} of the parameters\n"
            f"why:    {why}{against}\n"
            "cost:   nothing of epsilon or delta: the search saw public numbers alone, nothing of the data; "
            "these are estimates"
        )

    def to_json(self) -> dict:
        """Plain JSON values."""
        return {
            "kind": "recommendation",
            "chosen": self.place,
            "looked_at": self.looked_at,
            "data_independent": True,
            "choice": self.choice.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


@dataclass(frozen=True)
class _Numbers:
    """What the search is about; all of it public."""

    dataset_size: int
    batch_size: float
    iterations: int
    epsilon: float
    delta: float
    workload: Workload

    @classmethod
    def of(cls, dataset_size, batch_size, iterations, epsilon, delta, advantage, workload) -> "_Numbers":
        """Of arguments of `recommend`; ValueError for bad ones."""
        epsilon, delta = _validate.target(epsilon, delta, advantage)
        return cls(
            dataset_size=_validate.positive_integer("dataset_size", dataset_size),
            batch_size=_validate.positive_number("batch_size", batch_size),
            iterations=_validate.positive_integer("iterations", iterations),
            epsilon=epsilon,
            delta=delta,
            workload=workload_named(workload, iterations)
            if isinstance(workload, str)
            else checked_workload(workload),
        )


@dataclass(frozen=True)
class _Moment:
    """The noise multiplier at which a moment is what it is to be, and the slope of logs there."""

    noise_multiplier: float
    slope: float


@dataclass(frozen=True)
class _Place:
    """A candidate with its estimated noise multiplier, and the second and third moments it comes from."""

    scheme: Scheme
    strategy: Strategy
    matrix: str
    noise_multiplier: float
    workload: Workload
    moments: "tuple[_Moment, ...]" = ()

    @property
    def error(self) -> float:
        return self.noise_multiplier**2 * _unit_error(self.strategy, self.scheme.iterations, self.workload)


def recommend(
    *,
    dataset_size: int,
    batch_size: float,
    iterations: int,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    memory_copies: int = MEMORY_COPIES,
    scheme: str | None = None,
    bands: int | None = None,
    min_separation: int | None = None,
    strategy: str | None = None,
    workload: Workload | str = PREFIX_SUMS,
    progress: Progress | None = None,
) -> Recommendation:
    """Rank schemes, separations, bands and matrices by prefix-sum error at estimated noise.

    The search sees these numbers and nothing of the data, so nothing is spent by it. Certify what it
    recommends with `calibrate`; the estimates are no guarantee.

    Args:
      dataset_size: number of examples.
      batch_size: expected batch size.
      iterations: number of steps.
      epsilon, delta: the target; epsilon a natural log.
      advantage: another target, in place of both; see `calibrate`.
      memory_copies: the most copies of the parameters (int32 each) that training may keep for the noise; b
        bands keep b - 1 and make one more, so 1 is DP-SGD.
      scheme: one of `SCHEME_NAMES`; by default Poisson, and b-min-sep at larger separations.
      bands, min_separation: fixed ones; all that fit by default.
      strategy: "optimal", "square-root" or "amplified": best where participation is revealed, for any number
        of steps, or at the noise that this run is about to need. By default the first and the last. And
        "buffered" (BLT; `bands` are buffers), accounted for with participation revealed: by default where no
        other is better in the memory allowed.
      workload: rank by the error of an optimizer's iterates, which the optimal matrices are then made for; a
        `strategies.Workload` or the name of one (`strategies.workload_named`). Prefix sums by default.
      progress: called with (what, 0, 0).

    Raises:
      ValueError: bad arguments, or ones that leave no candidate.

    Example:
      >>> found = recommend(dataset_size=600, batch_size=60, iterations=20, epsilon=4.0, delta=1e-4)
      >>> found.chosen.strategy.bands, found.chosen.memory_copies
      (8, 8)
    """
    numbers = _Numbers.of(dataset_size, batch_size, iterations, epsilon, delta, advantage, workload)
    most = _validate.positive_integer("memory_copies", memory_copies)
    if scheme is not None:
        _validate.one_of("scheme", scheme, SCHEME_NAMES)
    if strategy is not None:
        _validate.one_of("strategy", strategy, MATRICES)
    if bands is not None and _validate.positive_integer("bands", bands) > most:
        raise ValueError(f"bands must be at most memory_copies {most}, was {bands}")
    if min_separation is not None:
        _validate.positive_integer("min_separation", min_separation)
    rate = Poisson.from_batch_size(
        dataset_size=numbers.dataset_size, batch_size=numbers.batch_size, iterations=numbers.iterations
    )
    grid = _grid(numbers, most, scheme, bands, min_separation)
    if not grid:
        raise ValueError(_why_none(numbers, scheme, bands, min_separation))

    if strategy != "square-root" and any(number > 1 for _, number in grid):
        numbers.workload.check_size(iterations, iterations)  # before the search gets there

    def say(what: str) -> None:
        if progress:
            progress(f"choosing: {what}", 0, 0)

    found, looked_at = [], 0
    if strategy != "buffered":
        estimates = _Estimates.at(rate, numbers.epsilon, numbers.delta, say)
        found = _search(grid, _LOOKED_FOR if strategy is None else (strategy,), estimates, numbers, say)
        looked_at = len(found)
    if strategy == "buffered" and most < 3:
        raise ValueError(f"memory_copies must be at least 3 for strategy buffered, was {most}")
    if strategy == "buffered" or (strategy is None and bands is None):
        say("buffers")
        place = _buffered(grid, most, bands, numbers)
        if place is None and strategy == "buffered":
            raise ValueError("min_separation must be above 1 for strategy buffered")
        looked_at += place is not None
        if place and (not found or place.error <= ALIKE * min(other.error for other in found)):
            found.append(place)
    if not found:
        raise ValueError(
            "min_separation must be smaller for a search: the moments of such a scheme take too long; "
            "`jaxacct calibrate` with --scheme, --bands and --min-separation certifies it"
        )
    say("the cost of certifying")
    rows, place = _ranked(found, numbers)
    chosen, options = rows[place], dict(zip(SEARCHED, (scheme, bands, min_separation, strategy), strict=True))
    choice = Choice(
        dataset_size=numbers.dataset_size,
        batch_size=numbers.batch_size,
        iterations=numbers.iterations,
        epsilon=numbers.epsilon,
        delta=numbers.delta,
        memory_copies=most,
        workload=name_of(numbers.workload),
        given=tuple(name for name, value in options.items() if value is not None),
        looked_at=looked_at,
        scheme=chosen.scheme.name,
        min_separation=chosen.scheme.min_separation,
        bands=chosen.strategy.named_bands,
        matrix=chosen.matrix,
    )
    return Recommendation(rows, place, looked_at, choice)


def _buffered(grid, most: int, buffers: int | None, numbers: _Numbers) -> _Place | None:
    """A buffered matrix with participation revealed, at the largest separation; None where there is no room.

    Nothing is known about its moments before draws, but what the revealed pattern needs is known exactly. For
    large epsilon and little memory that is enough: a buffer is two copies.
    """
    room = (most - 1) // 2
    if buffers is not None and buffers > room:  # only where it is asked for
        raise ValueError(
            f"memory_copies must be at least {2 * buffers + 1} for {buffers} buffers, was {most}"
        )
    scheme = max((scheme for scheme, _ in grid), key=lambda scheme: scheme.min_separation)
    if not room or scheme.min_separation == 1:
        return None
    number = min(room, _BUFFERS) if buffers is None else buffers
    strategy = _best_buffers(number, scheme, numbers.workload)
    mu = _gaussian(numbers.epsilon, numbers.delta)
    noise = unamplified.sensitivity(Mechanism(scheme, strategy, 1.0)) / mu
    return _Place(scheme, strategy, "buffered", max(LEAST_SEARCHED, noise), numbers.workload)


def _best_buffers(buffers: int, scheme: Scheme, workload: Workload) -> BufferedToeplitz:
    return BufferedToeplitz.optimal(
        iterations=scheme.iterations,
        buffers=buffers,
        min_separation=scheme.min_separation,
        participations=scheme.max_participations,
        workload=workload,
    )


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

    estimates, found, like = _Estimates.at(rate, epsilon, delta, say), [], None
    for scheme, bands in pairs:
        say(f"{scheme.name}, separation {scheme.min_separation}, {bands} bands")
        strategy = _matrix("optimal", bands, scheme, PREFIX_SUMS, estimates.mu)
        place = estimates.of(scheme, strategy, "optimal", like, PREFIX_SUMS)
        like = place or like
        found.append(None if place is None else place.error)
    return found


def _search(grid, matrices, estimates: "_Estimates", numbers: _Numbers, say) -> list[_Place]:
    """Every number of bands and matrix at a middling separation, then uphill from the best few of them.

    The error has one minimum in the separation: sitting out hides the example better, until so few are left
    to be drawn from that the draw says who they are.
    """
    seen: dict[tuple, _Place | None] = {}

    def at(number: int, matrix: str, scheme: Scheme) -> _Place | None:
        key = number, matrix, scheme
        if key not in seen:
            say(f"separation {scheme.min_separation}, {number} bands, {matrix} matrix")
            before = [place for place in seen.values() if place]
            alike = [place for place in before if (place.strategy.bands, place.matrix) == (number, matrix)]
            like = (alike or before)[-1] if before else None
            made = _matrix(matrix, number, scheme, numbers.workload, estimates.mu)
            least = min((place.error for place in before), default=math.inf)
            seen[key] = estimates.of(scheme, made, matrix, like, numbers.workload, least)
        return seen[key]

    firsts = []
    for number in dict.fromkeys(number for _, number in grid):
        line, near = _line(grid, number, numbers)
        for matrix in matrices[:1] if number == 1 else matrices:
            place = next(filter(None, (at(number, matrix, scheme) for scheme in near)), None)
            firsts += [(place, line)] if place else []
    for place, line in sorted(firsts, key=lambda pair: pair[0].error)[:_CLIMBED]:
        for step in (1, -1):
            here = place
            while 0 <= (i := line.index(here.scheme) + step) < len(line):
                there = at(here.strategy.bands, here.matrix, line[i])
                if there is None or there.error >= here.error:
                    break
                here = there
    # Of few bands the best under one criterion may be so under the other.
    different = {(place.scheme, place.strategy): place for place in reversed(seen.values()) if place}
    return list(different.values())


def _line(grid, number: int, numbers: _Numbers) -> tuple[list[Scheme], list[Scheme]]:
    """The schemes of a number of bands, as in the grid and with those of a middling separation first."""
    middle = math.log(max(1.0, numbers.dataset_size / numbers.batch_size / 4))
    line = [scheme for scheme, bands in grid if bands == number]
    # Far above the middle tables are larger than below, and the end of the line is no place to begin.
    away = {scheme: math.log(scheme.min_separation) - middle for scheme in line}
    return line, sorted(line, key=lambda scheme: (away[scheme] > 0.5, abs(away[scheme])))


@functools.lru_cache(maxsize=64)
def _optimal(bands: int, iterations: int, workload: Workload) -> BandedToeplitz:
    # The separation is checked and changes nothing.
    return BandedToeplitz.optimal(
        iterations=iterations,
        bands=bands,
        min_separation=bands,
        participations=-(-iterations // bands),
        workload=workload,
    )


def _matrix(name: str, bands: int, scheme: Scheme, workload: Workload, mu: float) -> Strategy:
    if name == "amplified":
        return _amplified(bands, scheme, workload, mu)
    n = scheme.iterations
    made = _optimal(bands, n, workload) if name == "optimal" else BandedToeplitz.square_root(bands)
    return ending(made, scheme)


def amplified_matrix(
    bands: int,
    scheme: Scheme,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    workload: Workload = PREFIX_SUMS,
) -> Strategy:
    """The matrix that `recommend` calls "amplified": of least error at the noise that it needs with sampling.

    Args:
      bands: most.
      scheme: one of `SCHEME_NAMES`.
      epsilon, delta: the target; epsilon a natural log.
      advantage: another target, in place of both; see `calibrate`.
      workload: what the error is of.

    Raises:
      ValueError: bad arguments, or moments of the scheme that take too long.
    """
    bands = _validate.positive_integer("bands", bands)
    _validate.one_of("scheme", scheme.name, SCHEME_NAMES)
    BandedToeplitz.square_root(bands).check(scheme)
    if _numbers_of_table(scheme, BandedToeplitz.square_root(bands), 2) > _MOST_NUMBERS:
        raise ValueError(
            f"min_separation must be smaller for strategy amplified, was {scheme.min_separation}"
        )
    mu = _gaussian(*_validate.target(epsilon, delta, advantage))
    return _amplified(bands, scheme, checked_workload(workload), mu)


@functools.lru_cache(maxsize=256)
def _amplified(bands: int, scheme: Scheme, workload: Workload, mu: float) -> Strategy:
    """The best by second moments of the square-root matrix and of amplified ones, which are made for noise
    multipliers from it and for 1, 2, 4, .. repeats, uphill from how regular participation is.
    """
    n, most = scheme.iterations, scheme.max_participations
    root = ending(BandedToeplitz.square_root(bands), scheme)
    if bands == 1 or _numbers_of_table(scheme, root, 2) > _MOST_NUMBERS:
        return root
    of_root = by_moment(scheme, root, 2, mu)
    noise = of_root.noise_multiplier
    repeats, nearest = sorted({*_doublings(1, most), most}), of_root

    @functools.cache
    def tried(i: int) -> tuple[float, Strategy]:
        nonlocal nearest
        made = amplified(
            iterations=n, bands=bands, noise_multiplier=noise, repeats=repeats[i], workload=workload
        )
        strategy = ending(made, scheme)
        nearest = by_moment(scheme, strategy, 2, mu, nearest)
        sigma = nearest.noise_multiplier
        return sigma**2 * _unit_error(strategy, n, workload), strategy

    expected = most * scheme.sums.probability
    first = min(range(len(repeats)), key=lambda i: abs(math.log(repeats[i] / max(1.0, expected))))
    found = [(noise**2 * _unit_error(root, n, workload), root)]
    for step in (1, -1):
        i = first
        while 0 <= i + step < len(repeats) and tried(i + step)[0] < tried(i)[0]:
            i += step
        found.append(tried(i))
    return min(found, key=lambda pair: pair[0])[1]


@functools.lru_cache(maxsize=256)
def _unit_error(strategy: Strategy, iterations: int, workload: Workload) -> float:
    """At noise multiplier 1; the same for every separation."""
    if workload == PREFIX_SUMS:
        return prefix_sum_error(strategy, iterations=iterations, noise_multiplier=1.0)
    return workload_error(strategy, iterations=iterations, noise_multiplier=1.0, workload=workload)


def _ranked(found: list[_Place], numbers: _Numbers) -> tuple[tuple[Recommended, ...], int]:
    """The rows to show, smallest error first, and the place of the one to take."""
    order = sorted(found, key=lambda place: place.error)
    shown = [*order[:_SHOWN]]
    shown += [place for place in _first_of_each(order) if place not in shown]
    budget = Budget.split(numbers.delta)
    rows = [_priced(place, numbers.epsilon, budget) for place in sorted(shown, key=lambda p: p.error)]
    alike = [row for row in rows if row.error <= ALIKE * rows[0].error]
    taken = min(alike, key=lambda row: (row.memory_copies, row.predicted_seconds))
    return tuple(rows), rows.index(taken)


def _first_of_each(places: list[_Place]) -> list[_Place]:
    """The best of each number of bands."""
    best: dict[int, _Place] = {}
    for place in sorted(places, key=lambda place: place.error):
        best.setdefault(place.strategy.bands, place)  # of buffered ones there is one
    return list(best.values())


def copies_of(strategy: Strategy) -> int:
    """Copies of the parameters that training keeps for the noise of C, the one being made included."""
    return strategy.noise_copies + 1


def _grid(numbers: _Numbers, most: int, scheme, bands, separation) -> list[tuple[Scheme, int]]:
    """(scheme, bands) of every candidate: bands in powers of two, separations in doublings of the bands."""
    n, cycle = numbers.iterations, numbers.dataset_size / numbers.batch_size
    limit = min(most, n, math.floor(cycle))
    found: list[tuple[Scheme, int]] = []
    for b in [bands] if bands is not None else dict.fromkeys([*_doublings(1, limit), limit]):
        wanted = _doublings(b, min(n, math.floor(cycle)))
        if cycle == math.floor(cycle):
            wanted.append(int(cycle))  # probability 1: balls-in-bins
        if scheme == BalancedMinSep.name:  # as many steps as there is room for
            room = n // math.ceil(round(n / cycle, 12))
            wanted = [s for s in wanted if s <= room]
        for s in wanted if separation is None else [separation]:
            pair = (_scheme(numbers, scheme, s, separation is not None), b)
            if b <= min(n, pair[0].min_separation) and pair not in found:
                found.append(pair)
    return found


def _scheme(numbers: _Numbers, name: str | None, separation: int, given: bool) -> Scheme:
    """The scheme of that name, at this separation where it takes one; ValueError if it cannot be."""
    if name is None:
        name, given = ("poisson", False) if separation == 1 else ("b-min-sep", given)
    takes = _takes_separation(SCHEMES[name])
    return SCHEMES[name].from_numbers(
        Numbers(
            iterations=numbers.iterations,
            separation=separation,
            dataset_size=numbers.dataset_size,
            batch_size=numbers.batch_size,
            min_separation=separation if takes or given else None,
        )
    )


def _takes_separation(scheme: Scheme | type[Scheme]) -> bool:
    return "separation" in scheme.options


def _doublings(first: int, last: int) -> list[int]:
    found = []
    while first <= last:
        found.append(first)
        first *= 2
    return found


def _why_none(numbers: _Numbers, name: str | None, bands: int | None, separation: int | None) -> str:
    cycle = math.floor(numbers.dataset_size / numbers.batch_size)
    if separation is not None:
        limit, what = separation, "min_separation"
    elif name is not None and not _takes_separation(SCHEMES[name]):
        limit, what = _scheme(numbers, name, 1, False).min_separation, f"the separation of {name},"
    else:
        limit, what = min(numbers.iterations, cycle), "iterations and dataset_size / batch_size,"
    return f"bands must be at most {what} {limit}, was {bands}"


@dataclass(frozen=True)
class _Estimates:
    """How noise multipliers are estimated for one target.

    Attributes:
      mu: sensitivity per unit of noise of the Gaussian mechanism that just meets the target.
      order: m - 2 of the point on the line through s_2 and s_3, in units of s_3 - s_2.
      ratio: of the truth to s_2 for Poisson sampling; for others where s_3 would take too long and nothing
        alike has one.
      third: s_3 over s_2 of Poisson sampling, near where others have theirs.
    """

    mu: float
    order: float
    ratio: float
    third: float

    @classmethod
    def at(cls, poisson: Scheme, epsilon: float, delta: float, say: Callable[[str], None]) -> "_Estimates":
        """From Poisson sampling of independent noise with the same numbers."""
        say("independent noise")
        return _estimates_at(poisson, epsilon, delta)

    def of(
        self,
        scheme: Scheme,
        strategy: Strategy,
        matrix: str,
        like: _Place | None,
        workload: Workload,
        least: float = math.inf,
    ) -> _Place | None:
        """One candidate, looked for from another; None where even its second moment takes too long.

        Where s_3 would take too long the ratio to s_2 is that of the other one: Poisson sampling of
        independent noise has up to a tenth more, and long separations would look that much worse. So it is
        where s_3 would take long and by that ratio the error is far behind the `least` there is.
        """
        if _numbers_of_table(scheme, strategy, 2) > _MOST_NUMBERS:
            return None
        known = like.moments if like is not None else ()
        second = by_moment(scheme, strategy, 2, self.mu, known[0] if known else 1.0)
        ratio = self.ratio if like is None else like.noise_multiplier / like.moments[0].noise_multiplier
        noise, moments = ratio * second.noise_multiplier, (second,)
        numbers = _numbers_of_table(scheme, strategy, 3)
        behind = _Place(scheme, strategy, matrix, noise, workload).error > _FAR_BEHIND * least
        if numbers <= (_MUCH_OF_THIRD if like is not None and behind else _MOST_OF_THIRD):
            start: _Moment | float = self.third * second.noise_multiplier
            if len(known) > 1:
                start = known[1].noise_multiplier / known[0].noise_multiplier * second.noise_multiplier
                start = _Moment(start, known[1].slope)
            third = by_moment(scheme, strategy, 3, self.mu, start)
            noise = second.noise_multiplier + self.order * (third.noise_multiplier - second.noise_multiplier)
            moments = (second, third)
        # Revealing the pattern is enough, whatever the line says.
        most = unamplified.sensitivity(Mechanism(scheme, strategy, 1.0)) / self.mu
        return _Place(scheme, strategy, matrix, min(most, max(LEAST_SEARCHED, noise)), workload, moments)


def _gaussian(epsilon: float, delta: float) -> float:
    """Sensitivity per unit of noise of the Gaussian mechanism that just meets a target."""
    step = Mechanism(Poisson(1, 1.0), BandedToeplitz.identity(), 1.0)
    return 1 / unamplified.noise_multiplier_for(step, epsilon, delta)


@functools.lru_cache(maxsize=16)
def _estimates_at(poisson: Scheme, epsilon: float, delta: float) -> _Estimates:
    identity, mu = BandedToeplitz.identity(), _gaussian(epsilon, delta)
    second, third = (by_moment(poisson, identity, m, mu).noise_multiplier for m in (2, 3))
    truth = _poisson_noise(poisson, epsilon, delta, second)
    order = (truth - second) / (third - second) if abs(third - second) > 1e-6 * second else 0.0
    return _Estimates(mu, min(_FURTHEST_ORDER, max(-1.0, order)), truth / second, third / second)


def by_moment(
    scheme: Scheme, strategy: Strategy, m: int, mu: float, start: "_Moment | float" = 1.0
) -> _Moment:
    """The noise multiplier at which `ln Z_m = m (m - 1) mu^2 / 2`; `LEAST_SEARCHED` at least.

    Looked for from `start`, which may be what was found for a mechanism much like this one.
    """

    def excess(log_sigma):
        mechanism = Mechanism(scheme, strategy, math.exp(log_sigma))
        log_z = log_moment(mechanism, m)
        return math.log(max(log_z, 1e-300) * 2 / (m * (m - 1))) - 2 * math.log(mu)

    if isinstance(start, _Moment):
        found, slope = _root_and_slope(excess, math.log(start.noise_multiplier), start.slope, 0.05)
    else:
        found, slope = _root_and_slope(excess, math.log(start), -2.0 * m)
    return _Moment(math.exp(found), slope)


def log_moment(mechanism: Mechanism, m: int) -> float:
    """`ln Z_m`, of a long run from two shorter ones: it grows alike with every step once patterns have mixed.

    Two participations s steps apart forget where they began as waits of variance (1 - p) / p^2 add up to the
    square of the separation b: after about (b p)^2 / (1 - p) waits of b steps.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sums.probability
    mixing = b * (b * p) ** 2 / (1 - p) if p < 1 else math.inf
    about = getattr(scheme.replicas, "log_normalizer_about", None)
    if about is not None and scheme.sums.fixed_count:  # tables are those of the whole run
        return about(mechanism, m)
    if m > 2 and about is not None and 4 * mixing <= n:  # else weights may grow alike for a while only
        return about(mechanism, m)
    short = max(_SHORT, 8 * b, 4 * mixing)
    ends_at_n = strategy.bands > 1 and strategy.rows(n) == n
    if n <= 2 * short or scheme.sums.phases or ends_at_n:
        return replicas.log_normalizer(mechanism, m)

    def of(steps):
        shorter = scheme_from_json(scheme_to_json(scheme) | {"iterations": steps})
        return replicas.log_normalizer(Mechanism(shorter, strategy, mechanism.noise_multiplier), m)

    long = math.ceil(short)
    half, whole = of(long // 2), of(long)
    return whole + (n - long) * (whole - half) / (long - long // 2)


def _poisson_noise(poisson: Scheme, epsilon: float, delta: float, start: float) -> float:
    """The noise multiplier of DP-SGD under Poisson sampling, by its privacy loss distribution."""
    if poisson.largest_rate == 1:
        return start  # a Gaussian mechanism, whose moments are exact
    # Losses rounded to this grid add up to a thousandth of epsilon or so; they reach to about start^-2.
    finest = math.sqrt(1e-3 * max(1.0, epsilon) / poisson.iterations)
    interval = min(5e-3, 0.02 * max(epsilon, delta), finest)
    interval = max(interval, 5e-5 / start**2)

    rounds = poisson.independent_rounds
    assert rounds is not None

    def excess(log_sigma):
        sigma = math.exp(log_sigma)
        found = composed_subsampled_gaussian(
            rounds[0], sigma, rounds[1], epsilon, delta=delta, interval=interval
        )
        return math.log(max(found, 1e-300) / delta)

    # A target that holds far below needs no estimate.
    return math.exp(_falling_root(excess, math.log(start), -15.0, math.log(max(0.7 * start, LEAST_SEARCHED))))


def _falling_root(
    f: Callable[[float], float], x: float, slope: float, least: float = math.log(LEAST_SEARCHED)
) -> float:
    """The root of a falling function that may be infinite on the left, to 1e-4 or so; `least` at least."""
    return _root_and_slope(f, x, slope, 0.2, least)[0]


def _root_and_slope(
    f: Callable[[float], float],
    x: float,
    slope: float,
    doubt: float = 0.2,
    least: float = math.log(LEAST_SEARCHED),
) -> tuple[float, float]:
    """(root as of `_falling_root`, slope near it), from `x` and a slope that is right but for that `doubt`.

    The secant method, kept inside of what is known.
    """
    low, high = -math.inf, math.inf
    x = max(x, least)
    before = None
    for _ in range(60):
        y = f(x)
        if y <= 0 and x <= least:
            return least, slope
        low, high = (x, high) if y > 0 else (low, x)
        if before is not None and math.isfinite(y) and math.isfinite(before[1]) and x != before[0]:
            secant = (y - before[1]) / (x - before[0])
            if (
                secant < 0
            ):  # of a function of logs, whose slope changes no faster than twice as fast as they do
                slope, doubt = secant, 2 * abs(x - before[0])
        before = (x, y)
        step = max(-1.0, min(1.0, -y / slope)) if math.isfinite(y) else math.copysign(0.5, y)
        if math.isfinite(y) and abs(step) * (doubt + abs(step)) < 1e-4:  # the step after this one, about
            return x + step, slope
        x = x + step
        if not low < x < high:
            x = (low + high) / 2
        x = max(x, least)
    return high, slope


def _numbers_of_table(scheme: Scheme, strategy: Strategy, m: int) -> float:
    """Numbers that computing `Z_m` takes, about; infinite where there are no tables."""
    mechanism = Mechanism(scheme, strategy, 1.0)
    if float(scheme.min_separation) ** 2 > _MOST_NUMBERS or m > replicas.most_replicas(mechanism):
        return math.inf
    tuples = float(scheme.min_separation) ** m
    if scheme.sums.fixed_count:
        return replicas.table_samples(mechanism, m) * scheme.iterations
    if scheme.sums.probability == 1:
        return tuples
    if scheme.sums.phases:
        return max(tuples, replicas.table_samples(mechanism, m) * scheme.iterations)
    return replicas.table_samples(mechanism, m) * scheme.iterations / 15


def _samples(mechanism: Mechanism, epsilon: float, budget: Budget) -> tuple[float, int]:
    """(draws to verify the remove direction, replicas that they are of), as `verify` would choose, about."""

    def needed(log_scale: float) -> float:
        theta = math.exp(min(0.0, math.log(budget.delta_v) - log_scale))
        return predicted_samples(theta, budget.failure_probability)

    samples, replicas_of, last = needed(0.0), 1, math.inf
    for m in range(2, replicas.most_replicas(mechanism) + 1):
        # Fewer draws than these are not worth the tables of one more (`around_the_smallest_scale`).
        if (last if last > FEW_SAMPLES else 0.0) <= replicas.table_samples(mechanism, m) and m > 2:
            break
        log_z = log_moment(mechanism, m)
        if not math.isfinite(log_z):
            break
        before, last = last, needed(replicas.log_scale(log_z, m, epsilon))
        if last < samples:
            samples, replicas_of = last, m
        if last >= before:
            break
    return samples, replicas_of


def _priced(place: _Place, epsilon: float, budget: Budget) -> Recommended:
    """With the cost of certifying it, as far as it is known before anything is drawn."""
    n, accountant = place.scheme.iterations, None
    if place.matrix == "buffered":
        samples, seconds, accountant = 0.0, 1.0, "unamplified"
    else:
        mechanism = Mechanism(place.scheme, place.strategy, place.noise_multiplier)
        samples, m = _samples(mechanism, epsilon, budget)
        tables = _numbers_of_table(place.scheme, place.strategy, m) if m > 1 else 0.0
        drawn = _LOOKED_AT * max(_PILOT, samples / 10) + _VERIFICATIONS * samples
        seconds = _COMPILE_SECONDS + drawn * n * _STEP_SECONDS + _LOOKED_AT * tables * _NUMBER_SECONDS
    return Recommended(
        scheme=place.scheme,
        strategy=place.strategy,
        matrix=place.matrix,
        memory_copies=copies_of(place.strategy),
        noise_multiplier=place.noise_multiplier,
        prefix_sum_error=place.noise_multiplier**2 * _unit_error(place.strategy, n, PREFIX_SUMS),
        error=place.error,
        predicted_samples=samples,
        predicted_seconds=seconds,
        accountant=accountant,
    )
