"""What every sampling scheme says of itself. A new scheme is one new file and one line in `SCHEMES`.

Whatever bears on the guarantee is abstract, so that forgetting it is an error; whatever bears on speed alone
has a default.
"""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.schemes.batches import Batches
from jaxacct.schemes.numbers import Numbers
from jaxacct.statistics.hockey_stick import Direction


class SideInformation(abc.ABC):
    """What the adversary sees besides the outputs, drawn before the participations.

    Its law must be the same under P and under Q.
    """

    name: ClassVar[str]
    """Of the argument of `privacy_loss` that holds it."""
    words: ClassVar[int] = 1
    """Of `draw`: another number whenever the same key draws other values than before."""

    @abc.abstractmethod
    def tables(self) -> Any:
        """The pytree of arrays that `draw` needs."""

    @abc.abstractmethod
    def draw(self, key, num_samples: int, tables) -> jax.Array:
        """(num_samples, iterations) int32; jittable."""

    @abc.abstractmethod
    def error(self) -> tuple[float, float]:
        """How far the drawn law is from the intended one: (relative error of density, total variation)."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """How a likelihood ratio is added up: what its rounding depends on (proofs/rounding.md, section 3).

    Attributes:
      probability: p, of taking part at a step at which one may.
      log_none: ln P(x = 0).
      steps: steps of one summand, each a factor 1 - p where nobody takes part.
      terms: of the last sum, 1 where there is none.
      phases: whether that sum is over phases, each a product of its own.
      log_weights: largest |ln| of the weights of several counts at one step.
      most_sampled: largest batch that a factor of a cut batch is made of, 0 without cuts.
      processes: how many examples, of one unit, are added up together with what they share.
      times: how often the sum of one example is taken for the unit's, as a bound.
      fixed_count: k where vectors have k participations (`kernels.fixed_counts`), else 0.
      log_patterns: ln of the number of chains of up to k participations, at least.
    """

    probability: float
    log_none: float
    steps: int
    terms: int = 1
    phases: bool = False
    log_weights: float = 0.0
    most_sampled: int = 0
    processes: int = 1
    times: int = 1
    fixed_count: int = 0
    log_patterns: float = 0.0


class Scheme(abc.ABC):
    """Who takes part when: a frozen dataclass of public numbers, `iterations` among them.

    P is the law of the outputs when one unit takes part by the scheme, Q the one with its gradients zero.
    Where there is `side_information`, both are given it.
    """

    name: ClassVar[str]
    """On the command line and in JSON."""
    unit: ClassVar[str]
    """Whom the guarantee protects: "example" or "user"."""
    options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Of `Numbers`, besides steps, sizes and probability: those that it takes, and what it calls them."""
    iterations: int
    """n, the number of steps."""
    min_separation: int
    """b: a unit takes part at most once in any b consecutive steps."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if not (hasattr(cls, "name") and hasattr(cls, "unit")):
            raise TypeError(f"scheme {cls.__name__} must state its name and its unit")

    # -- What the guarantee rests on ----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def examples_per_unit(self) -> int:
        """The most examples that one unit has."""

    @property
    @abc.abstractmethod
    def max_participations(self) -> int:
        """The most steps at which one unit takes part."""

    @property
    @abc.abstractmethod
    def participation_rate(self) -> float:
        """The long-run rate at which a unit takes part."""

    @property
    @abc.abstractmethod
    def side_information(self) -> SideInformation | None:
        """What the adversary sees besides the outputs; None is nothing, and Q is then a centred Gaussian."""

    @abc.abstractmethod
    def participation_probabilities(self) -> np.ndarray:
        """(iterations,) float64: the exact probability of taking part at each step."""

    @abc.abstractmethod
    def log_probability_of_none(self) -> float:
        """ln P(x = 0), a lower bound on ln P/Q; -inf where every unit takes part or Q is no Gaussian."""

    @abc.abstractmethod
    def squared_sensitivity(self, cross: float) -> float:
        """Of `C x` to one unit with all participations revealed, columns of norm 1.

        Args:
          cross: at least what a participation of all its examples shares with all later ones; the largest of
            `Mechanism.cross_terms`.
        """

    @abc.abstractmethod
    def draw_participation(self, key, num_samples: int) -> jax.Array:
        """(num_samples, iterations) float32 counts of the unit's examples at each step."""

    @abc.abstractmethod
    def draw_error(self) -> float:
        """A bound on the relative error of the density that participations are drawn from."""

    @abc.abstractmethod
    def log_likelihood_ratio(self, log_ratios, half_square_norms=None) -> Any:
        """ln P/Q of one sample from the log-ratios of a single participation at each step; jittable.

        Args:
          log_ratios: (iterations,) float, `r_i`. j examples at once have `j r_i - j (j - 1) h_i`.
          half_square_norms: () or (iterations,) float, `h_i = ||c_i||^2 / (2 sigma^2)`.

        Returns () of the same dtype, natural log.
        """

    @property
    @abc.abstractmethod
    def sums(self) -> Sums:
        """How its likelihood ratios are added up, from which the bound on their rounding follows."""

    @classmethod
    @abc.abstractmethod
    def from_batch_size(cls, **sizes) -> "Scheme":
        """The scheme with an expected batch size."""

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "Scheme":
        """The scheme of plain numbers, by its sampling probability or its batch size.

        Raises:
          ValueError: in one line, for what is missing, cannot be, or would be ignored.
        """
        numbers.refuse(cls.name, cls.options)
        given: dict[str, Any] = {mine: getattr(numbers, option) for option, mine in cls.options.items()}
        if numbers.sampling_probability is None:
            return cls.from_batch_size(**given | numbers.sizes())
        given |= {"iterations": numbers.iterations, "sampling_probability": numbers.sampling_probability}
        return cls(**given)

    @property
    @abc.abstractmethod
    def others_are_independent(self) -> bool:
        """Whether batches without a unit are independent of its sampling, and it adds one example at most.

        Whether a batch is too large is then independent of the unit (proofs/rounding.md, section 8), and the
        probability of that is added to delta once and not `1 + e^epsilon` times.
        """

    @property
    @abc.abstractmethod
    def holds_for_shared_examples(self) -> bool:
        """Whether P and Q dominate on graphs in which an example has several owners.

        Where they do not, a bound that reveals all coins may (proofs/shared_examples.md, section 4).
        """

    @property
    @abc.abstractmethod
    def examples_overlap(self) -> bool:
        """Whether examples of one unit may take part less than `min_separation` steps apart.

        The likelihood then takes what columns share, `likelihood.loss.column_norms`, for half their norms.
        """

    # -- What may be left out -----------------------------------------------------------------------------

    def log_likelihood_ratios(self, log_ratios, half_square_norms=None, side=None) -> Any:
        """`log_likelihood_ratio` of (num_samples, iterations) log-ratios, (num_samples,) of the same dtype.

        Args:
          side: what `side_information` drew, (num_samples, iterations), where there is any.
        """
        del side
        self._refuse_side_information()
        return jax.vmap(self.log_likelihood_ratio, (0, None))(log_ratios, half_square_norms)

    def draw_counts(self, key, num_samples: int, direction: str, side=None) -> jax.Array | None:
        """Counts x of the law P ("remove") or Q ("add"), (num_samples, iterations) float32; None is x = 0."""
        del side
        self._refuse_side_information()
        return self.draw_participation(key, num_samples) if direction == Direction.REMOVE else None

    def _refuse_side_information(self):
        if self.side_information is not None:
            raise NotImplementedError(f"{self.name} must say what {self.side_information.name} change")

    @property
    def why_not_cut(self) -> str | None:
        """Why `accountants.truncation` does not cover batches cut to a maximum size; None where it does.

        It does where examples are sampled independently of each other and sit out only for their own sake.
        """
        return f"for {self.name}: cuts are not covered there"

    @property
    def cut_to(self) -> int | None:
        """The size that the scheme itself cuts larger batches to; None where it does not."""
        return None

    @property
    def independent_cuts(self) -> Any:
        """The dominating pair with cuts drawn independently (`schemes.independent_cuts`), if there is one."""
        return None

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> Batches:
        """The batches of one run: every unit's examples by the law of `draw_participation`.

        Args:
          generator: of what is drawn before the first step.
          graph: of users and examples, where the unit is a user.
        """
        del dataset_size, generator, graph
        raise ValueError(f"scheme must be one that batches can be drawn for, was {self.name}")

    @property
    def examples_bar_each_other(self) -> bool:
        """Whether a sampled example keeps others of its users from joining batches."""
        return True

    def check_dataset_size(self, dataset_size: int) -> None:
        """Refuse a data set that the scheme is not for; ValueError."""
        del dataset_size

    def independent_rounds(self) -> tuple[float, int] | None:
        """(probability, rounds) of Poisson-sampled steps that together are no more private, where there are.

        For columns that do not overlap. None leaves the bound with all participations revealed.
        """
        return None

    @property
    def phase_participations(self) -> np.ndarray | None:
        """(phases,) int64: how often the unit takes part in each phase, at steps of its own.

        Where one phase, uniform and drawn once, is all that is random of its participations; None elsewhere.
        """
        return None

    @property
    def replicas(self) -> ModuleType | None:
        """The module of `schemes.replicas` that draws several participation vectors together, if any."""
        return None

    def more_often(self, times: int) -> "tuple[Scheme, float] | None":
        """(the same at `times` the sampling probability, a number), where known; None elsewhere.

        The number is at most ln of how many times likelier any participation vector but 0 is there.
        """
        del times
        return None

    @property
    def revealed_counts(self) -> "tuple[Any, np.ndarray] | None":
        """(b-min-sep timing, probabilities of the counts 1 .. k there) at least the unit's counts, if known.

        They must hold with all coins revealed, however examples are shared (`accountants.revealed_pattern`).
        """
        return None

    @property
    def parts(self) -> tuple["Scheme", int] | None:
        """(scheme, number) where a unit's counts are the sum of so many independent draws from it."""
        return None

    def overlap_bound(self, strategy) -> float:
        """At least what a participation shares with the unit's other examples, where L is bounded."""
        del strategy
        return 0.0

    @property
    def bounds_by_pairs(self) -> bool:
        """Whether `log_likelihood_ratios_by_pairs` is there, and lower than `log_likelihood_ratios`."""
        return False

    @property
    def two(self) -> Self:
        """Where `bounds_by_pairs`: the same draws for a unit of two examples."""
        raise NotImplementedError

    def log_likelihood_ratios_by_pairs(self, log_ratios, norms) -> jax.Array:
        """Where `bounds_by_pairs`: at least ln P/Q, takes and gives what `log_likelihood_ratios` does."""
        raise NotImplementedError

    @property
    def draws_positions(self) -> bool:
        """Whether `draw_positions` gives participations as a few steps; a GPU then adds their windows."""
        return False

    def draw_positions(self, key, num_samples: int) -> jax.Array:
        """Where `draws_positions`: (num_samples, slots) int32 steps, ascending; n and above is none."""
        raise NotImplementedError

    @property
    def draws_counts_at(self) -> bool:
        """Whether `draw_counts_at` gives the draws of `draw_counts` as a few steps and how often at each."""
        return False

    def draw_counts_at(self, key, num_samples: int, direction: str, side=None):
        """Where `draws_counts_at`: the same draws, positions as of `draw_positions` and their counts."""
        raise NotImplementedError

    @property
    def takes_sums(self) -> bool:
        """Whether `log_likelihood_ratios_of_sums` is there, for many noise multipliers at once."""
        return False

    def log_likelihood_ratios_of_sums(self, arrays, factors, norms=None) -> jax.Array:
        """Where `takes_sums`: likelihood ratios of the log-ratios `sum_k factors[v, k] arrays[k]`.

        Args:
          arrays: a few of (iterations, num_samples) float32.
          factors: (count, number of arrays) float32, the first of each above 0.
          norms: what `log_likelihood_ratios` takes as its second argument, for the first of the factors 1;
            times that for each. May be None where it may be there.

        Returns:
          (count, num_samples) float32, natural log. Not finite where float32 has no room for what
          `log_likelihood_ratios` has in logarithms (`kernels.linear_scale`).
        """
        raise NotImplementedError

    @property
    def numbers_kept(self) -> int:
        """Numbers that the likelihood of a sample holds at a time, about."""
        return self.min_separation

    @property
    def arrays_kept(self) -> int:
        """Arrays of all steps that a draw goes through, about, with those that plain b-min-sep has as one."""
        return 1

    @property
    def largest_rate(self) -> float:
        """The largest probability with which examples, independently, could be in a batch."""
        return float(self.participation_probabilities().max())

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        """(iterations,) float64: the mean batch size at each step."""
        return dataset_size * self.participation_probabilities()

    @property
    def unit_in_words(self) -> str:
        """Whom the guarantee protects, for people."""
        return (
            self.unit
            if self.examples_per_unit == 1
            else (f"{self.unit} with up to {self.examples_per_unit} examples")
        )

    @property
    def unit_if_shared(self) -> str:
        """Whom a guarantee that holds however examples are shared protects, for people."""
        return self.unit_in_words

    @property
    def assumption(self) -> str:
        """What else is assumed of training, a clause for people that ends in ", ", or nothing."""
        return ""

    def to_json(self) -> dict:
        """Name and fields as plain JSON values."""
        return {"name": self.name} | {field: getattr(self, field) for field in self._fields()}

    @classmethod
    def from_json(cls, data: dict) -> Self:
        """The inverse of `to_json`; ValueError for other fields than its own."""
        given = {field: value for field, value in data.items() if field != "name"}
        if set(given) != set(cls._fields()):
            raise ValueError(
                f"scheme {cls.name} must have the fields {sorted(cls._fields())}, had {sorted(given)}"
            )
        return cls(**given)

    @classmethod
    def _fields(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]  # pyrefly: ignore[bad-argument-type]


def counts_at(positions, counts, iterations: int):
    """(num_samples, iterations) float32: `counts` at the steps `positions`, 0 elsewhere.

    Args:
      positions: (num_samples, slots) int32, distinct in a row; iterations and above is no participation.
      counts: scalar, or of the shape of `positions`.
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    nowhere = jnp.zeros((positions.shape[0], iterations), jnp.float32)
    return nowhere.at[rows, positions].set(counts, mode="drop")


def disjoint_participations(participations: int, examples: int, cross: float) -> float:
    """At least `||C x||^2` of `participations` counts up to `examples`; `cross` as for a scheme."""
    return examples * participations * (examples + 2 * cross)


def times_log(counts, log_q: float) -> np.ndarray:
    """`counts * log_q` with 0 * -inf = 0."""
    return np.where(counts > 0, np.maximum(counts, 1) * log_q, 0.0)


__all__ = ["Scheme", "SideInformation", "Sums", "counts_at", "disjoint_participations", "times_log"]


def log_probabilities(probability: float) -> tuple[float, float]:
    """(ln p, ln(1 - p)) in float64, the second -inf at p = 1."""
    with np.errstate(divide="ignore"):
        return float(np.log(probability)), float(np.log1p(-probability))
