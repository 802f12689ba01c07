"""How a plan's scheme and matrix were chosen: by a search that reads only public numbers.

The plan stores all inputs of the search, so that anyone can repeat it. The guarantee does not depend on it;
it documents that the choice has no privacy cost.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jaxacct.common import records
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.mechanisms.mechanism import ADJACENCIES, ZERO_OUT
from jaxacct.schemes import BallsInBins, EpochwiseAllocation, Scheme
from jaxacct.strategies import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    FiniteToeplitz,
    Strategy,
    Toeplitz,
    workload_named,
)
from jaxacct.strategies.workload import name_of

SEARCHED = ("scheme", "bands", "min_separation", "strategy")
MatrixName = Literal["optimal", "square-root", "amplified", "optimal-inverse", "buffered"]
SearchedScheme = Literal[
    "poisson",
    "cyclic-poisson",
    "balls-in-bins",
    "b-min-sep",
    "balanced-min-sep",
    "epochwise-allocation",
    "fixed-order",
]
MATRICES: tuple[str, ...] = get_args(MatrixName)
SCHEME_NAMES: tuple[str, ...] = get_args(SearchedScheme)
COEFFICIENTS = "coefficients"
"""Name of a banded matrix that was given by its coefficients."""
INVERSE = "optimal-inverse"
"""Name of a matrix whose inverse is banded: its noise can be drawn again, and kept nowhere."""


@dataclass(frozen=True)
class Choice:
    """Inputs of a search by `jaxacct.recommend`, and its result; equal inputs give equal results.

    Attributes:
      dataset_size, batch_size, iterations: of the run.
      epsilon, delta: the target, epsilon a natural log; 0 where delta is an advantage.
      memory_copies: maximum copies of the parameters that training may keep for the noise; 0 where it is
        drawn again.
      workload: the error that candidates were ranked by, a name that `strategies.workload_named` reads, or
        None for another learning-rate schedule of the caller.
      given: those of `SEARCHED` that were given and not searched, in that order.
      looked_at: number of candidates.
      scheme, min_separation, bands, matrix: what was chosen; for "buffered" bands are buffers, and
        "coefficients" is a matrix that was given.
      adjacency: at whose noise multipliers candidates were ranked.
    """

    dataset_size: int
    batch_size: float
    iterations: int
    epsilon: float
    delta: float
    memory_copies: int
    workload: str | None
    given: tuple[str, ...]
    looked_at: int
    scheme: str
    min_separation: int
    bands: int
    matrix: str
    adjacency: str = ZERO_OUT

    def __post_init__(self):
        for name in ("dataset_size", "iterations", "looked_at", "min_separation", "bands"):
            _validate.positive_integer(name, getattr(self, name))
        _validate.positive_integer("memory_copies", self.memory_copies, minimum=0)
        _validate.positive_number("batch_size", self.batch_size)
        _validate.epsilon(self.epsilon)
        _validate.delta(self.delta)
        _validate.one_of("scheme", self.scheme, SCHEME_NAMES)
        _validate.one_of("matrix", self.matrix, (*MATRICES, COEFFICIENTS))
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)
        if self.workload is not None:
            # As the search writes it: other spellings would not stand in a command.
            written = name_of(workload_named(self.workload, self.iterations))
            if written != self.workload:
                raise ValueError(f"workload must be written as {written!r}, got {self.workload!r:.80}")
        if [name for name in SEARCHED if name in self.given] != list(self.given):
            raise ValueError(f"given must be some of {', '.join(SEARCHED)}, in order, got {self.given!r}")
        copies = copies_of(self.bands, self.matrix)
        if copies > max(1, self.memory_copies):  # independent noise keeps none from step to step
            raise ValueError(f"memory_copies must be at least {copies}, got {self.memory_copies}")

    def flaws(
        self, scheme: Scheme, strategy: Strategy, epsilon: float, delta: float, dataset_size: int | None
    ) -> list[str]:
        """Return where a plan differs from the one that this describes, a line each."""
        about = {
            "scheme": (self.scheme, scheme.name),
            "min_separation": (self.min_separation, scheme.min_separation),
            "bands": (self.bands, strategy.named_bands),
            "iterations": (self.iterations, scheme.iterations),
            "epsilon": (self.epsilon, epsilon),
            "delta": (self.delta, delta),
            "dataset_size": (self.dataset_size, dataset_size),
        }
        differences = [f"choice is of {name} {a!r}, not {b!r}" for name, (a, b) in about.items() if a != b]
        if not differences and strategy.kind not in _KINDS[self.matrix]:
            differences = [f"choice is of matrix {self.matrix!r}, not {strategy.describe()}"]
        if not differences:
            expected = float(scheme.expected_batch_sizes(self.dataset_size).mean())
            allowed = [self.batch_size]
            if scheme.name in _OF_WHOLE_STEPS and self.batch_size <= self.dataset_size:
                allowed.append(self.dataset_size / math.ceil(round(self.dataset_size / self.batch_size, 9)))
            if not any(math.isclose(expected, size, rel_tol=1e-6) for size in allowed):
                differences = [f"choice is of batch_size {self.batch_size!r}, not {expected!r}"]
        return differences

    def command(self) -> str:
        """Return the command that repeats the search."""
        numbers = f"--dataset-size {self.dataset_size} --batch-size {exact(self.batch_size)}"
        target = f"--epsilon {exact(self.epsilon)} --delta {exact(self.delta)}"
        if self.epsilon == 0:
            target = f"--advantage {exact(self.delta)}"
        values = vars(self) | {"strategy": self.matrix}
        if self.matrix == COEFFICIENTS:  # which the plan's claim holds
            values |= {"strategy": "FILE", "bands": None}
        kept = "".join(
            f" --{name.replace('_', '-')} {values[name]}" for name in self.given if values[name] is not None
        )
        ranked = f" --workload {self.workload}" if self.workload not in (None, "prefix-sum") else ""
        copies = f"--memory-copies {self.memory_copies}"
        run = f"{numbers} --iterations {self.iterations} {target}"
        return f"jaxacct recommend {run} {copies}{kept}{ranked}{self.adjacency_option}"

    @property
    def adjacency_option(self) -> str:
        """Option of `jaxacct recommend` and `calibrate` with a space before it; empty for the default."""
        return "" if self.adjacency == ZERO_OUT else f" --adjacency {self.adjacency}"

    def statement(self) -> str:
        """Return for a privacy review: what was searched, the criterion, and that it has no privacy cost."""
        searched = [_IN_WORDS[name] for name in SEARCHED if name not in self.given]
        *most, last = searched or ["only the noise multiplier"]
        what = f"{', '.join(most)} and {last}" if most else last
        ranked = "prefix-sum error" if self.workload == "prefix-sum" else "error of the optimizer's iterates"
        by = {None: " under a learning-rate schedule of the caller", "prefix-sum": ""}
        under = by.get(self.workload, f" under {self.workload}")
        again = "" if self.workload is None else f" The same search again: {self.command()}"
        return (
            f"A search over {self.looked_at} candidates that keep at most {self.memory_copies} copies of the "
            f"parameters chose {what}, ranked by {ranked}{under} at the estimated noise multiplier. It reads "
            "only the data set's size, the batch size, the number of steps and the target. It has no "
            f"privacy cost, unless one of these numbers was computed from the data.{again}"
        )

    def to_json(self) -> dict:
        """Return plain JSON values, readable by `choice_from_json`; zero-out adjacency is not written."""
        stored = vars(self) | {"given": list(self.given)}
        return {name: value for name, value in stored.items() if (name, value) != ("adjacency", ZERO_OUT)}


def copies_of(bands: int, matrix: str | None) -> int:
    """Return the copies of the parameters that training keeps for the noise of such a matrix.

    A buffer is two copies, and the noise that is being made is one more. Noise of an inverse is drawn again
    (`TrainOptions(noise_memory="recompute")`): none.
    """
    if matrix == INVERSE:
        return 0
    return 2 * bands + 1 if matrix == "buffered" else bands


# Schemes with a whole number of steps between participations: expected batches may be smaller.
_OF_WHOLE_STEPS = (BallsInBins.name, EpochwiseAllocation.name)
_BANDED = (BandedToeplitz.kind, FiniteToeplitz.kind, Toeplitz.kind)
_KINDS = dict.fromkeys((*MATRICES, COEFFICIENTS), _BANDED) | {
    "buffered": (BufferedToeplitz.kind,),
    INVERSE: (BandedInverse.kind,),
}
_IN_WORDS = {
    "scheme": "sampling scheme",
    "bands": "number of bands",
    "min_separation": "minimum separation",
    "strategy": "matrix",
}


def choice_of(plan) -> Choice | None:
    """Return how a search chose the scheme and matrix of a plan, None where none did."""
    choice = choice_from_json(plan.choice)
    if choice is None:
        return None
    mechanism = plan.mechanism
    flaws = choice.flaws(mechanism.scheme, mechanism.strategy, plan.epsilon, plan.delta, plan.dataset_size)
    if flaws:
        raise ValueError(f"plan {flaws[0]}")
    return choice


def choice_from_json(data) -> Choice | None:
    """Return what `Choice.to_json` wrote, None for None; ValueError for a field that it does not write."""
    if isinstance(data, dict):
        data = {"adjacency": ZERO_OUT} | data
    return None if data is None else records.read(Choice, data, "plan choice")
