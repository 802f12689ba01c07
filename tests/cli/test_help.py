"""The help of every command: examples that can be read, required options first, plain defaults."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from jaxacct.cli import main as cli
from jaxacct.cli.usage import SYNONYMS, parse

COMMANDS = [[name] for name in cli.COMMANDS]
COMMANDS += [["tradeoff", name] for name in ("general", "last-iterate")]


def printed(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    seen = capsys.readouterr()
    assert (ended.value.code, seen.err) == (0, "")
    return seen.out


def read(words):
    """The command that a command line chooses."""
    return parse(cli.app_for(words[0] if words else None), words)


@pytest.mark.parametrize("group", [[], ["tradeoff"]], ids=["jaxacct", "jaxacct tradeoff"])
def test_without_a_command_the_help_is_printed(group, capsys):
    assert printed(group, capsys) == printed([*group, "--help"], capsys)


def test_the_help_of_a_command(capsys):
    for words in COMMANDS:
        text = printed([*words, "--help"], capsys)
        # Not `{None}|FLOAT (default: None)`, and no flags that are not set.
        assert not re.search(r"None|NoneType|default: (False|True)|\|FLOAT|NO-", text)
        for name in (name for name in SYNONYMS if name.startswith("--")):  # a hint names what it has
            with pytest.raises(ValueError) as caught:
                read([*words, name, "1"])
            hinted = re.search("did you mean ([a-z-]+)", str(caught.value))
            assert hinted is None or re.search(rf"(?<![a-z-]){hinted[1]}(?![a-z-])", text), caught.value
        for panel in text.split("╭─ ")[1:]:
            rows = [line[2:3] for line in panel.splitlines() if re.match(r"│ [* ]  [A-Z-]", line)]
            assert rows == sorted(rows, reverse=True), f"required options are not first: {panel}"
        panels = re.findall("╭─ ([A-Z][a-z ]*) ─", text)
        if words in (["calibrate"], ["recommend"]):
            search = ["Search"] if words == ["calibrate"] else []
            assert panels == ["Run", "Privacy target", *search, "Options"]


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_examples_can_be_read(words, capsys):
    """Each in the help is a command line that this version has, broken where a shell goes on reading."""
    lines = printed([*words, "--help"], capsys).splitlines()
    begins = [place for place, line in enumerate(lines) if line.startswith(" jaxacct ")]
    assert begins or words == ["tradeoff"]
    for place in begins:
        line = lines[place].strip()
        while line.endswith("\\"):
            place += 1
            line = line[:-1] + lines[place].strip()
        program, *given = shlex.split(line)
        assert program == "jaxacct" and given[: len(words)] == words and callable(read(given))


def test_train_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(cli.HOMES, "train", "jaxacct.no_such_module:train")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--plan", "plan.json"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "pip install 'jaxacct[train]'" in error and error.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.parametrize("asked", [False, True])
def test_no_colour_where_none_is_wanted(asked):
    """On a terminal; with the variable no escape code is printed at all."""
    pty = pytest.importorskip("pty")
    environment = {n: value for n, value in os.environ.items() if n != "NO_COLOR"} | {"TERM": "xterm"}
    environment |= {"NO_COLOR": "1"} if asked else {}
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "jaxacct", "--help"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = b""
    try:
        while part := os.read(main, 4096):
            text += part
    except OSError:  # the end of a terminal on Linux
        pass
    os.close(main)
    assert process.wait() == 0 and b"calibrate" in text
    assert (b"\x1b[" in text) != asked
