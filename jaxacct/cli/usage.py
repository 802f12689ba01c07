"""Command lines by cyclopts, whose usage errors become one line; numbers such as 50k and 1e3."""

from collections.abc import Callable
from decimal import Decimal
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

SYNONYMS = {
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
"""What other libraries call options and values of this command line."""
_SUFFIXES = {"k": 1000, "K": 1000, "M": 1_000_000}
_MAX_DIGITS = 100


def new_app(name: str, description: str | None, **options) -> App:
    """Return a command line without commands, whose flags have no opposite (no --no-json)."""
    flags = Parameter(negative=())
    return App(name=name, help=description, help_format="markdown", default_parameter=flags, **options)


def single(command: Callable[..., int | None], name: str, description: str | None = None) -> App:
    """Return a command line of one command; its flag --x has the opposite --no-x."""
    app = App(name=name, help=description, help_format="markdown")
    app.default(command)
    return app


def parse(app: App, arguments: list[str]) -> Callable[[], int | None]:
    """Return the chosen command with its options, ready to be called; of --help, what prints it.

    Raises:
      ValueError: in one line, for arguments that cannot be read.
    """
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ValueError(f"{error}{hint(arguments)}") from None
    if command == app.help_print and not {"--help", "-h"} & {*arguments}:
        raise ValueError(f"a command must be given: see {' '.join([*app.name, *arguments])} --help")
    return lambda: command(*bound.args, **bound.kwargs)


def hint(words: list[str]) -> str:
    """Return what this command line calls the first word that has another name here, or nothing."""
    for word in words:
        name = word.partition("=")[0] if word.startswith("--") else word
        if name.lower() in SYNONYMS:
            return f" ({name}: did you mean {SYNONYMS[name.lower()]}?)"
    return ""


def _decimal(text: str) -> Decimal | None:
    scale = _SUFFIXES.get(text[-1:], 1)
    try:
        found = Decimal(text if scale == 1 else text[:-1])
        return found if scale == 1 else found * scale
    except ArithmeticError:
        return None


def _integer(_, tokens) -> int:
    found = _decimal(tokens[0].value)
    if found is None or not found.is_finite() or found.adjusted() > _MAX_DIGITS or found != int(found):
        raise ValueError(f"must be an integer such as 50000, 50k or 5e4, got {tokens[0].value!r:.80}")
    return int(found)


def _number(_, tokens) -> float:
    found = _decimal(tokens[0].value)
    if found is None:
        raise ValueError(f"must be a number such as 0.1, 1e-5 or 50k, got {tokens[0].value!r:.80}")
    return float(found)


Integer = Annotated[int, Parameter(converter=_integer)]
Number = Annotated[float, Parameter(converter=_number)]
Flat = Parameter(name="*")
"""Of a dataclass whose fields are options of the command."""
