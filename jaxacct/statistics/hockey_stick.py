"""Directions, hockey-stick terms of privacy losses, and histograms of both.

A direction's divergence is `E_target[g(t)]` with `t = epsilon - L` (remove) or `t = epsilon + L` (add).
For the mechanism alone `g(t) = (1 - e^t)_+`; composed with another mechanism g is that mechanism's privacy
profile (see `jaxacct.accountants.composition`). Files hold sparse histograms.
"""

import enum
import math
from typing import Self

import numpy as np

from jaxacct.common import validate as _validate


class Direction(enum.StrEnum):
    """Direction of the hockey-stick divergence, which also fixes the distribution that is sampled.

    Evidence and JSON hold the member names.

    Attributes:
      REMOVE: H(P, Q), samples from P: the unit participates.
      ADD: H(Q, P), draws from Q: its gradients are zero.
    """

    REMOVE = "remove"
    ADD = "add"

    @classmethod
    def of(cls, direction: str) -> Self:
        """Return the member of that name; ValueError for another name."""
        _validate.one_of("direction", direction, tuple(member.value for member in cls))
        return cls(direction)

    @property
    def sign(self) -> int:
        """Sign 1 or -1: the divergence is the mean of `(1 - e^t)_+` with `t = epsilon - sign L`."""
        return 1 if self is Direction.REMOVE else -1

    @property
    def place(self) -> int:
        """Index 0 or 1 among streams and tables of both directions."""
        return DIRECTIONS.index(self)


DIRECTIONS = tuple(Direction)


class NonFiniteLossError(ArithmeticError):
    """Privacy loss that is NaN or infinite: it cannot be averaged, so the run stops."""


def exponent(loss: np.ndarray, direction: str, epsilon: float) -> np.ndarray:
    """Return `t` of float64 losses (num,), in nats. Raises NonFiniteLossError."""
    if not np.all(np.isfinite(loss)):
        raise NonFiniteLossError(
            f"{np.sum(~np.isfinite(loss))} of {loss.size} privacy losses are not finite: nothing certified"
        )
    return epsilon - Direction(direction).sign * loss


def hockey_stick(t: np.ndarray) -> np.ndarray:
    """Return `(1 - e^t)_+` in float64."""
    return -np.expm1(np.minimum(t, 0.0))


def weighted_terms(draws, direction: str, epsilon: float, profile=hockey_stick) -> np.ndarray:
    """Return `w g(t)` of a proposal's draws, (num,) float64: its mean is the divergence."""
    values = profile(exponent(draws.loss, direction, epsilon))
    # `values > 0` is false for NaN, which would then count as 0, the most favourable value.
    if np.isnan(values).any() or np.isnan(draws.log_weight).any():
        raise NonFiniteLossError("a term or its weight is not a number; nothing was certified")
    with np.errstate(over="ignore", invalid="ignore"):
        weighted = np.where(values > 0, np.exp(draws.log_weight) * values, 0.0)
    if not np.all(np.isfinite(weighted)):
        raise NonFiniteLossError("a weighted term is not finite; nothing was certified")
    return weighted


# Histogram of losses: bins of 1/32, the first and the last open. A loss is reported as its bin's upper
# edge in the remove direction and as its lower edge in the add direction: pessimistic both times.
LOSS_BIN_WIDTH = 1 / 32
NUM_LOSS_BINS = 4096


def bin_losses(loss: np.ndarray) -> np.ndarray:
    """Return int64 counts of float64 losses in `len(LOSS_EDGES) - 1` bins."""
    if not np.all(np.isfinite(loss)):
        raise NonFiniteLossError("a privacy loss is not finite; nothing was certified")
    index = np.floor(loss / LOSS_BIN_WIDTH) + NUM_LOSS_BINS // 2
    # Clipped as floats: a huge loss has no integer.
    return np.bincount(np.clip(index, 0, NUM_LOSS_BINS - 1).astype(np.int64), minlength=NUM_LOSS_BINS)


def loss_bounds(direction: str) -> np.ndarray:
    """Return the pessimistic loss of each bin, (bins,) float64; infinite for the open end it must cover."""
    lower = (np.arange(NUM_LOSS_BINS) - NUM_LOSS_BINS // 2) * LOSS_BIN_WIDTH
    if direction == Direction.REMOVE:
        bounds = lower + LOSS_BIN_WIDTH
        bounds[-1] = np.inf
    else:
        bounds = lower
        bounds[0] = -np.inf
    return bounds


def finite_margin(margin: float) -> float:
    """Return the margin; `NonFiniteLossError` for NaN, infinity or a negative number."""
    if not 0 <= margin < math.inf:
        raise NonFiniteLossError(f"the margin for rounding is {margin!r}: nothing can be certified")
    return margin


def add_counts(counts, more):
    """Return the sums of histograms, one by one."""
    return tuple(more) if counts is None else tuple(map(np.add, counts, more))


def sparse_counts(counts: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return (index, count) pairs of the non-zero counts."""
    return tuple((int(i), int(counts[i])) for i in np.flatnonzero(counts))


def checked_counts(sparse, size: int, name: str) -> np.ndarray:
    """Return (size,) int64 counts from stored pairs of strictly ascending indices and counts above 0.

    ValueError, which names the field, for anything else: a repeated index would hide all but its last count.
    """
    counts, before, total = np.zeros(size, np.int64), -1, 0
    for pair in sparse:
        index, count = pair
        if type(index) is not int or type(count) is not int:
            raise ValueError(f"{name} must hold pairs of integers, held {pair!r}")
        if not before < index < size:
            raise ValueError(f"{name} must have strictly ascending indices below {size}, got {index}")
        total += count  # a Python integer, which cannot wrap around
        if not (count > 0 and total < 2**62):
            raise ValueError(f"{name} must have counts above 0, below 2^62 together, got {count} at {index}")
        counts[index], before = count, index
    return counts
