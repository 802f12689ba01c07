"""Protocol of sampling schemes: a distribution of participations, and optional faster paths.

Members that the guarantee depends on are abstract or required attributes, so that omitting one is an error.
Members that affect only speed or coverage have a default that claims nothing.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import jax
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels.table import counts_at
from jaxacct.schemes.protocol.batches import Batches, FromTable
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.protocol.structure import Sums
from jaxacct.schemes.replicas import table as table_replicas
from jaxacct.schemes.table import SamplingTable
from jaxacct.statistics.hockey_stick import Direction


class Scheme(abc.ABC):
    """Sampling scheme: a frozen dataclass of public numbers, `iterations` among them.

    P is the distribution of the outputs when one unit participates by the scheme, Q that with its gradients
    zero. Where there is `side_information`, both are conditional on it.

    Attributes:
      name: name on the command line and in JSON.
      unit: privacy unit: "example" or "user".
      adjacencies: adjacencies for which P and Q are a dominating pair (proofs/adjacency.md).
      examples_overlap: whether examples of one unit may be less than `min_separation` steps apart;
        likelihoods then take products of columns (`likelihood.loss.column_norms`) for half their norms.
      others_are_independent: whether batches without a unit are independent of its sampling, and it adds at
        most one example. Whether a batch is too large is then independent of the unit (proofs/rounding.md,
        section 8), and the probability of that is added to delta once and not `1 + e^epsilon` times.
      holds_for_shared_examples: whether P and Q dominate on graphs in which an example has several owners; if
        not, a bound that reveals all participations may (proofs/shared_examples.md, section 4).
      examples_per_unit: largest number of examples of one unit.
      max_participations: largest number of steps at which one unit participates.
      side_information: adversary's view besides the outputs (`BatchSizes`); without it (None) Q is a centred
        Gaussian.
      max_rate: upper bound on the probability with which examples, independently, are in a batch.
      draw_errors: (relative error of a density, total variation between it and that which is drawn from).
      sums: structure of the likelihood ratio's sums, from which the rounding-error bound follows.
      has_prefixes: whether the first t steps have the distribution of this scheme with `iterations` t, for
        every t.
      iterations: n, the number of steps.
      min_separation: b: a unit participates at most once in any b consecutive steps.
      options: option of `Numbers`, besides steps, sizes and probability -> its name in this scheme.
      supports_truncation: whether `core.truncation` covers it: examples are sampled independently of
        truncation.
      batch_size_cap: batch-size cap of a scheme that truncates batches itself.
      required_dataset_size: the only data set size that the scheme is for, if it depends on one.
      independent_truncation: dominating pair whose truncated steps are independent
        (`schemes.truncation.independent_truncation`).
      independent_rounds: (probability, rounds) of Poisson steps, of each of the unit's examples by itself,
        that are no more private, where columns do not overlap.
      phase_participations: (phases,) int64, descending: participations of each phase, where nothing but a
        uniform phase is random, and whether the unit participates at all.
      phase_probability: with which it does, rounded up where it is computed.
      independent_epochs: (number of epochs, steps of each that are run, steps that are not), where nothing
        but an independent uniform step of each is random.
      reveals_epochs: whether that holds only after a partition of the steps into epochs is revealed: an upper
        bound.
      revealed_counts: (b-min-sep timing, probabilities of the counts 1 .. k there) that bound the unit's
        counts from above. They must hold with all participations revealed, for any sharing of examples
        (`accountants.revealed_pattern`).
      parts: (scheme, number): the unit's counts are the sum of that number of independent draws from the
        scheme.
      batch_rates: (iterations,) float64: `max_rate` of each step, where batches are not of one mean.
      sparse_rate: long-run number of participations per step where `draw_positions` draws them as a few
        steps, at which windows replace a Fourier transform of all steps; None without.
      pair_bound: the same scheme for a unit of two examples, where `log_likelihood_ratios_by_pairs` bounds
        the likelihood ratio by those of pairs of examples: lower than `log_likelihood_ratios`.
      arrays_kept: about how many arrays of all steps a draw goes through, plain b-min-sep being 1.
    """

    # -- Required attributes: class variables, or properties ----------------------------------------------

    name: ClassVar[str]
    unit: ClassVar[str]
    adjacencies: ClassVar[tuple[str, ...]]
    examples_overlap: bool
    others_are_independent: bool
    holds_for_shared_examples: bool
    examples_per_unit: int
    max_participations: int
    side_information: Any
    max_rate: float
    draw_errors: tuple[float, float]
    sums: Sums
    has_prefixes: ClassVar[bool] = False
    iterations: int
    min_separation: int

    _REQUIRED = (
        "name unit adjacencies examples_overlap others_are_independent holds_for_shared_examples "
        "examples_per_unit max_participations side_information max_rate draw_errors sums".split()
    )

    def __init_subclass__(cls, abstract: bool = False, **options):
        super().__init_subclass__(**options)
        missing = [name for name in cls._REQUIRED if not hasattr(cls, name)]
        if missing and not abstract:
            raise TypeError(f"scheme {cls.__name__} must state its {', '.join(missing)}")

    # -- The distribution ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def participation_probabilities(self) -> np.ndarray:
        """Return (iterations,) float64: the exact probability of participating at each step."""

    @abc.abstractmethod
    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """Return (iterations,) float64: the mean batch size at each step."""

    @abc.abstractmethod
    def log_probability_of_none(self) -> float:
        """Return ln P(x = 0), a lower bound on ln P/Q; -inf where it is 0 or Q is no Gaussian."""

    @abc.abstractmethod
    def squared_sensitivity(self, cross: float) -> float:
        """Bound `||C x||^2` of one unit with all participations revealed, columns of norm 1.

        `cross` bounds the product of a participation of all examples with all later ones
        (`Mechanism.cross_terms`).
        """

    @abc.abstractmethod
    def draw_participation(self, key, num_samples: int) -> jax.Array:
        """Draw (num_samples, iterations) float32 counts of the unit's examples at each step."""

    @abc.abstractmethod
    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None) -> Any:
        """Compute ln P/Q from the log-ratios of a single participation at each step; jittable.

        Args:
          log_ratios: (num_samples, iterations) or (iterations,) float, `r_i`. j examples at once have
            `j r_i - j (j - 1) h_i`.
          half_square_norms: () or (iterations,) float, `h_i = ||c_i||^2 / (2 sigma^2)`; where
            `examples_overlap` the products of columns over sigma^2.
          side: what `side_information` drew, of the shape of `log_ratios`, where there is any.

        Returns:
          (num_samples,) or () of the same dtype, natural log.
        """

    @abc.abstractmethod
    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        """Return the batches of one run: every unit's examples by the distribution of `draw_participation`.

        `generator` serves draws before the first step; `graph` has users and examples, where the unit is a
        user.
        """

    def draw_counts(self, key, num_samples: int, direction: str, side=None) -> jax.Array | None:
        """Draw counts x under P ("remove") or Q ("add"), (num_samples, iterations) float32; None is x = 0."""
        if self.side_information is not None:
            raise NotImplementedError(f"{self.name} must state its counts given {self.side_information.name}")
        return self.draw_participation(key, num_samples) if direction == Direction.REMOVE else None

    def overlap_bound(self, strategy) -> float:
        """Bound what a participation shares with the unit's other examples, where L is bounded; else 0."""
        if self.examples_overlap:
            raise NotImplementedError(f"{self.name} must state its overlap bound, as its examples overlap")
        return 0.0

    # -- Construction -------------------------------------------------------------------------------------

    options: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    @abc.abstractmethod
    def from_batch_size(cls, **sizes) -> "Scheme":
        """Return the scheme with an expected batch size.

        Args:
          **sizes: `dataset_size`, the number of examples |D|; `batch_size`, the expected batch size B;
            `iterations`; and fields of the class.

        Raises:
          ValueError: a batch size that the scheme cannot have.
        """

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "Scheme":
        """Return the scheme of plain numbers; ValueError for one that is missing or would be ignored."""
        numbers.refuse(cls.name, cls.options)
        given: dict[str, Any] = {mine: getattr(numbers, option) for option, mine in cls.options.items()}
        if numbers.sampling_probability is None:
            return cls.from_batch_size(**given | numbers.sizes())
        given |= {"iterations": numbers.iterations, "sampling_probability": numbers.sampling_probability}
        return cls(**given)

    # -- Optional structure: None claims nothing, and the accountants that need it refuse the scheme --------

    supports_truncation: bool = False
    batch_size_cap: int | None = None
    required_dataset_size: int | None = None
    independent_truncation: Any = None
    independent_rounds: tuple[float, int] | None = None
    patterns: Any = None  # `strategies.worst_pattern.Patterns` of fixed-order batches: nothing is random
    phase_participations: np.ndarray | None = None
    phase_probability: float = 1.0
    independent_epochs: tuple[tuple[int, int, int], ...] = ()
    reveals_epochs: bool = False
    revealed_counts: "tuple[Any, np.ndarray] | None" = None
    parts: "tuple[Scheme, int] | None" = None

    def inflated(self, times: int) -> "tuple[Scheme, float] | None":
        """Return (the scheme with `times` the sampling probability, log ratio), or None where unknown.

        The log ratio is a lower bound on the ln of how much likelier any x but 0 is there.
        """
        return None

    def replicas(self, mechanism) -> ModuleType | None:
        """Return the module of `schemes.replicas` that draws two participation vectors jointly, if any."""
        return None

    batch_rates: np.ndarray | None = None

    # -- Optional faster paths -----------------------------------------------------------------------------

    sparse_rate: float | None = None
    pair_bound: "Scheme | None" = None
    arrays_kept: int = 1


