"""Ranked candidates, the recommended one among them, as data and as text."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from jaxacct.calibration.calibrate import NotCertifiedError, calibrate
from jaxacct.calibration.choice import COEFFICIENTS, INVERSE, Choice, options_of
from jaxacct.calibration.options import DEFAULTS, CalibrationOptions
from jaxacct.calibration.pilots import Clock
from jaxacct.calibration.targets import Target
from jaxacct.common.progress import announce
from jaxacct.core.plan import Plan
from jaxacct.core.shares import RANKED_SHARES
from jaxacct.schemes import Poisson, Scheme, scheme_to_json
from jaxacct.strategies import Strategy, Workload, workload_error
from jaxacct.strategies.workload import PREFIX_SUM, PREFIX_SUMS

MAX_EXCESS = 1.05  # certified noise multiplier over the estimate up to which the selected candidate is kept
MIN_TIME = 0.5  # fraction of the seconds that has to be left for samples of a further candidate

_A_DRAW = 16.0  # ms for a million normals on one CPU core (guides/matrices.md)
REVEALED = "unamplified"  # accountant of candidates whose participations are revealed


@functools.lru_cache(maxsize=256)
def unit_error(strategy: Strategy, iterations: int, workload: Workload) -> float:
    """Return the error at noise multiplier 1; the same for every separation."""
    return workload_error(strategy, iterations=iterations, noise_multiplier=1.0, workload=workload)


@dataclass(frozen=True)
class Recommended:
    """A candidate with estimates of its noise and error; no guarantee.

    Attributes:
      scheme: sampling scheme.
      strategy: strategy matrix.
      matrix: "optimal", "square-root", "amplified", "optimal-inverse", "buffered", or "coefficients" for a
        given one.
      noise_multiplier: an estimate of the smallest one that can be certified.
      workload: what candidates are ranked by; prefix sums by default.
      moments: noise multipliers of the moments that the estimate comes from; empty without any.
      accountant: accountant that certifies it without samples in `calibrate`, or None for samples.
    """

    scheme: Scheme
    strategy: Strategy
    matrix: str
    noise_multiplier: float
    workload: Workload
    moments: tuple[float, ...] = ()
    accountant: str | None = None

    @property
    def memory_copies(self) -> int:
        """Copies of the parameters that training keeps for the noise, the current one included.

        0 for an inverse, whose noise is drawn again.
        """
        return 0 if self.matrix == INVERSE else self.strategy.memory_copies

    @property
    def prefix_sum_error(self) -> float:
        """Mean squared error of prefix sums at that noise multiplier, an estimate."""
        return self.noise_multiplier**2 * unit_error(self.strategy, self.scheme.iterations, PREFIX_SUMS)

    @property
    def error(self) -> float:
        """Estimated error of the workload."""
        return self.noise_multiplier**2 * unit_error(self.strategy, self.scheme.iterations, self.workload)

    def error_at(self, noise_multiplier: float) -> float:
        """Return the error of the workload at another noise multiplier."""
        return self.error * (noise_multiplier / self.noise_multiplier) ** 2

    @property
    def noise_memory(self) -> str:
        """Option of `TrainOptions` with which training keeps so many copies."""
        return "recompute" if self.matrix == INVERSE else "keep"

    @property
    def has_fixed_counts(self) -> bool:
        """Whether all examples participate equally often, thinning aside."""
        return self.scheme.patterns is None and self.scheme.sums.fixed_count > 0

    @property
    def chosen(self) -> dict[str, Any]:
        """Fields of a `Choice` that this candidate decides."""
        bands, separation = self.strategy.named_bands, self.scheme.min_separation
        return dict(scheme=self.scheme.name, bands=bands, min_separation=separation, matrix=self.matrix)

    def to_json(self) -> dict:
        """Return plain JSON values."""
        return self.chosen | {
            "scheme": scheme_to_json(self.scheme),
            "memory_copies": self.memory_copies,
            "noise_memory": self.noise_memory,
            "noise_multiplier_estimate": self.noise_multiplier,
            "prefix_sum_error_estimate": self.prefix_sum_error,
            "error_estimate": self.error,
        }

    def options(self, file: str = "FILE") -> str:
        """Return the options of `jaxacct calibrate` beside the problem's; `file` has given coefficients."""
        separation = self.scheme.min_separation if "separation" in self.scheme.options else None
        chosen: dict[str, Any] = dict(scheme=self.scheme.name, min_separation=separation)
        chosen |= dict(bands=self.strategy.named_bands, strategy=self.matrix, accountant=self.accountant)
        if self.matrix == COEFFICIENTS:
            chosen |= dict(bands=None, strategy=file)
        return options_of(**chosen).lstrip()

    def describe(self) -> str:
        """Return a clause for people."""
        number = self.strategy.named_bands
        matrix = f"{number} bands, {self.matrix} matrix"
        if self.matrix == "buffered":
            matrix = f"{number} buffer{'s' * (number > 1)} (BLT)"
            matrix += ", participation revealed" if self.accountant == REVEALED else ""
        elif self.strategy.bands == 1:
            matrix = "1 band, which is DP-SGD"
        elif self.matrix == COEFFICIENTS:
            matrix = f"{number} bands, the given coefficients"
        elif self.matrix == INVERSE:
            matrix = f"inverse of {number} bands"
        if self.has_fixed_counts and self.scheme.max_participations == 1:
            return f"{self.scheme.name}, at most one participation, {matrix}"
        return f"{self.scheme.name}, separation {self.scheme.min_separation}, {matrix}"


