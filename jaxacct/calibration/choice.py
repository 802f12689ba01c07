"""How a plan's scheme and matrix were chosen: by a search that sees public numbers alone.

It says so in the plan, with all that the search was given, so that anybody can search again. The guarantee
does not rest on it: whatever is certified is certified, and this says that choosing it spent nothing.
"""

import math
from dataclasses import dataclass

from jaxacct.common import records
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.schemes import Scheme
from jaxacct.strategies import BandedToeplitz, BufferedToeplitz, FiniteToeplitz, Strategy, workload_named
from jaxacct.strategies.workload_names import name_of

SEARCHED = ("scheme", "bands", "min_separation", "strategy")
MATRICES = ("optimal", "square-root", "amplified", "buffered")
SCHEME_NAMES = ("poisson", "cyclic-poisson", "balls-in-bins", "b-min-sep", "balanced-min-sep")


@dataclass(frozen=True)
class Choice:
    """What a search by `jaxacct.recommend` was given, and what it chose; equal numbers choose alike.

    Attributes:
      dataset_size, batch_size, iterations: of the run.
      epsilon, delta: the target, epsilon a natural log; 0 where delta is an advantage.
      memory_copies: the most copies of the parameters that training may keep for the noise.
      workload: by what candidates were ranked, a name that `strategies.workload_named` reads, or None for a
        learning-rate schedule of the caller's own make.
      given: those of `SEARCHED` that were given and not searched, in that order.
      looked_at: how many candidates there were.
      scheme, min_separation, bands, matrix: what was chosen; for "buffered" bands are buffers.
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

    def __post_init__(self):
        for name in ("dataset_size", "iterations", "memory_copies", "looked_at", "min_separation", "bands"):
            _validate.positive_integer(name, getattr(self, name))
        _validate.positive_number("batch_size", self.batch_size)
        _validate.nonnegative_number("epsilon", self.epsilon)
        _validate.open_probability("delta", self.delta)
        _validate.one_of("scheme", self.scheme, SCHEME_NAMES)
        _validate.one_of("matrix", self.matrix, MATRICES)
        if self.workload is not None:
            # As the search writes it: other spellings would not stand in a command.
            written = name_of(workload_named(self.workload, self.iterations))
            if written != self.workload:
                raise ValueError(f"workload must be written as {written!r}, was {self.workload!r:.80}")
        if [name for name in SEARCHED if name in self.given] != list(self.given):
            raise ValueError(f"given must be some of {', '.join(SEARCHED)}, in order, was {self.given!r}")
        # A buffer is two copies, and the noise being made is one more.
        copies = 2 * self.bands + 1 if self.matrix == "buffered" else self.bands
        if copies > self.memory_copies:
            raise ValueError(f"memory_copies must be at least {copies}, was {self.memory_copies}")

    def flaws(
        self, scheme: Scheme, strategy: Strategy, epsilon: float, delta: float, dataset_size: int | None
    ) -> list[str]:
        """Where a plan is not the one that this is about, a line each."""
        about = {
            "scheme": (self.scheme, scheme.name),
            "min_separation": (self.min_separation, scheme.min_separation),
            "bands": (self.bands, strategy.named_bands),
            "iterations": (self.iterations, scheme.iterations),
            "epsilon": (self.epsilon, epsilon),
            "delta": (self.delta, delta),
            "dataset_size": (self.dataset_size, dataset_size),
        }
        found = [f"choice is of {name} {a!r}, not {b!r}" for name, (a, b) in about.items() if a != b]
        if not found and strategy.kind not in _KINDS[self.matrix]:
            found = [f"choice is of matrix {self.matrix!r}, not {strategy.describe()}"]
        if not found:
            expected = float(scheme.expected_batch_sizes(self.dataset_size).mean())
            if not math.isclose(expected, self.batch_size, rel_tol=1e-6):
                found = [f"choice is of batch_size {self.batch_size!r}, not {expected!r}"]
        return found

    def command(self) -> str:
        """That searches again."""
        numbers = f"--dataset-size {self.dataset_size} --batch-size {exact(self.batch_size)}"
        target = f"--epsilon {exact(self.epsilon)} --delta {exact(self.delta)}"
        if self.epsilon == 0:
            target = f"--advantage {exact(self.delta)}"
        values = {
            "scheme": self.scheme,
            "bands": self.bands,
            "min_separation": self.min_separation,
            "strategy": self.matrix,
        }
        kept = "".join(f" --{name.replace('_', '-')} {values[name]}" for name in self.given)
        ranked = f" --workload {self.workload}" if self.workload not in (None, "prefix-sum") else ""
        copies = f"--memory-copies {self.memory_copies}"
        return f"jaxacct recommend {numbers} --iterations {self.iterations} {target} {copies}{kept}{ranked}"

    def statement(self) -> str:
        """For a privacy review: what was searched, the criterion, and that nothing is spent."""
        searched = [_IN_WORDS[name] for name in SEARCHED if name not in self.given]
        what = " and ".join([", ".join(searched[:-1]), searched[-1]] if len(searched) > 1 else searched)
        chosen = f"{what or 'Nothing but the noise'} {'were' if len(searched) > 1 else 'was'} chosen"
        ranked = "prefix-sum error" if self.workload == "prefix-sum" else "error of the optimizer's iterates"
        by = {None: " under a learning-rate schedule of the caller's", "prefix-sum": ""}
        under = by.get(self.workload, f" under {self.workload}")
        again = "" if self.workload is None else f" Whoever searches again finds the same: {self.command()}"
        return (
            f"{chosen[0].upper()}{chosen[1:]} by a search over {self.looked_at} candidates that keep at most "
            f"{self.memory_copies} copies of the parameters, ranked by {ranked}{under} at the noise "
            "multiplier that each was estimated to need. The search saw this, the data set's size, the batch "
            "size, the number of steps and the target, nothing of the data and no draws: no privacy is spent "
            f"by it, unless one of these numbers was itself taken from the data.{again}"
        )

    def to_json(self) -> dict:
        """Return plain JSON values, readable by `choice_from_json`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"given": list(self.given)}


_BANDED = (BandedToeplitz.kind, FiniteToeplitz.kind)
_KINDS = dict.fromkeys(MATRICES, _BANDED) | {"buffered": (BufferedToeplitz.kind,)}
_IN_WORDS = {
    "scheme": "sampling scheme",
    "bands": "number of bands",
    "min_separation": "minimum separation",
    "strategy": "matrix",
}


def choice_of(plan) -> Choice | None:
    """Return how a search chose the scheme and matrix of a plan, None where none did.

    Raises:
      ValueError: for a stored choice that is malformed or about another mechanism.
    """
    choice = choice_from_json(plan.choice)
    if choice is None:
        return None
    mechanism = plan.mechanism
    flaws = choice.flaws(mechanism.scheme, mechanism.strategy, plan.epsilon, plan.delta, plan.dataset_size)
    if flaws:
        raise ValueError(f"plan {flaws[0]}")
    return choice


def choice_from_json(data) -> Choice | None:
    """Return what `Choice.to_json` wrote, None for None.

    Raises:
      ValueError: for a field that is missing, unknown or of another type.
    """
    return None if data is None else records.read(Choice, data, "plan choice")


__all__ = ["Choice", "choice_from_json", "choice_of"]
