"""Bounds on what a list of events has spent: those of dp-accounting, or the numbers of DP-SGD runs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxacct.accountants.composition import Steps, composed_delta, composed_epsilon, steps_of
from jaxacct.common import validate as _validate


def delta(events: Sequence[Any], *, epsilon: float) -> float:
    """Return an upper bound on delta at `epsilon` of all events together.

    Neighbours differ by one record that is present or not (zero-out or add-or-remove-one), for which every
    event must hold. Events may depend on the outputs of those before them.

    Args:
      events: each a `dp_accounting.DpEvent`, or (noise multiplier, sampling probability, steps) of DP-SGD
        with Poisson sampling, as in the `history` of an accountant of Opacus.
      epsilon: nats, at least 0.

    Raises:
      ValueError: an event that is not covered, by its place in the list, or an epsilon below 0.

    >>> round(delta([(1.0, 0.01, 1000), (1.2, 0.01, 500)], epsilon=2.0), 8)
    3.4e-07
    """
    return composed_delta(_steps(events), _validate.epsilon(epsilon))


def epsilon(events: Sequence[Any], *, delta: float) -> float:
    """Return an upper bound on epsilon (nats) at `delta` of all events together, as `delta`.

    Infinite where nothing below 500 is shown.
    """
    return composed_epsilon(_steps(events), _validate.delta(delta))


def _steps(events: Sequence[Any]) -> Steps:
    """Return the steps of all events, equal ones as one."""
    if not isinstance(events, Sequence) or isinstance(events, str):
        raise ValueError(f"events must be a list, got {events!r:.80}")
    found: Counter = Counter()
    for place, event in enumerate(events):
        name = f"events[{place}]"
        for curves, count in steps_of(_event(event, name), name):
            found[curves] += count
    return tuple(found.items())


def _event(given, name: str):
    """Return the event of three numbers; another one as it is."""
    from dp_accounting import dp_event

    if isinstance(given, dp_event.DpEvent):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 3:
        raise ValueError(
            f"{name} must be an event of dp-accounting or (noise multiplier, sampling probability, steps), "
            f"got {given!r:.80}"
        )
    noise, probability, steps = given
    sampled = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(noise))
    return dp_event.SelfComposedDpEvent(sampled, steps)
