"""Roots of monotone predicates and functions: every returned end has been evaluated.

A caller whose guarantee depends on the result takes the end at which the predicate holds. Where the side does
not matter use `scipy.optimize.brentq`; for integers `bisect.bisect_left(range(n), True, key=f)`.
"""

import math
from collections.abc import Callable


def bisect(
    is_past: Callable[[float], bool],
    low: float,
    high: float,
    *,
    absolute: float = 0.0,
    relative: float = 1e-14,
) -> tuple[float, float]:
    """Return the ends of a short interval in which a predicate turns from False at `low` to True at `high`.

    Neither end is evaluated again. The search stops at a width of `max(absolute, relative |high|)`, or where
    no float64 lies between the ends.
    """
    while high - low > max(absolute, relative * abs(high)):
        middle = math.sqrt(low * high) if 0 < 4 * low < high else (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if is_past(middle) else (middle, high)
    return low, high


def bracket(
    is_past: Callable[[float], bool],
    start: float,
    step: float,
    *,
    lowest: float = -math.inf,
    highest: float = math.inf,
) -> tuple[float, float]:
    """Return (low, high) with the predicate False at `low` and True at `high`, by doubled steps from `start`.

    Integers stay integers. `low` is -inf where the predicate is True at `lowest`, `high` is inf where it is
    False at `highest`.
    """
    was_past = is_past(start)
    near = start
    while near > lowest if was_past else near < highest:
        far = max(near - step, lowest) if was_past else min(near + step, highest)
        if is_past(far) != was_past:
            return (far, near) if was_past else (near, far)
        near, step = far, 2 * step
    return (-math.inf, near) if was_past else (near, math.inf)


def turn(
    is_past: Callable[[float], bool], start: float, step: float, lowest: float, highest: float, **width: float
) -> tuple[float, float]:
    """Return the interval of `bracket`, shortened to a `width` of `bisect` if both ends are finite."""
    low, high = bracket(is_past, start, step, lowest=lowest, highest=highest)
    return bisect(is_past, low, high, **width) if math.isfinite(low + high) else (low, high)


def root(
    excess: Callable[[float], float], low: float, high: float, near: float, relative: float = 1e-14
) -> tuple[float, float]:
    """Return the ends of a short interval in which an increasing function turns from below 0 to at least 0.

    Chandrupatla's method evaluates about a fifth of the points of `bisect`. It bisects wherever the inverse
    is not nearly a parabola. The function is negative at `low` > 0, at least 0 at `high`, possibly infinite,
    and evaluated at `near` first; the ends have a `relative` distance. ArithmeticError for NaN.

    Source: Chandrupatla, A new hybrid quadratic/bisection algorithm, 1997.
    """
    at = {low: -math.inf, high: math.inf}

    def narrowed(x):
        at[x] = excess(x)
        if math.isnan(at[x]):
            raise ArithmeticError(f"a bound could not be computed: nan at {x!r}")
        return (low, x) if at[x] >= 0 else (x, high)

    step = 1.25
    while low < near < high:  # by growing factors until the root has been passed
        low, high = narrowed(near)
        near, step = (near / step if high == near else near * step), step**2
    while 4 * low < high:
        low, high = narrowed(math.sqrt(low * high))
    newest, opposite, share = low, high, 0.5
    while high - low > relative * high:
        middle = newest + share * (opposite - newest)
        if not low < middle < high:
            break
        low, high = narrowed(middle)
        if (at[middle] >= 0) == (at[newest] >= 0):
            before = newest
        else:
            before, opposite = opposite, newest
        newest = middle
        # At least half the final width from either end.
        least = min(0.5, relative / 2 * high / (high - low))
        share = min(max(_inverse_parabola(at, newest, opposite, before), least), 1 - least)
    return low, high


def _inverse_parabola(at: dict[float, float], a: float, b: float, c: float) -> float:
    """Return where between a (0) and b (1) the inverse parabola of three points is 0; else 1/2."""
    of_a, of_b, of_c = at[a], at[b], at[c]
    if not all(map(math.isfinite, (of_a, of_b, of_c))) or of_a == of_c or of_b == of_c:
        return 0.5
    place, height = (a - b) / (c - b), (of_a - of_b) / (of_c - of_b)
    if not (height**2 < place and (1 - height) ** 2 < 1 - place):
        return 0.5
    first = of_a / (of_b - of_a) * of_c / (of_b - of_c)
    return first + (c - a) / (b - a) * of_a / (of_c - of_a) * of_b / (of_c - of_b)
