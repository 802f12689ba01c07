"""Plain numbers that define a scheme, as on the command line."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jaxacct.common import validate as _validate


@dataclass(frozen=True)
class Numbers:
    """Plain numbers; None where one is not given.

    `separation` is `min_separation`, which is as the user gives it, or its default.
    """

    iterations: int
    separation: int
    sampling_probability: float | None = None
    dataset_size: int | None = None
    batch_size: float | None = None
    min_separation: int | None = None
    warm_start: bool = True
    examples_per_user: int | None = None
    truncate_to: int | None = None
    max_participations: int | None = None

    def refuse(self, scheme: str, options: Collection[str]) -> None:
        """Refuse numbers that a scheme with these `options` lacks or would ignore; ValueError."""
        if self.sampling_probability is not None and self.batch_size is not None:
            raise ValueError("batch_size must not be given together with sampling_probability")
        if self.min_separation is not None and "separation" not in options:
            raise ValueError(f"min_separation does not apply to {scheme}")
        if not self.warm_start and "warm_start" not in options:
            raise ValueError(f"cold_start does not apply to {scheme}")
        for name in ("examples_per_user", "truncate_to", "max_participations"):
            value = getattr(self, name)
            if name in options and value is None and name != "max_participations":
                raise ValueError(f"{name} must be given for {scheme}, got None")
            if value is not None:
                _validate.positive_integer(name, value)
            if name not in options and value is not None:
                raise ValueError(f"{name} does not apply to {scheme}, got {value!r}")

    def sizes(self) -> dict:
        """Return arguments of `Scheme.from_batch_size`; ValueError where a size is missing."""
        if self.dataset_size is None or self.batch_size is None:
            raise ValueError(
                "dataset_size and batch_size must both be given, or sampling_probability instead"
            )
        return dict(dataset_size=self.dataset_size, batch_size=self.batch_size, iterations=self.iterations)


def turns_of_phases(iterations: int, phases: int) -> np.ndarray:
    """Return (phases,) int64: how many steps each phase of a cycle has."""
    return -(-np.maximum(iterations - np.arange(phases), 0) // phases)


def participation_rate(dataset_size, batch_size, *, separation: int = 1) -> float:
    """Return the long-run rate B / |D| at which one example participates; ValueError for b B > |D|."""
    size = _validate.positive_integer("dataset_size", dataset_size)
    batch = _validate.positive_number("batch_size", batch_size)
    if batch * separation > size:
        divisor = "" if separation == 1 else f" / {separation} (the separation)"
        raise ValueError(
            f"batch_size must be at most dataset_size{divisor} = {size / separation:g}, got {batch_size!r}"
        )
    return batch / size
