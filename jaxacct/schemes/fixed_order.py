"""Batches in a public order: shuffled epochs, fixed batches, a stream (proofs/fixed_order.md).

Nothing is random, so nothing is amplified: the guarantee is that of the Gaussian mechanism at the largest
`||C x||` over the participation patterns that the scheme allows (`strategies.worst_pattern`).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NoReturn

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.protocol.scheme import ExampleScheme, check_fields
from jaxacct.strategies.worst_pattern import Patterns


@dataclass(frozen=True)
class FixedOrder(ExampleScheme):
    """Batches in a fixed order, of one size; the order must not depend on the data, and may be public.

    Attributes:
      iterations: n, the number of steps.
      min_separation: b: steps from one participation of an example to its next, at least; 1 for epochs that
        are shuffled anew.
      participations: k: steps at which an example participates, at most.
      batch_size: of every step; None is `dataset_size * participations / iterations`, a whole number then.
      steps_per_epoch: e: an example participates at most once at steps 0 .. e - 1, at most once at
        e .. 2 e - 1, and so on; None where epochs do not matter. For shuffled epochs it needs much less noise
        than min_separation 1 alone.

    Example:
      >>> FixedOrder.from_batch_size(dataset_size=1000, batch_size=100, iterations=40)
      FixedOrder(iterations=40, min_separation=1, participations=4, batch_size=100, steps_per_epoch=10)
    """

    iterations: int
    min_separation: int
    participations: int
    batch_size: int | None = None
    steps_per_epoch: int | None = None
    name: ClassVar[str] = "fixed-order"
    has_prefixes = True
    options: ClassVar = MappingProxyType(
        {"separation": "min_separation", "max_participations": "participations"}
    )

    def __post_init__(self):
        optional = [name for name in ("batch_size", "steps_per_epoch") if getattr(self, name) is not None]
        integers = ("iterations", "min_separation", "participations", *optional)
        check_fields(self, *integers, probability=False)

    @property
    def patterns(self) -> Patterns:
        """Participation patterns that an example may have."""
        return Patterns(self.iterations, self.min_separation, self.participations, self.steps_per_epoch)

    @property
    def max_participations(self) -> int:
        return self.patterns.max_participations

    # -- Batches --------------------------------------------------------------------------------------------

    @classmethod
    def from_batch_size(
        cls,
        *,
        iterations: int,
        dataset_size: int,
        batch_size: float,
        min_separation: int | None = None,
        participations: int | None = None,
    ) -> "FixedOrder":
        """Return the scheme of epochs of whole batches: the last `dataset_size % batch_size` are left out.

        `min_separation` is 1 by default, for epochs that are shuffled anew; the number of batches of an epoch
        where all epochs have the same order. `participations` is the number of epochs by default; where it is
        given there are no epochs, as for devices that may join again after `min_separation` rounds.
        """
        size = _validate.positive_integer("dataset_size", dataset_size)
        if batch_size != int(batch_size):
            raise ValueError(f"batch_size must be a whole number for {cls.name}, got {batch_size!r}")
        batch = _validate.positive_integer("batch_size", int(batch_size))
        if batch > size:
            raise ValueError(f"batch_size must be at most dataset_size {size}, got {batch}")
        n, epoch = _validate.positive_integer("iterations", iterations), size // batch
        b = 1 if min_separation is None else _validate.positive_integer("min_separation", min_separation)
        if b > epoch:
            raise ValueError(
                f"min_separation must be at most {epoch}, the batches of an epoch of {size} examples, got {b}"
            )
        if participations is None:
            return cls(n, b, -(-n // epoch), batch, epoch)
        found = cls(n, b, participations, batch)
        found.size_of_batches(size)  # refuses fewer participations than the batches have room for
        return found

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "FixedOrder":
        numbers.refuse(cls.name, cls.options)
        if numbers.sampling_probability is not None:
            raise ValueError(f"sampling_probability does not apply to {cls.name}: nothing is sampled")
        limits = {"min_separation": numbers.min_separation, "participations": numbers.max_participations}
        return cls.from_batch_size(**numbers.sizes(), **limits)

    def size_of_batches(self, dataset_size: int) -> int:
        """Return the batch size; ValueError where the data set is too small for it, or it is not whole."""
        size = self.batch_size
        if size is None:
            size, rest = divmod(dataset_size * self.participations, self.iterations)
            if rest or not size:
                raise ValueError(
                    f"batch_size must be given: dataset_size {dataset_size} x participations "
                    f"{self.participations} / iterations {self.iterations} is not a whole number"
                )
        apart = min(self.iterations, max(self.min_separation, self.steps_per_epoch or 1))
        if size * apart > dataset_size or size * self.iterations > dataset_size * self.participations:
            raise ValueError(
                f"batch_size must be smaller for dataset_size {dataset_size}, got {size}: an example would "
                "participate more often than the scheme allows"
            )
        return size

    def expected_batch_sizes(self, dataset_size: int) -> np.ndarray:
        return np.full(self.iterations, float(self.size_of_batches(dataset_size)))

    def batches(self, dataset_size: int, generator: np.random.Generator, graph=None) -> "Epochs":
        size = self.size_of_batches(dataset_size)
        steps = dataset_size // size
        if -(-self.iterations // steps) > self.participations:
            raise ValueError(
                f"batches must be given: epochs of {steps} steps have more than {self.participations} "
                f"participations in {self.iterations} steps"
            )
        if self.steps_per_epoch not in (None, steps):
            raise ValueError(f"batches must be given: epochs have {self.steps_per_epoch} steps, not {steps}")
        return Epochs(dataset_size, size, steps, anew=self.min_separation == 1)

    def replicas(self, mechanism) -> None:
        return None

    # -- No distribution: nothing is random ------------------------------------------------------------------

    def _refuse(self, *arguments, **options) -> NoReturn:
        raise ValueError(
            f"scheme {self.name} has no random participations to sample: `calibrate` certifies it without "
            "samples, by the accountant unamplified"
        )

    participation_probabilities = log_probability_of_none = draw_participation = _refuse
    log_likelihood_ratios = _refuse
    sums = draw_errors = property(_refuse)


class Epochs:
    """Batches of whole epochs in random order, the same in each or `anew`; examples left over sit in none."""

    def __init__(self, dataset_size: int, batch_size: int, steps: int, anew: bool):
        self.size, self.batch_size, self.steps, self.anew = dataset_size, batch_size, steps, anew
        self.order = np.arange(0)

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Return the positions of the examples of this step, (batch_size,); steps in order."""
        place = step % self.steps
        if place == 0 and (self.anew or step == 0):
            self.order = generator.permutation(self.size)
        return self.order[place * self.batch_size : (place + 1) * self.batch_size]
