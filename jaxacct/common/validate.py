"""Checks of plain Python values; each failure is one line: the name, the allowed values, the value."""

import math
import numbers
from collections.abc import Callable

# Largest integers: arrays of that length, or times a block of samples, exceed any machine.
MAX_SEPARATION = 2**24
_MOST = dict.fromkeys(("iterations", "bands"), 2**20) | {"examples_per_user": 1000}
_MOST |= dict.fromkeys("min_separation cycle_length epoch_steps steps_per_epoch".split(), MAX_SEPARATION)

MAX_EPSILON = 1e4  # of a target, nats
MIN_SCALE, MAX_SCALE = 1e-30, 1e30
MIN_NOISE, MAX_NOISE = 1e-9, 1e9  # their squares are well within float32


def positive_integer(name: str, value, *, minimum: int = 1) -> int:
    """Return `value` as an int from `minimum` to the largest supported one, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {_shown(value)}")
    maximum = _MOST.get(name, 2**50)
    number = int(value)
    if number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {_shown(value)}")
    return number


def instance(name: str, value, kinds: type | tuple[type, ...], allowed: str):
    """Return `value` if it is one of `kinds`, described by `allowed`, or raise ValueError."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")
    return value


def positive_number(name: str, value) -> float:
    """Return `value` as a finite float above zero, or raise ValueError."""
    return _within(name, value, "a finite number above 0", lambda x: 0 < x < math.inf)


def nonnegative_number(name: str, value) -> float:
    """Return `value` as a finite float of at least zero, or raise ValueError."""
    return _within(name, value, "a finite number of at least 0", lambda x: 0 <= x < math.inf)


def open_probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1), or raise ValueError."""
    return _within(name, value, "in (0, 1)", lambda x: 0 < x < 1)


def probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1] that 32 random bits can draw, or raise ValueError."""
    number = _within(name, value, "in (0, 1]", lambda x: 0 < x <= 1)
    return _within(name, number, "at least 2^-32, the grid of the draws", lambda x: x >= 2.0**-32)


def noise_multiplier(name: str, value) -> float:
    """Return `value` as a float whose square is well within float32, or raise ValueError."""
    number = positive_number(name, value)
    return _within(name, number, "between 1e-9 and 1e9", lambda x: MIN_NOISE <= x <= MAX_NOISE)


def scale(name: str, value) -> float:
    """Return `value` as a float in [1e-30, 1e30], or raise ValueError.

    For lengths, step sizes, noise and curvatures: within this range float64 holds the products, ratios and
    squares of the closed forms of `jaxacct.accountants.tradeoff`.
    """
    number = positive_number(name, value)
    return _within(name, number, "in [1e-30, 1e30]", lambda x: MIN_SCALE <= x <= MAX_SCALE)


def scale_or_zero(name: str, value) -> float:
    """Return `value` as a float that is 0 or in [1e-30, 1e30], or raise ValueError."""
    return 0.0 if nonnegative_number(name, value) == 0 else scale(name, value)


def target(of_epsilon, of_delta, names=("epsilon", "delta"), *, above_0: bool = False) -> tuple[float, float]:
    """Return (epsilon, delta) of a calibration, or raise ValueError with these names.

    Epsilon is in [0, 10,000], or in (0, 10,000] for `above_0`.
    """
    number = (positive_number if above_0 else nonnegative_number)(names[0], of_epsilon)
    number = _within(names[0], number, f"at most {MAX_EPSILON:g}", lambda x: x <= MAX_EPSILON)
    return number, open_probability(names[1], of_delta)


def one_of(name: str, value, allowed):
    """Return `value` if it is one of `allowed`, or raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {_shown(value)}")
    return value


def set_fields(record, **values) -> None:
    """Set fields of a frozen dataclass, which its `__post_init__` has checked or computed."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def check_fields(record, **checks: Callable) -> None:
    """Replace fields of a frozen dataclass by what their checks return: (name, value) -> value."""
    set_fields(record, **{name: check(name, getattr(record, name)) for name, check in checks.items()})


def array(name: str, value, dimensions: tuple[int, ...]):
    """Return a float64 copy; ValueError for another number of dimensions or kind of numbers."""
    import numpy as np  # other checks do without

    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.ndim not in dimensions:
        raise ValueError(
            f"{name} must be an array of numbers with {' or '.join(map(str, dimensions))} dimensions, "
            f"got {array.dtype} of shape {array.shape}"
        )
    return np.array(array, np.float64)


def _within(name: str, value, allowed: str, holds) -> float:
    """Return `value` as a float for which `holds` is true; false for NaN."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_real else math.nan
    except OverflowError:
        number = math.nan
    if not holds(number):
        raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")
    return number


def _shown(value) -> str:
    """Return `value` as short text in one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def read_only(values):
    """Return the same NumPy array, marked as read-only."""
    values.setflags(write=False)
    return values
