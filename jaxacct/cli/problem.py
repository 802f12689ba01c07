"""Options of a mechanism and of a target, and what they stand for."""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxacct.calibration.targets import implied
from jaxacct.cli.output import refuse
from jaxacct.cli.usage import Integer, Number, OfRun, hint
from jaxacct.common import validate
from jaxacct.recommendation.matrices import amplified_matrix
from jaxacct.schemes import SCHEMES
from jaxacct.schemes.numbers import Numbers
from jaxacct.strategies import NAMES, BandedToeplitz, by_name, ending, workload_named

SchemeName = Literal[
    "poisson",
    "cyclic-poisson",
    "balls-in-bins",
    "b-min-sep",
    "balanced-min-sep",
    "multi-attribution",
    "independent-attribution",
    "truncated-b-min-sep",
    "fixed-order",
]
"""The names of `SCHEMES`; a test compares them."""
AdjacencyName = Literal["zero-out", "add-or-remove-one", "replace-one"]
"""Neighbouring data sets: `jaxacct.mechanisms.mechanism.ADJACENCIES`; a test compares them."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Privacy target: epsilon and delta; advantage alone; tpr and fpr; or mu and delta."""

    epsilon: Number | None = None
    """Privacy target, natural log."""
    delta: Number | None = None
    """Privacy target."""
    advantage: Number | None = None
    """Privacy target in place of both, such as 0.1: the most that the true positive rate of a membership test
    may be above its false positive rate, whatever the test."""
    tpr: Number | None = None
    """With --fpr, privacy target: the most that the true positive rate of a membership test may be."""
    fpr: Number | None = None
    """With --tpr: false positive rate of the test, such as 0.01."""
    mu: Number | None = None
    """With --delta: the epsilon that the Gaussian mechanism of this mu has at this delta."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `calibrate` and `recommend`; ValueError for no target or several."""
        found = dataclasses.asdict(self)
        if not any(value is not None for value in found.values()):
            raise ValueError(
                "--epsilon and --delta, --advantage, --tpr and --fpr, or --mu and --delta must be given"
            )
        implied(**found)
        return found

    def __str__(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"--{name} {value!r}" for name, value in given.items())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Who participates when, and how noise is correlated."""

    iterations: Annotated[Integer, OfRun]
    """Number of training steps."""
    dataset_size: Annotated[Integer | None, OfRun] = None
    """Number of examples."""
    batch_size: Annotated[Number | None, OfRun] = None
    """Expected batch size."""
    sampling_probability: Annotated[Number | None, OfRun] = None
    """Per eligible step, in place of --dataset-size and --batch-size."""
    scheme: SchemeName | None = None
    """Sampling scheme, b-min-sep by default."""
    bands: Integer | None = None
    """Bands of the strategy matrix; 1, which is DP-SGD, by default, or those of a file of coefficients."""
    min_separation: Integer | None = None
    """Steps between participations (b-min-sep), or the cycle length; the number of bands by default."""
    cold_start: bool = False
    """Start b-min-sep with every example eligible (algorithm 1) instead of the warm start."""
    examples_per_user: Integer | None = None
    """Attribution schemes: maximum examples of a user (`python -m jaxacct.train.batches.attribution`)."""
    truncate_to: Integer | None = None
    """For truncated-b-min-sep: batch-size cap, which may be as small as the mean batch size."""
    strategy: str | None = None
    """"optimal" (the default), "square-root", "amplified" (optimal at the noise needed with sampling), or a
    file of coefficients; "bisr" and "optimal-inverse" are Toeplitz with an inverse of --bands bands,
    "buffered" (BLT) is one whose noise takes --bands running sums; for these the noise multiplier is an upper
    bound."""
    workload: str | None = None
    """Error that an optimized matrix minimizes and candidates are ranked by: prefix-sum by default, or
    momentum:0.9, weight-decay:1e-4, learning-rate:0.1, cosine or linear, warmup:100, with commas between."""

    def decided(self) -> list[str]:
        """Return the names of the given options of the sampling scheme and the matrix."""
        sizes = {"iterations", "dataset_size", "batch_size", "workload"}
        values = {name: value for name, value in vars(self).items() if name not in sizes}
        return [name for name, value in values.items() if value is not None and value is not False]

    def build(self, **target):
        """Return (scheme, strategy).

        Args:
          target: epsilon and delta or advantage, for a matrix that is made for them.

        Raises:
          ValueError: in one line, for options that are invalid or would be ignored.
        """
        name = "optimal" if self.strategy is None else self.strategy
        ranked: dict[str, Any] = {} if self.workload is None else {"workload": self.workload_of_run()}
        given = None if name == "amplified" else coefficients(name, self.bands)
        if given is not None:
            refuse(f"together with the coefficients in {name}", workload=self.workload)
        bands = given.bands if given is not None else 1 if self.bands is None else self.bands
        validate.positive_integer("bands", bands)
        numbers = Numbers(
            iterations=self.iterations,
            separation=bands if self.min_separation is None else self.min_separation,
            sampling_probability=self.sampling_probability,
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            min_separation=self.min_separation,
            warm_start=not self.cold_start,
            examples_per_user=self.examples_per_user,
            truncate_to=self.truncate_to,
        )
        scheme = SCHEMES["b-min-sep" if self.scheme is None else self.scheme].from_numbers(numbers)
        if name == "amplified":
            if not target:
                raise ValueError("strategy must not be amplified here: it is made for an epsilon and a delta")
            return scheme, amplified_matrix(bands, scheme, **target, **ranked)
        strategy = given if given is not None else by_name(name, bands, scheme, **ranked)
        return scheme, ending(strategy, scheme)

    def workload_of_run(self):
        """Return the workload of that name, or prefix sums."""
        return workload_named("prefix-sum" if self.workload is None else self.workload, self.iterations)


def coefficients(strategy: str, bands: int | None) -> BandedToeplitz | None:
    """Return the strategy in the file of that name, None for one of `NAMES`; ValueError for another word."""
    if strategy in NAMES:
        return None
    if not Path(strategy).is_file():
        close = difflib.get_close_matches(strategy, NAMES, n=1)
        meant = f" (did you mean {close[0]}?)" if close else hint([strategy])
        raise ValueError(
            f"strategy must be {', '.join(NAMES)} or a file of coefficients, was {strategy!r:.80}{meant}"
        )
    if bands is not None:
        raise ValueError(f"bands must not be given with the coefficients in {strategy}: they are counted")
    return BandedToeplitz.from_file(strategy)
