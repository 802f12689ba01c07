"""Recommend a scheme, separation, number of bands and matrix to certify, from public numbers alone.

Each candidate has the noise multiplier that it is estimated to need (`noise_estimate`), and candidates are
ranked by the prefix-sum error there, or by the error of the iterates under momentum, weight decay and a
learning-rate schedule. The result is no guarantee, and no samples are drawn. The search reads only the size
of the data set, which neighbours share: it has no privacy cost, and equal numbers give equal choices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxacct.calibration.choice import (
    COEFFICIENTS,
    MATRICES,
    SCHEME_NAMES,
    SEARCHED,
    Choice,
    MatrixName,
    SearchedScheme,
)
from jaxacct.calibration.targets import Target, asked
from jaxacct.common import validate as _validate
from jaxacct.common.progress import Progress
from jaxacct.mechanisms.mechanism import REPLACE_ONE, ZERO_OUT, AdjacencyName
from jaxacct.recommendation import fixed_order
from jaxacct.recommendation.certified import bounded, certified, one_band
from jaxacct.recommendation.grid import RunNumbers, memory_of
from jaxacct.recommendation.matrices import matrix
from jaxacct.recommendation.noise_estimate import Estimates
from jaxacct.recommendation.result import Recommendation, Recommended
from jaxacct.schemes import BalancedMinSep, BallsInBins, FixedOrder, Poisson, Scheme
from jaxacct.strategies import BandedToeplitz, Workload, by_name, ending
from jaxacct.strategies.workload import PREFIX_SUMS, name_of

DEFAULT_MATRICES = ("optimal", "amplified")  # the latter is never behind the square root
SIMILAR_ERROR_RATIO = 1.02  # candidates whose errors have at most this ratio: the one that needs less
LESS_NOISE = 0.95  # of what an accountant certifies, that samples have to be worth
NUM_SHOWN = 8
NUM_SEPARATION_SEARCHES = 3  # numbers of bands and matrices whose separations are searched


def recommend(
    *,
    dataset_size: int,
    batch_size: float,
    iterations: int,
    epsilon: float | None = None,
    delta: float | None = None,
    target: Target | None = None,
    memory_copies: int | None = None,
    scheme: SearchedScheme | None = None,
    bands: int | None = None,
    min_separation: int | None = None,
    strategy: MatrixName | BandedToeplitz | None = None,
    workload: Workload | str = PREFIX_SUMS,
    adjacency: AdjacencyName = ZERO_OUT,
    progress: Progress | None = None,
) -> Recommendation:
    """Rank schemes, separations, bands and matrices by prefix-sum error at estimated noise multipliers.

    The search reads only these public numbers, so it has no privacy cost. Certify what it
    recommends with `calibrate`; the estimates are no guarantee.

    Args:
      dataset_size: number of examples.
      batch_size: expected batch size.
      iterations: number of steps.
      epsilon: target, nats.
      delta: target, in (0, 1).
      target: in place of both; see `calibrate`.
      memory_copies: maximum copies of the parameters (int32 each) that training keeps for the noise: as many
        as bands, the one being made included, so 1 is DP-SGD. 16 by default, or what `bands` need. 0:
        "optimal-inverse" matrices, for `TrainOptions(noise_memory="recompute")`.
      scheme: one of `SCHEME_NAMES`; by default Poisson, b-min-sep at larger separations, and where these are
        best the schemes of `recommendation.grid.FIXED_COUNTS`.
      bands: fixed number of bands; by default all that fit.
      min_separation: fixed minimum separation; by default all that fit.
      strategy: "optimal" (smallest error with participation revealed), "square-root" (closed form),
        "amplified" (smallest error at about this run's noise), "optimal-inverse" (its inverse has `bands`
        bands, by default up to 8), "buffered" (BLT, accounted for with participation revealed; `bands` are
        buffers), or a `BandedToeplitz`, which is kept. By default "optimal" and "amplified", and "buffered"
        where neither is better in the memory allowed.
      workload: what the error is of, a `strategies.Workload` or its name (`strategies.workload_named`): an
        optimizer's iterates, or prefix sums (default). Optimal matrices minimize it, candidates are ranked
        by it. Give the optimizer's where banded and buffered matrices compete: prefix sums can rank these
        against accuracy (guides/accuracy.md).
      adjacency: candidates are ranked at the noise multipliers that it needs; see `calibrate`. For
        "replace-one" schemes with fixed counts are looked at only by name, as they take many samples.
      progress: called with (what, 0, 0).

    Returns:
      The candidates, best first, with estimates and a choice that `calibrate` stores in the plan. One band
      (DP-SGD) is ranked with the others. `Recommendation.calibrate` certifies the next candidates, too, where
      the selected one needs more than 5 % more noise than estimated.

    Raises:
      ValueError: bad arguments, or ones that leave no candidate.

    Example:
      >>> found = recommend(dataset_size=600, batch_size=60, iterations=20, epsilon=4.0, delta=1e-4)
      >>> found.chosen.strategy.bands, found.chosen.memory_copies
      (8, 8)
    """
    given, matrix_name, bands = _matrix_given(strategy, bands)
    goal = asked(target, epsilon, delta)
    numbers = RunNumbers.of(dataset_size, batch_size, iterations, goal, workload, given, adjacency)
    if scheme is not None:
        _validate.one_of("scheme", scheme, SCHEME_NAMES)
    matrix_name, max_copies, max_bands = memory_of(memory_copies, matrix_name, bands)
    if matrix_name == "buffered" and max_copies < 3:
        raise ValueError(f"memory_copies must be at least 3 for strategy buffered, got {max_copies}")
    if min_separation is not None:
        _validate.positive_integer("min_separation", min_separation)
    rate = Poisson.from_batch_size(**numbers.run)
    fixed = scheme, bands, min_separation, matrix_name
    if scheme == FixedOrder.name:
        order = numbers.scheme(scheme, min_separation or 1, True)
        places = fixed_order.places(order, numbers, max_copies, max_bands, bands, matrix_name)
        looked_at = len(places)
    else:
        places, looked_at = _sampled(numbers, rate, fixed, max_copies, max_bands, progress)
    rows, place = _ranked(places)
    options = tuple(name for name, value in zip(SEARCHED, fixed, strict=True) if value is not None)
    about: dict[str, Any] = numbers.run | rows[place].chosen | dict(given=options, looked_at=looked_at)
    about |= dict(epsilon=numbers.epsilon, delta=numbers.delta, adjacency=numbers.adjacency)
    choice = Choice(**about, memory_copies=max_copies, workload=name_of(numbers.workload))
    return Recommendation(rows, place, looked_at, choice)


def _sampled(
    numbers: RunNumbers, rate: Scheme, fixed, max_copies: int, max_bands: int, progress: Progress | None
) -> tuple[list[Recommended], int]:
    """Return (candidates whose batches are sampled, number of all that were looked at).

    `rate` is Poisson sampling with the run's numbers, and `fixed` are (scheme, bands, min_separation,
    matrix), each None where it is searched.
    """
    scheme, bands, min_separation, matrix_name = fixed
    grid = numbers.grid(max_bands, scheme, bands, min_separation)
    if not grid:
        raise ValueError(numbers.why_none(scheme, bands, min_separation))
    if matrix_name != "square-root" and any(number > 1 for _, number in grid):
        numbers.workload.check_size(numbers.iterations, numbers.iterations)  # before the search gets there

    def say(what: str) -> None:
        if progress:
            progress(f"choosing: {what}", 0, 0)

    say("independent noise")
    places: list[Recommended] = []
    if bands == 1 and min_separation is None and matrix_name != "buffered":
        places = one_band(numbers, scheme, progress)
    is_searched, bound = not places and matrix_name != "buffered", None
    if is_searched:
        bound = bounded(grid, matrix_name or DEFAULT_MATRICES[0], numbers, progress)
    estimates = Estimates.at(rate, numbers.epsilon, numbers.delta, numbers.adjacency, numbers.workload)
    search = _Search(numbers, estimates, say)
    if is_searched:
        names = DEFAULT_MATRICES if matrix_name is None else (matrix_name,)
        places = search.climb(grid, names)
        if scheme is None and places and numbers.cycle > 1 and numbers.adjacency != REPLACE_ONE:
            places += search.with_fixed_counts(places, max_bands, min_separation)
        if not places and bound is not None:  # nothing says what samples would certify
            places = [bound]
    looked_at = len(places)
    if matrix_name == "buffered" or (matrix_name is None and bands is None):
        say("buffers")
        place = search.buffered(numbers.longest(grid, scheme, min_separation), max_copies, bands, scheme)
        if place is None and matrix_name == "buffered":
            raise ValueError("min_separation must be above 1 for strategy buffered")
        looked_at += place is not None
        smallest = min((other.error for other in places), default=math.inf)
        if place and place.error <= SIMILAR_ERROR_RATIO * smallest:
            places.append(place)
    if not places:
        own = "" if scheme == BallsInBins.name else ", --min-separation"
        raise ValueError(
            f"scheme {scheme or 'b-min-sep'} takes too long to search at {numbers.iterations:,} iterations; "
            f"`jaxacct calibrate` with --scheme, --bands{own} and --strategy optimal certifies it without"
        )
    return places, looked_at


def _matrix_given(strategy, bands: int | None) -> tuple[BandedToeplitz | None, str | None, int | None]:
    """Return (matrix given by its coefficients, name of the matrix, bands); None for what is searched."""
    if strategy is None or isinstance(strategy, str):
        if strategy is not None:
            _validate.one_of("strategy", strategy, MATRICES)
        return None, strategy, bands
    shown = f"one of {', '.join(MATRICES)}, or a jaxacct.BandedToeplitz"
    given = _validate.instance("strategy", strategy, BandedToeplitz, shown)
    if bands not in (None, given.bands):
        raise ValueError(f"bands must be those of the strategy {given.bands}, got {bands!r}")
    return given, COEFFICIENTS, given.bands


@dataclass(frozen=True)
class _Search:
    """Search of candidates by their estimates; `say` reports what is looked at."""

    numbers: RunNumbers
    estimates: Estimates
    say: Callable[[str], None]

    def buffered(
        self, scheme: Scheme, max_copies: int, buffers: int | None, name: str | None
    ) -> Recommended | None:
        """Return a buffered matrix at the noise that an accountant certifies; None without memory.

        With at most one participation no columns overlap, and the moments are those of any other matrix.
        """
        room = (max_copies - 1) // 2
        if buffers is not None and buffers > room:  # only where it is asked for
            raise ValueError(
                f"memory_copies must be at least {2 * buffers + 1} for {buffers} buffers, got {max_copies}"
            )
        if not room or scheme.min_separation == 1:
            return None
        number = min(room, fixed_order.MAX_BUFFERS) if buffers is None else buffers
        strategy = by_name("buffered", number, scheme, self.numbers.workload)
        place = certified(scheme, strategy, "buffered", self.numbers, None, math.inf, None)
        searched = name is not None or self.numbers.adjacency != REPLACE_ONE
        if self.numbers.at_most_once and searched and name in (None, BalancedMinSep.name):
            n = self.numbers.iterations
            once = BalancedMinSep(n, n, n / self.numbers.cycle)
            sampled = self.estimates.of(once, strategy, "buffered", None)
            most = math.inf if place is None else LESS_NOISE * place.noise_multiplier
            if sampled is not None and sampled.noise_multiplier < most:
                return sampled
        return place

    def with_fixed_counts(self, places, max_bands: int, separation: int | None) -> list[Recommended]:
        """Estimate the schemes with fixed numbers of participations where the others are best.

        Only the numbers of bands and the matrices of the best few are looked at.
        """
        best = sorted(places, key=lambda place: place.error)[:NUM_SEPARATION_SEARCHES]
        matrices = tuple(dict.fromkeys(place.matrix for place in best))
        bands = tuple(dict.fromkeys(place.strategy.named_bands for place in best))
        grids = self.numbers.fixed_counts(max_bands, bands, separation)
        return [place for grid in grids.values() for place in self.climb(grid, matrices, best[0])]

    def climb(self, grid, matrices, first: Recommended | None = None) -> list[Recommended]:
        """Estimate every number of bands and matrix at a middle separation, then climb from the best few.

        The error has one minimum in the separation: a longer lockout hides the example better, until so few
        examples are eligible that a batch nearly determines them. `first` is the result of a similar search.
        """
        seen: dict[tuple, Recommended | None] = {}

        def at(number: int, name: str, scheme: Scheme) -> Recommended | None:
            key = number, name, scheme
            if key not in seen:
                self.say(f"separation {scheme.min_separation}, {number} bands, {name} matrix")
                before = [place for place in seen.values() if place]
                similar = [p for p in before if (p.strategy.named_bands, p.matrix) == (number, name)]
                if self.numbers.given is not None:
                    made = ending(self.numbers.given, scheme)
                else:
                    made = matrix(name, number, scheme, self.numbers.workload, self.estimates.mu)
                like = (similar or before)[-1] if before else first
                if like is None and scheme.sums.fixed_count:
                    like = self.independent(scheme, made, name)
                best_error = min((place.error for place in before), default=math.inf)
                seen[key] = self.estimates.of(scheme, made, name, like, best_error)
            return seen[key]

        firsts = []
        for number in dict.fromkeys(number for _, number in grid):
            line, near = self.numbers.line(grid, number)
            for name in matrices[:1] if number == 1 else matrices:
                place = next(filter(None, (at(number, name, scheme) for scheme in near)), None)
                firsts += [(place, line)] if place else []
        for place, line in sorted(firsts, key=lambda pair: pair[0].error)[:NUM_SEPARATION_SEARCHES]:
            for step in (1, -1):
                here = place
                while 0 <= (i := line.index(here.scheme) + step) < len(line):
                    there = at(here.strategy.named_bands, here.matrix, line[i])
                    if there is None or there.error >= here.error:
                        break
                    here = there
        # Of few bands the best under one criterion may be so under the other.
        different = {(place.scheme, place.strategy): place for place in reversed(seen.values()) if place}
        return list(different.values())

    def independent(self, scheme: Scheme, strategy, matrix_name: str) -> Recommended | None:
        """Estimate independent participations beside a scheme with fixed counts; None where that cannot be.

        Fixed counts have no third moment: without another scheme's, estimates are 3 to 14 % larger.
        """
        separation = max(scheme.min_separation, round(self.numbers.cycle / 2))
        try:
            other = self.numbers.scheme(None, separation, True)
            return self.estimates.of(other, strategy, matrix_name, None)
        except ValueError:
            return None


def _ranked(places: list[Recommended]) -> tuple[tuple[Recommended, ...], int]:
    """Return the rows to show, smallest error first, and the place of the selected one."""
    order = sorted(places, key=lambda place: place.error)
    best_of: dict[int | str, Recommended] = {}
    for place in order:
        best_of.setdefault(place.strategy.named_bands, place)
        best_of.setdefault(place.scheme.name, place)
    shown = [place for place in order if place in order[:NUM_SHOWN] or place in best_of.values()]
    similar = [place for place in shown if place.error <= SIMILAR_ERROR_RATIO * shown[0].error]
    selected = min(similar, key=lambda place: (place.memory_copies, place.error))
    return tuple(shown), shown.index(selected)
