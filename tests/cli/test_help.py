"""The help of every command: examples that can be read, required options first, plain defaults."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from jaxacct.cli import main as cli
from jaxacct.cli.examples import EXAMPLES
from jaxacct.cli.usage import SYNONYMS, examples, parse, single
from jaxacct.common.progress import console
from train.__main__ import main as train_main
from train.__main__ import train
from train.audit import command as audit
from train.batches import attribution

OF_TRAINING = {
    "train": train,
    "audit": audit.run,
    "attribution": attribution.prepare,
}
COMMANDS = [name.removeprefix("jaxacct").split() for name in EXAMPLES if name.startswith("jaxacct")]


def printed(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    seen = capsys.readouterr()
    assert (ended.value.code, seen.err) == (0, "")
    return seen.out


def read(words):
    """The command that a command line chooses."""
    if command := OF_TRAINING.get(words[0]):
        return parse(single(command, ""), words[1:])
    return parse(cli.app_for(words[0]), words)


@pytest.mark.parametrize("group", [[], ["tradeoff"]], ids=["jaxacct", "jaxacct tradeoff"])
def test_without_a_command_the_help_is_printed(group, capsys):
    assert printed(group, capsys) == printed([*group, "--help"], capsys)


def test_every_command_has_examples():
    assert {words[0] for words in COMMANDS if words} == set(cli.COMMANDS)


def test_the_help_of_a_command(capsys):
    for words in COMMANDS:
        text = printed([*words, "--help"], capsys)
        assert text.endswith(examples(" ".join(["jaxacct", *words])) + "\n") and "Examples:" in text
        # Not `{None}|FLOAT (default: None)`, and no flags that are not set.
        assert not re.search(r"None|NoneType|default: (False|True)|\|FLOAT|NO-", text)
        for name in (name for name in SYNONYMS if name.startswith("--")):  # a hint names what it has
            with pytest.raises(ValueError) as refused:
                read([*words, name, "1"])
            hinted = re.search("did you mean ([a-z-]+)", str(refused.value))
            assert hinted is None or re.search(rf"(?<![a-z-]){hinted[1]}(?![a-z-])", text), refused.value
        for panel in text.split("╭─ ")[1:]:
            rows = [line[2:3] for line in panel.splitlines() if re.match(r"│ [* ]  [A-Z-]", line)]
            assert rows == sorted(rows, reverse=True), f"required options are not first: {panel}"
        panels = re.findall("╭─ ([A-Z][a-z ]*) ─", text)
        if words in (["calibrate"], ["recommend"]):
            search = ["Search"] if words == ["calibrate"] else []
            assert panels == ["Run", "Privacy target", *search, "Options"]


def test_examples_can_be_read():
    """Each is a command line that this version has; long ones are broken where a shell goes on reading."""
    for command in EXAMPLES:
        lines = EXAMPLES[command].strip().splitlines()
        shown = re.sub(r" \\\n\s*", " ", examples(command)).splitlines()
        assert [line.strip() for line in shown[2:]] == lines and lines
        assert max(map(len, examples(command).splitlines())) <= 80
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "jaxacct" and callable(read(words))


def test_train_is_the_command_of_the_module(capsys):
    """The same options, codes and messages."""
    text = printed(["train", "--help"], capsys)
    with pytest.raises(SystemExit):
        train_main(["--help"])
    assert capsys.readouterr().out == text
    for words in (["--plan", "/no/such/plan.json", "--out", "x"], ["--nonsense"], []):
        ended = []
        for run in (lambda words=words: cli.main(["train", *words]), lambda words=words: train_main(words)):
            with pytest.raises(SystemExit) as caught:
                run()
            ended.append((caught.value.code, *capsys.readouterr()))
        assert ended[0] == ended[1] and ended[0][0] == 2 and ended[0][2].count("\n") == 1


def test_train_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(cli.TRAINING, "train", "jaxacct.no_such_module:train")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--plan", "plan.json"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "pip install 'jaxacct[train]'" in error and error.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.parametrize("asked", [False, True])
def test_no_colour_where_none_is_wanted(asked):
    """On a terminal; with the variable no escape code is printed at all."""
    pty = pytest.importorskip("pty")
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {
        "TERM": "xterm"
    }
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


def test_progress_obeys_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console().color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert console(stderr=True).color_system is None
