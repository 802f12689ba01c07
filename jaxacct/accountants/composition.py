"""Composition with another mechanism, given as a dp-accounting event.

For independent mechanisms with pairs (P1, Q1) and (P2, Q2),
`H(P1 x P2, Q1 x Q2) = E_{P1}[ g2(epsilon - L1) ]`, `g2` being the privacy profile of the second at `e^t`.
So composing replaces the term `(1 - e^t)_+` by a tabulated profile, and everything else stays.

dp-accounting takes half a second to import, and most plans compose with nothing: it is imported where used.
"""

import functools
import json
from typing import Any

import numpy as np

from jaxacct.statistics.composed import TabulatedProfile

_ROUNDED_AWAY = 1e-12
_ABOVE_ONE = 1e-6
# Two sums of up to 2^23 numbers, each rounded to float64: 4 x 2^23 x 2^-53. A Gaussian with noise 0.05, which
# hides nothing, has a law of 8 million.
_SHARE_LOST = 2.0**-28
# Where the profile is tabulated, natural log: dense near zero, out to +-60.
_GRID = 60 * np.sinh(np.linspace(-8, 8, 1601)) / np.sinh(8)


def event_profile(event) -> TabulatedProfile:
    """An upper bound on the privacy profile of a `DpEvent`, both directions at once.

    Returns a function of float64 `t` (any shape) giving `delta(t)`: the larger of the two directions'
    hockey-stick divergences at `e^t`, from dp-accounting's pessimistic privacy loss distribution,
    interpolated in `e^t`, in which it is convex, so from above.

    Raises:
      ValueError: when dp-accounting's PLD accountant does not support the event.
    """
    from dp_accounting import dp_event, pld

    if not (isinstance(event, dp_event.DpEvent) and pld.PLDAccountant().supports(event)):
        raise ValueError(
            f"compose_with must be an event that dp-accounting's PLD accountant supports, was {event!r}"
        )
    return _tabulate(json.dumps(event_to_json(event)))


@functools.lru_cache(maxsize=8)
def _tabulate(event: str) -> TabulatedProfile:
    from dp_accounting import pld

    accountant: Any = pld.PLDAccountant()
    _compose(accountant, event_from_json(json.loads(event)))
    before = np.diff(_GRID, prepend=2 * _GRID[0] - _GRID[1])
    # All at once is a hundred times as fast as one by one: two running sums of the law's tail.
    asked, places = np.unique(np.concatenate([_GRID, _GRID - before]), return_inverse=True)
    found, at_before = np.split(np.asarray(accountant.get_delta(list(asked)), np.float64)[places], 2)
    values = found + _summing_error(at_before, before)
    values = np.minimum(np.maximum.accumulate(values[::-1])[::-1], 1.0)
    return TabulatedProfile(_GRID, values)


def _summing_error(at_before: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How far below exact the running sums of `get_delta` can be at each t of the grid.

    They are off by at most a share of the tail P(L > t) each, and with t' below t the tail is at most
    `delta(t') / (1 - e^(t' - t))`, as a loss beyond t contributes that much to delta(t').

    Args:
      at_before: delta(t') for t' = t - before.
    """
    return _SHARE_LOST * np.clip(at_before / -np.expm1(-before), 0.0, 1.0)


def composed_delta(events: list, epsilon: float, interval: float) -> float:
    """delta(epsilon) of events together, an upper bound by dp-accounting; losses on a grid of `interval`.

    Cached, as a plan computes its bound again.
    """
    return _composed(json.dumps([event_to_json(event) for event in events]), epsilon, interval)


def _compose(accountant, event) -> None:
    """Compose the event in; ValueError for numbers in it that dp-accounting refuses."""
    try:
        accountant.compose(event)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"compose_with must be an event that can be, was {event!r}: {error}") from None


@functools.lru_cache(maxsize=64)
def _composed(events: str, epsilon: float, interval: float) -> float:
    from dp_accounting import pld

    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for event in json.loads(events):
        _compose(accountant, event_from_json(event))
    delta = float(accountant.get_delta(epsilon))
    if 1 < delta < 1 + _ABOVE_ONE:
        return 1.0  # no delta is larger; with hardly any noise probabilities add up to a little more
    # A sum in float64 that ought to be 0 or next to it: what rounding may hide, and not a bound below 0.
    return _ROUNDED_AWAY if -_ROUNDED_AWAY < delta < 0 else delta


def event_to_json(event) -> dict | None:
    """A `DpEvent` as JSON values by its fields, None for None; ValueError where it has other values."""
    if event is None:
        return None
    import attrs

    fields = {field.name: _value_to_json(getattr(event, field.name)) for field in attrs.fields(type(event))}
    return {"kind": type(event).__name__, **fields}


def event_from_json(data: dict | None):
    """The inverse of `event_to_json`; ValueError for an unknown event or fields."""
    if data is None:
        return None
    from dp_accounting import dp_event

    fields = dict(data)
    kind = getattr(dp_event, str(fields.pop("kind", None)), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_event.DpEvent)):
        raise ValueError(f"compose_with must be an event of dp-accounting, was {data.get('kind')!r}")
    try:
        return kind(**{name: _value_from_json(value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"compose_with {data['kind']} has wrong fields: {error}") from None


def _value_to_json(value):
    from dp_accounting import dp_event

    if isinstance(value, dp_event.DpEvent):
        return event_to_json(value)
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_value_to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"compose_with holds a {type(value).__name__}, which cannot be written as JSON")


def _value_from_json(value):
    if isinstance(value, dict):
        return event_from_json(value)
    return [_value_from_json(item) for item in value] if isinstance(value, list) else value
