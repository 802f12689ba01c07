"""Command lines, run in this process."""

import pytest

from jaxacct.cli import main as cli


def exit_code(*words) -> int:
    """The exit code of a command line; what it prints is left to `capsys`."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)
