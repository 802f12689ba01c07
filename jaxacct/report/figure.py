"""Figures of matplotlib, which is imported here alone; a figure as part of a page or as a file."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxacct.common.files import write_bytes_atomically

DARK, LIGHT = "#1f4e79", "#c55a11"
PALETTE = (DARK, LIGHT, "#3b7d23", "0.35", "#7030a0", "#0f9ed5")
# Distinguish lines and points without colour.
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 2, 1, 2, 1, 2)), (0, (8, 2)))
MARKERS = "osD^vP"
PANEL = 5.6, 4.2  # inches, of pictures that stand side by side
_LEGEND_ROWS, _HALF_LINE = 3, 42  # rows that every panel has room for; characters of half a row


def blank(width: float, height: float):
    """Return an empty figure, without a window; ValueError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot needs matplotlib: pip install 'jaxacct[plot]'") from None

    class Shown(Figure):
        """A figure that a notebook shows when a cell ends with it, whether pyplot was imported or not."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=80)
            return file.getvalue()

    figure = Shown(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def blank_axes(width: float, height: float):
    """Return an empty figure with one pair of axes, and these; ValueError as `blank`."""
    figure = blank(width, height)
    return figure, figure.add_subplot()


def finished(figure):
    """Return the figure with a grid and, below its last axes, a legend that hides no curve."""
    axes = figure.axes[-1]
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > _HALF_LINE else 2
    rows = max(_LEGEND_ROWS, -(-len(labels) // columns))
    height = figure.get_figheight()
    figure.set_layout_engine(None)  # panels with other legends are of the same size
    figure.subplots_adjust(left=0.14, right=0.96, top=1 - 0.35 / height, bottom=(0.6 + 0.18 * rows) / height)
    place = dict(loc="upper left", bbox_to_anchor=(0.1, (0.15 + 0.18 * rows) / height))
    figure.legend(handles, labels, ncols=columns, fontsize=8, frameon=False, **place)
    return figure


def svg(figure) -> str:
    """Return a figure as an `<svg>` element for a page, its text as text."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxacct"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def save(figure, path) -> None:
    """Write a figure as PNG, atomically."""
    write_bytes_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def style(index: int, colours=PALETTE) -> dict[str, Any]:
    """Return the colour of a line and its dash."""
    return dict(linestyle=DASHES[index % len(DASHES)], color=colours[index % len(colours)])


def tradeoff_figure(curves: Mapping[str, Callable], title: str, colours=PALETTE):
    """Return type II against type I error of several curves, the first one heavier."""
    figure, axes = blank_axes(5.2, 5.6)
    alphas = np.concatenate([[0.0], np.geomspace(1e-6, 0.01, 60), np.linspace(0.01, 1, 200)])
    axes.plot([0, 1], [1, 0], color="0.6", linestyle=":", label="perfect privacy")
    for index, (name, f) in enumerate(curves.items()):
        axes.plot(alphas, f(alphas), label=name, linewidth=1.5 if index else 2.4, **style(index, colours))
    axes.set(xlabel="type I error", ylabel="type II error", title=title, xlim=(0, 1), ylim=(0, 1))
    axes.set_aspect("equal")
    return finished(figure)
