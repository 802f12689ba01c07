"""How a plan's scheme and matrix were chosen: by a search that reads only public numbers.

The plan stores all inputs of the search, so that anyone can repeat it. The guarantee does not depend on it;
it documents that the choice has no privacy cost.
"""

import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from jaxacct.common import records
from jaxacct.common.records import exact
from jaxacct.mechanisms.mechanism import ZERO_OUT, AdjacencyName

SearchedName = Literal["scheme", "bands", "min_separation", "strategy"]
SEARCHED: tuple[str, ...] = get_args(SearchedName)
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
    given: tuple[SearchedName, ...]
    looked_at: int
    scheme: SearchedScheme
    min_separation: int
    bands: int
    matrix: MatrixName | Literal["coefficients"]
    adjacency: AdjacencyName = ZERO_OUT

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
        ranked = (
            f" --workload {shlex.quote(self.workload)}" if self.workload not in (None, "prefix-sum") else ""
        )
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
        """Return plain JSON values, readable by `choice_of`; zero-out adjacency is not written."""
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


_IN_WORDS = {
    "scheme": "sampling scheme",
    "bands": "number of bands",
    "min_separation": "minimum separation",
    "strategy": "matrix",
}


def choice_of(plan) -> Choice | None:
    """Return how a search chose the scheme and matrix of a plan, None where none did.

    ValueError for fields that `Choice.to_json` does not write, or a choice of another plan.
    """
    if plan.choice is None:
        return None
    choice = records.read(Choice, {"adjacency": ZERO_OUT} | plan.choice, "plan choice")
    mechanism = plan.mechanism
    chosen = {
        "scheme": mechanism.scheme.name,
        "min_separation": mechanism.scheme.min_separation,
        "bands": mechanism.strategy.named_bands,
        "iterations": plan.iterations,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "dataset_size": plan.dataset_size,
    }
    for name, value in chosen.items():
        if getattr(choice, name) != value:
            raise ValueError(f"plan choice is of {name} {getattr(choice, name)!r}, not {value!r}")
    return choice
