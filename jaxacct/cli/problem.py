"""Options of a mechanism and of a target, and what they stand for."""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxacct.calibration.choice import MATRICES, SCHEME_NAMES, SEARCHED
from jaxacct.calibration.targets import FORMS, Target, asked
from jaxacct.cli.output import refuse
from jaxacct.cli.usage import Integer, Number, OfRun, hint
from jaxacct.common import validate
from jaxacct.recommendation.matrices import amplified_matrix
from jaxacct.recommendation.result import Recommendation
from jaxacct.recommendation.search import recommend
from jaxacct.schemes import SCHEMES, BMinSep, Poisson, Scheme
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.strategies import NAMES, BandedToeplitz, by_name, ending, workload_named

SchemeName: Any = Literal[tuple(SCHEMES)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Privacy target: epsilon and delta; advantage alone; tpr and fpr; or mu and delta.

    Attributes:
      epsilon: Privacy target, natural log.
      delta: Privacy target.
      advantage: Privacy target in place of both, such as 0.1: the most that the true positive rate of a
        membership test may be above its false positive rate, whatever the test.
      tpr: With --fpr, privacy target: the most that the true positive rate of a membership test may be.
      fpr: With --tpr: false positive rate of the test, such as 0.01.
      mu: With --delta: the epsilon that the Gaussian mechanism of this mu has at this delta.
    """

    epsilon: Number | None = None
    delta: Number | None = None
    advantage: Number | None = None
    tpr: Number | None = None
    fpr: Number | None = None
    mu: Number | None = None

    def target(self) -> Target:
        """Return the target, of which epsilon or delta may be missing; ValueError for none or several."""
        given = self._given()
        names = frozenset(given)
        if not names:
            raise ValueError(
                "--epsilon and --delta, --advantage, --tpr and --fpr, or --mu and --delta must be given"
            )
        if names <= {"epsilon", "delta"}:
            return asked(None, self.epsilon, self.delta)
        forms = {("advantage",): Target.advantage, ("tpr", "fpr"): Target.tpr, ("mu", "delta"): Target.mu}
        for form, kind in forms.items():
            if names == {*form}:
                return kind(**given)
        if "advantage" in names:
            other = min(names - {"advantage"})
            raise ValueError(f"advantage must not be given together with {other}: it is a target by itself")
        raise ValueError(f"target must be one of {FORMS}; given were {', '.join(given)}")

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return " ".join(f"--{name} {value!r}" for name, value in self._given().items())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Who participates when, and how noise is correlated.

    Attributes:
      iterations: Number of training steps.
      dataset_size: Number of examples.
      batch_size: Expected batch size.
      sampling_probability: Per eligible step, in place of --dataset-size and --batch-size.
      scheme: Sampling scheme; by default `calibrate` selects one, and other commands take b-min-sep.
      bands: Bands of the strategy matrix; 1 is DP-SGD; by default `calibrate` selects them.
      min_separation: Steps between participations, or the cycle length; by default `calibrate` selects it,
        and other commands take the number of bands.
      cold_start: Start b-min-sep with every example eligible (algorithm 1) instead of the warm start.
      examples_per_user: Attribution schemes: maximum examples of a user (`jaxacct attribution`).
      truncate_to: For truncated-b-min-sep: batch-size cap, which may be as small as the mean batch size.
      max_participations: For fixed-order: steps at which an example or client participates, at most; by
        default the epochs that --dataset-size, --batch-size and --iterations imply.
      strategy: By default `calibrate` selects the matrix, and other commands take "optimal"; also
        "square-root", "amplified" (optimal at the noise needed with sampling), or a file of coefficients;
        "bisr" and "optimal-inverse" are Toeplitz with an inverse of --bands bands, "buffered" (BLT) is one
        whose noise takes at most --bands running sums; for these the noise multiplier is an upper bound.
      workload: Error that an optimized matrix minimizes and candidates are ranked by: prefix-sum by default,
        or momentum:0.9, weight-decay:1e-4, learning-rate:0.1, cosine or linear, warmup:100, last-iterate
        (its error, not the mean of all), with commas between.
    """

    iterations: Annotated[Integer, OfRun]
    dataset_size: Annotated[Integer | None, OfRun] = None
    batch_size: Annotated[Number | None, OfRun] = None
    sampling_probability: Annotated[Number | None, OfRun] = None
    scheme: SchemeName | None = None
    bands: Integer | None = None
    min_separation: Integer | None = None
    cold_start: bool = False
    examples_per_user: Integer | None = None
    truncate_to: Integer | None = None
    max_participations: Integer | None = None
    strategy: str | None = None
    workload: str | None = None

    def undecided(self) -> list[str]:
        """Return the names of `SEARCHED` options that are not given and that the others leave open."""
        decided = {name for name in SEARCHED if getattr(self, name) is not None}
        if self.scheme is not None and "separation" not in SCHEMES[self.scheme].options:
            decided |= {"min_separation"}
        if self.strategy is not None and self.strategy not in (*MATRICES, *NAMES):  # a file
            decided |= {"bands"}
        if self.scheme == Poisson.name:
            decided |= {"bands"}
        if self.scheme == Poisson.name or self.bands == 1:
            decided |= {"strategy"}
        return [name for name in SEARCHED if name not in decided]

    @property
    def is_searched(self) -> bool:
        """Whether `choose` selects what is not given; `build` takes all as it is."""
        if self.scheme not in (None, *SCHEME_NAMES) or self.max_participations is not None:
            return False
        if self.cold_start or (
            self.strategy in NAMES and self.strategy not in MATRICES
        ):  # the latter is bisr
            return False
        return bool(self.undecided()) and None not in (self.dataset_size, self.batch_size)

    def choose(self, **options) -> Recommendation:
        """Return the recommendation that keeps all given options.

        `options` are those of `recommend`: target, adjacency, memory_copies and progress. ValueError for
        options that would be ignored.
        """
        self._scheme(self.scheme, 1)  # what would be ignored is refused before the search
        matrix: Any = self.strategy
        if self.strategy is not None and self.strategy not in MATRICES:
            matrix = coefficients(self.strategy, self.bands)
            refuse(f"together with the coefficients in {self.strategy}", workload=self.workload)
        kept = ("dataset_size", "batch_size", "iterations", "scheme", "bands", "min_separation")
        asked: dict[str, Any] = {name: getattr(self, name) for name in kept}
        return recommend(workload=self.workload_of_run(), strategy=matrix, **asked, **options)

    def build(self, target: Target | None = None):
        """Return (scheme, strategy); `target` is for a matrix made for one. ValueError in one line."""
        name = "optimal" if self.strategy is None else self.strategy
        ranked: dict[str, Any] = {} if self.workload is None else {"workload": self.workload_of_run()}
        given = None if name == "amplified" else coefficients(name, self.bands)
        if given is not None:
            refuse(f"together with the coefficients in {name}", workload=self.workload)
        bands = given.bands if given is not None else self.bands
        if bands is not None:
            validate.positive_integer("bands", bands)
        scheme = self._scheme(self.scheme, bands or 1)
        if bands is None:
            if "bands" in self.undecided():
                raise ValueError(
                    "bands must be given here, where nothing selects them (see `jaxacct recommend`); "
                    "1 is DP-SGD"
                )
            bands = 1
        if name == "amplified":
            if target is None:
                raise ValueError("strategy must not be amplified here: it is made for an epsilon and a delta")
            return scheme, amplified_matrix(bands, scheme, target, **ranked)
        strategy = given if given is not None else by_name(name, bands, scheme, **ranked)
        return scheme, ending(strategy, scheme)

    def _scheme(self, name: str | None, separation: int) -> Scheme:
        """Return the scheme of that name, b-min-sep for None, at the given separation or else at this one."""
        names = (field.name for field in dataclasses.fields(Numbers))
        given: dict[str, Any] = {name: vars(self)[name] for name in names if name in vars(self)}
        given["separation"] = separation if self.min_separation is None else self.min_separation
        numbers = Numbers(warm_start=not self.cold_start, **given)
        return SCHEMES[BMinSep.name if name is None else name].from_numbers(numbers)

    def workload_of_run(self):
        """Return the workload of that name, or prefix sums."""
        return workload_named("prefix-sum" if self.workload is None else self.workload, self.iterations)


def coefficients(strategy: str, bands: int | None, names=NAMES) -> BandedToeplitz | None:
    """Return the strategy in the file of that name, None for one of `names`; ValueError for another word."""
    if strategy in names:
        return None
    if not Path(strategy).is_file():
        close = difflib.get_close_matches(strategy, names, n=1)
        meant = f" (did you mean {close[0]}?)" if close else hint([strategy], names)
        raise ValueError(
            f"strategy must be {', '.join(names)} or a file of coefficients, got {strategy!r:.80}{meant}"
        )
    if bands is not None:
        raise ValueError(f"bands must not be given with the coefficients in {strategy}: they are counted")
    return BandedToeplitz.from_file(strategy)
