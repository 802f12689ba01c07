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
COEFFICIENTS = "coefficients"  # of a banded matrix that was given by its coefficients
INVERSE = "optimal-inverse"  # matrix with a banded inverse: its noise can be drawn again, and kept nowhere


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
        values = vars(self) | {"strategy": self.matrix}
        if self.matrix == COEFFICIENTS:  # which the plan's claim holds
            values |= {"strategy": "FILE", "bands": None}
        point = ("epsilon", "delta") if self.epsilon else ("delta",)
        names = ("dataset_size", "batch_size", "iterations", *point, "memory_copies", *self.given)
        options = options_of(**{name: values[name] for name in names}, **self.ranking)
        return "jaxacct recommend" + (options if self.epsilon else options.replace("--delta", "--advantage"))

    @property
    def ranking(self) -> dict[str, str | None]:
        """Options of workload and adjacency; None for the defaults."""
        workload = None if self.workload == "prefix-sum" else self.workload
        return {"workload": workload, "adjacency": None if self.adjacency == ZERO_OUT else self.adjacency}

    def statement(self) -> str:
        """Return for a privacy review: what was searched, the criterion, and that it has no privacy cost."""
        named = zip(SEARCHED, _IN_WORDS, strict=True)
        searched = [words for name, words in named if name not in self.given]
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


def options_of(**values) -> str:
    """Return options of the command line, each with a space before it, but for those that are None."""
    words = {name: exact(x) if isinstance(x, float) else shlex.quote(str(x)) for name, x in values.items()}
    given = (name for name, value in values.items() if value is not None)
    return "".join(f" --{name.replace('_', '-')} {words[name]}" for name in given)


def copies_of(bands: int, matrix: str | None) -> int:
    """Return the copies of the parameters that training keeps for the noise of such a matrix.

    A buffer is two copies, and the noise that is being made is one more. Noise of an inverse is drawn again
    (`TrainOptions(noise_memory="recompute")`): none.
    """
    if matrix == INVERSE:
        return 0
    return 2 * bands + 1 if matrix == "buffered" else bands


_IN_WORDS = "sampling scheme", "number of bands", "minimum separation", "matrix"  # of `SEARCHED`


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
