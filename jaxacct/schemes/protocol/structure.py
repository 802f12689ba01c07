"""Structure of a likelihood ratio's sums, which a scheme states of itself."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sums:
    """Structure of a likelihood ratio's sums, on which its rounding depends (proofs/rounding.md, section 3).

    Attributes:
      probability: p, of participating at an eligible step.
      log_none: ln P(x = 0).
      steps: number of steps of one summand, each with a factor 1 - p where there is no participation.
      terms: number of terms of the last sum, 1 where there is none.
      phases: whether that sum is over phases, each with a product of its own.
      log_weights: largest |ln| of the weights of several counts at one step.
      max_sampled: largest batch that a factor of a truncated batch depends on, 0 without truncation.
      processes: number of examples of one unit whose likelihoods are added up jointly.
      times: number of times that the sum of one example is taken, as a bound for the unit.
      fixed_count: k where vectors have k participations, at most, by their number; else 0.
      error: (largest |log-ratio|, its error in units of 2^-24) -> bound on the float32 error of the
        likelihood ratio, natural log; None where it is a recurrence over steps (`likelihood.rounding`).
      table: sampling table whose theorem bounds that error, if any (`schemes.table`).
    """

    probability: float
    log_none: float
    steps: int
    terms: int = 1
    phases: bool = False
    log_weights: float = 0.0
    max_sampled: int = 0
    processes: int = 1
    times: int = 1
    fixed_count: int = 0
    error: Callable[[float, float], float] | None = None
    table: Any = None
