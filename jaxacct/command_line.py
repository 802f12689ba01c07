"""A command line of several commands, whose bad input is one line in place of the boxes that tyro draws."""

import contextlib
import dataclasses
import difflib
import functools
import io
import typing
from collections.abc import Callable, Mapping

import tyro


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
    """ " (did you mean X?)" where one of `known` is near, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


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


def _options(command) -> list[str]:
    """Names of a command's parameters; of a dataclass among them those of its fields."""
    hints = typing.get_type_hints(command)
    hints.pop("return", None)
    names = []
    for name, kind in hints.items():
        is_record = dataclasses.is_dataclass(kind)
        names += [field.name for field in dataclasses.fields(kind)] if is_record else [name]
    return names


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
