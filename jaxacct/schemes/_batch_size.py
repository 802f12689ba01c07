"""From a data set size and an expected batch size to a participation rate."""

from jaxacct.common import validate as _validate


def participation_rate(dataset_size, batch_size, *, separation: int = 1) -> float:
    """The long-run rate B / |D| at which one example takes part.

    Raises:
      ValueError: when the examples that stand aside leave no room for the batch, b B > |D|.
    """
    size = _validate.positive_integer("dataset_size", dataset_size)
    batch = _validate.positive_number("batch_size", batch_size)
    if batch * separation > size:
        least = "" if separation == 1 else f" / {separation} (the separation)"
        raise ValueError(
            f"batch_size must be at most dataset_size{least} = {size / separation:g}, was {batch_size!r}"
        )
    return batch / size
