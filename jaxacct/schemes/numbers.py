"""What a scheme may be made from by who gives plain numbers, as on the command line."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """Plain numbers; None where one is not given.

    Attributes:
      iterations: n.
      separation: steps between participations, or the cycle length: `min_separation`, or what stands for it.
      sampling_probability: per eligible step, in place of both sizes.
      dataset_size: number of examples.
      batch_size: expected batch size.
      min_separation: as it was given.
      warm_start: whether examples may begin barred.
      examples_per_user: the most of one user.
      truncate_to: what larger batches are cut to.
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

    def refuse(self, scheme: str, options: Collection[str]) -> None:
        """Refuse numbers that a scheme which takes these `options` lacks, or would ignore; ValueError."""
        if self.sampling_probability is not None and self.batch_size is not None:
            raise ValueError("batch_size must not be given together with sampling_probability")
        if self.min_separation is not None and "separation" not in options:
            raise ValueError(f"min_separation does not apply to {scheme}")
        if not self.warm_start and "warm_start" not in options:
            raise ValueError(f"cold_start does not apply to {scheme}")
        for name in ("examples_per_user", "truncate_to"):
            value = getattr(self, name)
            if name in options and value is None:
                raise ValueError(f"{name} must be given for {scheme}, was None")
            if name not in options and value is not None:
                raise ValueError(f"{name} does not apply to {scheme}, was {value!r}")

    def sizes(self) -> dict:
        """Arguments of `Scheme.from_batch_size`; ValueError where a size is missing."""
        if self.dataset_size is None or self.batch_size is None:
            raise ValueError(
                "dataset_size and batch_size must both be given, or sampling_probability instead"
            )
        sizes = {"dataset_size": self.dataset_size, "batch_size": self.batch_size}
        return sizes | {"iterations": self.iterations}
