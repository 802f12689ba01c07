"""Checked float64 arrays and a bisection of all their entries at once."""

from typing import Any

import numpy as np

from jaxacct.common import validate as _validate


def checked(name: str, value, allowed: str, accept) -> np.ndarray:
    """Return `value` as a float64 array; ValueError unless `accept` holds for every entry."""
    if isinstance(value, (bool, str)) or value is None:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    try:
        entries = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    with np.errstate(invalid="ignore"):
        good = np.asarray(accept(entries))
    if entries.size == 0 or not good.all():
        raise ValueError(
            f"{name} must be {allowed}, got {entries[~good].flat[0] if entries.size else 'empty'}"
        )
    return entries


def scale(name: str, value, *, zero: bool = False) -> np.ndarray:
    """Return entries in [1e-30, 1e30], or 0 where `zero` allows it (`_validate.scale`)."""

    def accept(entries):
        inside = (entries >= _validate.MIN_SCALE) & (entries <= _validate.MAX_SCALE)
        return inside | (entries == 0) if zero else inside

    return checked(name, value, "0 or in [1e-30, 1e30]" if zero else "in [1e-30, 1e30]", accept)


def share(name: str, value) -> np.ndarray:
    """Return entries in [0, 1]: type I errors, probabilities."""
    return checked(name, value, "in [0, 1]", lambda entries: (entries >= 0) & (entries <= 1))


def nonnegative(name: str, value) -> np.ndarray:
    """Return entries of at least 0, possibly infinite: epsilons and Gaussian parameters."""
    return checked(name, value, "at least 0", lambda entries: entries >= 0)


def open_share(name: str, value) -> np.ndarray:
    """Return entries strictly between 0 and 1: targets for delta."""
    return checked(name, value, "in (0, 1)", lambda entries: (entries > 0) & (entries < 1))


def plain(value) -> Any:
    """Return an array without axes as a float, other values unchanged."""
    return float(value) if np.ndim(value) == 0 else value


def log_of_positive(value) -> np.ndarray:
    """Return the natural log of each entry above 0, and -inf for the others."""
    value = np.asarray(value)
    return np.where(value > 0, np.log(np.where(value > 0, value, 1.0)), -np.inf)


def bisect(above, low, high) -> tuple[np.ndarray, np.ndarray]:
    """Return `(low, high)` around the point where `above(x)` turns from True to False, for every entry.

    `above` must hold at `low` and not at `high` (otherwise the ends are returned).
    """
    low, high = np.broadcast_arrays(low, high)
    for _ in range(110):
        middle = low + (high - low) / 2
        is_above = above(middle)
        ends = np.where(is_above, middle, low), np.where(is_above, high, middle)
        if np.array_equal(ends[0], low) and np.array_equal(ends[1], high):
            break  # no float64 lies between them
        low, high = ends
    return low, high
