"""Progress bar with a rate and the remaining time; an occasional line without a terminal."""

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, float], None]  # what, done, expected
PLAIN_SECONDS = 10.0
ANNOUNCED = -1.0  # `expected` of a report that is a result, printed at once
UNITS = {"training": "steps"}  # of stages whose counter has another unit than its neighbours


def announce(progress: Progress, text: str) -> None:
    """Report a result, which `watch` prints at once and keeps."""
    progress(text, 0, ANNOUNCED)


@contextlib.contextmanager
def watch(unit: str = "samples"):
    """Yield a `progress(what, done, expected)` callback.

    Draws on standard error of a terminal, or in the cell of a notebook that has ipywidgets; elsewhere it
    writes a line to standard error every `PLAIN_SECONDS`, even between calls. `unit` is that of the counter,
    except for stages in `UNITS`.
    """
    # Without ipywidgets rich would warn in every cell that it needs them.
    has_bar = is_interactive() and not (_in_notebook() and importlib.util.find_spec("ipywidgets") is None)
    with _bar(unit) if has_bar else _plain_lines(unit) as progress:
        yield progress


def console(stderr: bool = False):
    """Return a rich console; its output has no colours and no bold text where NO_COLOR is set."""
    from rich.console import Console

    colours: Any = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(stderr=stderr, **colours)


class _State:
    """Last report of the running stage."""

    def __init__(self, unit: str):
        self.unit, self.what, self.done, self.expected = unit, "working", 0, 0.0
        self.first, self.since = 0, time.monotonic()

    def update(self, what: str, done: int, expected: float) -> None:
        if what != self.what:
            self.what, self.first, self.since = what, done, time.monotonic()
        self.done, self.expected = done, expected

    def describe(self) -> str:
        seconds = max(time.monotonic() - self.since, 1e-9)
        unit = UNITS.get(self.what, self.unit)
        return describe(self.done, self.expected, (self.done - self.first) / seconds, unit)


@contextlib.contextmanager
def _bar(unit: str):
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    description, detail = TextColumn("{task.description}"), TextColumn("{task.fields[detail]}")
    columns = description, BarColumn(), detail, TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=not _in_notebook()), transient=True) as bar:
        task, state = bar.add_task("starting", total=None, detail=""), _State(unit)

        def progress(what: str, done: int, expected: float) -> None:
            if expected == ANNOUNCED:
                bar.console.print(f"jaxacct: {what}", markup=False, highlight=False)
                return
            state.update(what, done, expected)
            total = max(expected, done) if 0 < expected < float("inf") else None
            bar.update(task, description=what, completed=done, total=total, detail=state.describe())

        yield progress


@contextlib.contextmanager
def _plain_lines(unit: str):
    """Yield a callback for logs: a long stage is reported even while it computes in one call."""
    started, over, state = time.monotonic(), threading.Event(), _State(unit)

    def speak():
        while not over.wait(PLAIN_SECONDS):
            parts = filter(None, [state.what, state.describe(), f"{time.monotonic() - started:.0f} s so far"])
            print(f"jaxacct: {', '.join(parts)}", file=sys.stderr, flush=True)

    def report(what: str, done: int, expected: float) -> None:
        if expected == ANNOUNCED:
            print(f"jaxacct: {what}", file=sys.stderr, flush=True)
        else:
            state.update(what, done, expected)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield report
    finally:
        over.set()
        speaker.join(1)


def describe(done: int, expected: float, rate: float, unit: str = "samples") -> str:
    """Return text such as "12,288 samples, 11,300/s, about 0:42 left"; empty before the first."""
    if done == 0:
        return ""
    text = f"{done:,} {unit}"
    if rate > 0:
        text += f", {rate:,.0f}/s"
        if done < expected < float("inf"):
            minutes, seconds = divmod(round((expected - done) / rate), 60)
            text += f", about {minutes}:{seconds:02d} left"
    return text


def is_interactive() -> bool:
    """Return whether standard error is a terminal, or this is a cell of a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    instance = shell.get_ipython() if shell else None
    return instance is not None and "IPKernelApp" in getattr(instance, "config", {})
