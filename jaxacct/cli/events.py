"""Events of dp-accounting on the command line."""

import json
from typing import Annotated, Any, TypeAlias

from cyclopts import Parameter

from jaxacct.accountants.composition import event_from_json

Events: TypeAlias = Annotated[tuple[str, ...], Parameter(negative=())]  # of an option that may be repeated


def parsed(texts: tuple[str, ...]) -> list[Any]:
    """Return the events of `accountants.history` that texts stand for; ValueError for another text."""
    return [_event(text) for text in texts]


def _event(text: str):
    try:
        if text.lstrip().startswith("{"):
            return event_from_json(json.loads(text))
        noise, probability, steps = text.split(",")
        return float(noise), float(probability), int(steps)
    except ValueError as error:
        raise ValueError(
            f"event must be NOISE,RATE,STEPS or JSON of an event, got {text!r}: {error}"
        ) from None