def _say(how: dict[str, Any], text: str) -> None:
    if how.get("progress"):
        announce(how["progress"], text)


@dataclass(frozen=True)
class Recommendation:
    """Candidates ranked by the error of the workload at the noise multiplier that each is estimated to need.

    Attributes:
      candidates: the best of all candidates, smallest error first, with DP-SGD among them where nothing rules
        it out.
      place: of the selected one: of those whose error is within 2 % of the smallest, the best of those that
        keep fewest copies.
      looked_at: number of candidates.
      choice: what was searched and selected, for the plan.
    """

    candidates: tuple[Recommended, ...]
    place: int
    looked_at: int
    choice: Choice

    @property
    def chosen(self) -> Recommended:
        """Selected candidate."""
        return self.candidates[self.place]

    def calibrate(self, options: CalibrationOptions = DEFAULTS, **how) -> Plan:
        """Certify the selected candidate: `jaxacct.calibrate` with its scheme, matrix and target.

        Where the candidate was ranked by an accountant's bound, this certifies it, unless options ask for
        samples. Where the certified noise multiplier is more than 5 % above the estimate, the next candidates
        are certified as well: up to two more in order of rank, each while half of the `seconds` are left,
        which all of them share, then independent noise with Poisson sampling, whose accountant is exact. This
        ends at a noise multiplier that keeps to its estimate; candidates whose estimated error is not below
        the smallest certified one are left out. The plan of the smallest certified error is returned, and
        `progress` reports why. As results decide which plan that is, the candidates share the failure
        probability q (`core.shares.RANKED_SHARES`).

        Args:
          options: of `jaxacct.calibrate`, without an estimate.
          how: other arguments of `jaxacct.calibrate`, besides those that the search decides: scheme,
            strategy, target and dataset_size.

        Example:
          >>> import jaxacct
          >>> run = dict(dataset_size=600, batch_size=60, iterations=20)
          >>> found = jaxacct.recommend(**run, epsilon=4.0, delta=1e-4)
          >>> plan = found.calibrate(jaxacct.CalibrationOptions(accountant="unamplified"))
          >>> plan.epsilon, plan.choice == found.choice.to_json()
          (4.0, True)
        """
        is_default = not options.asks_for_evidence
        is_default &= how.get("key") is None and how.get("noise_multiplier") is None
        how.setdefault("adjacency", self.choice.adjacency)
        row, (share, *other_shares) = self.chosen, RANKED_SHARES
        seconds, clock = options.seconds, Clock(None, options.seconds, options.executor)
        certified = [(row, self._calibrated(row, options, how, share if is_default else None))]
        for other, share in zip(self._next_candidates if is_default else (), other_shares, strict=False):
            row, plan = certified[-1]
            if plan.noise_multiplier <= MAX_EXCESS * row.noise_multiplier:
                break
            if other.error >= min(each.error_at(made.noise_multiplier) for each, made in certified):
                continue
            if other.accountant is None and clock.left < MIN_TIME * seconds:
                continue
            excess = (
                f"certified noise multiplier {plan.noise_multiplier:.5g} is more than 5 % above the estimate"
            )
            _say(how, f"{row.describe()}: {excess} {row.noise_multiplier:.5g}; next: {other.describe()}")
            if other.accountant is None:
                options = dataclasses.replace(options, seconds=clock.left)
            try:
                certified.append((other, self._calibrated(other, options, how, share)))
            except (ValueError, NotCertifiedError) as error:  # the best plan stands
                _say(how, f"{other.describe()}: {error}")
        best, plan = min(certified, key=lambda pair: pair[0].error_at(pair[1].noise_multiplier))
        if best is not self.chosen:
            _say(how, f"{best.describe()}, takes the place of {self.chosen.describe()}: smaller error")
        return plan

    @property
    def _next_candidates(self) -> tuple[Recommended, ...]:
        """Candidates that are certified where the selected one needs more noise than estimated."""
        ranked = [row for row in self.candidates if row is not self.chosen][: len(RANKED_SHARES) - 2]
        one, choice = self.one_band, self.choice
        if one is None or {"scheme", "min_separation"} & set(choice.given):
            return tuple(ranked)
        numbers = dict(dataset_size=choice.dataset_size, iterations=choice.iterations)
        scheme = Poisson.from_batch_size(batch_size=choice.batch_size, **numbers)
        poisson = dataclasses.replace(one, scheme=scheme, accountant="pld")
        others = [row for row in ranked if (row.scheme, row.strategy) != (scheme, one.strategy)]
        is_chosen = (self.chosen.scheme, self.chosen.strategy) == (scheme, one.strategy)
        return tuple(others) if is_chosen else (*others, poisson)

    def _calibrated(
        self, row: Recommended, options: CalibrationOptions, how: dict, share: float | None
    ) -> Plan:
        """Return the plan of a candidate: with a share of q, by its own accountant, if it has one."""
        choice = dataclasses.replace(self.choice, **row.chosen)
        if share is not None:
            accountant: Any = row.accountant
            options = dataclasses.replace(options, accountant=accountant, share=share)
        plan = calibrate(
            row.scheme,
            row.strategy,
            target=Target(choice.epsilon, choice.delta),
            dataset_size=choice.dataset_size,
            options=dataclasses.replace(options, estimate=row.noise_multiplier),
            **how,
        )
        return dataclasses.replace(plan, choice=choice.to_json())

    @property
    def one_band(self) -> Recommended | None:
        """Best with independent noise (DP-SGD), to compare with; None where it was ruled out."""
        return next((c for c in self.candidates if c.strategy.bands == 1), None)

    @property
    def what_error(self) -> str:
        """Name of the error that candidates are ranked by."""
        workload = self.choice.workload
        return "prefix-sum error" if workload == PREFIX_SUM else f"error of {workload or 'this schedule'}"

    def table(self) -> str:
        """Return a table for people; the selected candidate has a star."""
        heads = ("scheme", "separation", "bands", "matrix", "copies", "noise", "error")
        rows: list[tuple[str, ...]] = [heads]
        for c in self.candidates:
            matrix = "none" if c.strategy.bands == 1 else c.matrix
            numbers = c.scheme.min_separation, c.strategy.named_bands, matrix, c.memory_copies
            rows.append((c.scheme.name, *map(str, numbers), f"~{c.noise_multiplier:.3g}", f"~{c.error:.4g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            ("* " if i - 1 == self.place else "  ")
            + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
            for i, row in enumerate(rows)
        )

    def why(self) -> str:
        """Return what was selected and why, for people."""
        chosen, best, dp_sgd = self.chosen, self.candidates[0], self.one_band
        why = f"the smallest of {self.looked_at} candidates"
        if chosen is not best:
            why = f"within 2 % of {why}, and it needs less memory"
        if dp_sgd is not None and chosen.strategy.bands > 1:
            why += f"; independent noise (DP-SGD) would have about {dp_sgd.error:.3g}"
        other = next((c for c in self.candidates if not c.has_fixed_counts), None)
        if chosen.has_fixed_counts and other is not None:
            why += (
                f"; {other.scheme.name}, where the number of participations varies, about {other.error:.3g}"
            )
        copies = "copy" if chosen.memory_copies == 1 else "copies"
        draws, again = chosen.strategy.named_bands - 1, ""
        if chosen.matrix == INVERSE and draws:
            again = (
                f", {draws} draw{'s' * (draws > 1)} a step more (about {_A_DRAW * draws:.2g} ms for a "
                f'million parameters on a CPU core), by TrainOptions(noise_memory="{chosen.noise_memory}")'
            )
        return (
            f"selected: {chosen.describe()}; it keeps {chosen.memory_copies} {copies} of the parameters"
            f"{again}\n"
            f"why: {self.what_error} about {chosen.error:.3g}, {why}\n"
            "privacy cost of this search: none (it reads only public numbers); these are estimates"
        )

    def to_json(self) -> dict:
        """Return plain JSON values."""
        return {
            "kind": "recommendation",
            "chosen": self.place,
            "looked_at": self.looked_at,
            "data_independent": True,
            "choice": self.choice.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }
