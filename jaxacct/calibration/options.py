"""What steers the search of a calibration, and never its guarantee."""

import dataclasses
from concurrent.futures import Executor
from pathlib import Path

from jaxacct.accountants import ACCOUNTANTS, AccountantName
from jaxacct.common import validate
from jaxacct.core.blocks import check_executor
from jaxacct.core.evidence import RULES, RuleName

MIN_RATIO = 1.00001  # smallest ratio of a grid of candidates
BOUND_RATIO, SAMPLE_RATIO = 1.0005, 1.01  # of neighbouring noise multipliers: of accountants, of samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How `calibrate` searches: its time, samples, evidence and machines.

    Attributes:
      seconds: time for samples, which refine a bound where pilot runs predict at least 3 % less noise, above
        0 or infinite: CPU time of this process on two cores, so that other processes do not change the
        result, or wall-clock time with an accelerator or an executor. A stage that has begun is finished, so
        that a call may take longer.
      grid_ratio: ratio of neighbouring noise multipliers, in [1.00001, 2]; by default 1.0005 for bounds and
        1.01 for samples.
      max_samples: maximum samples for each direction and candidate; by default a few hundred times the
        minimum of the target, as far as `seconds` allow, or half a million or more for a given noise
        multiplier.
      rule: stop as soon as the evidence suffices (anytime), or draw a fixed number of samples (see `verify`).
      proposal: use this proposal distribution, such as plain; by default the cheapest.
      accountant: certify by this bound, or by the best ("analytic"), without samples; unamplified and
        revealed-pattern hold for multi-attribution where users share examples, random-allocation is for
        balls-in-bins and for at most one participation. Where a bound is close (C = I with Poisson sampling,
        balls-in-bins, epochwise allocation at separation 1), it is final unless rule, max_samples or proposal
        ask for samples.
      checkpoint_dir: keep finished batches of samples in this folder; the same call then resumes.
      executor: as of `verify`: its workers draw the samples of verifications; this process draws the pilots.
      share: part of q that this call may use, in (0, 1]. Where one of several calls' plans is chosen by what
        was certified, their shares must add up to at most 1.
      estimate: noise multiplier at which the search starts, such as `Recommended.noise_multiplier`; the
        search is faster near its result, and nothing else depends on it.

    Raises:
      ValueError: an invalid option, or one that another one leaves without effect.
    """

    seconds: float = 60.0
    grid_ratio: float | None = None
    max_samples: int | None = None
    rule: RuleName = "anytime"
    proposal: str | None = None
    accountant: AccountantName | None = None
    checkpoint_dir: str | Path | None = None
    executor: Executor | None = None
    share: float = 1.0
    estimate: float | None = None

    def __post_init__(self):
        seconds, folder = self.seconds, self.checkpoint_dir
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"seconds must be a number above 0, got {seconds!r}")
        ratio = self.grid_ratio
        if ratio is not None and not MIN_RATIO <= validate.positive_number("grid_ratio", ratio) <= 2:
            raise ValueError(f"grid_ratio must be in [{MIN_RATIO}, 2], got {ratio!r}")
        if self.max_samples is not None:
            validate.positive_integer("max_samples", self.max_samples)
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"checkpoint_dir must be a folder, got the file {folder}")
        check_executor(self.executor)
        validate.one_of("rule", self.rule, RULES)
        validate.probability("share", self.share)
        if self.estimate is not None:
            validate.positive_number("estimate", self.estimate)
        if self.accountant is not None:
            validate.one_of("accountant", self.accountant, ("analytic", *ACCOUNTANTS))
            for name in ("max_samples", "proposal", "checkpoint_dir", "executor", "rule"):
                if getattr(self, name) not in (None, "anytime"):
                    raise ValueError(
                        f"{name} must not be given together with accountant: no samples are drawn"
                    )

    @property
    def named(self) -> str | None:
        """Accountant of the bound, None for the best one."""
        return None if self.accountant == "analytic" else self.accountant

    @property
    def asks_for_samples(self) -> bool:
        """Whether samples are wanted where a bound is as good."""
        return (self.rule, self.max_samples, self.proposal) != ("anytime", None, None)

    @property
    def asks_for_evidence(self) -> bool:
        """Whether samples, their folder or machines, or an accountant are asked for."""
        others = self.accountant, self.checkpoint_dir, self.executor
        return self.asks_for_samples or others != (None, None, None)

    @property
    def grids(self) -> tuple[float, float]:
        """Ratios of the grids of bounds and of samples."""
        ratio = self.grid_ratio
        return (BOUND_RATIO, SAMPLE_RATIO) if ratio is None else (ratio, ratio)


DEFAULTS = CalibrationOptions()
