"""Command lines, run in this process, and what looks like an installation for those that are not."""

import json
from pathlib import Path

import pytest

from jaxacct.cli import main as cli


def exit_code(*words) -> int:
    """The exit code of a command line; what it prints is left to `capsys`."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)


def command(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and error of a command line, with the modules of `train`, which tests change."""
    with pytest.MonkeyPatch.context() as patch:
        for name, where in cli.TRAINING.items():
            patch.setitem(cli.HOMES, name, where.removeprefix("jaxacct."))
        code = exit_code(*words)
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def printed(capsys, *words) -> str:
    """What a command line prints that ends well and says nothing on errors."""
    code = exit_code(*words)
    seen = capsys.readouterr()
    assert (code, seen.err) == (0, "")
    return seen.out


def values_of(capsys, *words) -> dict:
    """The object that a command line prints with --json."""
    assert exit_code(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words, code=2) -> str:
    """The line with which a command line is refused, or with another code ends."""
    assert exit_code(*words) == code
    line = capsys.readouterr().err
    assert line.startswith("jaxacct: ") and line.count("\n") == 1, line
    return line


def link_installation(folder: Path) -> Path:
    """Make a folder to import from that has `jaxacct.train`, and no `train`."""
    root = Path(__file__).parents[1]
    (folder / "jaxacct").mkdir()
    for part in [*(root / "jaxacct").iterdir(), root / "train"]:
        (folder / "jaxacct" / part.name).symlink_to(part)
    return folder
