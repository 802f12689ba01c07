"""Batch sizes of a plan: they follow from the scheme and the size of the data set.

A run stops at a batch that is larger than stated (proofs/rounding.md, section 8).
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import scipy

from jaxacct.common import validate as _validate
from jaxacct.schemes import Scheme

# Probability of an oversized batch in a run for plans without a reserve; and the reserve's maximum share of
# delta.
OVERFLOW = 1e-9
_SHARE_OF_DELTA = 1e-3


@dataclass(frozen=True)
class Overflow:
    """Reserve for a batch that exceeds the largest stated size: probability in a run, part of delta."""

    probability: float
    delta: float


def overflow(
    scheme: Scheme, epsilon: float, delta: float, dataset_size: int | None, cut_to: int | None = None
) -> Overflow | None:
    """Return the reserve for oversized batches, at most a thousandth of `delta`.

    None where larger batches are truncated to `cut_to`, and without a data set size: the plan then states
    none.
    """
    if dataset_size is None or cut_to is not None or scheme.batch_size_cap or scheme.patterns:
        return None
    # Whether the run stops may depend on the unit's own sampling: under D, and under D' times e^epsilon.
    times = 1.0 if scheme.others_are_independent else 1 + (math.exp(epsilon) if epsilon < 700 else math.inf)
    reserve = min(OVERFLOW * times, _SHARE_OF_DELTA * delta)
    return Overflow(reserve / times, reserve)


def batch_sizes(
    scheme: Scheme, dataset_size: int | None, cut_to: int | None = None, overflow: float = OVERFLOW
) -> tuple[float | None, int | None]:
    """Return (expected batch size over the run, largest batch size); None and None without a data set size.

    The largest is `cut_to`, or by default a size that no step exceeds, except with probability at most
    `overflow`. ValueError for a data set size that is no positive integer, or not that of the scheme.
    """
    if dataset_size is None:
        return None, None
    size = _validate.positive_integer("dataset_size", dataset_size)
    check_dataset_size(scheme, size)
    cut_to = cut_to if scheme.batch_size_cap is None else scheme.batch_size_cap
    expected = float(scheme.expected_batch_sizes(size).mean())
    if scheme.patterns is not None:
        return expected, math.ceil(expected)
    if cut_to is not None:
        return expected, _validate.positive_integer("max_batch_size", cut_to)
    rates = scheme.max_rate if scheme.batch_rates is None else scheme.batch_rates
    return expected, max_batch_size(size, rates, scheme.iterations, overflow)


def check_dataset_size(scheme: Scheme, dataset_size: int) -> None:
    """Refuse a data set size that the scheme does not support; ValueError."""
    if scheme.required_dataset_size not in (None, dataset_size):
        raise ValueError(
            f"dataset_size must be the scheme's {scheme.required_dataset_size}, got {dataset_size}"
        )
    if scheme.patterns is not None:
        scheme.expected_batch_sizes(dataset_size)  # which must be whole


def max_batch_size(dataset_size: int, rates, iterations: int, overflow: float = OVERFLOW) -> int:
    """Return a batch size that no step of the run exceeds, except with probability at most `overflow`.

    `rates` is the probability with which examples, independently, are in a batch: one for all steps, or one
    for each, (iterations,).
    """
    if not overflow / iterations > 1e-300:
        return dataset_size

    def is_rarely_exceeded(size: int) -> bool:
        # The binomial tail, as in scipy.stats, which takes 0.3 s to import.
        tails = scipy.special.betainc(size + 1, dataset_size - size, rates)
        return bool(tails.mean() <= overflow / iterations)

    return min(dataset_size, bisect_left(range(dataset_size), True, key=is_rarely_exceeded) + 1)
