"""Checks of plain Python values, each failing with one line: the name, what is allowed, what it was."""

import math
import numbers

# Where arrays of that length, or their product with a block of samples, are beyond any machine.
_MOST = {"iterations": 2**20, "bands": 2**20, "examples_per_user": 1000}

MIN_SCALE, MAX_SCALE = 1e-30, 1e30
LEAST_NOISE, MOST_NOISE = 1e-9, 1e9  # whose squares float32 holds with room to spare


def positive_integer(name: str, value, *, minimum: int = 1) -> int:
    """Return `value` as an int from `minimum` to what can be computed with, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, was {_shown(value)}")
    most = _MOST.get(name, 2**50)
    number = int(value)
    if number > most:
        raise ValueError(f"{name} must be at most {most}, was {_shown(value)}")
    return number


def instance(name: str, value, kinds: type | tuple[type, ...], allowed: str):
    """Return `value` if it is one of `kinds`, which `allowed` says in words, or raise ValueError."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {allowed}, was {_shown(value)}")
    return value


def noise_multiplier(name: str, value) -> float:
    """Return `value` as a float whose square float32 holds with room to spare, or raise ValueError."""
    number = positive_number(name, value)
    if not LEAST_NOISE <= number <= MOST_NOISE:
        raise ValueError(f"{name} must be between 1e-9 and 1e9, was {_shown(value)}")
    return number


def positive_number(name: str, value) -> float:
    """Return `value` as a finite float above zero, or raise ValueError."""
    number = _number(name, value, "a finite number above 0")
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be a finite number above 0, was {_shown(value)}")
    return number


def scale(name: str, value) -> float:
    """Return `value` as a float in [1e-30, 1e30], or raise ValueError.

    For lengths, step sizes, noise and curvatures: within this range float64 holds the products, ratios and
    squares of the closed forms of `jaxacct.accountants.tradeoff`.
    """
    number = positive_number(name, value)
    if not MIN_SCALE <= number <= MAX_SCALE:
        raise ValueError(f"{name} must be in [1e-30, 1e30], was {_shown(value)}")
    return number


def scale_or_zero(name: str, value) -> float:
    """Return `value` as a float that is 0 or in [1e-30, 1e30], or raise ValueError."""
    return 0.0 if nonnegative_number(name, value) == 0 else scale(name, value)


def filter_budget(name: str, value) -> float:
    """Return `value` as a float in [1e-9, 1e9], or raise ValueError.

    Costs whose squares float32 takes for 0 are then below the slack of a filter for 2^31 steps together.
    """
    number = positive_number(name, value)
    if not LEAST_NOISE <= number <= MOST_NOISE:
        raise ValueError(f"{name} must be in [1e-9, 1e9], was {_shown(value)}")
    return number


def calibration_target(epsilon_name: str, epsilon, delta_name: str, delta) -> tuple[float, float]:
    """Return (epsilon, delta), epsilon in [0, 100] and delta in (0, 1), or raise ValueError."""
    found = nonnegative_number(epsilon_name, epsilon)
    return found and target_epsilon(epsilon_name, found), open_probability(delta_name, delta)


def target_epsilon(name: str, value) -> float:
    """Return `value` as a float in (0, 100], or raise ValueError; above that nothing is protected."""
    number = positive_number(name, value)
    if number > 100:
        raise ValueError(f"{name} must be at most 100, was {_shown(value)}")
    return number


def target(epsilon, delta, advantage=None) -> tuple[float, float]:
    """(epsilon, delta) as given, or (0, advantage): the divergence at epsilon 0 is the total variation, which
    is the largest advantage of any test (proofs/derivations.md section 4).

    Raises:
      ValueError: for numbers out of range, for both or for neither.
    """
    if advantage is None:
        if epsilon is None or delta is None:
            raise ValueError("epsilon and delta must be given, or advantage in their place")
        return target_epsilon("epsilon", epsilon), open_probability("delta", delta)
    if epsilon is not None or delta is not None:
        raise ValueError(
            "advantage must not be given together with epsilon or delta: it is a target by itself"
        )
    return 0.0, open_probability("advantage", advantage)


def nonnegative_number(name: str, value) -> float:
    """Return `value` as a finite float of at least zero, or raise ValueError."""
    number = _number(name, value, "a finite number of at least 0")
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, was {_shown(value)}")
    return number


def probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1] that 32 random bits can draw, or raise ValueError."""
    number = _number(name, value, "in (0, 1]")
    if 0 < number < 2.0**-32:
        raise ValueError(f"{name} must be at least 2^-32, the grid of the draws, was {_shown(value)}")
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be in (0, 1], was {_shown(value)}")
    return number


def open_probability(name: str, value) -> float:
    """Return `value` as a float in (0, 1), or raise ValueError."""
    number = _number(name, value, "in (0, 1)")
    if not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), was {_shown(value)}")
    return number


def one_of(name: str, value, allowed):
    """Return `value` if it is one of `allowed`, or raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, was {_shown(value)}")
    return value


def _number(name: str, value, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be {allowed}, was {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {allowed}, was {_shown(value)}") from None


def _shown(value) -> str:
    """`value` in one line that is not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_only(values):
    """Return the same NumPy array, marked as read-only."""
    values.setflags(write=False)
    return values
