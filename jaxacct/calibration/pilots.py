"""Pilots: samples that pick the candidates of a calibration, which fresh samples then verify.

They are no guarantee: that comes from the verification of `route`.
"""

import dataclasses
import math
import os
import time
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from jaxacct.calibration.options import CalibrationOptions
from jaxacct.common.progress import Progress, announce
from jaxacct.core.claim import Claim
from jaxacct.core.verify import Run, Stop, choose_run
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.threshold import Resolved
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import Direction

NUM_PILOT_BLOCKS = 16  # blocks of a pilot between two looks at its terms
PILOT_SHARES = 0.02, 0.125
"""Smallest and largest fraction of the limit on samples that a pilot draws, but where its terms suffice."""
FEW_TERMS, SOME_TERMS, MANY_TERMS = 10, 30, 100
"""Sum of terms that rejects a candidate, that predicts its samples, and that ends every pilot. The first two
are also sums that the largest mean allowed would have given."""
MAX_SHARE = 0.25  # largest share of the limit on samples that a candidate's predicted number may take
MAX_RATIO_TO_FEWEST, MIN_LIMIT = 384, 100_000
"""Default limit on samples: this many times those of a verification with all terms zero, and at least the
second number. About a fifth of a grid step is left there."""

MAX_SPEED = 1e11  # samples times steps a second that no device reaches: beyond it no pilot is drawn


class OutOfTimeError(Exception):
    """The time for samples has passed."""


class Clock:
    """Progress callback that ends a refinement after `seconds`, of two cores of a CPU.

    It counts the CPU time of this process, half of it where there are two cores or more: other processes make
    a call slower, and do not change what it finds. It is the wall clock for an accelerator and for the
    workers of an `executor`, whose time no process sees.
    """

    def __init__(self, progress: Progress | None, seconds: float, executor: Executor | None = None):
        self.progress = progress
        self._of_process = executor is None and jax.default_backend() == "cpu"
        self.end = self.now() + seconds

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.process_time() / min(2, os.cpu_count() or 1) if self._of_process else time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left; not above 0 where the time has passed."""
        return self.end - self.now()

    def __call__(self, what: str, done: int, expected: float) -> None:
        """Report progress; OutOfTimeError where the time has passed."""
        if self.left <= 0:
            raise OutOfTimeError
        if self.progress:
            self.progress(what, done, expected)

    def say(self, text: str) -> None:
        """Report a result at once."""
        if self.progress:
            announce(self.progress, text)


@dataclasses.dataclass(frozen=True, eq=False)
class Pilots:
    """Pilots of the candidates of one calibration; nothing here is a guarantee.

    Attributes:
      options: rule, proposal and limit on samples.
      key: of the pilots.
      clock: ends the search.
      speed: samples of a pilot in a second, the largest last.
    """

    options: CalibrationOptions
    key: Any
    clock: Clock
    speed: list[float] = dataclasses.field(default_factory=list)

    def stream(self, mechanism: Mechanism):
        """Return the key of one noise multiplier; a thousandth of a grid step separates two."""
        place = round(1e4 * math.log(mechanism.noise_multiplier)) % 400_000
        return randomness.stream_key(self.key, Stream.SEARCH + place)

    def limit_for(self, claim: Claim) -> float | None:
        """Return the limit on samples, and on time, within which samples are predicted to certify a claim.

        None where they are not, as where no proposal resolves the target.
        """
        self._say(claim)
        largest = 1.0
        try:
            for direction in claim.mechanism.directions:
                run, fewest = self._planned(claim, direction)
                if fewest == 0:
                    continue
                if self.predicted(claim, run.of, fewest) > MAX_SHARE * self.limit(claim, fewest):
                    return None
                largest = max(largest, self.limit(claim, fewest))
        except (ValueError, ArithmeticError):  # no proposal, or none that can be drawn
            return None
        return largest

    def _say(self, claim: Claim) -> None:
        noise, epsilon, delta = claim.mechanism.noise_multiplier, claim.target.epsilon, claim.target.delta
        self.clock(f"trying noise multiplier {noise:.4g}, epsilon {epsilon:.4g}, delta {delta:.4g}", 0, 0)

    def fewest(self, claim: Claim) -> float:
        """Return the samples that a verification needs if all terms are zero, of the costlier direction."""
        return max(self._planned(claim, direction)[1] for direction in claim.mechanism.directions)

    def limit(self, claim: Claim, fewest: float) -> float:
        """Return the limit on samples of a direction: as given, or as an easy target needs, in the time left.

        The time is divided between the directions that are drawn.
        """
        usual = max(MIN_LIMIT, MAX_RATIO_TO_FEWEST * fewest)
        most = self.options.max_samples or usual
        speed = self.speed[-1] if self.speed else MAX_SPEED / claim.mechanism.scheme.iterations
        return min(most, speed * max(0.0, self.clock.left) / len(claim.mechanism.directions))

    def _planned(self, claim: Claim, direction: Direction) -> tuple[Run, float]:
        """Return (run of a verification, its samples if all terms are zero)."""
        run = choose_run(claim, direction, Stop(self.options.rule), self.options.proposal)
        if not run.of.needs_samples:
            return run, 0.0
        return run, math.log(1 / claim.target.budget.failure_probability) / -math.log1p(-run.of.threshold)

    def predicted(self, claim: Claim, of: Resolved, fewest: float) -> float:
        """Return the predicted samples of a direction by a pilot, infinite where it looks impossible.

        Those of a verification with all terms zero, without a pilot, where they are too many.
        """
        if fewest > MAX_SHARE * self.limit(claim, fewest):
            return fewest
        side = Stream.REMOVE.at(of.proposal.direction.place)
        stream = randomness.stream_key(self.stream(claim.mechanism), side)
        theta, q = of.threshold, claim.target.budget.failure_probability
        blocks, counts = 0, np.zeros(len(bounds.TERM_EDGES), np.int64)
        while True:
            began = self.clock.now()
            counts = counts + of.count(stream, blocks, blocks + NUM_PILOT_BLOCKS, 0.0)[0]
            blocks += NUM_PILOT_BLOCKS
            samples = int(counts.sum())
            if blocks > NUM_PILOT_BLOCKS:  # the first ones compile
                rate = samples / blocks * NUM_PILOT_BLOCKS / max(1e-9, self.clock.now() - began)
                self.speed.append(max(rate, *self.speed[-1:], 0.0))
            total, needed = bounds.mean_upper(counts) * samples, bounds.predicted_samples(theta, counts, q)
            limit = self.limit(claim, fewest)
            enough = FEW_TERMS if needed > MAX_SHARE * limit else SOME_TERMS
            least, most = (share * limit for share in PILOT_SHARES)
            is_easy = total <= 1 and samples >= FEW_TERMS / theta
            is_precise = samples >= least and (total >= enough or samples >= SOME_TERMS / theta)
            is_hopeless = total >= SOME_TERMS and math.isinf(needed)
            if is_easy or is_precise or is_hopeless or total >= MANY_TERMS or samples >= most:
                return needed
            self._say(claim)
