"""Files written whole or not at all."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old content or the new, never a part."""
    write_bytes_atomically(path, lambda file: file.write(text.encode()))


def write_bytes_atomically(path, write: Callable) -> None:
    """The same for what `write(file)` writes to a binary file."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_json(path, what: str) -> dict:
    """The JSON object in `path`; ValueError naming `what` when it is missing, truncated or another thing."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{what} {path} is not valid JSON (truncated?): {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} {path} must hold a JSON object, held a {type(data).__name__}")
    return data


class Checkpoint:
    """A folder that keeps finished batches of one job at a time, locked against a second process.

    Entries are small JSON files named by stage; each is written atomically.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"checkpoint_dir {folder} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"checkpoint_dir {folder} is in use by another process") from None

    def load(self, name: str) -> dict | None:
        """The entry `name`, None if there is none; ValueError when it is damaged."""
        path = self.folder / f"{name}.json"
        return read_json(path, "checkpoint") if path.exists() else None

    def save(self, name: str, data: dict) -> None:
        """Replace the entry `name`."""
        write_atomically(self.folder / f"{name}.json", json.dumps(data))

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
