"""Command lines, run in this process, and what looks like an installation for those that are not."""

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


def link_installation(folder: Path) -> Path:
    """Make a folder to import from that has `jaxacct.train`, and no `train`."""
    root = Path(__file__).parents[1]
    (folder / "jaxacct").mkdir()
    for part in [*(root / "jaxacct").iterdir(), root / "train"]:
        (folder / "jaxacct" / part.name).symlink_to(part)
    return folder