class TableScheme(Scheme, abstract=True):
    """Scheme whose unit participates by a sampling table.

    Attributes:
      table: table of the sampler.
    """

    examples_overlap = False
    side_information = None

    table: SamplingTable

    @property
    def max_participations(self) -> int:
        return self.table.max_participations

    def participation_probabilities(self) -> np.ndarray:
        return self.table.participation_probabilities

    def log_probability_of_none(self) -> float:
        return self.table.log_probability_of_none

    @property
    def draw_errors(self) -> tuple[float, float]:
        return self.table.draw_errors

    def replicas(self, mechanism) -> ModuleType | None:
        return table_replicas if table_replicas.fits(mechanism) else None

    def draw_participation(self, key, num_samples: int):
        return counts_at(*self.table.draw_counts(key, num_samples), self.iterations)


class ExampleScheme(TableScheme, abstract=True):
    """Scheme whose unit is one example, sampled independently of all others."""

    unit = "example"
    adjacencies = ("zero-out", "add-or-remove-one", "replace-one")
    holds_for_shared_examples = False
    others_are_independent = True
    examples_per_unit = 1

    @property
    def sums(self) -> Sums:
        probability = 1.0 if self.table.num_left > 1 else float(self.table.join.max())
        return Sums(probability, self.log_probability_of_none(), self.iterations, table=self.table)

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None):
        if log_ratios.ndim == 1:
            return self.table.log_likelihood_ratios(log_ratios[:, None])[0]
        return self.table.log_likelihood_ratios(log_ratios.T)

    def draw_positions(self, key, num_samples: int) -> jax.Array:
        """Draw (num_samples, slots) int32: steps of participation, ascending; n is none."""
        return self.table.draw_counts(key, num_samples)[0]

    @property
    def sparse_rate(self) -> float | None:
        return float(self.participation_probabilities().mean()) if self.min_separation > 1 else None

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        return FromTable(self.table, dataset_size, generator)

    @property
    def max_rate(self) -> float:
        return float(self.participation_probabilities().max())

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        return dataset_size * self.participation_probabilities()

    def squared_sensitivity(self, cross: float) -> float:
        return disjoint_participations(self.max_participations, 1, cross)


