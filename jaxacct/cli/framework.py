"""A command line of several commands, whose bad input is one line in place of the boxes that tyro draws."""

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import types
import typing
from collections.abc import Callable, Mapping
from decimal import Decimal

import tyro

# What others call it.
ALSO_CALLED = {
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
    "bnb": "balls-in-bins",
    "bsr": "square-root",
    "sqrt": "square-root",
}
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d*)?)(?:[eE]\+?(\d{1,2}))?([kKM]?)")
_TIMES = {"": 0, "k": 3, "K": 3, "M": 6}


def parse(
    commands: Mapping[str, Callable[..., int]], arguments: list[str], *, prog: str, description: str | None
) -> Callable[[], int]:
    """The chosen command with its options, ready to be called.

    Raises:
      ValueError: in one line, for what cannot be read.
      SystemExit: after --help.
    """

    def later(command):
        @functools.wraps(command)
        def chosen(*args, **kwargs):
            return functools.partial(command, *args, **kwargs)

        return chosen

    box = io.StringIO()
    if arguments and arguments[0] in commands:
        arguments = _readable(commands[arguments[0]], arguments)
    try:
        with contextlib.redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(
                {name: later(command) for name, command in commands.items()},
                prog=prog,
                description=description,
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_unknown(commands, arguments) or _unboxed(box.getvalue(), prog)) from None


def nearest(word: str, known) -> str:
    """ " (did you mean X?)" where one of `known` is near, or called so elsewhere, or nothing."""
    known = list(known)
    other = ALSO_CALLED.get(word.lower().replace("_", "-"))
    if other and re.split("[, ]", other)[0] in known:
        return f" (did you mean {other}?)"
    found = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _readable(command, arguments: list[str]) -> list[str]:
    """The arguments with numbers such as 50k and 1e3 written out; ValueError for a choice that is none."""
    kinds, readable = _options(command), list(arguments)
    for place, argument in enumerate(arguments[1:], 1):
        flag, is_joined, value = argument.partition("=")
        at = place if is_joined else place + 1
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name not in kinds or at >= len(arguments):
            continue
        value = value if is_joined else arguments[at]
        written = _written_out(name, value, kinds[name])
        readable[at] = f"{flag}={written}" if is_joined else written
    return readable


def _written_out(name: str, value: str, kind) -> str:
    """The value of one option as tyro reads it; ValueError where it is none of the option's choices."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    members = [
        member for member in (typing.get_args(kind) if is_union else [kind]) if member is not type(None)
    ]
    if members and all(typing.get_origin(member) is typing.Literal for member in members):
        choices = [choice for member in members for choice in typing.get_args(member)]
        if value not in choices and not value.startswith("--"):
            allowed = ", ".join(map(str, choices))
            raise ValueError(f"{name} must be one of {allowed}, was {value!r:.80}{nearest(value, choices)}")
    found = _NUMBER.fullmatch(value)
    if found is None or str in members or not {int, float} & set(members):
        return value
    number = Decimal(found[1]).scaleb(int(found[2] or 0) + _TIMES[found[3]])
    if number == number.to_integral_value():
        return f"{number:.0f}"
    return str(number) if float in members else value


def _unknown(commands, arguments: list[str]) -> str | None:
    """The first command or flag that does not exist, with the nearest one that does."""
    command = arguments[0] if arguments else ""
    if command not in commands:
        return f"command must be one of {', '.join(commands)}, was {command!r}{nearest(command, commands)}"
    flags = [f"--{name.replace('_', '-')}" for name in [*_options(commands[command]), "help"]]
    for argument in arguments[1:]:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in flags:
            return f"{flag} is not an option of {command}{nearest(flag, flags)}"
    return None


def _options(command) -> dict[str, typing.Any]:
    """Types of a command's parameters by name; of a dataclass among them those of its fields."""
    hints = typing.get_type_hints(command)
    hints.pop("return", None)
    kinds = {}
    for name, kind in hints.items():
        kinds |= typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {name: kind}
    return kinds


def _unboxed(text: str, prog: str) -> str:
    """What a box of tyro says, up to its first rule."""
    said = []
    for line in text.splitlines():
        line = line.strip("│╭╮╰╯ ")
        if said and set(line) <= {"─"}:
            break
        if line and not line.startswith("─"):
            said.append(line)
    return " ".join(said) or f"the command line cannot be read; see {prog} --help"
