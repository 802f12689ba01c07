"""Command lines by cyclopts, whose usage errors become one line; numbers such as 50k and 1e3."""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter

from jaxacct.common.progress import console

SYNONYMS = {  # what other libraries call options and values of this command line
    "--epochs": "--iterations, which are steps: epochs times dataset_size / batch_size",
    "--steps": "--iterations",
    "--num-steps": "--iterations",
    "--eps": "--epsilon",
    "--sigma": "--noise-multiplier",
    "--noise": "--noise-multiplier",
    "--sampling-rate": "--sampling-probability",
    "--sample-rate": "--sampling-probability",
    "--num-examples": "--dataset-size",
    "--examples": "--dataset-size",
    "--output": "--out",
    "--matrix": "--strategy",
    "--sampler": "--scheme",
    "dp-sgd": "poisson, with --bands 1",
    "dpsgd": "poisson, with --bands 1",
    "bandmf": "b-min-sep",
    "bminsep": "b-min-sep",
    "bnb": "balls-in-bins",
    "bsr": "square-root",
    "sqrt": "square-root",
}
_SUFFIXES = {"k": 1000, "K": 1000, "M": 1_000_000}
_MAX_DIGITS = 100


def new_app(name: str, description: str | None, **options) -> App:
    """Return a command line without commands, whose flags have no opposite (no --no-json).

    Its help has no escape codes where NO_COLOR asks for that.
    """
    flags = Parameter(negative=(), show_default=_shown_default)
    options |= {"console": console()} if os.environ.get("NO_COLOR") else {}
    looks: dict[str, Any] = dict(help_format="markdown", group_parameters=_OPTIONS)
    return App(name=name, help=description, default_parameter=flags, **looks, **options)


def _shown_default(value) -> str | None:
    """Return a default for the help; a flag that is not set and an option left out have none."""
    return None if value is None or value is False else str(value)


def parse(app: App, arguments: list[str]) -> Callable[[], int | None]:
    """Return the chosen command with its options, ready to be called, or what prints help."""
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ValueError(f"{error}{hint(arguments, _offered(error.app))}") from None
    return lambda: command(*bound.args, **bound.kwargs)


def hint(words: list[str], offered: Collection[str]) -> str:
    """Return what is `offered` for the first word that has another name here, or nothing."""
    for word in words:
        name = word.partition("=")[0] if word.startswith("--") else word
        meant = SYNONYMS.get(name.lower(), "")
        if name not in offered and meant.partition(",")[0] in offered:
            return f" ({name}: did you mean {meant}?)"
    return ""


def _offered(app: App | None) -> set[str]:
    """Return the options of a command and the values that they have; empty for a group of commands."""
    if app is None or app.default_command is None:
        return set()
    arguments = app.assemble_argument_collection()
    return {name for one in arguments for name in (*one.names, *(one.get_choices() or ()))}


def _decimal(text: str) -> Decimal | None:
    scale = _SUFFIXES.get(text[-1:], 1)
    try:
        number = Decimal(text if scale == 1 else text[:-1])
        return number if scale == 1 else number * scale
    except ArithmeticError:
        return None


def _integer(_, tokens) -> int:
    number = _decimal(tokens[0].value)
    if number is None or not number.is_finite() or number.adjusted() > _MAX_DIGITS or number != int(number):
        raise ValueError(f"must be an integer such as 50000, 50k or 5e4, got {tokens[0].value!r:.80}")
    return int(number)


def _number(_, tokens) -> float:
    number = _decimal(tokens[0].value)
    if number is None:
        raise ValueError(f"must be a number such as 0.1, 1e-5 or 50k, got {tokens[0].value!r:.80}")
    return float(number)


Integer = Annotated[int, Parameter(converter=_integer)]
Number = Annotated[float, Parameter(converter=_number)]
Flat = Parameter(name="*")  # of a dataclass whose fields are options of the command
_RUN, _TARGET, _SEARCH, _OPTIONS = (
    Group(name, sort_key=place) for place, name in enumerate(("Run", "Privacy target", "Search", "Options"))
)
OfRun = Parameter(group=_RUN)  # of an option that comes first in a help
OfTarget, OfSearch = Parameter(name="*", group=_TARGET), Parameter(name="*", group=_SEARCH)
"""Of dataclasses whose fields are options of these groups."""
_READ: dict[Any, Any] = {int: Integer, float: Number, int | None: Integer | None, float | None: Number | None}
_READ[str | Path | None] = str | None


def options_of(kind: type, without: tuple[str, ...] = (), **defaults) -> type:
    """Return a dataclass whose fields are options: those of the dataclass `kind`, but for some of them.

    Their help is in the docstring of `kind`, and numbers are written as on every command line. `defaults`
    are those of fields without any, or other ones.
    """
    lines = re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    words = {name: " ".join(text.split()) for names, text in lines for name in names.split(", ")}
    hints, fields = get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        if field.name in without:
            continue
        hint: Any = _READ.get(hints[field.name], hints[field.name])
        default: Any = defaults.get(field.name, field.default)
        hint = hint if default is not None else hint | None
        help_line = Parameter(help=words[field.name])
        fields.append((field.name, Annotated[hint, help_line], dataclasses.field(default=default)))
    fields.sort(key=lambda field: field[2].default is not dataclasses.MISSING)  # required ones first
    made = dataclasses.make_dataclass(f"{kind.__name__}Options", fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # or cyclopts sees no fields
    return made
