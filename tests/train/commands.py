"""Commands that train, run in this process with the modules of the package `train`, which tests change."""

import pytest

from jaxacct.cli import main as cli


def command(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and error of a command line."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        for name, where in cli.TRAINING.items():
            patch.setitem(cli.HOMES, name, where.removeprefix("jaxacct."))
        cli.main([str(word) for word in words])
    seen = capsys.readouterr()
    return ended.value.code, seen.out, seen.err
