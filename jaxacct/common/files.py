"""Atomic file writes, JSON and checkpoints."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path, text: str, *, secret: bool = False) -> None:
    """Write `text` to `path`, atomically, as `write_bytes_atomically` does."""
    write_bytes_atomically(path, lambda file: file.write(text.encode()), secret=secret)


def write_bytes_atomically(path, write: Callable, *, secret: bool = False) -> None:
    """Write atomically what `write(file)` writes to a binary file.

    A link is followed and kept; an existing file keeps its mode, a new one has that of the umask, or 0600
    where it is `secret`. An OSError names `path`; nothing but a plain file is replaced.
    """
    try:
        _write_bytes(path, write, secret)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _write_bytes(path, write: Callable, secret: bool) -> None:
    path = Path(os.path.realpath(path))
    mode = _mode_of(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a plain file")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        elif not secret:
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def check_target(path, is_ours: Callable[[Path], bool] | None, kind: str, *, may_force: bool = True) -> None:
    """Check that a file can be written to `path`, before the work that produces it; leaves no trace.

    Messages name the argument `out`. An existing file is replaced if `is_ours` says so (None: any), which
    `kind` describes, such as "a plan"; `may_force` is whether the command has --force. ValueError in one
    line.
    """
    if path is None:
        return
    real = Path(os.path.realpath(path))
    try:
        mode = _mode_of(real)
        if mode is not None and not stat.S_ISREG(mode):
            kind_found = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise ValueError(f"out must be a file, {str(path)!r} is {kind_found}")
        if not real.parent.is_dir():
            raise ValueError(f"out must be in a folder that exists, got {str(path)!r}")
        if mode is not None and is_ours is not None and real.stat().st_size and not is_ours(real):
            way_out = " (--force replaces it)" if may_force else ""
            raise ValueError(f"out must be new or {kind}, {str(path)!r} is another file{way_out}")
        handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name[:100]}.", suffix=".tmp")
        os.close(handle)
        os.unlink(temporary)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"out {str(path)!r} cannot be written: {reason}") from None


def holds_schema(path: Path, schema: str) -> bool:
    """Return whether a file is a JSON object with this `schema`."""
    try:
        return read_json(path, "file").get("schema") == schema
    except ValueError:
        return False


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _umask() -> int:
    # It cannot be read without setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def to_json(data, **options) -> str:
    """Return JSON text; ValueError for NaN and infinity, which are not JSON."""
    return json.dumps(data, allow_nan=False, **options)


def json_digest(data) -> str:
    """Return the SHA-256 of JSON values, whatever the order of names: it detects accidents, not forgeries."""
    return hashlib.sha256(to_json(data, sort_keys=True).encode()).hexdigest()


def _refuse(constant: str):
    raise ValueError(f"{constant} is not a number that JSON has")


def _object(pairs: list) -> dict:
    """Return a JSON object; ValueError for a repeated key, for which readers differ."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice!r:.80} twice")
    return values


def read_json(path, what: str) -> dict:
    """Return the JSON object in `path`; ValueError naming `what` where it is missing or malformed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{what} {path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} {path} is not valid JSON (truncated?): {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} {path} must hold a JSON object, held a {type(data).__name__}")
    return data


class Checkpoint:
    """Folder that stores finished batches of one job at a time, locked against a second process.

    Entries are small JSON files named by stage; each is written atomically.

    Args:
      folder: made where it is missing.
      name: of the argument, for messages.

    Raises:
      ValueError: where it cannot be used, or another process uses it.
    """

    def __init__(self, folder, name: str = "checkpoint_dir"):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{name} {folder} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{name} {folder} is in use by another process") from None

    def load(self, name: str) -> dict | None:
        """Return the entry `name`, None if there is none; ValueError where it is damaged."""
        path = self.folder / f"{name}.json"
        return read_json(path, "checkpoint") if path.exists() else None

    def save(self, name: str, data: dict) -> None:
        """Replace the entry `name`."""
        write_atomically(self.folder / f"{name}.json", to_json(data))

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
