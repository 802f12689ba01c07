"""Balls-in-bins sampling."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxacct.schemes.cyclic_poisson import RandomPhase
from jaxacct.schemes.protocol.numbers import Numbers, participation_rate
from jaxacct.schemes.protocol.scheme import check_fields


@dataclass(frozen=True)
class BallsInBins(RandomPhase):
    """Balls-in-bins sampling: each example picks one batch of the epoch and participates in it every epoch.

    Attributes:
      iterations: number of steps n.
      cycle_length: b >= 1, batches per epoch; each example picks one of them uniformly, once.
    """

    iterations: int
    cycle_length: int
    name: ClassVar[str] = "balls-in-bins"
    has_prefixes = True
    sampling_probability: ClassVar[float] = 1.0  # pyrefly: ignore[bad-override]

    def __post_init__(self):
        check_fields(self, "iterations", "cycle_length", probability=False)

    @classmethod
    def from_batch_size(cls, *, dataset_size: int, batch_size: float, iterations: int) -> "BallsInBins":
        """Return the scheme of ceil(|D| / B) batches per epoch, of mean size at most `batch_size`."""
        rate = participation_rate(dataset_size, batch_size)
        return cls(iterations, int(np.ceil(round(1 / rate, 9))))

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "BallsInBins":
        """Return the scheme from the length of its cycle, or from both sizes, which determine it."""
        numbers.refuse(cls.name, ("separation",))
        if numbers.sampling_probability is not None:
            raise ValueError(f"sampling_probability does not apply to {cls.name}; give min_separation")
        if (numbers.dataset_size is None) != (numbers.batch_size is None):
            raise ValueError("dataset_size and batch_size must be given together, or min_separation instead")
        if numbers.dataset_size is None:
            return cls(numbers.iterations, numbers.separation)
        if numbers.min_separation is not None:
            raise ValueError(
                f"min_separation must not be given together with dataset_size for {cls.name}: "
                "it is dataset_size / batch_size"
            )
        return cls.from_batch_size(**numbers.sizes())
