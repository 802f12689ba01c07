"""Files: written whole, through links, beside devices, with their modes; never over what is not ours."""

import json
import os
import stat
import subprocess
import sys
import time

import pytest

from jaxacct.common import files, progress
from jaxacct.common.files import check_target, write_atomically
from tests.commands import exit_code
from tests.refusals import refused


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_link_is_written_through_and_stays_one(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "plan.json", tmp_path / "link.json"
    link.symlink_to("folder/plan.json")
    for text in ("first", "second"):  # to nothing yet, and to a file
        write_atomically(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert not target.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link.json"]


def test_nothing_but_a_plain_file_is_replaced(tmp_path):
    """A pipe in place of /dev/null, which a test had better not lose."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a plain file"):
        write_atomically(pipe, "text")
    refused(r"out must be a file, .*pipe' is a device or a pipe", check_target, pipe, None, "")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_modes(tmp_path):
    old, new, secret = tmp_path / "old", tmp_path / "new", tmp_path / "secret"
    old.write_text("x")
    os.chmod(old, 0o640)
    umask = os.umask(0o027)
    try:
        write_atomically(old, "y")
        write_atomically(new, "y")
        write_atomically(secret, "y", secret=True)
    finally:
        os.umask(umask)
    assert [mode(path) for path in (old, new, secret)] == [0o640, 0o640, 0o600]


def test_only_files_of_the_same_kind_are_replaced_unless_forced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, other, empty = (tmp_path / name for name in ("first", "other", "empty"))
    other.write_text("a thesis")
    empty.write_text("")
    given = "--scheme poisson --sampling-probability 0.1 --iterations 9 --epsilon 2 --delta 1e-3".split()

    def calibrate(*more):
        return exit_code("calibrate", *given, "--accountant", "unamplified", *more)

    assert calibrate("--out", "other") == 2
    assert other.read_text() == "a thesis"
    for path in (first, first, empty):
        assert calibrate("--out", path.name) == 0
        assert files.holds_schema(path, "jaxacct-plan")
    assert calibrate("--out", "other", "--force") == 0
    assert files.holds_schema(other, "jaxacct-plan")
    plan, result = tmp_path / "plan", tmp_path / "result"
    plan.write_text(json.dumps({"schema": "jaxacct-plan"}))
    result.write_text(json.dumps({"schema": "jaxacct-result"}))
    assert files.holds_schema(plan, "jaxacct-plan") and not files.holds_schema(result, "jaxacct-plan")


def test_the_target_is_tried_before_the_work(tmp_path, monkeypatch):
    """And leaves no trace. The root user may write anywhere, so the refusal is made."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    check_target(tmp_path / "new", None, "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    refused("cannot be written: No space left on device", lambda: check_target(tmp_path / "new", None, ""))


def test_a_plain_line_without_a_terminal(monkeypatch, capsys):
    """Said even while nothing calls; nothing is said of what is quick, and nothing after the end."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.05)
    with progress.watch() as report:
        assert report is not None
        report("remove", 0, 100)
        report("remove", 50, 100)
        deadline = time.monotonic() + 30
        said = ""
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
    lines = said.splitlines()
    assert all(line.startswith("jaxacct: remove, 50 samples") and " so far" in line for line in lines)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 10.0)
    with progress.watch():
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_python_m_jaxacct(arguments):
    done = subprocess.run([sys.executable, "-m", "jaxacct", *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(("jaxacct 0", "Usage: jaxacct"))
    assert done.stderr == ""


def test_ctrl_c_while_importing(tmp_path):
    """A module that stands for any of those imported, interrupted: one line and 130."""
    (tmp_path / "cyclopts.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from jaxacct.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "jaxacct: interrupted\n"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_json_has_no_name_for_is_no_json_here(number, tmp_path):
    (tmp_path / "plan.json").write_text(f'{{"epsilon": {number}}}')
    refused("not valid JSON", lambda: files.read_json(tmp_path / "plan.json", "plan"))


def test_one_folder_has_one_owner(tmp_path):
    """Two would write over each other's checkpoints; afterwards it is free again."""
    first = files.Checkpoint(tmp_path)
    refused("is in use by another process", files.Checkpoint, tmp_path)
    first.close()
    files.Checkpoint(tmp_path).close()
