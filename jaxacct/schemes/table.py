"""Sampling table: the one process that every sampler of examples is (proofs/sampling_table.md).

A unit that is eligible at step i, with j participations left, joins the batch with probability `join[i, j]`.
It is eligible again `lockout[i]` steps later, with one participation less. A unit that does not join is
eligible at the next step, or, where units take turns, after the lockout as well.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from jaxacct.common import validate
from jaxacct.kernels import exponentials
from jaxacct.kernels.randomness import MIN_PROBABILITY
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS
from jaxacct.kernels.table import Draws, Outcome, draw_counts, log_likelihood_ratios, share_errors, thin

MAX_TABLE_ENTRIES = 2**27  # largest number of entries of `join`


class Unfolded(NamedTuple):
    """Table as rows of `phases` units side by side that wait a single row.

    Where units take turns, a row is a turn, a phase is a place in it, and the lockout is one row. Otherwise
    a row is a step and there is one phase.

    Attributes:
      join: (rows, phases, K) float64; 0 in rows past the end.
      lockout: (rows,) int64, in rows.
    """

    join: np.ndarray
    lockout: np.ndarray


class Path(NamedTuple):
    """Numbers of the likelihood's recurrence, in rows of units that wait a single row.

    With ln f_i[j] the likelihood ratio from row i on, g = ln f - `offsets` is unchanged by a wait, and a
    participation weighs e^(`weights` + its log-ratio + g after it - g).

    Attributes:
      weights: (rows, phases, K) float64, ln; -inf where a unit cannot join.
      certain: (rows, phases, K) bool: an eligible unit joins.
      lockout: (rows,) int64, in rows.
      start: (at most n,) float64: ln of the probability of the first eligible step, plus its offset.
      offsets: (rows, phases, K) float64: ln of the probability of waiting while waiting is possible.
    """

    weights: np.ndarray
    certain: np.ndarray
    lockout: np.ndarray
    start: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, eq=False)
class SamplingTable:
    """Distribution of one unit's participations.

    Attributes:
      join: (n, K) float64: probability that an eligible unit with j participations left joins. K = 1 does
        not count participations; else column 0 is 0, and a unit starts with K - 1 participations left.
      lockout: (n,) int64, at least 1: steps from a participation to the next step at which the unit is
        eligible.
      turns: whether a unit that does not join waits the lockout, too, which is then the same for all steps.
      start: (at most n,) float64: probability that step s is the first eligible one. It sums to at most 1;
        with the rest of the probability the unit never participates. With turns it has at most a lockout's
        entries.
      keep: probability in (0, 1] with which a participation is kept, independently.

    Raises:
      ValueError: a field of another shape or outside of its range.
    """

    join: Any
    lockout: Any
    turns: bool
    start: Any
    keep: float = 1.0
    is_shared: ClassVar[bool] = False  # pyrefly: ignore[bad-override]

    def __post_init__(self):
        join = validate.array("join", self.join, (1, 2))
        join = join[:, None] if join.ndim == 1 else join
        n, num_left = join.shape
        if not 1 <= join.size <= MAX_TABLE_ENTRIES:
            raise ValueError(f"join must have 1 to {MAX_TABLE_ENTRIES} entries, got {join.size}")
        _in_unit_interval("join", join)
        if num_left > 1 and join[:, 0].any():
            raise ValueError("join[:, 0] must be 0: a unit without participations left cannot join")
        raw = np.asarray(self.lockout)
        if raw.dtype.kind not in "iu":
            raise ValueError(f"lockout must be integers, got an array of {raw.dtype}")
        if raw.shape not in ((), (n,)) or raw.min() < 1 or raw.max() >= 2**31:
            raise ValueError(f"lockout must be one integer of at least 1, or {n}, got shape {raw.shape}")
        lockout = np.minimum(np.broadcast_to(raw, (n,)).astype(np.int64), n)
        if not isinstance(self.turns, bool):
            raise ValueError(f"turns must be True or False, got {self.turns!r}")
        if self.turns and (lockout != lockout[0]).any():
            raise ValueError("lockout must be the same for all steps where units take turns")
        start = validate.array("start", self.start, (1,))
        longest = int(lockout[0]) if self.turns else n
        if not 1 <= len(start) <= longest:
            raise ValueError(f"start must have 1 to {longest} entries, got {len(start)}")
        total = math.fsum(start)
        if (start < 0).any() or not 0 < total <= 1 + 1e-12:
            raise ValueError(f"start must be at least 0 and sum to at most 1, got a sum of {total!r}")
        # Rounding of a sum of 1 is no probability of never being eligible; once divided it stays as it is.
        start = start / total if 2.0**-51 < abs(total - 1) <= 1e-12 else start
        keep = validate.probability("keep", self.keep)
        join, lockout, start = map(validate.read_only, (join, lockout, start))
        validate.set_fields(self, join=join, lockout=lockout, start=start, keep=keep)

    @classmethod
    def constant(
        cls, iterations: int, join: float, lockout: int, *, turns=False, start=(1.0,)
    ) -> "SamplingTable":
        """Return the table of one probability to join and one lockout for all steps."""
        return cls(np.full(iterations, join), lockout, turns, start)

    # -- Sizes --------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int:
        """n, the number of steps."""
        return len(self.join)

    @property
    def num_left(self) -> int:
        """K, the number of counts of participations left; 1 where they are not counted."""
        return self.join.shape[1]

    @property
    def min_lockout(self) -> int:
        """Smallest number of steps from a participation to the next one."""
        return int(self.lockout.min())

    @property
    def never(self) -> float:
        """Probability that a unit is never eligible."""
        rest = 1 - math.fsum(self.start)
        return rest if rest > 1e-12 else 0.0

    @property
    def starts(self) -> np.ndarray:
        """Probabilities of the first eligible steps; where there are n + 1, step n is none."""
        if not self.never:
            return self.start
        return np.append(self.start, [0.0] * (self.iterations - len(self.start)) + [self.never])

    @functools.cached_property
    def one_less(self) -> np.ndarray:
        """(K,) int64: participations left after one more."""
        return np.maximum(np.arange(self.num_left) - 1, 0)

    @functools.cached_property
    def unfolded(self) -> Unfolded:
        """The table in rows of units that wait a single row."""
        if not self.turns:
            return Unfolded(self.join[:, None], self.lockout)
        phases = int(self.lockout[0])
        rows = -(-self.iterations // phases)
        padding = ((0, rows * phases - self.iterations), (0, 0))
        join = np.pad(self.join, padding).reshape(rows, phases, self.num_left)
        return Unfolded(join, np.ones(rows, np.int64))

    def _from_the_end(self, value_of, dtype=np.float64) -> np.ndarray:
        """Return (at least rows, phases, K) values by row, which are 0 past the end.

        `value_of` is: (row, values after a wait, values after a participation) -> values of the row.
        """
        join, lockout = self.unfolded
        rows, phases, K = join.shape
        values = np.zeros((rows + 1 + int(lockout.max()), phases, K), dtype)
        for i in range(rows - 1, -1, -1):
            values[i] = value_of(i, values[i + 1], values[i + lockout[i]][:, self.one_less])
        return values

    def _at_start(self, values: np.ndarray) -> np.ndarray:
        """Return the values by row, (rows, phases, K), of a unit at its first eligible steps, a view."""
        return values[0, : len(self.start), -1] if self.turns else values[: len(self.start), 0, -1]

    @functools.cached_property
    def path(self) -> Path:
        """Numbers of the likelihood's recurrence (`kernels.table`)."""
        join, lockout = self.unfolded
        certain, rows = join == 1, len(join)
        with np.errstate(divide="ignore"):
            log_join, log_wait, log_start = np.log(join), np.log1p(-join), np.log(self.start)
        log_wait[certain] = 0.0
        offsets = self._from_the_end(lambda i, waits, joins: np.where(certain[i], joins, log_wait[i] + waits))
        joined = offsets[np.arange(rows) + lockout][..., self.one_less]
        start = self._at_start(offsets) + log_start
        return Path(log_join + joined - offsets[:rows], certain, lockout, start, offsets[:rows])

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """What an eligible unit may do that makes it ineligible for a lockout."""
        shares = (1, self.keep), (0, 1 - self.keep)  # of participations that count, and of others
        found = [Outcome(share * self.join, examples, True) for examples, share in shares]
        if self.turns:
            found.append(Outcome(1 - self.join, 0, False))
        return [outcome for outcome in found if outcome.chance.any()]

    @functools.cached_property
    def leaves(self) -> np.ndarray:
        """(n, K) float64: probability that an eligible unit has one of the `outcomes`."""
        return np.ones_like(self.join) if self.turns else self.join

    @property
    def max_outcomes(self) -> int:
        """Largest number of outcomes of one unit."""
        return -(-self.iterations // self.min_lockout) if self.turns else self.max_participations

    @functools.cached_property
    def draws(self) -> Draws:
        """Words of the draws of participations."""
        return Draws.of(self.outcomes, self.lockout, self.starts, self.max_outcomes)

    # -- Likelihood, draws and their errors ------------------------------------------------------------------

    def log_likelihood_ratios(self, log_ratios):
        """Return ln of the likelihood ratio of (n, num_samples) log-ratios, (num_samples,); jittable.

        On a GPU one kernel computes many samples where it can (`gpu_recurrence`), equal up to rounding.
        """
        path, ratios = self.path, thin(log_ratios, self.keep)
        table = path.weights, path.certain, path.lockout, path.start, self.never
        if jax.default_backend() == "gpu":
            from jaxacct.kernels.likelihoods import gpu_recurrence  # elsewhere nothing needs it

            if gpu_recurrence.serves(*table[:3], ratios.dtype):
                # A machine with a GPU may still run this on its CPU.
                by_kernel, by_scan = (
                    lambda ratios, recurrence=each: log_likelihood_ratios(ratios, *table, recurrence)
                    for each in (gpu_recurrence.kernel_values, None)
                )
                return jax.lax.platform_dependent(ratios, cuda=by_kernel, default=by_scan)
        return log_likelihood_ratios(ratios, *table)

    def draw_counts(self, key, num_samples: int):
        """Draw (num_samples, `max_outcomes`) int32: participations, ascending, n is none, and their examples.

        Jittable.
        """
        return draw_counts(key, num_samples, self.draws)

    @functools.cached_property
    def draw_errors(self) -> tuple[float, float]:
        """(relative, total variation) errors of `draw_counts` (proofs/sampling_table.md, section 4)."""
        reached, leaves = self.eligible_probabilities > 0, self.leaves
        waits = reached & (leaves > 0) & (leaves < 1)
        of_waits = exponentials.ERROR / float(leaves.min(where=waits, initial=1.0)) if waits.any() else 0.0
        of_kinds, rare_kinds = self.outcome_errors
        # The last wait has no outcome, and every step's hazard is rounded; with certain outcomes none waits.
        last = exponentials.ERROR + self.iterations * 2.0**-44 if (leaves < 1).any() else 0.0
        of_start, rare_starts = self.start_errors
        relative = self.max_outcomes * (of_waits + of_kinds) + of_start + last
        variation = (self.iterations + 1) * 2.0**-62 + rare_kinds
        return math.expm1(min(600.0, relative)), self.max_outcomes * variation + rare_starts

    @property
    def outcome_errors(self) -> tuple[float, float]:
        """(relative, total variation) errors of the choice of an outcome in the worst reached state."""
        reached = (self.eligible_probabilities > 0) & (self.leaves > 0)
        if len(self.outcomes) == 1 or not reached.any():
            return 0.0, 0.0
        chances = np.stack([outcome.chance[reached] for outcome in self.outcomes]) / self.leaves[reached]
        return share_errors(chances, len(chances))

    @property
    def start_errors(self) -> tuple[float, float]:
        """(relative, total variation) errors of the first eligible step."""
        number = len(self.starts)
        return share_errors(self.starts, number) if number > 1 else (0.0, 0.0)

    def rounding_bound(self, count: int, largest: float, max_ratio: float, ratio_error: float) -> float:
        """Bound the float32 error of ln of a summand of the likelihood (proofs/sampling_table.md, section 3).

        Args:
          count: number of participations of the summand.
          largest: ln of the likelihood ratio, at most.
          max_ratio: largest |log-ratio| of one participation.
          ratio_error: error of one log-ratio, in units of 2^-24.

        Returns:
          The error, natural log.
        """
        weights, certain, _, start, offsets = self.path
        rows, phases, _ = weights.shape
        reached = (self.eligible_probabilities > 0) & (self.join > 0)
        reached = np.pad(reached, ((0, rows * phases - self.iterations), (0, 0))).reshape(weights.shape)
        weight = float(np.abs(np.where(reached, weights, 0.0)).max())
        offset = float(np.abs(np.where(reached, offsets, 0.0)).max())
        finite = start[np.isfinite(start)]
        ends = float(np.abs(finite).max()) + (abs(math.log(self.never)) if self.never else 0.0)
        if self.keep < 1:
            log_odds = abs(math.log(self.keep)) + 2 * abs(math.log1p(-self.keep))
            ratio_error += (SOFTPLUS_ROUNDINGS + 6) * (max_ratio + log_odds + 1)
        growth, sizes = self.max_participations * max_ratio + offset, 8
        increments = 2 * (count + 1) * growth
        if self.num_left == 1 and not certain.any():  # g never decreases from a row to the one before it
            growth, sizes = min(growth, max(largest, 0.0) + ends), 4
            increments = growth
        local = ratio_error + 4 * (weight + max_ratio) + sizes * growth
        common = (SOFTPLUS_ROUNDINGS + 3) * increments + rows * 2.0**-24 * growth
        last = len(start) + 21 + 4 * (growth + ends)
        return 2.0**-24 * (count * local + common + last)

    # -- Probabilities ------------------------------------------------------------------------------------

    @functools.cached_property
    def eligible_probabilities(self) -> np.ndarray:
        """(n, K) float64: probability of being eligible at a step with j participations left."""
        join, lockout = self.unfolded
        rows, phases, K = join.shape
        eligible = np.zeros((rows + 1, phases, K))
        self._at_start(eligible)[:] = self.start
        for i in range(rows):
            joins = eligible[i] * join[i]
            if i + lockout[i] < rows:
                eligible[i + lockout[i], :, : K - 1 or 1] += joins[:, K > 1 :]
            eligible[i + 1] += eligible[i] * (1 - join[i])
        return eligible[:rows].reshape(-1, K)[: self.iterations]

    @functools.cached_property
    def participation_probabilities(self) -> np.ndarray:
        """(n,) float64: probability of participating at each step."""
        return self.keep * (self.eligible_probabilities * self.join).sum(axis=1)

    @functools.cached_property
    def max_participations(self) -> int:
        """Largest number of participations with a positive probability, at least 1."""
        join, lockout = self.unfolded
        if self.num_left == 1 and self.join.min() > 0 and lockout.min() == lockout.max():
            # From any step the next participations may follow each other at once.
            return -(-(self.iterations - int(np.flatnonzero(self.start)[0])) // self.min_lockout)

        def longest(i, waits, joins):
            return np.maximum(np.where(join[i] > 0, 1 + joins, 0), np.where(join[i] < 1, waits, 0))

        most = self._at_start(self._from_the_end(longest, np.int64))
        return max(1, int(most[self.start > 0].max()))

    @functools.cached_property
    def log_probability_of_none(self) -> float:
        """Ln of the probability of no participation, rounded down; -inf where it is 0."""
        join, _ = self.unfolded
        with np.errstate(divide="ignore"):
            waits, log_lost = np.log1p(-join), np.log(join) + np.log1p(-self.keep)
            if self.keep < 1:
                log_none = self._from_the_end(
                    lambda i, idle, lost: np.logaddexp(waits[i] + idle, log_lost[i] + lost)
                )
                firsts = self._at_start(log_none)
            elif self.turns:
                firsts = np.array([math.fsum(row) for row in waits[:, : len(self.start), -1].T.tolist()])
            else:
                first, *others = waits[: len(self.start), 0, -1][::-1].tolist()
                rest = math.fsum([first, *waits[len(self.start) :, 0, -1].tolist()])
                firsts = np.cumsum([rest, *others])[::-1]
            additions = 4 * len(join) if self.keep < 1 else len(self.start)
            found = float(logsumexp(np.append(np.log(self.start) + firsts, np.log(self.never))))
        # More than the rounding of so many sums, logarithms and exponentials of such numbers.
        return (
            min(0.0, found - 2.0**-52 * (64 + additions) * (1 + abs(found))) if found > -math.inf else found
        )


@dataclass(frozen=True, eq=False)
class CountsTable(SamplingTable):
    """Table of participations of several kinds; for draws, and for two replicas.

    Attributes:
      kinds: (number of the unit's examples, its probability given a participation, of all steps or (n,)).
      is_shared: whether the kind is that of the step, for all who participate in it.
    """

    kinds: tuple[tuple[int, Any], ...] = ()
    is_shared: bool = False

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        # Kinds of a probability that underflows stay: their attraction may be beyond float64.
        return [Outcome(np.reshape(p, (-1, 1)) * self.join, examples, True) for examples, p in self.kinds]


def _in_unit_interval(name: str, values: np.ndarray) -> None:
    """ValueError for a probability that is none, or that draws of 64 bits do not resolve."""
    fits = (values == 0) | (values == 1) | ((values >= MIN_PROBABILITY) & (values <= 1 - MIN_PROBABILITY))
    if not fits.all():
        raise ValueError(
            f"{name} must be probabilities, each 0, 1 or at least 2^-48 from both, got {values[~fits][0]!r}"
        )
