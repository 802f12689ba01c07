"""Checks of plain Python values, each failing with one line: the name, what is allowed, what it was."""

import math
import numbers


def positive_integer(name: str, value, *, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, was {value!r}")
    return int(value)


def positive_number(name: str, value) -> float:
    """Return `value` as a finite float above zero, or raise ValueError."""
    number = _number(name, value, "a finite number above 0")
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be a finite number above 0, was {value!r}")
    return number


def nonnegative_number(name: str, value) -> float:
    """Return `value` as a finite float of at least zero, or raise ValueError."""
    number = _number(name, value, "a finite number of at least 0")
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, was {value!r}")
    return number


def probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1], or raise ValueError."""
    number = _number(name, value, "in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be in (0, 1], was {value!r}")
    return number


def open_probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1), or raise ValueError."""
    number = _number(name, value, "in (0, 1)")
    if not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), was {value!r}")
    return number


def one_of(name: str, value, allowed):
    """Return `value` if it is one of `allowed`, or raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, was {value!r}")
    return value


def _number(name: str, value, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be {allowed}, was {value!r}")
    return float(value)
