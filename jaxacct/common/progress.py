"""A progress line with a rate and a time left; silent when nobody watches."""

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, float], None]  # what, done, expected
PLAIN_SECONDS = 10.0
LINE_SECONDS = 0.5


@contextlib.contextmanager
def watch(enabled: bool | None = None, unit: str = "samples"):
    """Yield a `progress(what, done, expected)` callback, or None when it is turned off.

    Draws on standard error of a terminal, or in the cell of a notebook (one line of text where ipywidgets is
    not installed); elsewhere it says a line on standard error every `PLAIN_SECONDS`, whether it was called
    since or not.

    Args:
      enabled: True for the bar, False for nothing; by default what suits the output.
      unit: what is counted.
    """
    if enabled is False:
        yield None
        return
    if enabled is None and not somebody_watches():
        with _plain_lines(unit) as progress:
            yield progress
        return
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is None:
        # Rich would warn in every cell that it needs them.
        with _one_line(unit) as progress:
            yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=not _in_notebook())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, detail="")
        state: dict[str, Any] = {"what": None, "done": 0, "since": time.monotonic()}

        def progress(what: str, done: int, expected: float) -> None:
            now = time.monotonic()
            if what != state["what"]:
                state.update(what=what, done=done, since=now)
            rate = (done - state["done"]) / max(now - state["since"], 1e-9)
            known = 0 < expected < float("inf")
            bar.update(
                task,
                description=what,
                completed=done,
                total=max(expected, done) if known else None,
                detail=describe(done, expected, rate, unit),
            )

        yield progress


@contextlib.contextmanager
def _one_line(unit: str):
    """For cells without widgets: a line that is written over, and gone in the end."""
    state: dict = {"what": None, "first": 0, "since": 0.0, "shown": 0.0, "width": 0}

    def write(text: str) -> None:
        sys.stderr.write("\r" + text.ljust(state["width"]))
        sys.stderr.flush()
        state["width"] = len(text)

    def progress(what: str, done: int, expected: float) -> None:
        now = time.monotonic()
        if what != state["what"]:
            state.update(what=what, first=done, since=now)
        if now - state["shown"] < LINE_SECONDS:
            return
        rate = (done - state["first"]) / max(now - state["since"], 1e-9)
        write(", ".join([what, describe(done, expected, rate, unit)]))
        state["shown"] = now

    try:
        yield progress
    finally:
        if state["width"]:
            write("")
            sys.stderr.write("\r")


@contextlib.contextmanager
def _plain_lines(unit: str):
    """For logs: what takes long says so even while it computes in one piece."""
    started = time.monotonic()
    state: dict = {"what": "working", "done": 0, "expected": 0.0, "first": 0, "since": started}
    over = threading.Event()

    def speak():
        while not over.wait(PLAIN_SECONDS):
            now = time.monotonic()
            rate = (state["done"] - state["first"]) / max(now - state["since"], 1e-9)
            detail = describe(state["done"], state["expected"], rate, unit)
            parts = [state["what"], *([detail] if detail else []), f"{now - started:.0f} s so far"]
            print(f"jaxacct: {', '.join(parts)}", file=sys.stderr, flush=True)

    def progress(what: str, done: int, expected: float) -> None:
        if what != state["what"]:
            state.update(what=what, first=done, since=time.monotonic())
        state.update(done=done, expected=expected)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield progress
    finally:
        over.set()
        speaker.join(1)


def describe(done: int, expected: float, rate: float, unit: str = "samples") -> str:
    """ "12,288 samples, 11,300/s, about 0:42 left"; empty before the first."""
    if done == 0:
        return ""
    text = f"{done:,} {unit}"
    if rate > 0:
        text += f", {rate:,.0f}/s"
        if done < expected < float("inf"):
            minutes, seconds = divmod(round((expected - done) / rate), 60)
            text += f", about {minutes}:{seconds:02d} left"
    return text


def somebody_watches() -> bool:
    """Whether standard error is a terminal, or this a cell of a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    instance = shell.get_ipython() if shell else None
    return instance is not None and "IPKernelApp" in getattr(instance, "config", {})