class SizedScheme(ExampleScheme, abstract=True):
    """Scheme that its sizes alone determine: it has no probability."""

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "Scheme":
        numbers.refuse(cls.name, cls.options)
        if numbers.sampling_probability is not None:
            raise ValueError(f"sampling_probability does not apply to {cls.name}; give batch_size")
        return cls.from_batch_size(min_separation=numbers.separation, **numbers.sizes())


def scheme_to_json(scheme: Scheme) -> dict:
    """Return the scheme's name and fields as plain JSON values."""
    return {"name": scheme.name} | dataclasses.asdict(scheme)  # pyrefly: ignore[bad-argument-type]


def scheme_from_fields(kind: type[Scheme], data: dict) -> Scheme:
    """Return the scheme that `scheme_to_json` wrote; ValueError for missing or unknown fields."""
    given = {field: value for field, value in data.items() if field != "name"}
    own = [field.name for field in dataclasses.fields(kind)]  # pyrefly: ignore[bad-argument-type]
    if set(given) != set(own):
        raise ValueError(f"scheme {kind.name} must have the fields {sorted(own)}, got {sorted(given)}")
    return kind(**given)


def check_fields(scheme: Scheme, *integers: str, probability: bool = True) -> None:
    """Check the fields of a frozen scheme in place: positive integers, the probability and the warm start."""
    checks: dict[str, Callable] = dict.fromkeys(integers, _validate.positive_integer)
    if probability:
        checks["sampling_probability"] = _validate.probability
    _validate.check_fields(scheme, **checks)
    warm_start = getattr(scheme, "warm_start", True)
    if not isinstance(warm_start, bool):
        raise ValueError(f"warm_start must be True or False, got {warm_start!r}")


def disjoint_participations(participations: int, examples: int, cross: float) -> float:
    """Bound `||C x||^2` of `participations` counts up to `examples`; `cross` as for a scheme."""
    return examples * participations * (examples + 2 * cross)
