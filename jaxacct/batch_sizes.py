"""The batch sizes that a plan states: they follow from the scheme and the size of the data set."""

import scipy

from jaxacct import _validate
from jaxacct.schemes import Scheme


def batch_sizes(
    scheme: Scheme, dataset_size: int | None, cut_to: int | None = None
) -> tuple[float | None, int | None]:
    """(expected batch size over the run, largest batch size); None and None without a data set size.

    Args:
      cut_to: larger batches are cut to this; by default a size that no step exceeds, but with probability
        1e-9 at most.

    Raises:
      ValueError: a data set size that is no positive integer, or not that of the scheme.
    """
    if dataset_size is None:
        return None, None
    size = _validate.positive_integer("dataset_size", dataset_size)
    scheme.check_dataset_size(size)
    cut_to = cut_to if scheme.cut_to is None else scheme.cut_to
    expected = float(scheme.expected_batch_sizes(size).mean())
    if cut_to is not None:
        return expected, _validate.positive_integer("max_batch_size", cut_to)
    return expected, max_batch_size(size, scheme.largest_rate, scheme.iterations)


def max_batch_size(dataset_size: int, rate: float, iterations: int, overflow: float = 1e-9) -> int:
    """A batch size that no step of the run exceeds, but with probability `overflow` at most."""
    return int(min(dataset_size, scipy.stats.binom.isf(overflow / iterations, dataset_size, rate) + 1))
