"""Bounds on what is spent: by a list of events, or by the first steps of a run (proofs/events.md)."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxacct.accountants import analytic
from jaxacct.accountants.composition import Steps, composed_delta, composed_epsilon, steps_of
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.statistics.gaussian_mixtures import binomial

_MAX_GROUP = 1000


def delta(events: Sequence[Any], *, epsilon: float, group: int = 1) -> float:
    """Return an upper bound on delta at `epsilon` of all events together.

    Neighbours differ by one record, or a group of them, that is present or not (zero-out or
    add-or-remove-one), for which every event must hold. Events may depend on the outputs of those before
    them.

    Args:
      events: each a `dp_accounting.DpEvent`, or (noise multiplier, sampling probability, steps) of DP-SGD
        with Poisson sampling, as in the `history` of an accountant of Opacus.
      epsilon: nats, at least 0.
      group: largest number of records of a group, up to 1,000, each clipped by itself; above 1 for Gaussian
        events, sampled or not, and repetitions and lists of them.

    Returns:
      A number in [0, 1], next to 0 for no events.

    Raises:
      ValueError: an event that is not covered, named by its index, or an epsilon below 0.

    Source:
      proofs/events.md, proofs/composed_losses.md.

    >>> round(delta([(1.0, 0.01, 1000), (1.2, 0.01, 500)], epsilon=2.0), 8)
    1.424e-05
    """
    return composed_delta(_steps(events, group), _validate.nonnegative_number("epsilon", epsilon))


def epsilon(events: Sequence[Any], *, delta: float, group: int = 1) -> float:
    """Return an upper bound on epsilon at `delta` of all events together.

    Args:
      events: as of `delta`, for the same neighbours.
      delta: in (0, 1).
      group: as of `delta`.

    Returns:
      Nats; infinity where no epsilon up to 10,000 is proven.

    Raises:
      ValueError: an event that is not covered, named by its index, or a delta outside (0, 1).

    Source:
      proofs/events.md, proofs/composed_losses.md.

    >>> round(epsilon([(1.0, 0.01, 1000)], delta=1e-5, group=4), 2)
    8.9
    """
    return composed_epsilon(_steps(events, group), _validate.open_probability("delta", delta))


def first_steps(mechanism: Mechanism, steps: int) -> Mechanism | None:
    """Return a mechanism that reveals at least the first outputs of another one, None where none is known."""
    scheme, strategy = checked(mechanism).scheme, mechanism.strategy.of_first_steps()
    if _validate.positive_integer("steps", steps) > scheme.iterations:
        raise ValueError(f"steps must be at most the run's {scheme.iterations}, got {steps}")
    if strategy is None or not scheme.has_prefixes:
        return None
    fields: Any = scheme
    shorter = dataclasses.replace(fields, iterations=steps)
    return dataclasses.replace(mechanism, scheme=shorter, strategy=strategy)


def epsilon_of_first_steps(
    mechanism: Mechanism, steps: int, *, delta: float, largest: float, compose_with=None
) -> tuple[float, str | None]:
    """Return (upper bound on epsilon of the first `steps` outputs at `delta`, its accountant).

    Args:
      mechanism: of the whole run.
      steps: a number that is fixed before the run, or independent of the data.
      delta: without what is reserved for other failures, in [0, 1).
      largest: epsilon of the whole run, nats: never more than it, and it with None where no accountant shows
        less.
      compose_with: as of `calibrate`.

    Raises:
      ValueError: bad arguments.
    """
    part = first_steps(mechanism, steps)
    if part is None:
        return largest, None
    spent, accountant = analytic.epsilon_at(part, delta * (1 - 1e-12), compose_with, largest)
    return min(spent, largest), accountant


def _steps(events: Sequence[Any], group: int) -> Steps:
    """Return the steps of all events, equal ones as one."""
    if not isinstance(events, Sequence) or isinstance(events, str):
        raise ValueError(f"events must be a list, got {events!r:.80}")
    group = _validate.positive_integer("group", group)
    if group > _MAX_GROUP:
        raise ValueError(f"group must be at most {_MAX_GROUP}, got {group}")
    found: Counter = Counter()
    for place, event in enumerate(events):
        name = f"events[{place}]"
        for curves, count in steps_of(_of_group(_event(event, name), group, name), name):
            found[curves] += count
    return tuple(found.items())


def joined(events: Sequence[Any]):
    """Return one `dp_accounting.DpEvent` of a list as of `delta`, for `compose_with`.

    ValueError for an event that is not covered, named by its index.
    """
    from dp_accounting import dp_event

    _steps(events, 1)
    return dp_event.ComposedDpEvent([_event(one, f"events[{place}]") for place, one in enumerate(events)])


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


def _of_group(event, group: int, name: str):
    """Return the event for neighbours that differ by a group of records (proofs/events.md, section 2)."""
    from dp_accounting import dp_event

    if group == 1:
        return event
    match event:
        case dp_event.NoOpDpEvent() | dp_event.NonPrivateDpEvent():
            return event
        case dp_event.GaussianDpEvent():
            return dp_event.GaussianDpEvent(event.noise_multiplier / group)
        case dp_event.PoissonSampledDpEvent(event=dp_event.GaussianDpEvent()):
            q = _validate.probability(f"{name}.sampling_probability", event.sampling_probability)
            return dp_event.MixtureOfGaussiansDpEvent(event.event.noise_multiplier, *binomial(group, q))
        case dp_event.SelfComposedDpEvent():
            return dp_event.SelfComposedDpEvent(_of_group(event.event, group, name), event.count)
        case dp_event.ComposedDpEvent():
            return dp_event.ComposedDpEvent([_of_group(one, group, name) for one in event.events])
    raise ValueError(f"group must be 1 for {name}, a {type(event).__name__}, got {group}")
